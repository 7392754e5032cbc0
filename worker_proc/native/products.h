// Products with weights of any format, of rows in the model's.
#pragma once

#include <vector>

#include "quantize.h"

namespace tandem {

template <class T>
class Products {
 public:
  explicit Products(Team& team) : team_(team), scratch_(team.size()) {}

  // Room for rows of up to `width`.
  void reserve(int64_t num_rows, int64_t width) {
    quantized_.reserve(num_rows, width);
    for (Buffer<float>& scratch : scratch_) scratch.reserve(divided_up(width, Int8::kGroup) * Int8::kGroup);
  }

  // Within the team's `run`, as `multiply`. Rows are quantized once, by whichever rank, where the weights are.
  template <class Finish>
  void multiply(int rank, const Matrix& weight, Rows<T>& x, int64_t num_rows, Finish&& finish) {
    if (weight.format == Format::kPlain) return tandem::multiply<T>(team_, rank, weight, x.words(), num_rows, finish);
    with_format(weight.format, [&](auto format) {
      using Q = decltype(format);
      quantize<Q>(rank, x, num_rows, weight.in_features);
      multiply_quantized<Q>(team_, rank, weight, quantized_.groups<Q>(weight.in_features), num_rows, finish);
    });
  }

  // Row `index` of a matrix, for the thread `rank`.
  void look_up(int rank, const Matrix& table, int64_t index, float* to) {
    int64_t width = table.in_features;
    if (table.format == Format::kPlain) {
      char* row = (char*)scratch_[rank].data();
      unpack_row(table.packed, index, width * int64_t(sizeof(typename T::Element)), row);
      widen<T>((const typename T::Element*)row, width, to);
    } else {
      with_format(table.format, [&](auto format) { dequantize_row<decltype(format)>(table.packed, index, width, to); });
    }
  }

 private:
  // Compiled once a format, not once more for every Finish.
  template <class Q>
  [[gnu::noinline]] void quantize(int rank, Rows<T>& x, int64_t num_rows, int64_t width) {
    team_.share(rank, num_rows, [&](int64_t row) {
      float* values = scratch_[rank].data();
      widen<T>(x.row(row), width, values);
      quantized_.put<Q>(row, values, width);
    });
  }

  Team& team_;
  QuantizedRows quantized_;
  std::vector<Buffer<float>> scratch_;  // a rank's each: a row
};

}  // namespace tandem
