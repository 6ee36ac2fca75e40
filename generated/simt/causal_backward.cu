// attention: backward, family simt, head_dim 64, v_head_dim 64, bf16 fp32
// emitted by fagen 0.1.0
//
// b batch, h query head, hk key head, q query, kv key, d feature, dv feature of a value
//
// S[b,h,q,kv] = sum_d Q K
// P[b,h,q,kv] = exp(where(kv <= q + kv_len - q_len, S * rsqrt(head_dim), -inf) - stat)
// dP[b,h,q,kv] = sum_dv dO V
// D[b,h,q] = sum_dv dO O
// dS[b,h,q,kv] = where(kv <= q + kv_len - q_len, P * (dP - D), 0.0)
// dQ = (sum_kv dS K) * rsqrt(head_dim)
// dK = (sum_g sum_q dS Q) * rsqrt(head_dim)
// dV = sum_g sum_q P dO
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_DV columns dv:
//     acc = acc + sum_dv O * dO                                 [q]
//   D = acc
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_KV columns kv with some  kv <= q + kv_len - q_len:
//     s0 = sum_d Q K                                            [q,kv]
//     s1 = sum_dv dO V                                          [q,kv]
//     acc = acc + sum_kv exp(s0 * rsqrt(head_dim) - stat) * (s1 - D) * K
//   dQ = acc * rsqrt(head_dim)
//
// for each b, hk and BLOCK_KV rows kv (a block):
//   for each g:
//     for each BLOCK_Q columns q with some  kv <= q + kv_len - q_len:
//       s0 = sum_d K Q                                            [q,kv]
//       s1 = sum_dv V dO                                          [q,kv]
//       acc0 = acc0 + sum_q exp(s0 * rsqrt(head_dim) - stat) * (s1 - D) * Q
//       acc1 = acc1 + sum_q exp(s0 * rsqrt(head_dim) - stat) * dO
//   dK = acc0 * rsqrt(head_dim)
//   dV = acc1

#include "edges.cuh"
#include "math.cuh"
#include "tiles.cuh"
#include "types.cuh"
#include "warp.cuh"

constexpr int HEAD_DIM = 64, V_HEAD_DIM = 64;
constexpr float SCALE = 0.125f;     // rsqrt(head_dim)
constexpr float LOG2E = 1.442695f;  // exp(x) = 2^(x LOG2E)

// What all kernels are given; NAME_axis is the stride of NAME along an axis, in elements.
struct Params {
  const bf16* Q;  // [b, h, q, d]  q
  int64 Q_b, Q_h, Q_q, Q_d;
  const bf16* K;  // [b, hk, kv, d]  k
  int64 K_b, K_hk, K_kv, K_d;
  const bf16* V;  // [b, hk, kv, dv]  v
  int64 V_b, V_hk, V_kv, V_dv;
  const bf16* dO;  // [b, h, q, dv]  dout
  int64 dO_b, dO_h, dO_q, dO_dv;
  const bf16* O;  // [b, h, q, dv]  out
  int64 O_b, O_h, O_q, O_dv;
  const fp32* stat;  // [b, h, q]  kept0
  int64 stat_b, stat_h, stat_q;
  fp32* D;  // [b, hk, g, q]
  int64 D_b, D_hk, D_g, D_q;
  bf16* dQ;  // [b, h, q, d]  dq
  int64 dQ_b, dQ_h, dQ_q;
  bf16* dK;  // [b, hk, kv, d]  dk
  int64 dK_b, dK_hk, dK_kv;
  bf16* dV;  // [b, hk, kv, dv]  dv
  int64 dV_b, dV_hk, dV_kv;
  int batch, kv_heads, group, q_len, kv_len;
};

