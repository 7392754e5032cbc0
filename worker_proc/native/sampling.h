// A random token from a row of logits: filters, then the draw.
//
// What a change must not break:
// - A token depends on its own row only: sums are double and taken in one fixed order, by id.
// - Equal weights are ranked by id, lowest first.
// - A row of anything, NaN included, ends with an id of the vocabulary.
//
// Nothing is sorted: positive floats are ordered as their bits are, so that where a filter cuts is found by halving a range of
// bits, weighing up at each turn what lies above its middle.
#pragma once

#include <algorithm>

#include "rows.h"
#include "team.h"

namespace tandem {

// By what a row's token is drawn. temperature: above 0. top_k: from 1; the vocabulary's size or more is no limit. top_p: above 0;
// 1 is no limit. min_p: of the largest weight. point: in [0, 1), of the sum of what may be drawn.
struct Choice {
  float temperature;
  int64_t top_k;
  double top_p;
  float min_p;
  double point;
};

struct Size {
  int64_t count;
  double sum;
};

// The weights of a row that may still be drawn: exp((logit - largest) / temperature), in order of id.
class Candidates {
 public:
  int64_t count() const { return count_; }
  float weight(int64_t place) const { return weights_[place]; }
  int32_t id(int64_t place) const { return whole_ ? int32_t(place) : ids_[place]; }

  void reserve(int64_t vocab_size) {
    weights_.reserve(padded(vocab_size));
    ids_.reserve(padded(vocab_size));
  }

  // Of a row's logits; false where none of them is finite. The likeliest weighs 1.
  bool weigh(const float* logits, int64_t vocab_size, float temperature) {
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    count_ = vocab_size;
    whole_ = true;
    float last[kLanes];  // of the logits, filled up to a register
    std::fill_n(last, kLanes, kNone);
    int64_t full = vocab_size / kLanes * kLanes;
    std::copy(logits + full, logits + vocab_size, last);
    Floats tops[4] = {splat(kNone), splat(kNone), splat(kNone), larger(load<Floats>(last), splat(kNone))};
    int64_t i = 0;
    for (; i + 4 * kLanes <= full; i += 4 * kLanes)
      for (int k = 0; k < 4; k++) tops[k] = larger(load<Floats>(logits + i + k * kLanes), tops[k]);
    for (; i < full; i += kLanes) tops[0] = larger(load<Floats>(logits + i), tops[0]);
    float top = kNone;
    for (Floats found : tops) top = std::max(top, largest(found));
    if (!std::isfinite(top)) return false;
    // Beyond the clamp, 0 or -inf times the scale would be NaN.
    float scale = std::clamp(kLog2E / temperature, std::numeric_limits<float>::min(), std::numeric_limits<float>::max());
    for (i = 0; i < full; i += kLanes) store(&weights_[i], exp2((load<Floats>(logits + i) - top) * scale));
    if (full < vocab_size) store(&weights_[full], exp2((load<Floats>(last) - top) * scale));
    return true;
  }

  // How many weigh `least` or more, and, if it is asked for, their sum.
  template <bool kSum>
  Size from(float least) const {
    Ints counts = {};
    Doubles low = {}, high = {}, bound = double(least) - Doubles{};
    for (int64_t i = 0; i < count_; i += kLanes) {
      counts -= load<Floats>(&weights_[i]) >= splat(least);
      if (!kSum) continue;
      Doubles a = widened(&weights_[i]), b = widened(&weights_[i + kLanes / 2]);
      low += (Doubles)((a >= bound) & (Longs)a);
      high += (Doubles)((b >= bound) & (Longs)b);
    }
    int64_t count = 0;
    for (int lane = 0; lane < kLanes; lane++) count += counts[lane];
    return {count, folded(low + high)};
  }

