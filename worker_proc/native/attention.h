// Causal attention over the paged pool, for decodes and chunks alike.
//
// What a change must not break:
// - Keys are taken in blocks of 64 positions counted from 0, and a row's blocks are merged in ascending order. So a row's result
//   is the same bits whatever rides along, wherever its chunk began, at any page size and with any number of threads.
// - Keys and values are read from the pool only, after the whole step's were written there.
// - A cell past a segment's end is never read. A key past a row's position counts as nothing, whatever it holds.
//
// Source: the running softmax of FlashAttention (arXiv 2205.14135); paged cells as in vLLM (arXiv 2309.06180).
#pragma once

#include <vector>

#include "rows.h"
#include "team.h"

namespace tandem {

constexpr int64_t kKeys = 64;        // of a block
constexpr int64_t kQueryRows = 96;   // queries of a group's heads that share one look at a block

// Keys and values of all layers: each [num_layers][num_blocks][num_kv_heads][64][head_dim], a block being 64 cells. So one head's
// neighbouring cells are read as one stream, and the pool fills from its begin, in large pages.
//
// The row of a cell: of its first head's key among all rows of a layer; the next head's is 64 further.
template <class T>
struct Pool {
  using Element = typename T::Element;
  static constexpr int64_t kCells = 64;  // of a block
  Element *keys, *values;
  int64_t num_blocks, num_kv_heads, head_dim;

  int64_t num_cells() const { return num_blocks * kCells; }
  int64_t place(int64_t layer, int64_t head) const {
    return (layer * num_blocks * num_kv_heads + head) * kCells * head_dim;
  }
  int64_t row(int64_t cell) const { return cell / kCells * kCells * num_kv_heads + cell % kCells; }
};

// `length` tokens of one sequence from position `start` on, whose rows in the step begin at `row`.
// cells: int32 [start + length], every position's row in the pool.
struct Segment {
  int64_t row, start, length;
  const int32_t* cells;
};

// A sequence's cells of one layer and one key head. keys, values: that head's first row. indices: the row of each of `count`
// positions.
template <class T>
struct Cells {
  const typename T::Element *keys, *values;
  const int32_t* indices;
  int64_t count;

  // Those of the positions from `first` on.
  Cells from(int64_t first) const { return {keys, values, indices + first, count - first}; }
};

// Asks for rows of the pool to come, as WeightsAhead does for weights. Into L2 only: a block of keys and values would drive out of
// L1 what is being computed.
struct RowsAhead {
  const char* at;

  void operator()(int64_t k) const {
    __builtin_prefetch(at + k * kColumns * 4, 0, 2);
    __builtin_prefetch(at + k * kColumns * 4 + 64, 0, 2);
  }
};

// Of two vectors `1 << stage` apart, which lanes of both go into the first and into the second.
struct Exchange {
  uint32_t low[4][kLanes] = {}, high[4][kLanes] = {};

  constexpr Exchange() {
    for (int stage = 0; stage < 4; stage++)
      for (int lane = 0; lane < kLanes; lane++) {
        int step = 1 << stage;
        low[stage][lane] = uint32_t(lane & step ? kLanes + lane - step : lane);
        high[stage][lane] = uint32_t(lane & step ? kLanes + lane : lane + step);
      }
  }
};

// Lanes of vectors become vectors of lanes: kLanes of each.
inline void transpose(Words (&rows)[kLanes]) {
  static constexpr Exchange kExchange;
#pragma GCC unroll 4
  for (int stage = 0; (1 << stage) < kLanes; stage++) {
    int step = 1 << stage;
    Words low = load<Words>(kExchange.low[stage]), high = load<Words>(kExchange.high[stage]);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++)
      if ((i & step) == 0) {
        Words first = rows[i], second = rows[i + step];
        rows[i] = __builtin_shuffle(first, second, low);
        rows[i + step] = __builtin_shuffle(first, second, high);
      }
  }
}

// What one thread needs to attend with one group of heads at a time.
template <class T>
class Attender {
 public:
  using Element = typename T::Element;

  Attender(int64_t group, int64_t head_dim) : group_(group), head_dim_(head_dim), words_(words_of<T>(head_dim)) {
    max_rows_ = std::max(kQueryRows, group);
    queries_.reserve(max_rows_, head_dim);
    chances_.reserve(max_rows_, kKeys);
    width_ = divided_up(head_dim, kColumns) * kColumns;
    keys_.assign(kKeys * words_);
    values_.assign(width_ * words_of<T>(kKeys));
    scores_.assign(max_rows_ * kKeys);
    sums_.assign(max_rows_ * width_);
    zeros_.assign(head_dim);
    tops_.resize(max_rows_);
    totals_.resize(max_rows_);
    fades_.resize(max_rows_);
  }

