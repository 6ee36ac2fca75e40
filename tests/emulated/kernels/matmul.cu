// Block-tiled matrix product: c[m, n] = sum_k a[m, k] * b[k, n]
//
//   for each tile of BLOCK_M x BLOCK_N (one block):
//     for each tile of BLOCK_K:  c += a_tile b_tile, each thread ROWS x COLUMNS of it in registers

#include "shared.cuh"
#include "types.cuh"
#include "warp.cuh"

using Element = ELEMENT;

constexpr int BLOCK_M = 32, BLOCK_N = 64, BLOCK_K = 16;
constexpr int ROWS = 4, COLUMNS = 4;
constexpr int THREADS = BLOCK_M / ROWS * (BLOCK_N / COLUMNS);  // 128

constexpr uint32 A_AT = 0;
constexpr uint32 B_AT = A_AT + BLOCK_K * BLOCK_M * 4;

struct Params {
  const Element* a;  // [m, k]
  const Element* b;  // [k, n]
  float* c;          // [m, n]
  int m, n, k;
};

extern "C" __global__ void __launch_bounds__(THREADS) matmul(const __grid_constant__ Params p) {
  const Shared<float, BLOCK_K * BLOCK_M> a_tile(
      A_AT);  // transposed, so that a thread's rows lie side by side
  const Shared<float, BLOCK_K * BLOCK_N> b_tile(B_AT);

  const int m_start = blockIdx.y * BLOCK_M, n_start = blockIdx.x * BLOCK_N;
  const int row = threadIdx.x / (BLOCK_N / COLUMNS) * ROWS,
            column = threadIdx.x % (BLOCK_N / COLUMNS) * COLUMNS;

  float c[ROWS][COLUMNS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int e = 0; e < COLUMNS; ++e) c[r][e] = 0.0f;
  }

  for (int k_start = 0; k_start < p.k; k_start += BLOCK_K) {
    for (int i = threadIdx.x; i < BLOCK_M * BLOCK_K; i += THREADS) {
      const int m = i / BLOCK_K, k = i % BLOCK_K;
      const bool inside = m_start + m < p.m && k_start + k < p.k;
      a_tile[k * BLOCK_M + m] = inside ? to_float(p.a[int64(m_start + m) * p.k + k_start + k]) : 0.0f;
    }
    for (int i = threadIdx.x; i < BLOCK_K * BLOCK_N; i += THREADS) {
      const int k = i / BLOCK_N, n = i % BLOCK_N;
      const bool inside = k_start + k < p.k && n_start + n < p.n;
      b_tile[i] = inside ? to_float(p.b[int64(k_start + k) * p.n + n_start + n]) : 0.0f;
    }
    __syncthreads();  // the tiles are there
    for (int k = 0; k < BLOCK_K; ++k) {
      const Vec<float, ROWS> a = load_vector<ROWS>(a_tile, k * BLOCK_M + row);
      const Vec<float, COLUMNS> b = load_vector<COLUMNS>(b_tile, k * BLOCK_N + column);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int e = 0; e < COLUMNS; ++e) c[r][e] += a[r] * b[e];
      }
    }
    __syncthreads();  // all have read the tiles
  }

#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int e = 0; e < COLUMNS; ++e) {
      const int m = m_start + row + r, n = n_start + column + e;
      if (m < p.m && n < p.n) p.c[int64(m) * p.n + n] = c[r][e];
    }
  }
}
