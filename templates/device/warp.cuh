// warp.cuh: what the threads of a warp and of a block do together.
//
//   __syncthreads() __syncwarp()                                  order memory, as in CUDA
//   __shfl_sync __shfl_xor_sync __shfl_down_sync __ballot_sync __any_sync   as in CUDA; order no memory
//   __popc(bits)                                                  as in CUDA
//   uniform(x)                          x, an int32 that is the same in all lanes: kept once for all of them
//   warp_max(x) warp_min(x)             of an int32 of all lanes, which must call: kept once for all of them
//   FULL_WARP                                                     the mask of all 32 lanes
//   lowest_lane(holds)                  the lowest lane in which that is so, 32 if there is none; all lanes must call
//   lane_sum<LANES>(x) lane_max<LANES>(x) lane_min<LANES>(x)
//       over each group of LANES neighbouring lanes (a power of two up to 32); every lane gets the result.
//       All 32 lanes must call. x is float, int32 or int64; max and min give NaN if any x is.
#pragma once

#include "math.cuh"

constexpr uint32 FULL_WARP = 0xffffffffu;

__device__ __forceinline__ int uniform(int x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(FULL_WARP, x);
#else
  return x;
#endif
}

template <int LANES, class T>
__device__ __forceinline__ T lane_sum(T x) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) {
    x += __shfl_xor_sync(FULL_WARP, x, step);
  }
  return x;
}

template <int LANES, class T>
__device__ __forceinline__ T lane_max(T x) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) {
    x = maximum(x, __shfl_xor_sync(FULL_WARP, x, step));
  }
  return x;
}

template <int LANES, class T>
__device__ __forceinline__ T lane_min(T x) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) {
    x = minimum(x, __shfl_xor_sync(FULL_WARP, x, step));
  }
  return x;
}

__device__ __forceinline__ int warp_max(int x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(FULL_WARP, x);
#else
  return lane_max<32>(x);
#endif
}

__device__ __forceinline__ int warp_min(int x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_min_sync(FULL_WARP, x);
#else
  return lane_min<32>(x);
#endif
}

__device__ __forceinline__ int lowest_lane(bool holds) {
  const uint32 lanes = __ballot_sync(FULL_WARP, holds);
  return lanes == 0 ? 32 : __ffs(lanes) - 1;
}
