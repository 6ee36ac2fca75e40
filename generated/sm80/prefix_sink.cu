// attention: forward, family sm80, head_dim 72, v_head_dim 40, fp16
// emitted by fagen 0.1.0
//
// b batch, h query head, hk key head, q query, kv key, d feature, dv feature of a value
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_KV columns kv with some  kv <= q or kv < 256:
//     s = sum_d Q K                                             [q,kv]
//     m = max(m, max_kv s)                                      [q]
//     l = l * exp((m_old - m) * rsqrt(head_dim)) + sum_kv exp((s - m) * rsqrt(head_dim))
//     acc = acc * exp((m_old - m) * rsqrt(head_dim)) + sum_kv exp((s - m) * rsqrt(head_dim)) * V
//   O = 1.0 / (l * exp(0.5 * (m * rsqrt(head_dim) - maximum(m * rsqrt(head_dim), sink))) * exp(0.5 * (m *
//       rsqrt(head_dim) - maximum(m * rsqrt(head_dim), sink))) + exp(sink - maximum(m * rsqrt(head_dim),
//       sink))) * acc * exp(0.5 * (m * rsqrt(head_dim) - maximum(m * rsqrt(head_dim), sink))) * exp(0.5 * (m
//       * rsqrt(head_dim) - maximum(m * rsqrt(head_dim), sink)))
//   stat = log(l * exp(0.5 * (m * rsqrt(head_dim) - maximum(m * rsqrt(head_dim), sink))) * exp(0.5 * (m *
//       rsqrt(head_dim) - maximum(m * rsqrt(head_dim), sink))) + exp(sink - maximum(m * rsqrt(head_dim),
//       sink))) + maximum(m * rsqrt(head_dim), sink)

#include "edges.cuh"
#include "math.cuh"
#include "tiles.cuh"
#include "types.cuh"
#include "warp.cuh"
#include "mma.cuh"
#include "operands.cuh"

constexpr int HEAD_DIM = 72, V_HEAD_DIM = 40;
constexpr float SCALE = 0.11785113f;  // rsqrt(head_dim)

// What all kernels are given; NAME_axis is the stride of NAME along an axis, in elements.
struct Params {
  const fp16* Q;  // [b, h, q, d]  q
  int64 Q_b, Q_h, Q_q;
  const fp16* K;  // [b, hk, kv, d]  k
  int64 K_b, K_hk, K_kv;
  const fp16* V;  // [b, hk, kv, dv]  v
  int64 V_b, V_hk, V_kv;
  const fp16* table0;  // [h]  sink
  int64 table0_h;
  fp16* O;  // [b, h, q, dv]  out
  int64 O_b, O_h, O_q;
  fp32* stat;  // [b, h, q]  lse
  int64 stat_b, stat_h;
  int batch, kv_heads, group, q_len, kv_len;
};

constexpr int BLOCK_Q = 128, BLOCK_KV = 64;  // rows of a block, columns of a tile
constexpr int THREADS = 128, LANES = 4;  // LANES of them share a row
constexpr int ROWS = BLOCK_Q * LANES / THREADS, COLUMNS = BLOCK_KV / LANES;  // of a tile, each thread's share
constexpr int FEATURES = 12;  // of a weighted sum, each thread's share
constexpr int WIDTH_D = 80, WIDTH_DV = 48;  // columns of a tile in shared memory
constexpr uint32 Q_AT = 0, K_AT = 22528, V_AT = 33792;  // where tiles lie in shared memory, in bytes

// Where a block works, and what is the same for all of it.
struct Block {
  int b, hk, g, h, q_start, q_last;
  const fp16 *Q, *K, *V;
  fp16 *O;
  float table0;
  fp32 *stat;
};

// What a thread knows of one of its rows.
struct Row {
  int q;
  bool inside;
  float m = -INFINITY, l = 0.0f, acc[FEATURES] = {};
};

// Where this block works. As many heads as the L2 cache holds come together, of these the last rows first:
// they have most to do where a mask grows with the row.
__device__ __forceinline__ Block this_block(const Params& p) {
  Block block;
  const int tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q;
  constexpr int HELD = 93622;  // columns whose operands take half of the L2 cache
  const int heads = p.batch * p.kv_heads;
  const int together = minimum(maximum(HELD / maximum(p.kv_len, 1), 1), heads);
  int set = heads * tiles * p.group - 1 - again(blockIdx.x);  // a set that is not full comes first
  int rest = take(set, together * tiles * p.group);
  block.g = uniform(take(rest, p.group));
  const int first_head = set * together;
  int head = first_head + take(rest, minimum(together, heads - first_head));
  block.hk = uniform(take(head, p.kv_heads));
  block.b = uniform(head);
  block.h = block.hk * p.group + block.g;
  block.q_start = uniform(rest) * BLOCK_Q;
  block.q_last = minimum(block.q_start + BLOCK_Q, p.q_len) - 1;
  block.Q = p.Q + block.b * p.Q_b + block.h * p.Q_h;
  block.K = p.K + block.b * p.K_b + block.hk * p.K_hk;
  block.V = p.V + block.b * p.V_b + block.hk * p.V_hk;
  block.O = p.O + block.b * p.O_b + block.h * p.O_h;
  block.table0 = to_float(p.table0[block.h * p.table0_h]);
  block.stat = p.stat + block.b * p.stat_b + block.h * p.stat_h;
  return block;
}

