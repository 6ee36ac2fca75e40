// types.cuh: storage types, their exact conversions, and vector access to global memory, on a CPU.
// The names are those of device/types.cuh.
#pragma once

#include "core.h"

using int32 = int;
using int64 = long long;
using uint8 = unsigned char;
using uint32 = unsigned int;
using uint64 = unsigned long long;

struct fp16 {
  unsigned short bits;
};

struct bf16 {
  unsigned short bits;
};

using fp32 = float;
using fp64 = double;

inline uint32 bits_of(float x) {
  uint32 bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float float_of(uint32 bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}

inline float to_float(fp32 x) {
  return x;
}

inline float to_float(fp64 x) {
  return static_cast<float>(x);
}

inline float to_float(fp16 x) {
  const uint32 sign = (x.bits & 0x8000u) << 16;
  const uint32 rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return float_of(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  return float_of(sign | bits_of(float_of(rest << 13) * 0x1p112f));
}

inline float to_float(bf16 x) {
  return float_of(static_cast<uint32>(x.bits) << 16);
}

template <class T>
inline T from_float(float x);

template <>
inline fp32 from_float<fp32>(float x) {
  return x;
}

template <>
inline fp16 from_float<fp16>(float x) {
  const uint32 sign = bits_of(x) >> 16 & 0x8000u;
  const uint32 size = bits_of(x) & 0x7fffffffu;
  uint32 rounded;
  if (size > 0x7f800000u) return {0x7fff};
  if (size >= 0x477ff000u) {  // 65,520: halfway from the largest number to infinity
    rounded = 0x7c00u;
  } else if (size < 0x38800000u) {  // subnormal: 0.5f has the same last place, so the sum rounds as it should
    rounded = bits_of(float_of(size) + 0.5f) - 0x3f000000u;
  } else {
    rounded = (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13;
  }
  return {static_cast<unsigned short>(sign | rounded)};
}

template <>
inline bf16 from_float<bf16>(float x) {
  const uint32 bits = bits_of(x);
  if (x != x) return {0x7fff};
  return {static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

template <bool VALUE>
struct Known {
  static constexpr bool value = VALUE;
};

template <class T, int N>
struct alignas(N * sizeof(T)) Vec {
  static_assert(N * sizeof(T) <= 16, "a vector is at most one 16-byte access");
  T element[N];
  T& operator[](int i) { return element[i]; }
  const T& operator[](int i) const { return element[i]; }
};

inline void fagen_check_alignment(const void* address, unsigned bytes, int line) {
  if (reinterpret_cast<unsigned long>(address) % bytes != 0) {
    fagen_finding(line, "a vector access of %u bytes is misaligned by %u", bytes,
                  static_cast<unsigned>(reinterpret_cast<unsigned long>(address) % bytes));
  }
}

template <int N, class T>
inline Vec<T, N> load_vector(const T* from, int line = __builtin_LINE()) {
  fagen_check_alignment(from, N * sizeof(T), line);
  return *reinterpret_cast<const Vec<T, N>*>(from);
}

template <class T, int N>
inline void store_vector(T* to, const Vec<T, N>& value, int line = __builtin_LINE()) {
  fagen_check_alignment(to, N * sizeof(T), line);
  *reinterpret_cast<Vec<T, N>*>(to) = value;
}

template <class T>
inline void store_words(T* to, const uint32 (&word)[4], bool there, int line = __builtin_LINE()) {
  if (!there) return;
  Vec<T, 16 / sizeof(T)> values;
  __builtin_memcpy(&values, word, sizeof(values));
  store_vector(to, values, line);
}
