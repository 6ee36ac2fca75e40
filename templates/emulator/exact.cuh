// exact.cuh: sums that are the same in whatever order they are added up, on a CPU.
// The names are those of device/exact.cuh, which says how they lie.
#pragma once

#include <cmath>

#include "types.cuh"

struct exact {
  int64 parts[64];
  uint64 others;
};

inline void atomic_add(exact* to, float x) {
  const uint32 bits = bits_of(x), exponent = bits >> 23 & 255, fraction = bits & 0x7fffff;
  if (exponent == 255) {
    __atomic_fetch_or(&to->others, fraction ? 4u : bits >> 31 ? 2u : 1u, __ATOMIC_RELAXED);
    return;
  }
  const uint32 place = exponent ? exponent : 1;
  const int64 size = static_cast<int64>(exponent ? fraction | 0x800000 : fraction) << place % 4;
  __atomic_fetch_add(&to->parts[place / 4], bits >> 31 ? -size : size, __ATOMIC_RELAXED);
}

inline float to_float(const exact& sum) {
  if (sum.others) return sum.others == 1 ? INFINITY : sum.others == 2 ? -INFINITY : NAN;
  double total = 0.0;
  for (int i = 0; i < 64; ++i) total += std::scalbn(static_cast<double>(sum.parts[i]), 4 * i - 150);
  return static_cast<float>(total);
}
