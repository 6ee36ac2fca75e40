// attention: forward, family sm90, head_dim 256, v_head_dim 256, bf16
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
#include "atomic.cuh"
#include "mbarrier.cuh"
#include "operands.cuh"
#include "quad.cuh"
#include "roles.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int HEAD_DIM = 256, V_HEAD_DIM = 256;
constexpr float SCALE = 0.0625f;  // rsqrt(head_dim)

// What all kernels are given; NAME_axis is the stride of NAME along an axis, in elements.
struct Params {
  TensorMap Q_map;  // [b, h, q, d]  q, in boxes of 64 rows
  TensorMap K_map;  // [b, hk, kv, d]  k, in boxes of 80 rows
  TensorMap V_map;  // [b, hk, kv, dv]  v, in boxes of 80 rows
  bf16* O;          // [b, h, q, dv]  out
  int64 O_b, O_h, O_q;
  fp32* stat;  // [b, h, q]  lse
  int64 stat_b, stat_h;
  int32* counter;
  int batch, kv_heads, group, q_len, kv_len, section;
};

constexpr int CONSUMERS = 2, THREADS = 384;  // warpgroups that multiply, and one more
constexpr int BLOCK_Q = 128, BLOCK_KV = 80;  // rows of a block, columns of a tile
constexpr int ROW_STAGES = 1, STAGES = 2;  // buffers of each tile
constexpr int WORKS = 8, WORDS = 4;  // works announced at once
constexpr int LANES = 4, ROWS = 2, COLUMNS = BLOCK_KV / LANES, FEATURES = 64;  // of a consumer's thread
constexpr float SLACK = 5.5f, MOST = COLUMNS * 245.0f;  // how far a maximum lags; exp of that in each column
// bytes of shared memory
constexpr uint32 Q_AT = 0, K_AT = 65536, V_AT = 147456, WORKS_AT = 229376, VISITS_AT = 229504,
    ROW_PIPE_AT = 229520, COLUMN_PIPE_AT = 229552, SUM_PIPE_AT = 229584;

// Tiles in shared memory; each consumer has a barrier for each buffer of its rows.
using QTile = Panels<bf16, 64, HEAD_DIM>;
using KTile = Panels<bf16, BLOCK_KV, HEAD_DIM>;
using VTile = Panels<bf16, BLOCK_KV, V_HEAD_DIM>;
using RowPipe = Pipe<ROW_STAGES>;

// Where a block works, and what is the same for all of it.
struct Block {
  int b, hk, g, h, q_start, q_last;
  bf16 *O;
  fp32 *stat;
};

// What a thread knows of one of its rows.
struct Row {
  int q, n0;
  bool inside;
  float m = -INFINITY, l = 0.0f;
};

// A work as the producer announces it: its first row, or -1 behind the last one, and its other positions.
__device__ __forceinline__ Shared<int32, WORDS> announced(uint32 count) {
  return Shared<int32, WORDS>(WORKS_AT + count % WORKS * WORDS * 4);
}

// The work of a number: heads that share a cache, of all the last rows first, which have most to do.
__device__ __forceinline__ void announce(const Params& p, uint32 count, int number) {
  const Shared<int32, WORDS> work = announced(count);
  const int heads = p.batch * p.kv_heads * p.group, tall = (p.q_len + BLOCK_Q - 1) / BLOCK_Q;
  const int section = number / (p.section * tall), within = number - section * p.section * tall;
  const int wide = minimum(p.section, heads - section * p.section), tile = within / wide;
  int rest = section * p.section + within - tile * wide;
  work[0] = (tall - 1 - tile) * BLOCK_Q;
  work[1] = take(rest, p.group);
  work[2] = take(rest, p.kv_heads);
  work[3] = take(rest, p.batch);
}

__device__ __forceinline__ Block block_at(const Params& p, uint32 count, int offset) {
  const Shared<int32, WORDS> work = announced(count);
  Block block;
  block.q_start = work[0];
  block.q_last = minimum(block.q_start + BLOCK_Q, p.q_len) - 1;
  block.g = work[1];
  block.hk = work[2];
  block.b = work[3];
  block.h = block.hk * p.group + block.g;
  block.O = p.O + block.b * p.O_b + block.h * p.O_h;
  block.stat = p.stat + block.b * p.stat_b + block.h * p.stat_h;
  block.q_start += offset;
  return block;
}