// acc = sum_dv dO * O
// D = acc
extern "C" __global__ void __launch_bounds__(128) backward_0_rowwise(const __grid_constant__ Params p) {
  constexpr int BLOCK_Q = 4;  // rows of a block
  constexpr int LANES = 32;   // that share a row
  int rest = blockIdx.x;
  const int q_tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q;
  const int q_start = take(rest, q_tiles) * BLOCK_Q;
  const int g = take(rest, p.group);
  const int hk = take(rest, p.kv_heads);
  const int b = rest;
  const int h = hk * p.group + g;
  const bf16* dO_at = p.dO + b * p.dO_b + h * p.dO_h;
  const bf16* O_at = p.O + b * p.O_b + h * p.O_h;
  fp32* D_at = p.D + b * p.D_b + hk * p.D_hk + g * p.D_g;
  const int q = q_start + threadIdx.x / LANES;
  if (q >= p.q_len) return;
  const int lane = threadIdx.x % LANES;

  const bf16* dO_at_0 = dO_at + q * p.dO_q;
  const bf16* O_at_0 = O_at + q * p.O_q;
  float acc = 0.0f;
  for (int dv = lane; dv < V_HEAD_DIM; dv += LANES) {
    acc += to_float(dO_at_0[dv * p.dO_dv]) * to_float(O_at_0[dv * p.O_dv]);
  }
  acc = lane_sum<LANES>(acc);
  if (lane == 0) {
    D_at[q * p.D_q] = from_float<fp32>(acc);
  }
}

namespace backward_1_loop_ {
  constexpr int BLOCK_Q = 128, BLOCK_KV = 64;  // rows of a block, columns of a tile
  constexpr int THREADS = 256, LANES = 8;      // LANES of them share a row
  // of a tile, each thread's share
  constexpr int ROWS = BLOCK_Q * LANES / THREADS, COLUMNS = BLOCK_KV / LANES;
  constexpr int FEATURES = 8;  // of a weighted sum, each thread's share
  // where tiles lie in shared memory, in bytes
  constexpr uint32 Q_AT = 0, K_AT = 69632, DO_AT = 34816, V_AT = 87040, K2_AT = 104448, W_AT = 121856;

  // Where a block works, and what is the same for all of it.
  struct Block {
    int b, hk, g, h, q_start, q_last;
    const bf16 *Q, *K, *dO, *V;
    const fp32 *stat;
    fp32 *D;
    bf16 *dQ;
  };

  // What a thread knows of one of its rows.
  struct Row {
    int q;
    bool inside;
    float x0, D, acc[FEATURES] = {};
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
    block.Q = p.Q + block.b * p.Q_b + block.h * p.Q_h;
    block.K = p.K + block.b * p.K_b + block.hk * p.K_hk;
    block.dO = p.dO + block.b * p.dO_b + block.h * p.dO_h;
    block.V = p.V + block.b * p.V_b + block.hk * p.V_hk;
    block.stat = p.stat + block.b * p.stat_b + block.h * p.stat_h;
    block.D = p.D + block.b * p.D_b + block.hk * p.D_hk + block.g * p.D_g;
    block.dQ = p.dQ + block.b * p.dQ_b + block.h * p.dQ_h;
    return block;
  }

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

  // acc = acc + sum_kv exp(s0 * rsqrt(head_dim) - stat) * (s1 - D) * K
  template <bool MASKED>
  __device__ __forceinline__ void update(const Params& p, Row (&rows)[ROWS], int kv_start, int lane,
      float (&s0)[ROWS][COLUMNS], float (&s1)[ROWS][COLUMNS], float (&weights)[ROWS][COLUMNS]) {
    UNROLL for (int r = 0; r < ROWS; ++r) {
      Row& row = rows[r];
      bool counts[COLUMNS];
      UNROLL for (int c = 0; c < COLUMNS; ++c) {
        const int kv = kv_start + c * LANES + lane;
        // kv <= q + kv_len - q_len
        counts[c] = !MASKED || (kv < p.kv_len && kv + p.q_len <= row.q + p.kv_len);
        weights[r][c] = counts[c] ? exp2_approx((s0[r][c] * SCALE - row.x0) * LOG2E) * (s1[r][c] - row.D)
            : skipped();
      }
    }
  }

