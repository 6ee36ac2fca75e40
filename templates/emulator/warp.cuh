// warp.cuh: what the threads of a warp and of a block do together, on a CPU.
// The names are those of device/warp.cuh.
#pragma once

#include "math.cuh"

constexpr uint32 FULL_WARP = 0xffffffffu;

inline void __syncthreads(int line = __builtin_LINE()) {
  fagen_block_barrier(line);
}

inline void fagen_resolve_nothing(void* const*, unsigned) {}

inline void __syncwarp(uint32 mask = FULL_WARP, int line = __builtin_LINE()) {
  fagen_warp_meet("__syncwarp", mask, line, nullptr, fagen_resolve_nothing, true);
}

// One lane's part of a shuffle: what it brings, from whom it wants, what it gets.
template <class T>
struct FagenShuffle {
  T value;
  int source, line;
  T result;
};

template <class T>
inline void fagen_resolve_shuffle(void* const* arguments, unsigned mask) {
  for (int lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    auto* mine = static_cast<FagenShuffle<T>*>(arguments[lane]);
    if (!(mask >> mine->source & 1)) {
      fagen_finding(mine->line, "lane %d shuffles from lane %d, which is not in the mask %08x", lane,
                    mine->source, mask);
    }
    mine->result = static_cast<FagenShuffle<T>*>(arguments[mine->source])->value;
  }
}

template <class T>
inline T fagen_shuffle(const char* what, uint32 mask, T value, int source, int line) {
  FagenShuffle<T> part{value, source, line, value};
  fagen_warp_meet(what, mask, line, &part, fagen_resolve_shuffle<T>, false);
  return part.result;
}

template <class T>
inline T __shfl_sync(uint32 mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
  const int lane = fagen_self->lane;
  return fagen_shuffle("__shfl_sync", mask, value, (lane & -width) | (source & (width - 1)), line);
}

template <class T>
inline T __shfl_xor_sync(uint32 mask, T value, int flip, int width = 32, int line = __builtin_LINE()) {
  const int lane = fagen_self->lane, source = lane ^ flip;
  return fagen_shuffle("__shfl_xor_sync", mask, value, source > (lane | (width - 1)) ? lane : source, line);
}

template <class T>
inline T __shfl_down_sync(uint32 mask, T value, uint32 delta, int width = 32, int line = __builtin_LINE()) {
  const int lane = fagen_self->lane, source = lane + delta;
  return fagen_shuffle("__shfl_down_sync", mask, value, source > (lane | (width - 1)) ? lane : source, line);
}

struct FagenVote {
  bool value;
  uint32 result;
};

inline void fagen_resolve_ballot(void* const* arguments, unsigned mask) {
  uint32 votes = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1 && static_cast<FagenVote*>(arguments[lane])->value) votes |= 1u << lane;
  }
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) static_cast<FagenVote*>(arguments[lane])->result = votes;
  }
}

inline uint32 __ballot_sync(uint32 mask, bool value, int line = __builtin_LINE()) {
  FagenVote part{value, 0};
  fagen_warp_meet("__ballot_sync", mask, line, &part, fagen_resolve_ballot, false);
  return part.result;
}

inline int __popc(uint32 bits) {
  return __builtin_popcount(bits);
}

inline bool __any_sync(uint32 mask, bool value, int line = __builtin_LINE()) {
  return __ballot_sync(mask, value, line) != 0;
}

inline int uniform(int x) {
  return x;
}

template <int LANES, class T>
inline T lane_sum(T x, int line = __builtin_LINE()) {
  for (int step = LANES / 2; step > 0; step /= 2) {
    x += __shfl_xor_sync(FULL_WARP, x, step, 32, line);
  }
  return x;
}

template <int LANES, class T>
inline T lane_max(T x, int line = __builtin_LINE()) {
  for (int step = LANES / 2; step > 0; step /= 2) {
    x = maximum(x, __shfl_xor_sync(FULL_WARP, x, step, 32, line));
  }
  return x;
}

template <int LANES, class T>
inline T lane_min(T x, int line = __builtin_LINE()) {
  for (int step = LANES / 2; step > 0; step /= 2) {
    x = minimum(x, __shfl_xor_sync(FULL_WARP, x, step, 32, line));
  }
  return x;
}

inline int warp_max(int x, int line = __builtin_LINE()) {
  return lane_max<32>(x, line);
}

inline int warp_min(int x, int line = __builtin_LINE()) {
  return lane_min<32>(x, line);
}

inline int lowest_lane(bool holds, int line = __builtin_LINE()) {
  const uint32 lanes = __ballot_sync(FULL_WARP, holds, line);
  return lanes == 0 ? 32 : __builtin_ctz(lanes);
}
