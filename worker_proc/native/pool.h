// The pool of keys and values, kept in the form in which attention multiplies them.
//
// What a change must not break: a cell is written alone, whatever other threads write beside it at the same time.
#pragma once

#include "rows.h"

namespace tandem {

constexpr int64_t kTileCells = 16;
constexpr int64_t kBlockCells = 64;  // of one head, side by side, so that neighbouring cells are read as one stream

// A head's elements in whole cache lines of words.
constexpr int64_t padded(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

template <class T>
int64_t tile_words(int64_t head_dim) {
  return words_of<T>(padded(head_dim)) * kTileCells;
}

// One head's cells in one layer.
//
// tiled: 16 neighbouring cells are one tile. Of keys, [words of head_dim][16 cells]: the columns of a product. Of values,
// [16 cells / those of a word][padded head_dim]: the rows of one, where a word of bfloat16 holds the same element of two cells,
// the even one in the low half. Else each cell is a row of its own, to be packed so where it is used.
template <class T>
struct HeadCells {
  using Element = typename T::Element;

  uint32_t *keys, *values;
  int64_t num_kv_heads, head_dim;
  bool tiled;

  // Where a cell begins, or the tile that it is of.
  const uint32_t* keys_of(int64_t cell) const { return keys + offset(cell); }
  const uint32_t* values_of(int64_t cell) const { return values + offset(cell); }

  // key, value: [head_dim]
  void put(int64_t cell, const Element* key, const Element* value) const {
    int64_t place = tiled ? cell % kTileCells : 0, step = tiled ? kTileCells : 1;
    uint32_t* to = keys + offset(cell) + place;
    for (int64_t k = 0; k < words_of<T>(head_dim); k++) to[k * step] = load<uint32_t>(key + k * T::kPerWord);
    uint32_t* at = values + offset(cell) + place / T::kPerWord * padded(head_dim);
    if constexpr (T::kPerWord == 2) {
      if (tiled) return put_halves(at, place % 2, value, head_dim);
    }
    std::memcpy(at, value, head_dim * sizeof(Element));
  }

 private:
  int64_t offset(int64_t cell) const {
    int64_t within = tiled ? cell % kBlockCells / kTileCells * kTileCells : cell % kBlockCells;
    return (cell / kBlockCells * num_kv_heads * kBlockCells + within) * words_of<T>(padded(head_dim));
  }
};

// Keys and values of all layers: each [num_layers][num_blocks][num_kv_heads][64 cells], so that the pool fills from its begin,
// in large pages.
template <class T>
struct Pool {
  uint32_t *keys, *values;
  int64_t num_blocks, num_kv_heads, head_dim;
  bool tiled;

  int64_t num_cells() const { return num_blocks * kBlockCells; }

  HeadCells<T> head(int64_t layer, int64_t head) const {
    int64_t first = (layer * num_blocks * num_kv_heads + head) * kBlockCells * words_of<T>(padded(head_dim));
    return {keys + first, values + first, num_kv_heads, head_dim, tiled};
  }
};

}  // namespace tandem
