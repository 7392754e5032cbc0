// A decoder-only transformer of the Llama kind, whole: token ids in, the next tokens and their logits out.
//
// What a change must not break:
// - A layer's keys and values of the whole step are in the pool before anything of that layer attends.
// - The residual stream is float32; what products take is rounded to the model's format once.
// - Every rank runs the same lines; what they share out (`share`, `multiply`) ends with a barrier.
// - Of the last layer only keys and values are there for every row; the rest of it is computed of the rows kept alone.
//
// Source: Llama (arXiv 2302.13971), Qwen3 (arXiv 2505.09388).
#pragma once

#include <numeric>

#include "attention.h"
#include "choosing.h"

namespace tandem {

struct Shape {
  int64_t hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, vocab_size;
  float eps;

  int64_t query_width() const { return num_heads * head_dim; }
  int64_t key_width() const { return num_kv_heads * head_dim; }
};

// gate_up: its packed blocks of 32 columns hold 16 of the gate, then the same 16 of the other matrix.
// query_norm, key_norm: [head_dim], or null in families without.
struct Layer {
  const float *input_norm, *query_norm, *key_norm, *mlp_norm;
  Matrix qkv, out, gate_up, down;
};

// The ends of the model. embedding: packed as the head is, or nothing where the head serves. frequencies: radians per position,
// [head_dim / 2]; magnitude: what cos and sin are multiplied with. screen: of the head, or nothing.
struct Ends {
  Matrix embedding, head;
  Screen screen;
  const float *norm, *frequencies;
  float magnitude;
};

// One step. ids, positions, out_loc: [num_rows]. segments: their rows one after another. kept: ascending, rows whose logits may be
// asked for.
struct Step {
  int64_t num_rows;
  const int32_t *ids, *positions, *out_loc;
  std::vector<Segment> segments;
  std::vector<int32_t> kept;
};

template <class T>
class Decoder {
 public:
  using Element = typename T::Element;

  Decoder(Shape shape, std::vector<Layer> layers, Ends ends, Team& team)
      : shape_(shape), layers_(std::move(layers)), ends_(ends), team_(team), products_(team), chooser_(ends.head, ends.screen, team),
        floats_(team.size()), elements_(team.size()) {
    for (int rank = 0; rank < team.size(); rank++) {
      attenders_.emplace_back(shape.num_heads / shape.num_kv_heads, shape.head_dim);
      floats_[rank].reserve(std::max(shape.hidden_size, shape.head_dim));
      elements_[rank].reserve(2 * shape.head_dim);
    }
  }

  // asked: by their place among the rows kept.
  void run(const Step& step, const Pool<T>& pool, const Asked& asked) {
    reserve(step.num_rows);
    every_row_.resize(step.num_rows);
    std::iota(every_row_.begin(), every_row_.end(), 0);
    blocks_ = query_blocks(step.segments, every_row_, attenders_[0].positions());
    kept_blocks_ = query_blocks(step.segments, step.kept, attenders_[0].positions());
    chooser_.begin(asked);
    team_.run([&](int rank) {
      embed(rank, step);
      int64_t last = int64_t(layers_.size()) - 1;
      for (int64_t layer = 0; layer < last; layer++) {
        project(rank, layer, step, pool);
        attend(rank, layer, step, pool, blocks_, step.num_rows);
        transform(rank, layers_[layer], step.num_rows);
      }
      project(rank, last, step, pool);
      keep(rank, step);
      attend(rank, last, step, pool, kept_blocks_, int64_t(step.kept.size()));
      transform(rank, layers_[last], int64_t(step.kept.size()));
      choose(rank, asked);
    });
    chooser_.end(asked);
  }

  // Logits of any rows that the last step has kept.
  void answer(const Asked& asked) {
    chooser_.begin(asked);
    team_.run([&](int rank) { choose(rank, asked); });
    chooser_.end(asked);
  }

 private:
  void reserve(int64_t num_rows) {
    residual_.reserve(num_rows * residual_stride());
    cos_.reserve(num_rows * shape_.head_dim / 2);
    sin_.reserve(num_rows * shape_.head_dim / 2);
    normed_.reserve(num_rows, shape_.hidden_size);
    qkv_.reserve(num_rows, shape_.query_width() + 2 * shape_.key_width());
    attended_.reserve(num_rows, shape_.query_width());
    gated_.reserve(num_rows, shape_.intermediate_size);
    products_.reserve(num_rows, std::max({shape_.hidden_size, shape_.query_width(), shape_.intermediate_size}));
  }

