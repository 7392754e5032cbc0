// Rows of the final norm to their logits or, where those aren't asked for, to the likeliest token alone.
//
// The head is a quarter of a small model. A row that asks for its likeliest token only is first multiplied with a screen, which is
// the head in 8 bits: half the bytes or fewer, at twice the speed. How far a logit of the screen can be from the head's is
// bounded, so a few tokens are left that can be the likeliest, and only their blocks are multiplied with the head itself.
//
// What a change must not break:
// - The token is the one that all the head's logits would give, to the last bit. With w and x as the head and the row have them,
//   ŵ and x̂ as the screen has them, w·x - ŵ·x̂ = w·(x - x̂) + (w - ŵ)·x̂, which is at most |w| |x - x̂| + |w - ŵ| |x̂|
//   (Cauchy-Schwarz). What both products are rounded by while they are summed up is at most a part of |w| |x| (`slack`).
// - What is no number is below nothing: such tokens are left to the head, and so is what lies near the ends of float32, where
//   norms can't be told (`has_squares`).
//
// Source: bounds that leave few candidates for an exact search of the largest product are those of LEMP (Teflioudi, Gemulla,
// Mykytiuk, SIGMOD 2015).
#pragma once

#include <numeric>
#include <vector>

#include "products.h"

namespace tandem {

// A head in 8 bits. norms: |w| of each column, errors: |w - ŵ|; both [columns in whole blocks], and not less than that.
struct Screen {
  Matrix weights;
  const float *norms = nullptr, *errors = nullptr;
};

// Rows whose next token is asked for. rows: [count]. kept: [count], the row of `logits` that each one's go to, or -1.
// tokens: [count], the likeliest of each, the lowest id among equals.
struct Asked {
  int64_t count;
  const int32_t *rows, *kept;
  int32_t* tokens;
  float* logits;
};

template <class T>
class Chooser {
 public:
  Chooser(const Matrix& head, const Screen& screen, Team& team)
      : head_(head), screen_(screen), team_(team), products_(team), scratch_(team.size()), best_(team.size()),
        sieves_(team.size()) {}

  void begin(const Asked& asked) {
    int64_t count = asked.count, width = head_.in_features;
    order_.clear();
    for (int64_t i = 0; i < count; i++)
      if (!screened(asked, i)) order_.push_back(i);
    num_whole_ = int64_t(order_.size());
    for (int64_t i = 0; i < count; i++)
      if (screened(asked, i)) order_.push_back(i);
    rows_.reserve(count, width);
    hard_rows_.reserve(count, width);
    products_.reserve(count, width);
    rounded_.reserve(count, width);
    roundings_.resize(count);
    for (Buffer<float>& scratch : scratch_) scratch.reserve(divided_up(width, Int8::kGroup) * Int8::kGroup);
    for (std::vector<Best>& best : best_) best.assign(count, Best{});
    for (std::vector<Sieve>& sieves : sieves_) {
      sieves.resize(count);
      for (Sieve& sieve : sieves) sieve.clear();
    }
    left_.resize(count);
  }

  // Within the team's `run`, after `begin`. norm(row, to, index): that row of the step, normed, becomes row `index` of `to`.
  template <class Norm>
  void choose(int rank, const Asked& asked, Norm&& norm) {
    if (asked.count == 0) return;
    team_.share(rank, asked.count, [&](int64_t i) { norm(asked.rows[order_[i]], rows_, i); });
    if (num_whole_ > 0)
      products_.multiply(rank, head_, rows_, num_whole_, [&](int64_t row, int64_t column, const float* sums) {
        int64_t i = order_[row], count = std::min(kColumns, head_.out_features - column);
        look(sums, column, count, best_[rank][i]);
        if (asked.kept[i] >= 0) std::copy_n(sums, count, asked.logits + asked.kept[i] * head_.out_features + column);
      });
    if (num_whole_ < asked.count) sift(rank, num_whole_, asked.count);
  }

