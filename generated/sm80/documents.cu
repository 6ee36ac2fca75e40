// attention: forward, family sm80, head_dim 64, v_head_dim 64, fp16 int32
// emitted by fagen 0.1.0
//
// b batch, h query head, hk key head, q query, kv key, d feature, dv feature of a value
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_KV columns kv with some  captured[b, kv] == captured[b, q] and kv <= q:
//     s = sum_d Q K                                             [q,kv]
//     m = max(m, max_kv s)                                      [q]
//     l = l * exp((m_old - m) * rsqrt(head_dim)) + sum_kv exp((s - m) * rsqrt(head_dim))
//     acc = acc * exp((m_old - m) * rsqrt(head_dim)) + sum_kv exp((s - m) * rsqrt(head_dim)) * V
//   O = acc * (1.0 / l)

#include "edges.cuh"
#include "math.cuh"
#include "sets.cuh"
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
  const int32* table0;  // [b, i0]  captured
  int64 table0_b, table0_i0;
  fp16* O;  // [b, h, q, dv]  out
  int64 O_b, O_h, O_q;
  int table0_i0_size, batch, kv_heads, group, i0_len, q_len, kv_len;
};

constexpr int BLOCK_Q = 128, BLOCK_KV = 128;  // rows of a block, columns of a tile
constexpr int THREADS = 128, LANES = 4;  // LANES of them share a row
constexpr int ROWS = BLOCK_Q * LANES / THREADS, COLUMNS = BLOCK_KV / LANES;  // of a tile, each thread's share
constexpr int FEATURES = 16;  // of a weighted sum, each thread's share
constexpr uint32 Q_AT = 0, K_AT = 16384, V_AT = 32768;  // where tiles lie in shared memory, in bytes

// Where a block works, and what is the same for all of it.
struct Block {
  int b, hk, g, h, q_start, q_last;
  const fp16 *Q, *K, *V;
  const int32 *table0;
  fp16 *O;
};

// What a thread knows of one of its rows.
struct Row {
  int q, kv_begin, kv_end, table0;
  bool inside;
  float m = -INFINITY, l = 0.0f, acc[FEATURES] = {};
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
  block.table0 = p.table0 + block.b * p.table0_b;
  block.V = p.V + block.b * p.V_b + block.hk * p.V_hk;
  block.O = p.O + block.b * p.O_b + block.h * p.O_h;
  return block;
}

// sums[r][c] += (row r of one tile) * (row c of the other); a fragment of the other serves all rows of a warp
template <int FIRST, int LAST, class Own, class Walk>
__device__ __forceinline__ void multiply(const Own& own, const Walk& walk, float (&sums)[ROWS][COLUMNS]) {
  const auto rows = from_row<BLOCK_Q / 2 + 16>(own, threadIdx.x / 32 * 16);
  UNROLL for (int i = 0; i < Own::WIDTH; i += 16) {
    Left<typename Own::Element> a[ROWS / 2];
    UNROLL for (int r = FIRST; r < LAST; r += 2) a[r / 2] = load_left(rows, BLOCK_Q / 4 * r, i);
    UNROLL for (int c = 0; c < COLUMNS; c += 4) {
      const auto b = load_right_transposed(walk, 4 * c, i);
      UNROLL for (int r = FIRST; r < LAST; r += 2) multiply_add(sums[r], sums[r + 1], c, a[r / 2], b);
    }
  }
}

// captured[b, kv] == captured[b, q] and kv <= q
template <int FIRST, int LAST>
__device__ __forceinline__ void mask(const Columns& mine, int kv_start, int lane, float (&s)[ROWS][COLUMNS]) {
  UNROLL for (int r = FIRST; r < LAST; ++r) {
    const int first = kv_start + lane * 2;
    // column c: bit c
    const auto counts = columns_before<COLUMNS>(__shfl_sync(FULL_WARP, mine.end, r, LANES) - first) &
        ~columns_before<COLUMNS>(__shfl_sync(FULL_WARP, mine.begin, r, LANES) - first);
    UNROLL for (int c = 0; c < COLUMNS; ++c) {
      if (!(counts >> c & 1)) s[r][c] = -INFINITY;
    }
  }
}

