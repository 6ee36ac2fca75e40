// attention: backward, family sm80, head_dim 64, v_head_dim 64, bf16 fp32
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
// for each b, hk and BLOCK_KV rows kv (a block):
//   for each g:
//     for each BLOCK_Q columns q with some  kv <= q + kv_len - q_len:
//       s0 = sum_d K Q                                            [q,kv]
//       s1 = sum_dv V dO                                          [q,kv]
//       acc0 = acc0 + sum_q exp(s0 * rsqrt(head_dim) - stat) * (s1 - D) * Q
//       acc1 = acc1 + sum_q exp(s0 * rsqrt(head_dim) - stat) * dO
//       dQ_sum += sum_kv exp(s0 * rsqrt(head_dim) - stat) * (s1 - D) * K
//         (in memory, 0 at first; blocks add to it in no fixed order)
//   dK = acc0 * rsqrt(head_dim)
//   dV = acc1
//
// for each b, h and BLOCK_Q rows q (a block):
//   for each BLOCK_D columns d:
//     dQ = rsqrt(head_dim) * dQ_sum

#include "add.cuh"
#include "edges.cuh"
#include "math.cuh"
#include "tiles.cuh"
#include "types.cuh"
#include "warp.cuh"
#include "mbarrier.cuh"
#include "mma.cuh"
#include "operands.cuh"

constexpr int HEAD_DIM = 64, V_HEAD_DIM = 64;
constexpr float SCALE = 0.125f;     // rsqrt(head_dim)
constexpr float LOG2E = 1.442695f;  // exp(x) = 2^(x LOG2E)

// What all kernels are given; NAME_axis is the stride of NAME along an axis, in elements.
struct Params {
  const bf16* Q;  // [b, h, q, d]  q
  int64 Q_b, Q_h, Q_q;
  const bf16* K;  // [b, hk, kv, d]  k
  int64 K_b, K_hk, K_kv;
  const bf16* V;  // [b, hk, kv, dv]  v
  int64 V_b, V_hk, V_kv;
  const bf16* dO;  // [b, h, q, dv]  dout
  int64 dO_b, dO_h, dO_q;
  const bf16* O;  // [b, h, q, dv]  out
  int64 O_b, O_h, O_q;
  const fp32* stat;  // [b, h, q]  kept0
  int64 stat_b, stat_h, stat_q;
  fp32* D;  // [b, hk, g, q]
  int64 D_b, D_hk, D_g, D_q;
  fp32* dQ_sum;  // [b, hk, g, q / 16, d / 8, 128]
  int64 dQ_sum_b, dQ_sum_hk, dQ_sum_g;
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
  constexpr int BLOCK_Q = 16;  // rows of a block
  constexpr int LANES = 8;     // that share a row
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
  const int row = q_start + threadIdx.x / LANES;
  const bool inside = row < p.q_len;
  const int q = inside ? row : p.q_len - 1;  // past the end: once more the last, as all lanes join
  const int lane = threadIdx.x % LANES;

  float acc = 0.0f;
  for (int first = lane * 8; first < V_HEAD_DIM; first += LANES * 8) {
    const auto dO_part = load_vector<8>(&dO_at[q * p.dO_q + first]);
    const auto O_part = load_vector<8>(&O_at[q * p.O_q + first]);
    UNROLL for (int i = 0; i < 8; ++i) {
      acc += to_float(dO_part[i]) * to_float(O_part[i]);
    }
  }
  acc = lane_sum<LANES>(acc);
  if (inside && lane == 0) {
    D_at[q * p.D_q] = from_float<fp32>(acc);
  }
}

namespace backward_1_backward_loop_ {
  constexpr int BLOCK_KV = 64, BLOCK_Q = 32;  // rows of a block, columns of a tile
  constexpr int THREADS = 64, LANES = 4;      // LANES of them share a row
  // of a tile, each thread's share
  constexpr int ROWS = BLOCK_KV * LANES / THREADS, COLUMNS = BLOCK_Q / LANES;
  constexpr int FEATURES_DV = 16, FEATURES_D = 16;  // of a weighted sum, each thread's share
  // of a tile's part, each thread's share, and warps that have parts of the same rows
  constexpr int PART0_ROWS = 4, PART0_FEATURES = 8, PART0_WARPS = 2;
  // where tiles lie in shared memory, in bytes
  constexpr uint32 K_AT = 0, Q_AT = 16384, V_AT = 8192, DO_AT = 24576, WEIGHTS1_AT = 32768,
      COLUMNS_AT = 37888, BARRIERS_AT = 38400;

