// What is computed on a row by itself: norms, rotation, and the formats rows are kept in.
//
// What a change must not break: a row's result depends on that row only, and sums are taken in one fixed order.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "product.h"

namespace tandem {

// Memory that grows and is not kept when it does.
template <class Element>
class Buffer {
 public:
  Element* data() const { return data_.get(); }
  Element& operator[](int64_t index) const { return data_.get()[index]; }

  // `size` elements of zero.
  void assign(int64_t size) {
    reserve(size);
    std::fill_n(data(), size, Element{});
  }

  void reserve(int64_t size) {
    if (size <= size_) return;
    data_.reset();
    size_ = 0;
    size_t bytes = divided_up(size * int64_t(sizeof(Element)), 64) * 64;
    data_.reset(static_cast<Element*>(std::aligned_alloc(64, bytes)));
    if (data_ == nullptr) throw std::bad_alloc();
    size_ = size;
  }

 private:
  struct Free {
    void operator()(Element* data) const { std::free(data); }
  };
  std::unique_ptr<Element, Free> data_;
  int64_t size_ = 0;
};

// Activations in the form that products take, a row per token, padded as RowWords has it.
template <class T>
class Rows {
 public:
  using Activation = typename T::Activation;

  void reserve(int64_t num_rows, int64_t width) {
    width_ = width;
    stride_ = divided_up(words_of<T>(width) * T::kParts, 16) * 16 + 16;
    words_.reserve(num_rows * stride_);
  }

  int64_t width() const { return width_; }
  RowWords words() { return {words_.data(), stride_}; }
  Activation* row(int64_t index) { return (Activation*)(words_.data() + index * stride_); }

  // What stands beside the last element of a row of odd width must not count.
  void pad(int64_t index) {
    if (width_ % T::kPerWord) row(index)[width_] = 0;
  }

 private:
  Buffer<uint32_t> words_;
  int64_t width_ = 0, stride_ = 0;
};

// The elements [0, width) in turn, a register at a time and the rest one by one: vector(i), then scalar(i).
template <class Vector, class Scalar>
[[gnu::always_inline]] inline void along(int64_t width, Vector&& vector, Scalar&& scalar) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) vector(i);
  for (; i < width; i++) scalar(i);
}

inline float sum_of_squares(const float* x, int64_t width) {
  Floats squares = {};
  float rest = 0;
  along(width, [&](int64_t i) { squares += load<Floats>(x + i) * load<Floats>(x + i); }, [&](int64_t i) { rest += x[i] * x[i]; });
  return sum(squares) + rest;
}

// x scaled to a mean square of one, weighted. Source: RMSNorm (arXiv 1910.07467).
inline void norm(const float* x, const float* weight, int64_t width, float eps, float* out) {
  float scale = 1.0f / std::sqrt(sum_of_squares(x, width) / float(width) + eps);
  along(width, [&](int64_t i) { store(out + i, load<Floats>(x + i) * scale * load<Floats>(weight + i)); },
        [&](int64_t i) { out[i] = x[i] * scale * weight[i]; });
}

// From elements or activations.
template <class T, class From>
void widen(const From* from, int64_t width, float* to) {
  along(width, [&](int64_t i) { store(to + i, T::widen(from + i)); }, [&](int64_t i) {
    if constexpr (std::is_same_v<From, float>) to[i] = from[i];
    else to[i] = T::widen(from[i]);
  });
}

// To elements or activations.
template <class T, class To>
void narrow(const float* from, int64_t width, To* to) {
  along(width, [&](int64_t i) { T::narrow(to + i, load<Floats>(from + i)); }, [&](int64_t i) {
    if constexpr (std::is_same_v<To, float>) to[i] = T::widen(T::narrow(from[i]));
    else to[i] = T::narrow(from[i]);
  });
}

// A head turned by its position's angles, halves against each other. cos, sin: [width / 2]. Source: RoPE (arXiv 2104.09864).
inline void rotate(float* head, int64_t width, const float* cos, const float* sin) {
  int64_t half = width / 2;
  float *first = head, *second = head + half;
  along(
      half,
      [&](int64_t i) {
        Floats a = load<Floats>(first + i), b = load<Floats>(second + i), c = load<Floats>(cos + i), s = load<Floats>(sin + i);
        store(first + i, a * c - b * s);
        store(second + i, b * c + a * s);
      },
      [&](int64_t i) {
        float a = first[i], b = second[i];
        first[i] = a * cos[i] - b * sin[i];
        second[i] = b * cos[i] + a * sin[i];
      });
}

// What is done to a query or a key: normed if there is a weight, then rotated. to: elements or activations, and may be `from`.
// scratch: [width].
template <class T, class To>
void turn(const typename T::Activation* from, const float* weight, int64_t width, float eps, const float* cos, const float* sin,
          float* scratch, To* to) {
  widen<T>(from, width, scratch);
  if (weight != nullptr) norm(scratch, weight, width, eps, scratch);
  rotate(scratch, width, cos, sin);
  narrow<T>(scratch, width, to);
}

// The same of a head of COUNT registers, which stays in them: there are thousands of heads a step, and each is short.
template <class T, int COUNT, class To>
void turn_in_registers(const typename T::Activation* from, const float* weight, float eps, const float* cos, const float* sin,
                       To* to) {
  Floats x[COUNT];
#pragma GCC unroll 8
  for (int i = 0; i < COUNT; i++) x[i] = T::widen(from + i * kLanes);
  if (weight != nullptr) {
    Floats squares[2] = {};
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; i++) squares[i % 2] += x[i] * x[i];
    float scale = 1.0f / std::sqrt(sum(squares[0] + squares[1]) / float(COUNT * kLanes) + eps);
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; i++) x[i] = x[i] * scale * load<Floats>(weight + i * kLanes);
  }
#pragma GCC unroll 8
  for (int i = 0; i < COUNT / 2; i++) {
    Floats a = x[i], b = x[i + COUNT / 2], c = load<Floats>(cos + i * kLanes), s = load<Floats>(sin + i * kLanes);
    T::narrow(to + i * kLanes, a * c - b * s);
    T::narrow(to + (i + COUNT / 2) * kLanes, b * c + a * s);
  }
}

}  // namespace tandem
