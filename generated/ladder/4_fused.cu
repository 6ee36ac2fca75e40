// Rung 4 of 5. Element-wise work fused into the products.
// Changed: What works element by element is applied where a product is stored or loaded. The maximum and the
// sum of a row stay kernels of their own: each needs a whole row.
// Saves: 3.3 times fewer bytes moved, 7 launches fewer, 536.7 MB less extra memory: 4 kernels move 3.2 GB and
// need 537.1 MB of extra memory.
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
//   t0 = where(kv <= q + kv_len - q_len, acc * rsqrt(head_dim), -inf)
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_KV columns kv:
//     m = max(m, max_kv t0)                                     [q]
//   t1 = m
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_KV columns kv:
//     l = l + sum_kv exp(t0 - t1)                               [q]
//   t2 = l
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_KV columns kv:
//     acc = acc + sum_kv where(random[b,h,q,kv] >= 6554, 1.1111186463666882 * (exp(t0 - t1) / t2), 0.0) * V
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
  fp32* t1;  // [b, hk, g, q]
  int64 t1_b, t1_hk, t1_g, t1_q;
  fp32* t2;  // [b, hk, g, q]
  int64 t2_b, t2_hk, t2_g, t2_q;
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

  // t0 = where(kv <= q + kv_len - q_len, acc * rsqrt(head_dim), -inf)
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
          t0_at[q * p.t0_q + kv * p.t0_kv] =
              from_float<fp32>(kv + p.q_len <= q + p.kv_len ? acc[r][c] * SCALE : -INFINITY);
        }
      }
    }
  }
}
using forward_0_product_::forward_0_product;

// m = max_kv t0
// t1 = m
extern "C" __global__ void __launch_bounds__(128) forward_1_rowwise(const __grid_constant__ Params p) {
  constexpr int BLOCK_Q = 4;  // rows of a block
  constexpr int LANES = 32;   // that share a row
  int rest = blockIdx.x;
  const int q_tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q;
  const int q_start = take(rest, q_tiles) * BLOCK_Q;
  const int g = take(rest, p.group);
  const int hk = take(rest, p.kv_heads);
  const int b = rest;
  fp32* t0_at = p.t0 + b * p.t0_b + hk * p.t0_hk + g * p.t0_g;
  fp32* t1_at = p.t1 + b * p.t1_b + hk * p.t1_hk + g * p.t1_g;
  const int q = q_start + threadIdx.x / LANES;
  if (q >= p.q_len) return;
  const int lane = threadIdx.x % LANES;

  fp32* t0_at_0 = t0_at + q * p.t0_q;
  float m = -INFINITY;
  for (int kv = lane; kv < p.kv_len; kv += LANES) {
    m = maximum(m, t0_at_0[kv * p.t0_kv]);
  }
  m = lane_max<LANES>(m);
  if (lane == 0) {
    t1_at[q * p.t1_q] = from_float<fp32>(m);
  }
}

// l = sum_kv exp(t0 - t1)
// t2 = l
extern "C" __global__ void __launch_bounds__(128) forward_2_rowwise(const __grid_constant__ Params p) {
  constexpr int BLOCK_Q = 4;  // rows of a block
  constexpr int LANES = 32;   // that share a row
  int rest = blockIdx.x;
  const int q_tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q;
  const int q_start = take(rest, q_tiles) * BLOCK_Q;
  const int g = take(rest, p.group);
  const int hk = take(rest, p.kv_heads);
  const int b = rest;
  fp32* t0_at = p.t0 + b * p.t0_b + hk * p.t0_hk + g * p.t0_g;
  fp32* t1_at = p.t1 + b * p.t1_b + hk * p.t1_hk + g * p.t1_g;
  fp32* t2_at = p.t2 + b * p.t2_b + hk * p.t2_hk + g * p.t2_g;
  const int q = q_start + threadIdx.x / LANES;
  if (q >= p.q_len) return;
  const int lane = threadIdx.x % LANES;

  fp32* t0_at_0 = t0_at + q * p.t0_q;
  const float x0 = finite_or_zero(t1_at[q * p.t1_q]);
  float l = 0.0f;
  for (int kv = lane; kv < p.kv_len; kv += LANES) {
    l += expf(t0_at_0[kv * p.t0_kv] - x0);
  }
  l = lane_sum<LANES>(l);
  if (lane == 0) {
    t2_at[q * p.t2_q] = from_float<fp32>(l);
  }
}

namespace forward_3_product_ {
  constexpr int BLOCK_Q = 128, BLOCK_DV = 64;  // of a block's results
  constexpr int BLOCK_KV = 32;                 // terms of a sum in shared memory at a time
  constexpr int THREADS = 128, LANES = 8;      // threads that share a row
  // of a block's results, each thread's share
  constexpr int ROWS = BLOCK_Q * LANES / THREADS, COLUMNS = BLOCK_DV / LANES;
  constexpr uint32 OWN_AT = 0, V_AT = 18432;  // where tiles lie in shared memory, in bytes

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
  extern "C" __global__ void __launch_bounds__(128, 2) forward_3_product(const __grid_constant__ Params p) {
    int rest = blockIdx.x;
    const int dv_tiles = (V_HEAD_DIM + BLOCK_DV - 1) / BLOCK_DV;
    const int dv_start = take(rest, dv_tiles) * BLOCK_DV;
    const int q_tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q;
    const int q_start = take(rest, q_tiles) * BLOCK_Q;
    const int g = take(rest, p.group);
    const int hk = take(rest, p.kv_heads);
    const int b = rest;
    const int h = hk * p.group + g;
    fp32* t2_at = p.t2 + b * p.t2_b + hk * p.t2_hk + g * p.t2_g;
    fp32* t0_at = p.t0 + b * p.t0_b + hk * p.t0_hk + g * p.t0_g;
    fp32* t1_at = p.t1 + b * p.t1_b + hk * p.t1_hk + g * p.t1_g;
    const uint64 seed = *p.seed;
    const fp32* V_at = p.V + b * p.V_b + hk * p.V_hk;
    fp32* O_at = p.O + b * p.O_b + h * p.O_h;
    // acc = sum_kv where(random[b,h,q,kv] >= 6554, 1.1111186463666882 * (exp(t0 - t1) / t2), 0.0) * V
    float acc[ROWS][COLUMNS] = {};
    const Tile<BLOCK_Q, BLOCK_KV> own_tile(OWN_AT);
    const Tile<BLOCK_DV, BLOCK_KV> V_tile(V_AT);
    for (int kv_start = 0; kv_start < p.kv_len; kv_start += BLOCK_KV) {
      compute_tile<THREADS>(own_tile, q_start, p.q_len, p.kv_len,
      [&](int q, int kv) {
        return Reads<3>{t2_at[q * p.t2_q], t0_at[q * p.t0_q + kv * p.t0_kv], t1_at[q * p.t1_q]};
      },
      [&](const Reads<3>& read, int q, int kv) {
        const float t2_value = read[0], t0_value = read[1], t1_value = read[2];
        const RandomWords words = dropout_words(seed, 0, b, h, q, kv);
        return unless_zero(6554 <= int32(dropout_bits(words, q, kv))
            ? quotient(expf(t0_value - finite_or_zero(t1_value)), t2_value) * 1.1111187f : 0.0f);
      }, kv_start);
      copy_tile_by_rows<THREADS>(V_tile, dv_start, V_HEAD_DIM, p.kv_len, V_at, p.V_dv, p.V_kv, kv_start);
      __syncthreads();  // own_tile and V_tile are there
      multiply(own_tile, V_tile, acc);
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
using forward_3_product_::forward_3_product;