  // Where a block works, and what is the same for all of it.
  struct Block {
    int b, hk, g, h, kv_start, kv_last;
    const bf16 *K, *Q, *V, *dO;
    const fp32 *stat;
    fp32 *D, *dQ_sum;
    bf16 *dK, *dV;
  };

  // What a thread knows of one of its rows.
  struct Row {
    int kv;
    bool inside;
    float acc1[FEATURES_DV] = {}, acc0[FEATURES_D] = {};
  };

  // What a thread reads of one of its columns of a tile.
  struct Column {
    float x0, D;
  };

  // Where this block works; neighbours have tiles of rows that follow each other, and read the same columns.
  __device__ __forceinline__ Block this_block(const Params& p, int g) {
    Block block;
    int rest = again(blockIdx.x);
    const int tiles = (p.kv_len + BLOCK_KV - 1) / BLOCK_KV;
    block.kv_start = take(rest, tiles) * BLOCK_KV;
    block.hk = take(rest, p.kv_heads);
    block.b = take(rest, p.batch);
    block.g = g;
    block.h = block.hk * p.group + block.g;
    block.kv_last = minimum(block.kv_start + BLOCK_KV, p.kv_len) - 1;
    block.K = p.K + block.b * p.K_b + block.hk * p.K_hk;
    block.Q = p.Q + block.b * p.Q_b + block.h * p.Q_h;
    block.V = p.V + block.b * p.V_b + block.hk * p.V_hk;
    block.dO = p.dO + block.b * p.dO_b + block.h * p.dO_h;
    block.stat = p.stat + block.b * p.stat_b + block.h * p.stat_h;
    block.D = p.D + block.b * p.D_b + block.hk * p.D_hk + block.g * p.D_g;
    block.dQ_sum = p.dQ_sum + block.b * p.dQ_sum_b + block.hk * p.dQ_sum_hk + block.g * p.dQ_sum_g;
    block.dK = p.dK + block.b * p.dK_b + block.hk * p.dK_hk;
    block.dV = p.dV + block.b * p.dV_b + block.hk * p.dV_hk;
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

  // What is known of column c of a thread.
  __device__ __forceinline__ Column known_column(int turn, int lane, int c) {
    return Shared<Column, 2 * BLOCK_Q>(COLUMNS_AT)[turn * BLOCK_Q + c / 2 * 8 + lane * 2 + c % 2];
  }

  // acc1 = acc1 + sum_q exp(s0 * rsqrt(head_dim) - stat) * dO
  // What a mask asks of a row is computed here: nothing of it is kept in registers meanwhile.
  template <bool MASKED>
  __device__ __forceinline__ void update0(const Params& p, const Block& block, Row (&rows)[ROWS],
      int q_start, int row0, int lane, float (&s0)[ROWS][COLUMNS], float (&weights0)[ROWS][COLUMNS],
      int turn) {
    if (MASKED) row0 = again(row0);
    UNROLL for (int c = 0; c < COLUMNS; ++c) {
      const int q = q_start + c / 2 * 8 + lane * 2 + c % 2;
      const Column& column = known_column(turn, lane, c);
      UNROLL for (int r = 0; r < ROWS; ++r) {
        Row& row = rows[r];
        if (MASKED) {
          const int kv = block.kv_start + row0 + 8 * r;
          row.inside = kv < p.kv_len;  // one past the end repeats the last row and is not stored
          row.kv = minimum(kv, p.kv_len - 1);
        }
        const bool counts = !MASKED || (row.inside && q < p.q_len && row.kv + p.q_len <= q + p.kv_len);
        weights0[r][c] = counts ? exp2_approx(s0[r][c] * (SCALE * LOG2E) - column.x0) : 0.0f;
      }
    }
  }

  // acc0 = acc0 + sum_q exp(s0 * rsqrt(head_dim) - stat) * (s1 - D) * Q
  // dQ_sum += sum_kv exp(s0 * rsqrt(head_dim) - stat) * (s1 - D) * K
  __device__ __forceinline__ void update1(int lane, float (&s1)[ROWS][COLUMNS],
      float (&weights0)[ROWS][COLUMNS], float (&weights1)[ROWS][COLUMNS], int turn) {
    UNROLL for (int c = 0; c < COLUMNS; ++c) {
      const Column& column = known_column(turn, lane, c);
      UNROLL for (int r = 0; r < ROWS; ++r) {
        const float x0 = weights0[r][c] * (s1[r][c] - column.D);
        weights1[r][c] = x0;
      }
    }
  }

  // acc1[f] += weights * dO over the columns of a tile
  template <class Operand>
  __device__ __forceinline__ void add_to_acc1(const float (&weights)[ROWS][COLUMNS], const Operand& operand,
      Row (&rows)[ROWS]) {
    UNROLL for (int c = 0; c < COLUMNS; c += 4) {
      Left<bf16> a[ROWS / 2];
      UNROLL for (int r = 0; r < ROWS; r += 2) a[r / 2] = left_from<bf16>(weights[r], weights[r + 1], c);
      UNROLL for (int f = 0; f < FEATURES_DV; f += 4) {
        const auto b = load_right(operand, 4 * c, 4 * f);
        UNROLL for (int r = 0; r < ROWS; r += 2) multiply_add(rows[r].acc1, rows[r + 1].acc1, f, a[r / 2], b);
      }
    }
  }

  // acc0[f] += weights * Q over the columns of a tile
  template <class Operand>
  __device__ __forceinline__ void add_to_acc0(const float (&weights)[ROWS][COLUMNS], const Operand& operand,
      Row (&rows)[ROWS]) {
    UNROLL for (int c = 0; c < COLUMNS; c += 4) {
      Left<bf16> a[ROWS / 2];
      UNROLL for (int r = 0; r < ROWS; r += 2) a[r / 2] = left_from<bf16>(weights[r], weights[r + 1], c);
      UNROLL for (int f = 0; f < FEATURES_D; f += 4) {
        const auto b = load_right(operand, 4 * c, 4 * f);
        UNROLL for (int r = 0; r < ROWS; r += 2) multiply_add(rows[r].acc0, rows[r + 1].acc0, f, a[r / 2], b);
      }
    }
  }

  // weights to where other warps read them, rounded
  template <class Tile>
  __device__ __forceinline__ void pass_weights(const float (&weights)[ROWS][COLUMNS], const Tile& tile,
      int row0, int lane) {
    UNROLL for (int r = 0; r < ROWS; ++r) {
      UNROLL for (int c = 0; c < COLUMNS; c += 2)
          store_pair(tile, row0 + 8 * r, c / 2 * 8 + lane * 2 + c % 2, weights[r][c], weights[r][c + 1]);
    }
  }

  // part0 = a tile's part of  dQ_sum += sum_kv exp(s0 * rsqrt(head_dim) - stat) * (s1 - D) * K
  template <class Weights, class Operand>
  __device__ __forceinline__ void multiply_part0(const Weights& weights, const Operand& operand,
      float (&part0)[PART0_ROWS][PART0_FEATURES]) {
    const int row = threadIdx.x / 32 / PART0_WARPS * (8 * PART0_ROWS),
        feature = threadIdx.x / 32 % PART0_WARPS * (4 * PART0_FEATURES);
    UNROLL for (int i = 0; i < Weights::ROWS; i += 16) {
      Left<typename Weights::Element> a[PART0_ROWS / 2];
      UNROLL for (int r = 0; r < PART0_ROWS; r += 2) a[r / 2] = load_left_transposed(weights, i, row + 8 * r);
      UNROLL for (int f = 0; f < PART0_FEATURES; f += 4) {
        const auto b = load_right(operand, i, feature + 4 * f);
        UNROLL for (int r = 0; r < PART0_ROWS; r += 2) multiply_add(part0[r], part0[r + 1], f, a[r / 2], b);
      }
    }
  }

  // rows r and r + 1 of it to memory
  template <bool MASKED>
  __device__ __forceinline__ void add_part0(const Block& block, const Params& p,
      const float (&part0)[PART0_ROWS][PART0_FEATURES], int r, int q_start) {
    const int row = threadIdx.x / 32 / PART0_WARPS * (8 * PART0_ROWS),
        feature = threadIdx.x / 32 % PART0_WARPS * (4 * PART0_FEATURES);
    const int q = q_start + row + 8 * r;
    const bool inside = !MASKED || q < p.q_len;
    fp32* to = &block.dQ_sum[piece_at(q, 1024, feature, 128)];
    UNROLL for (int f = 0; f < PART0_FEATURES; f += 2)
        add_piece(inside, to + f / 2 * 128, part0[r], part0[r + 1], f);
  }

  // dK = acc0 * rsqrt(head_dim)
  // dV = acc1
  // Where the block works is computed again: nothing of it is kept in registers meanwhile.
  __device__ __forceinline__ void finish(const Params& p, const Block& block, Row (&rows)[ROWS], int row0,
      int lane) {
    UNROLL for (int r = 0; r < ROWS; ++r) {
      Row& row = rows[r];
      const int kv = block.kv_start + row0 + 8 * r;
      row.inside = kv < p.kv_len;  // one past the end repeats the last row and is not stored
      row.kv = minimum(kv, p.kv_len - 1);
      UNROLL for (int first = 0; first < FEATURES_D; first += 8) {
        float dK_eight[8];
        UNROLL for (int f = first; f < first + 8; ++f) {
          dK_eight[f % 8] = row.acc0[f] * SCALE;
        }
        const int d = (first / 2 + lane) * 8;
        store_eight(&block.dK[row.kv * p.dK_kv + d], dK_eight, row.inside && d < HEAD_DIM);
      }
      UNROLL for (int first = 0; first < FEATURES_DV; first += 8) {
        float dV_eight[8];
        UNROLL for (int f = first; f < first + 8; ++f) {
          dV_eight[f % 8] = row.acc1[f];
        }
        const int dv = (first / 2 + lane) * 8;
        store_eight(&block.dV[row.kv * p.dV_kv + dv], dV_eight, row.inside && dv < V_HEAD_DIM);
      }
    }
  }

  extern "C" __global__ void __launch_bounds__(THREADS,
      3) backward_1_backward_loop(const __grid_constant__ Params p) {
    Block block = this_block(p, 0);
    const int row0 = threadIdx.x / 32 * (8 * ROWS) + threadIdx.x % 32 / LANES, lane = threadIdx.x % LANES;
    Row rows[ROWS];
    const OperandTile<bf16, BLOCK_KV, HEAD_DIM> K(K_AT);
    const OperandTile<bf16, BLOCK_KV, V_HEAD_DIM> V(V_AT);

    copy_operand<THREADS, HEAD_DIM>(K, block.kv_start, p.kv_len, block.K, p.K_kv);
    copy_operand<THREADS, V_HEAD_DIM>(V, block.kv_start, p.kv_len, block.V, p.V_kv);
    const OperandTile<bf16, BLOCK_KV, BLOCK_Q> weights1_tile(WEIGHTS1_AT);
    const Shared<Column, 2 * BLOCK_Q> staged(COLUMNS_AT);
    // a phase each tile, of parity turn: the next tile is there, this one is read, its weights are there
    const Barrier tile_there(BARRIERS_AT);
    const Barrier tile_read(BARRIERS_AT + 8);
    const Barrier weights1_there(BARRIERS_AT + 16);
    if (threadIdx.x == 0) {
      init(tile_there, THREADS / 32);
      init(tile_read, THREADS / 32);
      init(weights1_there, THREADS / 32);
      publish_barriers();
    }
    int turn = 0;  // of the two buffers, that of this tile
    for (int g = 0; g < p.group; ++g) {
      block = this_block(p, g);
      __syncthreads();  // all have read the tiles of the walk before
      // Tiles that may have an element with  kv <= q + kv_len - q_len
      const int q_begin = maximum(block.kv_start + p.q_len - p.kv_len, 0);
      const int q_end = p.q_len;
      const auto set_out = [&](int q_start, int turn, int length) {
        const auto Q = buffer<OperandTile<bf16, BLOCK_Q, HEAD_DIM>>(Q_AT, turn);
        copy_operand<THREADS, HEAD_DIM>(Q, q_start, length, block.Q, p.Q_q);
        const auto dO = buffer<OperandTile<bf16, BLOCK_Q, V_HEAD_DIM>>(DO_AT, turn);
        copy_operand<THREADS, V_HEAD_DIM>(dO, q_start, length, block.dO, p.dO_q);
        copy_async_commit();
      };
      const auto read_column = [&](int q_start) {
        Column column;
        const int q = q_start + threadIdx.x % BLOCK_Q;
        column.x0 =
            maximum(finite_or_zero(block.stat[minimum(q, p.q_len - 1) * p.stat_q]) * LOG2E, -3.4028235e+38f);
        column.D = block.D[minimum(q, p.q_len - 1) * p.D_q];
        return column;
      };
      const auto is_full = [&](int q_start) {
        return block.kv_last + p.q_len <= q_start + p.kv_len && q_start + BLOCK_Q <= p.q_len &&
            block.kv_start + BLOCK_KV <= p.kv_len;
      };
      const auto visit = [&](int q_start, auto masked) {
        const int next = q_start + BLOCK_Q;
        wait(tile_there, 1 - turn);  // Q and dO are there
        const auto Q = buffer<OperandTile<bf16, BLOCK_Q, HEAD_DIM>>(Q_AT, turn);
        const auto dO = buffer<OperandTile<bf16, BLOCK_Q, V_HEAD_DIM>>(DO_AT, turn);
        float s0[ROWS][COLUMNS] = {};  // s0 = sum_d K Q
        multiply(K, Q, s0);
        wait(tile_read, 1 - turn);  // all have read the tile before
        set_out(next, 1 - turn, next < q_end ? p.q_len : next);
        const Column coming = read_column(next);
        float weights0[ROWS][COLUMNS];
        update0<masked.value>(p, block, rows, q_start, row0, lane, s0, weights0, turn);
        float s1[ROWS][COLUMNS] = {};  // s1 = sum_dv V dO
        multiply(V, dO, s1);
        add_to_acc1(weights0, dO, rows);
        float weights1[ROWS][COLUMNS];
        update1(lane, s1, weights0, weights1, turn);
        pass_weights(weights1, weights1_tile, row0, lane);
        arrive_by_warp(weights1_there);
        add_to_acc0(weights1, Q, rows);
        wait(weights1_there, turn);
        float part0[PART0_ROWS][PART0_FEATURES] = {};
        multiply_part0(weights1_tile, K, part0);
        copy_async_wait<0>();  // of the next tile, what this thread copies
        if (threadIdx.x < BLOCK_Q) staged[(1 - turn) * BLOCK_Q + threadIdx.x] = coming;
        arrive_by_warp(tile_there);
        UNROLL for (int r = 0; r < PART0_ROWS; r += 2) add_part0<masked.value>(block, p, part0, r, q_start);
        arrive_by_warp(tile_read);
        turn = 1 - turn;
        return next;
      };
      int q_start = q_begin / BLOCK_Q * BLOCK_Q;
      if (q_start < q_end) {
        set_out(q_start, turn, p.q_len);
        if (threadIdx.x < BLOCK_Q) staged[turn * BLOCK_Q + threadIdx.x] = read_column(q_start);
        copy_async_wait<0>();
        __syncthreads();  // Q and dO are there
      }
      while (q_start < q_end) {
        while (q_start < q_end && !is_full(q_start)) q_start = visit(q_start, Known<true>());
        while (q_start < q_end && is_full(q_start)) q_start = visit(q_start, Known<false>());
      }
    }

    finish(p, this_block(p, 0), rows, row0, lane);
  }
}
using backward_1_backward_loop_::backward_1_backward_loop;

// dQ = rsqrt(head_dim) * dQ_sum
extern "C" __global__ void __launch_bounds__(256) backward_2_rowwise(const __grid_constant__ Params p) {
  constexpr int BLOCK_Q = 16;  // rows of a block
  constexpr int LANES = 16;    // that share a row
  int rest = blockIdx.x;
  const int q_tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q;
  const int q_start = take(rest, q_tiles) * BLOCK_Q;
  const int g = take(rest, p.group);
  const int hk = take(rest, p.kv_heads);
  const int b = rest;
  const int h = hk * p.group + g;
  fp32* dQ_sum_at = p.dQ_sum + b * p.dQ_sum_b + hk * p.dQ_sum_hk + g * p.dQ_sum_g;
  bf16* dQ_at = p.dQ + b * p.dQ_b + h * p.dQ_h;
  const int q = q_start + threadIdx.x / LANES;
  if (q >= p.q_len) return;
  const int lane = threadIdx.x % LANES;

  for (int first = lane * 4; first < HEAD_DIM; first += LANES * 4) {
    const auto dQ_sum_part = load_pairs<4>(&dQ_sum_at[piece_at(q, 1024, first, 128)]);
    Vec<bf16, 4> dQ_part;
    UNROLL for (int i = 0; i < 4; ++i) {
      dQ_part[i] = from_float<bf16>(SCALE * dQ_sum_part[i]);
    }
    store_vector(&dQ_at[q * p.dQ_q + first], dQ_part);
  }
}
