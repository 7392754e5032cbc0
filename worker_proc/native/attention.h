// Causal attention over the paged pool, for decodes and chunks alike.
//
// What a change must not break:
// - Keys are taken in blocks of 64 positions counted from 0, and a row's blocks are merged in ascending order. So a row's result
//   is the same bits whatever rides along, wherever its chunk began, at any page size and with any number of threads.
// - Keys and values are read from the pool only, after the whole step's were written there.
// - A cell past a segment's end counts as nothing, whatever it holds, and so does a key past a row's position.
//
// Source: the running softmax of FlashAttention (arXiv 2205.14135); paged cells as in vLLM (arXiv 2309.06180).
#pragma once

#include <vector>

#include "team.h"
#include "tiles.h"

namespace tandem {

constexpr int64_t kQueryRows = 96;  // queries of a group's heads that share one look at a block

// `length` tokens of one sequence from position `start` on, whose rows in the step begin at `row`.
// cells: int32 [start + length], where every position's key and value are in the pool.
struct Segment {
  int64_t row, start, length;
  const int32_t* cells;
};

// Registers of columns that a tile of so many rows computes at once: few rows need more, so that no sum waits for itself.
constexpr int wide_for(int rows) { return rows <= kMaxRows / 2 ? 4 : 2; }
// Of values, of which there are more columns than keys in a block.
constexpr int value_wide_for(int rows) { return kLanes == 16 && rows <= 2 ? 8 : wide_for(rows); }

// Cache lines of the next block that are asked for every k of a product: about a quarter of them in each of the two.
template <int WIDE>
constexpr int64_t kLinesAsked = WIDE * kLanes > 32 ? WIDE * kLanes / 32 : 1;

// What one thread needs to attend with one group of heads at a time.
template <class T>
class Attender {
 public:
  using Activation = typename T::Activation;

