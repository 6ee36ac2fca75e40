// attention: forward, family sm80, head_dim 128, v_head_dim 128, group 4, bf16
// emitted by fagen 0.1.0
//
// b batch, h query head, hk key head, q query, kv key, d feature, dv feature of a value
//
// for each b, hk, part and BLOCK_Q rows q of all g (a block):
//   for each BLOCK_KV columns kv with some  kv <= q + kv_len - q_len, in turn with each other part:
//     s = sum_d Q K                                             [g,q,kv]
//     m = max(m, max_kv s)                                      [g,q]
//     l = l * exp((m_old - m) * rsqrt(head_dim)) + sum_kv exp((s - m) * rsqrt(head_dim))
//     acc = acc * exp((m_old - m) * rsqrt(head_dim)) + sum_kv exp((s - m) * rsqrt(head_dim)) * V
//   m_parts = m * rsqrt(head_dim)
//   l_parts = l
//   acc_parts = acc
//
// for each b, h, q and BLOCK_DV rows dv (a block):
//   for each BLOCK_PART columns part:
//     m = max(m, max_part m_parts)
//     l = l * exp(m_old - m) + sum_part exp(m_parts - m) * l_parts
//     acc = acc * exp(m_old - m) + sum_part exp(m_parts - m) * acc_parts
//   O = acc * (1.0 / l)

#include "edges.cuh"
#include "math.cuh"
#include "tiles.cuh"
#include "types.cuh"
#include "warp.cuh"
#include "mma.cuh"
#include "operands.cuh"

constexpr int HEAD_DIM = 128, V_HEAD_DIM = 128, GROUP = 4;
constexpr float SCALE = 0.088388346f;  // rsqrt(head_dim)
constexpr float LOG2E = 1.442695f;     // exp(x) = 2^(x LOG2E)

// What all kernels are given; NAME_axis is the stride of NAME along an axis, in elements.
struct Params {
  const bf16* Q;  // [b, h, q, d]  q
  int64 Q_b, Q_h, Q_q, Q_d;
  const bf16* K;  // [b, hk, kv, d]  k
  int64 K_b, K_hk, K_kv;
  const bf16* V;  // [b, hk, kv, dv]  v
  int64 V_b, V_hk, V_kv;
  fp32* m_parts;  // [b, hk, g, part, q]
  int64 m_parts_b, m_parts_hk, m_parts_g, m_parts_part, m_parts_q;
  fp32* l_parts;  // [b, hk, g, part, q]
  int64 l_parts_b, l_parts_hk, l_parts_g, l_parts_part, l_parts_q;
  fp32* acc_parts;  // [b, hk, g, part, q, dv]
  int64 acc_parts_b, acc_parts_hk, acc_parts_g, acc_parts_part, acc_parts_q, acc_parts_dv;
  bf16* O;  // [b, h, q, dv]  out
  int64 O_b, O_h, O_q;
  int batch, kv_heads, parts, q_len, kv_len;
};

namespace forward_0_loop_ {
  // rows of a block, columns of a tile
  constexpr int BLOCK_ROWS = 16, BLOCK_Q = BLOCK_ROWS / GROUP, BLOCK_KV = 32;
  constexpr int THREADS = 32, LANES = 4;  // LANES of them share a row
  // of a tile, each thread's share
  constexpr int ROWS = BLOCK_ROWS * LANES / THREADS, COLUMNS = BLOCK_KV / LANES;
  constexpr int FEATURES = 32;                           // of a weighted sum, each thread's share
  constexpr uint32 Q_AT = 0, K_AT = 4096, V_AT = 12288;  // where tiles lie in shared memory, in bytes

  // Where a block works, and what is the same for all of it.
  struct Block {
    int b, hk, part, q_start, q_last;
    const bf16 *Q, *K, *V;
    fp32 *m_parts, *l_parts, *acc_parts;
  };

  // What a thread knows of one of its rows.
  struct Row {
    int q, g, n0;
    bool inside;
    float m = -INFINITY, l = 0.0f, acc[FEATURES] = {};
  };