  // One cache line more than the rows fill, as RowWords has it.
  int64_t residual_stride() const { return divided_up(shape_.hidden_size, 16) * 16 + 16; }
  float* residual(int64_t row) { return residual_.data() + row * residual_stride(); }
  float* cos(int64_t row) { return cos_.data() + row * shape_.head_dim / 2; }
  float* sin(int64_t row) { return sin_.data() + row * shape_.head_dim / 2; }

  void embed(int rank, const Step& step) {
    team_.share(rank, step.num_rows, [&](int64_t row) {
      for (int64_t i = 0; i < shape_.head_dim / 2; i++) {
        float angle = float(step.positions[row]) * ends_.frequencies[i];
        cos(row)[i] = std::cos(angle) * ends_.magnitude;
        sin(row)[i] = std::sin(angle) * ends_.magnitude;
      }
      const Matrix& table = ends_.embedding.packed != nullptr ? ends_.embedding : ends_.head;
      products_.look_up(rank, table, step.ids[row], residual(row));
    });
  }

  void norm_row(int rank, int64_t row, const float* weight, Rows<T>& rows, int64_t to) {
    float* scratch = floats_[rank].data();
    norm(residual(row), weight, shape_.hidden_size, shape_.eps, scratch);
    narrow<T>(scratch, shape_.hidden_size, rows.row(to));
    rows.pad(to);
  }

  // Queries, keys and values of norm(x).
  void project(int rank, int64_t index, const Step& step, const Pool<T>& pool) {
    const Layer& layer = layers_[index];
    int64_t n = step.num_rows;
    team_.share(rank, n, [&](int64_t row) { norm_row(rank, row, layer.input_norm, normed_, row); });
    products_.multiply(rank, layer.qkv, normed_, n, [&](int64_t row, int64_t column, const float* sums) {
      put(sums, std::min(kColumns, qkv_.width() - column), qkv_.row(row) + column);
    });
    team_.share(rank, n, [&](int64_t row) { place(rank, index, row, step.out_loc[row], pool); });
  }

  // What is left of the step from here on: the rows kept, side by side.
  void keep(int rank, const Step& step) {
    team_.share(rank, 1, [&](int64_t) {
      for (int64_t i = 0; i < int64_t(step.kept.size()); i++) {
        int64_t row = step.kept[i];
        if (row == i) continue;
        std::memcpy(residual(i), residual(row), shape_.hidden_size * sizeof(float));
        std::memcpy(qkv_.row(i), qkv_.row(row), shape_.query_width() * sizeof(typename T::Activation));
      }
    });
  }

  // x += attention, of n rows in these blocks.
  void attend(int rank, int64_t index, const Step& step, const Pool<T>& pool, const std::vector<QueryBlock>& blocks,
              int64_t n) {
    int64_t num_kv_heads = shape_.num_kv_heads, group_width = shape_.query_width() / num_kv_heads;
    int64_t num_items = int64_t(blocks.size()) * num_kv_heads;
    auto cells = [&](int64_t item) -> Cells<T> {
      if (item == num_items) return {};
      const Segment& segment = step.segments[blocks[item / num_kv_heads].segment];
      return {pool.head(index, item % num_kv_heads), segment.cells, segment.start + segment.length};
    };
    team_.share(rank, num_items, [&](int64_t item) {
      const QueryBlock& block = blocks[item / num_kv_heads];
      int64_t row = block.row - block.first, column = item % num_kv_heads * group_width;
      attenders_[rank].attend(
          step.segments[block.segment], block.first, block.count, cells(item), cells(item + 1),
          [&](int64_t token) { return qkv_.row(row + token) + column; },
          [&](int64_t token) { return attended_.row(row + token) + column; });
    });
    add(rank, layers_[index].out, attended_, n);
  }