// m = max(m, max_kv s)
// l = l * exp((m_old - m) * rsqrt(head_dim)) + sum_kv exp((s - m) * rsqrt(head_dim))
// acc = acc * exp((m_old - m) * rsqrt(head_dim)) + sum_kv exp((s - m) * rsqrt(head_dim)) * V
template <int FIRST, int LAST>
__device__ __forceinline__ void update(Row (&rows)[ROWS], float (&s)[ROWS][COLUMNS],
    float (&weights)[ROWS][COLUMNS]) {
  UNROLL for (int r = FIRST; r < LAST; ++r) {
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
template <int FIRST, int LAST, class Operand>
__device__ __forceinline__ void add_to_acc(const float (&weights)[ROWS][COLUMNS], const Operand& operand,
    Row (&rows)[ROWS]) {
  UNROLL for (int c = 0; c < COLUMNS; c += 4) {
    Left<fp16> a[ROWS / 2];
    UNROLL for (int r = FIRST; r < LAST; r += 2) a[r / 2] = left_from<fp16>(weights[r], weights[r + 1], c);
    UNROLL for (int f = 0; f < FEATURES; f += 4) {
      const auto b = load_right(operand, 4 * c, 4 * f);
      UNROLL for (int r = FIRST; r < LAST; r += 2) multiply_add(rows[r].acc, rows[r + 1].acc, f, a[r / 2], b);
    }
  }
}

// O = acc * (1.0 / l)
// Where the block works is computed again: nothing of it is kept in registers meanwhile.
__device__ __forceinline__ void finish(const Params& p, const Block& block, Row (&rows)[ROWS], int row0,
    int lane) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    Row& row = rows[r];
    const int q = block.q_start + row0 + 8 * (r % 2) + BLOCK_Q / 2 * (r / 2);
    row.inside = q < p.q_len;  // one past the end repeats the last row and is not stored
    row.q = minimum(q, p.q_len - 1);
    if (!row.inside) continue;
    const float x2 = quotient(1.0f, row.l);
    UNROLL for (int first = 0; first < FEATURES; first += 2) {
      float O_pair[2];
      UNROLL for (int f = first; f < first + 2; ++f) {
        O_pair[f % 2] = row.acc[f] * x2;
      }
      const int dv = first / 2 * 8 + lane * 2 + first % 2;
      if (dv < V_HEAD_DIM) store_pair(&block.O[row.q * p.O_q + dv], O_pair);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ Params p) {
  const Block block = this_block(p);
  const int row0 = threadIdx.x / 32 * 16 + threadIdx.x % 32 / LANES, lane = threadIdx.x % LANES;
  Row rows[ROWS];
  UNROLL for (int r = 0; r < ROWS; ++r) {
    Row& row = rows[r];
    const int q = block.q_start + row0 + 8 * (r % 2) + BLOCK_Q / 2 * (r / 2);
    row.inside = q < p.q_len;  // one past the end repeats the last row and is not stored
    row.q = minimum(q, p.q_len - 1);
  }
  const OperandTile<fp16, BLOCK_Q, HEAD_DIM> Q(Q_AT);

  copy_operand<THREADS, HEAD_DIM>(Q, block.q_start, p.q_len, block.Q, p.Q_q);
  const OperandTile<fp16, BLOCK_KV, HEAD_DIM> K(K_AT);
  const OperandTile<fp16, BLOCK_KV, V_HEAD_DIM> V(V_AT);
  // Tiles that may have an element with  captured[b, kv] == captured[b, q] and kv <= q
  const int table0_value = block.table0[clamp_index(block.q_last, p.table0_i0_size) * p.table0_i0];
  const int table0_value_0 = block.table0[clamp_index(block.q_start, p.table0_i0_size) * p.table0_i0];
  const Places<2> found = partition_points(Places<2>{p.i0_len, p.i0_len},
      [&](int i) { return block.table0[i * p.table0_i0] <= table0_value; },
      [&](int i) { return block.table0[i * p.table0_i0] < table0_value_0; });
  const Places<2> found_0 = table0_value == table0_value_0 ? Places<2>{found[1], found[0]}
      : partition_points(Places<2>{p.i0_len, p.i0_len},
      [&](int i) { return block.table0[i * p.table0_i0] < table0_value; },
      [&](int i) { return block.table0[i * p.table0_i0] <= table0_value_0; });
  const int kv_begin = found[1];
  const int kv_end = found[1] != p.i0_len
      ? minimum(minimum(found[0] == p.i0_len ? p.kv_len : found[0], block.q_last + 1), p.kv_len) : 0;
  int kv_start = kv_begin / BLOCK_KV * BLOCK_KV;
  copy_operand<THREADS, HEAD_DIM>(K, kv_start, kv_start < kv_end ? p.kv_len : kv_start, block.K, p.K_kv);
  copy_async_commit();
  // Of the lanes that share rows each knows which columns count in one of these rows, and a warp which
  // may in sixteen.
  Columns mine;
  {
    Row row;
    const int q = block.q_start + row0 + 8 * ((lane % ROWS) % 2) + BLOCK_Q / 2 * ((lane % ROWS) / 2);
    row.inside = q < p.q_len;  // one past the end repeats the last row and is not stored
    row.q = minimum(q, p.q_len - 1);
    row.table0 = block.table0[clamp_index(row.q, p.table0_i0_size) * p.table0_i0];
    row.kv_begin = place_between(found[1], found_0[0],
        [&](int i) { return block.table0[i * p.table0_i0] < row.table0; }, p.i0_len, p.kv_len);
    row.kv_end = place_between(found_0[1], found[0],
        [&](int i) { return block.table0[i * p.table0_i0] <= row.table0; }, p.i0_len, p.kv_len);
    mine = {row.kv_begin, minimum(minimum(p.kv_len, row.kv_end), row.q + 1)};
  }
  const Reach upper(mine, lane % ROWS < ROWS / 2), lower(mine, lane % ROWS >= ROWS / 2);
  while (kv_start < kv_end) {
    const int next = kv_start + BLOCK_KV;
    copy_async_wait<0>();
    __syncthreads();  // K is there, and all have read V
    copy_operand<THREADS, V_HEAD_DIM>(V, kv_start, p.kv_len, block.V, p.V_kv);
    copy_async_commit();
    const bool in_upper = upper.some(kv_start, next), in_lower = lower.some(kv_start, next);
    float s[ROWS][COLUMNS] = {};  // s = sum_d Q K
    by_sets<ROWS>(in_upper, in_lower, [&](auto set) {
      multiply<set.FIRST, set.LAST>(Q, K, s);
    });
    copy_async_wait<0>();
    __syncthreads();  // V is there, and all have read K
    copy_operand<THREADS, HEAD_DIM>(K, next, next < kv_end ? p.kv_len : next, block.K, p.K_kv);
    copy_async_commit();
    float weights[ROWS][COLUMNS];
    const bool whole_upper = upper.all(kv_start, next), whole_lower = lower.all(kv_start, next);
    by_sets<ROWS>(in_upper, in_lower, [&](auto set) {
      if (set.FIRST == 0 && !whole_upper) mask<0, ROWS / 2>(mine, kv_start, lane, s);
      if (set.LAST == ROWS && !whole_lower) mask<ROWS / 2, ROWS>(mine, kv_start, lane, s);
      update<set.FIRST, set.LAST>(rows, s, weights);
      add_to_acc<set.FIRST, set.LAST>(weights, V, rows);
    });
    kv_start = next;
  }
  copy_async_wait<0>();  // zeros were still on their way
  UNROLL for (int r = 0; r < ROWS; ++r) rows[r].l = lane_sum<LANES>(rows[r].l);

  finish(p, this_block(p), rows, row0, lane);
}
