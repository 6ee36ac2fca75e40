// Rung 3 of 5. Block-tiled products.
// Changed: A thread computes a small tile of results from values it holds in registers: the same arithmetic
// for fewer reads of shared memory, and larger tiles for fewer reads of memory.
// Saves: 1.6 times fewer bytes moved: 11 kernels move 10.7 GB and need 1.1 GB of extra memory.
// By the model of A100, at batch 1, kv_heads 8, group 1, q_len 4,096, kv_len 4,096, head_dim 64, v_head_dim
// 64.
//
// attention: forward, family simt, head_dim 64, v_head_dim 64, fp32
// emitted by fagen 0.1.0
//
// b batch, h query head, hk key head, q query, kv key, d feature, dv feature of a value
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_D columns d:
//     acc = acc + sum_d Q * K                                   [q,kv]
//   t0 = acc
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_KV columns kv:
//     t1 = rsqrt(head_dim) * t0
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_KV columns kv:
//     t2 = where(kv <= q + kv_len - q_len, t1, -inf)
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_KV columns kv:
//     m = max(m, max_kv t2)                                     [q]
//   t3 = m
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_KV columns kv:
//     t4 = t2 - t3
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_KV columns kv:
//     t5 = exp(t4)
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_KV columns kv:
//     l = l + sum_kv t5                                         [q]
//   t6 = l
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_KV columns kv:
//     t7 = t5 / t6
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_KV columns kv:
//     t8 = 1.1111186463666882 * t7
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_KV columns kv:
//     t9 = where(random[b,h,q,kv] >= 6554, t8, 0.0)
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_KV columns kv:
//     acc = acc + sum_kv t9 * V                                 [q,dv]
//   O = acc

#include "edges.cuh"
#include "math.cuh"
#include "random.cuh"
#include "tiles.cuh"
#include "types.cuh"
#include "warp.cuh"

constexpr int HEAD_DIM = 64, V_HEAD_DIM = 64;
constexpr float SCALE = 0.125f;  // rsqrt(head_dim)

// What all kernels are given; NAME_axis is the stride of NAME along an axis, in elements.
struct Params {
  const fp32* Q;  // [b, h, q, d]  q
  int64 Q_b, Q_h, Q_q, Q_d;
  const fp32* K;  // [b, hk, kv, d]  k
  int64 K_b, K_hk, K_kv, K_d;
  const fp32* V;  // [b, hk, kv, dv]  v
  int64 V_b, V_hk, V_kv, V_dv;
  fp32* t0;  // [b, hk, g, q, kv]
  int64 t0_b, t0_hk, t0_g, t0_q, t0_kv;
  fp32* t1;  // [b, hk, g, q, kv]
  int64 t1_b, t1_hk, t1_g, t1_q, t1_kv;
  fp32* t2;  // [b, hk, g, q, kv]
  int64 t2_b, t2_hk, t2_g, t2_q, t2_kv;
  fp32* t3;  // [b, hk, g, q]
  int64 t3_b, t3_hk, t3_g, t3_q;
  fp32* t4;  // [b, hk, g, q, kv]
  int64 t4_b, t4_hk, t4_g, t4_q, t4_kv;
  fp32* t5;  // [b, hk, g, q, kv]
  int64 t5_b, t5_hk, t5_g, t5_q, t5_kv;
  fp32* t6;  // [b, hk, g, q]
  int64 t6_b, t6_hk, t6_g, t6_q;
  fp32* t7;  // [b, hk, g, q, kv]
  int64 t7_b, t7_hk, t7_g, t7_q, t7_kv;
  fp32* t8;  // [b, hk, g, q, kv]
  int64 t8_b, t8_hk, t8_g, t8_q, t8_kv;
  fp32* t9;  // [b, hk, g, q, kv]
  int64 t9_b, t9_hk, t9_g, t9_q, t9_kv;
  fp32* O;  // [b, h, q, dv]  out
  int64 O_b, O_h, O_q;
  const uint64* seed;
  int kv_heads, group, q_len, kv_len;
};

