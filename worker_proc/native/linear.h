// Products of activations with a model's packed weights, y = x Wᵀ + b. Rules: see product.h.
#pragma once

#include "product.h"
#include "team.h"

namespace tandem {

// Of activations, kept in L2 while weights pass by: half of the smallest that such processors have.
constexpr int64_t kRowBlockBytes = (kLanes == 16 ? 384 : 256) << 10;

// How packed weights are stored: in the format of the activations (product.h), or quantized (quantized.h).
enum class Format { kPlain, kInt8, kEightBits, kFourBits, kFourBitsLeast };

// A weight [out_features, in_features] in its packed layout, with its bias or null.
struct Matrix {
  const uint32_t* packed = nullptr;
  const float* bias = nullptr;
  int64_t out_features = 0, in_features = 0;
  Format format = Format::kPlain;
};

// Rows of each block where as few as can be have `most` each: all about the same, since few rows meet weights at a loss.
inline int64_t evenly(int64_t num_rows, int64_t most) {
  return num_rows <= most ? most : divided_up(num_rows, divided_up(num_rows, most));
}

// One packed block of a matrix times num_rows rows, at most kBlockRows: finish(row, column, sums), where sums[32] are the columns
// from `column` on, of which those past out_features are nobody's.
template <class T, class Finish>
void multiply_block(const Matrix& weight, int64_t block, RowWords x, int64_t num_rows, Finish&& finish) {
  int64_t words = words_of<T>(weight.in_features), column = block * kColumns;
  float bias[kColumns] = {};
  if (weight.bias != nullptr) std::copy_n(weight.bias + column, std::min(kColumns, weight.out_features - column), bias);
  block_product<T>(weight.packed + block * words * kColumns, words, x, num_rows, [&](int64_t row, float* sums) {
    if (weight.bias != nullptr)
      for (int c = 0; c < kColumns; c++) sums[c] += bias[c];
    finish(row, column, sums);
  });
}

// Within a team's `run`: x Wᵀ + b of num_rows rows, a block at a time, as multiply_block. Each weight comes from memory once per
// block of rows.
template <class T, class Finish>
void multiply(Team& team, int rank, const Matrix& weight, RowWords x, int64_t num_rows, Finish&& finish) {
  int64_t words = words_of<T>(weight.in_features), num_blocks = divided_up(weight.out_features, kColumns);
  int64_t block_rows = evenly(num_rows, std::clamp<int64_t>(kRowBlockBytes / (words * T::kParts * 4), kMaxRows, kBlockRows));
  team.share(rank, divided_up(num_rows, block_rows) * num_blocks, [&](int64_t item) {
    int64_t first = item / num_blocks * block_rows;
    multiply_block<T>(weight, item % num_blocks, {x.words + first * x.stride, x.stride}, std::min(block_rows, num_rows - first),
                      [&](int64_t row, int64_t column, float* sums) { finish(first + row, column, sums); });
  });
}

// Rows [first, first + num_rows) of a matrix, `width` bytes each, laid into its packed form word by word.
inline void pack_rows(const char* rows, int64_t first, int64_t num_rows, int64_t width, uint32_t* packed) {
  constexpr int64_t kStrip = 16;  // words of a row at a time, one cache line
  int64_t words = divided_up(width, 4);
  for (int64_t k = 0; k < words; k += kStrip)
    for (int64_t r = first; r < first + num_rows; r++) {
      uint32_t line[kStrip] = {};
      std::memcpy(line, rows + (r - first) * width + k * 4, std::min<int64_t>(sizeof line, width - k * 4));
      uint32_t* to = packed + (r / kColumns * words + k) * kColumns + r % kColumns;
      for (int64_t i = 0; i < std::min(kStrip, words - k); i++) to[i * kColumns] = line[i];
    }
}

// Row `index` of a packed matrix, `width` bytes.
inline void unpack_row(const uint32_t* packed, int64_t index, int64_t width, char* to) {
  int64_t words = divided_up(width, 4);
  const uint32_t* from = packed + index / kColumns * words * kColumns + index % kColumns;
  for (int64_t k = 0; k < words; k++)
    std::memcpy(to + k * 4, from + k * kColumns, std::min<int64_t>(4, width - k * 4));
}

}  // namespace tandem
