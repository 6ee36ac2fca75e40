// latent: forward, family simt, head_dim 128, rope 64, bf16
// emitted by fagen 0.1.0
//
// b batch, h query head, q query, kv key, d feature
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_D columns d:
//     acc = acc + sum_d Q0 * V                                  [q,kv]
//   t0 = acc
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_KV columns kv with some  kv <= q:
//     s = sum_rope Q1 K                                         [q,kv]
//     m = max(m, max_kv s + t0)                                 [q]
//     l = l * exp(0.07 * (m_old - m)) + sum_kv exp(0.07 * (s + t0) - 0.07 * m)
//     acc = acc * exp(0.07 * (m_old - m)) + sum_kv exp(0.07 * (s + t0) - 0.07 * m) * V
//   O = acc * (1.0 / l)

#include "edges.cuh"
#include "math.cuh"
#include "tiles.cuh"
#include "types.cuh"
#include "warp.cuh"

constexpr int HEAD_DIM = 128, ROPE_LEN = 64;

// What all kernels are given; NAME_axis is the stride of NAME along an axis, in elements.
struct Params {
  const bf16* Q0;  // [b, h, q, d]  q
  int64 Q0_b, Q0_h, Q0_q, Q0_d;
  const bf16* Q1;  // [b, h, q, rope]  q_rope
  int64 Q1_b, Q1_h, Q1_q, Q1_rope;
  const bf16* V;  // [b, kv, d]  latents
  int64 V_b, V_kv, V_d;
  const bf16* K;  // [b, kv, rope]  k_rope
  int64 K_b, K_kv, K_rope;
  fp32* t0;  // [b, hk, g, q, kv]
  int64 t0_b, t0_hk, t0_g, t0_q, t0_kv;
  bf16* O;  // [b, h, q, d]  out
  int64 O_b, O_h, O_q;
  int batch, kv_heads, group, q_len, kv_len;
};

namespace forward_0_product_ {
  constexpr int BLOCK_Q = 128, BLOCK_KV = 64;  // of a block's results
  constexpr int BLOCK_D = 32;                  // terms of a sum in shared memory at a time
  constexpr int THREADS = 128, LANES = 8;      // threads that share a row
  // of a block's results, each thread's share
  constexpr int ROWS = BLOCK_Q * LANES / THREADS, COLUMNS = BLOCK_KV / LANES;
  constexpr uint32 Q0_AT = 0, V_AT = 18432;  // where tiles lie in shared memory, in bytes

