// attention: forward, family sm80, head_dim 128, v_head_dim 128, bf16
// emitted by fagen 0.1.0
//
// b batch, h query head, hk key head, q query, kv key, d feature, dv feature of a value
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_KV columns kv with some  kv <= q + kv_len - q_len:
//     s = sum_d Q K                                             [q,kv]
//     m = max(m, max_kv s)                                      [q]
//     l = l * exp((m_old - m) * rsqrt(head_dim)) + sum_kv exp((s - m) * rsqrt(head_dim))
//     acc = acc * exp((m_old - m) * rsqrt(head_dim)) + sum_kv exp((s - m) * rsqrt(head_dim)) * V
//   O = acc * (1.0 / l)
//   stat = m * rsqrt(head_dim) + log(l)

#include "edges.cuh"
#include "math.cuh"
#include "tiles.cuh"
#include "types.cuh"
#include "warp.cuh"
#include "mma.cuh"
#include "operands.cuh"

constexpr int HEAD_DIM = 128, V_HEAD_DIM = 128;
constexpr float SCALE = 0.088388346f;  // rsqrt(head_dim)

// What all kernels are given; NAME_axis is the stride of NAME along an axis, in elements.
struct Params {
  const bf16* Q;  // [b, h, q, d]  q
  int64 Q_b, Q_h, Q_q;
  const bf16* K;  // [b, hk, kv, d]  k
  int64 K_b, K_hk, K_kv;
  const bf16* V;  // [b, hk, kv, dv]  v
  int64 V_b, V_hk, V_kv;
  bf16* O;  // [b, h, q, dv]  out
  int64 O_b, O_h, O_q;
  fp32* stat;  // [b, h, q]  lse
  int64 stat_b, stat_h;
  int batch, kv_heads, group, q_len, kv_len;
};

constexpr int BLOCK_Q = 128, BLOCK_KV = 64;  // rows of a block, columns of a tile
constexpr int THREADS = 128, LANES = 4;  // LANES of them share a row
constexpr int ROWS = BLOCK_Q * LANES / THREADS, COLUMNS = BLOCK_KV / LANES;  // of a tile, each thread's share
constexpr int FEATURES = 32;  // of a weighted sum, each thread's share
constexpr float SLACK = 5.5f;  // a free maximum may be exceeded by so much
constexpr uint32 Q_AT = 0, K_AT = 32768, V_AT = 49152;  // where tiles lie in shared memory, in bytes

// Where a block works, and what is the same for all of it.
struct Block {
  int b, hk, g, h, q_start, q_last;
  const bf16 *Q, *K, *V;
  bf16 *O;
  fp32 *stat;
};

// What a thread knows of one of its rows.
struct Row {
  int q, n0;
  bool inside;
  float m = -INFINITY, l = 0.0f, acc[FEATURES] = {};
};

// Where this block works. As many heads as the L2 cache holds come together, of these the last rows first:
// they have most to do where a mask grows with the row.
__device__ __forceinline__ Block this_block(const Params& p) {
  Block block;
  const int tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q;
  constexpr int HELD = 40960;  // columns whose operands take half of the L2 cache
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
  block.stat = p.stat + block.b * p.stat_b + block.h * p.stat_h;
  return block;
}

// sums[r][c] += (row r of one tile) * (row c of the other); a fragment of the other serves all rows of a warp
template <class Own, class Walk>
__device__ __forceinline__ void multiply(const Own& own, const Walk& walk, float (&sums)[ROWS][COLUMNS]) {
  const auto rows = from_row<8 * ROWS>(own, threadIdx.x / 32 * (8 * ROWS));
  UNROLL for (int i = 0; i < Own::WIDTH; i += 16) {
    Left<typename Own::Element> a[ROWS / 2];
    UNROLL for (int r = 0; r < ROWS; r += 2) a[r / 2] = load_left(rows, 8 * r, i);
    UNROLL for (int c = 0; c < COLUMNS; c += 4) {
      const auto b = load_right_transposed(walk, 4 * c, i);
      UNROLL for (int r = 0; r < ROWS; r += 2) multiply_add(sums[r], sums[r + 1], c, a[r / 2], b);
    }
  }
}

// kv <= q + kv_len - q_len
// What that asks of a row is computed here: nothing of it is kept in registers meanwhile.
__device__ __forceinline__ void mask(const Params& p, const Block& block, Row (&rows)[ROWS], int kv_start,
    int row0, int lane, float (&s)[ROWS][COLUMNS]) {
  row0 = again(row0);
  UNROLL for (int r = 0; r < ROWS; ++r) {
    Row& row = rows[r];
    const int q = block.q_start + row0 + 8 * r;
    row.inside = q < p.q_len;  // one past the end repeats the last row and is not stored
    row.q = minimum(q, p.q_len - 1);
    row.n0 = row.q + p.kv_len - p.q_len + 1;
    const int first = kv_start + lane * 2;
    const auto counts = columns_before<COLUMNS>(minimum(p.kv_len, row.n0) - first);  // column c: bit c
    UNROLL for (int c = 0; c < COLUMNS; ++c) {
      if (!(counts >> c & 1)) s[r][c] = -INFINITY;
    }
  }
}