// sums[r][c] += (row r of one tile) * (row c of the other); a fragment of the other serves all rows of a warp
template <class Own, class Walk>
__device__ __forceinline__ void multiply(const Own& own, const Walk& walk, float (&sums)[ROWS][COLUMNS]) {
  const int row = threadIdx.x / 32 * (8 * ROWS);
  UNROLL for (int i = 0; i < Own::WIDTH; i += 16) {
    Left<typename Own::Element> a[ROWS / 2];
    UNROLL for (int r = 0; r < ROWS; r += 2) a[r / 2] = load_left(own, row + 8 * r, i);
    UNROLL for (int c = 0; c < COLUMNS; c += 4) {
      const auto b = load_right_transposed(walk, 4 * c, i);
      UNROLL for (int r = 0; r < ROWS; r += 2) multiply_add(sums[r], sums[r + 1], c, a[r / 2], b);
    }
  }
}

// kv <= q or kv < 256
__device__ __forceinline__ void mask(const Params& p, Row (&rows)[ROWS], int kv_start, int lane,
    float (&s)[ROWS][COLUMNS]) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    const Row& row = rows[r];
    const int first = kv_start + lane * 2;
    const auto counts = columns_before<COLUMNS>(p.kv_len - first);  // column c: bit c
    UNROLL for (int c = 0; c < COLUMNS; ++c) {
      const int kv = kv_start + c / 2 * 8 + lane * 2 + c % 2;
      if (!(counts >> c & 1 && (kv <= row.q || kv <= 255))) s[r][c] = -INFINITY;
    }
  }
}

// m = max(m, max_kv s)
// l = l * exp((m_old - m) * rsqrt(head_dim)) + sum_kv exp((s - m) * rsqrt(head_dim))
// acc = acc * exp((m_old - m) * rsqrt(head_dim)) + sum_kv exp((s - m) * rsqrt(head_dim)) * V
__device__ __forceinline__ void update(Row (&rows)[ROWS], float (&s)[ROWS][COLUMNS],
    float (&weights)[ROWS][COLUMNS]) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    Row& row = rows[r];
    const float m_old = row.m;
    row.m = maximum(row.m, largest(s[r]));
    row.m = lane_max<LANES>(row.m);
    const Exponential power = Exponential(SCALE, finite_or_zero(row.m));
    const float x1 = power(m_old);
    row.l *= x1;
    UNROLL for (int f = 0; f < FEATURES; ++f) row.acc[f] *= x1;
    UNROLL for (int c = 0; c < COLUMNS; ++c) {
      const float x0 = power(s[r][c]);
      weights[r][c] = x0;
    }
    row.l += total(weights[r]);
  }
}

// acc[f] += weights * V over the columns of a tile
template <class Operand>
__device__ __forceinline__ void add_to_acc(const float (&weights)[ROWS][COLUMNS], const Operand& operand,
    Row (&rows)[ROWS]) {
  UNROLL for (int c = 0; c < COLUMNS; c += 4) {
    Left<fp16> a[ROWS / 2];
    UNROLL for (int r = 0; r < ROWS; r += 2) a[r / 2] = left_from<fp16>(weights[r], weights[r + 1], c);
    UNROLL for (int f = 0; f < FEATURES; f += 4) {
      const auto b = load_right(operand, 4 * c, 4 * f);
      UNROLL for (int r = 0; r < ROWS; r += 2) multiply_add(rows[r].acc, rows[r + 1].acc, f, a[r / 2], b);
    }
  }
}