  Attender(int64_t group, int64_t head_dim)
      : group_(group), head_dim_(head_dim), words_(words_of<T>(head_dim)), width_(padded(head_dim)), tiles_(head_dim) {
    max_rows_ = std::max(kQueryRows, group);
    queries_.reserve(max_rows_, head_dim);
    chances_.reserve(max_rows_, kKeys);
    scores_.assign(max_rows_ * kKeys);
    sums_.assign(max_rows_ * width_);
    tops_.assign(max_rows_);
    totals_.assign(max_rows_);
    fades_.assign(max_rows_ + kLanes);
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
      std::memcpy(queries_.row(row), queries(first + row / group_) + row % group_ * head_dim_, head_dim_ * sizeof(Activation));
    std::fill_n(sums_.data(), num_rows * width_, 0.0f);
    std::fill_n(totals_.data(), num_rows, 0.0f);
    std::fill_n(tops_.data(), num_rows, -std::numeric_limits<float>::infinity());
    for (int64_t begin = 0; begin < end; begin += kKeys) {
      int64_t num_keys = std::min(kKeys, end - begin);
      Cells<T> block = own.from(begin);
      tiles_.find_keys(block, num_keys);
      tiles_.find_values(block, num_keys);
      tiles_.guess_next(begin + kKeys < end ? own.from(begin + kKeys) : next);
      int64_t last_key = segment.start + first - begin;  // that the first row sees
      score(num_rows, num_keys);
      weigh(num_rows, last_key);
      if (last_key >= num_keys - 1 || tiles_.finite(num_keys)) {
        add_values(0, num_rows, num_keys);
      } else {
        // No times infinity is not nothing: each token's rows meet the values that they see, and no others.
        for (int64_t token = 0; token < count; token++)
          if (int64_t seen = std::min(num_keys, last_key + token + 1); seen > 0) {
            tiles_.find_values(block, seen);
            add_values(token * group_, group_, seen);
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
  static constexpr float kNone = -std::numeric_limits<float>::infinity();

  // run(rows) for each tile of rows in turn, rows.value of them from its second argument on.
  template <class Run>
  static void in_tiles(int64_t num_rows, Run&& run) {
    int64_t num_tiles = divided_up(num_rows, kMaxRows);
    for (int64_t t = 0, row = 0; t < num_tiles; t++) {
      int height = int((num_rows - row) / (num_tiles - t));
      with_rows(height, [&](auto rows) { run(rows, row); }, std::make_integer_sequence<int, kMaxRows>());
      row += height;
    }
  }

  template <class Run, int... ROWS>
  static void with_rows(int height, Run&& run, std::integer_sequence<int, ROWS...>) {
    ((height == ROWS + 1 ? run(std::integral_constant<int, ROWS + 1>()) : void()), ...);
  }

  // sums[r][v] += the sum over k of rows[r][k] · columns[v][k], k in ascending order. Asks for some of `next` on the way.
  template <int ROWS, int WIDE>
  static void add_products(const std::array<const uint32_t*, WIDE>& columns, int64_t stride, int64_t words, RowWords rows,
                           Floats (&sums)[ROWS][WIDE], NextTiles& next) {
    auto step = [&](int64_t k) {
      in_parts<T::kParts>([&](auto part) {
        typename T::Loaded loaded[WIDE];
#pragma GCC unroll 8
        for (int v = 0; v < WIDE; v++) loaded[v] = T::template loaded<part.value>(load<Words>(columns[v] + k * stride));
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
          for (int v = 0; v < WIDE; v++)
            sums[r][v] = T::add(sums[r][v], loaded[v], rows.words[r * rows.stride + k * T::kParts + part.value]);
      });
    };
    constexpr int kTurn = WIDE > 2 ? kUnroll : 4;  // of many rows a few k are long enough
    int64_t k = 0;
    for (; k + kTurn <= words; k += kTurn) {
#pragma GCC unroll 8
      for (int i = 0; i < kTurn; i++) {
        if (WIDE > 2 || i == 0) next.ask(WIDE > 2 ? kLinesAsked<WIDE> : kTurn);
        step(k + i);
      }
    }
    for (; k < words; k++) step(k);
  }

  // Lanes past the last key are whatever they are.
  void score(int64_t num_rows, int64_t num_keys) {
    RowWords queries = queries_.words();
    in_tiles(num_rows, [&](auto rows, int64_t row) {
      constexpr int ROWS = decltype(rows)::value, WIDE = wide_for(ROWS);
      for (int64_t column = 0; column < num_keys; column += WIDE * kLanes) {
        std::array<const uint32_t*, WIDE> keys;
        for (int v = 0; v < WIDE; v++) {
          int64_t lane = column + v * kLanes;
          keys[v] = tiles_.keys[lane / kTileCells] + lane % kTileCells;
        }
        Floats sums[ROWS][WIDE] = {};
        RowWords own = {queries.words + row * queries.stride, queries.stride};
        add_products<ROWS, WIDE>(keys, kTileCells, words_, own, sums, tiles_.next);
        for (int r = 0; r < ROWS; r++)
          for (int v = 0; v < WIDE; v++) store(&scores_[(row + r) * kKeys + column + v * kLanes], sums[r][v]);
      }
    });
  }

  // Scores to chances against the highest score so far; what was summed up against a lower one has to fade. last_key: of the
  // block, that the first token's rows see.
  void weigh(int64_t num_rows, int64_t last_key) {
    const float scale = kLog2E / std::sqrt(float(head_dim_));
    // About half of what is left, in as many turns as there are here.
    const int64_t lines = tiles_.next.left() / 2 / (2 * num_rows * (kKeys / kLanes)) + 1;
    Ints lanes;
    for (int i = 0; i < kLanes; i++) lanes[i] = i;
    for (int64_t row = 0; row < num_rows; row++) {
      float* scores = &scores_[row * kKeys];
      int32_t last = int32_t(std::min(last_key + row / group_, kKeys));
      Floats high = splat(tops_[row]);
      for (int64_t i = 0; i < kKeys; i += kLanes) {
        tiles_.next.ask(lines);
        Floats seen = load<Floats>(scores + i) * scale;
        if (last < kKeys - 1) seen = select(lanes + int32_t(i) > last, splat(kNone), seen);
        store(scores + i, seen);
        high = larger(high, seen);
      }
      float top = largest(high);
      fades_[row] = tops_[row] - top;
      tops_[row] = top;
    }
    for (int64_t row = 0; row < num_rows; row += kLanes) store(&fades_[row], exp2(load<Floats>(&fades_[row])));
    for (int64_t row = 0; row < num_rows; row++) {
      Floats total = {};
      for (int64_t i = 0; i < kKeys; i += kLanes) {
        tiles_.next.ask(lines);
        Floats chances = exp2(load<Floats>(&scores_[row * kKeys + i]) - tops_[row]);
        total += chances;
        T::narrow(chances_.row(row) + i, chances);
      }
      totals_[row] = totals_[row] * fades_[row] + sum(total);
    }
  }

  // To the sums of rows [first, first + num_rows).
  void add_values(int64_t first, int64_t num_rows, int64_t num_keys) {
    in_tiles(num_rows, [&](auto rows, int64_t row) {
      constexpr int ROWS = decltype(rows)::value, WIDE = value_wide_for(ROWS), LESS = wide_for(ROWS);
      int64_t column = 0;
      for (; column + WIDE * kLanes <= width_; column += WIDE * kLanes) add_columns<ROWS, WIDE>(first + row, column, num_keys);
      for (; column + LESS * kLanes <= width_; column += LESS * kLanes) add_columns<ROWS, LESS>(first + row, column, num_keys);
      for (; column < width_; column += kLanes) add_columns<ROWS, 1>(first + row, column, num_keys);
    });
  }

  template <int ROWS, int WIDE>
  void add_columns(int64_t row, int64_t column, int64_t num_keys) {
    RowWords chances = chances_.words();
    Floats sums[ROWS][WIDE];
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < WIDE; v++)
        sums[r][v] = load<Floats>(&sums_[(row + r) * width_ + column + v * kLanes]) * fades_[row + r];
    for (int64_t t = 0; t * kTileCells < num_keys; t++) {
      std::array<const uint32_t*, WIDE> values;
      for (int v = 0; v < WIDE; v++) values[v] = tiles_.values[t] + column + v * kLanes;
      constexpr int64_t kWords = kTileCells / T::kPerWord;
      const uint32_t* own = chances.words + row * chances.stride + t * kWords * T::kParts;
      add_products<ROWS, WIDE>(values, width_, kWords, {own, chances.stride}, sums, tiles_.next);
    }
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < WIDE; v++) store(&sums_[(row + r) * width_ + column + v * kLanes], sums[r][v]);
  }

  int64_t group_, head_dim_, words_, width_, max_rows_;
  Rows<T> queries_, chances_;                  // [max_rows] of head_dim, of kKeys
  BlockTiles<T> tiles_;
  Buffer<float> scores_, sums_;                // [max_rows] of kKeys, of width: head_dim in whole cache lines
  Buffer<float> tops_, totals_, fades_;        // [max_rows]
};

// Tokens of one segment that are attended together. row: where the first of them stands among the rows that are.
struct QueryBlock {
  int64_t segment, first, count, row;
};

// Those of the step's rows `kept`, which ascend, as the segments' rows do.
inline std::vector<QueryBlock> query_blocks(const std::vector<Segment>& segments, const std::vector<int32_t>& kept,
                                            int64_t positions) {
  std::vector<QueryBlock> blocks;
  int64_t next = 0, num_kept = int64_t(kept.size());
  for (int64_t s = 0; s < int64_t(segments.size()); s++) {
    int64_t row = segments[s].row, end = row + segments[s].length;
    while (next < num_kept && kept[next] < end) {
      int64_t count = 1, most = std::min(positions, std::min(num_kept - next, end - kept[next]));
      while (count < most && kept[next + count] == kept[next] + count) count++;
      blocks.push_back({s, kept[next] - row, count, next});
      next += count;
    }
  }
  return blocks;
}

}  // namespace tandem
