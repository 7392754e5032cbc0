// What Python calls. Tensors are checked here, where they come in.
#include <sys/mman.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include "decoder.h"
#include "sampling.h"

namespace tandem {
namespace {

using tvm::ffi::Any;
using tvm::ffi::Array;
using tvm::ffi::Function;
using tvm::ffi::Map;
using tvm::ffi::String;
using tvm::ffi::Tensor;
using tvm::ffi::TensorView;
using Tensors = Map<String, Tensor>;

void check(bool held, const char* what) {
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

const int32_t* int32s(const TensorView& t, int64_t size, const char* what) {
  check(t.dtype().code == kDLInt && t.dtype().bits == 32 && t.IsContiguous() && t.numel() == size, what);
  return (const int32_t*)t.data_ptr();
}

int64_t words_of_dtype(const TensorView& t, int64_t features) {
  check(is_float32(t) || is_bfloat16(t), "the dtype must be float32 or bfloat16");
  return is_bfloat16(t) ? words_of<BFloat16>(features) : features;
}

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

template <class Q, class View>
bool is_packed_as(const View& packed, int64_t width) {
  return packed.size(1) == divided_up(width, Q::kGroup) && packed.size(2) * 4 == int64_t(sizeof(typename Q::Group));
}

// A matrix quantized, or repacked where it is already, into the columns [first, first + rows) of packed: int32 [blocks, groups,
// words of a group]. weight: [rows, in_features] where `stored` is "plain"; else uint8 [rows, bytes of a row], in blocks of that
// type of GGUF's.
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

// The format follows from the size of a packed group.
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

// x: [n, in_features] -> out: [n, out_features], of x's dtype. bias: float32 [out_features], or of no element. For tests: a model
// computes its products within a step.
template <class T>
void linear_of(TensorView x, TensorView packed, TensorView bias, TensorView out, int64_t num_threads) {
  const float* offset = bias.numel() == 0 ? nullptr : (const float*)bias.data_ptr();
  Matrix weight = matrix_of<T>(packed, offset, out.size(1), x.size(1), "the packed weights have another shape or dtype than x and out");
  using Element = typename T::Element;
  Rows<T> rows;
  rows.reserve(x.size(0), x.size(1));
  for (int64_t row = 0; row < x.size(0); row++) {
    std::copy_n((const Element*)x.data_ptr() + row * x.size(1), x.size(1), rows.row(row));
    rows.pad(row);
  }
  Team team(int(num_threads), {});
  Products<T> products(team);
  products.reserve(x.size(0), x.size(1));
  team.run([&](int rank) {
    products.multiply(rank, weight, rows, x.size(0), [&](int64_t row, int64_t column, const float* sums) {
      int64_t count = std::min(kColumns, out.size(1) - column);
      narrow<T>(sums, count, (Element*)out.data_ptr() + row * out.size(1) + column);
    });
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

// For tests: a model draws with its own threads.
void draw_alone(TensorView logits, TensorView choices, TensorView tokens, int64_t num_threads) {
  Team team(int(num_threads), {});
  std::vector<Drawer> drawers;
  draw_with(team, drawers, logits, choices, tokens);
}

template <class T>
class Model {
 public:
  Model(Map<String, double> shape, Tensors ends, Array<Tensors> layers, Array<int64_t> cpus)
      : ends_(ends), layers_(layers), team_(int(number(shape, "num_threads")), {cpus.begin(), cpus.end()}) {
    shape_ = {number(shape, "hidden_size"), number(shape, "intermediate_size"), number(shape, "num_heads"),
              number(shape, "num_kv_heads"), number(shape, "head_dim"), number(shape, "vocab_size"),
              float(shape.at("rms_norm_eps"))};
    int64_t hidden = shape_.hidden_size, inner = shape_.intermediate_size;
    std::vector<Layer> made;
    for (const Tensors& layer : layers) {
      Layer l = {};
      l.input_norm = floats(layer, "input_norm", hidden);
      l.query_norm = floats(layer, "query_norm", shape_.head_dim, true);
      l.key_norm = floats(layer, "key_norm", shape_.head_dim, true);
      l.mlp_norm = floats(layer, "mlp_norm", hidden);
      l.qkv = matrix(layer, "qkv", shape_.query_width() + 2 * shape_.key_width(), hidden);
      l.out = matrix(layer, "out", hidden, shape_.query_width());
      l.gate_up = matrix(layer, "gate_up", divided_up(inner, kColumns / 2) * kColumns, hidden);
      l.down = matrix(layer, "down", hidden, inner);
      made.push_back(l);
    }
    Ends e = {};
    if (ends.count("embedding")) e.embedding = matrix(ends, "embedding", shape_.vocab_size, hidden);
    e.head = matrix(ends, "head", shape_.vocab_size, hidden);
    e.norm = floats(ends, "norm", hidden);
    e.frequencies = floats(ends, "frequencies", shape_.head_dim / 2);
    e.magnitude = float(shape.at("rope_magnitude"));
    decoder_ = std::make_unique<Decoder<T>>(shape_, std::move(made), e, team_);
  }

  // segments: int32 [4, s], the slots, starts, lengths and first rows. tokens: int32 [3, n], ids, positions and out_loc.
  // sampled: int32 [3, r]: rows, the logits' rows they are kept in (or -1), and room for the tokens.
  void run(TensorView segments, TensorView tokens, TensorView page_table, int64_t page_size, TensorView keys,
           TensorView values, TensorView sampled, TensorView logits) {
    check(segments.ndim() == 2 && tokens.ndim() == 2 && page_table.ndim() == 2, "the step's arrays have the wrong shapes");
    int64_t s = segments.size(1), n = tokens.size(1), num_pages = page_table.size(1);
    const int32_t* seg = int32s(segments, 4 * s, "segments must be int32 [4, s]");
    const int32_t* token = int32s(tokens, 3 * n, "tokens must be int32 [3, n]");
    const int32_t* table = int32s(page_table, page_table.numel(), "page_table must be int32");
    Pool<T> pool = pool_of(keys, values, page_size % kTileCells == 0);
    for (int64_t i = 0; i < n; i++) {
      check(0 <= token[i] && token[i] < shape_.vocab_size, "a token id is not in the vocabulary");
      check(0 <= token[2 * n + i] && token[2 * n + i] < pool.num_cells(), "an out_loc is not in the pool");
    }
    Step step = {n, token, token + n, token + 2 * n, {}};
    cells_.clear();
    std::vector<int64_t> places;
    for (int64_t i = 0; i < s; i++) {
      places.push_back(int64_t(cells_.size()));
      int64_t slot = seg[i], end = seg[s + i] + seg[2 * s + i], row = seg[3 * s + i];
      check(0 <= slot && slot < page_table.size(0) && 0 <= seg[s + i] && 0 < seg[2 * s + i] && end <= num_pages * page_size &&
                0 <= row && row + seg[2 * s + i] <= n,
            "a segment is not within its slot or the step");
      for (int64_t page = 0; page * page_size < end; page++) {
        int64_t first = int64_t(table[slot * num_pages + page]) * page_size;
        check(0 <= first && first + page_size <= pool.num_cells(), "a page is not in the pool");
        for (int64_t offset = 0; offset < std::min(page_size, end - page * page_size); offset++)
          cells_.push_back(int32_t(first + offset));
      }
    }
    for (int64_t i = 0; i < s; i++)
      step.segments.push_back({seg[3 * s + i], seg[s + i], seg[2 * s + i], cells_.data() + places[i]});
    decoder_->run(step, pool, asked(sampled, logits, n));
  }

  // As run's last two, for any rows of the last step.
  void answer(TensorView sampled, TensorView logits) { decoder_->answer(asked(sampled, logits, decoder_->num_rows())); }

  void draw(TensorView logits, TensorView choices, TensorView tokens) { draw_with(team_, drawers_, logits, choices, tokens); }

 private:
  static int64_t number(const Map<String, double>& shape, const char* name) { return int64_t(shape.at(name)); }

  static const float* floats(const Tensors& from, const char* name, int64_t size, bool optional = false) {
    if (optional && !from.count(name)) return nullptr;
    Tensor t = from.at(name);
    check(is_float32(t) && t.IsContiguous() && t.numel() == size, name);
    return (const float*)t.data_ptr();
  }

  static Matrix matrix(const Tensors& from, const std::string& name, int64_t out_features, int64_t in_features) {
    const float* bias = floats(from, (name + "_bias").c_str(), out_features, true);
    return matrix_of<T>(from.at(name), bias, out_features, in_features, name.c_str());
  }

  Pool<T> pool_of(TensorView keys, TensorView values, bool tiled) {
    check(keys.ndim() == 5 && keys.IsContiguous() && values.IsContiguous() && keys.size(0) == int64_t(layers_.size()) &&
              keys.size(2) == shape_.num_kv_heads && keys.size(3) == kBlockCells &&
              keys.size(4) == padded(shape_.head_dim) && keys.numel() == values.numel() &&
              keys.dtype().bits == 8 * int(sizeof(typename T::Element)) && values.dtype() == keys.dtype() &&
              keys.size(1) * kBlockCells <= std::numeric_limits<int32_t>::max(),
          "keys and values must be [num_layers, blocks, num_kv_heads, 64, padded head_dim] of the model's dtype, of less than"
          " 2^31 cells");
    return {(uint32_t*)keys.data_ptr(), (uint32_t*)values.data_ptr(), keys.size(1), keys.size(2), shape_.head_dim, tiled};
  }

  Asked asked(TensorView sampled, TensorView logits, int64_t num_rows) {
    check(sampled.ndim() == 2 && logits.ndim() == 2 && logits.size(1) == shape_.vocab_size && is_float32(logits) &&
              logits.IsContiguous(),
          "logits must be float32 [kept, vocab_size]");
    int64_t r = sampled.size(1);
    const int32_t* rows = int32s(sampled, 3 * r, "sampled must be int32 [3, r]");
    for (int64_t i = 0; i < r; i++)
      check(0 <= rows[i] && rows[i] < num_rows && -1 <= rows[r + i] && rows[r + i] < logits.size(0),
            "a sampled row is not in the step or its logits have no room");
    return {r, rows, rows + r, (int32_t*)sampled.data_ptr() + 2 * r, (float*)logits.data_ptr()};
  }

  Tensors ends_;  // these two keep the weights alive
  Array<Tensors> layers_;
  Team team_;
  Shape shape_;
  std::vector<int32_t> cells_;
  std::vector<Drawer> drawers_;
  std::unique_ptr<Decoder<T>> decoder_;
};

template <class T>
Map<String, Function> functions_of(Map<String, double> shape, Tensors ends, Array<Tensors> layers, Array<int64_t> cpus) {
  auto model = std::make_shared<Model<T>>(shape, ends, layers, cpus);
  Map<String, Function> functions;
  functions.Set("run", Function::FromTyped([model](TensorView segments, TensorView tokens, TensorView page_table,
                                                   int64_t page_size, TensorView keys, TensorView values,
                                                   TensorView sampled, TensorView logits) {
    model->run(segments, tokens, page_table, page_size, keys, values, sampled, logits);
  }));
  functions.Set("answer", Function::FromTyped([model](TensorView sampled, TensorView logits) {
    model->answer(sampled, logits);
  }));
  functions.Set("draw", Function::FromTyped([model](TensorView logits, TensorView choices, TensorView tokens) {
    model->draw(logits, choices, tokens);
  }));
  return functions;
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
TVM_FFI_DLL_EXPORT_TYPED_FUNC(use_large_pages, tandem::use_large_pages);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear, tandem::linear);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(draw, tandem::draw_alone);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_decoder, tandem::make_decoder);
