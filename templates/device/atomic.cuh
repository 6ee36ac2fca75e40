// atomic.cuh: what blocks of one launch share through global memory.
//
//   atomic_add(pointer, x)            sum in fp32 or fp64, in no fixed order
//   atomic_add_four(holds, pointer, x)  the same for four neighbours where `holds`, without a branch; the address is a
//                                     multiple of 16 bytes
//   fetch_next(counter)               adds 1 to an int32 counter and gives its value before
//   fetch_cyclic(counter, period)     the same, but from `period` - 1 it goes back to 0
//   turns_passed(counter)             what the counter has reached; what was written before is seen
//   wait_for_turn(counter, turn)      one thread of a block spins until the counter reaches `turn`, then
//                                     sees all that was written before the turns passed; it may only wait for
//                                     blocks that are sure to run
//   pass_turn(counter)                adds 1 to the counter after all this thread has written or seen
#pragma once

#include "types.cuh"

__device__ __forceinline__ void atomic_add(float* to, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}

__device__ __forceinline__ void atomic_add(double* to, float x) {
  asm volatile("red.global.add.f64 [%0], %1;" ::"l"(to), "d"(static_cast<double>(x)) : "memory");
}

__device__ __forceinline__ void atomic_add_four(bool holds, float* to, const Vec<float, 4>& x) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred holds;\nsetp.ne.s32 holds, %0, 0;\n"
      "@holds red.relaxed.gpu.global.add.v4.f32 [%1], {%2, %3, %4, %5};\n}" ::"r"(int(holds)),
      "l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
      : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile(
        "{\n.reg .pred holds;\nsetp.ne.s32 holds, %0, 0;\n@holds red.global.add.f32 [%1], %2;\n}" ::"r"(
            int(holds)),
        "l"(to + i), "f"(x[i])
        : "memory");
  }
#endif
}

__device__ __forceinline__ int32 fetch_next(int32* counter) {
  return atomicAdd(counter, 1);
}

__device__ __forceinline__ int32 fetch_cyclic(int32* counter, int32 period) {
  return static_cast<int32>(atomicInc(reinterpret_cast<uint32*>(counter), static_cast<uint32>(period - 1)));
}

__device__ __forceinline__ int32 turns_passed(const int32* counter) {
  int32 seen;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  return seen;
}

__device__ __forceinline__ void wait_for_turn(const int32* counter, int32 turn) {
  while (turns_passed(counter) < turn) {
  }
}

__device__ __forceinline__ void pass_turn(int32* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
