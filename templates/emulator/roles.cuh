// roles.cuh: warps of one block that do different things, on a CPU.
// The names are those of device/roles.cuh.
#pragma once

#include "shared.cuh"
#include "warp.cuh"

inline int warpgroup(int line = __builtin_LINE()) {
  return __shfl_sync(FULL_WARP, static_cast<int>(threadIdx.x / 128), 0, 32, line);
}

inline bool elect_one(int line = __builtin_LINE()) {
  fagen_warp_meet("elect_one", FULL_WARP, line, nullptr, fagen_resolve_nothing, false);
  return fagen_self->lane == fagen_elected_lane();
}

template <int N, int COUNT>
inline Vec<int32, N> load_by_warp(const Shared<int32, COUNT>& tile, int i, int line = __builtin_LINE()) {
  Vec<int32, N> all = {};
  if (threadIdx.x % 32 == 0) all = load_vector<N>(tile, i, line);
  for (int j = 0; j < N; ++j) all[j] = __shfl_sync(FULL_WARP, all[j], 0, 32, line);
  return all;
}

template <int N>
inline void shrink_registers(int line = __builtin_LINE()) {
  static_assert(N >= 24 && N <= 256 && N % 8 == 0);
  fagen_warp_meet("shrink_registers", FULL_WARP, line, nullptr, fagen_resolve_nothing, false);
  fagen_set_registers(N, false, line);
}

template <int N>
inline void grow_registers(int line = __builtin_LINE()) {
  static_assert(N >= 24 && N <= 256 && N % 8 == 0);
  fagen_warp_meet("grow_registers", FULL_WARP, line, nullptr, fagen_resolve_nothing, false);
  while (!fagen_set_registers(N, true, line)) fagen_poll("grow_registers", line);
}

inline void group_sync(int barrier, int threads, int line = __builtin_LINE()) {
  fagen_group_barrier(barrier, threads, true, line);
}

inline void group_arrive(int barrier, int threads, int line = __builtin_LINE()) {
  fagen_group_barrier(barrier, threads, false, line);
}
