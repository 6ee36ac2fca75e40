// integers.cuh: maximum, minimum, floor division and modulo; the part of math.cuh that is portable.
#pragma once

#include <types.cuh>

__device__ __forceinline__ int32 maximum(int32 x, int32 y) {
  return x > y ? x : y;
}

__device__ __forceinline__ int32 minimum(int32 x, int32 y) {
  return x < y ? x : y;
}

__device__ __forceinline__ int64 maximum(int64 x, int64 y) {
  return x > y ? x : y;
}

__device__ __forceinline__ int64 minimum(int64 x, int64 y) {
  return x < y ? x : y;
}

__device__ __forceinline__ int32 floor_mod(int32 x, int32 y) {
  if (y == 0 || y == -1) return 0;
  const int32 rest = x % y;
  return rest != 0 && (rest ^ y) < 0 ? rest + y : rest;
}

__device__ __forceinline__ int32 floor_div(int32 x, int32 y) {
  if (y == 0) return 0;
  if (y == -1) return static_cast<int32>(0u - static_cast<uint32>(x));
  const int32 quotient = x / y;
  return x % y != 0 && (x ^ y) < 0 ? quotient - 1 : quotient;
}

__device__ __forceinline__ int64 floor_mod(int64 x, int64 y) {
  if (y == 0 || y == -1) return 0;
  const int64 rest = x % y;
  return rest != 0 && (rest ^ y) < 0 ? rest + y : rest;
}

__device__ __forceinline__ int64 floor_div(int64 x, int64 y) {
  if (y == 0) return 0;
  if (y == -1) return static_cast<int64>(0ull - static_cast<uint64>(x));
  const int64 quotient = x / y;
  return x % y != 0 && (x ^ y) < 0 ? quotient - 1 : quotient;
}

__device__ __forceinline__ float floor_mod(float x, float y) {
  const float rest = fmodf(x, y);
  return rest != 0.0f && (rest < 0.0f) != (y < 0.0f) ? rest + y : rest;
}

__device__ __forceinline__ float floor_div(float x, float y) {
  if (y == 0.0f) return x / y;
  const float rest = fmodf(x, y);
  const float quotient = (x - rest) / y;
  const float lower = rest != 0.0f && (rest < 0.0f) != (y < 0.0f) ? quotient - 1.0f : quotient;
  const float whole = floorf(lower);
  return lower - whole > 0.5f ? whole + 1.0f : whole;
}
