// atomic.cuh: what blocks of one launch share through global memory, on a CPU.
// The names are those of device/atomic.cuh.
#pragma once

#include "types.cuh"

inline void atomic_add(float* to, float x) {
  auto* word = reinterpret_cast<uint32*>(to);
  uint32 seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(word, &seen, bits_of(float_of(seen) + x), true, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
}

inline void atomic_add(double* to, float x) {
  double seen, sum;
  __atomic_load(to, &seen, __ATOMIC_RELAXED);
  do {
    sum = seen + x;
  } while (!__atomic_compare_exchange(to, &seen, &sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

inline void atomic_add_four(bool holds, float* to, const Vec<float, 4>& x) {
  for (int i = 0; holds && i < 4; ++i) atomic_add(to + i, x[i]);
}

inline int32 fetch_next(int32* counter) {
  return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
}

inline int32 fetch_cyclic(int32* counter, int32 period) {
  int32 seen = __atomic_load_n(counter, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(counter, &seen, seen >= period - 1 ? 0 : seen + 1, true,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return seen;
}

inline int32 turns_passed(const int32* counter) {
  return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
}

inline void wait_for_turn(const int32* counter, int32 turn, int line = __builtin_LINE()) {
  while (__atomic_load_n(counter, __ATOMIC_ACQUIRE) < turn) {
    fagen_poll("wait_for_turn", line);
  }
  fagen_polled();
}

inline void pass_turn(int32* counter) {
  __atomic_fetch_add(counter, 1, __ATOMIC_RELEASE);
}
