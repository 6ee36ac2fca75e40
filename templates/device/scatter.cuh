// scatter.cuh: elements of a tile added to memory, where all of a diagonal have one place.
//
// Additions to one place wait for each other in memory, so what a warp has for one is added up in registers first.
//
//   scatter_diagonals(terms, place)  adds terms[r][c], of a piece as multiply_add has it, for all lanes, which must
//                                    call; place(down, right) points to where the element so many rows and columns
//                                    from the thread's first is added: if it exists, so do those before it on its
//                                    diagonal. A sum of 0 is not added, and nobody asks for its place.
#pragma once

#include <atomic.cuh>
#include <warp.cuh>

// What is added to one place, until there is another.
template <class T>
struct Run {
  T* place = nullptr;
  float sum = 0.0f;

  __device__ __forceinline__ void end() const {
    if (sum != 0.0f) atomic_add(place, sum);
  }

  __device__ __forceinline__ void add(T* to, float x) {
    if (to != place) {
      end();
      *this = {to, 0.0f};
    }
    sum += x;
  }

  // The last runs of all lanes: one addition, if they have one place.
  __device__ __forceinline__ void end_by_warp() const {
    const int first = lowest_lane(sum != 0.0f);
    const uint64 own = reinterpret_cast<uint64>(place), one = __shfl_sync(FULL_WARP, own, first % 32);
    if (__any_sync(FULL_WARP, sum != 0.0f && own != one)) {
      end();
    } else {
      const float all = lane_sum<32>(sum);
      if (threadIdx.x % 32 == first) Run{place, all}.end();
    }
  }
};

template <class T>
Run<T> run_of(T*);

// The sums of two lanes: one keeps those of even numbers, the `other` those of odd ones.
template <int N>
__device__ __forceinline__ void share_sums(const float (&sums)[N], bool odd, int other,
                                           float (&kept)[(N + 1) / 2]) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const float x = sums[i], y = i + 1 < N ? sums[i + 1] : 0.0f;
    kept[i / 2] = (odd ? y : x) + __shfl_sync(FULL_WARP, odd ? x : y, other);
  }
}

// Lane 4 y + x of a warp has elements (y, 2 x) and (y, 2 x + 1) of each 8 x 8 block. Those of the first column lie on
// diagonals, row - column, that are y - 2 x modulo 8, as those of the other column in the next lane down, and as those
// of the three lanes two rows down for each column to the right: these add up what they have, and share the diagonals.
template <int ROWS, int COLUMNS, class Place>
__device__ __forceinline__ void scatter_diagonals(const float (&terms)[ROWS][COLUMNS], const Place& place) {
  constexpr int BLOCKS = COLUMNS / 2, DIAGONALS = ROWS + BLOCKS;  // of a lane, from 8 to 8
  const int y = threadIdx.x % 32 / 4, x = threadIdx.x % 4;
  const auto lane_at = [](int row, int pair) { return row % 8 * 4 + pair; };
  float sums[DIAGONALS] = {};
#pragma unroll
  for (int e = 1; e >= 0; --e) {
    float own[DIAGONALS + 1] = {};  // of blocks that lie on a diagonal
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int c = e; c < COLUMNS; c += 2) own[r - c / 2 + BLOCKS] += terms[r][c];
    }
    const bool above = y < 2 * x + e;  // the diagonal of its block
#pragma unroll
    for (int n = 0; n < DIAGONALS; ++n) {
      const float sum = above ? own[n + 1] : own[n];
      sums[n] = e ? __shfl_sync(FULL_WARP, sum, lane_at(y + 1, x)) : sums[n] + sum;
    }
  }
  float half[(DIAGONALS + 1) / 2], quarter[(DIAGONALS + 3) / 4];
  share_sums(sums, x / 2, lane_at(y + 4, x ^ 2), half);
  share_sums(half, x % 2, lane_at(x % 2 ? y + 6 : y + 2, x ^ 1), quarter);
  decltype(run_of(place(0, 0))) run;
#pragma unroll
  for (int n = 0; n < (DIAGONALS + 3) / 4; ++n) {
    const int diagonal = 8 * (4 * n + x % 2 * 2 + x / 2 - BLOCKS) + (y + 6 * x) % 8;
    if (quarter[n] != 0.0f) {
      run.add(place(maximum(diagonal, 0) - y, maximum(-diagonal, 0) - 2 * x), quarter[n]);
    }
  }
  run.end_by_warp();
}
