// exact.cuh: sums of floating-point numbers that are the same in whatever order they are added up.
//
//   exact                             a sum, as whole numbers of 2^(4 i - 150): a number is one of them, of at most
//                                     27 bits, so that 2^36 numbers have room; 0 where all its bytes are
//   atomic_add(pointer, x)            adds a number, exactly
//   to_float(sum)                     the sum, rounded; what infinities and NaN make of one
//
// Whole numbers are added up without rounding, and so in any order (Demmel and Nguyen, Parallel reproducible
// summation, 2015, keep such bins of floating-point numbers).
#pragma once

#include "types.cuh"

struct exact {
  int64 parts[64];
  uint64 others;  // what is no number: 1 is infinity, 2 is -infinity, 4 is NaN
};

__device__ __forceinline__ void atomic_add(exact* to, float x) {
  const uint32 bits = __float_as_uint(x), exponent = bits >> 23 & 255, fraction = bits & 0x7fffff;
  if (exponent == 255) {
    atomicOr(reinterpret_cast<unsigned long long*>(&to->others), fraction ? 4ull : bits >> 31 ? 2ull : 1ull);
    return;
  }
  const uint32 place = exponent ? exponent : 1;
  const int64 size = static_cast<int64>(exponent ? fraction | 0x800000 : fraction) << place % 4;
  atomicAdd(reinterpret_cast<unsigned long long*>(&to->parts[place / 4]),
            static_cast<unsigned long long>(bits >> 31 ? -size : size));
}

__device__ __forceinline__ float to_float(const exact& sum) {
  if (sum.others) return sum.others == 1 ? INFINITY : sum.others == 2 ? -INFINITY : NAN;
  double total = 0.0;
  for (int i = 0; i < 64; ++i) total += scalbn(static_cast<double>(sum.parts[i]), 4 * i - 150);
  return static_cast<float>(total);
}