  // acc[f] += W * K_operand0: the columns of a tile are summed first, so that a long sum rounds less often
  template <bool MASKED, class Weights, class Operand>
  __device__ __forceinline__ void add_to_acc(const Weights& W, const Operand& operand, Row (&rows)[ROWS]) {
    const int row0 = threadIdx.x / LANES * ROWS, lane = threadIdx.x % LANES;
    float part[ROWS][FEATURES] = {};
    for (int start = 0; start < BLOCK_KV; start += 4) {
      Vec<float, 4> weights[ROWS];
      UNROLL for (int r = 0; r < ROWS; ++r) weights[r] = W.template load<4>(row0 + r, start);
      UNROLL for (int i = 0; i < 4; ++i) {
        Vec<float, 4> b[FEATURES / 4];
        UNROLL for (int v = 0; v < FEATURES / 4; ++v)
            b[v] = operand.template load<4>(start + i, (v * LANES + lane) * 4);
        UNROLL for (int r = 0; r < ROWS; ++r) {
          if (MASKED && is_skipped(weights[r][i])) continue;
          UNROLL for (int f = 0; f < FEATURES; ++f) part[r][f] += weights[r][i] * b[f / 4][f % 4];
        }
      }
    }
    UNROLL for (int r = 0; r < ROWS; ++r) add(rows[r].acc, part[r]);
  }

  // dQ = acc * rsqrt(head_dim)
  __device__ __forceinline__ void finish(const Params& p, const Block& block, const Row (&rows)[ROWS],
      int lane) {
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const Row& row = rows[r];
      if (!row.inside) continue;
      UNROLL for (int f = 0; f < FEATURES; ++f) {
        const int d = (f / 4 * LANES + lane) * 4 + f % 4;
        if (d < HEAD_DIM) {
          block.dQ[row.q * p.dQ_q + d] = from_float<bf16>(row.acc[f] * SCALE);
        }
      }
    }
  }

  extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_1_loop(const __grid_constant__ Params p) {
    const Block block = this_block(p);
    const int row0 = threadIdx.x / LANES * ROWS, lane = threadIdx.x % LANES;
    Row rows[ROWS];
    UNROLL for (int r = 0; r < ROWS; ++r) {
      Row& row = rows[r];
      const int q = block.q_start + row0 + r;
      row.inside = q < p.q_len;  // one past the end repeats the last row and is not stored
      row.q = minimum(q, p.q_len - 1);
      row.x0 = finite_or_zero(block.stat[row.q * p.stat_q]);
      row.D = block.D[row.q * p.D_q];
    }
    const Tile<BLOCK_Q, HEAD_DIM> Q(Q_AT);
    const Tile<BLOCK_Q, V_HEAD_DIM> dO(DO_AT);

    copy_tile<THREADS>(Q, block.q_start, p.q_len, HEAD_DIM, block.Q, p.Q_q, p.Q_d);
    copy_tile<THREADS>(dO, block.q_start, p.q_len, V_HEAD_DIM, block.dO, p.dO_q, p.dO_dv);
    const Tile<BLOCK_KV, HEAD_DIM> K(K_AT);
    const Tile<BLOCK_KV, V_HEAD_DIM> V(V_AT);
    const Tile<BLOCK_KV, HEAD_DIM> K_operand0(K2_AT);
    const Tile<BLOCK_Q, BLOCK_KV> W(W_AT);
    // Tiles that may have an element with  kv <= q + kv_len - q_len
    const int kv_end = minimum(block.q_last + p.kv_len - p.q_len + 1, p.kv_len);
    for (int kv_start = 0; kv_start < kv_end; kv_start += BLOCK_KV) {
      const int kv_last = minimum(kv_start + BLOCK_KV, p.kv_len) - 1;
      copy_tile<THREADS>(K, kv_start, p.kv_len, HEAD_DIM, block.K, p.K_kv, p.K_d);
      copy_tile<THREADS>(V, kv_start, p.kv_len, V_HEAD_DIM, block.V, p.V_kv, p.V_dv);
      copy_tile<THREADS>(K_operand0, kv_start, p.kv_len, HEAD_DIM, block.K, p.K_kv, p.K_d);
      __syncthreads();               // K and V and K_operand0 are there
      float s0[ROWS][COLUMNS] = {};  // s0 = sum_d Q K
      multiply(Q, K, s0);
      float s1[ROWS][COLUMNS] = {};  // s1 = sum_dv dO V
      multiply(dO, V, s1);
      const bool full = kv_last + p.q_len <= block.q_start + p.kv_len && kv_start + BLOCK_KV <= p.kv_len;
      float weights[ROWS][COLUMNS];
      full ? update<false>(p, rows, kv_start, lane, s0, s1, weights)
          : update<true>(p, rows, kv_start, lane, s0, s1, weights);
      UNROLL for (int r = 0; r < ROWS; ++r) {
        UNROLL for (int c = 0; c < COLUMNS; ++c) W(row0 + r, c * LANES + lane) = weights[r][c];
      }
      __syncwarp();  // a row's weights are written and read by one warp
      full ? add_to_acc<false>(W, K_operand0, rows) : add_to_acc<true>(W, K_operand0, rows);
      __syncthreads();  // all have read the tile
    }

    finish(p, block, rows, lane);
  }
}
using backward_1_loop_::backward_1_loop;

