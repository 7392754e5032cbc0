// Products with weights of 8 or 4 bits: 32 columns of them, times rows of activations quantized on the fly.
//
// Along k, weights and activations form groups. A column has a scale, or each group of it has (and, in some formats, a least
// value), a group of a row of activations has a scale; within a group the products are summed up exactly, in whole numbers.
//
// What a change must not break:
// - A row is quantized by itself, and one element of the result is one chain of multiply-adds over groups 0, 1, 2, …: never
//   split, never reordered by the number of rows. So a row's result is the same bits alone, in any batch, at any place in it and
//   with any number of threads.
// - Packed weights: [ceil(columns / 32)] blocks, each of a Group record per group and then, where columns have scales, those; columns
//   past the last one have scales of zero.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "linear.h"

namespace tandem {

constexpr int kTurnWords = 4;  // of a column, per turn of the inner loop

// BITS: of a weight. GROUP: how many k are summed up in whole numbers. SCALES: whose they are. LEAST: whether each group also has a
// least value.
//
// A weight is scale · (stored - kOffset), or scale · stored + least; stored is not negative.
enum class Scales { kOfColumns, kOfGroups };

template <int BITS, int GROUP, Scales SCALES, bool LEAST>
struct Quantized {
  static constexpr int kBits = BITS, kGroup = GROUP, kQuads = GROUP / 4;
  static constexpr bool kGroupScales = SCALES == Scales::kOfGroups, kLeast = LEAST;
  static constexpr int kOffset = LEAST ? 0 : 1 << (BITS - 1);
  static constexpr int kWords = GROUP * BITS / 32;  // of a column
  static constexpr int kTurns = kWords / kTurnWords;

  // scales, least: float16. A word of 8-bit weights is four neighbouring k, the first in the low byte. Of 4-bit weights, the low
  // halves of its bytes are word i of 8-bit ones, the high halves word i + kWords.
  struct Group {
    uint16_t scales[kGroupScales ? kColumns : 0];
    uint16_t least[LEAST ? kColumns : 0];
    uint32_t words[kWords][kColumns];
  };

  static int64_t block_bytes(int64_t num_groups) {
    return num_groups * int64_t(sizeof(Group)) + (kGroupScales ? 0 : kColumns * int64_t(sizeof(float)));
  }
  // Of a matrix's blocks.
  static Group* block(void* packed, int64_t index, int64_t num_groups) {
    return (Group*)((char*)packed + index * block_bytes(num_groups));
  }
  static const Group* block(const void* packed, int64_t index, int64_t num_groups) {
    return block(const_cast<void*>(packed), index, num_groups);
  }
  // Of a block's columns, where they have some: float32.
  static float* column_scales(Group* block, int64_t num_groups) { return (float*)(block + num_groups); }
  static const float* column_scales(const Group* block, int64_t num_groups) { return (const float*)(block + num_groups); }
};

// What plain weights are quantized to.
using Int8 = Quantized<8, 64, Scales::kOfColumns, false>;
using EightBits = Quantized<8, 32, Scales::kOfGroups, false>;
using FourBits = Quantized<4, 32, Scales::kOfGroups, false>;
using FourBitsLeast = Quantized<4, 32, Scales::kOfGroups, true>;

// format(Quantized<…>()) of the one that `format` names.
template <class Use>
void with_format(Format format, Use&& use) {
  switch (format) {
    case Format::kPlain: break;
    case Format::kInt8: return use(Int8());
    case Format::kEightBits: return use(EightBits());
    case Format::kFourBits: return use(FourBits());
    case Format::kFourBitsLeast: return use(FourBitsLeast());
  }
}

// float16 to float32, exact; NaN stay NaN.
inline float widen_half(uint16_t half) {
  uint32_t endless = (half & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;  // infinity and NaN stay what they are
  return as_float(as_word(as_float((half & 0x7fffu) << 13) * 0x1p112f) | endless | (half & 0x8000u) << 16);
}

inline Floats widen_halves(const uint16_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
#else
  Words halves = __builtin_convertvector(load<BFloat16::Halves>(from), Words);
  Floats size = (Floats)((halves & 0x7fff) << 13) * 0x1p112f;
  Words endless = (Words)((halves & 0x7c00) == 0x7c00) & 0x7f800000;
  return (Floats)((Words)size | endless | (halves & 0x8000) << 16);
#endif
}

// Four weights of each lane are multiplied in kXWords steps, each with a word of its own of the activations: the four int8, or
// where the processor can't multiply those: the int16 of the first and third, then of the second and fourth. part_of<part> is
// what add_products takes of the weights.
#if TANDEM_DOT_INT8
constexpr int kXWords = 1;

template <int PART>
Words part_of(Words weights) {
  return weights;
}

inline Ints add_products(Ints sum, Words weights, uint32_t x) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(int(x)));
}
#else
constexpr int kXWords = 2;

template <int PART>
Words part_of(Words weights) {
  return (PART == 0 ? weights : weights >> 8) & 0x00ff00ff;
}

