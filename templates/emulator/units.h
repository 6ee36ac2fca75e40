// units.h: what a block has beside its threads: barriers in shared memory, named barriers, copies of tiles and
// products of warpgroups in flight.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "core.h"

namespace emulator {

struct Fiber;
struct Block;

// Where threads that meet hand over what they have seen of memory. Two of them, used in turn: who is fast may
// be at the next meeting before who is slow has left this one.
struct Moments {
  unsigned long long moment[2] = {};
  unsigned passed = 0;
  void* now() { return &moment[passed % 2]; }
};

// A barrier in shared memory. A phase ends when nothing is pending.
struct Barrier {
  unsigned arrivals = 0, pending = 0;
  long long bytes = 0;
  int phases = 0;  // that have ended
  const Fiber* maker = nullptr;
  bool published = false;
  std::vector<int> seen;  // for each thread, the last phase it waited for
  unsigned long long moment = 0;
};

// A named barrier.
struct GroupBarrier {
  unsigned threads = 0;
  int line = 0;
  std::vector<unsigned> came;
  std::vector<Fiber*> waiting;
  Moments moments;
};

// An operation in flight on a unit beside the threads; of one warpgroup, products land in order.
struct Flight {
  enum class Unit { load, store_read, store_write, product } unit;
  Block* block;
  const Fiber* thread;
  unsigned group, warpgroup;
  unsigned ranges[2][2];  // bytes of shared memory it touches, from and to
  int line;
  std::function<void()> run;
};

// A product the 128 threads of a warpgroup issue, each its part.
struct Joint {
  FagenGroupProduct product;
  int line;
  unsigned joined = 0;
  bool came[128] = {};
  float* sums[128];
  const unsigned* left[128];
  std::array<unsigned, 4> left_words[128];
};

struct Warpgroup {
  std::deque<std::shared_ptr<Joint>> forming;
  unsigned long long formed = 0, done = 0;  // products
};

// Sums of products in flight: what the thread sees in their place is no number.
struct Hidden {
  float* visible;
  unsigned count, flying = 0;
  std::unique_ptr<float[]> values;
};

struct FiberUnits {
  int waits_for = -1;  // the barrier on which it spins
  const Barrier* barrier = nullptr;
  unsigned parity = 0;
  unsigned long long waits_for_products = 0;  // until so many of its warpgroup are done
  unsigned stores_committed = 0, async_fences = 0;
  bool fenced = false;  // since the last group of products
  unsigned long long products = 0;
  std::vector<unsigned long long> groups;  // products issued before the end of each
  std::vector<std::unique_ptr<Hidden>> hidden;
};

// Who wrote 16 bytes of shared memory last, and how many fences that thread had passed.
struct Writer {
  unsigned short thread_plus_1 = 0;
  unsigned short line = 0;
  unsigned fences = 0;
};

struct BlockUnits {
  std::map<unsigned, Barrier> barriers;
  GroupBarrier groups[16];
  std::vector<unsigned> warp_registers;
  unsigned free_registers = 0;
  unsigned elected = 0;
  std::vector<Warpgroup> warpgroups;
  std::vector<Writer> writers;
  bool written = false;
};

}  // namespace emulator
