// async.cuh: copies from global to shared memory that run beside the thread.
//
//   copy_async<N>(tile, i, pointer)
//       elements i .. i + N - 1 of a view from N of global memory: 4, 8 or 16 bytes, aligned to that; neither
//       side may be touched before the wait. With a further argument `count` (0 .. N) only so many are read,
//       and the others become 0.
//   copy_async_commit()         closes the group of this thread's copies issued so far
//   copy_async_wait<GROUPS>()   waits until at most so many of this thread's groups are in flight; other
//                               threads see the copies after a barrier that follows
//
// Before sm_80 the copy is done at once.
#pragma once

#include "shared.cuh"

template <int N, class T, int COUNT>
__device__ __forceinline__ void copy_async(const Shared<T, COUNT>& tile, int i, const T* from,
                                           int count = N) {
  constexpr int BYTES = N * sizeof(T);
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "an asynchronous copy moves 4, 8 or 16 bytes");
#if __CUDA_ARCH__ >= 800
  const uint32 to = window_address(tile, i);
  const int bytes = count * sizeof(T);
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES), "r"(bytes)
                 : "memory");
  }
#else
  Vec<T, N> values = {};
  if (count == N) values = load_vector<N>(from);
  for (int j = 0; j < count && count < N; ++j) values[j] = from[j];
  store_vector(tile, i, values);
#endif
}

__device__ __forceinline__ void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int GROUPS>
__device__ __forceinline__ void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
#endif
}
