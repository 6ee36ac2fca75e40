// attention: backward, family sm90, head_dim 256, v_head_dim 256, bf16 fp32
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

constexpr int HEAD_DIM = 256, V_HEAD_DIM = 256;
constexpr float SCALE = 0.0625f;    // rsqrt(head_dim)
constexpr float LOG2E = 1.442695f;  // exp(x) = 2^(x LOG2E)

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
  fp32* dQ_sum_at = p.dQ_sum + b * p.dQ_sum_b + hk * p.dQ_sum_hk + g * p.dQ_sum_g;
  const bf16* dO_at = p.dO + b * p.dO_b + h * p.dO_h;
  const bf16* O_at = p.O + b * p.O_b + h * p.O_h;
  fp32* D_at = p.D + b * p.D_b + hk * p.D_hk + g * p.D_g;
  const int q = q_start + threadIdx.x / LANES;
  if (q >= p.q_len) return;
  const int lane = threadIdx.x % LANES;
  for (int first = lane * 4; first < HEAD_DIM; first += LANES * 4) {
    store_vector(&dQ_sum_at[q * p.dQ_sum_q + first], Vec<fp32, 4>{});
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
  if (lane == 0) {
    D_at[q * p.D_q] = from_float<fp32>(acc);
  }
}

namespace backward_1_roles_ {
  constexpr int CONSUMERS = 2, THREADS = 512;  // warpgroups that multiply, and two more
  constexpr int BLOCK_KV = 64, BLOCK_Q = 64;   // rows of a block, columns of a tile
  constexpr int ROW_STAGES = 1, STAGES = 2;    // buffers of each tile
  constexpr int WORKS = 8, WORDS = 3;          // works announced at once
  // of a consumer's thread
  constexpr int LANES = 4, ROWS = 2, COLUMNS = BLOCK_Q / LANES, FEATURES_D = 64, FEATURES_DV = 64;
  constexpr int COLUMN_WORDS = 2;  // known of each column, of 32 bits
  constexpr int VISITS = 8;        // tiles announced at once
  constexpr int PARTS = 2;         // buffers of parts of sums
  constexpr int HANDED = 1;        // buffers of what is handed over
  // bytes of shared memory
  constexpr uint32 K_AT = 0, Q_AT = 65536, V_AT = 32768, DO_AT = 131072, WORKS_AT = 230400,
      VISITS_AT = 230496, ROW_PIPE_AT = 230656, COLUMN_PIPE_AT = 230672, SUM_PIPE_AT = 230704,
      VALUES_AT = 229376, VISIT_PIPE_AT = 230736, HANDED_AT = 196608, PARTS_AT = 204800, PLACES_AT = 230624,
      HAND_PIPE_AT = 230880, PART_PIPE_AT = 230896, WEIGHTS_AT = 221184, WEIGHT_PIPE_AT = 230864;

  // Tiles in shared memory; all consumers read the same rows.
  using KTile = Panels<bf16, 64, HEAD_DIM>;
  using VTile = Panels<bf16, 64, V_HEAD_DIM>;
  using dOTile = Panels<bf16, BLOCK_Q, V_HEAD_DIM>;
  using QTile = Panels<bf16, BLOCK_Q, HEAD_DIM>;
  using HandedTile = Panels<bf16, 64, BLOCK_Q>;
  using SumPart = Part<32>;
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

  __device__ __forceinline__ Shared<uint32, 4> handed_at(int number, int c) {
    return Shared<uint32, 4>(WEIGHTS_AT + ((number * COLUMNS + c) / 4 * 128 + threadIdx.x % 128) * 16);
  }

  // Weights of a tile that another consumer reads, in the place of a thread of each.
  __device__ __forceinline__ void hand(int number, const Left<bf16> (&weights)[COLUMNS / 4]) {
    UNROLL for (int c = 0; c < COLUMNS; c += 4) {
      const Left<bf16>& four = weights[c / 4];
      store_vector(handed_at(number, c), 0,
          Vec<uint32, 4>{four.word[0], four.word[1], four.word[2], four.word[3]});
    }
  }