namespace backward_2_loop_ {
  constexpr int BLOCK_KV = 128, BLOCK_Q = 32;  // rows of a block, columns of a tile
  constexpr int THREADS = 256, LANES = 8;      // LANES of them share a row
  // of a tile, each thread's share
  constexpr int ROWS = BLOCK_KV * LANES / THREADS, COLUMNS = BLOCK_Q / LANES;
  constexpr int FEATURES_D = 8, FEATURES_DV = 8;  // of a weighted sum, each thread's share
  // where tiles lie in shared memory, in bytes
  constexpr uint32 K_AT = 0, Q_AT = 69632, V_AT = 34816, DO_AT = 78336, Q2_AT = 87040, DO2_AT = 95744,
      W_AT = 104448;

  // Where a block works, and what is the same for all of it.
  struct Block {
    int b, hk, g, h, kv_start, kv_last;
    const bf16 *K, *Q, *V, *dO;
    const fp32 *stat;
    fp32 *D;
    bf16 *dK, *dV;
  };

  // What a thread knows of one of its rows.
  struct Row {
    int kv;
    bool inside;
    float acc0[FEATURES_D] = {}, acc1[FEATURES_DV] = {};
  };

  // What a thread reads of one of its columns of a tile.
  struct Column {
    float x0, D;
  };

  // Where this block works; the last rows come first, they have most to do where a mask grows with the row.
  __device__ __forceinline__ Block this_block(const Params& p, int g) {
    Block block;
    int rest = blockIdx.x;
    block.hk = take(rest, p.kv_heads);
    block.b = take(rest, p.batch);
    block.g = g;
    block.h = block.hk * p.group + block.g;
    const int tiles = (p.kv_len + BLOCK_KV - 1) / BLOCK_KV;
    block.kv_start = (tiles - 1 - rest) * BLOCK_KV;
    block.kv_last = minimum(block.kv_start + BLOCK_KV, p.kv_len) - 1;
    block.K = p.K + block.b * p.K_b + block.hk * p.K_hk;
    block.Q = p.Q + block.b * p.Q_b + block.h * p.Q_h;
    block.V = p.V + block.b * p.V_b + block.hk * p.V_hk;
    block.dO = p.dO + block.b * p.dO_b + block.h * p.dO_h;
    block.stat = p.stat + block.b * p.stat_b + block.h * p.stat_h;
    block.D = p.D + block.b * p.D_b + block.hk * p.D_hk + block.g * p.D_g;
    block.dK = p.dK + block.b * p.dK_b + block.hk * p.dK_hk;
    block.dV = p.dV + block.b * p.dV_b + block.hk * p.dV_hk;
    return block;
  }

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

  // acc0 = acc0 + sum_q exp(s0 * rsqrt(head_dim) - stat) * (s1 - D) * Q
  // acc1 = acc1 + sum_q exp(s0 * rsqrt(head_dim) - stat) * dO
  template <bool MASKED>
  __device__ __forceinline__ void update(const Params& p, Row (&rows)[ROWS],
      const Column (&columns)[COLUMNS], int q_start, int lane, float (&s0)[ROWS][COLUMNS],
      float (&s1)[ROWS][COLUMNS], float (&weights0)[ROWS][COLUMNS], float (&weights1)[ROWS][COLUMNS]) {
    UNROLL for (int r = 0; r < ROWS; ++r) {
      Row& row = rows[r];
      bool counts[COLUMNS];
      UNROLL for (int c = 0; c < COLUMNS; ++c) {
        const int q = q_start + c * LANES + lane;
        const Column& column = columns[c];
        const float x0 = exp2_approx((s0[r][c] * SCALE - column.x0) * LOG2E);
        // kv <= q + kv_len - q_len
        counts[c] = !MASKED || (q < p.q_len && row.kv + p.q_len <= q + p.kv_len);
        weights0[r][c] = counts[c] ? x0 * (s1[r][c] - column.D) : skipped();
        weights1[r][c] = counts[c] ? x0 : skipped();
      }
    }
  }