  // Where this block works; the last rows come first, they have most to do where a mask grows with the row.
  __device__ __forceinline__ Block this_block(const Params& p) {
    Block block;
    int rest = again(blockIdx.x);
    block.part = uniform(take(rest, p.parts));
    block.hk = uniform(take(rest, p.kv_heads));
    block.b = uniform(take(rest, p.batch));
    const int tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q;
    block.q_start = uniform(tiles - 1 - rest) * BLOCK_Q;
    block.q_last = minimum(block.q_start + BLOCK_Q, p.q_len) - 1;
    block.Q = p.Q + block.b * p.Q_b;
    block.K = p.K + block.b * p.K_b + block.hk * p.K_hk;
    block.V = p.V + block.b * p.V_b + block.hk * p.V_hk;
    block.m_parts = p.m_parts + block.b * p.m_parts_b + block.hk * p.m_parts_hk + block.part * p.m_parts_part;
    block.l_parts = p.l_parts + block.b * p.l_parts_b + block.hk * p.l_parts_hk + block.part * p.l_parts_part;
    block.acc_parts =
        p.acc_parts + block.b * p.acc_parts_b + block.hk * p.acc_parts_hk + block.part * p.acc_parts_part;
    return block;
  }

  // sums[r][c] += (row r of one tile) * (row c of the other); a fragment of the other serves all rows of
  //     a warp
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
      const int q = block.q_start + (row0 + 8 * r) / GROUP;
      row.inside = q < p.q_len;  // one past the end repeats the last position and is not stored
      row.q = minimum(q, p.q_len - 1);
      row.g = (row0 + 8 * r) % GROUP;
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
      Left<bf16> a[ROWS / 2];
      UNROLL for (int r = 0; r < ROWS; r += 2) a[r / 2] = left_from<bf16>(weights[r], weights[r + 1], c);
      UNROLL for (int f = 0; f < FEATURES; f += 4) {
        const auto b = load_right(operand, 4 * c, 4 * f);
        UNROLL for (int r = 0; r < ROWS; r += 2) multiply_add(rows[r].acc, rows[r + 1].acc, f, a[r / 2], b);
      }
    }
  }

  // m_parts = m * rsqrt(head_dim)
  // l_parts = l
  // acc_parts = acc
  // Where the block works is computed again: nothing of it is kept in registers meanwhile.
  __device__ __forceinline__ void finish(const Params& p, const Block& block, Row (&rows)[ROWS], int row0,
      int lane) {
    UNROLL for (int r = 0; r < ROWS; ++r) {
      Row& row = rows[r];
      const int q = block.q_start + (row0 + 8 * r) / GROUP;
      row.inside = q < p.q_len;  // one past the end repeats the last position and is not stored
      row.q = minimum(q, p.q_len - 1);
      row.g = (row0 + 8 * r) % GROUP;
      if (!row.inside) continue;
      if (lane == 0) {
        block.m_parts[row.g * p.m_parts_g + row.q * p.m_parts_q] = from_float<fp32>(row.m * SCALE);
        block.l_parts[row.g * p.l_parts_g + row.q * p.l_parts_q] = from_float<fp32>(row.l);
      }
      UNROLL for (int f = 0; f < FEATURES; ++f) {
        const int dv = f / 2 * 8 + lane * 2 + f % 2;
        if (dv < V_HEAD_DIM) {
          block.acc_parts[row.g * p.acc_parts_g + row.q * p.acc_parts_q + dv * p.acc_parts_dv] =
              from_float<fp32>(row.acc[f]);
        }
      }
    }
  }

  extern "C" __global__ void __launch_bounds__(THREADS, 7) forward_0_loop(const __grid_constant__ Params p) {
    const Block block = this_block(p);
    const int row0 = threadIdx.x / 32 * (8 * ROWS) + threadIdx.x % 32 / LANES, lane = threadIdx.x % LANES;
    Row rows[ROWS];
    UNROLL for (int r = 0; r < ROWS; ++r) {
      Row& row = rows[r];
      const int q = block.q_start + (row0 + 8 * r) / GROUP;
      row.inside = q < p.q_len;  // one past the end repeats the last position and is not stored
      row.q = minimum(q, p.q_len - 1);
      row.g = (row0 + 8 * r) % GROUP;
    }
    const OperandTile<bf16, BLOCK_ROWS, HEAD_DIM> Q(Q_AT);

    const OperandTile<bf16, BLOCK_KV, HEAD_DIM> K(K_AT);
    const OperandTile<bf16, BLOCK_KV, V_HEAD_DIM> V(V_AT);
    // Tiles that may have an element with  kv <= q + kv_len - q_len
    const int kv_end = minimum(block.q_last + p.kv_len - p.q_len + 1, p.kv_len);
    const auto is_full = [&](int kv_start) {
      const int kv_last = minimum(kv_start + BLOCK_KV, p.kv_len) - 1;
      return kv_last + p.q_len <= block.q_start + p.kv_len && kv_start + BLOCK_KV <= p.kv_len;
    };
    const auto visit = [&](int kv_start, auto masked) {
      const int next = kv_start + p.parts * BLOCK_KV;
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
      if (masked.value) mask(p, block, rows, kv_start, row0, lane, s);
      update(rows, s, weights);
      add_to_acc(weights, V, rows);
      return next;
    };
    int kv_start = block.part * BLOCK_KV;
    copy_operand<THREADS, HEAD_DIM>(K, kv_start, kv_start < kv_end ? p.kv_len : kv_start, block.K, p.K_kv);
    fill_operand<THREADS, HEAD_DIM>(Q, 0, minimum(BLOCK_Q, p.q_len - block.q_start) * GROUP,
        [&](int i, int d) {
        return to_float(block.Q[(block.hk * GROUP + i % GROUP) * p.Q_h +
        (block.q_start + i / GROUP) * p.Q_q + d * p.Q_d]); });
    copy_async_commit();
    while (kv_start < kv_end) {
      while (kv_start < kv_end && !is_full(kv_start)) kv_start = visit(kv_start, Known<true>());
      while (kv_start < kv_end && is_full(kv_start)) kv_start = visit(kv_start, Known<false>());
    }
    copy_async_wait<0>();  // zeros were still on their way
    UNROLL for (int r = 0; r < ROWS; ++r) rows[r].l = lane_sum<LANES>(rows[r].l);

    finish(p, this_block(p), rows, row0, lane);
  }
}
using forward_0_loop_::forward_0_loop;