  // Positions that are attended together.
  int64_t positions() const { return max_rows_ / group_; }

  // Queries of the segment's tokens [first, first + count), of the heads that share one key head, whose cells are `own`.
  // queries(token): the group's heads of a token of the segment, side by side; out(token): where theirs go. next: where this
  // thread will probably read on.
  template <class Queries, class Out>
  void attend(const Segment& segment, int64_t first, int64_t count, const Cells<T>& own, const Cells<T>& next,
              Queries&& queries, Out&& out) {
    int64_t num_rows = count * group_, end = segment.start + first + count;
    for (int64_t row = 0; row < num_rows; row++)
      std::memcpy(queries_.row(row), queries(first + row / group_) + row % group_ * head_dim_, head_dim_ * sizeof(Element));
    std::fill_n(sums_.data(), num_rows * width_, 0.0f);
    std::fill_n(totals_.data(), num_rows, 0.0f);
    std::fill_n(tops_.data(), num_rows, -std::numeric_limits<float>::infinity());
    for (int64_t begin = 0; begin < end; begin += kKeys) {
      int64_t num_keys = std::min(kKeys, end - begin);
      Cells<T> ahead = begin + kKeys < end ? own.from(begin + kKeys) : next;
      pack_keys(own.from(begin), num_keys);
      score(num_rows, num_keys, ahead);
      for (int64_t row = 0; row < num_rows; row++) weigh(row, segment.start + first + row / group_ - begin);
      int64_t last_key = segment.start + first - begin;  // that the first row sees
      if (last_key >= num_keys - 1 || finite(own.from(begin), num_keys)) {
        pack_values(own.from(begin), num_keys);
        add_values(0, num_rows, num_keys, ahead);
      } else {
        // No times infinity is not nothing: each token's rows meet the values that they see, and no others.
        for (int64_t token = 0; token < count; token++)
          if (int64_t seen = std::min(num_keys, last_key + token + 1); seen > 0) {
            pack_values(own.from(begin), seen);
            add_values(token * group_, group_, seen, ahead);
          }
      }
    }
    for (int64_t row = 0; row < num_rows; row++) {
      float* sums = &sums_[row * width_];
      float share = 1.0f / totals_[row];
      for (int64_t c = 0; c < width_; c++) sums[c] *= share;
      narrow<T>(sums, head_dim_, out(first + row / group_) + row % group_ * head_dim_);
    }
  }

 private:
  // What to ask for while part `part` of `parts` of a block is computed: as large a part of the next one, on the guess that its
  // rows lie one after another in the pool.
  RowsAhead look_ahead(const Element* rows, const Cells<T>& ahead, int64_t part, int64_t parts) const {
    int64_t key = kKeys * part / parts;
    return {key < ahead.count ? (const char*)(rows + ahead.indices[key] * head_dim_) : (const char*)rows};
  }

  // The block's keys as the packed columns of a product.
  void pack_keys(const Cells<T>& own, int64_t num_keys) {
    for (int64_t key = 0; key < num_keys; key += kLanes) {
      int64_t count = std::min<int64_t>(kLanes, num_keys - key);
      const uint32_t* from[kLanes];
      for (int64_t i = 0; i < kLanes; i++)
        from[i] = (const uint32_t*)(own.keys + own.indices[key + std::min(i, count - 1)] * head_dim_);
      uint32_t* to = &keys_[key / kColumns * words_ * kColumns + key % kColumns];
      int64_t k = 0;
      for (; k + kLanes <= words_; k += kLanes) {
        Words rows[kLanes];
        for (int i = 0; i < kLanes; i++) rows[i] = load<Words>(from[i] + k);
        transpose(rows);
        for (int i = 0; i < kLanes; i++) store(to + (k + i) * kColumns, rows[i]);
      }
      for (; k < words_; k++)
        for (int i = 0; i < kLanes; i++) to[k * kColumns + i] = from[i][k];
    }
  }

  bool finite(const Cells<T>& own, int64_t num_keys) const {
    Floats zero = {};
    float rest = 0;
    for (int64_t key = 0; key < num_keys; key++) {
      const Element* value = own.values + own.indices[key] * head_dim_;
      along(head_dim_, [&](int64_t c) { zero += T::widen(value + c) * 0.0f; }, [&](int64_t c) { rest += T::widen(value[c]) * 0.0f; });
    }
    return sum(zero) + rest == 0.0f;
  }

