// What Python gets to call of a model, in one number format: float32.cpp and bfloat16.cpp compile it, side by side.
#pragma once

#include "decoder.h"
#include "sampling.h"
#include "tensors.h"

namespace tandem {

// In exports.cpp.
void draw_with(Team& team, std::vector<Drawer>& drawers, TensorView logits, TensorView choices, TensorView tokens);

// x: [n, in_features] -> out: [n, out_features], of x's dtype. bias: float32 [out_features], or of no element. For tests: a model
// computes its products within a step.
template <class T>
void linear_of(TensorView x, TensorView packed, TensorView bias, TensorView out, int64_t num_threads) {
  const float* offset = bias.numel() == 0 ? nullptr : (const float*)bias.data_ptr();
  Matrix weight = matrix_of<T>(packed, offset, out.size(1), x.size(1), "the packed weights have another shape or dtype than x and out");
  using Element = typename T::Element;
  Rows<T> rows;
  rows.reserve(x.size(0), x.size(1));
  std::vector<float> widened(x.size(1));
  for (int64_t row = 0; row < x.size(0); row++) {
    widen<T>((const Element*)x.data_ptr() + row * x.size(1), x.size(1), widened.data());
    narrow<T>(widened.data(), x.size(1), rows.row(row));
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
    if (ends.count("screen")) {
      int64_t columns = divided_up(shape_.vocab_size, kColumns) * kColumns;
      e.screen = {matrix(ends, "screen", shape_.vocab_size, hidden), floats(ends, "screen_norms", columns),
                  floats(ends, "screen_errors", columns)};
      check(e.screen.weights.format == Format::kInt8 && e.head.format == Format::kPlain && e.head.bias == nullptr,
            "only a plain head without a bias has a screen, of 8 bits");
    }
    e.norm = floats(ends, "norm", hidden);
    e.frequencies = floats(ends, "frequencies", shape_.head_dim / 2);
    e.magnitude = float(shape.at("rope_magnitude"));
    decoder_ = std::make_unique<Decoder<T>>(shape_, std::move(made), e, team_);
  }

  // segments: int32 [4, s], the slots, starts, lengths and first rows. tokens: int32 [3, n], ids, positions and out_loc.
  // sampled: int32 [3, r]: rows, the logits' rows they are kept in (or -1), and room for the tokens. every_row: whether `answer`
  // may be asked for any row afterwards, and not only for those.
  void run(TensorView segments, TensorView tokens, TensorView page_table, int64_t page_size, TensorView keys,
           TensorView values, TensorView sampled, TensorView logits, bool every_row) {
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
    Step step = {n, token, token + n, token + 2 * n, {}, kept(sampled, n, every_row)};
    kept_.clear();
    Asked ends = asked(sampled, logits, step.kept);
    cells_.clear();
    std::vector<int64_t> places;
    int64_t next = 0;
    for (int64_t i = 0; i < s; i++) {
      places.push_back(int64_t(cells_.size()));
      int64_t slot = seg[i], end = seg[s + i] + seg[2 * s + i], row = seg[3 * s + i];
      check(0 <= slot && slot < page_table.size(0) && 0 <= seg[s + i] && 0 < seg[2 * s + i] && end <= num_pages * page_size &&
                row == next && row + seg[2 * s + i] <= n,
            "a segment is not within its slot or the step, or doesn't follow the one before");
      next = row + seg[2 * s + i];
      for (int64_t page = 0; page * page_size < end; page++) {
        int64_t first = int64_t(table[slot * num_pages + page]) * page_size;
        check(0 <= first && first + page_size <= pool.num_cells(), "a page is not in the pool");
        for (int64_t offset = 0; offset < std::min(page_size, end - page * page_size); offset++)
          cells_.push_back(int32_t(first + offset));
      }
    }
    for (int64_t i = 0; i < s; i++)
      step.segments.push_back({seg[3 * s + i], seg[s + i], seg[2 * s + i], cells_.data() + places[i]});
    decoder_->run(step, pool, ends);
    kept_ = std::move(step.kept);
  }

  // As run's last two, for any rows that the last step has kept.
  void answer(TensorView sampled, TensorView logits) { decoder_->answer(asked(sampled, logits, kept_)); }

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

  static const int32_t* rows_of(TensorView sampled) {
    check(sampled.ndim() == 2, "sampled must be int32 [3, r]");
    return int32s(sampled, 3 * sampled.size(1), "sampled must be int32 [3, r]");
  }

  // The step's rows that are asked for, or all n, ascending.
  static std::vector<int32_t> kept(TensorView sampled, int64_t n, bool every_row) {
    const int32_t* rows = rows_of(sampled);
    std::vector<int32_t> found(rows, rows + sampled.size(1));
    for (int32_t row : found) check(0 <= row && row < n, "a sampled row is not in the step");
    if (every_row) {
      found.resize(n);
      std::iota(found.begin(), found.end(), 0);
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
  }

  Asked asked(TensorView sampled, TensorView logits, const std::vector<int32_t>& kept) {
    check(logits.ndim() == 2 && logits.size(1) == shape_.vocab_size && is_float32(logits) && logits.IsContiguous(),
          "logits must be float32 [kept, vocab_size]");
    int64_t r = sampled.size(1);
    const int32_t* rows = rows_of(sampled);
    places_.resize(r);
    for (int64_t i = 0; i < r; i++) {
      auto found = std::lower_bound(kept.begin(), kept.end(), rows[i]);
      check(found != kept.end() && *found == rows[i], "a sampled row was not kept of the step");
      check(-1 <= rows[r + i] && rows[r + i] < logits.size(0), "a sampled row's logits have no room");
      places_[i] = int32_t(found - kept.begin());
    }
    return {r, places_.data(), rows + r, (int32_t*)sampled.data_ptr() + 2 * r, (float*)logits.data_ptr()};
  }

  Tensors ends_;  // these two keep the weights alive
  Array<Tensors> layers_;
  Team team_;
  Shape shape_;
  std::vector<int32_t> cells_;
  std::vector<int32_t> kept_, places_;  // rows of the last step; where those asked for stand among them
  std::vector<Drawer> drawers_;
  std::unique_ptr<Decoder<T>> decoder_;
};

template <class T>
Map<String, Function> functions_of(Map<String, double> shape, Tensors ends, Array<Tensors> layers, Array<int64_t> cpus) {
  auto model = std::make_shared<Model<T>>(shape, ends, layers, cpus);
  Map<String, Function> functions;
  functions.Set("run", Function::FromTyped([model](TensorView segments, TensorView tokens, TensorView page_table,
                                                   int64_t page_size, TensorView keys, TensorView values,
                                                   TensorView sampled, TensorView logits, bool every_row) {
    model->run(segments, tokens, page_table, page_size, keys, values, sampled, logits, every_row);
  }));
  functions.Set("answer", Function::FromTyped([model](TensorView sampled, TensorView logits) {
    model->answer(sampled, logits);
  }));
  functions.Set("draw", Function::FromTyped([model](TensorView logits, TensorView choices, TensorView tokens) {
    model->draw(logits, choices, tokens);
  }));
  return functions;
}

}  // namespace tandem
