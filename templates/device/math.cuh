// math.cuh: scalar functions of float and of integers.
//
//   expf exp2f logf log2f tanhf erff sqrtf rsqrtf sinf cosf fabsf floorf fminf fmaxf fmaf INFINITY as in CUDA
//   exp2_approx(x) tanh_approx(x)   the hardware's own: to 2 ulp, subnormals as 0; to 2^-11 of the result
//   sin_approx(x) cos_approx(x)     to 2^-16 where x is at most 10^6: further out floats are too far apart for it
//   divide(x, y)                    x / y to 1 ulp, nearly always the nearest; to 2 ulp where x or y is subnormal;
//                                   -0 divided by a number may be 0
//   maximum(x, y) minimum(x, y)     float (a NaN wins), int32, int64
//   floor_div(x, y) floor_mod(x, y) Python's // and % for int32, int64 and float; integers by 0 give 0
#pragma once

#include "integers.cuh"

__device__ __forceinline__ float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float tanh_approx(float x) {
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float divide(float x, float y) {
  float near, inverse;
  asm("div.full.f32 %0, %1, %2;" : "=f"(near) : "f"(x), "f"(y));
  asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(y));
  const float nearest = fmaf(fmaf(-near, y, x), inverse, near);
  return fabsf(nearest) < INFINITY ? nearest : near;
}

// x without its whole turns, of 2 pi in two parts.
__device__ __forceinline__ float within_a_turn(float x) {
  const float turns = rintf(x * 0.159154943f);
  return fmaf(turns, 1.74845553e-7f, fmaf(turns, -6.28318548f, x));
}

__device__ __forceinline__ float sin_approx(float x) {
  float result;
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(within_a_turn(x)));
  return result;
}

__device__ __forceinline__ float cos_approx(float x) {
  float result;
  asm("cos.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(within_a_turn(x)));
  return result;
}

__device__ __forceinline__ float maximum(float x, float y) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
#else
  return x > y || x != x ? x : y;
#endif
}

__device__ __forceinline__ float minimum(float x, float y) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
#else
  return x < y || x != x ? x : y;
#endif
}