namespace forward_0_product_ {
  constexpr int BLOCK_Q = 128, BLOCK_KV = 64;  // of a block's results
  constexpr int BLOCK_D = 32;                  // terms of a sum in shared memory at a time
  constexpr int THREADS = 128, LANES = 8;      // threads that share a row
  // of a block's results, each thread's share
  constexpr int ROWS = BLOCK_Q * LANES / THREADS, COLUMNS = BLOCK_KV / LANES;
  constexpr uint32 Q_AT = 0, K_AT = 18432;  // where tiles lie in shared memory, in bytes

  // sums[r][c] += row r of one tile times row c of the other, in parts: a long sum rounds less often
  template <class Own, class Walk>
  __device__ __forceinline__ void multiply(const Own& own, const Walk& walk, float (&sums)[ROWS][COLUMNS]) {
    const int row = threadIdx.x / LANES * ROWS, lane = threadIdx.x % LANES;
    constexpr int PART = Own::WIDTH > 16 ? 8 : 4;  // whatever the tile: products are the same in all kernels
    for (int start = 0; start < Own::WIDTH; start += PART) {
      float part[ROWS][COLUMNS] = {};
#pragma unroll 2
      for (int i = start; i < minimum(start + PART, Own::WIDTH); i += 4) {
        Vec<float, 4> a[ROWS];
        UNROLL for (int r = 0; r < ROWS; ++r) a[r] = own.template load<4>(row + r, i);
        UNROLL for (int c = 0; c < COLUMNS; ++c) {
          const Vec<float, 4> b = walk.template load<4>(c * LANES + lane, i);
          UNROLL for (int r = 0; r < ROWS; ++r) {
            UNROLL for (int e = 0; e < 4; ++e) part[r][c] += a[r][e] * b[e];
          }
        }
      }
      UNROLL for (int r = 0; r < ROWS; ++r) add(sums[r], part[r]);
    }
  }

  // t0 = acc
  extern "C" __global__ void __launch_bounds__(128, 2) forward_0_product(const __grid_constant__ Params p) {
    int rest = blockIdx.x;
    const int kv_tiles = (p.kv_len + BLOCK_KV - 1) / BLOCK_KV;
    const int kv_start = take(rest, kv_tiles) * BLOCK_KV;
    const int q_tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q;
    const int q_start = take(rest, q_tiles) * BLOCK_Q;
    const int g = take(rest, p.group);
    const int hk = take(rest, p.kv_heads);
    const int b = rest;
    const int h = hk * p.group + g;
    const fp32* Q_at = p.Q + b * p.Q_b + h * p.Q_h;
    const fp32* K_at = p.K + b * p.K_b + hk * p.K_hk;
    fp32* t0_at = p.t0 + b * p.t0_b + hk * p.t0_hk + g * p.t0_g;
    float acc[ROWS][COLUMNS] = {};  // acc = sum_d Q * K
    const Tile<BLOCK_Q, BLOCK_D> Q_tile(Q_AT);
    const Tile<BLOCK_KV, BLOCK_D> K_tile(K_AT);
    for (int d_start = 0; d_start < HEAD_DIM; d_start += BLOCK_D) {
      copy_tile<THREADS>(Q_tile, q_start, p.q_len, HEAD_DIM, Q_at, p.Q_q, p.Q_d, d_start);
      copy_tile<THREADS>(K_tile, kv_start, p.kv_len, HEAD_DIM, K_at, p.K_kv, p.K_d, d_start);
      __syncthreads();  // Q_tile and K_tile are there
      multiply(Q_tile, K_tile, acc);
      __syncthreads();  // all have read them
    }
    const int row0 = threadIdx.x / LANES * ROWS, lane = threadIdx.x % LANES;
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const int q = q_start + row0 + r;
      if (q >= p.q_len) break;
      UNROLL for (int c = 0; c < COLUMNS; ++c) {
        const int kv = kv_start + c * LANES + lane;
        if (kv < p.kv_len) {
          t0_at[q * p.t0_q + kv * p.t0_kv] = from_float<fp32>(acc[r][c]);
        }
      }
    }
  }
}
using forward_0_product_::forward_0_product;