  // sums[r][c] += row r of one tile times row c of the other, in parts: a long sum rounds less often
  template <class Own, class Walk>
  __device__ __forceinline__ void multiply(const Own& own, const Walk& walk, float (&sums)[ROWS][COLUMNS]) {
    const int row = threadIdx.x / LANES * ROWS, lane = threadIdx.x % LANES;
    constexpr int PART = Own::WIDTH > 64 ? 16 : Own::WIDTH > 16 ? 8 : 4;
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
    const bf16* Q0_at = p.Q0 + b * p.Q0_b + h * p.Q0_h;
    const bf16* V_at = p.V + b * p.V_b;
    fp32* t0_at = p.t0 + b * p.t0_b + hk * p.t0_hk + g * p.t0_g;
    float acc[ROWS][COLUMNS] = {};  // acc = sum_d Q0 * V
    const Tile<BLOCK_Q, BLOCK_D> Q0_tile(Q0_AT);
    const Tile<BLOCK_KV, BLOCK_D> V_tile(V_AT);
    for (int d_start = 0; d_start < HEAD_DIM; d_start += BLOCK_D) {
      copy_tile<THREADS>(Q0_tile, q_start, p.q_len, HEAD_DIM, Q0_at, p.Q0_q, p.Q0_d, d_start);
      copy_tile<THREADS>(V_tile, kv_start, p.kv_len, HEAD_DIM, V_at, p.V_kv, p.V_d, d_start);
      __syncthreads();  // Q0_tile and V_tile are there
      multiply(Q0_tile, V_tile, acc);
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

namespace forward_1_forward_loop_ {
  constexpr int BLOCK_Q = 128, BLOCK_KV = 64;  // rows of a block, columns of a tile
  constexpr int THREADS = 256, LANES = 8;      // LANES of them share a row
  // of a tile, each thread's share
  constexpr int ROWS = BLOCK_Q * LANES / THREADS, COLUMNS = BLOCK_KV / LANES;
  constexpr int FEATURES = 16;  // of a weighted sum, each thread's share
  // where tiles lie in shared memory, in bytes
  constexpr uint32 Q1_AT = 0, K_AT = 34816, V_AT = 52224, W_AT = 86016;

  // Where a block works, and what is the same for all of it.
  struct Block {
    int b, hk, g, h, q_start, q_last;
    const bf16 *Q1, *K, *V;
    fp32 *t0;
    bf16 *O;
  };

  // What a thread knows of one of its rows.
  struct Row {
    int q;
    bool inside;
    fp32 *t0;
    float m = -INFINITY, l = 0.0f, acc[FEATURES] = {};
  };

  // Where this block works; the last rows come first, they have most to do where a mask grows with the row.
  __device__ __forceinline__ Block this_block(const Params& p) {
    Block block;
    int rest = blockIdx.x;
    block.g = take(rest, p.group);
    block.hk = take(rest, p.kv_heads);
    block.b = take(rest, p.batch);
    block.h = block.hk * p.group + block.g;
    const int tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q;
    block.q_start = (tiles - 1 - rest) * BLOCK_Q;
    block.q_last = minimum(block.q_start + BLOCK_Q, p.q_len) - 1;
    block.Q1 = p.Q1 + block.b * p.Q1_b + block.h * p.Q1_h;
    block.K = p.K + block.b * p.K_b;
    block.t0 = p.t0 + block.b * p.t0_b + block.hk * p.t0_hk + block.g * p.t0_g;
    block.V = p.V + block.b * p.V_b;
    block.O = p.O + block.b * p.O_b + block.h * p.O_h;
    return block;
  }

  // sums[r][c] += row r of one tile times row c of the other, in parts: a long sum rounds less often
  template <class Own, class Walk>
  __device__ __forceinline__ void multiply(const Own& own, const Walk& walk, float (&sums)[ROWS][COLUMNS]) {
    const int row = threadIdx.x / LANES * ROWS, lane = threadIdx.x % LANES;
    constexpr int PART = Own::WIDTH > 64 ? 16 : Own::WIDTH > 16 ? 8 : 4;
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

  // m = max(m, max_kv s + t0)
  // l = l * exp(0.07 * (m_old - m)) + sum_kv exp(0.07 * (s + t0) - 0.07 * m)
  // acc = acc * exp(0.07 * (m_old - m)) + sum_kv exp(0.07 * (s + t0) - 0.07 * m) * V
  template <bool MASKED>
  __device__ __forceinline__ void update(const Params& p, Row (&rows)[ROWS], int kv_start, int lane,
      float (&s)[ROWS][COLUMNS], float (&weights)[ROWS][COLUMNS]) {
    UNROLL for (int r = 0; r < ROWS; ++r) {
      Row& row = rows[r];
      float x0[COLUMNS];
      bool counts[COLUMNS];
      const float m_old = row.m;
      UNROLL for (int c = 0; c < COLUMNS; ++c) {
        const int kv = kv_start + c * LANES + lane;
        x0[c] = s[r][c] + row.t0[minimum(kv, p.kv_len - 1) * p.t0_kv];
        // kv <= q
        counts[c] = !MASKED || (kv < p.kv_len && kv <= row.q);
        if (counts[c]) row.m = maximum(row.m, x0[c]);
      }
      row.m = lane_max<LANES>(row.m);
      const Exponential power = Exponential(0.07f, finite_or_zero(row.m));
      const float x2 = power(m_old);
      row.l *= x2;
      float l_part = 0.0f;
      UNROLL for (int f = 0; f < FEATURES; ++f) row.acc[f] *= x2;
      UNROLL for (int c = 0; c < COLUMNS; ++c) {
        const float x1 = power(x0[c]);
        if (counts[c]) l_part += x1;
        weights[r][c] = counts[c] ? x1 : skipped();
      }
      row.l += l_part;
    }
  }

  // acc[f] += W * V: the columns of a tile are summed first, so that a long sum rounds less often
  template <bool MASKED, class Weights, class Operand>
  __device__ __forceinline__ void add_to_acc(const Weights& W, const Operand& operand, Row (&rows)[ROWS]) {
    const int row0 = threadIdx.x / LANES * ROWS, lane = threadIdx.x % LANES;
    float part[ROWS][FEATURES] = {};
    for (int start = 0; start < BLOCK_KV; start += 4) {
      Vec<float, 4> weights[ROWS];
      UNROLL for (int r = 0; r < ROWS; ++r) weights[r] = W.template load<4>(row0 + r, start);
      UNROLL for (int i = 0; i < 4; ++i) {
        Vec<float, 4> b[FEATURES / 4];
        UNROLL for (int v = 0; v < FEATURES / 4; ++v) b[v] =
            operand.template load<4>(start + i, (v * LANES + lane) * 4);
        UNROLL for (int r = 0; r < ROWS; ++r) {
          if (MASKED && is_skipped(weights[r][i])) continue;
          UNROLL for (int f = 0; f < FEATURES; ++f) part[r][f] += weights[r][i] * b[f / 4][f % 4];
        }
      }
    }
    UNROLL for (int r = 0; r < ROWS; ++r) add(rows[r].acc, part[r]);
  }

  // O = acc * (1.0 / l)
  __device__ __forceinline__ void finish(const Params& p, const Block& block, const Row (&rows)[ROWS],
      int lane) {
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const Row& row = rows[r];
      if (!row.inside) continue;
      const float x3 = quotient(1.0f, row.l);
      UNROLL for (int f = 0; f < FEATURES; ++f) {
        const int d = (f / 4 * LANES + lane) * 4 + f % 4;
        if (d < HEAD_DIM) {
          block.O[row.q * p.O_q + d] = from_float<bf16>(row.acc[f] * x3);
        }
      }
    }
  }

  extern "C" __global__ void __launch_bounds__(THREADS,
      1) forward_1_forward_loop(const __grid_constant__ Params p) {
    const Block block = this_block(p);
    const int row0 = threadIdx.x / LANES * ROWS, lane = threadIdx.x % LANES;
    Row rows[ROWS];
    UNROLL for (int r = 0; r < ROWS; ++r) {
      Row& row = rows[r];
      const int q = block.q_start + row0 + r;
      row.inside = q < p.q_len;  // one past the end repeats the last row and is not stored
      row.q = minimum(q, p.q_len - 1);
      row.t0 = block.t0 + row.q * p.t0_q;
    }
    const Tile<BLOCK_Q, ROPE_LEN> Q1(Q1_AT);

    copy_tile<THREADS>(Q1, block.q_start, p.q_len, ROPE_LEN, block.Q1, p.Q1_q, p.Q1_rope);
    const Tile<BLOCK_KV, ROPE_LEN> K(K_AT);
    const Tile<BLOCK_KV, HEAD_DIM> V(V_AT);
    const Tile<BLOCK_Q, BLOCK_KV> W(W_AT);
    // Tiles that may have an element with  kv <= q
    const int kv_end = minimum(block.q_last + 1, p.kv_len);
    for (int kv_start = 0; kv_start < kv_end; kv_start += BLOCK_KV) {
      const int kv_last = minimum(kv_start + BLOCK_KV, p.kv_len) - 1;
      copy_tile<THREADS>(K, kv_start, p.kv_len, ROPE_LEN, block.K, p.K_kv, p.K_rope);
      copy_tile<THREADS>(V, kv_start, p.kv_len, HEAD_DIM, block.V, p.V_kv, p.V_d);
      __syncthreads();              // K and V are there
      float s[ROWS][COLUMNS] = {};  // s = sum_rope Q1 K
      multiply(Q1, K, s);
      const bool full = kv_last <= block.q_start && kv_start + BLOCK_KV <= p.kv_len;
      float weights[ROWS][COLUMNS];
      full ? update<false>(p, rows, kv_start, lane, s, weights)
          : update<true>(p, rows, kv_start, lane, s, weights);
      UNROLL for (int r = 0; r < ROWS; ++r) {
        UNROLL for (int c = 0; c < COLUMNS; ++c) W(row0 + r, c * LANES + lane) = weights[r][c];
      }
      __syncwarp();  // a row's weights are written and read by one warp
      full ? add_to_acc<false>(W, V, rows) : add_to_acc<true>(W, V, rows);
      __syncthreads();  // all have read the tile
    }
    UNROLL for (int r = 0; r < ROWS; ++r) rows[r].l = lane_sum<LANES>(rows[r].l);

    finish(p, block, rows, lane);
  }
}
using forward_1_forward_loop_::forward_1_forward_loop;
