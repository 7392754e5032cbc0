// Products of activations with a model's packed weights, y = x Wᵀ + b, in bfloat16 and float32.
//
// What a change must not break:
// - One output element is one chain of multiply-adds over k = 0, 1, 2, …: never split over threads, never
//   reordered by the number of rows. So a row's result is the same bits alone, in any batch, at any place in it and
//   with any number of threads.
// - Everything is seen as 32-bit words. A word is two neighbouring k of a bfloat16 matrix (the even one in the low
//   half; an odd in_features is padded with zero) or one k of a float32 matrix: `words` of them make a row.
// - Packed weights: [ceil(out_features / 32)][words][32] words; columns past out_features are zero.
// - Each weight comes from memory once per block of rows; a block's activations stay in the L2 cache.
//
// Built once for the processor at hand. TANDEM_VECTOR_BYTES: 64, 32 or 16, the width of a register.
// TANDEM_DOT_BF16: whether it multiplies pairs of bfloat16 itself (AVX512_BF16).
#include <sys/mman.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#if TANDEM_DOT_BF16
#include <immintrin.h>
#endif
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

namespace {

using tvm::ffi::TensorView;

constexpr int64_t kColumns = 32;                      // of a packed block
constexpr int kLanes = TANDEM_VECTOR_BYTES / 4;       // words of a register
constexpr int kWide = 2;                              // registers of columns computed at once
constexpr int kPassColumns = kWide * kLanes;          // a block takes kColumns / kPassColumns passes
constexpr int kMaxRows = kLanes == 16 ? 12 : 4;       // of a tile, whose sums fill the registers
constexpr int kUnroll = 8;                            // words of k per turn of the inner loop
constexpr int64_t kRowBlockBytes = 512 << 10;         // activations kept in L2
constexpr int64_t kAheadBytes = 8 << 10;              // how far weights are prefetched
constexpr int64_t kSerialBytes = 64 << 10;             // of rows that one thread copies
constexpr int64_t kSerialWork = 1 << 16;              // multiply-adds below which threads don't pay

using Floats = float __attribute__((vector_size(TANDEM_VECTOR_BYTES)));
using Words = uint32_t __attribute__((vector_size(TANDEM_VECTOR_BYTES)));

float as_float(uint32_t word) {
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

uint32_t as_word(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  return word;
}

struct Float32 {
  using Element = float;
  static constexpr int kPerWord = 1;
  static float widen(float value) { return value; }
  static float narrow(float value) { return value; }
  // Weights of one k (or pair of k) in the form that `add` takes, and the sum with one more product.
  struct Loaded {
    Floats value;
  };
  static Loaded load(Words weights) { return {(Floats)weights}; }
  static Floats add(Floats sum, const Loaded& weights, uint32_t activation) {
    return sum + weights.value * as_float(activation);
  }
};

struct BFloat16 {
  using Element = uint16_t;
  static constexpr int kPerWord = 2;
  static float widen(uint16_t value) { return as_float(uint32_t(value) << 16); }
  // To nearest, ties to even; NaN stays NaN.
  static uint16_t narrow(float value) {
    uint32_t word = as_word(value);
    uint32_t rounded = word + 0x7fff + ((word >> 16) & 1);
    return ((word & 0x7fffffff) > 0x7f800000 ? word | 0x400000 : rounded) >> 16;
  }
#if TANDEM_DOT_BF16
  struct Loaded {
    __m512bh pairs;
  };
  static Loaded load(Words weights) { return {(__m512bh)weights}; }
  static Floats add(Floats sum, const Loaded& weights, uint32_t activations) {
    return _mm512_dpbf16_ps(sum, weights.pairs, (__m512bh)_mm512_set1_epi32(int(activations)));
  }
#else
  struct Loaded {
    Floats even, odd;
  };
  static Loaded load(Words weights) {
    return {(Floats)(weights << 16), (Floats)(weights & 0xffff0000u)};
  }
  static Floats add(Floats sum, const Loaded& weights, uint32_t activations) {
    sum = sum + weights.even * as_float(activations << 16);
    return sum + weights.odd * as_float(activations & 0xffff0000u);
  }
#endif
};

// One product, as raw memory.
template <class T>
struct Product {
  const uint32_t* weights;         // packed
  const uint32_t* rows;            // [num_rows][stride], words
  const typename T::Element* bias; // [num_columns] or null
  typename T::Element* out;        // [num_rows][num_columns]
  int64_t num_rows, num_columns, words, stride;
};

// Which cache lines a tile asks for: of every `every` turns' weights at `at`, the `phase`th.
struct Prefetch {
  const char* at;
  int every, phase;
};

template <class T>
void store(const Product<T>& p, int64_t row, int64_t column, const float (&sums)[kPassColumns]) {
  typename T::Element* out = p.out + row * p.num_columns + column;
  float full[kPassColumns] = {};
  int count = int(std::min<int64_t>(kPassColumns, p.num_columns - column));
  if (p.bias != nullptr)
    for (int c = 0; c < count; c++) full[c] = T::widen(p.bias[column + c]);
  typename T::Element narrow[kPassColumns];
  for (int c = 0; c < kPassColumns; c++)
    narrow[c] = T::narrow(p.bias != nullptr ? sums[c] + full[c] : sums[c]);
  if (count == kPassColumns)
    std::memcpy(out, narrow, sizeof narrow);
  else if (count > 0)
    std::memcpy(out, narrow, count * sizeof(typename T::Element));
}

// ROWS rows from `row` on, times the kPassColumns columns whose packed words begin at `weights`.
template <class T, int ROWS>
void tile(const Product<T>& p, const uint32_t* weights, int64_t row, int64_t column, Prefetch ahead) {
  Floats sums[ROWS][kWide] = {};
  const uint32_t* rows = p.rows + row * p.stride;
  auto step = [&](int64_t k) {
    typename T::Loaded loaded[kWide];
#pragma GCC unroll 2
    for (int v = 0; v < kWide; v++)
      loaded[v] = T::load(*(const Words*)(weights + k * kColumns + v * kLanes));
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int v = 0; v < kWide; v++) sums[r][v] = T::add(sums[r][v], loaded[v], rows[r * p.stride + k]);
  };
  int64_t k = 0;
  int turn = ahead.phase;
  for (; k + kUnroll <= p.words; k += kUnroll) {
    bool fetch = turn == 0;
    turn = fetch ? ahead.every - 1 : turn - 1;
    for (int i = 0; i < kUnroll; i++) {
      if (fetch) {
        __builtin_prefetch(ahead.at + (k + i) * kColumns * 4);
        __builtin_prefetch(ahead.at + (k + i) * kColumns * 4 + 64);
      }
      step(k + i);
    }
  }
  for (; k < p.words; k++) step(k);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    float found[kPassColumns];
    std::memcpy(found, sums[r], sizeof found);
    store<T>(p, row + r, column, found);
  }
}