// t1 = rsqrt(head_dim) * t0
extern "C" __global__ void __launch_bounds__(128) forward_1_rowwise(const __grid_constant__ Params p) {
  constexpr int BLOCK_Q = 4;  // rows of a block
  constexpr int LANES = 32;   // that share a row
  int rest = blockIdx.x;
  const int q_tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q;
  const int q_start = take(rest, q_tiles) * BLOCK_Q;
  const int g = take(rest, p.group);
  const int hk = take(rest, p.kv_heads);
  const int b = rest;
  fp32* t1_at = p.t1 + b * p.t1_b + hk * p.t1_hk + g * p.t1_g;
  fp32* t0_at = p.t0 + b * p.t0_b + hk * p.t0_hk + g * p.t0_g;
  const int q = q_start + threadIdx.x / LANES;
  if (q >= p.q_len) return;
  const int lane = threadIdx.x % LANES;

  fp32* t1_at_0 = t1_at + q * p.t1_q;
  fp32* t0_at_0 = t0_at + q * p.t0_q;
  for (int kv = lane; kv < p.kv_len; kv += LANES) {
    t1_at_0[kv * p.t1_kv] = from_float<fp32>(SCALE * t0_at_0[kv * p.t0_kv]);
  }
}

// t2 = where(kv <= q + kv_len - q_len, t1, -inf)
extern "C" __global__ void __launch_bounds__(128) forward_2_rowwise(const __grid_constant__ Params p) {
  constexpr int BLOCK_Q = 4;  // rows of a block
  constexpr int LANES = 32;   // that share a row
  int rest = blockIdx.x;
  const int q_tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q;
  const int q_start = take(rest, q_tiles) * BLOCK_Q;
  const int g = take(rest, p.group);
  const int hk = take(rest, p.kv_heads);
  const int b = rest;
  fp32* t2_at = p.t2 + b * p.t2_b + hk * p.t2_hk + g * p.t2_g;
  fp32* t1_at = p.t1 + b * p.t1_b + hk * p.t1_hk + g * p.t1_g;
  const int q = q_start + threadIdx.x / LANES;
  if (q >= p.q_len) return;
  const int lane = threadIdx.x % LANES;

  fp32* t2_at_0 = t2_at + q * p.t2_q;
  fp32* t1_at_0 = t1_at + q * p.t1_q;
  for (int kv = lane; kv < p.kv_len; kv += LANES) {
    t2_at_0[kv * p.t2_kv] =
        from_float<fp32>(kv + p.q_len <= q + p.kv_len ? t1_at_0[kv * p.t1_kv] : -INFINITY);
  }
}

// m = max_kv t2
// t3 = m
extern "C" __global__ void __launch_bounds__(128) forward_3_rowwise(const __grid_constant__ Params p) {
  constexpr int BLOCK_Q = 4;  // rows of a block
  constexpr int LANES = 32;   // that share a row
  int rest = blockIdx.x;
  const int q_tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q;
  const int q_start = take(rest, q_tiles) * BLOCK_Q;
  const int g = take(rest, p.group);
  const int hk = take(rest, p.kv_heads);
  const int b = rest;
  fp32* t2_at = p.t2 + b * p.t2_b + hk * p.t2_hk + g * p.t2_g;
  fp32* t3_at = p.t3 + b * p.t3_b + hk * p.t3_hk + g * p.t3_g;
  const int q = q_start + threadIdx.x / LANES;
  if (q >= p.q_len) return;
  const int lane = threadIdx.x % LANES;

  fp32* t2_at_0 = t2_at + q * p.t2_q;
  float m = -INFINITY;
  for (int kv = lane; kv < p.kv_len; kv += LANES) {
    m = maximum(m, t2_at_0[kv * p.t2_kv]);
  }
  m = lane_max<LANES>(m);
  if (lane == 0) {
    t3_at[q * p.t3_q] = from_float<fp32>(m);
  }
}

