// What this processor can do at most, for bench/limits.py:  limits THREADS
//
// Prints {"dram_read_gb_s": …, "peak_tflop_s": {"bf16": …, "fp32": …, "int8": …}}. Rules:
// - No compiler can drop the work: every loaded word and every sum ends in a register that an asm statement takes, and no sum
//   can be had without all of its steps, since each multiplies or adds into the one before it.
// - The best of several runs counts, and of several ways to read: a limit is what was reached once.
// - Compiled for the machine at hand: the widest registers it has. A type that it has no products for is computed by the widened
//   type that stands in for it, and has that peak. Matrix units (AMX) are not counted.
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#if __AVX2__
#include <immintrin.h>
#endif

namespace {

#if __AVX512F__
constexpr int kBytes = 64;
#elif __AVX__
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
constexpr int kChains = 12;                      // sums at once: more than latency times throughput anywhere
constexpr int kSteps = 1 << 22;                  // of each chain in one run
constexpr size_t kDataBytes = size_t(1) << 30;   // far beyond any cache
constexpr size_t kHugeBytes = 2 << 20;
constexpr int kRuns = 5;

using Floats = float __attribute__((vector_size(kBytes)));
using Words = uint64_t __attribute__((vector_size(kBytes)));

// The compiler must have `value` in a register or memory here, and knows nothing of it afterwards.
template <class T>
void opaque(T& value) {
  __asm__ volatile("" : "+m"(value));
}

template <class F>
double fastest(F&& run) {
  double best = 1e9;
  for (int i = 0; i < kRuns; i++) {
    auto start = std::chrono::steady_clock::now();
    run();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

// Reads [begin, end), a multiple of STREAMS * 4 registers, as so many streams side by side.
template <int STREAMS, bool PREFETCH>
void read(const char* begin, const char* end) {
  constexpr size_t kAhead = 4096, kTurn = 4 * kBytes;
  size_t size = (end - begin) / STREAMS;
  Words sums[4] = {};
  for (size_t i = 0; i < size; i += kTurn)
    for (int s = 0; s < STREAMS; s++) {
      const char* from = begin + s * size + i;
      if (PREFETCH)
        for (size_t line = 0; line < kTurn; line += 64) __builtin_prefetch(from + kAhead + line);
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++) sums[v] ^= *(const Words*)(from + v * kBytes);
    }
  for (Words& sum : sums) opaque(sum);
}

double dram_read(int threads) {
  auto* data = (char*)std::aligned_alloc(kHugeBytes, kDataBytes);
  if (data == nullptr) std::abort();
#ifdef MADV_HUGEPAGE
  madvise(data, kDataBytes, MADV_HUGEPAGE);
#endif
  size_t part = kDataBytes / threads / kHugeBytes * kHugeBytes;
  auto on_all = [&](auto&& f) {
#pragma omp parallel num_threads(threads)
    f(data + part * omp_get_thread_num(), data + part * (omp_get_thread_num() + 1));
  };
  on_all([](char* begin, char* end) { std::memset(begin, 1, end - begin); });
  double best = 1e9;
  best = std::min(best, fastest([&] { on_all(read<1, true>); }));
  best = std::min(best, fastest([&] { on_all(read<1, false>); }));
  best = std::min(best, fastest([&] { on_all(read<4, true>); }));
  best = std::min(best, fastest([&] { on_all(read<4, false>); }));
  std::free(data);
  return double(part) * threads / best;
}

struct Float32 {
  static constexpr int kOperations = 2 * kBytes / 4;  // of one step
  using Sum = Floats;
  // The sum is a factor: neither side of it can be computed once for all chains.
  static Sum step(Sum sum, Words a, Words b) { return sum * (Floats)a + (Floats)b; }
};

#if __AVX512BF16__
struct BFloat16 {
  static constexpr int kOperations = 2 * kBytes / 2;
  using Sum = Floats;
  static Sum step(Sum sum, Words a, Words b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
};
#else
using BFloat16 = Float32;
#endif

#if __AVX512VNNI__ || __AVXVNNI__ || __AVX2__
struct Int8 {
  static constexpr int kOperations = 2 * kBytes;
  using Sum = Words;
  static Sum step(Sum sum, Words a, Words b) {
#if __AVX512VNNI__
    return (Sum)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif __AVXVNNI__
    return (Sum)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#elif __AVX512BW__
    opaque(a);  // else one product would serve all chains
    __m512i pairs = _mm512_maddubs_epi16((__m512i)a, (__m512i)b);
    return (Sum)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#else
    opaque(a);
    __m256i pairs = _mm256_maddubs_epi16((__m256i)a, (__m256i)b);
    return (Sum)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
  }
};
#else
using Int8 = Float32;
#endif

template <class T>
void chains() {
  typename T::Sum sums[kChains] = {};
  Words a = {}, b = {};
  opaque(a);
  opaque(b);
  for (int i = 0; i < kSteps; i++)
#pragma GCC unroll 12
    for (int c = 0; c < kChains; c++) sums[c] = T::step(sums[c], a, b);
  for (auto& sum : sums) opaque(sum);
}

template <class T>
double peak(int threads) {
  double seconds = fastest([&] {
#pragma omp parallel num_threads(threads)
    chains<T>();
  });
  return double(T::kOperations) * kChains * kSteps * threads / seconds;
}

}  // namespace

int main(int argc, char** argv) {
  int threads = argc > 1 ? std::max(1, std::atoi(argv[1])) : omp_get_max_threads();
  std::printf("{\"dram_read_gb_s\": %.2f, \"peak_tflop_s\": {\"bf16\": %.4f, \"fp32\": %.4f, \"int8\": %.4f}}\n",
              dram_read(threads) / 1e9, peak<BFloat16>(threads) / 1e12, peak<Float32>(threads) / 1e12,
              peak<Int8>(threads) / 1e12);
}
