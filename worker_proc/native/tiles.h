// A block of 64 positions' keys and values as tiles (pool.h): taken from the pool as they are, or packed.
//
// What a change must not break: a cell past those asked for counts as nothing. Its key is in a lane that nobody looks at, its
// value is zero here whatever the pool holds.
#pragma once

#include <array>

#include "pool.h"

namespace tandem {

constexpr int64_t kKeys = 64;  // of a block
constexpr int64_t kTiles = kKeys / kTileCells;

// A sequence's cells of one layer and one key head: that head's, and which of them each of `count` positions has.
template <class T>
struct Cells {
  HeadCells<T> head;
  const int32_t* indices;
  int64_t count;

  // Those of the positions from `first` on.
  Cells from(int64_t first) const { return {head, indices + first, count - first}; }
  const uint32_t* key(int64_t position) const { return head.keys_of(indices[position]); }
  const uint32_t* value(int64_t position) const { return head.values_of(indices[position]); }
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

// Where the next block's tiles probably are, to be asked for evenly while this one is computed: more at once than memory gives
// would keep the computation waiting. Into L2 only: in L1 they would drive out what is being computed.
class NextTiles {
 public:
  // Each of `tile_bytes`, a multiple of a line.
  void begin(int64_t tile_bytes) {
    tile_bytes_ = tile_bytes;
    count_ = turn_ = 0;
  }
  void add(const uint32_t* tile) { tiles_[count_++] = (const char*)tile; }
  void start() { enter(0); }

  // Lines.
  int64_t left() const {
    return turn_ == count_ ? 0 : ((count_ - turn_ - 1) * tile_bytes_ + (end_ - line_)) / kLineBytes;
  }

  void ask(int64_t lines) {
    for (; lines > 0 && turn_ < count_; lines--) {
      __builtin_prefetch(line_, 0, 2);
      line_ += kLineBytes;
      if (line_ == end_) enter(turn_ + 1);
    }
  }

 private:
  void enter(int turn) {
    turn_ = turn;
    if (turn_ == count_) return;
    line_ = tiles_[turn_];
    end_ = line_ + tile_bytes_;
  }

  const char *line_ = nullptr, *end_ = nullptr;
  int turn_ = 0, count_ = 0;
  int64_t tile_bytes_ = 0;
  std::array<const char*, 2 * kTiles> tiles_;
};

template <class T>
class BlockTiles {
 public:
  using Element = typename T::Element;
  using Tiles = std::array<const uint32_t*, kTiles>;

  explicit BlockTiles(int64_t head_dim) : head_dim_(head_dim), words_(words_of<T>(head_dim)), width_(padded(head_dim)) {
    keys_room_.assign(kTiles * tile_words<T>(head_dim));
    values_room_.assign(kTiles * tile_words<T>(head_dim));
    zeros_.assign(width_);
  }

  // The tiles of the block's keys: in the pool, or packed here. Lanes past num_keys hold anything.
  void find_keys(const Cells<T>& block, int64_t num_keys) {
    keys.fill(keys_room_.data());
    for (int64_t t = 0, position = 0; position < num_keys; t++, position += kTileCells) {
      uint32_t* room = &keys_room_[t * tile_words<T>(head_dim_)];
      keys[t] = block.head.tiled ? block.key(position) : room;
      if (!block.head.tiled) pack_keys(block.from(position), std::min(kTileCells, num_keys - position), room);
    }
  }

  // The same of its values, of which those past num_keys are zero.
  void find_values(const Cells<T>& block, int64_t num_keys) {
    for (int64_t t = 0, position = 0; position < num_keys; t++, position += kTileCells) {
      int64_t count = std::min(kTileCells, num_keys - position);
      uint32_t* room = &values_room_[t * tile_words<T>(head_dim_)];
      bool as_is = block.head.tiled && count == kTileCells;
      values[t] = as_is ? block.value(position) : room;
      if (!as_is) pack_values(block.from(position), count, room);
    }
  }

  // Whether the first num_keys values are all numbers: a word of the exponent's ones alone is none.
  bool finite(int64_t num_keys) const {
    Ints found = {};
    for (int64_t t = 0; t * kTileCells < num_keys; t++)
      for (int64_t i = 0; i < kTileCells / T::kPerWord * width_; i += kLanes) {
        Words words = load<Words>(values[t] + i);
        found |= (words & 0x7f800000u) == 0x7f800000u;
        if (T::kPerWord == 2) found |= (words & 0x7f80u) == 0x7f80u;
      }
    return lanes_of(found) == 0;
  }

  void guess_next(const Cells<T>& block) {
    next.begin(tile_words<T>(head_dim_) * 4);
    for (int64_t position = 0; position < std::min(kKeys, block.count); position += kTileCells) next.add(block.key(position));
    for (int64_t position = 0; position < std::min(kKeys, block.count); position += kTileCells) next.add(block.value(position));
    next.start();
  }

  Tiles keys, values;
  NextTiles next;

 private:
  void pack_keys(const Cells<T>& own, int64_t num_keys, uint32_t* tile) {
    for (int64_t lane = 0; lane < num_keys; lane += kLanes) {
      const uint32_t* from[kLanes];
      for (int64_t i = 0; i < kLanes; i++) from[i] = own.key(std::min(lane + i, num_keys - 1));
      uint32_t* to = tile + lane;
      int64_t k = 0;
      for (; k + kLanes <= words_; k += kLanes) {
        Words rows[kLanes];
        for (int i = 0; i < kLanes; i++) rows[i] = load<Words>(from[i] + k);
        transpose(rows);
        for (int i = 0; i < kLanes; i++) store(to + (k + i) * kTileCells, rows[i]);
      }
      for (; k < words_; k++)
        for (int i = 0; i < kLanes; i++) to[k * kTileCells + i] = from[i][k];
    }
  }

  void pack_values(const Cells<T>& own, int64_t num_keys, uint32_t* tile) {
    for (int64_t key = 0; key < kTileCells; key += T::kPerWord, tile += width_) {
      const uint32_t* first = key < num_keys ? own.value(key) : zeros_.data();
      const uint32_t* last = key + T::kPerWord <= num_keys ? own.value(key + T::kPerWord - 1) : zeros_.data();
      if (own.head.tiled && key < num_keys) first += key / T::kPerWord * width_;
      uint32_t kept = T::kPerWord == 1 || last != zeros_.data() ? ~0u : 0xffffu;
      for (int64_t c = 0; c < width_; c += kLanes)
        store(tile + c, own.head.tiled ? load<Words>(first + c) & kept : pair((const Element*)first + c, (const Element*)last + c));
    }
  }

  // A widened bfloat16 stands in its word's upper half.
  static Words pair(const Element* first, const Element* last) {
    if constexpr (T::kPerWord == 1) return load<Words>(first);
    else return (Words)T::widen(first) >> 16 | (Words)T::widen(last);
  }

  int64_t head_dim_, words_, width_;
  Buffer<uint32_t> keys_room_, values_room_;  // kTiles tiles of what is not in the pool as tiles
  Buffer<uint32_t> zeros_;                    // a value of a cell that is none
};

}  // namespace tandem