// t4 = t2 - t3
extern "C" __global__ void __launch_bounds__(128) forward_4_rowwise(const __grid_constant__ Params p) {
  constexpr int BLOCK_Q = 4;  // rows of a block
  constexpr int LANES = 32;   // that share a row
  int rest = blockIdx.x;
  const int q_tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q;
  const int q_start = take(rest, q_tiles) * BLOCK_Q;
  const int g = take(rest, p.group);
  const int hk = take(rest, p.kv_heads);
  const int b = rest;
  fp32* t4_at = p.t4 + b * p.t4_b + hk * p.t4_hk + g * p.t4_g;
  fp32* t2_at = p.t2 + b * p.t2_b + hk * p.t2_hk + g * p.t2_g;
  fp32* t3_at = p.t3 + b * p.t3_b + hk * p.t3_hk + g * p.t3_g;
  const int q = q_start + threadIdx.x / LANES;
  if (q >= p.q_len) return;
  const int lane = threadIdx.x % LANES;

  fp32* t4_at_0 = t4_at + q * p.t4_q;
  fp32* t2_at_0 = t2_at + q * p.t2_q;
  const float x0 = finite_or_zero(t3_at[q * p.t3_q]);
  for (int kv = lane; kv < p.kv_len; kv += LANES) {
    t4_at_0[kv * p.t4_kv] = from_float<fp32>(t2_at_0[kv * p.t2_kv] - x0);
  }
}

// t5 = exp(t4)
extern "C" __global__ void __launch_bounds__(128) forward_5_rowwise(const __grid_constant__ Params p) {
  constexpr int BLOCK_Q = 4;  // rows of a block
  constexpr int LANES = 32;   // that share a row
  int rest = blockIdx.x;
  const int q_tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q;
  const int q_start = take(rest, q_tiles) * BLOCK_Q;
  const int g = take(rest, p.group);
  const int hk = take(rest, p.kv_heads);
  const int b = rest;
  fp32* t5_at = p.t5 + b * p.t5_b + hk * p.t5_hk + g * p.t5_g;
  fp32* t4_at = p.t4 + b * p.t4_b + hk * p.t4_hk + g * p.t4_g;
  const int q = q_start + threadIdx.x / LANES;
  if (q >= p.q_len) return;
  const int lane = threadIdx.x % LANES;

  fp32* t5_at_0 = t5_at + q * p.t5_q;
  fp32* t4_at_0 = t4_at + q * p.t4_q;
  for (int kv = lane; kv < p.kv_len; kv += LANES) {
    t5_at_0[kv * p.t5_kv] = from_float<fp32>(expf(t4_at_0[kv * p.t4_kv]));
  }
}

// l = sum_kv t5
// t6 = l
extern "C" __global__ void __launch_bounds__(128) forward_6_rowwise(const __grid_constant__ Params p) {
  constexpr int BLOCK_Q = 4;  // rows of a block
  constexpr int LANES = 32;   // that share a row
  int rest = blockIdx.x;
  const int q_tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q;
  const int q_start = take(rest, q_tiles) * BLOCK_Q;
  const int g = take(rest, p.group);
  const int hk = take(rest, p.kv_heads);
  const int b = rest;
  fp32* t5_at = p.t5 + b * p.t5_b + hk * p.t5_hk + g * p.t5_g;
  fp32* t6_at = p.t6 + b * p.t6_b + hk * p.t6_hk + g * p.t6_g;
  const int q = q_start + threadIdx.x / LANES;
  if (q >= p.q_len) return;
  const int lane = threadIdx.x % LANES;

  fp32* t5_at_0 = t5_at + q * p.t5_q;
  float l = 0.0f;
  for (int kv = lane; kv < p.kv_len; kv += LANES) {
    l += t5_at_0[kv * p.t5_kv];
  }
  l = lane_sum<LANES>(l);
  if (lane == 0) {
    t6_at[q * p.t6_q] = from_float<fp32>(l);
  }
}