// The rows of a thread before the first tile.
__device__ __forceinline__ void start_rows(const Params& p, const Block& block, Row (&rows)[ROWS], int row0) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    Row row;
    const int q = block.q_start + row0 + 8 * r;
    row.inside = q < p.q_len;  // one past the end repeats the last row and is not stored
    row.q = minimum(q, p.q_len - 1);
    row.n0 = row.q + p.kv_len - p.q_len + 1;
    rows[r] = row;
  }
}

// kv <= q + kv_len - q_len
__device__ __forceinline__ void mask(const Params& p, Row (&rows)[ROWS], int kv_start, int lane,
    float (&s)[ROWS][COLUMNS]) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    const Row& row = rows[r];
    const int first = kv_start + lane * 2;
    const int end = minimum(p.kv_len, row.n0) - first;
    UNROLL for (int c = 0; c < COLUMNS; ++c) {
      const int at = c / 2 * 8 + c % 2;
      if (at >= end) s[r][c] = -INFINITY;
    }
  }
}

// m = max(m, max_kv s)
// l = l * exp((m_old - m) * rsqrt(head_dim)) + sum_kv exp((s - m) * rsqrt(head_dim))
// acc = acc * exp((m_old - m) * rsqrt(head_dim)) + sum_kv exp((s - m) * rsqrt(head_dim)) * V
// Maxima are looked at, or else stay what they are unless sums show that these are exceeded by too much.
template <bool LOOKS>
__device__ __forceinline__ bool update(Row (&rows)[ROWS], float (&s)[ROWS][COLUMNS],
    float (&acc_rescale)[ROWS], Left<bf16> (&rounded_weights)[COLUMNS / 4]) {
  if constexpr (LOOKS) UNROLL for (int r = 0; r < ROWS; ++r) {
    Row& row = rows[r];
    const float m_old = row.m;
    UNROLL for (int c = 0; c < COLUMNS; ++c) row.m = maximum(row.m, s[r][c]);
    row.m = lane_max<LANES>(row.m);
    if ((row.m - m_old) * SCALE <= SLACK) row.m = m_old;  // the sums stay, too
    const float x3 = Exponential(SCALE, finite_or_zero(row.m))(m_old);
    row.l *= row.m == m_old ? 1.0f : x3;
    acc_rescale[r] = row.m == m_old ? 1.0f : x3;
  }
  float l[ROWS] = {};
  make_left(rounded_weights, [&](int r, int c) {
    const Row& row = rows[r];
    const float x2 = exponential<LOOKS>(SCALE, row.m)(s[r][c]);
    l[r] += x2;
    return x2;
  });
  if (!LOOKS && __any_sync(FULL_WARP, !(l[0] <= MOST && l[1] <= MOST))) return false;
  UNROLL for (int r = 0; r < ROWS; ++r) rows[r].l += l[r];
  return true;
}

// stat = m * rsqrt(head_dim) + log(l)
// O = acc * (1.0 / l)
__device__ __forceinline__ void finish(const Block& block, Row (&rows)[ROWS], int lane,
    float (&acc)[ROWS][FEATURES]) {
  UNROLL for (int r = 0; r < ROWS; ++r) rows[r].l = lane_sum<LANES>(rows[r].l);
  UNROLL for (int r = 0; r < ROWS; ++r) {
    const Row& row = rows[r];
    const float x4 = quotient(1.0f, row.l);
    if (row.inside && lane == 0) {
      block.stat[row.q] = from_float<fp32>(row.m * SCALE + logf(row.l));
    }
    UNROLL for (int f = 0; f < FEATURES; ++f) acc[r][f] = acc[r][f] * x4;
  }
}

// Results from the registers of four lanes, each of which stores eight neighbouring features.
__device__ __forceinline__ void store_rows(const Params& p, const Block& block, const Row (&rows)[ROWS],
    int lane, float (&acc)[ROWS][FEATURES]) {
  UNROLL for (int r = 0; r < ROWS; ++r) {
    const Row& row = rows[r];
    UNROLL for (int f = 0; f < FEATURES; f += 8) {
      const int dv = 4 * f + 8 * lane;
      store_eight(&block.O[row.q * p.O_q + dv], acc[r], f, row.inside);
    }
  }
}