// stat = log(l * exp(0.5 * (m * rsqrt(head_dim) - maximum(m * rsqrt(head_dim), sink))) * exp(0.5 * (m *
//     rsqrt(head_dim) - maximum(m * rsqrt(head_dim), sink))) + exp(sink - maximum(m * rsqrt(head_dim),
//     sink))) + maximum(m * rsqrt(head_dim), sink)
// O = 1.0 / (l * exp(0.5 * (m * rsqrt(head_dim) - maximum(m * rsqrt(head_dim), sink))) * exp(0.5 * (m *
//     rsqrt(head_dim) - maximum(m * rsqrt(head_dim), sink))) + exp(sink - maximum(m * rsqrt(head_dim),
//     sink))) * acc * exp(0.5 * (m * rsqrt(head_dim) - maximum(m * rsqrt(head_dim), sink))) * exp(0.5 * (m *
//     rsqrt(head_dim) - maximum(m * rsqrt(head_dim), sink)))
// Where the block works is computed again: nothing of it is kept in registers meanwhile.
__device__ __forceinline__ void finish(const Params& p, const Block& block, Row (&rows)[ROWS], int row0,
    int lane) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    Row& row = rows[r];
    const int q = block.q_start + row0 + 8 * r;
    row.inside = q < p.q_len;  // one past the end repeats the last row and is not stored
    row.q = minimum(q, p.q_len - 1);
    if (!row.inside) continue;
    const float x2 = finite_or_zero(maximum(row.m * SCALE, block.table0));
    const float x3 = Exponential(0.5f, x2)(row.m * SCALE);
    const float x4 = quotient(1.0f, row.l * x3 * x3 + Exponential(1.0f, x2)(block.table0));
    const float x5 = maximum(row.m * SCALE, block.table0);
    const float x6 = finite_or_zero(x5);
    const float x7 = Exponential(0.5f, x6)(row.m * SCALE);
    if (lane == 0) {
      block.stat[row.q] = from_float<fp32>(logf(row.l * x7 * x7 + Exponential(1.0f, x6)(block.table0)) + x5);
    }
    UNROLL for (int first = 0; first < FEATURES; first += 2) {
      float O_pair[2];
      UNROLL for (int f = first; f < first + 2; ++f) {
        O_pair[f % 2] = x4 * row.acc[f] * x3 * x3;
      }
      const int dv = first / 2 * 8 + lane * 2 + first % 2;
      if (dv < V_HEAD_DIM) store_pair(&block.O[row.q * p.O_q + dv], O_pair);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) forward(const __grid_constant__ Params p) {
  const Block block = this_block(p);
  const int row0 = threadIdx.x / 32 * (8 * ROWS) + threadIdx.x % 32 / LANES, lane = threadIdx.x % LANES;
  Row rows[ROWS];
  UNROLL for (int r = 0; r < ROWS; ++r) {
    Row& row = rows[r];
    const int q = block.q_start + row0 + 8 * r;
    row.inside = q < p.q_len;  // one past the end repeats the last row and is not stored
    row.q = minimum(q, p.q_len - 1);
  }
  const OperandTile<fp16, BLOCK_Q, WIDTH_D> Q(Q_AT);

  copy_operand<THREADS, HEAD_DIM>(Q, block.q_start, p.q_len, block.Q, p.Q_q);
  const OperandTile<fp16, BLOCK_KV, WIDTH_D> K(K_AT);
  const OperandTile<fp16, BLOCK_KV, WIDTH_DV> V(V_AT);
  // Tiles that may have an element with  kv <= q or kv < 256
  const int kv_end = minimum(maximum(block.q_last + 1, 256), p.kv_len);
  int kv_start = 0;
  copy_operand<THREADS, HEAD_DIM>(K, kv_start, kv_start < kv_end ? p.kv_len : kv_start, block.K, p.K_kv);
  copy_async_commit();
  while (kv_start < kv_end) {
    const int next = kv_start + BLOCK_KV;
    copy_async_wait<0>();
    __syncthreads();  // K is there, and all have read V
    copy_operand<THREADS, V_HEAD_DIM>(V, kv_start, p.kv_len, block.V, p.V_kv);
    copy_async_commit();
    float s[ROWS][COLUMNS] = {};  // s = sum_d Q K
    multiply(Q, K, s);
    copy_async_wait<0>();
    __syncthreads();  // V is there, and all have read K
    copy_operand<THREADS, HEAD_DIM>(K, next, next < kv_end ? p.kv_len : next, block.K, p.K_kv);
    copy_async_commit();
    float weights[ROWS][COLUMNS];
    const int kv_last = minimum(kv_start + BLOCK_KV, p.kv_len) - 1;
    if (!((kv_last <= 255 || kv_last <= block.q_start) && kv_start + BLOCK_KV <= p.kv_len)) mask(p, rows,
        kv_start, lane, s);
    update(rows, s, weights);
    add_to_acc(weights, V, rows);
    kv_start = next;
  }
  copy_async_wait<0>();  // zeros were still on their way
  UNROLL for (int r = 0; r < ROWS; ++r) rows[r].l = lane_sum<LANES>(rows[r].l);

  finish(p, this_block(p), rows, row0, lane);
}
