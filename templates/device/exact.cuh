// exact.cuh: sums of floating-point numbers that are the same in whatever order they are added up.
//
//   exact                             a sum, as whole numbers of 2^(4 i - 150): a number is one of them, of at most
//                                     27 bits, so that 2^36 numbers have room; 0 where all its bytes are
//   atomic_add(pointer, x)            adds a number, exactly
//   to_float(sum)                     the nearest float to the sum; what infinities and NaN make of one
//
// Whole numbers are added up without rounding, and so in any order (Demmel and Nguyen, Parallel reproducible
// summation, 2015, keep such bins of floating-point numbers).
#pragma once

#include <types.cuh>

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
  return static_cast<float>(sign) * scalbn(static_cast<float>(leading), 4 * place - 210);
}
