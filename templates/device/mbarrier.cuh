// mbarrier.cuh: barriers in shared memory, on which copies report and threads wait: from sm_80 on, with copies on sm_90.
//
//   Barrier barrier(address)             8 bytes of the block's shared memory, from a multiple of 8
//   init(barrier, arrivals)              by one thread: a phase ends after so many arrivals and all announced bytes
//   publish_barriers()                   by that thread, before the __syncthreads() after which others use them
//   arrive(barrier)                      orders what this thread has read and written before it
//   arrive_by_warp(barrier)              the same, by all of a warp, as one arrival
//   arrive_expecting(barrier, bytes)     the same, and announces bytes that copies will bring
//   wait(barrier, parity)                until the phase of that parity has ended; the first has parity 0, and the one
//                                        before it counts as ended. Whoever waits has to wait for every phase.
//
//   Ring<STAGES> at                      a position in buffers used in turn: at.stage(), at.parity(), at.next(); at.before()
//   Pipe<STAGES> pipe(address)           Pipe::BYTES of barriers for them: filled by copies, freed by their readers
//   pipe.init(readers)                   by one thread; so many threads or warps free a buffer; with a further
//                                        argument `writers` so many fill it, else one
//   pipe.wait_free(at)                   by the thread that fills: until the buffer is free
//   pipe.fill(at, bytes)                 by it, then: announces the bytes and gives the barrier on which copies report
//   pipe.refill(at, bytes)               both
//   pipe.fill_by_warp(at)                by all of a warp instead: its threads have written
//   pipe.wait(at)                        until the buffer is filled
//   pipe.free(at)                        by one thread, once all it stands for have waited and read
//   pipe.free_by_warp(at)                by all of a warp: its threads have waited and read
//   pipe.pass(at)                        the same, and on to the next
//   pipe.pass_behind_wait(at, holds)     the same, if that holds, right behind a wait for products: there the threads of
//                                        a warp are together, and nothing need join them again
#pragma once

#include "shared.cuh"
#include "warp.cuh"

struct Barrier {
  static constexpr uint32 BYTES = 8;
  uint32 address;

  __device__ __forceinline__ explicit Barrier(uint32 address) : address(address) {}
};

__device__ __forceinline__ void init(Barrier barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(window_address(barrier.address)), "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void publish_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void arrive(Barrier barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(window_address(barrier.address)) : "memory");
}

__device__ __forceinline__ void arrive_by_warp(Barrier barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) arrive(barrier);
}

__device__ __forceinline__ void arrive_expecting(Barrier barrier, uint32 bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(window_address(barrier.address)),
      "r"(bytes)
      : "memory");
}

// From sm_90 on the instruction may suspend the thread meanwhile.
#if __CUDA_ARCH__ >= 900
#define HAS_ENDED "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;"
#else
#define HAS_ENDED "mbarrier.test_wait.parity.shared::cta.b64 ended, [%0], %1;"
#endif

__device__ __forceinline__ void wait(Barrier barrier, uint32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred ended;\n"
      "AGAIN%=:\n" HAS_ENDED
      "\n"
      "@ended bra ENDED%=;\n"
      "bra AGAIN%=;\n"
      "ENDED%=:\n"
      "}" ::"r"(window_address(barrier.address)),
      "r"(parity)
      : "memory");
}

template <int STAGES>
struct Ring {
  uint32 count = 0;  // buffers passed so far

  __device__ __forceinline__ uint32 stage() const { return count % STAGES; }
  __device__ __forceinline__ uint32 parity() const { return count / STAGES % 2; }
  __device__ __forceinline__ void next() { ++count; }
  __device__ __forceinline__ Ring before() const { return {count - 1}; }
};

template <int STAGES>
struct Pipe {
  static constexpr uint32 BYTES = 2 * STAGES * Barrier::BYTES;
  uint32 address;

  __device__ __forceinline__ explicit Pipe(uint32 address) : address(address) {}

  __device__ __forceinline__ Barrier filled(uint32 stage) const { return Barrier(address + stage * 16); }
  __device__ __forceinline__ Barrier freed(uint32 stage) const { return Barrier(address + stage * 16 + 8); }

  __device__ __forceinline__ void init(int readers, int writers = 1) const {
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      ::init(filled(stage), writers);
      ::init(freed(stage), readers);
    }
  }

  __device__ __forceinline__ void wait_free(Ring<STAGES> at) const {
    ::wait(freed(at.stage()), at.parity() ^ 1);
  }

  __device__ __forceinline__ Barrier fill(Ring<STAGES> at, uint32 bytes) const {
    arrive_expecting(filled(at.stage()), bytes);
    return filled(at.stage());
  }

  __device__ __forceinline__ void wait(Ring<STAGES> at) const { ::wait(filled(at.stage()), at.parity()); }
  __device__ __forceinline__ void free(Ring<STAGES> at) const { arrive(freed(at.stage())); }

  __device__ __forceinline__ Barrier refill(Ring<STAGES> at, uint32 bytes) const {
    wait_free(at);
    return fill(at, bytes);
  }

  __device__ __forceinline__ void fill_by_warp(Ring<STAGES> at) const { arrive_by_warp(filled(at.stage())); }

  __device__ __forceinline__ void free_by_warp(Ring<STAGES> at) const { arrive_by_warp(freed(at.stage())); }

  __device__ __forceinline__ void pass(Ring<STAGES>& at) const {
    free_by_warp(at);
    at.next();
  }

  __device__ __forceinline__ void pass_behind_wait(Ring<STAGES>& at, bool holds) const {
    if (threadIdx.x % 32 == 0 && holds) free(at);
    if (holds) at.next();
  }
};