// One thread has tiles copied to buffers as these become free. It claims a work with the last tile of the one
// before: claimed earlier it would wait here while another block has nothing to do.
__device__ __forceinline__ void produce(const Params& p) {
  const Shared<int32, 2 * STAGES> visits(VISITS_AT);
  const Pipe<STAGES> column_pipe(COLUMN_PIPE_AT), sum_pipe(SUM_PIPE_AT);
  const int count = p.batch * p.kv_heads * p.group * ((p.q_len + BLOCK_Q - 1) / BLOCK_Q);
  Ring<ROW_STAGES> row_at;
  Ring<STAGES> column_at, sum_at;
  for (int number = blockIdx.x; number < count; row_at.next()) {
    announce(p, row_at.count, number);
    const Block block = block_at(p, row_at.count, 0);
    const auto load_rows = [&](int group) {
      load_tile(buffer<QTile>(Q_AT, row_at.stage() * CONSUMERS + group), p.Q_map,
          buffer<RowPipe>(ROW_PIPE_AT, group).refill(row_at, QTile::BYTES), block.q_start + 64 * group,
          block.h, block.b);
    };
    load_rows(0);
    // Tiles that may have an element with  kv <= q + kv_len - q_len
    const int kv_end = minimum(block.q_last + p.kv_len - p.q_len + 1, p.kv_len);
    int kv_start = maximum((kv_end + BLOCK_KV - 1) / BLOCK_KV * BLOCK_KV - BLOCK_KV, 0);
    const int begins_at = kv_start;
    while (kv_start >= 0) {
      const int next = maximum(kv_start - BLOCK_KV, -1);
      const auto kind_of = [&](Block block, int group) {
        block.q_start += 64 * group;
        block.q_last = minimum(block.q_start + 63, block.q_last);
        // Tiles that may have an element with  kv <= q + kv_len - q_len
        const int kv_end = minimum(block.q_last + p.kv_len - p.q_len + 1, p.kv_len);
        const int kv_last = minimum(kv_start + BLOCK_KV, p.kv_len) - 1;
        if (block.q_last < block.q_start || kv_start >= kv_end) return 0;
        return kv_last + p.q_len <= block.q_start + p.kv_len && kv_start + BLOCK_KV <= p.kv_len ? 2 : 1;
      };
      int kinds = 0;  // two bits a consumer: 0 passes over the tile, 2 needs no test, 1 neither
      UNROLL for (int group = 0; group < CONSUMERS; ++group) kinds |= kind_of(block, group) << 2 * group;
      column_pipe.wait_free(column_at);
      store_vector(visits, 2 * column_at.stage(), Vec<int32, 2>{kv_start, kinds | (next < 0) << 16});
      const Barrier filled = column_pipe.fill(column_at, KTile::BYTES);
      load_tile(buffer<KTile>(K_AT, column_at.stage()), p.K_map, filled, kv_start, block.hk, block.b);
      column_at.next();
      if (next < 0) number = gridDim.x + fetch_cyclic(p.counter, count);
      for (int group = 1; kv_start == begins_at && group < CONSUMERS; ++group) load_rows(group);
      const Barrier sums_filled = sum_pipe.refill(sum_at, VTile::BYTES);
      load_tile(buffer<VTile>(V_AT, sum_at.stage()), p.V_map, sums_filled, kv_start, block.hk, block.b);
      sum_at.next();
      kv_start = next;
    }
  }
  announced(row_at.count)[0] = -1;  // there is no more
  for (int group = 0; group < CONSUMERS; ++group) buffer<RowPipe>(ROW_PIPE_AT, group).refill(row_at, 0);
}