// m = max(m, max_kv s)
// l = l * exp((m_old - m) * rsqrt(head_dim)) + sum_kv exp((s - m) * rsqrt(head_dim))
// acc = acc * exp((m_old - m) * rsqrt(head_dim)) + sum_kv exp((s - m) * rsqrt(head_dim)) * V
__device__ __forceinline__ void update(Row (&rows)[ROWS], float (&s)[ROWS][COLUMNS],
    float (&weights)[ROWS][COLUMNS]) {
  float acc_rescale[ROWS];
  bool moved = false;  // a maximum, and what was measured from it
  UNROLL for (int r = 0; r < ROWS; ++r) {
    Row& row = rows[r];
    const float m_old = row.m;
    row.m = maximum(row.m, largest(s[r]));
    row.m = lane_max<LANES>(row.m);
    if ((row.m - m_old) * SCALE <= SLACK) row.m = m_old;  // the sums stay, too
    const Exponential power = Exponential(SCALE, finite_or_zero(row.m));
    const float x1 = power(m_old);
    acc_rescale[r] = row.m == m_old ? 1.0f : x1;
    moved |= acc_rescale[r] != 1.0f;
  }
  if (__any_sync(FULL_WARP, moved)) {
    UNROLL for (int r = 0; r < ROWS; ++r) {
      rows[r].l *= acc_rescale[r];
      UNROLL for (int f = 0; f < FEATURES; ++f) rows[r].acc[f] *= acc_rescale[r];
    }
  }
  UNROLL for (int r = 0; r < ROWS; ++r) {
    Row& row = rows[r];
    const Exponential power = Exponential(SCALE, finite_or_zero(row.m));
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
    Left<bf16> a[ROWS / 2];
    UNROLL for (int r = 0; r < ROWS; r += 2) a[r / 2] = left_from<bf16>(weights[r], weights[r + 1], c);
    UNROLL for (int f = 0; f < FEATURES; f += 4) {
      const auto b = load_right(operand, 4 * c, 4 * f);
      UNROLL for (int r = 0; r < ROWS; r += 2) multiply_add(rows[r].acc, rows[r + 1].acc, f, a[r / 2], b);
    }
  }
}

// stat = m * rsqrt(head_dim) + log(l)
// O = acc * (1.0 / l)
// Where the block works is computed again: nothing of it is kept in registers meanwhile.
__device__ __forceinline__ void finish(const Params& p, const Block& block, Row (&rows)[ROWS], int row0,
    int lane) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    Row& row = rows[r];
    const int q = block.q_start + row0 + 8 * r;
    row.inside = q < p.q_len;  // one past the end repeats the last row and is not stored
    row.q = minimum(q, p.q_len - 1);
    const float x2 = quotient(1.0f, row.l);
    if (row.inside && lane == 0) {
      block.stat[row.q] = from_float<fp32>(row.m * SCALE + logf(row.l));
    }
    UNROLL for (int first = 0; first < FEATURES; first += 8) {
      float O_eight[8];
      UNROLL for (int f = first; f < first + 8; ++f) {
        O_eight[f % 8] = row.acc[f] * x2;
      }
      const int dv = (first / 2 + lane) * 8;
      store_eight(&block.O[row.q * p.O_q + dv], O_eight, row.inside && dv < V_HEAD_DIM);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ Params p) {
  const Block block = this_block(p);
  const int row0 = threadIdx.x / 32 * (8 * ROWS) + threadIdx.x % 32 / LANES, lane = threadIdx.x % LANES;
  Row rows[ROWS];
  UNROLL for (int r = 0; r < ROWS; ++r) {
    Row& row = rows[r];
    const int q = block.q_start + row0 + 8 * r;
    row.inside = q < p.q_len;  // one past the end repeats the last row and is not stored
    row.q = minimum(q, p.q_len - 1);
  }
  const OperandTile<bf16, BLOCK_Q, HEAD_DIM> Q(Q_AT);

  copy_operand<THREADS, HEAD_DIM>(Q, block.q_start, p.q_len, block.Q, p.Q_q);
  const OperandTile<bf16, BLOCK_KV, HEAD_DIM> K(K_AT);
  const OperandTile<bf16, BLOCK_KV, V_HEAD_DIM> V(V_AT);
  // Tiles that may have an element with  kv <= q + kv_len - q_len
  const int kv_end = minimum(block.q_last + p.kv_len - p.q_len + 1, p.kv_len);
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
    if (!(kv_last + p.q_len <= block.q_start + p.kv_len && kv_start + BLOCK_KV <= p.kv_len)) mask(p, block,
        rows, kv_start, row0, lane, s);
    update(rows, s, weights);
    add_to_acc(weights, V, rows);
    kv_start = next;
  }
  copy_async_wait<0>();  // zeros were still on their way
  UNROLL for (int r = 0; r < ROWS; ++r) rows[r].l = lane_sum<LANES>(rows[r].l);

  finish(p, this_block(p), rows, row0, lane);
}
