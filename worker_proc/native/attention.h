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

constexpr int64_t kQueryRows = 96;  // that are attended together
// Of a block's keys and values, at most, which are computed with while as many more are on their way into L2.
constexpr int64_t kBlockBytes = (kLanes == 16 ? 256 : 128) << 10;

// `length` tokens of one sequence from position `start` on, whose rows in the step begin at `row`.
// cells: int32 [start + length], where every position's key and value are in the pool.
struct Segment {
  int64_t row, start, length;
  const int32_t* cells;
};

// Registers of columns that a tile of so many rows computes at once: few rows need more, so that no sum waits for itself.
constexpr int wide_for(int rows) { return rows <= kMaxRows / 2 ? 4 : 2; }
constexpr int value_wide_for(int rows) { return kLanes == 16 && rows <= 2 ? 8 : wide_for(rows); }

// How often some of the next block is asked for every kUnroll k of a product: about a quarter of it in each of the two.
template <int WIDE>
constexpr int64_t kTimesAsked = WIDE * kLanes > 32 ? WIDE * kLanes / 32 : 1;

// What is attended together: tokens [first, first + count) of a segment, with the queries that belong to the key heads
// [head, head + num_heads).
struct QueryBlock {
  int64_t segment, first, count, head, num_heads;
};

// What one thread needs to attend. Rows are the queries of one key head after those of another; of one head, a token's `group`
// after another's.
template <class T>
class Attender {
 public:
  using Activation = typename T::Activation;

  Attender(int64_t group, int64_t head_dim)
      : group_(group), head_dim_(head_dim), words_(words_of<T>(head_dim)), width_(padded(head_dim)), tiles_(head_dim) {
    int64_t most = max_rows(group);
    queries_.reserve(most, head_dim);
    chances_.reserve(most, kKeys);
    scores_.assign(most * kKeys);
    sums_.assign(most * width_);
    tops_.assign(most);
    totals_.assign(most);
    fades_.assign(most + kLanes);
  }

  static int64_t max_rows(int64_t group) { return std::max(kQueryRows, group); }