  // acc0[f] += W * Q_operand0: the columns of a tile are summed first, so that a long sum rounds less often
  template <bool MASKED, class Weights, class Operand>
  __device__ __forceinline__ void add_to_acc0(const Weights& W, const Operand& operand, Row (&rows)[ROWS]) {
    const int row0 = threadIdx.x / LANES * ROWS, lane = threadIdx.x % LANES;
    float part[ROWS][FEATURES_D] = {};
    for (int start = 0; start < BLOCK_Q; start += 4) {
      Vec<float, 4> weights[ROWS];
      UNROLL for (int r = 0; r < ROWS; ++r) weights[r] = W.template load<4>(row0 + r, start);
      UNROLL for (int i = 0; i < 4; ++i) {
        Vec<float, 4> b[FEATURES_D / 4];
        UNROLL for (int v = 0; v < FEATURES_D / 4; ++v)
            b[v] = operand.template load<4>(start + i, (v * LANES + lane) * 4);
        UNROLL for (int r = 0; r < ROWS; ++r) {
          if (MASKED && is_skipped(weights[r][i])) continue;
          UNROLL for (int f = 0; f < FEATURES_D; ++f) part[r][f] += weights[r][i] * b[f / 4][f % 4];
        }
      }
    }
    UNROLL for (int r = 0; r < ROWS; ++r) add(rows[r].acc0, part[r]);
  }

  // acc1[f] += W * dO_operand1: the columns of a tile are summed first, so that a long sum rounds less often
  template <bool MASKED, class Weights, class Operand>
  __device__ __forceinline__ void add_to_acc1(const Weights& W, const Operand& operand, Row (&rows)[ROWS]) {
    const int row0 = threadIdx.x / LANES * ROWS, lane = threadIdx.x % LANES;
    float part[ROWS][FEATURES_DV] = {};
    for (int start = 0; start < BLOCK_Q; start += 4) {
      Vec<float, 4> weights[ROWS];
      UNROLL for (int r = 0; r < ROWS; ++r) weights[r] = W.template load<4>(row0 + r, start);
      UNROLL for (int i = 0; i < 4; ++i) {
        Vec<float, 4> b[FEATURES_DV / 4];
        UNROLL for (int v = 0; v < FEATURES_DV / 4; ++v)
            b[v] = operand.template load<4>(start + i, (v * LANES + lane) * 4);
        UNROLL for (int r = 0; r < ROWS; ++r) {
          if (MASKED && is_skipped(weights[r][i])) continue;
          UNROLL for (int f = 0; f < FEATURES_DV; ++f) part[r][f] += weights[r][i] * b[f / 4][f % 4];
        }
      }
    }
    UNROLL for (int r = 0; r < ROWS; ++r) add(rows[r].acc1, part[r]);
  }

