// random.cuh: counter-based random bits (Philox4x32-10; Salmon et al., SC 2011) for dropout.
//
//   philox(key_low, key_high, c0, c1, c2, c3)   one call: four 32-bit words, result[0] .. result[3]
//   dropout_words(seed, ordinal, b, h, q, kv)   the call that serves element (q, kv), and rows q, q + 8
//                                               and columns kv, kv + 1, kv + 8, kv + 9 of a 16 x 16 block
//   dropout_bits(words, q, kv)                  the element's own 16 bits, 0 .. 65535
//   dropout_bits(seed, ordinal, b, h, q, kv)    both at once
//
// An element is dropped if its bits are below rate * 65536. `ordinal` numbers the dropouts of one program.
#pragma once

#include <types.cuh>

struct RandomWords {
  uint32 word[4];
  __device__ __forceinline__ uint32 operator[](int i) const { return word[i]; }
};

__device__ __forceinline__ RandomWords philox(uint32 key_low, uint32 key_high, uint32 c0, uint32 c1,
                                              uint32 c2, uint32 c3) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32 high0 = __umulhi(0xd2511f53u, c0), low0 = 0xd2511f53u * c0;
    const uint32 high1 = __umulhi(0xcd9e8d57u, c2), low1 = 0xcd9e8d57u * c2;
    c0 = high1 ^ c1 ^ key_low;
    c1 = low1;
    c2 = high0 ^ c3 ^ key_high;
    c3 = low0;
    key_low += 0x9e3779b9u;
    key_high += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

__device__ __forceinline__ RandomWords dropout_words(uint64 seed, int32 ordinal, int32 b, int32 h, int32 q,
                                                     int32 kv) {
  return philox(static_cast<uint32>(seed), static_cast<uint32>(seed >> 32) + ordinal, b, h,
                q / 16 * 8 + q % 8, kv / 16 * 4 + kv % 8 / 2);
}

__device__ __forceinline__ uint32 dropout_bits(const RandomWords& words, int32 q, int32 kv) {
  const int32 number = 4 * (q % 16 / 8) + 2 * (kv % 16 / 8) + kv % 2;
  const uint32 low = number & 4 ? words[2] : words[0];
  const uint32 high = number & 4 ? words[3] : words[1];
  return (number & 2 ? high : low) >> (number % 2 * 16) & 0xffffu;
}

__device__ __forceinline__ uint32 dropout_bits(uint64 seed, int32 ordinal, int32 b, int32 h, int32 q,
                                               int32 kv) {
  return dropout_bits(dropout_words(seed, ordinal, b, h, q, kv), q, kv);
}