  // After the team's `run`.
  void end(const Asked& asked) {
    for (int64_t i = 0; i < asked.count; i++) {
      Best best = best_[0][i];
      for (const std::vector<Best>& found : best_)
        if (found[i].logit > best.logit || (found[i].logit == best.logit && found[i].token < best.token)) best = found[i];
      asked.tokens[i] = best.token;
    }
  }

 private:
  static constexpr float kInfinity = std::numeric_limits<float>::infinity();

  struct Best {
    float logit = -kInfinity;
    int32_t token = 0;
  };

  // A block of columns whose logits are at most `upper`.
  struct Open {
    int64_t block;
    float upper;
  };

  struct Pair {
    int64_t row, block;
  };

  // What one rank knows of a row: some logit is at least `floor`, and blocks that may reach it.
  struct Sieve {
    float floor;
    std::vector<Open> open;

    void clear() {
      floor = -kInfinity;
      open.clear();
    }
  };

  bool screened(const Asked& asked, int64_t i) const { return screen_.weights.packed != nullptr && asked.kept[i] < 0; }

  // The likeliest tokens of rows_ [first, last).
  void sift(int rank, int64_t first, int64_t last) {
    team_.share(rank, last - first, [&](int64_t i) { round(rank, first + i); });
    GroupRows rounded = rounded_.template groups<Int8>(head_.in_features);
    multiply_quantized<Int8>(team_, rank, screen_.weights, {rounded.groups + first * rounded.stride, rounded.stride}, last - first,
                             [&](int64_t i, int64_t column, float* sums) { put_aside(rank, first + i, column, sums); });
    team_.share(rank, last - first, [&](int64_t i) { leave(rank, first + i); });
    team_.share(rank, 1, [&](int64_t) { divide(first, last); });
    team_.share(rank, int64_t(pairs_.size()), [&](int64_t i) { look_at(rank, pairs_[i].row, pairs_[i].block); });
    if (hard_order_.empty()) return;
    products_.multiply(rank, head_, hard_rows_, int64_t(hard_order_.size()), [&](int64_t i, int64_t column, const float* sums) {
      look(sums, column, std::min(kColumns, head_.out_features - column), best_[rank][hard_order_[i]]);
    });
  }

  void round(int rank, int64_t row) {
    // What sums of so many products in float32 are rounded by, in relation to |w| |x|, and what norms are: more than enough.
    const float slack = float(head_.in_features + 64) * 0x1p-23f, enough = 1.001f;
    float* values = scratch_[rank].data();
    widen<T>(rows_.row(row), head_.in_features, values);
    rounded_.template put<Int8>(row, values, head_.in_features);
    Rounding found = rounding<Int8>(values, head_.in_features);
    roundings_[row] = {found.norm * enough, (found.error + slack * (found.norm + found.error)) * enough};
  }

  void put_aside(int rank, int64_t row, int64_t column, float* sums) {
    for (int64_t c = head_.out_features - column; c < kColumns; c++) sums[c] = -kInfinity;
    Sieve& sieve = sieves_[rank][order_[row]];
    const float *norms = screen_.norms + column, *errors = screen_.errors + column;
    const Rounding& x = roundings_[row];
    auto margin = [&](int64_t c) { return load<Floats>(norms + c) * x.error + load<Floats>(errors + c) * x.norm; };
    Ints open = {};
    for (int64_t c = 0; c < kColumns; c += kLanes) open |= ~(load<Floats>(sums + c) + margin(c) < splat(sieve.floor));
    if (lanes_of(open) == 0) return;
    Floats upper = splat(-kInfinity), lower = upper;
    for (int64_t c = 0; c < kColumns; c += kLanes) {
      Floats sum = load<Floats>(sums + c), high = sum + margin(c);
      upper = larger(select(high == high, high, splat(kInfinity)), upper);
      lower = larger(sum - margin(c), lower);
    }
    sieve.floor = std::max(sieve.floor, largest(lower));
    sieve.open.push_back({column / kColumns, largest(upper)});
  }

