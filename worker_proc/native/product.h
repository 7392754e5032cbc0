// The tile that every product is made of: a few rows of activations times 32 columns of packed weights.
//
// What a change must not break:
// - One element of the result is one chain of multiply-adds over k = 0, 1, 2, …: never split, never reordered by the number of
//   rows. So a row's result is the same bits alone, in any batch, at any place in it and with any number of threads.
// - Packed weights: [ceil(columns / 32)][words][32] words; columns past the last one are zero.
#pragma once

#include <algorithm>
#include <utility>

#include "vector.h"

namespace tandem {

constexpr int64_t kColumns = 32;                 // of a packed block
constexpr int kWide = 2;                         // registers of columns computed at once
constexpr int kPassColumns = kWide * kLanes;     // a block takes kColumns / kPassColumns passes
constexpr int kMaxRows = kLanes == 16 ? 12 : 4;  // of a tile, whose sums fill the registers
constexpr int kUnroll = 8;                       // words of k per turn of the inner loop
constexpr int64_t kAheadBytes = 8 << 10;         // how far weights are prefetched

// Activations: rows of words, `stride` words apart. Give the stride one cache line more than the rows fill, so that a tile's
// rows don't all fall into one set of the cache.
struct RowWords {
  const uint32_t* words;
  int64_t stride;
};

// Asks for two cache lines with every word of k, so that memory works while the tile computes. Here: weights to come.
struct WeightsAhead {
  const char* at;

  void operator()(int64_t k) const {
    // Into L2: in L1 they would drive out the rows before their turn comes.
    __builtin_prefetch(at + k * kColumns * 4, 0, 2);
    __builtin_prefetch(at + k * kColumns * 4 + 64, 0, 2);
  }
};

// sums[r][c] = the sum over k of rows[r][k] · weights[k][c], for ROWS rows and kPassColumns columns.
template <class T, class Ahead, int ROWS>
void tile(const uint32_t* weights, int64_t words, RowWords rows, Ahead ahead, float (*sums)[kColumns]) {
  Floats found[ROWS][kWide] = {};
  auto step = [&](int64_t k) {
    typename T::Loaded loaded[kWide];
#pragma GCC unroll 2
    for (int v = 0; v < kWide; v++) loaded[v] = T::loaded(load<Words>(weights + k * kColumns + v * kLanes));
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int v = 0; v < kWide; v++) found[r][v] = T::add(found[r][v], loaded[v], rows.words[r * rows.stride + k]);
  };
  int64_t k = 0;
  for (; k + kUnroll <= words; k += kUnroll)
    for (int i = 0; i < kUnroll; i++) {
      ahead(k + i);
      step(k + i);
    }
  for (; k < words; k++) step(k);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < kWide; v++) store(sums[r] + v * kLanes, found[r][v]);
}

template <class T, class Ahead>
using Tile = void (*)(const uint32_t*, int64_t, RowWords, Ahead, float (*)[kColumns]);

template <class T, class Ahead, int... ROWS>
Tile<T, Ahead> tile_of(int rows, std::integer_sequence<int, ROWS...>) {
  static constexpr Tile<T, Ahead> kTiles[] = {tile<T, Ahead, ROWS + 1>...};
  return kTiles[rows - 1];
}

// One packed block times num_rows rows, in tiles of nearly equal height: finish(first, count, sums) for each, with sums
// [count][32] of the rows from `first` on.
template <class T, class Ahead, class Finish>
void block_product(const uint32_t* weights, int64_t words, RowWords rows, int64_t num_rows, Ahead ahead, Finish&& finish) {
  int64_t num_tiles = divided_up(num_rows, kMaxRows);
  for (int64_t t = 0, row = 0; t < num_tiles; t++) {
    int height = int((num_rows - row) / (num_tiles - t));
    Tile<T, Ahead> run = tile_of<T, Ahead>(height, std::make_integer_sequence<int, kMaxRows>());
    alignas(64) float sums[kMaxRows][kColumns];
    for (int64_t c = 0; c < kColumns; c += kPassColumns)
      run(weights + c, words, {rows.words + row * rows.stride, rows.stride}, ahead, (float(*)[kColumns])(&sums[0][c]));
    finish(row, height, sums);
    row += height;
  }
}

}  // namespace tandem
