// attention: forward, family simt, head_dim 64, v_head_dim 64, fp16
// emitted by fagen 0.1.0
//
// b batch, h query head, hk key head, q query, kv key, d feature, dv feature of a value
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_KV columns kv with some  q <= kv + q_len - kv_len + 1024 and kv <= q + kv_len - q_len:
//     s = sum_d Q K                                             [q,kv]
//     m = max(m, max_kv tanh(0.03333333333333333 * s * rsqrt(head_dim)))
//     l = l * exp(30.0 * (m_old - m)) + sum_kv exp(30.0 * (tanh(0.03333333333333333 * s *
//         rsqrt(head_dim)) - m))
//     acc = acc * exp(30.0 * (m_old - m)) + sum_kv exp(30.0 * (tanh(0.03333333333333333 * s *
//         rsqrt(head_dim)) - m)) * V
//   O = acc * (1.0 / l)

#include "edges.cuh"
#include "math.cuh"
#include "tiles.cuh"
#include "types.cuh"
#include "warp.cuh"

constexpr int HEAD_DIM = 64, V_HEAD_DIM = 64;
constexpr float SCALE = 0.125f;  // rsqrt(head_dim)

// What all kernels are given; NAME_axis is the stride of NAME along an axis, in elements.
struct Params {
  const fp16* Q;  // [b, h, q, d]  q
  int64 Q_b, Q_h, Q_q, Q_d;
  const fp16* K;  // [b, hk, kv, d]  k
  int64 K_b, K_hk, K_kv, K_d;
  const fp16* V;  // [b, hk, kv, dv]  v
  int64 V_b, V_hk, V_kv, V_dv;
  fp16* O;  // [b, h, q, dv]  out
  int64 O_b, O_h, O_q;
  int batch, kv_heads, group, q_len, kv_len;
};

constexpr int BLOCK_Q = 128, BLOCK_KV = 64;  // rows of a block, columns of a tile
constexpr int THREADS = 256, LANES = 8;  // LANES of them share a row
constexpr int ROWS = BLOCK_Q * LANES / THREADS, COLUMNS = BLOCK_KV / LANES;  // of a tile, each thread's share
constexpr int FEATURES = 8;  // of a weighted sum, each thread's share
// where tiles lie in shared memory, in bytes
constexpr uint32 Q_AT = 0, K_AT = 34816, V_AT = 52224, W_AT = 69632;

// Where a block works, and what is the same for all of it.
struct Block {
  int b, hk, g, h, q_start, q_last;
  const fp16 *Q, *K, *V;
  fp16 *O;
};

// What a thread knows of one of its rows.
struct Row {
  int q;
  bool inside;
  float m = -INFINITY, l = 0.0f, acc[FEATURES] = {};
};

