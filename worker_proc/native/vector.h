// Registers of 32-bit words, and the two number formats that the kernels compute in.
//
// Built once for the processor at hand. TANDEM_VECTOR_BYTES: 64, 32 or 16, the width of a register.
// TANDEM_DOT_BF16: whether it multiplies pairs of bfloat16 itself (AVX512_BF16).
//
// Weights are seen as words. A word is two neighbouring k of a bfloat16 row (the even one in the low half; an odd row is padded
// with zero) or one k of a float32 row.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace tandem {

constexpr int kLanes = TANDEM_VECTOR_BYTES / 4;  // words of a register

using Floats = float __attribute__((vector_size(TANDEM_VECTOR_BYTES)));
using Words = uint32_t __attribute__((vector_size(TANDEM_VECTOR_BYTES)));
using Ints = int32_t __attribute__((vector_size(TANDEM_VECTOR_BYTES)));
using Doubles = double __attribute__((vector_size(TANDEM_VECTOR_BYTES)));  // half as many lanes, as is
using Longs = int64_t __attribute__((vector_size(TANDEM_VECTOR_BYTES)));

template <class Vector>
Vector load(const void* from) {
  Vector value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class Vector>
void store(void* to, Vector value) {
  std::memcpy(to, &value, sizeof value);
}

// Half a register of floats.
inline Doubles widened(const float* from) {
  using Half = float __attribute__((vector_size(TANDEM_VECTOR_BYTES / 2)));
  return __builtin_convertvector(load<Half>(from), Doubles);
}

inline Floats splat(float value) { return value - Floats{}; }

inline float as_float(uint32_t word) {
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

inline uint32_t as_word(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  return word;
}

// A sum that the compiler must have in a register here: else it adds up whole numbers in an order of its own, and runs out of
// registers for what waits.
inline Ints settled(Ints sum) {
#if defined(__x86_64__) && TANDEM_VECTOR_BYTES == 64
  asm("" : "+v"(sum));
#elif defined(__x86_64__)
  asm("" : "+x"(sum));
#endif
  return sum;
}

inline int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Lanes where the mask is all ones from `yes`, elsewhere from `no`.
inline Floats select(Ints mask, Floats yes, Floats no) { return (Floats)((mask & (Ints)yes) | (~mask & (Ints)no)); }

// A bit for each lane of a comparison's outcome, the first lane's the lowest.
inline uint32_t lanes_of(Ints mask) {
#if TANDEM_VECTOR_BYTES == 64
  return _mm512_movepi32_mask((__m512i)mask);
#elif TANDEM_VECTOR_BYTES == 32
  return uint32_t(_mm256_movemask_ps((__m256)mask));
#elif defined(__x86_64__)
  return uint32_t(_mm_movemask_ps((__m128)mask));
#else
  uint32_t lanes = 0;
  for (int i = 0; i < kLanes; i++) lanes |= uint32_t(mask[i] & 1) << i;
  return lanes;
#endif
}

// a where it is larger, else b, also where either is no number: as the instruction has it.
inline Floats larger(Floats a, Floats b) {
#if TANDEM_VECTOR_BYTES == 64
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif TANDEM_VECTOR_BYTES == 32
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__x86_64__)
  return (Floats)_mm_max_ps((__m128)a, (__m128)b);
#else
  return select(a > b, a, b);
#endif
}

// The first lane after halves were folded onto each other until one lane is left: always the same order.
template <int WIDTH = kLanes / 2, class Vector, class Two>
auto fold(Vector value, Two&& two) {
  if constexpr (WIDTH == 0) {
    return value[0];
  } else {
    static constexpr auto kPartners = [] {
      std::array<int32_t, kLanes> lanes{};
      for (int lane = 0; lane < kLanes; lane++) lanes[lane] = lane ^ WIDTH;
      return lanes;
    }();
    return fold<WIDTH / 2>(two(value, (Vector)__builtin_shuffle((Ints)value, load<Ints>(kPartners.data()))), two);
  }
}

inline float sum(Floats value) {
  return fold(value, [](Floats a, Floats b) { return a + b; });
}

inline float largest(Floats value) {
  return fold(value, larger);
}

// 2^x, to about 2 units in the last place; 0 below 2^-126, -inf included.
//
// x = n + f, n whole and f in [-1/2, 1/2]: the Taylor series of 2^f, whose exponent n is then added to.
inline Floats exp2(Floats x) {
  constexpr float kWhole = 12582912.0f;  // 1.5 · 2^23: adding it leaves a float's whole part in its low bits
  Ints below = x < splat(-126.0f);
  Floats shifted = larger(x, splat(-126.0f)) + kWhole;
  Floats f = larger(x, splat(-126.0f)) - (shifted - kWhole);
  Floats power = splat(1.5403530e-4f);
  power = power * f + 1.3333558e-3f;
  power = power * f + 9.6181291e-3f;
  power = power * f + 5.5504109e-2f;
  power = power * f + 2.4022651e-1f;
  power = power * f + 6.9314718e-1f;
  power = power * f + 1.0f;
  Floats scaled = (Floats)((Words)power + ((Words)shifted << 23));
  return select(below, Floats{}, scaled);
}

// The low halves (0) or the high ones (1) of `count` words become `from`; the others are not written at all.
inline void put_halves(uint32_t* words, int64_t half, const uint16_t* from, int64_t count) {
  int64_t i = 0;
#if TANDEM_VECTOR_BYTES == 64
  for (; i + kLanes <= count; i += kLanes) {
    __m512i halves = _mm512_cvtepu16_epi32(load<__m256i>(from + i));
    if (half == 0) _mm512_mask_storeu_epi16(words + i, 0x55555555, halves);
    else _mm512_mask_storeu_epi16(words + i, 0xaaaaaaaa, _mm512_slli_epi32(halves, 16));
  }
#endif
  for (; i < count; i++) ((uint16_t*)(words + i))[half] = from[i];
}

constexpr float kLog2E = 1.4426950408889634f;

// x · sigmoid(x)
inline Floats silu(Floats x) { return x / (1.0f + exp2(larger(x, splat(-80.0f)) * -kLog2E)); }

// A number format T: Element is what weights and cells of the pool are, Activation what rows of activations hold of it.
//
// A word of weights is multiplied in kParts steps, each with a word of its own of the activations: loaded<part> is what `add`
// takes of it.
struct Float32 {
  using Element = float;
  using Activation = float;
  using Loaded = Floats;
  static constexpr int kPerWord = 1, kParts = 1;

  static float widen(float value) { return value; }
  static float narrow(float value) { return value; }
  static Floats widen(const float* from) { return load<Floats>(from); }
  static void narrow(float* to, Floats value) { store(to, value); }

  template <int PART>
  static Loaded loaded(Words weights) {
    return (Floats)weights;
  }
  static Floats add(Floats sum, Loaded weights, uint32_t activation) { return sum + weights * as_float(activation); }
};

// Where no instruction multiplies pairs, every product takes them apart: activations are kept so, each a float32 of its own,
// and the weights' even elements are multiplied before the odd ones.
struct BFloat16 {
  using Element = uint16_t;
  using Halves = uint16_t __attribute__((vector_size(TANDEM_VECTOR_BYTES / 2)));
  static constexpr int kPerWord = 2;

  static float widen(uint16_t value) { return as_float(uint32_t(value) << 16); }
  static Floats widen(const uint16_t* from) {
    return (Floats)(__builtin_convertvector(load<Halves>(from), Words) << 16);
  }
  // To nearest, ties to even; NaN stays NaN.
  static uint16_t narrow(float value) {
    uint32_t word = as_word(value);
    uint32_t rounded = word + 0x7fff + ((word >> 16) & 1);
    return uint16_t(((word & 0x7fffffff) > 0x7f800000 ? word | 0x400000 : rounded) >> 16);
  }
#if TANDEM_DOT_BF16
  using Activation = uint16_t;
  using Loaded = __m512bh;
  static constexpr int kParts = 1;

  // The instruction takes what is below 2^-126 for zero, as its products do.
  static void narrow(uint16_t* to, Floats value) { store(to, _mm512_cvtneps_pbh(value)); }

  template <int PART>
  static Loaded loaded(Words weights) {
    return (__m512bh)weights;
  }
  static Floats add(Floats sum, Loaded weights, uint32_t activations) {
    return _mm512_dpbf16_ps(sum, weights, (__m512bh)_mm512_set1_epi32(int(activations)));
  }
#else
  using Activation = float;
  using Loaded = Floats;
  static constexpr int kParts = 2;

  static Floats widen(const float* from) { return load<Floats>(from); }
  static void narrow(float* to, Floats value) { store(to, rounded(value) & 0xffff0000u); }
  static void narrow(uint16_t* to, Floats value) { store(to, __builtin_convertvector(rounded(value) >> 16, Halves)); }

  template <int PART>
  static Loaded loaded(Words weights) {
    return (Floats)(PART == 0 ? weights << 16 : weights & 0xffff0000u);
  }
  static Floats add(Floats sum, Loaded weights, uint32_t activation) { return sum + weights * as_float(activation); }

 private:
  // The number is in the upper half.
  static Words rounded(Floats value) {
    Words words = (Words)value;
    Ints nan = value != value;
    return ((Words)nan & (words | 0x400000)) | (~(Words)nan & (words + 0x7fff + ((words >> 16) & 1)));
  }
#endif
};

// step(part) for the one or two parts of a word in turn, part.value of type int.
template <int COUNT, class Step>
void in_parts(Step&& step) {
  step(std::integral_constant<int, 0>());
  if constexpr (COUNT == 2) step(std::integral_constant<int, 1>());
}

template <class T>
int64_t words_of(int64_t features) {
  return divided_up(features, T::kPerWord);
}

}  // namespace tandem
