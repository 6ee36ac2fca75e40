// random.cuh: counter-based random bits (Philox4x32-10; Salmon et al., SC 2011) for dropout.
//
//   philox(key_low, key_high, c0, c1, c2, c3)   one call: four 32-bit words, result[0] .. result[3]
//   dropout_words(seed, ordinal, b, h, q, kv)   the call that serves element (q, kv), and rows q, q + 8
//                                               and columns kv, kv + 1, kv + 8, kv + 9 of a 16 x 16 block
//   dropout_bits(words, q, kv)                  the element's own 16 bits, 0 .. 65535
//   dropout_bits(seed, ordinal, b, h, q, kv)    both at once
//   RandomTests<ROWS, COLUMNS> tests;           a bit for each element of a thread on tensor cores: tests(r, c)
//   tests.draw<LEAST>(seed, ordinal, b, h, q, kv)
//       says of each whether its bits are at least LEAST, 1 .. 65535; row r lies at q + 8 r, of the first eight of 16,
//       column c at kv + c / 2 * 8 + c % 2, of the first eight of 16 and even
//   tests.draw_across<LEAST>(seed, ordinal, b, h, q, kv)
//       the same where row r lies at kv + 8 r and column c at q + c / 2 * 8 + c % 2; all lanes of a warp call together
//
// An element is dropped if its bits are below rate * 65536. `ordinal` numbers the dropouts of one program.
#pragma once

#include <warp.cuh>

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
  const uint32 row = q, column = kv;
  return philox(static_cast<uint32>(seed), static_cast<uint32>(seed >> 32) + ordinal, b, h,
                row / 16 * 8 + row % 8, column / 16 * 4 + column % 8 / 2);
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

// Whether the halves of a word are at least LEAST: bits 15 and 31. Their lower 15 bits are compared by one difference,
// in which neither half borrows from the other.
template <uint32 LEAST>
__device__ __forceinline__ uint32 halves_from(uint32 word) {
  const uint32 lower = (word | 0x80008000u) - LEAST % 0x8000u * 0x10001u;
  return (LEAST < 0x8000u ? word | lower : word & lower) & 0x80008000u;
}

// Word 2 i + j of a call has rows q + 8 i and columns kv + 8 j, kv + 8 j + 1: a thread's two rows of 16 columns are a
// call's eight elements. Of each 16 columns, bit c % 2 * 16 + c / 4 * 4 + r * 2 + c / 2 % 2 is that of element (r, c).
template <int ROWS, int COLUMNS>
struct RandomTests {
  uint32 word[ROWS / 2][(COLUMNS + 15) / 16];

  __device__ __forceinline__ bool operator()(int r, int c) const {
    return word[r / 2][c / 16] >> (c % 2 * 16 + c % 16 / 4 * 4 + r % 2 * 2 + c / 2 % 2) & 1;
  }

  template <uint32 LEAST>
  __device__ __forceinline__ void draw(uint64 seed, int32 ordinal, int32 b, int32 h, int32 q, int32 kv) {
    each<LEAST>([&](int r, int c) { return dropout_words(seed, ordinal, b, h, q + 8 * r, kv + 4 * c); });
  }

  // Lanes of rows kv and kv + 1 are four apart and need the same calls, for two columns of each eight: either makes
  // those for one, and tells the other of its row.
  template <uint32 LEAST>
  __device__ __forceinline__ void draw_across(uint64 seed, int32 ordinal, int32 b, int32 h, int32 q,
                                              int32 kv) {
    const bool odd = kv % 2;
    each<LEAST>([&](int r, int c) {
      const RandomWords words = dropout_words(seed, ordinal, b, h, q + 4 * c + odd, kv + 8 * r);
      return RandomWords{{words[0], words[2], words[1], words[3]}};
    });
#pragma unroll
    for (auto& row : word) {
#pragma unroll
      for (uint32& own : row) {
        const uint32 other = __shfl_xor_sync(FULL_WARP, own, 4);
        own = odd ? (own & 0xffff0000u) | other >> 16 : (own & 0xffffu) | other << 16;
      }
    }
  }

  // `words(r, c)` are those of rows r, r + 1 and columns c .. c + 3.
  template <uint32 LEAST, class Words>
  __device__ __forceinline__ void each(Words words) {
#pragma unroll
    for (int r = 0; r < ROWS; r += 2) {
#pragma unroll
      for (int first = 0; first < COLUMNS; first += 16) {
        const int count = COLUMNS - first < 16 ? COLUMNS - first : 16;
        uint32 bits = 0;
#pragma unroll
        for (int c = first; c < first + count; c += 4) {
          const RandomWords drawn = words(r, c);
#pragma unroll
          for (int i = 0; i < 4; ++i) bits = bits >> 1 | halves_from<LEAST>(drawn[i]);
        }
        word[r / 2][first / 16] = bits >> (16 - count);
      }
    }
  }
};
