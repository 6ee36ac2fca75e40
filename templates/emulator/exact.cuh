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
  int64 carry = 0;  // from part to part; the last one has the sign of the sum
  for (int i = 0; i < 64; ++i) carry = (sum.parts[i] + carry) >> 4;
  const int64 sign = carry < 0 ? -1 : 1;
  uint64 digits = 0;   // 16 of the sum without its sign, to base 16; odd where one below them is not 0
  uint64 leading = 0;  // those from the first that is not 0
  int place = 0;
  carry = 0;
  for (int i = 0; i < 79; ++i) {
    carry += i < 64 ? sign * sum.parts[i] : 0;
    digits = static_cast<uint64>(carry & 15) << 60 | digits >> 4 | (digits & 15 ? 1 : 0);
    carry >>= 4;
    if (digits >> 60) leading = digits, place = i;
  }
  return static_cast<float>(sign) * std::scalbn(static_cast<float>(leading), 4 * place - 210);
}
