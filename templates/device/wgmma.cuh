// wgmma.cuh: products of 16-bit tiles by the four warps of a warpgroup, summed in fp32, that run beside them (sm_90a).
//
//   float sums[2][N / 4]                   a thread's part of 64 x N sums; N is a multiple of 8 up to 256
//   wgmma_fence()                          before the first product after registers of a product were written
//   multiply(sums, left, right)            sums = left * right, issued
//   multiply_add(sums, left, right)        sums += left * right, issued
//   multiply_add<MOST>(sums, left, right)  the same of a left factor in registers, by instructions of at most so many
//                                          columns (128): a larger one needs registers that a launch of four
//                                          warpgroups does not give
//   wgmma_commit()                         closes the group of products issued so far
//   wgmma_wait<GROUPS>(registers...)       waits until at most so many groups are in flight; the arrays named are
//                                          sums and factors of those that have ended, and may now be touched
//   settle(registers...)                   these arrays are written before what stands behind: a product that reads one
//                                          of them finds no other text between it and its fence
//   load_rows(factor, tile)                a left factor in registers from a tile of 64 rows, of which each warp reads
//                                          16. A barrier may hear that the tile is free before it has been read: say
//                                          so when the factor has been used
//   multiply_pairs(x, y)                   products of the elements of two Left<bf16>, each rounded once
//   store_left(tile, row, column, factor)  16 x 16 rounded values of a warp to shared memory from there, as left_from
//                                          makes them: what stores and products read after fence_async() and a barrier
//
// The left factor is 64 rows: a tile of Panels, transposed(tile), or registers Left<T> factor[K / 16] of left_from; the
// right one is a tile or transposed(tile). All 128 threads call together. Between issue and wait nothing may touch
// the sums, nor write to factors in registers or in shared memory.
//
// Of 64 x N sums a thread has rows 16 w + lane / 4 and 8 further down, where w is its warp, and of eight columns
// 2 (lane % 4) and the next.
#pragma once

#include "mma.cuh"
#include "panels.cuh"

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Keeps the compiler from moving what touches these registers to before this place.
template <int N>
__device__ __forceinline__ void pin(float (&sums)[2][N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sums[0][i]), "+f"(sums[1][i])::"memory");
}

template <class T, int N>
__device__ __forceinline__ void pin(Left<T> (&factor)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    asm volatile(""
                 : "+r"(factor[i].word[0]), "+r"(factor[i].word[1]), "+r"(factor[i].word[2]),
                   "+r"(factor[i].word[3])::"memory");
  }
}

template <class... Registers>
__device__ __forceinline__ void settle(Registers&... registers) {
  (pin(registers), ...);
}

template <int GROUPS, class... Registers>
__device__ __forceinline__ void wgmma_wait(Registers&... registers) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
  (pin(registers), ...);
}

template <int N>
struct Wide {};

// One instruction for each number of columns: its text names all registers, of the sums those from FIRST on. The
// operands after the sums stand at the numbers that follow.
#define FAGEN_SUMS(j)                                                                        \
  "+f"(d[0][FIRST + 2 * (j)]), "+f"(d[0][FIRST + 2 * (j) + 1]), "+f"(d[1][FIRST + 2 * (j)]), \
      "+f"(d[1][FIRST + 2 * (j) + 1])