  // own: cells of the block's heads. next: where this thread will probably read on. queries(token), out(token):
  // those of a token of the segment from the block's first head on, side by side, and where theirs go.
  template <class Queries, class Out>
  void attend(const Segment& segment, const QueryBlock& part, const Cells<T>& own, const Cells<T>& next, Queries&& queries,
              Out&& out) {
    int64_t head_rows = part.count * group_, num_rows = head_rows * part.num_heads, end = segment.start + part.first + part.count;
    auto in_rows = [&](auto&& use) {  // use(row, token, offset of its query among the token's)
      for (int64_t row = 0; row < num_rows; row++) {
        int64_t head = row / head_rows, within = row % head_rows;
        use(row, part.first + within / group_, (head * group_ + within % group_) * head_dim_);
      }
    };
    in_rows([&](int64_t row, int64_t token, int64_t offset) {
      std::memcpy(queries_.row(row), queries(token) + offset, head_dim_ * sizeof(Activation));
    });
    std::fill_n(sums_.data(), num_rows * width_, 0.0f);
    std::fill_n(totals_.data(), num_rows, 0.0f);
    std::fill_n(tops_.data(), num_rows, -std::numeric_limits<float>::infinity());
    for (int64_t begin = 0; begin < end; begin += kKeys) {
      int64_t num_keys = std::min(kKeys, end - begin);
      Cells<T> block = own.from(begin);
      tiles_.next.begin(begin + kKeys < end ? own.from(begin + kKeys) : next);
      int64_t last_key = segment.start + part.first - begin;  // that the first token's rows see
      for (int64_t head = 0; head < part.num_heads; head++) {
        tiles_.find_keys(block.of(head), num_keys);
        score(head * head_rows, head_rows, num_keys);
      }
      weigh(num_rows, head_rows, last_key);
      for (int64_t head = 0; head < part.num_heads; head++) sum_up(block.of(head), head * head_rows, part.count, num_keys, last_key);
    }
    for (int64_t row = 0; row < num_rows; row++) {
      float* sums = &sums_[row * width_];
      float share = 1.0f / totals_[row];
      for (int64_t c = 0; c < width_; c++) sums[c] *= share;
    }
    in_rows([&](int64_t row, int64_t token, int64_t offset) { narrow<T>(&sums_[row * width_], head_dim_, out(token) + offset); });
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
                           Floats (&sums)[ROWS][WIDE], Next& next) {
    auto step = [&](int64_t k) {
      in_parts<T::kParts>([&](auto part) {
        typename T::Loaded loaded[WIDE];
#pragma GCC unroll 8
        for (int v = 0; v < WIDE; v++) {
          Words words = load<Words>(columns[v] + k * stride);
          loaded[v] = T::template loaded<part.value>(kLanes == 16 ? settled(words) : words);
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
          for (int v = 0; v < WIDE; v++)
            sums[r][v] = T::add(sums[r][v], loaded[v], rows.words[r * rows.stride + k * T::kParts + part.value]);
      });
    };
    int64_t k = 0;
    for (; k + kUnroll <= words; k += kUnroll) {
      next.ask(kTimesAsked<WIDE>);
      for (int i = 0; i < kUnroll; i++) step(k + i);
    }
    for (; k < words; k++) step(k);
  }

  // Of rows [first, first + num_rows). Lanes past the last key are whatever they are.
  void score(int64_t first, int64_t num_rows, int64_t num_keys) {
    RowWords queries = queries_.words();
    in_tiles(num_rows, [&](auto rows, int64_t place) {
      int64_t row = first + place;
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
  // block, that the first token's rows see, of which each head has head_rows with those of the tokens after it.
  void weigh(int64_t num_rows, int64_t head_rows, int64_t last_key) {
    const float scale = kLog2E / std::sqrt(float(head_dim_));
    // About half of all, in as many turns as there are here.
    const int64_t times = divided_up(2 * tiles_.next.left(), 3 * 2 * num_rows * (kKeys / kLanes));
    Ints lanes;
    for (int i = 0; i < kLanes; i++) lanes[i] = i;
    for (int64_t row = 0; row < num_rows; row++) {
      float* scores = &scores_[row * kKeys];
      int32_t last = int32_t(std::min(last_key + row % head_rows / group_, kKeys));
      Floats high = splat(tops_[row]);
      for (int64_t i = 0; i < kKeys; i += kLanes) {
        tiles_.next.ask(times);
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
        tiles_.next.ask(times);
        Floats chances = exp2(load<Floats>(&scores_[row * kKeys + i]) - tops_[row]);
        total += chances;
        T::narrow(chances_.row(row) + i, chances);
      }
      totals_[row] = totals_[row] * fades_[row] + sum(total);
    }
  }

  // One head's values, to the rows of its `count` tokens from `first` on.
  void sum_up(const Cells<T>& own, int64_t first, int64_t count, int64_t num_keys, int64_t last_key) {
    tiles_.find_values(own, num_keys);
    if (last_key >= num_keys - 1 || tiles_.finite(num_keys)) return add_values(first, count * group_, num_keys);
    // No times infinity is not nothing: each token's rows meet the values that they see, and no others.
    for (int64_t token = 0; token < count; token++)
      if (int64_t seen = std::min(num_keys, last_key + token + 1); seen > 0) {
        tiles_.find_values(own, seen);
        add_values(first + token * group_, group_, seen);
      }
  }

  // To the sums of rows [first, first + num_rows).
  void add_values(int64_t first, int64_t num_rows, int64_t num_keys) {
    in_tiles(num_rows, [&](auto rows, int64_t row) {
      constexpr int ROWS = decltype(rows)::value, WIDE = value_wide_for(ROWS);
      int64_t column = 0;
      for (; column + WIDE * kLanes <= width_; column += WIDE * kLanes) add_columns<ROWS, WIDE>(first + row, column, num_keys);
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

// All that a step attends: heads as many at once as fit, but so that every thread has some of the work.
template <class T>
std::vector<QueryBlock> query_blocks(const std::vector<Segment>& segments, int64_t group, int64_t num_kv_heads, int64_t head_dim,
                                     int64_t num_threads) {
  constexpr int64_t kBlocksPerThread = 4;
  int64_t max_rows = Attender<T>::max_rows(group), positions = max_rows / group;
  int64_t head_bytes = 2 * kTiles * tile_words<T>(head_dim) * 4, wanted = divided_up(kBlocksPerThread * num_threads, segments.size());
  std::vector<QueryBlock> blocks;
  for (int64_t s = 0; s < int64_t(segments.size()); s++)
    for (int64_t first = 0; first < segments[s].length; first += positions) {
      int64_t count = std::min(positions, segments[s].length - first), heads = num_kv_heads;
      auto fits = [&] {
        return num_kv_heads % heads == 0 && num_kv_heads / heads >= wanted && heads * count * group <= max_rows &&
               heads * head_bytes <= kBlockBytes;
      };
      while (heads > 1 && !fits()) heads--;
      for (int64_t head = 0; head < num_kv_heads; head += heads) blocks.push_back({s, first, count, head, heads});
    }
  return blocks;
}

}  // namespace tandem