  // The block's values as packed rows, two keys a word in bfloat16; one without a second is paired with zeros.
  void pack_values(const Cells<T>& own, int64_t num_keys) {
    int64_t block_words = words_of<T>(kKeys) * kColumns;
    for (int64_t word = 0; word < words_of<T>(num_keys); word++) {
      int64_t key = word * T::kPerWord, last = key + T::kPerWord - 1;
      const Element* first = own.values + own.indices[key] * head_dim_;
      const Element* second = last < num_keys ? own.values + own.indices[last] * head_dim_ : zeros_.data();
      uint32_t* to = &values_[word * kColumns];
      along(
          head_dim_, [&](int64_t c) { store(to + c / kColumns * block_words + c % kColumns, pair(first + c, second + c)); },
          [&](int64_t c) { to[c / kColumns * block_words + c % kColumns] = pair(first[c], second[c]); });
    }
  }

  // A widened bfloat16 stands in its word's upper half.
  static Words pair(const Element* first, const Element* second) {
    if constexpr (T::kPerWord == 1) return load<Words>(first);
    else return (Words)T::widen(first) >> 16 | (Words)T::widen(second);
  }

  static uint32_t pair(Element first, Element second) {
    if constexpr (T::kPerWord == 1) return as_word(first);
    else return as_word(T::widen(first)) >> 16 | as_word(T::widen(second));
  }

  void score(int64_t num_rows, int64_t num_keys, const Cells<T>& ahead) {
    for (int64_t column = 0; column < num_keys; column += kColumns)
      block_product<T>(&keys_[column * words_], words_, queries_.words(), num_rows,
                       look_ahead(ahead.keys, ahead, column / kColumns, kKeys / kColumns),
                       [&](int64_t row, int count, float(*sums)[kColumns]) {
                         for (int r = 0; r < count; r++)
                           std::memcpy(&scores_[(row + r) * kKeys + column], sums[r], sizeof sums[r]);
                       });
  }

  // Scores to chances against the highest score so far; what was summed up against a lower one has to fade.
  void weigh(int64_t row, int64_t last_key) {
    const float scale = kLog2E / std::sqrt(float(head_dim_)), none = -std::numeric_limits<float>::infinity();
    float* scores = &scores_[row * kKeys];
    Ints lanes;
    for (int i = 0; i < kLanes; i++) lanes[i] = i;
    Floats high = splat(tops_[row]);
    bool whole = last_key >= kKeys - 1;
    for (int64_t i = 0; i < kKeys; i += kLanes) {
      Floats seen = load<Floats>(scores + i) * scale;
      if (!whole) seen = select(lanes + int32_t(i) > int32_t(last_key), splat(none), seen);
      store(scores + i, seen);
      high = larger(high, seen);
    }
    float top = largest(high);
    fades_[row] = exp2(splat(tops_[row] - top))[0];
    tops_[row] = top;
    Floats total = {};
    for (int64_t i = 0; i < kKeys; i += kLanes) {
      Floats chances = exp2(load<Floats>(scores + i) - top);
      total += chances;
      T::narrow(chances_.row(row) + i, chances);
    }
    totals_[row] = totals_[row] * fades_[row] + sum(total);
  }

  // To the sums of rows [first, first + num_rows).
  void add_values(int64_t first, int64_t num_rows, int64_t num_keys, const Cells<T>& ahead) {
    RowWords chances = chances_.words();
    chances.words += first * chances.stride;
    int64_t words = words_of<T>(num_keys), num_words = words_of<T>(kKeys);
    for (int64_t column = 0; column < width_; column += kColumns)
      block_product<T>(&values_[column * num_words], words, chances, num_rows,
                       look_ahead(ahead.values, ahead, column / kColumns, width_ / kColumns),
                       [&](int64_t row, int count, float(*found)[kColumns]) {
                         for (int r = 0; r < count; r++) {
                           float* sums = &sums_[(first + row + r) * width_ + column];
                           float fade = fades_[first + row + r];
                           for (int c = 0; c < kColumns; c++) sums[c] = sums[c] * fade + found[r][c];
                         }
                       });
  }

  int64_t group_, head_dim_, words_, max_rows_, width_;
  Rows<T> queries_, chances_;           // [max_rows] of head_dim, of kKeys
  Buffer<uint32_t> keys_, values_;             // packed
  Buffer<float> scores_, sums_;                // [max_rows] of kKeys, of width: head_dim in whole blocks
  std::vector<float> tops_, totals_, fades_;   // [max_rows]
  Buffer<Element> zeros_;                      // [head_dim]
};

// Tokens of one segment that are attended together.
struct QueryBlock {
  int64_t segment, first, count;
};

inline std::vector<QueryBlock> query_blocks(const std::vector<Segment>& segments, int64_t positions) {
  std::vector<QueryBlock> blocks;
  for (int64_t s = 0; s < int64_t(segments.size()); s++)
    for (int64_t first = 0; first < segments[s].length; first += positions)
      blocks.push_back({s, first, std::min(positions, segments[s].length - first)});
  return blocks;
}

}  // namespace tandem
