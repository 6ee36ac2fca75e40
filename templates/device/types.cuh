// types.cuh: storage types, their exact conversions, and vector access to global memory.
//
//   int32 int64 uint8 uint32 uint64   fixed-width integers
//   fp16 bf16 fp32 fp64            storage types; arithmetic is done in float
//   to_float(x)                    exact from fp16, bf16, fp32; rounded from fp64
//   from_float<T>(x)               round to nearest even; a NaN becomes 0x7fff
//   Known<VALUE>                   a truth value known when the kernel is compiled, as an argument: known.value
//   Vec<T, N>                      N elements in at most 16 bytes, aligned to its size; v[i]
//   load_vector<N>(pointer)        one access; the address must be a multiple of N * sizeof(T)
//   store_vector(pointer, v)       the same
//   store_words(pointer, word, there)   16 bytes, as four words, one access, if `there`
#pragma once

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

__device__ __forceinline__ float to_float(fp32 x) {
  return x;
}

__device__ __forceinline__ float to_float(fp64 x) {
  return static_cast<float>(x);
}

__device__ __forceinline__ float to_float(fp16 x) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
  return result;
}

__device__ __forceinline__ float to_float(bf16 x) {
  return __uint_as_float(static_cast<uint32>(x.bits) << 16);
}

template <class T>
__device__ __forceinline__ T from_float(float x);

template <>
__device__ __forceinline__ fp32 from_float<fp32>(float x) {
  return x;
}

template <>
__device__ __forceinline__ fp16 from_float<fp16>(float x) {
  fp16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
  return result;
}

template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  bf16 result;
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
#else
  const uint32 bits = __float_as_uint(x);
  const uint32 rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  result.bits = x != x ? 0x7fff : static_cast<unsigned short>(rounded >> 16);
#endif
  return result;
}

template <bool VALUE>
struct Known {
  static constexpr bool value = VALUE;
};

template <class T, int N>
struct alignas(N * sizeof(T)) Vec {
  static_assert(N * sizeof(T) <= 16, "a vector is at most one 16-byte access");
  T element[N];
  __device__ __forceinline__ T& operator[](int i) { return element[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return element[i]; }
};

// The machine word moved by one access of so many bytes.
template <int BYTES>
struct AccessWord;
template <>
struct AccessWord<1> {
  using type = unsigned char;
};
template <>
struct AccessWord<2> {
  using type = unsigned short;
};
template <>
struct AccessWord<4> {
  using type = unsigned int;
};
template <>
struct AccessWord<8> {
  using type = uint2;
};
template <>
struct AccessWord<16> {
  using type = uint4;
};

template <int N, class T>
__device__ __forceinline__ Vec<T, N> load_vector(const T* from) {
  using Word = typename AccessWord<N * sizeof(T)>::type;
  const Word word = *reinterpret_cast<const Word*>(from);
  Vec<T, N> result;
  memcpy(&result, &word, sizeof(word));
  return result;
}

template <class T, int N>
__device__ __forceinline__ void store_vector(T* to, const Vec<T, N>& value) {
  using Word = typename AccessWord<N * sizeof(T)>::type;
  Word word;
  memcpy(&word, &value, sizeof(word));
  *reinterpret_cast<Word*>(to) = word;
}

// An instruction with a condition: what stands around it is scheduled as one, and addresses differ by constants.
template <class T>
__device__ __forceinline__ void store_words(T* to, const uint32 (&word)[4], bool there) {
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.b32 there, %5, 0;\n"
      "@there st.global.v4.b32 [%0], {%1, %2, %3, %4};\n"
      "}" ::"l"(to),
      "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]), "r"(static_cast<int>(there))
      : "memory");
}
