// add.cuh: what tensor cores have summed, added to global memory.
//
//   add_sixteen<VECTORS>(pointer, sums, i, count)
//       of 16 neighbours a lane of four has numbers 2 lane, + 1 (sums[i], sums[i + 1]) and 8 + 2 lane, + 1; each of the
//       first `count` is added to pointer[number], in no fixed order. With VECTORS the pointer is a multiple of 16
//       bytes and `count` of 4. All lanes of a warp call together.
#pragma once

#include <atomic.cuh>
#include <warp.cuh>

template <bool VECTORS, int N>
__device__ __forceinline__ void add_sixteen(float* to, const float (&sums)[N], int i, int count) {
  const bool odd = threadIdx.x % 2;  // neighbours exchange pairs: each has four numbers side by side
  const float low = __shfl_xor_sync(FULL_WARP, odd ? sums[i] : sums[i + 2], 1);
  const float high = __shfl_xor_sync(FULL_WARP, odd ? sums[i + 1] : sums[i + 3], 1);
  const Vec<float, 4> four = {
      {odd ? low : sums[i], odd ? high : sums[i + 1], odd ? sums[i + 2] : low, odd ? sums[i + 3] : high}};
  const int at = threadIdx.x % 2 * 8 + threadIdx.x % 4 / 2 * 4;
  if (VECTORS) {
    atomic_add_four(at < count, to + at, four);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (at + j < count) atomic_add(to + at + j, four[j]);
    }
  }
}
