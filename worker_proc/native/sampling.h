// A random token from a row of logits: filters, then the draw.
//
// What a change must not break:
// - A token depends on its own row only: sums are double and taken in one fixed order, by id.
// - Equal weights are ranked by id, lowest first.
// - A row of anything, NaN included, ends with an id of the vocabulary.
//
// Nothing is sorted: positive floats are ordered as their bits are, so that where a filter cuts is found by counting weights in
// buckets of equal leading bits, and what shares the cut's bucket once more by the bits that follow.
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

  // visit(place, weight), in order, for the weights whose bits are within [low, high].
  template <class Visit>
  void each(uint32_t low, uint32_t high, Visit&& visit) const {
    for (int64_t i = 0; i < count_; i += kLanes) {
      Ints words = load<Ints>(&weights_[i]);
      for (uint32_t found = lanes_of((words >= int32_t(low)) & (words <= int32_t(high))); found != 0; found &= found - 1) {
        int64_t place = i + __builtin_ctz(found);
        visit(place, weights_[place]);
      }
    }
  }

  // Leaves those of more than `least` (bits of a weight), and the first `ties` of those equal to it.
  void keep(uint32_t least, int64_t ties) {
    int64_t kept = 0;
    // What is written lies before what is still to be visited, or in the register that was taken already.
    each(least, kOne, [&](int64_t place, float weight) {
      if (as_word(weight) == least && --ties < 0) return;
      ids_[kept] = id(place);
      weights_[kept++] = weight;
    });
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
    double lanes[kLanes / 2], total = 0;
    store(lanes, low + high);
    for (double lane : lanes) total += lane;
    return total;
  }

  double sum() const {
    double total = 0;
    for (int64_t block = 0; block < num_blocks(); block++) total += sum(block);
    return total;
  }

  int64_t num_blocks() const { return divided_up(count_, kBlock); }

  static constexpr int64_t kBlock = 1024;
  static constexpr uint32_t kOne = 0x3f800000, kLeast = 0x00800000;  // bits of 1 and of 2^-126: no weight lies between it and 0

 private:
  static int64_t padded(int64_t count) { return divided_up(count, kLanes) * kLanes; }

  Buffer<float> weights_;  // zero from `count_` to the register's end
  Buffer<int32_t> ids_;    // unless `whole_`: then a place is its id
  int64_t count_ = 0;
  bool whole_ = true;
};

// Where a filter cuts: at `count` weights, or at the weight with which the sum of the larger ones and itself reaches `sum`.
struct Limit {
  int64_t count;
  double sum;
};

class Filter {
 public:
  // Leaves the largest weights up to `limit`, and one at least.
  void cut(Candidates& candidates, Limit limit) {
    // Few weights are large: the rest is counted only where these are not enough.
    constexpr uint32_t kFloors[] = {Candidates::kOne - (6u << 23), Candidates::kOne - (18u << 23), Candidates::kLeast};
    constexpr int kShifts[] = {21, 10, 0};
    bool found = false;
    for (uint32_t floor : kFloors)
      if (!found) found = descend(candidates, limit, {floor, Candidates::kOne, kShifts[0]}, true);
    candidates.keep(found ? least_ : Candidates::kLeast, candidates.count());
    for (int level = 1; found && level < 3; level++)
      found = descend(candidates, limit, {least_, least_ + (1u << kShifts[level - 1]) - 1, kShifts[level]}, false);
    if (!found) return;  // by rounding, a sum of all was less than the sum of its parts
    double needed = std::min(double(limit.count - above_.count), std::ceil((limit.sum - above_.sum) / as_float(least_)));
    candidates.keep(least_, std::max(int64_t(1), int64_t(std::min(needed, double(candidates.count())))));
  }

 private:
  struct Bucket {
    double sum;
    int64_t count;
  };
  struct Range {
    uint32_t low, high;  // bits of weights, both within
    int shift;           // a bucket holds 2^shift of them
  };

  // Finds the bucket in which the limit is reached: its lowest bits to `least_`, what lies above it to `above_`.
  bool descend(const Candidates& candidates, Limit limit, Range range, bool from_top) {
    int64_t count = int64_t((range.high - range.low) >> range.shift) + 1;
    buckets_.assign(count);
    candidates.each(range.low, range.high, [&](int64_t, float weight) {
      Bucket& bucket = buckets_[(as_word(weight) - range.low) >> range.shift];
      bucket.sum += weight;
      bucket.count++;
    });
    Bucket above = from_top ? Bucket{} : above_;
    for (int64_t i = count - 1; i >= 0; i--) {
      Bucket reached = {above.sum + buckets_[i].sum, above.count + buckets_[i].count};
      if (buckets_[i].count > 0 && (reached.count >= limit.count || reached.sum >= limit.sum)) {
        least_ = range.low + (uint32_t(i) << range.shift);
        above_ = above;
        return true;
      }
      above = reached;
    }
    return false;
  }

  Buffer<Bucket> buckets_;
  Bucket above_ = {};
  uint32_t least_ = 0;
};

// What a thread draws with.
class alignas(128) Drawer {
 public:
  void reserve(int64_t vocab_size) {
    candidates_.reserve(vocab_size);
    sums_.reserve(divided_up(vocab_size, Candidates::kBlock));
  }

  int32_t draw(const float* logits, int64_t vocab_size, const Choice& choice) {
    constexpr double kNoSum = std::numeric_limits<double>::infinity();
    if (!candidates_.weigh(logits, vocab_size, choice.temperature)) return 0;
    if (choice.top_k < vocab_size) filter_.cut(candidates_, {choice.top_k, kNoSum});
    if (choice.top_p < 1) filter_.cut(candidates_, {vocab_size, choice.top_p * candidates_.sum()});
    if (choice.min_p > 0) candidates_.keep(std::max(as_word(choice.min_p), Candidates::kLeast), vocab_size);
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
  Filter filter_;
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