#define FAGEN_NAMES_1 "%0, %1, %2, %3"
#define FAGEN_NAMES_2 FAGEN_NAMES_1 ", %4, %5, %6, %7"
#define FAGEN_NAMES_3 FAGEN_NAMES_2 ", %8, %9, %10, %11"
#define FAGEN_NAMES_4 FAGEN_NAMES_3 ", %12, %13, %14, %15"
#define FAGEN_NAMES_5 FAGEN_NAMES_4 ", %16, %17, %18, %19"
#define FAGEN_NAMES_6 FAGEN_NAMES_5 ", %20, %21, %22, %23"
#define FAGEN_NAMES_7 FAGEN_NAMES_6 ", %24, %25, %26, %27"
#define FAGEN_NAMES_8 FAGEN_NAMES_7 ", %28, %29, %30, %31"
#define FAGEN_NAMES_9 FAGEN_NAMES_8 ", %32, %33, %34, %35"
#define FAGEN_NAMES_10 FAGEN_NAMES_9 ", %36, %37, %38, %39"
#define FAGEN_NAMES_11 FAGEN_NAMES_10 ", %40, %41, %42, %43"
#define FAGEN_NAMES_12 FAGEN_NAMES_11 ", %44, %45, %46, %47"
#define FAGEN_NAMES_13 FAGEN_NAMES_12 ", %48, %49, %50, %51"
#define FAGEN_NAMES_14 FAGEN_NAMES_13 ", %52, %53, %54, %55"
#define FAGEN_NAMES_15 FAGEN_NAMES_14 ", %56, %57, %58, %59"
#define FAGEN_NAMES_16 FAGEN_NAMES_15 ", %60, %61, %62, %63"
#define FAGEN_NAMES_17 FAGEN_NAMES_16 ", %64, %65, %66, %67"
#define FAGEN_NAMES_18 FAGEN_NAMES_17 ", %68, %69, %70, %71"
#define FAGEN_NAMES_19 FAGEN_NAMES_18 ", %72, %73, %74, %75"
#define FAGEN_NAMES_20 FAGEN_NAMES_19 ", %76, %77, %78, %79"
#define FAGEN_NAMES_21 FAGEN_NAMES_20 ", %80, %81, %82, %83"
#define FAGEN_NAMES_22 FAGEN_NAMES_21 ", %84, %85, %86, %87"
#define FAGEN_NAMES_23 FAGEN_NAMES_22 ", %88, %89, %90, %91"
#define FAGEN_NAMES_24 FAGEN_NAMES_23 ", %92, %93, %94, %95"
#define FAGEN_NAMES_25 FAGEN_NAMES_24 ", %96, %97, %98, %99"
#define FAGEN_NAMES_26 FAGEN_NAMES_25 ", %100, %101, %102, %103"
#define FAGEN_NAMES_27 FAGEN_NAMES_26 ", %104, %105, %106, %107"
#define FAGEN_NAMES_28 FAGEN_NAMES_27 ", %108, %109, %110, %111"
#define FAGEN_NAMES_29 FAGEN_NAMES_28 ", %112, %113, %114, %115"
#define FAGEN_NAMES_30 FAGEN_NAMES_29 ", %116, %117, %118, %119"
#define FAGEN_NAMES_31 FAGEN_NAMES_30 ", %120, %121, %122, %123"
#define FAGEN_NAMES_32 FAGEN_NAMES_31 ", %124, %125, %126, %127"
#define FAGEN_SUMS_1 FAGEN_SUMS(0)
#define FAGEN_SUMS_2 FAGEN_SUMS_1, FAGEN_SUMS(1)
#define FAGEN_SUMS_3 FAGEN_SUMS_2, FAGEN_SUMS(2)
#define FAGEN_SUMS_4 FAGEN_SUMS_3, FAGEN_SUMS(3)
#define FAGEN_SUMS_5 FAGEN_SUMS_4, FAGEN_SUMS(4)
#define FAGEN_SUMS_6 FAGEN_SUMS_5, FAGEN_SUMS(5)
#define FAGEN_SUMS_7 FAGEN_SUMS_6, FAGEN_SUMS(6)
#define FAGEN_SUMS_8 FAGEN_SUMS_7, FAGEN_SUMS(7)
#define FAGEN_SUMS_9 FAGEN_SUMS_8, FAGEN_SUMS(8)
#define FAGEN_SUMS_10 FAGEN_SUMS_9, FAGEN_SUMS(9)
#define FAGEN_SUMS_11 FAGEN_SUMS_10, FAGEN_SUMS(10)
#define FAGEN_SUMS_12 FAGEN_SUMS_11, FAGEN_SUMS(11)
#define FAGEN_SUMS_13 FAGEN_SUMS_12, FAGEN_SUMS(12)
#define FAGEN_SUMS_14 FAGEN_SUMS_13, FAGEN_SUMS(13)
#define FAGEN_SUMS_15 FAGEN_SUMS_14, FAGEN_SUMS(14)
#define FAGEN_SUMS_16 FAGEN_SUMS_15, FAGEN_SUMS(15)
#define FAGEN_SUMS_17 FAGEN_SUMS_16, FAGEN_SUMS(16)
#define FAGEN_SUMS_18 FAGEN_SUMS_17, FAGEN_SUMS(17)
#define FAGEN_SUMS_19 FAGEN_SUMS_18, FAGEN_SUMS(18)
#define FAGEN_SUMS_20 FAGEN_SUMS_19, FAGEN_SUMS(19)
#define FAGEN_SUMS_21 FAGEN_SUMS_20, FAGEN_SUMS(20)
#define FAGEN_SUMS_22 FAGEN_SUMS_21, FAGEN_SUMS(21)
#define FAGEN_SUMS_23 FAGEN_SUMS_22, FAGEN_SUMS(22)
#define FAGEN_SUMS_24 FAGEN_SUMS_23, FAGEN_SUMS(23)
#define FAGEN_SUMS_25 FAGEN_SUMS_24, FAGEN_SUMS(24)
#define FAGEN_SUMS_26 FAGEN_SUMS_25, FAGEN_SUMS(25)
#define FAGEN_SUMS_27 FAGEN_SUMS_26, FAGEN_SUMS(26)
#define FAGEN_SUMS_28 FAGEN_SUMS_27, FAGEN_SUMS(27)
#define FAGEN_SUMS_29 FAGEN_SUMS_28, FAGEN_SUMS(28)
#define FAGEN_SUMS_30 FAGEN_SUMS_29, FAGEN_SUMS(29)
#define FAGEN_SUMS_31 FAGEN_SUMS_30, FAGEN_SUMS(30)
#define FAGEN_SUMS_32 FAGEN_SUMS_31, FAGEN_SUMS(31)

