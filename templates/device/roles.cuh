// roles.cuh: warps of one block that do different things (sm_90).
//
//   warpgroup()                         the number of this thread's warpgroup: four warps that multiply together
//   elect_one()                         true in one lane of a warp, always the same; all 32 lanes must call
//   load_by_warp<N>(tile, i)            load_vector for all 32 lanes, which call: the first reads, and may say so by
//                                       itself, as it does where it frees a buffer for its warp
//   shrink_registers<N>()               gives registers back: from now on this warpgroup has N a thread
//   grow_registers<N>()                 waits until the block has N a thread to spare for it; N is a multiple of 8
//                                       from 24 to 256, and the block's registers are those of its launch
//   group_sync(barrier, threads)        meets others at named barrier 1 to 15, of whom `threads` (a multiple of 32)
//                                       arrive in all; orders memory
//   group_arrive(barrier, threads)      the same, without waiting
#pragma once

#include "shared.cuh"
#include "warp.cuh"

__device__ __forceinline__ int warpgroup() {
  return __shfl_sync(FULL_WARP, static_cast<int>(threadIdx.x / 128), 0);
}

__device__ __forceinline__ bool elect_one() {
  uint32 elected;
  asm volatile(
      "{\n"
      ".reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;\n"
      "}"
      : "=r"(elected));
  return elected;
}

template <int N, int COUNT>
__device__ __forceinline__ Vec<int32, N> load_by_warp(const Shared<int32, COUNT>& tile, int i) {
  Vec<int32, N> all = {};
  if (threadIdx.x % 32 == 0) all = load_vector<N>(tile, i);
#pragma unroll
  for (int j = 0; j < N; ++j) all[j] = __shfl_sync(FULL_WARP, all[j], 0);
  return all;
}

template <int N>
__device__ __forceinline__ void shrink_registers() {
  static_assert(N >= 24 && N <= 256 && N % 8 == 0);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
__device__ __forceinline__ void grow_registers() {
  static_assert(N >= 24 && N <= 256 && N % 8 == 0);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

__device__ __forceinline__ void group_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void group_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
