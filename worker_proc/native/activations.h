// Rows of activations rounded to 8 bits, for products with quantized weights.
//
// What a change must not break: a row is quantized by itself, in one fixed order.
#pragma once

#include "quantized.h"
#include "rows.h"

namespace tandem {

// The largest magnitude among GROUP values, of which a NaN is the largest of all.
template <int GROUP>
float magnitude(const float* values) {
  auto larger = [](Ints a, Ints b) { return a > b ? a : b; };
  Ints most = {};
#pragma GCC unroll 16
  for (int i = 0; i < GROUP; i += kLanes) most = larger(most, (Ints)((Words)load<Floats>(values + i) & 0x7fffffff));
  return as_float(uint32_t(fold(most, larger)));
}

// Of two magnitudes the larger, of which a NaN is the largest of all: they are ordered as their bits are.
inline float larger_magnitude(float a, float b) { return as_word(a) > as_word(b) ? a : b; }

// Whether numbers of which the largest is so large have norms, and products with others such, that float32 bounds: those near
// its ends have squares that are nothing, or infinite.
inline bool has_squares(float magnitude) { return magnitude == 0 || (magnitude > 1e-15f && magnitude < 1e15f); }

// Values times `factor`, rounded to whole numbers, ties to even. They must come out within ±2^22.
inline Ints rounded(Floats values, float factor) {
  constexpr float kWhole = 12582912.0f;  // 1.5 · 2^23
  return (Ints)(values * factor + kWhole) - (Ints)splat(kWhole);
}

// 1 / scale, where scale is the size of a step of 127 to the largest magnitude; 0 where there is nothing but about zero.
inline float steps(float magnitude) { return magnitude < 1e-30f ? 0.0f : 127.0f / magnitude; }

template <class Q>
void quantize(const float* values, ActivationGroup<Q>& to) {
  using Bytes = int8_t __attribute__((vector_size(kLanes)));
  float top = magnitude<Q::kGroup>(values), factor = steps(top);
  if (!(top < std::numeric_limits<float>::infinity())) {
    // The scale makes the row's result NaN; the numbers themselves would overflow.
    std::memset(&to, 0, sizeof to);
    to.scale = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  int8_t found[Q::kGroup];
  Ints total = {};
#pragma GCC unroll 16
  for (int i = 0; i < Q::kGroup; i += kLanes) {
    Ints whole = rounded(load<Floats>(values + i), factor);
    total += whole;
    store(found + i, __builtin_convertvector(whole, Bytes));
  }
  int32_t sum = fold(total, [](Ints a, Ints b) { return a + b; });
  to.scale = top / 127.0f;
  if (Q::kLeast) to.sum = float(sum) * to.scale;
  else to.start = -Q::kOffset * sum;
  if (kXWords == 1) {
    std::memcpy(to.words, found, sizeof found);
  } else {
    for (int i = 0; i < Q::kQuads; i++)
      for (int odd = 0; odd < 2; odd++)
        to.words[i * kXWords + odd] = uint16_t(int16_t(found[4 * i + odd])) | uint32_t(found[4 * i + odd + 2]) << 16;
  }
}

// |x̂| and |x - x̂| of a row x that is rounded to x̂; infinite where their squares are beyond float32.
struct Rounding {
  float norm, error;
};

// values: [width in whole groups], zero past the row's end.
template <class Q>
Rounding rounding(const float* values, int64_t width) {
  Floats kept = {}, lost = {};
  float most = 0;
  for (int64_t g = 0; g < width; g += Q::kGroup) {
    float top = magnitude<Q::kGroup>(values + g), factor = steps(top), scale = top / 127.0f;
    most = larger_magnitude(most, top);
    for (int64_t i = g; i < g + Q::kGroup; i += kLanes) {
      Floats value = load<Floats>(values + i), whole = __builtin_convertvector(rounded(value, factor), Floats) * scale;
      kept += whole * whole;
      lost += (value - whole) * (value - whole);
    }
  }
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  if (!has_squares(most)) return {kInfinity, kInfinity};
  return {std::sqrt(sum(kept)), std::sqrt(sum(lost))};
}

// Room for activations quantized for products with Q's weights, whichever Q that is.
class QuantizedRows {
 public:
  void reserve(int64_t num_rows, int64_t width) {
    bytes_.reserve(num_rows * std::max(stride<Int8>(width), stride<EightBits>(width)));
  }

  template <class Q>
  GroupRows groups(int64_t width) {
    return {bytes_.data(), stride<Q>(width)};
  }

  // values: [width], with room for whole groups.
  template <class Q>
  void put(int64_t index, float* values, int64_t width) {
    int64_t num_groups = divided_up(width, Q::kGroup);
    std::fill(values + width, values + num_groups * Q::kGroup, 0.0f);
    auto* to = (ActivationGroup<Q>*)(bytes_.data() + index * stride<Q>(width));
    for (int64_t g = 0; g < num_groups; g++) quantize<Q>(values + g * Q::kGroup, to[g]);
  }

 private:
  template <class Q>
  static int64_t stride(int64_t width) {
    return divided_up(divided_up(width, Q::kGroup) * int64_t(sizeof(ActivationGroup<Q>)), 64) * 64 + 64;
  }

  Buffer<char> bytes_;
};

}  // namespace tandem