#define FAGEN_WGMMA_OF(T, TYPE, G, N, A, B, C, D, E, F, H)                                                  \
  template <bool LEFT_TRANSPOSED, bool RIGHT_TRANSPOSED, int FIRST, int M>                                  \
  __device__ __forceinline__ void wgmma(T, Wide<N>, float (&d)[2][M], uint64 left, uint64 right, int add) { \
    asm volatile("{.reg .pred add; setp.ne.b32 add, %" #C ", 0; wgmma.mma_async.sync.aligned.m64n" #N       \
                 "k16.f32." TYPE "." TYPE " {" FAGEN_NAMES_##G "}, %" #A ", %" #B ", add, 1, 1, %" #D       \
                                                               ", %" #E ";}"                                \
                 : FAGEN_SUMS_##G                                                                           \
                 : "l"(left), "l"(right), "r"(add), "n"(LEFT_TRANSPOSED), "n"(RIGHT_TRANSPOSED));           \
  }                                                                                                         \
  template <bool RIGHT_TRANSPOSED, int FIRST, int M>                                                        \
  __device__ __forceinline__ void wgmma(T, Wide<N>, float (&d)[2][M], const Left<T>& left, uint64 right,    \
                                        int add) {                                                          \
    asm volatile("{.reg .pred add; setp.ne.b32 add, %" #F ", 0; wgmma.mma_async.sync.aligned.m64n" #N       \
                 "k16.f32." TYPE "." TYPE " {" FAGEN_NAMES_##G "}, {%" #A ", %" #B ", %" #C ", %" #D        \
                                                               "}, %" #E ", add, 1, 1, %" #H ";}"           \
                 : FAGEN_SUMS_##G                                                                           \
                 : "r"(left.word[0]), "r"(left.word[1]), "r"(left.word[2]), "r"(left.word[3]), "l"(right),  \
                   "r"(add), "n"(RIGHT_TRANSPOSED));                                                        \
  }
#define FAGEN_WGMMA(G, N, A, B, C, D, E, F, H)           \
  FAGEN_WGMMA_OF(fp16, "f16", G, N, A, B, C, D, E, F, H) \
  FAGEN_WGMMA_OF(bf16, "bf16", G, N, A, B, C, D, E, F, H)
FAGEN_WGMMA(1, 8, 4, 5, 6, 7, 8, 9, 10)
FAGEN_WGMMA(2, 16, 8, 9, 10, 11, 12, 13, 14)
FAGEN_WGMMA(3, 24, 12, 13, 14, 15, 16, 17, 18)
FAGEN_WGMMA(4, 32, 16, 17, 18, 19, 20, 21, 22)
FAGEN_WGMMA(5, 40, 20, 21, 22, 23, 24, 25, 26)
FAGEN_WGMMA(6, 48, 24, 25, 26, 27, 28, 29, 30)
FAGEN_WGMMA(7, 56, 28, 29, 30, 31, 32, 33, 34)
FAGEN_WGMMA(8, 64, 32, 33, 34, 35, 36, 37, 38)
FAGEN_WGMMA(9, 72, 36, 37, 38, 39, 40, 41, 42)
FAGEN_WGMMA(10, 80, 40, 41, 42, 43, 44, 45, 46)
FAGEN_WGMMA(11, 88, 44, 45, 46, 47, 48, 49, 50)
FAGEN_WGMMA(12, 96, 48, 49, 50, 51, 52, 53, 54)
FAGEN_WGMMA(13, 104, 52, 53, 54, 55, 56, 57, 58)
FAGEN_WGMMA(14, 112, 56, 57, 58, 59, 60, 61, 62)
FAGEN_WGMMA(15, 120, 60, 61, 62, 63, 64, 65, 66)
FAGEN_WGMMA(16, 128, 64, 65, 66, 67, 68, 69, 70)
FAGEN_WGMMA(17, 136, 68, 69, 70, 71, 72, 73, 74)
FAGEN_WGMMA(18, 144, 72, 73, 74, 75, 76, 77, 78)
FAGEN_WGMMA(19, 152, 76, 77, 78, 79, 80, 81, 82)
FAGEN_WGMMA(20, 160, 80, 81, 82, 83, 84, 85, 86)
FAGEN_WGMMA(21, 168, 84, 85, 86, 87, 88, 89, 90)
FAGEN_WGMMA(22, 176, 88, 89, 90, 91, 92, 93, 94)
FAGEN_WGMMA(23, 184, 92, 93, 94, 95, 96, 97, 98)
FAGEN_WGMMA(24, 192, 96, 97, 98, 99, 100, 101, 102)
FAGEN_WGMMA(25, 200, 100, 101, 102, 103, 104, 105, 106)
FAGEN_WGMMA(26, 208, 104, 105, 106, 107, 108, 109, 110)
FAGEN_WGMMA(27, 216, 108, 109, 110, 111, 112, 113, 114)
FAGEN_WGMMA(28, 224, 112, 113, 114, 115, 116, 117, 118)
FAGEN_WGMMA(29, 232, 116, 117, 118, 119, 120, 121, 122)
FAGEN_WGMMA(30, 240, 120, 121, 122, 123, 124, 125, 126)
FAGEN_WGMMA(31, 248, 124, 125, 126, 127, 128, 129, 130)
FAGEN_WGMMA(32, 256, 128, 129, 130, 131, 132, 133, 134)