// t7 = t5 / t6
extern "C" __global__ void __launch_bounds__(128) forward_7_rowwise(const __grid_constant__ Params p) {
  constexpr int BLOCK_Q = 4;  // rows of a block
  constexpr int LANES = 32;   // that share a row
  int rest = blockIdx.x;
  const int q_tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q;
  const int q_start = take(rest, q_tiles) * BLOCK_Q;
  const int g = take(rest, p.group);
  const int hk = take(rest, p.kv_heads);
  const int b = rest;
  fp32* t7_at = p.t7 + b * p.t7_b + hk * p.t7_hk + g * p.t7_g;
  fp32* t5_at = p.t5 + b * p.t5_b + hk * p.t5_hk + g * p.t5_g;
  fp32* t6_at = p.t6 + b * p.t6_b + hk * p.t6_hk + g * p.t6_g;
  const int q = q_start + threadIdx.x / LANES;
  if (q >= p.q_len) return;
  const int lane = threadIdx.x % LANES;

  fp32* t7_at_0 = t7_at + q * p.t7_q;
  fp32* t5_at_0 = t5_at + q * p.t5_q;
  const float x0 = quotient(1.0f, t6_at[q * p.t6_q]);
  for (int kv = lane; kv < p.kv_len; kv += LANES) {
    t7_at_0[kv * p.t7_kv] = from_float<fp32>(t5_at_0[kv * p.t5_kv] * x0);
  }
}

// t8 = 1.1111186463666882 * t7
extern "C" __global__ void __launch_bounds__(128) forward_8_rowwise(const __grid_constant__ Params p) {
  constexpr int BLOCK_Q = 4;  // rows of a block
  constexpr int LANES = 32;   // that share a row
  int rest = blockIdx.x;
  const int q_tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q;
  const int q_start = take(rest, q_tiles) * BLOCK_Q;
  const int g = take(rest, p.group);
  const int hk = take(rest, p.kv_heads);
  const int b = rest;
  fp32* t8_at = p.t8 + b * p.t8_b + hk * p.t8_hk + g * p.t8_g;
  fp32* t7_at = p.t7 + b * p.t7_b + hk * p.t7_hk + g * p.t7_g;
  const int q = q_start + threadIdx.x / LANES;
  if (q >= p.q_len) return;
  const int lane = threadIdx.x % LANES;

  fp32* t8_at_0 = t8_at + q * p.t8_q;
  fp32* t7_at_0 = t7_at + q * p.t7_q;
  for (int kv = lane; kv < p.kv_len; kv += LANES) {
    t8_at_0[kv * p.t8_kv] = from_float<fp32>(t7_at_0[kv * p.t7_kv] * 1.1111187f);
  }
}

// t9 = where(random[b,h,q,kv] >= 6554, t8, 0.0)
extern "C" __global__ void __launch_bounds__(128) forward_9_rowwise(const __grid_constant__ Params p) {
  constexpr int BLOCK_Q = 4;  // rows of a block
  constexpr int LANES = 32;   // that share a row
  int rest = blockIdx.x;
  const int q_tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q;
  const int q_start = take(rest, q_tiles) * BLOCK_Q;
  const int g = take(rest, p.group);
  const int hk = take(rest, p.kv_heads);
  const int b = rest;
  const int h = hk * p.group + g;
  fp32* t9_at = p.t9 + b * p.t9_b + hk * p.t9_hk + g * p.t9_g;
  const uint64 seed = *p.seed;
  fp32* t8_at = p.t8 + b * p.t8_b + hk * p.t8_hk + g * p.t8_g;
  const int q = q_start + threadIdx.x / LANES;
  if (q >= p.q_len) return;
  const int lane = threadIdx.x % LANES;

  fp32* t9_at_0 = t9_at + q * p.t9_q;
  fp32* t8_at_0 = t8_at + q * p.t8_q;
  for (int kv = lane; kv < p.kv_len; kv += LANES) {
    const RandomWords words = dropout_words(seed, 0, b, h, q, kv);
    t9_at_0[kv * p.t9_kv] =
        from_float<fp32>(6554 <= int32(dropout_bits(words, q, kv)) ? t8_at_0[kv * p.t8_kv] : 0.0f);
  }
}

