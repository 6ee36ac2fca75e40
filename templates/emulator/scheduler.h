// scheduler.h: what the parts of the emulator's scheduler share: blocks, fibers, and who goes on.
#pragma once

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "context.h"
#include "core.h"
#include "launch.h"
#include "shadow.h"
#include "units.h"

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

namespace emulator {

enum class Schedule : int { forward = 0, backward = 1, random = 2 };
enum class Moment { at_issue, at_wait, between };  // when an operation takes effect
enum class State : unsigned char { absent, ready, at_barrier, in_warp, polling, gone };

struct Block;

// An operation in flight: run(data) makes it happen.
struct Operation {
  void (*run)(void*);
  unsigned group;
  int line;
  alignas(16) unsigned char data[64];
};

struct Fiber : FagenThread {
  Context context;
  char* stack = nullptr;
  unsigned number = 0;  // in its block
  Block* owner = nullptr;
  State state = State::absent;
  int line = 0;
  const char* what = "";
  unsigned meeting_mask = 0;
  unsigned groups_committed = 0;
  std::vector<Operation> flying;
  Operation running;  // its operands lie where no kernel writes, which a sanitizer would see
  size_t place_among_busy = 0;
  FiberUnits units;
  Shadow shadow;
  Engine engine;
};

struct Warp {
  unsigned ready = 0, polling = 0, meeting = 0, gone = 0;  // by lane
  void* arguments[32];
  Moments moments[32];  // by the lowest lane of the mask
};

struct Block {
  FagenIndex index;
  std::vector<Fiber*> fibers;
  std::vector<Warp> warps;
  unsigned ready_warps = 0;  // by warp
  unsigned slow_warps = 0;   // which mostly wait until no other warp is ready
  unsigned held_warps = 0;   // which do so for once
  unsigned arrived = 0, gone = 0;
  int barrier_line = 0;
  Moments moments;
  unsigned char* shared = nullptr;
  BlockUnits units;
};

struct Random {
  unsigned long long state;
  unsigned next() {  // splitmix64
    unsigned long long z = state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return static_cast<unsigned>((z ^ z >> 31) >> 16);
  }
  unsigned below(unsigned bound) { return next() % bound; }
};

constexpr size_t PAGE_BYTES = 4096;
constexpr size_t STACK_BYTES = 256 * 1024;  // virtual; a fiber touches what it uses
constexpr size_t SPARE_STACKS = 4096;       // which are kept from one launch to the next
constexpr unsigned MULTIPROCESSOR_THREADS = 2048, MULTIPROCESSOR_SHARED_BYTES = 227 * 1024;
constexpr unsigned RACE_THREADS = 1024;  // each costs the sanitizer milliseconds to set up

// What the OS threads of one launch have in common.
struct Launch {
  const FagenLaunch& request;
  std::atomic<bool> failed{false};
  unsigned long long blocks;
  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  std::atomic<unsigned long long> stops{1};  // how often a worker came to where nothing of its own went on
  std::vector<std::atomic<unsigned long long>>
      stuck;  // of each worker: behind which of these it looked in vain

  explicit Launch(const FagenLaunch& request)
      : request(request),
        blocks(1ull * request.grid[0] * request.grid[1] * request.grid[2]),
        stuck(request.workers) {}

  // Whether every worker has looked in vain, or has nothing left, since the last one stopped.
  bool all_stuck() const {
    const unsigned long long last = stops;
    for (auto& each : stuck) {
      if (each < last) return false;
    }
    return true;
  }

  void fail(const std::string& text) {
    pthread_mutex_lock(&lock);
    if (!failed) snprintf(request.report, request.report_bytes, "%s", text.c_str());
    failed = true;
    pthread_mutex_unlock(&lock);
  }
};

// Takes so many stacks, those of earlier launches first: to map and fault them in takes as long as a small launch
// runs. Empty where there is no memory for them.
std::vector<char*> take_stacks(size_t count);
void give_back_stacks(const std::vector<char*>& stacks);

inline std::string position(FagenIndex at) {
  return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
}

inline unsigned lowest(unsigned mask) {
  return __builtin_ctz(mask);
}
inline unsigned highest(unsigned mask) {
  return 31 - __builtin_clz(mask);
}

// Runs every `workers`-th block of a launch on one OS thread.
class Scheduler {
 public:
  Scheduler(Launch& launch, unsigned worker)
      : launch_(launch),
        request_(launch.request),
        worker_(worker),
        next_block_(worker),
        random_{request_.seed * 64 + worker} {
    block_threads_ = request_.block[0] * request_.block[1] * request_.block[2];
    random_.next();
    const unsigned processors = request_.multiprocessors ? request_.multiprocessors : 1 + random_.below(3);
    const unsigned resident = std::min(MULTIPROCESSOR_THREADS / block_threads_,
                                       MULTIPROCESSOR_SHARED_BYTES / (request_.shared_bytes + 1024));
    unsigned long long wanted = processors * std::max(1u, std::min(2u, resident));
    if (WATCHES_RACES)
      wanted = std::max(wanted, RACE_THREADS / block_threads_ + 1ull);  // only live blocks race
    const unsigned long long mine = (launch.blocks + request_.workers - 1 - worker) / request_.workers;
    capacity_ = static_cast<unsigned>(std::min(wanted, mine));
    constexpr Moment choices[] = {Moment::at_issue, Moment::at_wait, Moment::between, Moment::between};
    moments_ = choices[random_.below(4)];
    late_units_ = random_.below(2) ? random_.next() : 0;
    hands_over_ = request_.schedule == static_cast<int>(Schedule::random) && random_.below(2);
    if (hands_over_ && moments_ != Moment::at_issue)
      late_units_ |= 1u << static_cast<unsigned>(Flight::Unit::product);
  }

