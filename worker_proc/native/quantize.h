// Weights into their packed form of 8 or 4 bits: from plain numbers, or from blocks as GGUF files have them.
//
// What a change must not break: what a GGUF file's blocks stand for is kept exactly, but for Q4_K's scales, which are products of
// two numbers and rounded to float16.
//
// Source: ggml's block formats (github.com/ggml-org/ggml, ggml-common.h).
#pragma once

#include "activations.h"

namespace tandem {

// To nearest; what is too large becomes the largest number.
inline uint16_t narrow_half(float value) {
  if (value != value) return 0x7e00;
  uint32_t sign = as_word(value) >> 16 & 0x8000;
  float size = std::min(std::fabs(value), 65504.0f);
  if (size < 0x1p-14f) return uint16_t(sign | uint32_t(std::nearbyint(size * 0x1p24f)));
  uint32_t word = as_word(size);
  return uint16_t(sign | (((word + 0xfff + (word >> 13 & 1)) >> 13) - (112 << 10)));
}

// One column's part of a group: its `bytes` are k in order for 8 bits; for 4, byte i is k = i and, in its upper half, i + 16.
template <class Q>
void put(typename Q::Group& group, int64_t column, uint16_t scale, uint16_t least, const uint8_t* bytes) {
  group.scales[column] = scale;
  if constexpr (Q::kLeast) group.least[column] = least;
  for (int i = 0; i < Q::kWords; i++) std::memcpy(&group.words[i][column], bytes + 4 * i, 4);
}

// GGUF's types: blocks of kBytes, which become kGroups groups. read(block, put) calls put(group, scale, least, bytes) for each.
struct Q8_0 {
  using Packed = EightBits;
  static constexpr int kBytes = 34, kGroups = 1;
  template <class Put>
  static void read(const uint8_t* from, Put&& put) {
    uint8_t bytes[32];
    for (int i = 0; i < 32; i++) bytes[i] = from[2 + i] ^ 0x80;
    put(0, load<uint16_t>(from), 0, bytes);
  }
};

struct Q4_0 {
  using Packed = FourBits;
  static constexpr int kBytes = 18, kGroups = 1;
  template <class Put>
  static void read(const uint8_t* from, Put&& put) {
    put(0, load<uint16_t>(from), 0, from + 2);
  }
};

struct Q4_1 {
  using Packed = FourBitsLeast;
  static constexpr int kBytes = 20, kGroups = 1;
  template <class Put>
  static void read(const uint8_t* from, Put&& put) {
    put(0, load<uint16_t>(from), load<uint16_t>(from + 2), from + 4);
  }
};

struct Q4_K {
  using Packed = FourBitsLeast;
  static constexpr int kBytes = 144, kGroups = 8;
  template <class Put>
  static void read(const uint8_t* from, Put&& put) {
    float scale = widen_half(load<uint16_t>(from)), least = widen_half(load<uint16_t>(from + 2));
    const uint8_t *six = from + 4, *pairs = from + 16;
    for (int g = 0; g < 8; g++) {
      // Six bits each: of groups 0 to 3 side by side, of the others in four bits and in the upper two of the first.
      int scales = g < 4 ? six[g] & 63 : (six[g + 4] & 15) | six[g - 4] >> 6 << 4;
      int leasts = g < 4 ? six[g + 4] & 63 : six[g + 4] >> 4 | six[g] >> 6 << 4;
      uint8_t bytes[16];
      for (int i = 0; i < 16; i++) {
        uint8_t low = pairs[g / 2 * 32 + i], high = pairs[g / 2 * 32 + i + 16];
        bytes[i] = g % 2 ? low >> 4 | (high & 0xf0) : (low & 0x0f) | uint8_t(high << 4);
      }
      put(g, narrow_half(scale * float(scales)), narrow_half(-least * float(leasts)), bytes);
    }
  }
};

// Rows [first, first + num_rows) of a matrix, `row_bytes` each, into the packed form of their type.
template <class Stored>
void pack_blocks(const uint8_t* rows, int64_t first, int64_t num_rows, int64_t row_bytes, void* packed) {
  using Q = typename Stored::Packed;
  int64_t num_blocks = row_bytes / Stored::kBytes, num_groups = num_blocks * Stored::kGroups;
  for (int64_t block = 0; block < num_blocks; block++)
    for (int64_t r = first; r < first + num_rows; r++) {
      auto* groups = (typename Q::Group*)packed + r / kColumns * num_groups + block * Stored::kGroups;
      Stored::read(rows + (r - first) * row_bytes + block * Stored::kBytes,
                   [&](int g, uint16_t scale, uint16_t least, const uint8_t* bytes) {
                     put<Q>(groups[g], r % kColumns, scale, least, bytes);
                   });
    }
}

// A group of weights to `bytes`, as Int8 stores them; returns its scale, a float16.
inline uint16_t round_group(const float (&values)[Int8::kGroup], uint8_t (&bytes)[Int8::kGroup]) {
  using Bytes = uint8_t __attribute__((vector_size(kLanes)));
  float top = magnitude<Int8::kGroup>(values);
  bool finite = top < std::numeric_limits<float>::infinity();
  // What no number of 8 bits stands for makes the products NaN, as it would by itself.
  uint16_t scale = narrow_half(finite ? top / 127.0f : std::numeric_limits<float>::quiet_NaN());
  float factor = finite && scale ? 1.0f / widen_half(scale) : 0.0f;
  for (int i = 0; i < Int8::kGroup; i += kLanes) {
    // The scale was rounded, so that the largest may come out past 127.
    Ints whole = finite ? rounded(load<Floats>(values + i), factor) : Ints{};
    whole = whole > 127 ? Ints{} + 127 : whole < -127 ? Ints{} - 127 : whole;
    store(bytes + i, __builtin_convertvector(whole + 128, Bytes));
  }
  return scale;
}

// As pack_blocks, of numbers of the format T, [num_rows][width].
template <class T>
void pack_plain(const typename T::Element* rows, int64_t first, int64_t num_rows, int64_t width, void* packed) {
  int64_t num_groups = divided_up(width, Int8::kGroup);
  for (int64_t r = first; r < first + num_rows; r++)
    for (int64_t g = 0; g < num_groups; g++) {
      float values[Int8::kGroup] = {};
      widen<T>(rows + (r - first) * width + g * Int8::kGroup, std::min<int64_t>(Int8::kGroup, width - g * Int8::kGroup), values);
      uint8_t bytes[Int8::kGroup];
      uint16_t scale = round_group(values, bytes);
      put<Int8>(((Int8::Group*)packed)[r / kColumns * num_groups + g], r % kColumns, scale, 0, bytes);
    }
}

// A packed block of the format T to one of Int8: its Screen (choosing.h). norms, errors: of its columns.
template <class T>
void screen_block(const uint32_t* packed, int64_t width, Int8::Group* to, float* norms, float* errors) {
  constexpr int64_t kGroupWords = Int8::kGroup / T::kPerWord;
  constexpr float kEnough = 1.001f;  // for what the sums are rounded by
  int64_t words = words_of<T>(width);
  for (int64_t column = 0; column < kColumns; column++) {
    Floats all = {}, lost = {};
    for (int64_t k = 0, g = 0; k < words; k += kGroupWords, g++) {
      uint32_t own[kGroupWords] = {};
      for (int64_t i = 0; i < std::min(kGroupWords, words - k); i++) own[i] = packed[(k + i) * kColumns + column];
      float values[Int8::kGroup];
      widen<T>((const typename T::Element*)own, Int8::kGroup, values);
      uint8_t bytes[Int8::kGroup];
      uint16_t scale = round_group(values, bytes);
      put<Int8>(to[g], column, scale, 0, bytes);
      for (int64_t i = 0; i < Int8::kGroup; i += kLanes) {
        using Bytes = uint8_t __attribute__((vector_size(kLanes)));
        Floats value = load<Floats>(values + i);
        Floats rest = value - __builtin_convertvector(__builtin_convertvector(load<Bytes>(bytes + i), Ints) - 128, Floats) * widen_half(scale);
        all += value * value;
        lost += rest * rest;
      }
    }
    norms[column] = std::sqrt(sum(all)) * kEnough;
    errors[column] = std::sqrt(sum(lost)) * kEnough;
  }
}

// Row `index` of a packed matrix in numbers, [width].
template <class Q>
void dequantize_row(const void* packed, int64_t index, int64_t width, float* to) {
  int64_t num_groups = divided_up(width, Q::kGroup), column = index % kColumns;
  auto* groups = (const typename Q::Group*)packed + index / kColumns * num_groups;
  for (int64_t k = 0; k < width; k++) {
    const typename Q::Group& group = groups[k / Q::kGroup];
    int64_t i = k % Q::kGroup;
    bool high = Q::kBits == 4 && i >= Q::kGroup / 2;
    int64_t at = high ? i - Q::kGroup / 2 : i;
    uint8_t byte = ((const uint8_t*)&group.words[at / 4][column])[at % 4];
    int stored = Q::kBits == 8 ? byte : high ? byte >> 4 : byte & 15;
    float value = widen_half(group.scales[column]) * float(stored - Q::kOffset);
    if constexpr (Q::kLeast) value += widen_half(group.least[column]);
    to[k] = value;
  }
}

}  // namespace tandem
