// random.cuh: counter-based random bits, the same text as on a GPU.
#pragma once

#include "types.cuh"

inline uint32 __umulhi(uint32 x, uint32 y) {
  return static_cast<uint32>(static_cast<uint64>(x) * y >> 32);
}

#include "../device/random.cuh"