  ~Scheduler() {
    for (auto& block : live_) free(block->shared);
    give_back_stacks(stacks_);
  }

  void run();

  void barrier(Fiber& fiber, int line);
  void meet(Fiber& fiber, const char* what, unsigned mask, int line, void* argument,
            void (*resolve)(void* const*, unsigned), bool orders_memory);
  void poll(Fiber& fiber, const char* what, int line);
  void polled() { progress_ = true; }
  void issue(Fiber& fiber, void (*run)(void*), const void* data, unsigned bytes, int line);
  void wait_groups(Fiber& fiber, unsigned groups);

  // Units beside the threads of a block (units.cpp).
  void init_barrier(Fiber& fiber, unsigned address, unsigned arrivals, int line);
  void publish_barriers(Fiber& fiber);
  void arrive(Fiber& fiber, unsigned address, unsigned bytes, int line);
  void complete_bytes(Block& block, unsigned address, unsigned bytes);
  void wait_phase(Fiber& fiber, unsigned address, unsigned parity, int line);
  void group_barrier(Fiber& fiber, int number, unsigned threads, bool waits, int line);
  bool set_registers(Fiber& fiber, unsigned count, bool grows, int line);
  void note_write(Fiber& fiber, unsigned address, unsigned bytes, int line);
  void issue_load(Fiber& fiber, const FagenTransfer& transfer, int line);
  void issue_store(Fiber& fiber, const FagenTransfer& transfer, int line);
  void wait_stores(Fiber& fiber, unsigned groups, bool only_reads, int line);
  void issue_product(Fiber& fiber, const FagenGroupProduct& product, int line);
  void commit_products(Fiber& fiber);
  void wait_products(Fiber& fiber, unsigned groups, int line);

  [[noreturn]] void finding(Fiber& fiber, int line, const std::string& text);
  [[noreturn]] void leave(Fiber& fiber);
  static void first_steps();

  const FagenLaunch& request() const { return request_; }

 private:
  Launch& launch_;
  const FagenLaunch& request_;
  const unsigned worker_;
  unsigned long long next_block_;
  Random random_;
  unsigned block_threads_, capacity_;
  Moment moments_;
  unsigned late_units_;  // units whose operations land only where nothing else can go on
  bool hands_over_;      // who ends a phase of a barrier stands back until those it lets go on can do no more
  bool progress_ = false, stopped_ = false;
  unsigned long long looks_since_ = 0;  // the stop behind which pollers look again; 0 where something went on
  std::vector<char*> stacks_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
  std::vector<std::unique_ptr<Block>> live_;
  std::vector<Fiber*> busy_;  // those with a copy in flight
  std::vector<std::unique_ptr<Flight>> flights_;
  size_t block_cursor_ = 0;
  unsigned warp_cursor_ = 0;
  Context home_;
  Shadow home_shadow_;
  unsigned long long end_ = 0;  // the moment after all threads

  void make_fibers();
  void admit_blocks();
  void retire(Block& block);
  void resume(Fiber& fiber);
  void suspend(Fiber& fiber, State state);
  void make_ready(Fiber& fiber);
  void perhaps_yield(Fiber& fiber);
  Fiber* pick();
  bool wake_pollers();
  bool others_may_help();
  bool still_waits(const Fiber& fiber) const;
  void complete(Fiber& fiber, size_t index);
  void complete_any(bool forced);
  void start_units(Block& block);
  void leave_units(Fiber& fiber);
  void retire_units(Block& block);
  Barrier& barrier_at(Fiber& fiber, unsigned address, const char* what, int line);
  void end_phase(Block& block, unsigned address, Barrier& barrier);
  void hand_over(Fiber& fiber, unsigned address);
  void fly(std::unique_ptr<Flight> flight);
  void land(size_t index);
  void land_any(bool forced);
  void land_or_poll(Fiber& fiber, size_t index, const char* what, int line);
  bool is_late(const Flight& flight) const { return late_units_ >> static_cast<unsigned>(flight.unit) & 1; }
  bool in_flight() const { return !busy_.empty() || !flights_.empty(); }
  size_t product_of(const Fiber& fiber) const;
  const Flight* touching(const Block& block, unsigned begin, unsigned end, bool only_writes) const;
  void check_fenced(Fiber& fiber, unsigned begin, unsigned end, int line);
  void run_product(Block& block, Joint& joint, unsigned number);
  void report(const Fiber& fiber, int line, const std::string& text);
  void report_deadlock();
  unsigned choose(unsigned mask);
  unsigned some_warps();
  std::string who_waits(const Block& block) const;
};

extern __thread Scheduler* scheduler __attribute__((tls_model("initial-exec")));

}  // namespace emulator
