// The threads that compute a step together.
//
// What a change must not break:
// - Between steps they sleep; within one they spin, since a step has hundreds of waits of a microsecond.
// - Whoever spins long gives its core away: where another program holds the core of a thread waited for, that helps it end.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
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
    if (pthread_getaffinity_np(pthread_self(), sizeof callers_cpus_, &callers_cpus_) != 0) cpus_.clear();
    try {
      for (int rank = 1; rank < num_threads; rank++)
        threads_.emplace_back([this, rank] {
          bind(rank);
          serve(rank);
        });
    } catch (const std::system_error&) {
      size_t started = threads_.size() + 1;
      end();
      throw std::runtime_error("of " + std::to_string(num_threads) + " threads only " + std::to_string(started) +
                               " could be started: ask for fewer (threads)");
    }
  }

  Team(const Team&) = delete;

  ~Team() { end(); }

  int size() const { return num_threads_; }

  // job(rank) on every thread, rank 0 on this one; returns when all have. A job must not throw: the others would wait for it.
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
    // More items than a place can number go out several at once.
    int64_t run = count / int64_t(kPlaceMask) + 1, num_runs = (count + run - 1) / run;
    auto items = [&](int64_t index) {
      for (int64_t i = index * run; i < std::min(count, (index + 1) * run); i++) item(i);
    };
    claim<true>(rank, turn, num_runs, items);
    for (int other = 1; other < num_threads_; other++) claim<false>((rank + other) % num_threads_, turn, num_runs, items);
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

  // Items of `owner`'s stretch, one by one, until none is left: from the front and marking it as this turn's, be it empty, where
  // it is one's OWN; else from the back.
  template <bool OWN, class Item>
  void claim(int owner, uint32_t turn, int64_t count, Item&& item) {
    std::atomic<uint64_t>& left = ranges_[owner].left;
    uint64_t seen = left.load(std::memory_order_relaxed);
    while (true) {
      bool fresh = seen >> (2 * kPlaceBits) != turn;
      uint64_t begin = fresh ? count * owner / num_threads_ : seen >> kPlaceBits & kPlaceMask;
      uint64_t end = fresh ? count * (owner + 1) / num_threads_ : seen & kPlaceMask;
      if (begin == end) {
        if (!OWN || !fresh || left.compare_exchange_weak(seen, packed(turn, begin, end))) return;
        continue;
      }
      uint64_t next = OWN ? packed(turn, begin + 1, end) : packed(turn, begin, end - 1);
      if (!left.compare_exchange_weak(seen, next, std::memory_order_relaxed)) continue;
      item(int64_t(OWN ? begin : end - 1));
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

  void end() {
    job_ = nullptr;
    start();
    for (std::thread& thread : threads_) thread.join();
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
  std::vector<int> cpus_;
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
