// above_a_threshold: forward, family sm80, head_dim 64, v_head_dim 64, fp16
// emitted by fagen 0.1.0
//
// b batch, h query head, hk key head, q query, kv key, d feature, dv feature of a value
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_KV columns kv with some  kv <= q:
//     s = sum_d Q K                                             [q,kv]
//     m = max(m, max_kv s)                                      [q]
//     l = l * exp((m_old - m) * rsqrt(head_dim)) + sum_kv exp((s - m) * rsqrt(head_dim))
//   for each BLOCK_KV columns kv with some  kv <= q:
//     s = sum_d Q K                                             [q,kv]
//     acc = acc + sum_kv maximum(exp((s - m) * rsqrt(head_dim)) / l - 0.01, 0.0) * V
//   O = acc

#include "edges.cuh"
#include "math.cuh"
#include "tiles.cuh"
#include "types.cuh"
#include "warp.cuh"
#include "mma.cuh"
#include "operands.cuh"

constexpr int HEAD_DIM = 64, V_HEAD_DIM = 64;
constexpr float SCALE = 0.125f;  // rsqrt(head_dim)

// What all kernels are given; NAME_axis is the stride of NAME along an axis, in elements.
struct Params {
  const fp16* Q;  // [b, h, q, d]  q
  int64 Q_b, Q_h, Q_q;
  const fp16* K;  // [b, hk, kv, d]  k
  int64 K_b, K_hk, K_kv;
  const fp16* V;  // [b, hk, kv, dv]  v
  int64 V_b, V_hk, V_kv;
  fp16* O;  // [b, h, q, dv]  out
  int64 O_b, O_h, O_q;
  int batch, kv_heads, group, q_len, kv_len;
};

constexpr int BLOCK_Q = 128, BLOCK_KV = 64;  // rows of a block, columns of a tile
constexpr int THREADS = 128, LANES = 4;  // LANES of them share a row
constexpr int ROWS = BLOCK_Q * LANES / THREADS, COLUMNS = BLOCK_KV / LANES;  // of a tile, each thread's share
constexpr int FEATURES = 16;  // of a weighted sum, each thread's share
constexpr uint32 Q_AT = 0, K_AT = 16384, V_AT = 24576;  // where tiles lie in shared memory, in bytes

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
  Exponential power;
  float x0, m = -INFINITY, l = 0.0f, acc[FEATURES] = {};
};

// Where this block works. As many heads as the L2 cache holds come together, of these the last rows first:
// they have most to do where a mask grows with the row.
__device__ __forceinline__ Block this_block(const Params& p) {
  Block block;
  const int tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q;
  constexpr int HELD = 81920;  // columns whose operands take half of the L2 cache
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

// kv <= q
__device__ __forceinline__ void mask0(const Params& p, Row (&rows)[ROWS], int kv_start, int lane,
    float (&s)[ROWS][COLUMNS]) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    const Row& row = rows[r];
    const int first = kv_start + lane * 2;
    const auto counts = columns_before<COLUMNS>(minimum(p.kv_len, row.q + 1) - first);  // column c: bit c
    UNROLL for (int c = 0; c < COLUMNS; ++c) {
      if (!(counts >> c & 1)) s[r][c] = -INFINITY;
    }
  }
}

// m = max(m, max_kv s)
// l = l * exp((m_old - m) * rsqrt(head_dim)) + sum_kv exp((s - m) * rsqrt(head_dim))
__device__ __forceinline__ void update0(Row (&rows)[ROWS], float (&s)[ROWS][COLUMNS]) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    Row& row = rows[r];
    const float m_old = row.m;
    row.m = maximum(row.m, largest(s[r]));
    row.m = lane_max<LANES>(row.m);
    const Exponential power = Exponential(SCALE, finite_or_zero(row.m));
    row.l *= power(m_old);
    UNROLL for (int c = 0; c < COLUMNS; ++c) {
      row.l += power(s[r][c]);
    }
  }
}

// acc = acc + sum_kv maximum(exp((s - m) * rsqrt(head_dim)) / l - 0.01, 0.0) * V
template <bool MASKED>
__device__ __forceinline__ void update1(const Params& p, Row (&rows)[ROWS], int kv_start, int lane,
    float (&s)[ROWS][COLUMNS], float (&weights)[ROWS][COLUMNS]) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    Row& row = rows[r];
    bool counts[COLUMNS];
    UNROLL for (int c = 0; c < COLUMNS; ++c) {
      const int kv = kv_start + c / 2 * 8 + lane * 2 + c % 2;
      // kv <= q
      counts[c] = !MASKED || (kv < p.kv_len && kv <= row.q);
      weights[r][c] = counts[c] ? maximum(row.power(s[r][c]) * row.x0 - 0.01f, 0.0f) : 0.0f;
    }
  }
}