  // A row's queries and keys normed and turned; its keys and values into the pool.
  void place(int rank, int64_t index, int64_t row, int64_t cell, const Pool<T>& pool) {
    const Layer& layer = layers_[index];
    int64_t size = shape_.head_dim;
    auto turned = [&](const auto* from, const float* weight, auto* to) {
      if (size == 4 * kLanes) turn_in_registers<T, 4>(from, weight, shape_.eps, cos(row), sin(row), to);
      else if (size == 8 * kLanes) turn_in_registers<T, 8>(from, weight, shape_.eps, cos(row), sin(row), to);
      else turn<T>(from, weight, size, shape_.eps, cos(row), sin(row), floats_[rank].data(), to);
    };
    auto* queries = qkv_.row(row);
    for (int64_t head = 0; head < shape_.num_heads; head++) turned(queries + head * size, layer.query_norm, queries + head * size);
    const auto *keys = queries + shape_.query_width(), *values = keys + shape_.key_width();
    Element *key = elements_[rank].data(), *value = key + size;
    for (int64_t head = 0; head < shape_.num_kv_heads; head++) {
      turned(keys + head * size, layer.key_norm, key);
      pool.head(index, head).put(cell, key, as_elements(values + head * size, floats_[rank].data(), value));
    }
  }

  // A head's activations as the pool has them: as they are, or in `room`.
  const Element* as_elements(const typename T::Activation* from, float* scratch, Element* room) const {
    if constexpr (std::is_same_v<typename T::Activation, Element>) {
      return from;
    } else {
      widen<T>(from, shape_.head_dim, scratch);
      narrow<T>(scratch, shape_.head_dim, room);
      return room;
    }
  }

  // x += mlp(norm(x)). Source: SwiGLU (arXiv 2002.05202).
  void transform(int rank, const Layer& layer, int64_t n) {
    constexpr int64_t kHalf = kColumns / 2;
    team_.share(rank, n, [&](int64_t row) { norm_row(rank, row, layer.mlp_norm, normed_, row); });
    products_.multiply(rank, layer.gate_up, normed_, n, [&](int64_t row, int64_t column, float* sums) {
      for (int64_t c = 0; c < kHalf; c += kLanes)
        store(sums + c, silu(load<Floats>(sums + c)) * load<Floats>(sums + kHalf + c));
      int64_t first = column / 2;
      put(sums, std::min(kHalf, gated_.width() - first), gated_.row(row) + first);
      if (first + kHalf >= gated_.width()) gated_.pad(row);
    });
    add(rank, layer.down, gated_, n);
  }

  void add(int rank, const Matrix& weight, Rows<T>& x, int64_t n) {
    products_.multiply(rank, weight, x, n, [&](int64_t row, int64_t column, const float* sums) {
      float* to = residual(row) + column;
      int64_t count = std::min(kColumns, shape_.hidden_size - column);
      along(count, [&](int64_t c) { store(to + c, load<Floats>(to + c) + load<Floats>(sums + c)); }, [&](int64_t c) { to[c] += sums[c]; });
    });
  }

  void choose(int rank, const Asked& asked) {
    chooser_.choose(rank, asked, [&](int64_t row, Rows<T>& rows, int64_t to) { norm_row(rank, row, ends_.norm, rows, to); });
  }

  // Whole blocks are what nearly all calls are of: the compiler makes straight lines of them.
  static void put(const float* sums, int64_t count, typename T::Activation* to) {
    if (count == kColumns) narrow<T>(sums, kColumns, to);
    else if (count == kColumns / 2) narrow<T>(sums, kColumns / 2, to);
    else narrow<T>(sums, count, to);
  }

  const Shape shape_;
  const std::vector<Layer> layers_;
  const Ends ends_;
  Team& team_;
  Buffer<float> residual_, cos_, sin_;  // [rows] of hidden_size, of head_dim / 2
  Rows<T> normed_, qkv_, attended_, gated_;
  Products<T> products_;
  Chooser<T> chooser_;
  std::vector<int32_t> every_row_;
  std::vector<QueryBlock> blocks_, kept_blocks_;
  std::vector<Attender<T>> attenders_;     // a rank's each, as are these:
  std::vector<Buffer<float>> floats_;      // a row, or a head of it
  std::vector<Buffer<Element>> elements_;  // a key and a value
};

}  // namespace tandem