inline Ints add_products(Ints sum, Words weights, uint32_t x) {
#if defined(__AVX512BW__)
  return settled(sum + (Ints)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(int(x))));
#elif defined(__AVX2__)
  return settled(sum + (Ints)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(int(x))));
#elif defined(__SSE2__)
  return settled(sum + (Ints)_mm_madd_epi16((__m128i)weights, _mm_set1_epi32(int(x))));
#else
  return sum + (Ints)(weights & 0xffff) * int32_t(int16_t(x)) + (Ints)(weights >> 16) * int32_t(int16_t(x >> 16));
#endif
}
#endif

// A group of a row of activations. start: what the sum over the group's products begins with, so that it comes out as if stored
// weights had no offset; or, where groups have a least value, what that is multiplied with.
template <class Q>
struct ActivationGroup {
  float scale;
  union {
    int32_t start;
    float sum;
  };
  uint32_t words[Q::kQuads * kXWords];
};

// Rows of activation groups, `stride` bytes apart; as RowWords.
struct GroupRows {
  const char* groups;
  int64_t stride;

  template <class Q>
  const ActivationGroup<Q>* row(int64_t index) const {
    return (const ActivationGroup<Q>*)(groups + index * stride);
  }
};

constexpr int kQuantizedMaxRows = kLanes == 16 ? 8 : 6;  // whose whole numbers fill the registers; the float sums wait in the cache

// sums[r][c] += the sum over k of rows[r][k] · weights[k][c], for some rows and kPassColumns columns from `first` of the block
// on: each sum goes on from what it is. Asks for what is `ahead` every kTurnWords.
template <class Q>
using QuantizedTile = void (*)(const typename Q::Group* weights, int64_t first, int64_t num_groups, GroupRows rows,
                               float (*sums)[kColumns], Ahead& ahead);

// The tile of so many rows, of those that quantized.cpp has.
template <class Q>
QuantizedTile<Q> quantized_tile_of(int rows);

// One packed block times num_rows rows, as block_product.
template <class Q, class Finish>
void quantized_block_product(const typename Q::Group* weights, int64_t num_groups, GroupRows rows, int64_t num_rows,
                             Finish&& finish) {
  constexpr int64_t kStretchGroups = kStretch * kColumns * 4 / sizeof(typename Q::Group);
  alignas(64) float sums[kBlockRows][kColumns];
  std::fill_n(&sums[0][0], num_rows * kColumns, 0.0f);
  int64_t num_tiles = divided_up(num_rows, kQuantizedMaxRows), num_runs = num_tiles * (kColumns / kPassColumns);
  for (int64_t g = 0; g < num_groups; g += kStretchGroups) {
    int64_t count = std::min(kStretchGroups, num_groups - g);
    Ahead ahead(weights + g + count, kStretchGroups * sizeof *weights, num_runs * kStretchGroups * Q::kTurns);
    for (int64_t c = 0; c < kColumns; c += kPassColumns)
      for (int64_t t = 0, row = 0; t < num_tiles; t++) {
        int height = int((num_rows - row) / (num_tiles - t));
        const char* from = rows.groups + row * rows.stride + g * sizeof(ActivationGroup<Q>);
        quantized_tile_of<Q>(height)(weights + g, c, count, {from, rows.stride}, &sums[row], ahead);
        row += height;
      }
  }
  for (int64_t row = 0; row < num_rows; row++) {
    if constexpr (!Q::kGroupScales) {
      const float* scales = Q::column_scales(weights, num_groups);
      for (int64_t c = 0; c < kColumns; c += kLanes) store(sums[row] + c, load<Floats>(sums[row] + c) * load<Floats>(scales + c));
    }
    finish(row, sums[row]);
  }
}

inline void add_bias(const Matrix& weight, int64_t column, float* sums) {
  if (weight.bias == nullptr) return;
  int64_t count = std::min(kColumns, weight.out_features - column);
  for (int64_t c = 0; c < count; c++) sums[c] += weight.bias[column + c];
}

// As multiply, of rows that are quantized already.
template <class Q, class Finish>
void multiply_quantized(Team& team, int rank, const Matrix& weight, GroupRows x, int64_t num_rows, Finish&& finish) {
  int64_t num_groups = divided_up(weight.in_features, Q::kGroup), num_blocks = divided_up(weight.out_features, kColumns);
  int64_t block_rows = evenly(num_rows, std::clamp<int64_t>(kRowBlockBytes / x.stride, kQuantizedMaxRows, kBlockRows));
  team.share(rank, divided_up(num_rows, block_rows) * num_blocks, [&](int64_t item) {
    int64_t first = item / num_blocks * block_rows, block = item % num_blocks, column = block * kColumns;
    auto* weights = Q::block(weight.packed, block, num_groups);
    quantized_block_product<Q>(weights, num_groups, {x.groups + first * x.stride, x.stride},
                               std::min(block_rows, num_rows - first), [&](int64_t row, float* sums) {
                                 add_bias(weight, column, sums);
                                 finish(first + row, column, sums);
                               });
  });
}

}  // namespace tandem
