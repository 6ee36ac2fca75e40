// mbarrier.cuh: barriers in shared memory, on which copies report and threads wait, on a CPU.
// The names are those of device/mbarrier.cuh.
#pragma once

#include "shared.cuh"
#include "warp.cuh"

struct Barrier {
  static constexpr uint32 BYTES = 8;
  uint32 address;

  explicit Barrier(uint32 address) : address(address) {}
};

inline void init(Barrier barrier, int arrivals, int line = __builtin_LINE()) {
  fagen_barrier_init(barrier.address, arrivals, line);
}

inline void publish_barriers() {
  fagen_barrier_publish();
}

inline void arrive(Barrier barrier, int line = __builtin_LINE()) {
  fagen_barrier_arrive(barrier.address, 0, line);
}

inline void arrive_by_warp(Barrier barrier, int line = __builtin_LINE()) {
  __syncwarp(FULL_WARP, line);
  if (threadIdx.x % 32 == 0) arrive(barrier, line);
}

inline void arrive_expecting(Barrier barrier, uint32 bytes, int line = __builtin_LINE()) {
  fagen_barrier_arrive(barrier.address, bytes, line);
}

inline void wait(Barrier barrier, uint32 parity, int line = __builtin_LINE()) {
  fagen_barrier_wait(barrier.address, parity, line);
}

template <int STAGES>
struct Ring {
  uint32 count = 0;

  uint32 stage() const { return count % STAGES; }
  uint32 parity() const { return count / STAGES % 2; }
  void next() { ++count; }
  Ring before() const { return {count - 1}; }
};

template <int STAGES>
struct Pipe {
  static constexpr uint32 BYTES = 2 * STAGES * Barrier::BYTES;
  uint32 address;

  explicit Pipe(uint32 address) : address(address) {}

  Barrier filled(uint32 stage) const { return Barrier(address + stage * 16); }
  Barrier freed(uint32 stage) const { return Barrier(address + stage * 16 + 8); }

  void init(int readers, int writers = 1, int line = __builtin_LINE()) const {
    for (int stage = 0; stage < STAGES; ++stage) {
      ::init(filled(stage), writers, line);
      ::init(freed(stage), readers, line);
    }
  }

  void wait_free(Ring<STAGES> at, int line = __builtin_LINE()) const {
    ::wait(freed(at.stage()), at.parity() ^ 1, line);
  }

  Barrier fill(Ring<STAGES> at, uint32 bytes, int line = __builtin_LINE()) const {
    arrive_expecting(filled(at.stage()), bytes, line);
    return filled(at.stage());
  }

  void wait(Ring<STAGES> at, int line = __builtin_LINE()) const {
    ::wait(filled(at.stage()), at.parity(), line);
  }
  void free(Ring<STAGES> at, int line = __builtin_LINE()) const { arrive(freed(at.stage()), line); }
  Barrier refill(Ring<STAGES> at, uint32 bytes, int line = __builtin_LINE()) const {
    wait_free(at, line);
    return fill(at, bytes, line);
  }
  void fill_by_warp(Ring<STAGES> at, int line = __builtin_LINE()) const {
    arrive_by_warp(filled(at.stage()), line);
  }
  void free_by_warp(Ring<STAGES> at, int line = __builtin_LINE()) const {
    arrive_by_warp(freed(at.stage()), line);
  }
  void pass(Ring<STAGES>& at, int line = __builtin_LINE()) const {
    free_by_warp(at, line);
    at.next();
  }
  void pass_behind_wait(Ring<STAGES>& at, bool holds, int line = __builtin_LINE()) const {
    if (holds) pass(at, line);
  }
};
