// exact.cuh: sums that are the same in whatever order they are added up, the same text as on a GPU.
#pragma once

#include <cmath>

#include "edges.cuh"

using std::scalbn;

inline void atomicAdd(unsigned long long* to, unsigned long long x) {
  __atomic_fetch_add(to, x, __ATOMIC_RELAXED);
}

inline void atomicOr(unsigned long long* to, unsigned long long x) {
  __atomic_fetch_or(to, x, __ATOMIC_RELAXED);
}

#include "../device/exact.cuh"
