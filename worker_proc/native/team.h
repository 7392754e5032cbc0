// The threads that compute a step together.
//
// What a change must not break:
// - Between steps they sleep; within one they spin, since a step has hundreds of waits of a microsecond.
// - Whoever spins long gives its core away: where another program holds the core of a thread waited for, that helps it end.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace tandem {

inline void pause_thread() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Waits until `arrived()`.
template <class Arrived>
void spin_until(Arrived&& arrived) {
  constexpr int kSpins = 4000;
  for (int i = 0; !arrived(); i++) i < kSpins ? pause_thread() : (void)sched_yield();
}

class Team {
 public:
  // num_threads of them, the caller of `run` included. cpus: where thread i is bound to while it computes, of `num_threads`
  // CPUs, or empty: the system decides.
  Team(int num_threads, std::vector<int> cpus)
      : num_threads_(num_threads), cpus_(std::move(cpus)), ranges_(new Range[num_threads]) {
    pthread_getaffinity_np(pthread_self(), sizeof callers_cpus_, &callers_cpus_);
    for (int rank = 1; rank < num_threads; rank++)
      threads_.emplace_back([this, rank] {
        bind(rank);
        serve(rank);
      });
  }

  Team(const Team&) = delete;

  ~Team() {
    job_ = nullptr;
    start();
    for (std::thread& thread : threads_) thread.join();
  }

  int size() const { return num_threads_; }

  // job(rank) on every thread, rank 0 on this one; returns when all have.
  template <class Job>
  void run(Job&& job) {
    context_ = &job;
    job_ = [](void* context, int rank) { (*static_cast<std::remove_reference_t<Job>*>(context))(rank); };
    start();
    // Only for the step: threads that the caller starts later would inherit its one CPU.
    bind(0);
    job(0);
    barrier();
    if (!cpus_.empty()) pthread_setaffinity_np(pthread_self(), sizeof callers_cpus_, &callers_cpus_);
  }

  // Within `run`, called by every rank: each item of [0, count) goes to one of them, and none leaves before all are done.
  //
  // A rank works through a stretch of its own from the front, then helps others from the back of theirs. Neighbouring items are
  // mostly one rank's, which what reads memory ahead lives on.
  template <class Item>
  void share(int rank, int64_t count, Item&& item) {
    uint32_t turn = ranges_[rank].turn++ & kTurnMask;
    claim(rank, turn, count, true, true, item);
    for (int other = 1; other < num_threads_; other++)
      claim((rank + other) % num_threads_, turn, count, false, false, item);
    barrier();
  }

  // Within `run`: none leaves before all have come.
  void barrier() {
    uint32_t generation = generation_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_release);
    } else {
      spin_until([&] { return generation_.load(std::memory_order_acquire) != generation; });
    }
  }

 private:
  // What is left of a rank's stretch: (turn, begin, end). One whose turn is another than the present was not touched yet.
  static constexpr int kPlaceBits = 22;
  static constexpr uint64_t kPlaceMask = (1u << kPlaceBits) - 1, kTurnMask = (1u << 20) - 1;
  struct alignas(128) Range {
    std::atomic<uint64_t> left{0};
    uint32_t turn = 1;  // of its rank, which alone reads it
  };

  static uint64_t packed(uint64_t turn, uint64_t begin, uint64_t end) {
    return (turn << kPlaceBits | begin) << kPlaceBits | end;
  }

  // Items of `owner`'s stretch, one by one, until none is left. touch: mark the stretch as this turn's, be it empty.
  template <class Item>
  void claim(int owner, uint32_t turn, int64_t count, bool touch, bool front, Item&& item) {
    std::atomic<uint64_t>& left = ranges_[owner].left;
    uint64_t seen = left.load(std::memory_order_relaxed);
    while (true) {
      bool fresh = seen >> (2 * kPlaceBits) != turn;
      uint64_t begin = fresh ? count * owner / num_threads_ : seen >> kPlaceBits & kPlaceMask;
      uint64_t end = fresh ? count * (owner + 1) / num_threads_ : seen & kPlaceMask;
      if (begin == end) {
        if (!touch || !fresh || left.compare_exchange_weak(seen, packed(turn, begin, end))) return;
        continue;
      }
      uint64_t next = front ? packed(turn, begin + 1, end) : packed(turn, begin, end - 1);
      if (!left.compare_exchange_weak(seen, next, std::memory_order_relaxed)) continue;
      item(int64_t(front ? begin : end - 1));
      seen = left.load(std::memory_order_relaxed);
    }
  }

  void bind(int rank) {
    if (cpus_.empty()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpus_[rank], &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
  }

  void start() {
    starts_.fetch_add(1, std::memory_order_release);
    starts_.notify_all();
  }

  void serve(int rank) {
    for (uint32_t seen = 0;; seen++) {
      starts_.wait(seen, std::memory_order_acquire);
      if (job_ == nullptr) return;
      job_(context_, rank);
      barrier();
    }
  }

  const int num_threads_;
  const std::vector<int> cpus_;
  cpu_set_t callers_cpus_;
  std::unique_ptr<Range[]> ranges_;
  alignas(128) std::atomic<int> arrived_{0};
  alignas(128) std::atomic<uint32_t> generation_{0};
  alignas(128) std::atomic<uint32_t> starts_{0};
  void (*job_)(void*, int) = nullptr;
  void* context_ = nullptr;
  std::vector<std::thread> threads_;
};

}  // namespace tandem
