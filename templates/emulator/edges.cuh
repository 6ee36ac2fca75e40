// edges.cuh: what an expression means at its edges, the same text as on a GPU.
#pragma once

#include "math.cuh"

inline float __uint_as_float(uint32 bits) {
  return float_of(bits);
}

inline uint32 __float_as_uint(float x) {
  return bits_of(x);
}

#include "../device/edges.cuh"
