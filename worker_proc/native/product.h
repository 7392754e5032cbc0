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
constexpr int kMaxRows = kLanes == 16 ? 12 : 6;  // of a tile, whose sums fill the registers
constexpr int kUnroll = 8;                       // words of k per turn of the inner loop
constexpr int kAskedEvery = 4;                   // words of k
constexpr int64_t kStretch = 64;                 // words of k that meet all rows before the next ones do, from L1
constexpr int64_t kLineBytes = 64;
constexpr int64_t kBlockRows = 240;              // of activations that meet a block of weights together

// Activations: rows of words, `stride` words apart, T::kParts for each word of weights. Give the stride one cache line more than
// the rows fill, so that a tile's rows don't all fall into one set of the cache.
struct RowWords {
  const uint32_t* words;
  int64_t stride;
};

// Memory to be asked for, into L2: in L1 it would drive out what is computed with. Some lines of it at each of many turns: more
// at once than memory takes would keep what is computed with waiting.
class Ahead {
 public:
  Ahead(const void* from, int64_t bytes, int64_t turns)
      : from_((const char*)from), end_(from_ + bytes), bytes_(divided_up(bytes, turns * kLineBytes) * kLineBytes) {}

  void ask() {
    const char* until = std::min(from_ + bytes_, end_);
    for (; from_ < until; from_ += kLineBytes) __builtin_prefetch(from_, 0, 2);
  }

 private:
  const char *from_, *end_;
  int64_t bytes_;  // of a turn
};

// sums[r][c] += the sum over k of rows[r][k] · weights[k][c], for ROWS rows and kPassColumns columns: each sum goes on from what
// it is. Asks for what is `ahead` every kAskedEvery words.
template <class T, int ROWS>
void tile(const uint32_t* weights, int64_t words, RowWords rows, float (*sums)[kColumns], Ahead& shared_ahead) {
  Ahead ahead = shared_ahead;  // in registers
  Floats found[ROWS][kWide];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < kWide; v++) found[r][v] = load<Floats>(sums[r] + v * kLanes);
  auto step = [&](int64_t k) {
    in_parts<T::kParts>([&](auto part) {
      typename T::Loaded loaded[kWide];
#pragma GCC unroll 2
      for (int v = 0; v < kWide; v++)
        loaded[v] = T::template loaded<part.value>(load<Words>(weights + k * kColumns + v * kLanes));
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int v = 0; v < kWide; v++)
          found[r][v] = T::add(found[r][v], loaded[v], rows.words[r * rows.stride + k * T::kParts + part.value]);
    });
  };
  int64_t k = 0;
  for (; k + kUnroll <= words; k += kUnroll) {
#pragma GCC unroll 8
    for (int i = 0; i < kUnroll; i++) {
      if (i % kAskedEvery == 0) ahead.ask();
      step(k + i);
    }
  }
  for (; k < words; k++) step(k);
  shared_ahead = ahead;
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < kWide; v++) store(sums[r] + v * kLanes, found[r][v]);
}

template <class T>
using Tile = void (*)(const uint32_t*, int64_t, RowWords, float (*)[kColumns], Ahead&);

template <class T, int... ROWS>
Tile<T> tile_of(int rows, std::integer_sequence<int, ROWS...>) {
  static constexpr Tile<T> kTiles[] = {tile<T, ROWS + 1>...};
  return kTiles[rows - 1];
}

// One packed block times num_rows rows, at most kBlockRows, in tiles of nearly equal height: finish(row, sums) for each row, with
// its sums [32].
//
// While a stretch of weights meets the rows, the next one is asked for, evenly: so memory works all the time, and not only
// while the first rows meet what it brings. What follows the block is mostly the thread's next one.
template <class T, class Finish>
void block_product(const uint32_t* weights, int64_t words, RowWords rows, int64_t num_rows, Finish&& finish) {
  alignas(64) float sums[kBlockRows][kColumns];
  std::fill_n(&sums[0][0], num_rows * kColumns, 0.0f);
  int64_t num_tiles = divided_up(num_rows, kMaxRows), num_runs = num_tiles * (kColumns / kPassColumns);
  for (int64_t k = 0; k < words; k += kStretch) {
    int64_t count = std::min(kStretch, words - k);
    Ahead ahead(weights + (k + count) * kColumns, kStretch * kColumns * 4, num_runs * kStretch / kAskedEvery);
    for (int64_t c = 0; c < kColumns; c += kPassColumns)
      for (int64_t t = 0, row = 0; t < num_tiles; t++) {
        int height = int((num_rows - row) / (num_tiles - t));
        Tile<T> run = tile_of<T>(height, std::make_integer_sequence<int, kMaxRows>());
        run(weights + k * kColumns + c, count, {rows.words + row * rows.stride + k * T::kParts, rows.stride},
            (float(*)[kColumns])(&sums[row][c]), ahead);
        row += height;
      }
  }
  for (int64_t row = 0; row < num_rows; row++) finish(row, sums[row]);
}

}  // namespace tandem