template <class T>
using Tile = void (*)(const Product<T>&, const uint32_t*, int64_t, int64_t, Prefetch);

template <class T, int... ROWS>
Tile<T> tile_of(int rows, std::integer_sequence<int, ROWS...>) {
  static constexpr Tile<T> kTiles[] = {tile<T, ROWS + 1>...};
  return kTiles[rows - 1];
}

// One packed block of columns for the rows [first, last), in tiles of nearly equal height.
template <class T>
void column_block(const Product<T>& p, int64_t block, int64_t first, int64_t last) {
  int64_t num_tiles = (last - first + kMaxRows - 1) / kMaxRows;
  const uint32_t* weights = p.weights + block * p.words * kColumns;
  const char* next = (const char*)(weights + p.words * kColumns);
  for (int64_t t = 0, row = first; t < num_tiles; t++) {
    int rows = int((last - row) / (num_tiles - t));
    Tile<T> run = tile_of<T>(rows, std::make_integer_sequence<int, kMaxRows>());
    // A single tile reads its own weights ahead; several share out the next block's among them.
    Prefetch ahead = num_tiles > 1 ? Prefetch{next, int(num_tiles), int(t)}
                                   : Prefetch{(const char*)weights + kAheadBytes, 1, 0};
    for (int64_t c = 0; c < kColumns; c += kPassColumns)
      run(p, weights + c, row, block * kColumns + c, ahead);
    row += rows;
  }
}

int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A row padded to whole words.
template <class T>
void copy_row(uint32_t* to, const typename T::Element* from, int64_t size, int64_t words) {
  to[words - 1] = 0;
  std::memcpy(to, from, size * sizeof(*from));
}

