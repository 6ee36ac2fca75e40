// math.cuh: scalar functions of float and of integers, on a CPU.
// The names are those of device/math.cuh.
#pragma once

#include "types.cuh"

// The C library's own, declared here because its headers take longer to compile than a kernel.
extern "C" {
float expf(float) noexcept;
float exp2f(float) noexcept;
float logf(float) noexcept;
float log2f(float) noexcept;
float tanhf(float) noexcept;
float erff(float) noexcept;
float sqrtf(float) noexcept;
float sinf(float) noexcept;
float cosf(float) noexcept;
float fabsf(float) noexcept;
float floorf(float) noexcept;
float fminf(float, float) noexcept;
float fmaxf(float, float) noexcept;
float fmodf(float, float) noexcept;
float fmaf(float, float, float) noexcept;
}

inline float rsqrtf(float x) {
  return 1.0f / sqrtf(x);
}

inline float exp2_approx(float x) {
  const float power = exp2f(x);
  return power < 0x1p-126f ? 0.0f : power;
}

inline float tanh_approx(float x) {
  return tanhf(x);
}

inline float divide(float x, float y) {
  return x / y;
}

inline float sin_approx(float x) {
  return sinf(x);
}

inline float cos_approx(float x) {
  return cosf(x);
}

inline float maximum(float x, float y) {
  return x > y || x != x ? x : y;
}

inline float minimum(float x, float y) {
  return x < y || x != x ? x : y;
}

#include "../device/integers.cuh"
