// What Python calls.
#include <sys/mman.h>

#include "quantize.h"
#include "sampling.h"
#include "tensors.h"

namespace tandem {

// These two are in model.h, and compiled in float32.cpp and bfloat16.cpp.
template <class T>
void linear_of(TensorView x, TensorView packed, TensorView bias, TensorView out, int64_t num_threads);
template <class T>
Map<String, Function> functions_of(Map<String, double> shape, Tensors ends, Array<Tensors> layers, Array<int64_t> cpus);

// A token for each row. logits: float32 [r, vocab_size]. choices: float64 [5, r]: temperatures, top_ks, top_ps, min_ps and points.
// tokens: int32 [r].
void draw_with(Team& team, std::vector<Drawer>& drawers, TensorView logits, TensorView choices, TensorView tokens) {
  check(logits.ndim() == 2 && is_float32(logits) && logits.IsContiguous() && logits.size(1) > 0,
        "logits must be float32 [r, vocab_size]");
  int64_t r = logits.size(0), vocab_size = logits.size(1);
  check(choices.dtype().code == kDLFloat && choices.dtype().bits == 64 && choices.IsContiguous() && choices.numel() == 5 * r,
        "choices must be float64 [5, r]");
  int32s(tokens, r, "tokens must be int32 [r]");
  const double* c = (const double*)choices.data_ptr();
  std::vector<Choice> made;
  for (int64_t i = 0; i < r; i++) {
    double temperature = c[i], top_k = c[r + i], top_p = c[2 * r + i], min_p = c[3 * r + i], point = c[4 * r + i];
    check(temperature > 0 && top_k >= 1 && top_p > 0 && top_p <= 1 && min_p >= 0 && min_p <= 1 && point >= 0 && point < 1,
          "a choice is out of range: temperature and top_p above 0, top_k from 1, top_p and min_p up to 1, point in [0, 1)");
    made.push_back({float(temperature), int64_t(std::min(top_k, double(vocab_size))), top_p, float(min_p), point});
  }
  draw(team, drawers, (const float*)logits.data_ptr(), vocab_size, made, (int32_t*)tokens.data_ptr());
}

namespace {

// Asks the system for large pages where it has them: `memory` begins and ends at their borders, and was not touched yet.
void use_large_pages(TensorView memory) {
  check(memory.IsContiguous(), "the memory must be contiguous");
#ifdef MADV_HUGEPAGE
  madvise(memory.data_ptr(), memory.numel() * memory.dtype().bits / 8, MADV_HUGEPAGE);
#endif
}

// job(row, end) of the rows from `row` on that are columns of one packed block, for each such block of [first, last).
template <class Job>
void shared_rows(int64_t first, int64_t last, int64_t num_threads, Job&& job) {
  Team team(int(num_threads), {});
  team.run([&](int rank) {
    team.share(rank, divided_up(last, kColumns) - first / kColumns, [&](int64_t item) {
      int64_t block = first / kColumns + item;
      job(std::max(first, block * kColumns), std::min(last, (block + 1) * kColumns));
    });
  });
}

// weight: [rows, in_features] -> the columns [first, first + rows) of packed: int32 [blocks, words, 32].
void pack(TensorView weight, int64_t first, TensorView packed, int64_t num_threads) {
  check(weight.ndim() == 2 && weight.IsContiguous(), "the weight must be a contiguous matrix");
  int64_t words = words_of_dtype(weight, weight.size(1)), width = weight.size(1) * weight.dtype().bits / 8;
  check(packed.ndim() == 3 && packed.IsContiguous() && packed.size(1) == words && packed.size(2) == kColumns &&
            packed.dtype().bits == 32 && 0 <= first && first + weight.size(0) <= packed.size(0) * kColumns,
        "the packed weights have another shape or dtype than the weight");
  shared_rows(first, first + weight.size(0), num_threads, [&](int64_t row, int64_t end) {
    pack_rows((const char*)weight.data_ptr() + (row - first) * width, row, end - row, width, (uint32_t*)packed.data_ptr());
  });
}

// A matrix quantized, or repacked where it is already, into the columns [first, first + rows) of packed: int32 [blocks, groups,
// words of a group], or [blocks, 1, words of a block] where columns have the scales. weight: [rows, in_features] where `stored` is
// "plain"; else uint8 [rows, bytes of a row], in blocks of that type of GGUF's.
void pack_quantized(TensorView weight, String stored, int64_t first, TensorView packed, int64_t num_threads) {
  check(weight.ndim() == 2 && weight.IsContiguous(), "the weight must be a contiguous matrix");
  check(packed.ndim() == 3 && packed.IsContiguous() && packed.dtype().bits == 32 && 0 <= first &&
            first + weight.size(0) <= packed.size(0) * kColumns,
        "there is no room for so many rows");
  int64_t row_bytes = weight.size(1) * weight.dtype().bits / 8, last = first + weight.size(0);
  auto blocks = [&](auto type) {
    using Stored = decltype(type);
    int64_t width = row_bytes / Stored::kBytes * Stored::kGroups * Stored::Packed::kGroup;
    check(row_bytes % Stored::kBytes == 0 && is_packed_as<typename Stored::Packed>(packed, width),
          "the packed weights are not of the shape of that type's");
    shared_rows(first, last, num_threads, [&](int64_t row, int64_t end) {
      auto* from = (const uint8_t*)weight.data_ptr() + (row - first) * row_bytes;
      pack_blocks<Stored>(from, row, end - row, row_bytes, packed.data_ptr());
    });
  };
  auto plain = [&](auto type) {
    using T = decltype(type);
    check(is_packed_as<Int8>(packed, weight.size(1)), "the packed weights are not of the shape of 8-bit ones");
    shared_rows(first, last, num_threads, [&](int64_t row, int64_t end) {
      auto* from = (const typename T::Element*)weight.data_ptr() + (row - first) * weight.size(1);
      pack_plain<T>(from, row, end - row, weight.size(1), packed.data_ptr());
    });
  };
  if (stored == "Q8_0") return blocks(Q8_0());
  if (stored == "Q4_0") return blocks(Q4_0());
  if (stored == "Q4_1") return blocks(Q4_1());
  if (stored == "Q4_K") return blocks(Q4_K());
  check(stored == "plain" && (is_float32(weight) || is_bfloat16(weight)), "weights stored so can't be packed");
  is_bfloat16(weight) ? plain(BFloat16()) : plain(Float32());
}

// head: packed, int32 [blocks, words, 32], of bfloat16 or float32 [columns, in_features]. screen: int32 [blocks, 1, words of a block];
// norms, errors: float32 [blocks, 32] (choosing.h).
void make_screen(TensorView head, bool bfloat16, int64_t in_features, TensorView screen, TensorView norms, TensorView errors,
                 int64_t num_threads) {
  int64_t num_blocks = head.size(0), words = bfloat16 ? words_of<BFloat16>(in_features) : in_features;
  check(head.ndim() == 3 && head.IsContiguous() && head.size(1) == words && head.size(2) == kColumns && screen.ndim() == 3 &&
            screen.IsContiguous() && screen.size(0) == num_blocks && is_packed_as<Int8>(screen, in_features),
        "head and screen must be packed, of as many columns");
  for (TensorView bound : {norms, errors})
    check(is_float32(bound) && bound.IsContiguous() && bound.numel() == num_blocks * kColumns,
          "norms and errors must be float32 [blocks, 32]");
  shared_rows(0, num_blocks * kColumns, num_threads, [&](int64_t row, int64_t) {
    auto* from = (const uint32_t*)head.data_ptr() + row * words;
    auto* to = Int8::block(screen.data_ptr(), row / kColumns, divided_up(in_features, Int8::kGroup));
    (bfloat16 ? screen_block<BFloat16> : screen_block<Float32>)(from, in_features, to, (float*)norms.data_ptr() + row,
                                                                (float*)errors.data_ptr() + row);
  });
}

void linear(TensorView x, TensorView packed, TensorView bias, TensorView out, int64_t num_threads) {
  check(x.ndim() == 2 && out.ndim() == 2 && x.size(0) == out.size(0) && x.IsContiguous() && out.IsContiguous() &&
            x.dtype() == out.dtype(),
        "x and out must be contiguous, of one dtype, and have as many rows");
  check(is_float32(x) || is_bfloat16(x), "the dtype must be float32 or bfloat16");
  check(bias.numel() == 0 || (is_float32(bias) && bias.numel() == out.size(1) && bias.IsContiguous()),
        "bias must be float32, as wide as out");
  (is_bfloat16(x) ? linear_of<BFloat16> : linear_of<Float32>)(x, packed, bias, out, num_threads);
}

// For tests: a model draws with its own threads.
void draw_alone(TensorView logits, TensorView choices, TensorView tokens, int64_t num_threads) {
  Team team(int(num_threads), {});
  std::vector<Drawer> drawers;
  draw_with(team, drawers, logits, choices, tokens);
}

// A model's functions, which hold its weights and its threads; both end with the last of them.
Map<String, Function> make_decoder(bool bfloat16, Map<String, double> shape, Tensors ends, Array<Tensors> layers,
                                   Array<int64_t> cpus) {
  return bfloat16 ? functions_of<BFloat16>(shape, ends, layers, cpus) : functions_of<Float32>(shape, ends, layers, cpus);
}

}  // namespace
}  // namespace tandem

TVM_FFI_DLL_EXPORT_TYPED_FUNC(pack, tandem::pack);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pack_quantized, tandem::pack_quantized);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_screen, tandem::make_screen);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(use_large_pages, tandem::use_large_pages);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear, tandem::linear);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(draw, tandem::draw_alone);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_decoder, tandem::make_decoder);
