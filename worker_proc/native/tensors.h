// Tensors as Python hands them over, checked.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include "quantized.h"

namespace tandem {

using tvm::ffi::Any;
using tvm::ffi::Array;
using tvm::ffi::Function;
using tvm::ffi::Map;
using tvm::ffi::String;
using tvm::ffi::Tensor;
using tvm::ffi::TensorView;
using Tensors = Map<String, Tensor>;

inline void check(bool held, const char* what) {
  if (!held) TVM_FFI_THROW(ValueError) << what;
}

template <class View>
bool is_float32(const View& t) {
  return t.dtype().code == kDLFloat && t.dtype().bits == 32;
}

template <class View>
bool is_bfloat16(const View& t) {
  return t.dtype().code == kDLBfloat && t.dtype().bits == 16;
}

inline const int32_t* int32s(const TensorView& t, int64_t size, const char* what) {
  check(t.dtype().code == kDLInt && t.dtype().bits == 32 && t.IsContiguous() && t.numel() == size, what);
  return (const int32_t*)t.data_ptr();
}

inline int64_t words_of_dtype(const TensorView& t, int64_t features) {
  check(is_float32(t) || is_bfloat16(t), "the dtype must be float32 or bfloat16");
  return is_bfloat16(t) ? words_of<BFloat16>(features) : features;
}

template <class Q, class View>
bool is_packed_as(const View& packed, int64_t width) {
  int64_t num_groups = divided_up(width, Q::kGroup), records = Q::kGroupScales ? num_groups : 1;
  return packed.size(1) == records && records * packed.size(2) * 4 == Q::block_bytes(num_groups);
}

// The format follows from the shape of a packed block.
template <class T, class View>
Matrix matrix_of(const View& packed, const float* bias, int64_t out_features, int64_t in_features, const char* name) {
  check(packed.ndim() == 3 && packed.IsContiguous() && packed.dtype().bits == 32 &&
            packed.size(0) == divided_up(out_features, kColumns),
        name);
  Matrix found = {(const uint32_t*)packed.data_ptr(), bias, out_features, in_features};
  if (packed.size(1) == words_of<T>(in_features) && packed.size(2) == kColumns) return found;
  for (Format format : {Format::kInt8, Format::kEightBits, Format::kFourBits, Format::kFourBitsLeast})
    with_format(format, [&](auto kind) {
      if (is_packed_as<decltype(kind)>(packed, in_features)) found.format = format;
    });
  check(found.format != Format::kPlain, name);
  return found;
}

}  // namespace tandem