// m = max_part m_parts
// l = sum_part exp(m_parts - m) * l_parts
// acc = sum_part exp(m_parts - m) * acc_parts
// O = acc * (1.0 / l)
extern "C" __global__ void __launch_bounds__(128) forward_1_rowwise(const __grid_constant__ Params p) {
  constexpr int BLOCK_DV = 8;  // rows of a block
  constexpr int LANES = 16;    // that share a row
  int rest = blockIdx.x;
  const int dv_tiles = (V_HEAD_DIM + BLOCK_DV - 1) / BLOCK_DV;
  const int dv_start = take(rest, dv_tiles) * BLOCK_DV;
  const int q = take(rest, p.q_len);
  const int g = take(rest, GROUP);
  const int hk = take(rest, p.kv_heads);
  const int b = rest;
  const int h = hk * GROUP + g;
  fp32* m_parts_at = p.m_parts + b * p.m_parts_b + hk * p.m_parts_hk + g * p.m_parts_g + q * p.m_parts_q;
  fp32* l_parts_at = p.l_parts + b * p.l_parts_b + hk * p.l_parts_hk + g * p.l_parts_g + q * p.l_parts_q;
  fp32* acc_parts_at =
      p.acc_parts + b * p.acc_parts_b + hk * p.acc_parts_hk + g * p.acc_parts_g + q * p.acc_parts_q;
  bf16* O_at = p.O + b * p.O_b + h * p.O_h + q * p.O_q;
  const int row = dv_start + threadIdx.x / LANES;
  const bool inside = row < V_HEAD_DIM;
  const int dv = inside ? row : V_HEAD_DIM - 1;  // past the end: once more the last, as all lanes join
  const int lane = threadIdx.x % LANES;

  fp32* acc_parts_at_0 = acc_parts_at + dv * p.acc_parts_dv;
  float m = -INFINITY;
  float l = 0.0f;
  float acc = 0.0f;
  for (int part = lane; part < p.parts; part += LANES) {
    const float m_parts_value = m_parts_at[part * p.m_parts_part];
    const float l_parts_value = l_parts_at[part * p.l_parts_part];
    const float m_old = m;
    m = maximum(m, m_parts_value);
    const float x0 = finite_or_zero(m);
    const float x1 = exp2_approx((m_parts_value - x0) * LOG2E);
    const float x2 = exp2_approx((m_old - x0) * LOG2E);
    l = l * x2 + x1 * l_parts_value;
    acc = acc * x2 + x1 * acc_parts_at_0[part * p.acc_parts_part];
  }
  const float m_old = m;
  m = lane_max<LANES>(m);
  const float x3 = exp2_approx((m_old - finite_or_zero(m)) * LOG2E);
  l = lane_sum<LANES>(l * x3);
  acc = lane_sum<LANES>(acc * x3);
  if (inside && lane == 0) {
    O_at[dv] = from_float<bf16>(acc * quotient(1.0f, l));
  }
}
