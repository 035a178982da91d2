// A persistent pool that walks a list of ops together.
//
// Every op is a number of independent units, handed out one by one. An op is over when all its
// units are done, not when all workers have arrived: a worker that is asleep or preempted holds up
// nothing but the unit in its hands, and one that joins late runs through what is already over.
//
// A run can end early: a unit may say that its op is the last one. All workers learn of that by
// what tells them that the op is over.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <sched.h>

namespace forebay {

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// What the pool runs. `unit` is called by several threads at once, each with its own worker number.
// Not touched after run() has returned, even by workers that have yet to notice the end. Cannot
// fail: an op that loses a unit would never be over, so memory is taken before run().
class Work {
 public:
  virtual ~Work() = default;
  virtual void unit(int op, uint32_t index, int worker) noexcept = 0;
};

class Pool {
 public:
  // The calling thread of run() is worker 0; `threads - 1` more are started here. Each worker calls
  // `leave` with its number when it has nothing more to do in a run.
  Pool(int threads, std::function<void(int)> leave) : leave_(std::move(leave)) {
    for (int worker = 1; worker < threads; ++worker)
      threads_.emplace_back([this, worker] { serve(worker); });
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      epoch_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(threads_.size()) + 1; }

  // Runs ops first, first + 1, ... up to `ops` in order, op i having units[i] units. Returns the
  // op to go on with: `ops` when all are done. With `op_ns`, adds the wall time of op i to
  // op_ns[i]. One caller at a time.
  int run(Work& work, const uint32_t* units, int first, int ops, int64_t* op_ns = nullptr) {
    // A straggler of the last run may still be reading its counters; nobody else is in here.
    wait_until([this] { return inside_.load(std::memory_order_acquire) == 0; });
    reserve(ops);
    for (int op = first; op < ops; ++op) {
      counters_[op].next.store(0, std::memory_order_relaxed);
      counters_[op].done.store(0, std::memory_order_relaxed);
      units_[op] = units[op];
    }
    first_ = first;
    ops_ = ops;
    last_.store(kNoLast, std::memory_order_relaxed);
    work_ = &work;
    if (!threads_.empty()) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        open_ = true;
        epoch_.fetch_add(1, std::memory_order_release);
      }
      wake_.notify_all();
    }
    walk(0, op_ns);
    if (!threads_.empty()) {
      std::lock_guard<std::mutex> lock(mutex_);
      open_ = false;
    }
    const int last = last_.load(std::memory_order_relaxed);
    return last == kNoLast ? ops : last + 1;
  }

  // Ends the run after `op`. To be called by a unit of that op, which is not over before the unit
  // is: whoever sees the one sees the other.
  void end_after(int op) { last_.store(op, std::memory_order_relaxed); }

 private:
  struct alignas(128) Counters {
    std::atomic<uint32_t> next{0};
    alignas(64) std::atomic<uint32_t> done{0};
  };

  static constexpr int kSpins = 1000;      // tens of microseconds, then the core is given up
  static constexpr int kIdleSpins = 400;   // between runs the sampler wants the cores
  static constexpr int kNoLast = std::numeric_limits<int>::max();

  template <class Condition>
  static void wait_until(Condition condition) {
    for (int spins = 0; !condition(); ++spins) {
      if (spins < kSpins) {
        pause_briefly();
      } else {
        sched_yield();
      }
    }
  }

  void reserve(int ops) {
    if (ops <= capacity_) return;
    counters_ = std::make_unique<Counters[]>(static_cast<size_t>(ops));
    units_.resize(static_cast<size_t>(ops));
    capacity_ = ops;
  }

  void walk(int worker, int64_t* op_ns) {
    using Clock = std::chrono::steady_clock;
    Work& work = *work_;
    Clock::time_point started;
    if (op_ns) started = Clock::now();
    for (int op = first_; op < ops_; ++op) {
      Counters& counters = counters_[op];
      const uint32_t total = units_[op];
      uint32_t mine = 0;
      // The look before the claim keeps latecomers from bouncing the line for nothing.
      while (counters.next.load(std::memory_order_relaxed) < total) {
        const uint32_t index = counters.next.fetch_add(1, std::memory_order_relaxed);
        if (index >= total) break;
        work.unit(op, index, worker);
        ++mine;
      }
      if (mine) counters.done.fetch_add(mine, std::memory_order_acq_rel);
      wait_until([&] { return counters.done.load(std::memory_order_acquire) >= total; });
      if (op_ns) {
        const auto now = Clock::now();
        op_ns[op] +=
            std::chrono::duration_cast<std::chrono::nanoseconds>(now - started).count();
        started = now;
      }
      if (last_.load(std::memory_order_relaxed) <= op) break;
    }
    leave_(worker);
  }

  void serve(int worker) {
    uint64_t seen = 0;
    for (;;) {
      for (int spins = 0; spins < kIdleSpins; ++spins) {
        if (epoch_.load(std::memory_order_acquire) != seen) break;
        pause_briefly();
      }
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return epoch_.load(std::memory_order_relaxed) != seen; });
        if (stopping_) return;
        seen = epoch_.load(std::memory_order_relaxed);
        if (!open_) continue;  // slept through the whole run
        inside_.fetch_add(1, std::memory_order_relaxed);
      }
      walk(worker, nullptr);
      inside_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::function<void(int)> leave_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> epoch_{0};
  std::atomic<int> inside_{0};  // workers other than the caller that are in walk()
  bool open_ = false;           // guarded by mutex_: a run may still be joined
  bool stopping_ = false;       // guarded by mutex_
  std::unique_ptr<Counters[]> counters_;
  std::vector<uint32_t> units_;
  int capacity_ = 0;
  int first_ = 0;
  int ops_ = 0;
  std::atomic<int> last_{kNoLast};
  Work* work_ = nullptr;
};

}  // namespace forebay