// What a thread reads of one of its columns of a tile.
struct Column {
  int n0;
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
  block.V = p.V + block.b * p.V_b + block.hk * p.V_hk;
  block.O = p.O + block.b * p.O_b + block.h * p.O_h;
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

// m = max(m, max_kv tanh(0.03333333333333333 * s * rsqrt(head_dim)))
// l = l * exp(30.0 * (m_old - m)) + sum_kv exp(30.0 * (tanh(0.03333333333333333 * s * rsqrt(head_dim)) - m))
// acc = acc * exp(30.0 * (m_old - m)) + sum_kv exp(30.0 * (tanh(0.03333333333333333 * s *
//     rsqrt(head_dim)) - m)) * V
template <bool MASKED>
__device__ __forceinline__ void update(const Params& p, Row (&rows)[ROWS], const Column (&columns)[COLUMNS],
    int kv_start, int lane, float (&s)[ROWS][COLUMNS], float (&weights)[ROWS][COLUMNS]) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    Row& row = rows[r];
    float x0[COLUMNS];
    bool counts[COLUMNS];
    const float m_old = row.m;
    UNROLL for (int c = 0; c < COLUMNS; ++c) {
      const int kv = kv_start + c * LANES + lane;
      const Column& column = columns[c];
      x0[c] = tanh_approx(s[r][c] * (SCALE * 0.033333335f));
      // q <= kv + q_len - kv_len + 1024 and kv <= q + kv_len - q_len
      counts[c] =
          !MASKED || (kv < p.kv_len && row.q + p.kv_len <= column.n0 && kv + p.q_len <= row.q + p.kv_len);
      if (counts[c]) row.m = maximum(row.m, x0[c]);
    }
    row.m = lane_max<LANES>(row.m);
    const Exponential power = Exponential(30.0f, finite_or_zero(row.m));
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

// O = acc * (1.0 / l)
__device__ __forceinline__ void finish(const Params& p, const Block& block, const Row (&rows)[ROWS],
    int lane) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    const Row& row = rows[r];
    if (!row.inside) continue;
    const float x3 = quotient(1.0f, row.l);
    UNROLL for (int f = 0; f < FEATURES; ++f) {
      const int dv = (f / 4 * LANES + lane) * 4 + f % 4;
      if (dv < V_HEAD_DIM) {
        block.O[row.q * p.O_q + dv] = from_float<fp16>(row.acc[f] * x3);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ Params p) {
  const Block block = this_block(p);
  const int row0 = threadIdx.x / LANES * ROWS, lane = threadIdx.x % LANES;
  Row rows[ROWS];
  UNROLL for (int r = 0; r < ROWS; ++r) {
    Row& row = rows[r];
    const int q = block.q_start + row0 + r;
    row.inside = q < p.q_len;  // one past the end repeats the last row and is not stored
    row.q = minimum(q, p.q_len - 1);
  }
  const Tile<BLOCK_Q, HEAD_DIM> Q(Q_AT);

  copy_tile<THREADS>(Q, block.q_start, p.q_len, HEAD_DIM, block.Q, p.Q_q, p.Q_d);
  const Tile<BLOCK_KV, HEAD_DIM> K(K_AT);
  const Tile<BLOCK_KV, V_HEAD_DIM> V(V_AT);
  const Tile<BLOCK_Q, BLOCK_KV> W(W_AT);
  // Tiles that may have an element with  q <= kv + q_len - kv_len + 1024 and kv <= q + kv_len - q_len
  const int kv_begin = maximum(block.q_start + p.kv_len - p.q_len - 1024, 0);
  const int kv_end = minimum(block.q_last + p.kv_len - p.q_len + 1, p.kv_len);
  for (int kv_start = kv_begin / BLOCK_KV * BLOCK_KV; kv_start < kv_end; kv_start += BLOCK_KV) {
    const int kv_last = minimum(kv_start + BLOCK_KV, p.kv_len) - 1;
    copy_tile<THREADS>(K, kv_start, p.kv_len, HEAD_DIM, block.K, p.K_kv, p.K_d);
    copy_tile<THREADS>(V, kv_start, p.kv_len, V_HEAD_DIM, block.V, p.V_kv, p.V_dv);
    __syncthreads();              // K and V are there
    float s[ROWS][COLUMNS] = {};  // s = sum_d Q K
    multiply(Q, K, s);
    Column columns[COLUMNS];
    UNROLL for (int c = 0; c < COLUMNS; ++c) {
      Column& column = columns[c];
      const int kv = kv_start + c * LANES + lane;
      column.n0 = kv + p.q_len + 1024;
    }
    const bool full = block.q_last + p.kv_len <= kv_start + p.q_len + 1024 &&
        kv_last + p.q_len <= block.q_start + p.kv_len && kv_start + BLOCK_KV <= p.kv_len;
    float weights[ROWS][COLUMNS];
    full ? update<false>(p, rows, columns, kv_start, lane, s, weights)
        : update<true>(p, rows, columns, kv_start, lane, s, weights);
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
