// Tiles of quantized weights, which are the same for both formats of activations.
#include "quantized.h"

namespace tandem {
namespace {

// A QuantizedTile of ROWS rows.
template <class Q, int ROWS>
void quantized_tile(const typename Q::Group* weights, int64_t first, int64_t num_groups, GroupRows rows,
                    float (*sums)[kColumns], Ahead& shared_ahead) {
  Ahead ahead = shared_ahead;  // in registers
  Floats found[ROWS][kWide];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < kWide; v++) found[r][v] = load<Floats>(sums[r] + first + v * kLanes);
  for (int64_t g = 0; g < num_groups; g++) {
    const typename Q::Group& group = weights[g];
    const ActivationGroup<Q>* x[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) x[r] = rows.row<Q>(r) + g;
    Ints dots[ROWS][kWide];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int v = 0; v < kWide; v++) dots[r][v] = Q::kLeast ? Ints{} : x[r]->start - Ints{};
    auto step = [&](int word, int quad, int shift) {
      in_parts<kXWords>([&](auto part) {
        Words quads[kWide];
#pragma GCC unroll 2
        for (int v = 0; v < kWide; v++) {
          Words words = load<Words>(group.words[word] + first + v * kLanes);
          quads[v] = part_of<part.value>(Q::kBits == 8 ? words : words >> shift & 0x0f0f0f0f);
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
          for (int v = 0; v < kWide; v++) dots[r][v] = add_products(dots[r][v], quads[v], x[r]->words[quad * kXWords + part.value]);
      });
    };
#pragma GCC unroll 4
    for (int turn = 0; turn < Q::kTurns; turn++) {
      ahead.ask();
#pragma GCC unroll 4
      for (int i = turn * kTurnWords; i < (turn + 1) * kTurnWords; i++) {
        step(i, i, 0);
        if (Q::kBits == 4) step(i, i + Q::kWords, 4);
      }
    }
    Floats scales[kWide], least[kWide];
#pragma GCC unroll 2
    for (int v = 0; v < kWide; v++) {
      if constexpr (Q::kGroupScales) scales[v] = widen_halves(group.scales + first + v * kLanes);
      if constexpr (Q::kLeast) least[v] = widen_halves(group.least + first + v * kLanes);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int v = 0; v < kWide; v++) {
        Floats dot = __builtin_convertvector(dots[r][v], Floats);
        if constexpr (Q::kGroupScales) found[r][v] += dot * (scales[v] * x[r]->scale);
        else found[r][v] += dot * x[r]->scale;
        if constexpr (Q::kLeast) found[r][v] += least[v] * x[r]->sum;
      }
  }
  shared_ahead = ahead;
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
    for (int v = 0; v < kWide; v++) store(sums[r] + first + v * kLanes, found[r][v]);
}

template <class Q, int... ROWS>
QuantizedTile<Q> one_of(int rows, std::integer_sequence<int, ROWS...>) {
  static constexpr QuantizedTile<Q> kTiles[] = {quantized_tile<Q, ROWS + 1>...};
  return kTiles[rows - 1];
}

}  // namespace

template <class Q>
QuantizedTile<Q> quantized_tile_of(int rows) {
  return one_of<Q>(rows, std::make_integer_sequence<int, kQuantizedMaxRows>());
}

template QuantizedTile<Int8> quantized_tile_of<Int8>(int);
template QuantizedTile<EightBits> quantized_tile_of<EightBits>(int);
template QuantizedTile<FourBits> quantized_tile_of<FourBits>(int);
template QuantizedTile<FourBitsLeast> quantized_tile_of<FourBitsLeast>(int);

}  // namespace tandem
