// attention: backward, family sm90, head_dim 128, v_head_dim 128, bf16 fp32
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

#include "edges.cuh"
#include "math.cuh"
#include "parts.cuh"
#include "tiles.cuh"
#include "types.cuh"
#include "warp.cuh"
#include "atomic.cuh"
#include "mbarrier.cuh"
#include "operands.cuh"
#include "quad.cuh"
#include "roles.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int HEAD_DIM = 128, V_HEAD_DIM = 128;
constexpr float SCALE = 0.088388346f;  // rsqrt(head_dim)
constexpr float LOG2E = 1.442695f;     // exp(x) = 2^(x LOG2E)

// What all kernels are given; NAME_axis is the stride of NAME along an axis, in elements.
struct Params {
  TensorMap K_map;       // [b, hk, kv, d]  k, in boxes of 64 rows
  TensorMap V_map;       // [b, hk, kv, dv]  v, in boxes of 64 rows
  TensorMap Q_map;       // [b, h, q, d]  q, in boxes of 64 rows
  TensorMap dO_map;      // [b, h, q, dv]  dout, in boxes of 64 rows
  TensorMap dQ_sum_map;  // [b, hk, g, q, d], in boxes of 64 rows
  const bf16* dO;        // [b, h, q, dv]  dout
  int64 dO_b, dO_h, dO_q;
  const bf16* O;  // [b, h, q, dv]  out
  int64 O_b, O_h, O_q;
  const fp32* stat;  // [b, h, q]  kept0
  int64 stat_b, stat_h, stat_q;
  fp32* D;  // [b, hk, g, q]
  int64 D_b, D_hk, D_g, D_q;
  fp32* dQ_sum;  // [b, hk, g, q, d]
  int64 dQ_sum_b, dQ_sum_hk, dQ_sum_g, dQ_sum_q;
  bf16* dQ;  // [b, h, q, d]  dq
  int64 dQ_b, dQ_h, dQ_q;
  bf16* dK;  // [b, hk, kv, d]  dk
  int64 dK_b, dK_hk, dK_kv;
  bf16* dV;  // [b, hk, kv, dv]  dv
  int64 dV_b, dV_hk, dV_kv;
  int32* counter;
  int batch, kv_heads, group, q_len, kv_len, section;
};