  __device__ __forceinline__ float handed(int number, int r, int c) {
    const Vec<uint32, 4> word = load_vector<4>(handed_at(number, c), 0);
    const Left<bf16> four[1] = {{word[0], word[1], word[2], word[3]}};
    return value_of(four, r, c % 4);
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
      float (&weights0)[ROWS][COLUMNS], uint32 stage, uint32 from) {
    UNROLL for (int c = 0; c < COLUMNS; ++c) {
      const Column& column = known_column(stage, lane, c);
      UNROLL for (int r = 0; r < ROWS; ++r) {
        weights0[r][c] = handed(from, r, c) * (s1[r][c] - column.D);
      }
    }
  }

  // Results from the registers of four lanes, each of which stores eight neighbouring features.
  __device__ __forceinline__ void store_rows0(const Params& p, const Block& block, const Row (&rows)[ROWS],
      int lane, float (&acc1)[ROWS][FEATURES_DV]) {
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const Row& row = rows[r];
      UNROLL for (int f = 0; f < FEATURES_DV; f += 8) {
        const int dv = 4 * f + 8 * lane;
        store_eight(&block.dV[row.kv * p.dV_kv + dv], acc1[r], f, row.inside);
      }
    }
  }

  // dK = acc0 * rsqrt(head_dim)
  __device__ __forceinline__ void finish1(float (&acc0)[ROWS][FEATURES_D]) {
    UNROLL for (int r = 0; r < ROWS; ++r) {
      UNROLL for (int f = 0; f < FEATURES_D; ++f) acc0[r][f] = acc0[r][f] * SCALE;
    }
  }

  // Results from the registers of four lanes, each of which stores eight neighbouring features.
  __device__ __forceinline__ void store_rows1(const Params& p, const Block& block, const Row (&rows)[ROWS],
      int lane, float (&acc0)[ROWS][FEATURES_D]) {
    UNROLL for (int r = 0; r < ROWS; ++r) {
      const Row& row = rows[r];
      UNROLL for (int f = 0; f < FEATURES_D; f += 8) {
        const int d = 4 * f + 8 * lane;
        store_eight(&block.dK[row.kv * p.dK_kv + d], acc0[r], f, row.inside);
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
      const auto load_rows = [&] {
        const Barrier filled = RowPipe(ROW_PIPE_AT).refill(row_at, KTile::BYTES + VTile::BYTES);
        load_tile(buffer<KTile>(K_AT, row_at.stage()), p.K_map, filled, block.kv_start, block.hk, block.b);
        load_tile(buffer<VTile>(V_AT, row_at.stage()), p.V_map, filled, block.kv_start, block.hk, block.b);
      };
      load_rows();
      for (int g = 0; g < p.group; ++g) {
        block = block_at(p, row_at.count, 0, g);
        // Tiles that may have an element with  kv <= q + kv_len - q_len
        const int q_begin = maximum(block.kv_start + p.q_len - p.kv_len, 0);
        const int q_end = p.q_len;
        int q_start = q_begin / BLOCK_Q * BLOCK_Q;
        while (q_start >= 0) {
          const int next = q_start + BLOCK_Q < q_end ? q_start + BLOCK_Q : -1;
          // the same two bits for each consumer: 2 needs no test, 1 does
          const int kinds = block.kv_last + p.q_len <= q_start + p.kv_len && q_start + BLOCK_Q <= p.q_len &&
              block.kv_start + BLOCK_KV <= p.kv_len ? 0xaa : 0x55;
          store_vector(visits, 4 * (column_at.count % VISITS),
              Vec<int32, 4>{q_start, kinds | (next < 0 && g == p.group - 1) << 16, g});
          arrive(visit_pipe.filled(column_at.count % VISITS));
          column_pipe.wait_free(column_at);
          const Barrier filled = column_pipe.fill(column_at, dOTile::BYTES);
          load_tile(buffer<dOTile>(DO_AT, column_at.stage()), p.dO_map, filled, q_start, block.h, block.b);
          if (next < 0 && g == p.group - 1) number = gridDim.x + fetch_cyclic(p.counter, count);
          const Barrier sums_filled = sum_pipe.refill(column_at, QTile::BYTES);
          load_tile(buffer<QTile>(Q_AT, column_at.stage()), p.Q_map, sums_filled, q_start, block.h, block.b);
          column_at.next();
          q_start = next;
        }
      }
    }
    announced(row_at.count)[0] = -1;  // there is no more
    visits[4 * (column_at.count % VISITS)] = -1;
    arrive(visit_pipe.filled(column_at.count % VISITS));
    RowPipe(ROW_PIPE_AT).refill(row_at, 0);
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

  // dQ_sum += sum_kv exp(s0 * rsqrt(head_dim) - stat) * (s1 - D) * K
  __device__ __forceinline__ void add_parts(const Params& p) {
    const Shared<int32, 4 * VISITS> visits(VISITS_AT);
    const Shared<int32, 4 * PARTS> places(PLACES_AT);
    const Pipe<HANDED> hand_pipe(HAND_PIPE_AT);
    const Pipe<PARTS> part_pipe(PART_PIPE_AT);
    Ring<ROW_STAGES> row_at;
    Ring<HANDED> hand_at;
    Ring<PARTS> part_at;
    for (;; row_at.next()) {
      RowPipe(ROW_PIPE_AT).wait(row_at);
      if (announced(row_at.count)[0] < 0) break;
      bool last = false;
      for (; !last; hand_at.next()) {
        hand_pipe.wait(hand_at);
        const Vec<int32, 4> visit = load_vector<4>(visits, 4 * (hand_at.count % VISITS));
        const Block block = block_at(p, row_at.count, 0, visit[2]);
        last = visit[1] >> 16;
        UNROLL for (int i = 0; i < BLOCK_Q; i += SumPart::ROWS) {
          UNROLL for (int f = 0; f < HEAD_DIM; f += 64) {
            float part[ROWS][64 / LANES];
            wgmma_fence();
            multiply(part, transposed(buffer<HandedTile>(HANDED_AT, hand_at.stage()).panel(i / 64)),
                buffer<KTile>(K_AT, row_at.stage()).panel(f / 64));
            wgmma_commit();
            wgmma_wait<0>(part);
            if (i + SumPart::ROWS >= BLOCK_Q && f + 64 >= HEAD_DIM) hand_pipe.free_by_warp(hand_at);
            UNROLL for (int first = 0; first < 64; first += SumPart::COLUMNS) {
              part_pipe.wait_free(part_at);
              store_part(buffer<SumPart>(PARTS_AT, part_at.stage()), part, first);
              if (threadIdx.x % 128 == 0) store_vector(places, 4 * part_at.stage(),
                  Vec<int32, 4>{visit[0] + i, f + first, block.h, block.b});
              fence_async();
              part_pipe.fill_by_warp(part_at);
              part_at.next();
            }
          }
        }
      }
      RowPipe(ROW_PIPE_AT).free_by_warp(row_at);
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

  // A consumer that makes acc1; the other reads its weights.
  __device__ __forceinline__ void consume0(const Params& p) {
    const Shared<int32, 4 * VISITS> visits(VISITS_AT);
    const RowPipe rows_in = RowPipe(ROW_PIPE_AT);
    const Pipe<STAGES> column_pipe(COLUMN_PIPE_AT), sum_pipe(SUM_PIPE_AT);
    const Pipe<HANDED> weight_pipe(WEIGHT_PIPE_AT);
    const int row0 = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / LANES, lane = threadIdx.x % LANES;
    Ring<ROW_STAGES> row_at;
    Ring<STAGES> column_at;
    Ring<HANDED> hand_at;

    Block block = {};
    Row rows[ROWS];
    float acc1[ROWS][FEATURES_DV];
    Left<bf16> rounded_weights1[COLUMNS / 4];
    float s0[ROWS][COLUMNS];
    int q_start, kind;
    bool last;
    const auto next_tile = [&] {
      column_pipe.wait(column_at);
      const Vec<int32, 4> visit = load_by_warp<4>(visits, 4 * (column_at.count % VISITS));
      q_start = visit[0];
      kind = visit[1] & 3;
      last = visit[1] >> 16;
    };
    const auto start_work = [&] {
      rows_in.wait(row_at);
      if (announced(row_at.count)[0] < 0) return false;
      block = block_at(p, row_at.count, 0, 0);
      start_rows(p, block, rows, row0);
      next_tile();
      return true;
    };

    for (; start_work(); row_at.next()) {
      UNROLL for (int r = 0; r < ROWS; ++r) {
        UNROLL for (int f = 0; f < FEATURES_DV; ++f) acc1[r][f] = 0.0f;
      }
      sum_pipe.wait(column_at);
      wgmma_fence();
      // s0 = sum_d K Q
      multiply(s0, buffer<KTile>(K_AT, row_at.stage()), transposed(buffer<QTile>(Q_AT, column_at.stage())));
      wgmma_commit();
      wgmma_wait<0>(s0);
      for (;;) {
        auto& weights1 = s0;
        if (kind != 2) mask(p, rows, q_start, lane, s0);
        update0(lane, s0, weights1, column_at.stage());
        sum_pipe.free_by_warp(column_at);
        round_left(rounded_weights1, weights1);
        weight_pipe.wait_free(hand_at);
        hand(hand_at.stage(), rounded_weights1);
        weight_pipe.fill_by_warp(hand_at);
        hand_at.next();
        wgmma_fence();
        // acc1 += weights1 dO
        multiply_add<128>(acc1, rounded_weights1, buffer<dOTile>(DO_AT, column_at.stage()));
        wgmma_commit();
        if (last) break;
        column_at.next();
        next_tile();
        sum_pipe.wait(column_at);
        wgmma_fence();
        // s0 = sum_d K Q
        multiply(s0, buffer<KTile>(K_AT, row_at.stage()), transposed(buffer<QTile>(Q_AT, column_at.stage())));
        wgmma_commit();
        wgmma_wait<1>(acc1, rounded_weights1);
        column_pipe.free_by_warp(column_at.before());
        wgmma_wait<0>(s0);
      }
      rows_in.free_by_warp(row_at);
      wgmma_wait<0>(acc1, rounded_weights1);
      column_pipe.free_by_warp(column_at);
      column_at.next();
      store_rows0(p, block, rows, lane, acc1);
    }
  }

  // A consumer that makes acc0, with weights of the other.
  __device__ __forceinline__ void consume1(const Params& p) {
    const Shared<int32, 4 * VISITS> visits(VISITS_AT);
    const RowPipe rows_in = RowPipe(ROW_PIPE_AT);
    const Pipe<STAGES> column_pipe(COLUMN_PIPE_AT), sum_pipe(SUM_PIPE_AT);
    const Pipe<HANDED> weight_pipe(WEIGHT_PIPE_AT);
    const Pipe<HANDED> hand_pipe(HAND_PIPE_AT);
    const int row0 = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / LANES, lane = threadIdx.x % LANES;
    Ring<ROW_STAGES> row_at;
    Ring<STAGES> column_at, read_at;
    Ring<HANDED> hand_at;

    Block block = {};
    Row rows[ROWS];
    float acc0[ROWS][FEATURES_D];
    Left<bf16> rounded_weights0[COLUMNS / 4];
    float s1[ROWS][COLUMNS];
    int q_start, kind;
    bool last;
    const auto next_tile = [&] {
      column_pipe.wait(column_at);
      const Vec<int32, 4> visit = load_by_warp<4>(visits, 4 * (column_at.count % VISITS));
      q_start = visit[0];
      kind = visit[1] & 3;
      last = visit[1] >> 16;
    };
    const auto start_work = [&] {
      rows_in.wait(row_at);
      if (announced(row_at.count)[0] < 0) return false;
      block = block_at(p, row_at.count, 0, 0);
      start_rows(p, block, rows, row0);
      next_tile();
      return true;
    };

    for (; start_work(); row_at.next()) {
      UNROLL for (int r = 0; r < ROWS; ++r) {
        UNROLL for (int f = 0; f < FEATURES_D; ++f) acc0[r][f] = 0.0f;
      }
      wgmma_fence();
      // s1 = sum_dv V dO
      multiply(s1, buffer<VTile>(V_AT, row_at.stage()), transposed(buffer<dOTile>(DO_AT, column_at.stage())));
      wgmma_commit();
      wgmma_wait<0>(s1);
      bool more = true;
#pragma unroll 1
      while (more) {
        weight_pipe.wait(hand_at);
        auto& weights0 = s1;
        update1(lane, s1, weights0, column_at.stage(), hand_at.stage());
        weight_pipe.free_by_warp(hand_at);
        column_pipe.free_by_warp(column_at);
        wgmma_wait<0>(acc0, rounded_weights0);
        if (read_at.count != column_at.count) {
          sum_pipe.free_by_warp(read_at);
          read_at.next();
        }
        round_left(rounded_weights0, weights0);
        more = !last;
        if (more) {
          column_at.next();
          next_tile();
          wgmma_fence();
          // s1 = sum_dv V dO
          multiply(s1, buffer<VTile>(V_AT, row_at.stage()),
              transposed(buffer<dOTile>(DO_AT, column_at.stage())));
          wgmma_commit();
        }
        sum_pipe.wait(read_at);
        wgmma_fence();
        // acc0 += weights0 Q
        multiply_add<128>(acc0, rounded_weights0, buffer<QTile>(Q_AT, read_at.stage()));
        wgmma_commit();
        hand_pipe.wait_free(hand_at);
        UNROLL for (int c = 0; c < COLUMNS; c += 4) {
          store_left(buffer<HandedTile>(HANDED_AT, hand_at.stage()), threadIdx.x % 128 / 32 * 16, 4 * c,
              rounded_weights0[c / 4]);
        }
        fence_async();
        hand_pipe.fill_by_warp(hand_at);
        hand_at.next();
        wgmma_wait<1>(s1);
      }
      rows_in.free_by_warp(row_at);
      wgmma_wait<0>(acc0, rounded_weights0);
      sum_pipe.free_by_warp(read_at);
      read_at.next();
      column_at.next();
      finish1(acc0);
      store_rows1(p, block, rows, lane, acc0);
    }
  }

  extern "C" __global__ void __launch_bounds__(THREADS,
      1) backward_1_roles(const __grid_constant__ Params p) {
    if (threadIdx.x == 0) {
      prefetch(p.K_map);
      prefetch(p.V_map);
      prefetch(p.dO_map);
      prefetch(p.Q_map);
      RowPipe(ROW_PIPE_AT).init(12);  // of so many readers, and one writer
      Pipe<STAGES>(COLUMN_PIPE_AT).init(4 * CONSUMERS, 2);
      Pipe<VISITS>(VISIT_PIPE_AT).init(1);
      Pipe<HANDED>(HAND_PIPE_AT).init(4, 4);
      Pipe<PARTS>(PART_PIPE_AT).init(1, 4);
      Pipe<HANDED>(WEIGHT_PIPE_AT).init(4, 4);
      Pipe<STAGES>(SUM_PIPE_AT).init(4 * CONSUMERS);
      publish_barriers();
    }
    __syncthreads();  // the barriers are there
    const int group = warpgroup();
    if (group == CONSUMERS) {
      shrink_registers<32>();
      if (threadIdx.x % 128 < 32 && elect_one()) produce(p);          // has tiles copied
      if (threadIdx.x % 128 / 32 == 1) produce_values(p);             // reads what is known of columns
      if (threadIdx.x % 128 / 32 == 2 && elect_one()) send_parts(p);  // has parts added to memory
    } else if (group > CONSUMERS) {
      shrink_registers<64>();
      add_parts(p);  // multiplies what consumers hand over
    } else {
      grow_registers<208>();
      group == 0 ? consume0(p) : consume1(p);  // multiplies and sums, tile by tile
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