  // dK = acc0 * rsqrt(head_dim)
  // dV = acc1
  __device__ __forceinline__ void finish(const Params& p, const Block& block, const Row (&rows)[ROWS],
      int lane) {
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const Row& row = rows[r];
      if (!row.inside) continue;
      UNROLL for (int f = 0; f < FEATURES_D; ++f) {
        const int d = (f / 4 * LANES + lane) * 4 + f % 4;
        if (d < HEAD_DIM) {
          block.dK[row.kv * p.dK_kv + d] = from_float<bf16>(row.acc0[f] * SCALE);
        }
      }
      UNROLL for (int f = 0; f < FEATURES_DV; ++f) {
        const int dv = (f / 4 * LANES + lane) * 4 + f % 4;
        if (dv < V_HEAD_DIM) {
          block.dV[row.kv * p.dV_kv + dv] = from_float<bf16>(row.acc1[f]);
        }
      }
    }
  }

  extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_2_loop(const __grid_constant__ Params p) {
    Block block = this_block(p, 0);
    const int row0 = threadIdx.x / LANES * ROWS, lane = threadIdx.x % LANES;
    Row rows[ROWS];
    UNROLL for (int r = 0; r < ROWS; ++r) {
      Row& row = rows[r];
      const int kv = block.kv_start + row0 + r;
      row.inside = kv < p.kv_len;  // one past the end repeats the last row and is not stored
      row.kv = minimum(kv, p.kv_len - 1);
    }
    const Tile<BLOCK_KV, HEAD_DIM> K(K_AT);
    const Tile<BLOCK_KV, V_HEAD_DIM> V(V_AT);

    copy_tile<THREADS>(K, block.kv_start, p.kv_len, HEAD_DIM, block.K, p.K_kv, p.K_d);
    copy_tile<THREADS>(V, block.kv_start, p.kv_len, V_HEAD_DIM, block.V, p.V_kv, p.V_dv);
    const Tile<BLOCK_Q, HEAD_DIM> Q(Q_AT);
    const Tile<BLOCK_Q, V_HEAD_DIM> dO(DO_AT);
    const Tile<BLOCK_Q, HEAD_DIM> Q_operand0(Q2_AT);
    const Tile<BLOCK_Q, V_HEAD_DIM> dO_operand1(DO2_AT);
    const Tile<BLOCK_KV, BLOCK_Q> W(W_AT);
    for (int g = 0; g < p.group; ++g) {
      block = this_block(p, g);
      // Tiles that may have an element with  kv <= q + kv_len - q_len
      const int q_begin = maximum(block.kv_start + p.q_len - p.kv_len, 0);
      const int q_end = p.q_len;
      for (int q_start = q_begin / BLOCK_Q * BLOCK_Q; q_start < q_end; q_start += BLOCK_Q) {
        copy_tile<THREADS>(Q, q_start, p.q_len, HEAD_DIM, block.Q, p.Q_q, p.Q_d);
        copy_tile<THREADS>(dO, q_start, p.q_len, V_HEAD_DIM, block.dO, p.dO_q, p.dO_dv);
        copy_tile<THREADS>(Q_operand0, q_start, p.q_len, HEAD_DIM, block.Q, p.Q_q, p.Q_d);
        copy_tile<THREADS>(dO_operand1, q_start, p.q_len, V_HEAD_DIM, block.dO, p.dO_q, p.dO_dv);
        __syncthreads();               // Q and dO and Q_operand0 and dO_operand1 are there
        float s0[ROWS][COLUMNS] = {};  // s0 = sum_d K Q
        multiply(K, Q, s0);
        float s1[ROWS][COLUMNS] = {};  // s1 = sum_dv V dO
        multiply(V, dO, s1);
        Column columns[COLUMNS];
        UNROLL for (int c = 0; c < COLUMNS; ++c) {
          Column& column = columns[c];
          const int q = q_start + c * LANES + lane;
          column.x0 = finite_or_zero(block.stat[minimum(q, p.q_len - 1) * p.stat_q]);
          column.D = block.D[minimum(q, p.q_len - 1) * p.D_q];
        }
        const bool full = block.kv_last + p.q_len <= q_start + p.kv_len && q_start + BLOCK_Q <= p.q_len;
        float weights0[ROWS][COLUMNS];
        float weights1[ROWS][COLUMNS];
        full ? update<false>(p, rows, columns, q_start, lane, s0, s1, weights0, weights1)
            : update<true>(p, rows, columns, q_start, lane, s0, s1, weights0, weights1);
        UNROLL for (int r = 0; r < ROWS; ++r) {
          UNROLL for (int c = 0; c < COLUMNS; ++c) W(row0 + r, c * LANES + lane) = weights0[r][c];
        }
        __syncwarp();  // a row's weights are written and read by one warp
        full ? add_to_acc0<false>(W, Q_operand0, rows) : add_to_acc0<true>(W, Q_operand0, rows);
        __syncwarp();  // the weights before these have been read
        UNROLL for (int r = 0; r < ROWS; ++r) {
          UNROLL for (int c = 0; c < COLUMNS; ++c) W(row0 + r, c * LANES + lane) = weights1[r][c];
        }
        __syncwarp();  // a row's weights are written and read by one warp
        full ? add_to_acc1<false>(W, dO_operand1, rows) : add_to_acc1<true>(W, dO_operand1, rows);
        __syncthreads();  // all have read the tile
      }
    }

    finish(p, block, rows, lane);
  }
}
using backward_2_loop_::backward_2_loop;
