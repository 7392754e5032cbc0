// Weights into their packed form of 8 or 4 bits: from plain numbers, or from blocks as GGUF files have them.
//
// What a change must not break: what a GGUF file's blocks stand for is kept exactly, but for Q4_K's scales, which are products of
// two numbers and rounded to float16.
//
// Source: ggml's block formats (github.com/ggml-org/ggml, ggml-common.h).
#pragma once

#include <vector>

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
void put(typename Q::Group& group, int64_t column, const uint8_t* bytes) {
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
      auto* groups = Q::block(packed, r / kColumns, num_groups) + block * Stored::kGroups;
      Stored::read(rows + (r - first) * row_bytes + block * Stored::kBytes,
                   [&](int g, uint16_t scale, uint16_t least, const uint8_t* bytes) {
                     groups[g].scales[r % kColumns] = scale;
                     if constexpr (Q::kLeast) groups[g].least[r % kColumns] = least;
                     put<Q>(groups[g], r % kColumns, bytes);
                   });
    }
}

// One column of Int8 weights, in the room of one thread.
class Column {
 public:
  explicit Column(int64_t width) : num_groups_(divided_up(width, Int8::kGroup)) {
    values_.assign(num_groups_ * Int8::kGroup);
    bytes_.assign(num_groups_ * Int8::kGroup);
  }

  // [width], to be filled; zero past that.
  float* values() { return values_.data(); }

  // Rounds them to steps of 1/127 of the largest, into their place in a packed block.
  void put(Int8::Group* block, int64_t column) {
    top_ = 0;
    for (int64_t g = 0; g < num_groups_; g++) top_ = larger_magnitude(top_, magnitude<Int8::kGroup>(values() + g * Int8::kGroup));
    // What no number of 8 bits stands for makes the products NaN, as it would by itself.
    bool finite = top_ < std::numeric_limits<float>::infinity();
    scale_ = finite ? top_ / 127.0f : std::numeric_limits<float>::quiet_NaN();
    Int8::column_scales(block, num_groups_)[column] = scale_;
    for (int64_t i = 0; i < num_groups_ * Int8::kGroup; i += kLanes) {
      Ints whole = finite ? rounded(load<Floats>(values() + i), steps(top_)) : Ints{};
      store(bytes_.data() + i, __builtin_convertvector(whole + 128, Bytes));
    }
    for (int64_t g = 0; g < num_groups_; g++) tandem::put<Int8>(block[g], column, bytes_.data() + g * Int8::kGroup);
  }

  // The norm of the values, and of what `put` has changed them by: not less than these are, and infinite where their squares are
  // beyond float32.
  void norms(float& all, float& lost) const {
    constexpr float kEnough = 1.001f;  // for what the sums are rounded by
    Floats squares = {}, rests = {};
    for (int64_t i = 0; i < num_groups_ * Int8::kGroup; i += kLanes) {
      Floats value = load<Floats>(values_.data() + i);
      Ints whole = __builtin_convertvector(load<Bytes>(bytes_.data() + i), Ints) - 128;
      Floats rest = value - __builtin_convertvector(whole, Floats) * scale_;
      squares += value * value;
      rests += rest * rest;
    }
    all = std::sqrt(sum(squares)) * kEnough;
    lost = std::sqrt(sum(rests)) * kEnough;
    if (!has_squares(top_)) all = lost = std::numeric_limits<float>::infinity();
  }

 private:
  using Bytes = uint8_t __attribute__((vector_size(kLanes)));

  int64_t num_groups_;
  Buffer<float> values_;
  Buffer<uint8_t> bytes_;
  float top_ = 0, scale_ = 0;  // of the column put last
};

// As pack_blocks, of numbers of the format T, [num_rows][width].
template <class T>
void pack_plain(const typename T::Element* rows, int64_t first, int64_t num_rows, int64_t width, void* packed) {
  Column column(width);
  for (int64_t r = first; r < first + num_rows; r++) {
    widen<T>(rows + (r - first) * width, width, column.values());
    column.put(Int8::block(packed, r / kColumns, divided_up(width, Int8::kGroup)), r % kColumns);
  }
}

// A packed block of the format T to one of Int8. norms, errors: of its columns, as Screen has them (choosing.h).
template <class T>
void screen_block(const uint32_t* packed, int64_t width, Int8::Group* to, float* norms, float* errors) {
  Column column(width);
  std::vector<uint32_t> words(words_of<T>(width));
  for (int64_t c = 0; c < kColumns; c++) {
    for (int64_t k = 0; k < int64_t(words.size()); k++) words[k] = packed[k * kColumns + c];
    widen<T>((const typename T::Element*)words.data(), width, column.values());
    column.put(to, c);
    column.norms(norms[c], errors[c]);
  }
}

// Row `index` of a packed matrix in numbers, [width].
template <class Q>
void dequantize_row(const void* packed, int64_t index, int64_t width, float* to) {
  int64_t num_groups = divided_up(width, Q::kGroup), column = index % kColumns;
  auto* groups = Q::block(packed, index / kColumns, num_groups);
  for (int64_t k = 0; k < width; k++) {
    const typename Q::Group& group = groups[k / Q::kGroup];
    int64_t i = k % Q::kGroup;
    bool high = Q::kBits == 4 && i >= Q::kGroup / 2;
    int64_t at = high ? i - Q::kGroup / 2 : i;
    uint8_t byte = ((const uint8_t*)&group.words[at / 4][column])[at % 4];
    int stored = Q::kBits == 8 ? byte : high ? byte >> 4 : byte & 15;
    float value = float(stored - Q::kOffset);
    if constexpr (Q::kGroupScales) value *= widen_half(group.scales[column]);
    else value *= Q::column_scales(groups, num_groups)[column];
    if constexpr (Q::kLeast) value += widen_half(group.least[column]);
    to[k] = value;
  }
}

}  // namespace tandem