// dQ_sum = 0, which is added to
// acc = sum_dv dO * O
// D = acc
extern "C" __global__ void __launch_bounds__(256) backward_0_rowwise(const __grid_constant__ Params p) {
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
  const bf16* dO_at = p.dO + b * p.dO_b + h * p.dO_h;
  const bf16* O_at = p.O + b * p.O_b + h * p.O_h;
  fp32* D_at = p.D + b * p.D_b + hk * p.D_hk + g * p.D_g;
  const int row = q_start + threadIdx.x / LANES;
  const bool inside = row < p.q_len;
  const int q = inside ? row : p.q_len - 1;  // past the end: once more the last, as all lanes join
  const int lane = threadIdx.x % LANES;
  for (int first = lane * 4; first < HEAD_DIM; first += LANES * 4) {
    if (inside) store_vector(&dQ_sum_at[q * p.dQ_sum_q + first], Vec<fp32, 4>{});
  }

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

namespace backward_1_roles_ {
  constexpr int CONSUMERS = 2, THREADS = 512;  // warpgroups that multiply, and two more
  constexpr int BLOCK_KV = 128, BLOCK_Q = 64;  // rows of a block, columns of a tile
  constexpr int ROW_STAGES = 2, STAGES = 2;    // buffers of each tile
  constexpr int WORKS = 8, WORDS = 3;          // works announced at once
  // of a consumer's thread
  constexpr int LANES = 4, ROWS = 2, COLUMNS = BLOCK_Q / LANES, FEATURES_D = 32, FEATURES_DV = 32;
  constexpr int COLUMN_WORDS = 2;  // known of each column, of 32 bits
  constexpr int VISITS = 8;        // tiles announced at once
  constexpr int PARTS = 2;         // buffers of parts of sums
  // bytes of shared memory
  constexpr uint32 K_AT = 0, Q_AT = 98304, V_AT = 65536, DO_AT = 131072, WORKS_AT = 230400,
      VISITS_AT = 230496, ROW_PIPE_AT = 230656, LATE_PIPE_AT = 230720, COLUMN_PIPE_AT = 230752,
      SUM_PIPE_AT = 230784, VALUES_AT = 229376, VISIT_PIPE_AT = 230816, HANDED_AT = 163840,
      PARTS_AT = 196608, PLACES_AT = 230624, HAND_PIPE_AT = 230944, PART_PIPE_AT = 230976;

  // Tiles in shared memory; each consumer has a barrier for each buffer of its rows.
  using KTile = Panels<bf16, 64, HEAD_DIM>;
  using VTile = Panels<bf16, 64, V_HEAD_DIM>;
  using QTile = Panels<bf16, BLOCK_Q, HEAD_DIM>;
  using dOTile = Panels<bf16, BLOCK_Q, V_HEAD_DIM>;
  using HandedTile = Panels<bf16, 64, BLOCK_Q>;
  using SumPart = Part<64>;
  using RowPipe = Pipe<ROW_STAGES>;

  // Where a block works, and what is the same for all of it.
  struct Block {
    int b, hk, g, h, kv_start, kv_last;
    const fp32 *stat;
    fp32 *D;
    bf16 *dK, *dV;
  };

  // What a thread knows of one of its rows.
  struct Row {
    int kv, n0;
    bool inside;
  };

  // What a thread reads of one of its columns of a tile.
  struct Column {
    float x0, D;
  };

  // A work as the producer announces it: its first row, or -1 behind the last one, and its other positions.
  __device__ __forceinline__ Shared<int32, WORDS> announced(uint32 count) {
    return Shared<int32, WORDS>(WORKS_AT + count % WORKS * WORDS * 4);
  }

  // The work of a number: heads that share a cache, of all the first rows first, which have most to do.
  __device__ __forceinline__ void announce(const Params& p, uint32 count, int number) {
    const Shared<int32, WORDS> work = announced(count);
    const int heads = p.batch * p.kv_heads, tall = (p.kv_len + BLOCK_KV - 1) / BLOCK_KV;
    const int section = number / (p.section * tall), within = number - section * p.section * tall;
    const int wide = minimum(p.section, heads - section * p.section), tile = within / wide;
    int rest = section * p.section + within - tile * wide;
    work[0] = tile * BLOCK_KV;
    work[1] = take(rest, p.kv_heads);
    work[2] = take(rest, p.batch);
  }

  __device__ __forceinline__ Block block_at(const Params& p, uint32 count, int offset, int g) {
    const Shared<int32, WORDS> work = announced(count);
    Block block;
    block.kv_start = work[0];
    block.kv_last = minimum(block.kv_start + BLOCK_KV, p.kv_len) - 1;
    block.hk = work[1];
    block.b = work[2];
    block.g = g;
    block.h = block.hk * p.group + block.g;
    block.stat = p.stat + block.b * p.stat_b + block.h * p.stat_h;
    block.D = p.D + block.b * p.D_b + block.hk * p.D_hk + block.g * p.D_g;
    block.dK = p.dK + block.b * p.dK_b + block.hk * p.dK_hk;
    block.dV = p.dV + block.b * p.dV_b + block.hk * p.dV_hk;
    block.kv_start += offset;
    return block;
  }

  // What is known of each column of a tile, an array for each value.
  template <class T>
  __device__ __forceinline__ Shared<T, BLOCK_Q> values(uint32 stage, int word) {
    return Shared<T, BLOCK_Q>(VALUES_AT + (stage * COLUMN_WORDS + word) * BLOCK_Q * 4);
  }

  // What is known of a thread's column; that of its neighbour is read at the same time.
  __device__ __forceinline__ Column known_column(uint32 stage, int lane, int c) {
    Column column;
    column.x0 = load_vector<2>(values<float>(stage, 0), c / 2 * 8 + lane * 2)[c % 2];
    column.D = load_vector<2>(values<float>(stage, 1), c / 2 * 8 + lane * 2)[c % 2];
    return column;
  }

  // The rows of a thread before the first tile.
  __device__ __forceinline__ void start_rows(const Params& p, const Block& block, Row (&rows)[ROWS],
      int row0) {
    UNROLL for (int r = 0; r < ROWS; ++r) {
      Row row;
      const int kv = block.kv_start + row0 + 8 * r;
      row.inside = kv < p.kv_len;  // one past the end repeats the last row and is not stored
      row.kv = minimum(kv, p.kv_len - 1);
      row.n0 = row.kv + p.q_len - p.kv_len;
      rows[r] = row;
    }
  }

  // kv <= q + kv_len - q_len
  __device__ __forceinline__ void mask(const Params& p, Row (&rows)[ROWS], int q_start, int lane,
      float (&s0)[ROWS][COLUMNS]) {
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const Row& row = rows[r];
      const int first = q_start + lane * 2;
      // column c: bit c
      const auto counts = columns_before<COLUMNS>(row.inside ? p.q_len - first : 0) &
          ~columns_before<COLUMNS>(row.n0 - first);
      UNROLL for (int c = 0; c < COLUMNS; ++c) {
        if (!(counts >> c & 1)) s0[r][c] = -INFINITY;
      }
    }
  }

  // acc1 = acc1 + sum_q exp(s0 * rsqrt(head_dim) - stat) * dO
  __device__ __forceinline__ void update0(int lane, float (&s0)[ROWS][COLUMNS],
      float (&weights1)[ROWS][COLUMNS], uint32 stage) {
    UNROLL for (int c = 0; c < COLUMNS; ++c) {
      const Column& column = known_column(stage, lane, c);
      UNROLL for (int r = 0; r < ROWS; ++r) {
        weights1[r][c] = exp2_approx(s0[r][c] * (SCALE * LOG2E) - column.x0);
      }
    }
  }

  // acc0 = acc0 + sum_q exp(s0 * rsqrt(head_dim) - stat) * (s1 - D) * Q
  __device__ __forceinline__ void update1(int lane, float (&s1)[ROWS][COLUMNS],
      float (&weights0)[ROWS][COLUMNS], uint32 stage) {
    UNROLL for (int c = 0; c < COLUMNS; ++c) {
      const Column& column = known_column(stage, lane, c);
      UNROLL for (int r = 0; r < ROWS; ++r) {
        weights0[r][c] = s1[r][c] - column.D;
      }
    }
  }

  // dK = acc0 * rsqrt(head_dim)
  // dV = acc1
  __device__ __forceinline__ void finish(float (&acc0)[ROWS][FEATURES_D]) {
    UNROLL for (int r = 0; r < ROWS; ++r) {
      UNROLL for (int f = 0; f < FEATURES_D; ++f) acc0[r][f] = acc0[r][f] * SCALE;
    }
  }

  // Results from the registers of four lanes, each of which stores eight neighbouring features.
  __device__ __forceinline__ void store_rows(const Params& p, const Block& block, const Row (&rows)[ROWS],
      int lane, float (&acc1)[ROWS][FEATURES_DV], float (&acc0)[ROWS][FEATURES_D]) {
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const Row& row = rows[r];
      UNROLL for (int f = 0; f < FEATURES_D; f += 8) {
        const int d = 4 * f + 8 * lane;
        store_eight(&block.dK[row.kv * p.dK_kv + d], acc0[r], f, row.inside);
      }
      UNROLL for (int f = 0; f < FEATURES_DV; f += 8) {
        const int dv = 4 * f + 8 * lane;
        store_eight(&block.dV[row.kv * p.dV_kv + dv], acc1[r], f, row.inside);
      }
    }
  }

  // One thread has tiles copied to buffers as these become free. It claims a work with the last tile of the
  // one before: claimed earlier it would wait here while another block has nothing to do.
  __device__ __forceinline__ void produce(const Params& p) {
    const Shared<int32, 4 * VISITS> visits(VISITS_AT);
    const Pipe<STAGES> column_pipe(COLUMN_PIPE_AT), sum_pipe(SUM_PIPE_AT);
    const Pipe<VISITS> visit_pipe(VISIT_PIPE_AT);
    const int count = p.batch * p.kv_heads * ((p.kv_len + BLOCK_KV - 1) / BLOCK_KV);
    Ring<ROW_STAGES> row_at;
    Ring<STAGES> column_at;
    for (int number = blockIdx.x; number < count; row_at.next()) {
      announce(p, row_at.count, number);
      Block block = block_at(p, row_at.count, 0, 0);
      for (int group = 0; group < CONSUMERS; ++group) {
        load_tile(buffer<KTile>(K_AT, row_at.stage() * CONSUMERS + group), p.K_map,
            buffer<RowPipe>(ROW_PIPE_AT, group).refill(row_at, KTile::BYTES), block.kv_start + 64 * group,
            block.hk, block.b);
      }
      for (int g = 0; g < p.group; ++g) {
        block = block_at(p, row_at.count, 0, g);
        // Tiles that may have an element with  kv <= q + kv_len - q_len
        const int q_begin = maximum(block.kv_start + p.q_len - p.kv_len, 0);
        const int q_end = p.q_len;
        int q_start = q_begin / BLOCK_Q * BLOCK_Q;
        while (q_start >= 0) {
          const int next = q_start + BLOCK_Q < q_end ? q_start + BLOCK_Q : -1;
          const auto kind_of = [&](Block block, int group) {
            block.kv_start += 64 * group;
            block.kv_last = minimum(block.kv_start + 63, block.kv_last);
            // Tiles that may have an element with  kv <= q + kv_len - q_len
            const int q_begin = maximum(block.kv_start + p.q_len - p.kv_len, 0);
            const int q_end = p.q_len;
            if (block.kv_last < block.kv_start || q_start >= q_end || q_start + BLOCK_Q <= q_begin) return 0;
            return block.kv_last + p.q_len <= q_start + p.kv_len && q_start + BLOCK_Q <= p.q_len &&
                block.kv_start + 64 <= p.kv_len ? 2 : 1;
          };
          int kinds = 0;  // two bits a consumer: 0 passes over the tile, 2 needs no test, 1 neither
          UNROLL for (int group = 0; group < CONSUMERS; ++group) kinds |= kind_of(block, group) << 2 * group;
          store_vector(visits, 4 * (column_at.count % VISITS),
              Vec<int32, 4>{q_start, kinds | (next < 0 && g == p.group - 1) << 16, g});
          arrive(visit_pipe.filled(column_at.count % VISITS));
          column_pipe.wait_free(column_at);
          const Barrier filled = column_pipe.fill(column_at, QTile::BYTES);
          load_tile(buffer<QTile>(Q_AT, column_at.stage()), p.Q_map, filled, q_start, block.h, block.b);
          if (next < 0 && g == p.group - 1) number = gridDim.x + fetch_cyclic(p.counter, count);
          const Barrier sums_filled = sum_pipe.refill(column_at, dOTile::BYTES);
          load_tile(buffer<dOTile>(DO_AT, column_at.stage()), p.dO_map, sums_filled, q_start, block.h,
              block.b);
          column_at.next();
          q_start = next;
        }
      }
    }
    announced(row_at.count)[0] = -1;  // there is no more
    visits[4 * (column_at.count % VISITS)] = -1;
    arrive(visit_pipe.filled(column_at.count % VISITS));
    for (int group = 0; group < CONSUMERS; ++group) buffer<RowPipe>(ROW_PIPE_AT, group).refill(row_at, 0);
  }

  // A warp reads what is known of the columns of a tile once the tile is announced, and writes it where that
  // of an earlier tile has been used: it has then come with the tile.
  __device__ __forceinline__ void produce_values(const Params& p) {
    const Shared<int32, 4 * VISITS> visits(VISITS_AT);
    const Pipe<STAGES> column_pipe(COLUMN_PIPE_AT);
    const Pipe<VISITS> visit_pipe(VISIT_PIPE_AT);
    uint32 works = 0;  // that are done
    for (Ring<STAGES> column_at;; column_at.next()) {
      visit_pipe.wait(Ring<VISITS>{column_at.count});
      const Vec<int32, 4> visit = load_vector<4>(visits, 4 * (column_at.count % VISITS));
      if (visit[0] < 0) return;
      const Block block = block_at(p, works, 0, visit[2]);
      works += visit[1] >> 16;
      Column columns[BLOCK_Q / 32];
      UNROLL for (int i = 0; i < BLOCK_Q; i += 32) {
        Column& column = columns[i / 32];
        const int q = visit[0] + i + threadIdx.x % 32;
        column.x0 =
            maximum(finite_or_zero(block.stat[minimum(q, p.q_len - 1) * p.stat_q]) * LOG2E, -3.4028235e+38f);
        column.D = block.D[minimum(q, p.q_len - 1) * p.D_q];
      }
      column_pipe.wait_free(column_at);
      UNROLL for (int i = 0; i < BLOCK_Q; i += 32) {
        const int c = i + threadIdx.x % 32;
        values<float>(column_at.stage(), 0)[c] = columns[i / 32].x0;
        values<float>(column_at.stage(), 1)[c] = columns[i / 32].D;
      }
      column_pipe.fill_by_warp(column_at);
    }
  }

  // One thread has rows copied that are read last, once those of the work before have been read.
  __device__ __forceinline__ void produce_late(const Params& p) {
    Ring<ROW_STAGES> row_at;
    for (;; row_at.next()) {
      buffer<RowPipe>(ROW_PIPE_AT, 0).wait(row_at);
      if (announced(row_at.count)[0] < 0) return;
      const Block block = block_at(p, row_at.count, 0, 0);
      for (int group = 0; group < CONSUMERS; ++group) {
        const Barrier filled =
            buffer<Pipe<1>>(LATE_PIPE_AT, group).refill(Ring<1>{row_at.count}, VTile::BYTES);
        load_tile(buffer<VTile>(V_AT, group), p.V_map, filled, block.kv_start + 64 * group, block.hk,
            block.b);
      }
    }
  }

  // dQ_sum += sum_kv exp(s0 * rsqrt(head_dim) - stat) * (s1 - D) * K
  __device__ __forceinline__ void add_parts(const Params& p) {
    const Shared<int32, 4 * VISITS> visits(VISITS_AT);
    const Shared<int32, 4 * PARTS> places(PLACES_AT);
    const Pipe<STAGES> hand_pipe(HAND_PIPE_AT);
    const Pipe<PARTS> part_pipe(PART_PIPE_AT);
    Ring<ROW_STAGES> row_at;
    Ring<STAGES> hand_at;
    Ring<PARTS> part_at;
    for (;; row_at.next()) {
      for (int group = 0; group < CONSUMERS; ++group) buffer<RowPipe>(ROW_PIPE_AT, group).wait(row_at);
      if (announced(row_at.count)[0] < 0) break;
      bool last = false;
      for (; !last; hand_at.next()) {
        hand_pipe.wait(hand_at);
        const Vec<int32, 4> visit = load_vector<4>(visits, 4 * (hand_at.count % VISITS));
        const Block block = block_at(p, row_at.count, 0, visit[2]);
        last = visit[1] >> 16;
        UNROLL for (int i = 0; i < BLOCK_Q; i += SumPart::ROWS) {
          UNROLL for (int f = 0; f < HEAD_DIM; f += SumPart::COLUMNS) {
            float part[ROWS][SumPart::COLUMNS / LANES];
            wgmma_fence();
            multiply(part,
                transposed(buffer<HandedTile>(HANDED_AT, hand_at.stage() * CONSUMERS).panel(i / 64)),
                buffer<KTile>(K_AT, row_at.stage() * CONSUMERS).panel(f / 64));
            multiply_add(part,
                transposed(buffer<HandedTile>(HANDED_AT, hand_at.stage() * CONSUMERS + 1).panel(i / 64)),
                buffer<KTile>(K_AT, row_at.stage() * CONSUMERS + 1).panel(f / 64));
            wgmma_commit();
            wgmma_wait<0>(part);
            if (i + SumPart::ROWS >= BLOCK_Q &&
                f + SumPart::COLUMNS >= HEAD_DIM) hand_pipe.free_by_warp(hand_at);
            part_pipe.wait_free(part_at);
            store_part(buffer<SumPart>(PARTS_AT, part_at.stage()), part);
            if (threadIdx.x % 128 == 0) store_vector(places, 4 * part_at.stage(),
                Vec<int32, 4>{visit[0] + i, f, block.h, block.b});
            fence_async();
            part_pipe.fill_by_warp(part_at);
            part_at.next();
          }
        }
      }
      for (int group = 0; group < CONSUMERS; ++group)
          buffer<RowPipe>(ROW_PIPE_AT, group).free_by_warp(row_at);
    }
    part_pipe.wait_free(part_at);
    if (threadIdx.x % 128 == 0) places[4 * part_at.stage()] = -1;
    part_pipe.fill_by_warp(part_at);
  }

  // One thread has parts added to memory, and their buffers free as these have been read.
  __device__ __forceinline__ void send_parts(const Params& p) {
    const Shared<int32, 4 * PARTS> places(PLACES_AT);
    const Pipe<PARTS> part_pipe(PART_PIPE_AT);
    Ring<PARTS> part_at, read_at;
    for (;; part_at.next()) {
      part_pipe.wait(part_at);
      const Vec<int32, 4> place = load_vector<4>(places, 4 * part_at.stage());
      if (place[0] < 0) break;
      add_part(p.dQ_sum_map, buffer<SumPart>(PARTS_AT, part_at.stage()), place[0], place[1], place[2],
          place[3]);
      store_commit();
      if (part_at.count - read_at.count == PARTS - 1) {
        store_wait_read<PARTS - 1>();
        part_pipe.free(read_at);
        read_at.next();
      }
    }
    store_wait<0>();
  }

  __device__ __forceinline__ void consume(const Params& p, int group) {
    const Shared<int32, 4 * VISITS> visits(VISITS_AT);
    const RowPipe rows_in = buffer<RowPipe>(ROW_PIPE_AT, group);
    const Pipe<STAGES> column_pipe(COLUMN_PIPE_AT), sum_pipe(SUM_PIPE_AT), hand_pipe(HAND_PIPE_AT);
    const int row0 = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / LANES, lane = threadIdx.x % LANES;
    Ring<ROW_STAGES> row_at;
    Ring<STAGES> column_at, read_at;

    Block block = {};
    Row rows[ROWS];
    float acc1[ROWS][FEATURES_DV];
    float acc0[ROWS][FEATURES_D];
    Left<bf16> rounded_weights1[COLUMNS / 4];
    Left<bf16> rounded_weights0[COLUMNS / 4];
    float s0[ROWS][COLUMNS];
    int q_start, kind;
    bool last;
    const auto next_tile = [&] {
      column_pipe.wait(column_at);
      const Vec<int32, 4> visit = load_by_warp<4>(visits, 4 * (column_at.count % VISITS));
      q_start = visit[0];
      kind = visit[1] >> 2 * group & 3;
      last = visit[1] >> 16;
    };
    const auto start_work = [&] {
      rows_in.wait(row_at);
      if (announced(row_at.count)[0] < 0) return false;
      block = block_at(p, row_at.count, 64 * group, 0);
      start_rows(p, block, rows, row0);
      next_tile();
      while (kind == 0 && !last) {
        hand_pipe.wait_free(column_at);
        UNROLL for (int c = 0; c < COLUMNS; c += 4) {
          store_left(buffer<HandedTile>(HANDED_AT, column_at.stage() * CONSUMERS + group),
              threadIdx.x % 128 / 32 * 16, 4 * c, Left<bf16>{});
        }
        fence_async();
        hand_pipe.fill_by_warp(column_at);
        sum_pipe.wait(column_at);
        sum_pipe.free_by_warp(column_at);
        column_pipe.free_by_warp(column_at);
        column_at.next();
        read_at.next();
        next_tile();
      }
      return true;
    };

    for (; start_work(); row_at.next()) {
      UNROLL for (int r = 0; r < ROWS; ++r) {
        UNROLL for (int f = 0; f < FEATURES_DV; ++f) acc1[r][f] = 0.0f;
        UNROLL for (int f = 0; f < FEATURES_D; ++f) acc0[r][f] = 0.0f;
      }
      wgmma_fence();
      // s0 = sum_d K Q
      multiply(s0, buffer<KTile>(K_AT, row_at.stage() * CONSUMERS + group),
          transposed(buffer<QTile>(Q_AT, column_at.stage())));
      wgmma_commit();
      wgmma_wait<0>(s0);
      buffer<Pipe<1>>(LATE_PIPE_AT, group).wait(Ring<1>{row_at.count});
      bool more = true;
#pragma unroll 1
      while (more) {
        auto& weights1 = s0;
        if (kind != 2) mask(p, rows, q_start, lane, s0);
        update0(lane, s0, weights1, column_at.stage());
        wgmma_wait<0>(acc0, rounded_weights0, weights1);
        column_pipe.pass_behind_wait(read_at, read_at.count != column_at.count);
        round_left(rounded_weights1, weights1);
        sum_pipe.wait(read_at);
        settle(rounded_weights1);
        auto& s1 = s0;
        wgmma_fence();
        // s1 = sum_dv V dO
        multiply(s1, buffer<VTile>(V_AT, group), transposed(buffer<dOTile>(DO_AT, read_at.stage())));
        wgmma_commit();
        wgmma_fence();
        multiply_add(acc1, rounded_weights1, buffer<dOTile>(DO_AT, read_at.stage()));  // acc1 += weights1 dO
        wgmma_commit();
        wgmma_wait<1>(s1);
        auto& weights0 = s1;
        update1(lane, s1, weights0, column_at.stage());
        wgmma_wait<0>(acc1, rounded_weights1, weights0);
        round_left(rounded_weights0, weights0);
        // weights0 lacks a factor that is rounded already
        UNROLL for (int i = 0; i < COLUMNS / 4; ++i)
            rounded_weights0[i] = multiply_pairs(rounded_weights0[i], rounded_weights1[i]);
        settle(rounded_weights0);
        sum_pipe.free_by_warp(read_at);
        hand_pipe.wait_free(read_at);
        UNROLL for (int c = 0; c < COLUMNS; c += 4) {
          store_left(buffer<HandedTile>(HANDED_AT, read_at.stage() * CONSUMERS + group),
              threadIdx.x % 128 / 32 * 16, 4 * c, rounded_weights0[c / 4]);
        }
        more = !last;
        if (more) {
          column_at.next();
          next_tile();
          wgmma_fence();
          // s0 = sum_d K Q
          multiply(s0, buffer<KTile>(K_AT, row_at.stage() * CONSUMERS + group),
              transposed(buffer<QTile>(Q_AT, column_at.stage())));
          wgmma_commit();
        } else {
          buffer<Pipe<1>>(LATE_PIPE_AT, group).free_by_warp(Ring<1>{row_at.count});
        }
        fence_async();
        hand_pipe.fill_by_warp(read_at);
        wgmma_fence();
        multiply_add(acc0, rounded_weights0, buffer<QTile>(Q_AT, read_at.stage()));  // acc0 += weights0 Q
        wgmma_commit();
        wgmma_wait<1>(s0);
      }
      rows_in.free_by_warp(row_at);
      wgmma_wait<0>(acc0, rounded_weights0);
      column_pipe.free_by_warp(read_at);
      read_at.next();
      column_at.next();
      block = block_at(p, row_at.count, 64 * group, 0);  // sums leave no registers to keep it
      start_rows(p, block, rows, row0);
      finish(acc0);
      store_rows(p, block, rows, lane, acc1, acc0);
    }
  }

  extern "C" __global__ void __launch_bounds__(THREADS,
      1) backward_1_roles(const __grid_constant__ Params p) {
    if (threadIdx.x == 0) {
      prefetch(p.K_map);
      prefetch(p.V_map);
      prefetch(p.Q_map);
      prefetch(p.dO_map);
      // of so many readers, and one writer
      for (int group = 0; group < CONSUMERS; ++group) buffer<RowPipe>(ROW_PIPE_AT, group).init(8);
      for (int group = 0; group < CONSUMERS; ++group) buffer<Pipe<1>>(LATE_PIPE_AT, group).init(4);
      Pipe<STAGES>(COLUMN_PIPE_AT).init(4 * CONSUMERS, 2);
      Pipe<VISITS>(VISIT_PIPE_AT).init(1);
      Pipe<STAGES>(HAND_PIPE_AT).init(4, 4 * CONSUMERS);
      Pipe<PARTS>(PART_PIPE_AT).init(1, 4);
      Pipe<STAGES>(SUM_PIPE_AT).init(4 * CONSUMERS);
      publish_barriers();
    }
    __syncthreads();  // the barriers are there
    const int group = warpgroup();
    if (group == CONSUMERS) {
      shrink_registers<32>();
      if (threadIdx.x % 128 < 32 && elect_one()) produce(p);            // has tiles copied
      if (threadIdx.x % 128 / 32 == 1) produce_values(p);               // reads what is known of columns
      if (threadIdx.x % 128 / 32 == 3 && elect_one()) produce_late(p);  // has rows copied that are read last
      if (threadIdx.x % 128 / 32 == 2 && elect_one()) send_parts(p);    // has parts added to memory
    } else if (group > CONSUMERS) {
      shrink_registers<64>();
      add_parts(p);  // multiplies what consumers hand over
    } else {
      grow_registers<208>();
      consume(p, group);  // multiplies and sums, tile by tile
    }
  }
}
using backward_1_roles_::backward_1_roles;

// dQ = rsqrt(head_dim) * dQ_sum
extern "C" __global__ void __launch_bounds__(128) backward_2_rowwise(const __grid_constant__ Params p) {
  constexpr int BLOCK_Q = 4;  // rows of a block
  constexpr int LANES = 32;   // that share a row
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
    const auto dQ_sum_part = load_vector<4>(&dQ_sum_at[q * p.dQ_sum_q + first]);
    Vec<bf16, 4> dQ_part;
    UNROLL for (int i = 0; i < 4; ++i) {
      dQ_part[i] = from_float<bf16>(SCALE * dQ_sum_part[i]);
    }
    store_vector(&dQ_at[q * p.dQ_q + first], dQ_part);
  }
}
