// edges.cuh: what an expression means at its edges.
//
//   quotient(x, y)        x / y, and 0 where y is 0: a row in which nothing was summed
//   finite_or_zero(x)     x, and 0 where it is -inf: the maximum of such a row
//   Exponential power(c, top)
//                         power(x) = exp(c x - c top) for c > 0 and x <= top, in one multiply-add and one power of two;
//                         also where the product with log2(e) would be out of range or too coarse
//   exponential<ANY>(c, top)
//                         the same for any top, where -inf is taken as 0, or else for a usual one, above which x
//                         may then lie; NaN for another
//   absolute(x)           of an int32 or int64
//   clamp_index(i, size)  the position in a table of `size` elements nearest to i
//   between(i, low, high) the position from low to high nearest to i
//   element_at(table, i, stride)
//                         table[i * stride] for i >= 0, whose address takes two instructions
//   skipped()             stands in a tile of weights for a term that is no part of the sum: a NaN of its own,
//   is_skipped(w)         which arithmetic does not make
#pragma once

#include <math.cuh>

__device__ __forceinline__ float quotient(float x, float y) {
  return y == 0.0f ? 0.0f : x / y;
}

__device__ __forceinline__ float finite_or_zero(float x) {
  return x == -INFINITY ? 0.0f : x;
}

struct Exponential {
  float factor, shift;

  Exponential() = default;

  // c top log2(e) is rounded, which all x of a row share. From 2^27 on that would be a factor out of range;
  // but there neighbouring numbers are so far apart that the result is 1 or 0, and any factor shows which: a
  // power of two exactly.
  __device__ __forceinline__ Exponential(float c, float top) {
    const float usual = c * 1.44269504f;
    factor = fabsf(top * usual) < 0x1p27f ? usual : __uint_as_float(__float_as_uint(c) & 0xff800000u);
    shift = top * factor;
  }

  __device__ __forceinline__ float operator()(float x) const { return exp2_approx(fmaf(x, factor, -shift)); }
};

template <bool ANY>
__device__ __forceinline__ Exponential exponential(float c, float top) {
  if constexpr (ANY) return Exponential(c, finite_or_zero(top));
  Exponential power;
  power.factor = c * 1.44269504f;
  power.shift = fabsf(top * power.factor) < 0x1p27f ? top * power.factor : NAN;
  return power;
}

template <class Integer>
__device__ __forceinline__ Integer absolute(Integer x) {
  return x < 0 ? -x : x;
}

template <class Index>
__device__ __forceinline__ int32 clamp_index(Index i, int32 size) {
  return static_cast<int32>(maximum(minimum(i, static_cast<Index>(size - 1)), static_cast<Index>(0)));
}

__device__ __forceinline__ int32 between(int32 i, int32 low, int32 high) {
  return maximum(minimum(i, high), low);
}

template <class T>
__device__ __forceinline__ T& element_at(T* table, int32 i, int64 stride) {
  // Modulo 2^64, since a stride may be negative; opaque, or it would become a shift of each product.
  uint64 bytes = static_cast<uint64>(stride) * sizeof(T);
  asm("" : "+l"(bytes));
  const uint64 offset = static_cast<uint32>(i) * bytes;
  return const_cast<T&>(*reinterpret_cast<const T*>(reinterpret_cast<const char*>(table) + offset));
}

__device__ __forceinline__ float skipped() {
  return __uint_as_float(0xffdecadeu);
}

__device__ __forceinline__ float unless_zero(float x) {
  return x == 0.0f ? skipped() : x;
}

__device__ __forceinline__ bool is_skipped(float weight) {
  return __float_as_uint(weight) == 0xffdecadeu;
}
