// Products of one warp on tensor cores: of A and B, ROWS x WIDTH each, S = A B^T [ROWS, ROWS] and
// C = round(S) B [ROWS, WIDTH].

#include "mma.cuh"
#include "types.cuh"

using Element = ELEMENT;
using Weight = Element;  // what S is rounded to

constexpr int ROWS = 32, WIDTH = 80;

struct Params {
  const Element* A;  // [ROWS, WIDTH]
  const Element* B;  // [ROWS, WIDTH]
  float* S;          // [ROWS, ROWS]
  float* C;          // [ROWS, WIDTH]
};

// Where element (r, c) of a thread's part of a product is.
__device__ __forceinline__ int row_of(int r) {
  return 8 * r + threadIdx.x / 4;
}

__device__ __forceinline__ int column_of(int c) {
  return 8 * (c / 2) + 2 * (threadIdx.x % 4) + c % 2;
}

extern "C" __global__ void __launch_bounds__(32) products(const __grid_constant__ Params p) {
  using Matrix = OperandTile<Element, ROWS, WIDTH>;
  const Matrix a_tile(0), b_tile(Matrix::BYTES);
  for (int i = threadIdx.x; i < ROWS * WIDTH; i += 32) {
    a_tile(i / WIDTH, i % WIDTH) = p.A[i];
    b_tile(i / WIDTH, i % WIDTH) = p.B[i];
  }
  __syncthreads();  // both are there

  float s[ROWS / 8][ROWS / 4] = {};
#pragma unroll
  for (int k = 0; k < WIDTH; k += 16) {
#pragma unroll
    for (int c = 0; c < ROWS / 4; c += 4) {
      const Right<Element> b = load_right_transposed(b_tile, 4 * c, k);
#pragma unroll
      for (int r = 0; r < ROWS / 8; r += 2) multiply_add(s[r], s[r + 1], c, load_left(a_tile, 8 * r, k), b);
    }
  }

  float sums[ROWS / 8][WIDTH / 4] = {};
#pragma unroll
  for (int k = 0; k < ROWS / 4; k += 4) {
#pragma unroll
    for (int c = 0; c < WIDTH / 4; c += 4) {
      const Right<Element> b = load_right(b_tile, 4 * k, 4 * c);
#pragma unroll
      for (int r = 0; r < ROWS / 8; r += 2) {
        multiply_add(sums[r], sums[r + 1], c, left_from<Weight>(s[r], s[r + 1], k), b);
      }
    }
  }

#pragma unroll
  for (int r = 0; r < ROWS / 8; ++r) {
#pragma unroll
    for (int c = 0; c < ROWS / 4; ++c) p.S[row_of(r) * ROWS + column_of(c)] = s[r][c];
#pragma unroll
    for (int c = 0; c < WIDTH / 4; ++c) p.C[row_of(r) * WIDTH + column_of(c)] = sums[r][c];
  }
}