__device__ __forceinline__ void consume(const Params& p, int group) {
  const Shared<int32, 2 * STAGES> visits(VISITS_AT);
  const RowPipe rows_in = buffer<RowPipe>(ROW_PIPE_AT, group);
  const Pipe<STAGES> column_pipe(COLUMN_PIPE_AT), sum_pipe(SUM_PIPE_AT);
  const int row0 = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / LANES, lane = threadIdx.x % LANES;
  const bool leader = threadIdx.x % 128 == 0;
  Ring<ROW_STAGES> row_at;
  Ring<STAGES> column_at, sum_at;

  Block block = {};
  Row rows[ROWS], done_rows[ROWS];
  float acc[ROWS][FEATURES];
  float acc_rescale[ROWS] = {};
  Left<bf16> rounded_weights[COLUMNS / 4];
  int kv_start, kind;
  bool last, moves = false;  // a maximum of the warp's rows has changed: the next tile may well exceed it too
  const auto next_tile = [&] {
    column_pipe.wait(column_at);
    const Vec<int32, 2> visit = load_by_warp<2>(visits, 2 * column_at.stage());
    kv_start = visit[0];
    kind = visit[1] >> 2 * group & 3;
    last = visit[1] >> 16;
  };
  const auto free_columns = [&] {
    column_pipe.pass(column_at);
    if (leader && last) rows_in.free(row_at);
  };
  const auto start_work = [&] {
    rows_in.wait(row_at);
    if (announced(row_at.count)[0] < 0) return false;
    block = block_at(p, row_at.count, 64 * group);
    start_rows(p, block, rows, row0);
    next_tile();
    while (kind == 0 && !last && column_at.count - sum_at.count < STAGES) {
      free_columns();
      next_tile();
    }
    return true;
  };
  // Sums are measured from maxima that have changed.
  const auto rescale = [&] {
    if (!__any_sync(FULL_WARP, acc_rescale[0] != 1.0f || acc_rescale[1] != 1.0f)) return false;
    UNROLL for (int r = 0; r < ROWS; ++r)
        UNROLL for (int f = 0; f < FEATURES; ++f) acc[r][f] *= acc_rescale[r];
    return true;
  };
  const auto add_sums = [&] {
    sum_pipe.wait(sum_at);
    wgmma_fence();
    multiply_add(acc, rounded_weights, buffer<VTile>(V_AT, sum_at.stage()));  // acc += weights V
    wgmma_commit();
  };
  const auto store_results = [&] {
    const Block done = block_at(p, row_at.count - 1, 64 * group);
    finish(done, done_rows, lane, acc);
    store_rows(p, done, done_rows, lane, acc);
  };
  // A tile's products run beside the sums of the tile before, which may be the last one of the work before.
  const auto step = [&](auto begins, auto alone) {
    float s[ROWS][COLUMNS];
    wgmma_fence();
    // s = sum_d Q K
    multiply(s, buffer<QTile>(Q_AT, row_at.stage() * CONSUMERS + group),
        transposed(buffer<KTile>(K_AT, column_at.stage())));
    wgmma_commit();
    if constexpr (!alone.value) add_sums();
    wgmma_wait<alone.value ? 0 : 1>(s);
    free_columns();
    if (kind != 2) mask(p, rows, kv_start, lane, s);
    if constexpr (!alone.value) {
      wgmma_wait<0>(acc, rounded_weights);
      sum_pipe.pass(sum_at);
    }
    if constexpr (begins.value) {
      while (sum_at.count + 1 < column_at.count) {
        sum_pipe.wait(sum_at);
        sum_pipe.pass(sum_at);
      }
      if constexpr (!alone.value) store_results();
      UNROLL for (int r = 0; r < ROWS; ++r) UNROLL for (int f = 0; f < FEATURES; ++f) acc[r][f] = 0.0f;
    }
    const bool looks = begins.value || moves || !update<false>(rows, s, acc_rescale, rounded_weights);
    if (looks) update<true>(rows, s, acc_rescale, rounded_weights);
    moves = looks && !begins.value && rescale();
  };

  start_work();
  step(Known<true>(), Known<true>());
  for (;;) {
#pragma unroll 1
    while (!last) {
      next_tile();
      step(Known<false>(), Known<false>());
    }
    UNROLL for (int r = 0; r < ROWS; ++r) done_rows[r] = rows[r];
    row_at.next();
    if (!start_work()) break;
    step(Known<true>(), Known<false>());
  }
  add_sums();
  wgmma_wait<0>(acc, rounded_weights);
  store_results();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ Params p) {
  if (threadIdx.x == 0) {
    prefetch(p.Q_map);
    prefetch(p.K_map);
    prefetch(p.V_map);
    // of so many readers, and one writer
    for (int group = 0; group < CONSUMERS; ++group) buffer<RowPipe>(ROW_PIPE_AT, group).init(1);
    Pipe<STAGES>(COLUMN_PIPE_AT).init(4 * CONSUMERS);
    Pipe<STAGES>(SUM_PIPE_AT).init(4 * CONSUMERS);
    publish_barriers();
  }
  __syncthreads();  // the barriers are there
  const int group = warpgroup();
  if (group == CONSUMERS) {
    shrink_registers<24>();
    if (threadIdx.x % 128 < 32 && elect_one()) produce(p);  // has tiles copied
  } else {
    grow_registers<240>();
    consume(p, group);  // multiplies and sums, tile by tile
  }
}