  // Leaves those above `least`, and the first `ties` of those equal to it.
  void keep(float least, int64_t ties) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count_; i += kLanes) {
      // What is written lies before what is still to be read.
      for (uint32_t found = lanes_of(load<Floats>(&weights_[i]) >= splat(least)); found != 0; found &= found - 1) {
        int64_t place = i + __builtin_ctz(found);
        if (weights_[place] == least && --ties < 0) continue;
        ids_[kept] = id(place);
        weights_[kept++] = weights_[place];
      }
    }
    std::fill(weights_.data() + kept, weights_.data() + padded(kept), 0.0f);
    count_ = kept;
    whole_ = false;
  }

  // Of a block of kBlock places.
  double sum(int64_t block) const {
    Doubles low = {}, high = {};
    int64_t end = std::min((block + 1) * kBlock, padded(count_));
    for (int64_t i = block * kBlock; i < end; i += kLanes) {
      low += widened(&weights_[i]);
      high += widened(&weights_[i + kLanes / 2]);
    }
    return folded(low + high);
  }

  double sum() const {
    double total = 0;
    for (int64_t block = 0; block < num_blocks(); block++) total += sum(block);
    return total;
  }

  int64_t num_blocks() const { return divided_up(count_, kBlock); }

  static constexpr int64_t kBlock = 1024;
  static constexpr float kLeast = std::numeric_limits<float>::min();  // no weight lies between it and 0

 private:
  static double folded(Doubles sums) {
    double total = 0;
    for (int lane = 0; lane < kLanes / 2; lane++) total += sums[lane];
    return total;
  }

  static int64_t padded(int64_t count) { return divided_up(count, kLanes) * kLanes; }

  Buffer<float> weights_;  // zero from `count_` to the register's end
  Buffer<int32_t> ids_;    // unless `whole_`: then a place is its id
  int64_t count_ = 0;
  bool whole_ = true;
};

// Leaves the largest candidates: `limit` of them or, by sum, as many as it takes for their sum to reach `limit`.
template <bool kSum>
void cut(Candidates& candidates, double limit) {
  auto measure = [](Size size) { return kSum ? size.sum : double(size.count); };
  // What weighs `low` or more is enough, what weighs `high` or more is not: that is `above`.
  uint32_t low = as_word(Candidates::kLeast), high = as_word(1.0f) + 1;
  double above = 0;
  // Few weights are large, and seldom are many needed: down from the top in growing strides, then by halves.
  uint32_t stride = 6u << 23;
  for (bool reached = false; high - low > 1;) {
    uint32_t middle = reached || high - low <= stride ? low + (high - low) / 2 : high - stride;
    stride = std::min(2 * stride, 96u << 23);
    Size size = candidates.from<kSum>(as_float(middle));
    if (measure(size) < limit) {
      high = middle;
      above = measure(size);
      continue;
    }
    low = middle;
    reached = true;
    if (2 * size.count <= candidates.count()) candidates.keep(as_float(low), size.count);
  }
  double ties = kSum ? std::ceil((limit - above) / as_float(low)) : limit - above;
  candidates.keep(as_float(low), int64_t(std::clamp(ties, 1.0, double(candidates.count()))));
}

// What a thread draws with.
class alignas(128) Drawer {
 public:
  void reserve(int64_t vocab_size) {
    candidates_.reserve(vocab_size);
    sums_.reserve(divided_up(vocab_size, Candidates::kBlock));
  }

  int32_t draw(const float* logits, int64_t vocab_size, const Choice& choice) {
    if (!candidates_.weigh(logits, vocab_size, choice.temperature)) return 0;
    if (choice.top_k < vocab_size) cut<false>(candidates_, double(choice.top_k));
    if (choice.top_p < 1) cut<true>(candidates_, choice.top_p * candidates_.sum());
    if (choice.min_p > 0) candidates_.keep(std::max(choice.min_p, Candidates::kLeast), vocab_size);
    return pick(choice.point);
  }

 private:
  // The first whose running sum passes the point of the sum of all.
  int32_t pick(double point) {
    int64_t num_blocks = candidates_.num_blocks(), block = 0;
    double total = 0, before = 0;
    for (int64_t i = 0; i < num_blocks; i++) total += sums_[i] = candidates_.sum(i);
    double passed = point * total;
    while (block + 1 < num_blocks && before + sums_[block] <= passed) before += sums_[block++];
    return within(block, before, passed);
  }

  int32_t within(int64_t block, double before, double passed) const {
    int64_t place = block * Candidates::kBlock, end = std::min(place + Candidates::kBlock, candidates_.count());
    int64_t last = place;  // of some weight: where rounding lets the sum of the block's weights, one by one, fall short
    for (; place < end && before <= passed; place++) {
      before += candidates_.weight(place);
      if (candidates_.weight(place) > 0) last = place;
    }
    return candidates_.id(last);
  }

  Candidates candidates_;
  Buffer<double> sums_;  // [blocks]
};

// logits: [count, vocab_size]. tokens: [count].
inline void draw(Team& team, std::vector<Drawer>& drawers, const float* logits, int64_t vocab_size,
                 const std::vector<Choice>& choices, int32_t* tokens) {
  drawers.resize(team.size());
  for (Drawer& drawer : drawers) drawer.reserve(vocab_size);
  team.run([&](int rank) {
    team.share(rank, int64_t(choices.size()),
               [&](int64_t row) { tokens[row] = drawers[rank].draw(logits + row * vocab_size, vocab_size, choices[row]); });
  });
}

}  // namespace tandem
