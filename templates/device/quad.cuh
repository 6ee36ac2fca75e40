// quad.cuh: four neighbouring lanes, the first a multiple of four.
//
//   exchange_quad(word)     of a matrix of four by four words, of which each lane has a row, it then has a column:
//                           word i of lane t goes to word t of lane i
#pragma once

#include <warp.cuh>

__device__ __forceinline__ void exchange_quad(uint32 (&word)[4]) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32 other = __shfl_xor_sync(FULL_WARP, upper ? word[i] : word[i + step], step);
      (upper ? word[i] : word[i + step]) = other;
    }
  }
}