// acc[f] += weights * V over the columns of a tile
template <class Operand>
__device__ __forceinline__ void add_to_acc(const float (&weights)[ROWS][COLUMNS], const Operand& operand,
    Row (&rows)[ROWS]) {
  UNROLL for (int c = 0; c < COLUMNS; c += 4) {
    Left<fp32> a[ROWS / 2];
    UNROLL for (int r = 0; r < ROWS; r += 2) a[r / 2] = left_from<fp32>(weights[r], weights[r + 1], c);
    UNROLL for (int f = 0; f < FEATURES; f += 4) {
      const auto b = load_right(operand, 4 * c, 4 * f);
      UNROLL for (int r = 0; r < ROWS; r += 2) multiply_add(rows[r].acc, rows[r + 1].acc, f, a[r / 2], b);
    }
  }
}

// O = acc
// Where the block works is computed again: nothing of it is kept in registers meanwhile.
__device__ __forceinline__ void finish(const Params& p, const Block& block, Row (&rows)[ROWS], int row0,
    int lane) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    Row& row = rows[r];
    const int q = block.q_start + row0 + 8 * r;
    row.inside = q < p.q_len;  // one past the end repeats the last row and is not stored
    row.q = minimum(q, p.q_len - 1);
    if (!row.inside) continue;
    UNROLL for (int first = 0; first < FEATURES; first += 2) {
      float O_pair[2];
      UNROLL for (int f = first; f < first + 2; ++f) {
        O_pair[f % 2] = row.acc[f];
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
  const OperandTile<fp16, BLOCK_Q, HEAD_DIM> Q(Q_AT);

  copy_operand<THREADS, HEAD_DIM>(Q, block.q_start, p.q_len, block.Q, p.Q_q);

  // Walk 1
  {
    const OperandTile<fp16, BLOCK_KV, HEAD_DIM> K(K_AT);
    // Tiles that may have an element with  kv <= q
    const int kv_end = minimum(block.q_last + 1, p.kv_len);
    int kv_start = 0;
    if (kv_start < kv_end) {
      copy_operand<THREADS, HEAD_DIM>(K, kv_start, p.kv_len, block.K, p.K_kv);
    }
    copy_async_commit();
    while (kv_start < kv_end) {
      const int next = kv_start + BLOCK_KV;
      copy_async_wait<0>();
      __syncthreads();              // K is there
      float s[ROWS][COLUMNS] = {};  // s = sum_d Q K
      multiply(Q, K, s);
      __syncthreads();  // all have read K
      if (next < kv_end) {
        copy_operand<THREADS, HEAD_DIM>(K, next, p.kv_len, block.K, p.K_kv);
      }
      copy_async_commit();
      const int kv_last = minimum(kv_start + BLOCK_KV, p.kv_len) - 1;
      if (!(kv_last <= block.q_start && kv_start + BLOCK_KV <= p.kv_len)) mask0(p, rows, kv_start, lane, s);
      update0(rows, s);
      kv_start = next;
    }
    UNROLL for (int r = 0; r < ROWS; ++r) rows[r].l = lane_sum<LANES>(rows[r].l);
  }

  // Walk 2
  {
    UNROLL for (int r = 0; r < ROWS; ++r) {
      Row& row = rows[r];
      row.power = Exponential(SCALE, finite_or_zero(row.m));
      row.x0 = quotient(1.0f, row.l);
    }
    const OperandTile<fp16, BLOCK_KV, HEAD_DIM> K_walk1_0(K_AT);
    const OperandTile<fp16, BLOCK_KV, V_HEAD_DIM> V(V_AT);
    // Tiles that may have an element with  kv <= q
    const int kv_end = minimum(block.q_last + 1, p.kv_len);
    const auto is_full = [&](int kv_start) {
      const int kv_last = minimum(kv_start + BLOCK_KV, p.kv_len) - 1;
      return kv_last <= block.q_start && kv_start + BLOCK_KV <= p.kv_len;
    };
    const auto visit = [&](int kv_start, auto masked) {
      const int next = kv_start + BLOCK_KV;
      copy_async_wait<0>();
      __syncthreads();  // K_walk1_0 is there, and all have read V
      copy_operand<THREADS, V_HEAD_DIM>(V, kv_start, p.kv_len, block.V, p.V_kv);
      copy_async_commit();
      float s[ROWS][COLUMNS] = {};  // s = sum_d Q K
      multiply(Q, K_walk1_0, s);
      copy_async_wait<0>();
      __syncthreads();  // V is there, and all have read K_walk1_0
      if (next < kv_end) {
        copy_operand<THREADS, HEAD_DIM>(K_walk1_0, next, p.kv_len, block.K, p.K_kv);
      }
      copy_async_commit();
      float weights[ROWS][COLUMNS];
      update1<masked.value>(p, rows, kv_start, lane, s, weights);
      add_to_acc(weights, V, rows);
      return next;
    };
    int kv_start = 0;
    if (kv_start < kv_end) {
      copy_operand<THREADS, HEAD_DIM>(K_walk1_0, kv_start, p.kv_len, block.K, p.K_kv);
    }
    copy_async_commit();
    while (kv_start < kv_end) {
      while (kv_start < kv_end && !is_full(kv_start)) kv_start = visit(kv_start, Known<true>());
      while (kv_start < kv_end && is_full(kv_start)) kv_start = visit(kv_start, Known<false>());
    }
  }

  finish(p, this_block(p), rows, row0, lane);
}