  // Of a row, the blocks that may still hold its likeliest token, once the one that promises most has been looked at.
  void leave(int rank, int64_t row) {
    int64_t i = order_[row];
    float floor = -kInfinity;
    for (const std::vector<Sieve>& sieves : sieves_) floor = std::max(floor, sieves[i].floor);
    std::vector<Open>& left = left_[row];
    left.clear();
    for (const std::vector<Sieve>& sieves : sieves_)
      std::copy_if(sieves[i].open.begin(), sieves[i].open.end(), std::back_inserter(left),
                   [&](const Open& open) { return !(open.upper < floor); });
    auto most = std::max_element(left.begin(), left.end(), [](const Open& a, const Open& b) { return a.upper < b.upper; });
    if (most == left.end()) return;
    look_at(rank, row, most->block);
    left.erase(most);
    std::erase_if(left, [&](const Open& open) { return open.upper < best_[rank][i].logit; });
  }

  // Which blocks are looked at one by one, and for which rows the head as a whole is the shorter way: one by one no more weights
  // are read than the head has.
  void divide(int64_t first, int64_t last) {
    pairs_.clear();
    hard_order_.clear();
    std::vector<int64_t> rows(last - first);
    std::iota(rows.begin(), rows.end(), first);
    std::stable_sort(rows.begin(), rows.end(), [&](int64_t a, int64_t b) { return left_[a].size() < left_[b].size(); });
    for (int64_t row : rows) {
      if (int64_t(pairs_.size() + left_[row].size()) <= divided_up(head_.out_features, kColumns)) {
        for (const Open& open : left_[row]) pairs_.push_back({row, open.block});
      } else {
        std::memcpy(hard_rows_.row(int64_t(hard_order_.size())), rows_.row(row), rows_.words().stride * 4);
        hard_order_.push_back(order_[row]);
      }
    }
    // Rows that ask for one block meet it in the cache.
    std::sort(pairs_.begin(), pairs_.end(), [](const Pair& a, const Pair& b) { return a.block < b.block; });
  }

  void look_at(int rank, int64_t row, int64_t block) {
    RowWords words = rows_.words();
    multiply_block<T>(head_, block, {words.words + row * words.stride, words.stride}, 1,
                      [&](int64_t, int64_t column, const float* sums) {
                        look(sums, column, std::min(kColumns, head_.out_features - column), best_[rank][order_[row]]);
                      });
  }

  // Logits of neighbouring tokens from `column` on, of which the last few may be nobody's.
  static void look(const float* logits, int64_t column, int64_t count, Best& best) {
    Ints any = {};
    for (int64_t c = 0; c < kColumns; c += kLanes) any |= load<Floats>(logits + c) >= splat(best.logit);
    if (lanes_of(any) == 0) return;
    float top = best.logit;
    for (int64_t c = 0; c < count; c++) top = logits[c] > top ? logits[c] : top;
    // Blocks don't come in ascending order: an equal logit before the best so far replaces it.
    bool better = top > best.logit;
    for (int64_t c = 0; c < count; c++)
      if (logits[c] == top && (better || column + c < best.token)) {
        best = {top, int32_t(column + c)};
        return;
      }
  }

  const Matrix head_;
  const Screen screen_;
  Team& team_;
  Products<T> products_;
  int64_t num_whole_ = 0;                   // rows whose logits are asked for come first
  std::vector<int64_t> order_;              // of rows_, among those asked for
  Rows<T> rows_, hard_rows_;
  QuantizedRows rounded_;
  std::vector<Rounding> roundings_;         // of rows_, as large as they may be
  std::vector<std::vector<Open>> left_;     // of rows_
  std::vector<Pair> pairs_;
  std::vector<int64_t> hard_order_;         // of hard_rows_, among those asked for
  std::vector<Buffer<float>> scratch_;      // a rank's each, as are these: a row
  std::vector<std::vector<Best>> best_;     // [asked for]
  std::vector<std::vector<Sieve>> sieves_;  // [asked for]
};

}  // namespace tandem