template <class T>
void multiply(Product<T> p, const typename T::Element* x, int64_t in_features) {
  int64_t num_blocks = divided_up(p.num_columns, kColumns);
  int64_t block_rows = std::max<int64_t>(kRowBlockBytes / (p.words * 4) / kMaxRows, 1) * kMaxRows;
  int64_t num_row_blocks = divided_up(p.num_rows, block_rows);
  bool copied = in_features % T::kPerWord != 0 || p.num_rows > 1;
  std::unique_ptr<uint32_t[]> scratch;
  p.stride = p.words;
  p.rows = (const uint32_t*)x;
  if (copied) {
    // One cache line more than the rows fill, so that a tile's rows don't all fall into one set of the cache.
    p.stride = divided_up(p.words, 16) * 16 + 16;
    scratch.reset(new uint32_t[p.num_rows * p.stride]);
    p.rows = scratch.get();
  }
  auto copy = [&](int64_t r) {
    copy_row<T>(scratch.get() + r * p.stride, x + r * in_features, in_features, p.words);
  };
  // Each wait for all threads costs much where another program holds a core: few rows are copied before they start.
  bool copy_first = copied && p.num_rows * p.words * 4 <= kSerialBytes;
  for (int64_t r = 0; copy_first && r < p.num_rows; r++) copy(r);
#pragma omp parallel if (p.num_rows * p.num_columns * p.words >= kSerialWork)
  {
    if (copied && !copy_first) {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < p.num_rows; r++) copy(r);
    }
    int64_t chunk = std::max<int64_t>(num_blocks / (omp_get_num_threads() * 16), 1);
    int64_t chunks = divided_up(num_blocks, chunk);
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t item = 0; item < num_row_blocks * chunks; item++) {
      int64_t first = item / chunks * block_rows, begin = item % chunks * chunk;
      int64_t last = std::min(first + block_rows, p.num_rows);
      for (int64_t b = begin; b < std::min(begin + chunk, num_blocks); b++) column_block<T>(p, b, first, last);
    }
  }
}

bool is_float32(TensorView t) { return t.dtype().code == kDLFloat && t.dtype().bits == 32; }
bool is_bfloat16(TensorView t) { return t.dtype().code == kDLBfloat && t.dtype().bits == 16; }

void check(bool held, const char* what) {
  if (!held) TVM_FFI_THROW(ValueError) << what;
}

int64_t words_of(TensorView t, int64_t features) { return is_bfloat16(t) ? divided_up(features, 2) : features; }

// packed: [blocks, words, 32] words of `like`'s dtype, `features` wide.
void check_packed(TensorView packed, TensorView like, int64_t features) {
  check(is_float32(like) || is_bfloat16(like), "the dtype must be float32 or bfloat16");
  check(packed.ndim() == 3 && packed.IsContiguous() && packed.size(1) == words_of(like, features) &&
            packed.size(2) == kColumns && packed.dtype().bits == 32,
        "the packed weights have another shape or dtype than the tensor given with them");
}

template <class T>
void run(TensorView x, TensorView packed, const void* bias, TensorView out) {
  Product<T> p = {};
  p.weights = (const uint32_t*)packed.data_ptr();
  p.bias = (const typename T::Element*)bias;
  p.out = (typename T::Element*)out.data_ptr();
  p.num_rows = x.size(0);
  p.num_columns = out.size(1);
  p.words = packed.size(1);
  multiply<T>(p, (const typename T::Element*)x.data_ptr(), x.size(1));
}

// x: [n, in_features] -> out: [n, out_features], contiguous, one dtype. bias: [out_features], or of no element.
void linear(TensorView x, TensorView packed, TensorView bias, TensorView out) {
  check(x.ndim() == 2 && out.ndim() == 2 && x.size(0) == out.size(0) && x.IsContiguous() && out.IsContiguous(),
        "x and out must be contiguous and have as many rows");
  check_packed(packed, x, x.size(1));
  check(x.dtype() == out.dtype() && x.dtype() == bias.dtype(), "x, bias and out must have one dtype");
  check(divided_up(out.size(1), kColumns) == packed.size(0), "out is not as wide as the weights");
  check(bias.numel() == 0 || (bias.numel() == out.size(1) && bias.IsContiguous()), "bias is not as wide as out");
  if (x.size(0) == 0) return;
  const void* offset = bias.numel() != 0 ? bias.data_ptr() : nullptr;
  is_bfloat16(x) ? run<BFloat16>(x, packed, offset, out) : run<Float32>(x, packed, offset, out);
}

