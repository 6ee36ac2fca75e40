// One product of a warpgroup: C[m, n] = sum_k A[m, k] * B[k, n], of tiles that bulk copies bring.

#include "mbarrier.cuh"
#include "panels.cuh"
#include "shared.cuh"
#include "tma.cuh"
#include "types.cuh"
#include "warp.cuh"
#include "wgmma.cuh"

using Element = ELEMENT;

constexpr int N = 64, K = 64, PANEL = 64;
constexpr bool LEFT_TRANSPOSED = false, RIGHT_TRANSPOSED = false, IN_REGISTERS = false;
constexpr int LEFT_ROWS = LEFT_TRANSPOSED ? K : 64, LEFT_COLUMNS = LEFT_TRANSPOSED ? 64 : K;
constexpr int RIGHT_ROWS = RIGHT_TRANSPOSED ? N : K, RIGHT_COLUMNS = RIGHT_TRANSPOSED ? K : N;

using Left_ = Panels<Element, LEFT_ROWS, LEFT_COLUMNS, PANEL>;
using Right_ = Panels<Element, RIGHT_ROWS, RIGHT_COLUMNS, PANEL>;

constexpr uint32 LEFT_AT = 0, RIGHT_AT = (LEFT_AT + Left_::BYTES + 1023) / 1024 * 1024;
constexpr uint32 FILLED_AT = (RIGHT_AT + Right_::BYTES + 1023) / 1024 * 1024;

struct Params {
  TensorMap left, right;
  const Element* A;  // [64, K], where factors come from registers
  float* C;          // [64, N]
};

extern "C" __global__ void __launch_bounds__(128) product(const __grid_constant__ Params p) {
  const Left_ left(LEFT_AT);
  const Right_ right(RIGHT_AT);
  const Barrier filled(FILLED_AT);
  if (threadIdx.x == 0) {
    init(filled, 1);
    publish_barriers();
    arrive_expecting(filled, (IN_REGISTERS ? 0 : Left_::BYTES) + Right_::BYTES);
    if (!IN_REGISTERS) load_tile(left, p.left, filled, 0, 0, 0);
    load_tile(right, p.right, filled, 0, 0, 0);
  }
  __syncthreads();  // the barrier is there
  wait(filled, 0);
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  float sums[2][N / 4];
  Left<Element> factor[K / 16];
  if constexpr (IN_REGISTERS) {
    float values[2][K / 4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < K / 4; ++c) values[r][c] = to_float(p.A[(row + 8 * r) * K + c / 2 * 8 + column + c % 2]);
    }
#pragma unroll
    for (int c = 0; c < K / 4; c += 4) factor[c / 4] = left_from<Element>(values[0], values[1], c);
  }
  // The second product adds the first once more.
  wgmma_fence();
  if constexpr (IN_REGISTERS && RIGHT_TRANSPOSED) {
    multiply(sums, factor, transposed(right));
    multiply_add(sums, factor, transposed(right));
  } else if constexpr (IN_REGISTERS) {
    multiply(sums, factor, right);
    multiply_add(sums, factor, right);
  } else if constexpr (LEFT_TRANSPOSED && RIGHT_TRANSPOSED) {
    multiply(sums, transposed(left), transposed(right));
    multiply_add(sums, transposed(left), transposed(right));
  } else if constexpr (LEFT_TRANSPOSED) {
    multiply(sums, transposed(left), right);
    multiply_add(sums, transposed(left), right);
  } else if constexpr (RIGHT_TRANSPOSED) {
    multiply(sums, left, transposed(right));
    multiply_add(sums, left, transposed(right));
  } else {
    multiply(sums, left, right);
    multiply_add(sums, left, right);
  }
  wgmma_commit();
  wgmma_wait<0>(sums, factor);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int c = 0; c < N / 4; ++c) p.C[(row + 8 * r) * N + c / 2 * 8 + column + c % 2] = sums[r][c];
  }
}