namespace forward_10_product_ {
  constexpr int BLOCK_Q = 128, BLOCK_DV = 64;  // of a block's results
  constexpr int BLOCK_KV = 32;                 // terms of a sum in shared memory at a time
  constexpr int THREADS = 128, LANES = 8;      // threads that share a row
  // of a block's results, each thread's share
  constexpr int ROWS = BLOCK_Q * LANES / THREADS, COLUMNS = BLOCK_DV / LANES;
  constexpr uint32 T9_AT = 0, V_AT = 18432;  // where tiles lie in shared memory, in bytes

  // sums[r][c] += row r of one tile times row c of the other, in parts: a long sum rounds less often
  template <class Own, class Walk>
  __device__ __forceinline__ void multiply(const Own& own, const Walk& walk, float (&sums)[ROWS][COLUMNS]) {
    const int row = threadIdx.x / LANES * ROWS, lane = threadIdx.x % LANES;
    constexpr int PART = Own::WIDTH > 16 ? 8 : 4;  // whatever the tile: products are the same in all kernels
    for (int start = 0; start < Own::WIDTH; start += PART) {
      float part[ROWS][COLUMNS] = {};
#pragma unroll 2
      for (int i = start; i < minimum(start + PART, Own::WIDTH); i += 4) {
        Vec<float, 4> a[ROWS];
        UNROLL for (int r = 0; r < ROWS; ++r) a[r] = own.template load<4>(row + r, i);
        UNROLL for (int c = 0; c < COLUMNS; ++c) {
          const Vec<float, 4> b = walk.template load<4>(c * LANES + lane, i);
          UNROLL for (int r = 0; r < ROWS; ++r) {
            UNROLL for (int e = 0; e < 4; ++e) {
              if (is_skipped(a[r][e])) continue;
              part[r][c] += a[r][e] * b[e];
            }
          }
        }
      }
      UNROLL for (int r = 0; r < ROWS; ++r) add(sums[r], part[r]);
    }
  }

  // O = acc
  extern "C" __global__ void __launch_bounds__(128, 2) forward_10_product(const __grid_constant__ Params p) {
    int rest = blockIdx.x;
    const int dv_tiles = (V_HEAD_DIM + BLOCK_DV - 1) / BLOCK_DV;
    const int dv_start = take(rest, dv_tiles) * BLOCK_DV;
    const int q_tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q;
    const int q_start = take(rest, q_tiles) * BLOCK_Q;
    const int g = take(rest, p.group);
    const int hk = take(rest, p.kv_heads);
    const int b = rest;
    const int h = hk * p.group + g;
    fp32* t9_at = p.t9 + b * p.t9_b + hk * p.t9_hk + g * p.t9_g;
    const fp32* V_at = p.V + b * p.V_b + hk * p.V_hk;
    fp32* O_at = p.O + b * p.O_b + h * p.O_h;
    float acc[ROWS][COLUMNS] = {};  // acc = sum_kv t9 * V
    const Tile<BLOCK_Q, BLOCK_KV> t9_tile(T9_AT);
    const Tile<BLOCK_DV, BLOCK_KV> V_tile(V_AT);
    for (int kv_start = 0; kv_start < p.kv_len; kv_start += BLOCK_KV) {
      fill_tile<THREADS>(t9_tile, q_start, p.q_len, p.kv_len,
          [&](int q, int kv) { return unless_zero(t9_at[q * p.t9_q + kv * p.t9_kv]); }, kv_start);
      copy_tile_by_rows<THREADS>(V_tile, dv_start, V_HEAD_DIM, p.kv_len, V_at, p.V_dv, p.V_kv, kv_start);
      __syncthreads();  // t9_tile and V_tile are there
      multiply(t9_tile, V_tile, acc);
      __syncthreads();  // all have read them
    }
    const int row0 = threadIdx.x / LANES * ROWS, lane = threadIdx.x % LANES;
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const int q = q_start + row0 + r;
      if (q >= p.q_len) break;
      UNROLL for (int c = 0; c < COLUMNS; ++c) {
        const int dv = dv_start + c * LANES + lane;
        if (dv < V_HEAD_DIM) {
          O_at[q * p.O_q + dv] = from_float<fp32>(acc[r][c]);
        }
      }
    }
  }
}
using forward_10_product_::forward_10_product;