// Rows first..last of a block, of `width` bytes each, laid side by side word by word.
void pack_block(const char* weight, int64_t num_rows, int64_t width, int64_t words, uint32_t* packed) {
  constexpr int64_t kStrip = 16;  // words of a row at a time, one cache line
  for (int64_t k = 0; k < words; k += kStrip)
    for (int64_t c = 0; c < kColumns; c++) {
      uint32_t line[kStrip] = {};
      int64_t bytes = std::min<int64_t>(sizeof line, width - k * 4);
      if (c < num_rows) std::memcpy(line, weight + c * width + k * 4, bytes);
      for (int64_t i = 0; i < std::min(kStrip, words - k); i++) packed[(k + i) * kColumns + c] = line[i];
    }
}

// weight: [out_features, in_features] -> packed, in large pages where the system has them.
void pack(TensorView weight, TensorView packed) {
  check(weight.ndim() == 2 && weight.IsContiguous(), "the weight must be a contiguous matrix");
  check_packed(packed, weight, weight.size(1));
  check(divided_up(weight.size(0), kColumns) == packed.size(0), "the packed weights have another height");
  int64_t words = packed.size(1), width = weight.size(1) * weight.dtype().bits / 8;
  constexpr uintptr_t kHuge = 2 << 20;
  auto begin = (uintptr_t)packed.data_ptr();
  uintptr_t first = (begin + kHuge - 1) / kHuge * kHuge, end = (begin + packed.numel() * 4) / kHuge * kHuge;
#ifdef MADV_HUGEPAGE
  if (first < end) madvise((void*)first, end - first, MADV_HUGEPAGE);
#endif
#pragma omp parallel for schedule(static)
  for (int64_t b = 0; b < packed.size(0); b++)
    pack_block((const char*)weight.data_ptr() + b * kColumns * width, weight.size(0) - b * kColumns, width, words,
               (uint32_t*)packed.data_ptr() + b * words * kColumns);
}

// Rows of the matrix that `packed` holds. ids: int64 [n], below num_rows -> out: [n, in_features].
void gather(TensorView packed, int64_t num_rows, TensorView ids, TensorView out) {
  check(ids.ndim() == 1 && ids.dtype().code == kDLInt && ids.dtype().bits == 64 && ids.IsContiguous(),
        "ids must be contiguous int64");
  check(out.ndim() == 2 && out.size(0) == ids.size(0) && out.IsContiguous(), "out must have a row per id");
  check_packed(packed, out, out.size(1));
  int64_t n = ids.size(0), words = packed.size(1), width = out.size(1) * out.dtype().bits / 8;
  auto* id = (const int64_t*)ids.data_ptr();
  for (int64_t i = 0; i < n; i++)
    check(0 <= id[i] && id[i] < std::min(num_rows, packed.size(0) * kColumns), "an id is no row of the table");
#pragma omp parallel for schedule(static) if (n * words >= kSerialWork)
  for (int64_t i = 0; i < n; i++) {
    auto* from = (const uint32_t*)packed.data_ptr() + id[i] / kColumns * words * kColumns + id[i] % kColumns;
    char* to = (char*)out.data_ptr() + i * width;
    for (int64_t k = 0; k < words; k++)
      std::memcpy(to + k * 4, from + k * kColumns, std::min<int64_t>(4, width - k * 4));
  }
}

// The exclusive or of all words of `data`: reads every byte, for measuring what memory delivers.
int64_t read(TensorView data) {
  check(data.IsContiguous() && data.dtype().bits == 32, "data must be contiguous, of 32 bits an element");
  constexpr int64_t kTurn = 8 * kLanes;
  auto* words = (const uint32_t*)data.data_ptr();
  uint32_t all = 0;
#pragma omp parallel reduction(^ : all)
  {
    Words sums[8] = {};
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < data.numel() / kTurn; i++)
      for (int v = 0; v < 8; v++) {
        const uint32_t* from = words + i * kTurn + v * kLanes;
        Words value;
        std::memcpy(&value, from, sizeof value);
        sums[v] ^= value;
        __builtin_prefetch(from + kAheadBytes / 4);
      }
    for (const Words& sum : sums)
      for (int lane = 0; lane < kLanes; lane++) all ^= sum[lane];
  }
  for (int64_t i = data.numel() / kTurn * kTurn; i < data.numel(); i++) all ^= words[i];
  return all;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear, linear);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pack, pack);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather, gather);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(read, read);