// One step sums over 16 positions.
template <bool ADD, class A, class B, int N>
__device__ __forceinline__ void multiply_steps(float (&sums)[2][N], const A& left, const B& right) {
  static_assert(A::LENGTH == 64 && B::LENGTH == 4 * N && A::STEPS == B::STEPS);
#pragma unroll
  for (int k = 0; k < A::STEPS; ++k) {
    wgmma<A::ACROSS, B::ACROSS, 0>(typename A::Element(), Wide<4 * N>(), sums, left.step(k), right.step(k),
                                   ADD || k > 0);
  }
}

template <int MOST, int FIRST, class T, class B, int N>
__device__ __forceinline__ void multiply_step(float (&sums)[2][N], const Left<T>& left, const B& right, int k,
                                              bool add) {
  constexpr int WIDTH = 4 * N - FIRST < MOST ? 4 * N - FIRST : MOST;
  wgmma<B::ACROSS, FIRST / 4>(T(), Wide<WIDTH>(), sums, left, right.step(k) + B::from(FIRST), add);
  if constexpr (FIRST + WIDTH < 4 * N) multiply_step<MOST, FIRST + WIDTH>(sums, left, right, k, add);
}

template <bool ADD, int MOST = 256, class T, int STEPS, class B, int N>
__device__ __forceinline__ void multiply_steps(float (&sums)[2][N], const Left<T> (&left)[STEPS],
                                               const B& right) {
  static_assert(B::LENGTH == 4 * N && B::STEPS == STEPS);
#pragma unroll
  for (int k = 0; k < STEPS; ++k) multiply_step<MOST, 0>(sums, left[k], right, k, ADD || k > 0);
}

template <class T, int STEPS>
__device__ __forceinline__ const Left<T> (&left_operand(const Left<T> (&factor)[STEPS]))
    [STEPS] { return factor; }

template <class L, class R, int N>
__device__ __forceinline__ void multiply(float (&sums)[2][N], const L& left, const R& right) {
  multiply_steps<false>(sums, left_operand(left), right_operand(right));
}

template <class L, class R, int N>
__device__ __forceinline__ void multiply_add(float (&sums)[2][N], const L& left, const R& right) {
  multiply_steps<true>(sums, left_operand(left), right_operand(right));
}

template <int MOST, class T, int STEPS, class R, int N>
__device__ __forceinline__ void multiply_add(float (&sums)[2][N], const Left<T> (&left)[STEPS],
                                             const R& right) {
  multiply_steps<true, MOST>(sums, left, right_operand(right));
}

template <class T, int STEPS, class Tile>
__device__ __forceinline__ void load_rows(Left<T> (&factor)[STEPS], const Tile& tile) {
  static_assert(STEPS == Tile::STEPS && Tile::ROWS == 64);
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int k = 0; k < STEPS; ++k) {
    const uint32 from = window_address(tile.chunk_at(row, 16 * k + lane / 16 * 8));
    uint32(&word)[4] = factor[k].word;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(from)
                 : "memory");
  }
}

__device__ __forceinline__ Left<bf16> multiply_pairs(const Left<bf16>& x, const Left<bf16>& y) {
  Left<bf16> products;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(products.word[i]) : "r"(x.word[i]), "r"(y.word[i]));
  }
  return products;
}

template <class T, class Tile>
__device__ __forceinline__ void store_left(const Tile& tile, int row, int column, const Left<T>& factor) {
  const int lane = threadIdx.x % 32;
  const uint32 to = window_address(tile.chunk_at(row + lane % 16, column + lane / 16 * 8));
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(factor.word[0]), "r"(factor.word[1]), "r"(factor.word[2]), "r"(factor.word[3])
               : "memory");
}
