// Attention in one pass on a Hopper GPU: O[b, h, q, dv] = sum_kv softmax(scale * Q K^T + mask)[q, kv] * V[kv, dv]
//
//   a block takes one work after another: BLOCK_Q rows of a head, 64 to each warpgroup
//     the producer, one thread, has Q, K and V copied to buffers used in turn
//     each consumer, a warpgroup, for each tile of BLOCK_KV keys, the last first:
//       S = Q K^T, issued together with O += P V of the tile before
//       m' = max(m, rowmax S);  P = exp2(scale (S - m'));  l = l exp2(scale (m - m')) + rowsum P, as P V runs
//       O = O exp2(scale (m - m'))
//     after the last tile O / l and lse = scale m + log l, as the first tile of the next work is multiplied

#include "atomic.cuh"
#include "edges.cuh"
#include "math.cuh"
#include "mbarrier.cuh"
#include "panels.cuh"
#include "quad.cuh"
#include "roles.cuh"
#include "shared.cuh"
#include "tma.cuh"
#include "types.cuh"
#include "warp.cuh"
#include "wgmma.cuh"

using Element = ELEMENT;

constexpr int HEAD_DIM = 64;
constexpr int BLOCK_KV = 64;
constexpr int GROUPS = 2;      // consumers
constexpr int STAGES = 2;      // buffers of K, and of V
constexpr int Q_STAGES = 2;    // buffers of Q; where there are two, O is staged in the one it leaves
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
constexpr bool CAUSAL = true;
constexpr bool TURNS = true;      // consumers issue their products in turn
constexpr bool PASS_OVER = true;  // a consumer passes over the first tiles that none of its rows sees
constexpr bool STAGED = Q_STAGES == 2;
constexpr bool RESCALE_FIRST = HEAD_DIM > 128;  // before P V is issued, not after it

constexpr int BLOCK_Q = 64 * GROUPS, THREADS = 128 * (GROUPS + 1);
constexpr int COLUMNS = BLOCK_KV / 4, FEATURES = HEAD_DIM / 4;  // of a thread, in each of its two rows
constexpr float LOG2E = 1.44269504f;
constexpr float SLACK = 8.0f;  // a maximum may be exceeded by a factor of 2^SLACK before it is replaced

using QTile = Panels<Element, 64, HEAD_DIM>;
using KTile = Panels<Element, BLOCK_KV, HEAD_DIM>;

constexpr uint32 Q_AT = 0;
constexpr uint32 K_AT = Q_AT + Q_STAGES * GROUPS * QTile::BYTES;
constexpr uint32 V_AT = K_AT + STAGES * KTile::BYTES;
constexpr uint32 WORK_AT = V_AT + STAGES * KTile::BYTES;
constexpr uint32 Q_PIPE_AT = WORK_AT + 64;
constexpr uint32 K_PIPE_AT = Q_PIPE_AT + GROUPS * Pipe<Q_STAGES>::BYTES;
constexpr uint32 V_PIPE_AT = K_PIPE_AT + Pipe<STAGES>::BYTES;

struct Params {
  TensorMap Q;   // [b, h, q, d], boxes of 64 rows
  TensorMap K;   // [b, hk, kv, d], boxes of BLOCK_KV rows
  TensorMap V;   // [b, hk, kv, d], boxes of BLOCK_KV rows
  TensorMap O;   // [b, h, q, d], boxes of 64 rows
  Element* O_at;
  float* lse;      // [b, h, q]
  int32* counter;  // 0 before and after a launch
  int64 O_b, O_h, O_q;
  int32 q_len, kv_len, q_heads, group, batch;
  int32 section;  // heads whose keys stay in the L2 cache together
  float scale;
};

// BLOCK_Q rows of a head from q_first on, and the tiles of keys they see; head < 0: there is no more work.
struct Work {
  int32 q_first, head, begin, end;
};

__device__ __forceinline__ QTile q_tile(uint32 stage, int group) {
  return QTile(Q_AT + (stage * GROUPS + group) * QTile::BYTES);
}

__device__ __forceinline__ KTile k_tile(uint32 stage) {
  return KTile(K_AT + stage * KTile::BYTES);
}

__device__ __forceinline__ KTile v_tile(uint32 stage) {
  return KTile(V_AT + stage * KTile::BYTES);
}

__device__ __forceinline__ Pipe<Q_STAGES> q_pipe(int group) {
  return Pipe<Q_STAGES>(Q_PIPE_AT + group * Pipe<Q_STAGES>::BYTES);
}

// How many keys a row sees: those from 0 on.
__device__ __forceinline__ int seen(const Params& p, int q) {
  return CAUSAL ? maximum(minimum(p.kv_len, q + p.kv_len - p.q_len + 1), 0) : p.kv_len;
}

__device__ __forceinline__ int tiles_of_rows(const Params& p) {
  return (p.q_len + BLOCK_Q - 1) / BLOCK_Q;
}

// The work of a number: section by section of heads, in each the longest rows first.
__device__ __forceinline__ Work work_of(const Params& p, int number) {
  const int tiles = tiles_of_rows(p), heads = p.q_heads * p.batch;
  const int section = number / (p.section * tiles), rest = number - section * p.section * tiles;
  const int wide = minimum(p.section, heads - section * p.section), row = rest / wide;
  Work work;
  work.q_first = (CAUSAL ? tiles - 1 - row : row) * BLOCK_Q;
  work.head = section * p.section + rest - row * wide;
  work.begin = 0;
  const int last = minimum(work.q_first + BLOCK_Q, p.q_len) - 1;
  work.end = maximum((seen(p, last) + BLOCK_KV - 1) / BLOCK_KV, 1);
  return work;
}

__device__ __forceinline__ void produce(const Params& p) {
  const Shared<int32, 16> works(WORK_AT);
  const Pipe<STAGES> k_pipe(K_PIPE_AT), v_pipe(V_PIPE_AT);
  const int count = tiles_of_rows(p) * p.q_heads * p.batch;
  Ring<Q_STAGES> q_at;
  Ring<STAGES> at;
  for (int number = blockIdx.x; number < count; q_at.next()) {
    const Work work = work_of(p, number);
    const int b = work.head / p.q_heads, h = work.head - b * p.q_heads, hk = h / p.group;
    store_vector(works, q_at.count % 4 * 4, Vec<int32, 4>{work.q_first, work.head, work.begin, work.end});
    const auto load_q = [&](int group) {
      q_pipe(group).wait_free(q_at);
      const Barrier filled = q_pipe(group).fill(q_at, QTile::BYTES);
      load_tile(q_tile(q_at.stage(), group), p.Q, filled, work.q_first + 64 * group, h, b);
    };
    // The next work is claimed late: claimed early, it would wait behind this one while another block is idle.
    const int claim = minimum(work.begin + 1, work.end - 1);
    load_q(0);
    for (int tile = work.end - 1; tile >= work.begin; --tile, at.next()) {
      k_pipe.wait_free(at);
      load_tile(k_tile(at.stage()), p.K, k_pipe.fill(at, KTile::BYTES), tile * BLOCK_KV, hk, b);
      if (tile == work.end - 1) {
        for (int group = 1; group < GROUPS; ++group) load_q(group);
      }
      if (tile == claim) number = gridDim.x + fetch_cyclic(p.counter, count);
      v_pipe.wait_free(at);
      load_tile(v_tile(at.stage()), p.V, v_pipe.fill(at, KTile::BYTES), tile * BLOCK_KV, hk, b);
    }
  }
  store_vector(works, q_at.count % 4 * 4, Vec<int32, 4>{0, -1, 0, 0});
  for (int group = 0; group < GROUPS; ++group) {
    q_pipe(group).wait_free(q_at);
    q_pipe(group).fill(q_at, 0);
  }
}

// What a thread knows of one of its two rows, and keeps from tile to tile.
struct Row {
  float m, l, rescale;
};

// The statistics of a tile's scores, which become weights. Gives whether the sums so far have to be rescaled.
__device__ __forceinline__ bool softmax(Row (&rows)[2], float (&s)[2][COLUMNS], float scale) {
  bool grew = false;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    Row& row = rows[r];
    float m = s[r][0];
#pragma unroll
    for (int c = 1; c < COLUMNS; ++c) m = fmaxf(m, s[r][c]);
    m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, 2));
    m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, 1));
    if ((m - row.m) * scale > SLACK) {
      grew = true;
    } else {
      m = row.m;
    }
    const float shift = finite_or_zero(m) * scale;
    row.rescale = exp2_approx(row.m * scale - shift);
    row.l *= row.rescale;
    row.m = m;
    float l = 0.0f;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      s[r][c] = exp2_approx(fmaf(s[r][c], scale, -shift));
      l += s[r][c];
    }
    row.l += l;
  }
  return grew;
}

// O / l and lse of finished rows; what is left in `o` is O.
__device__ __forceinline__ void finish(const Params& p, float (&o)[2][FEATURES], const Row (&rows)[2], int head,
                                       int q_first) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float l = lane_sum<4>(rows[r].l), inverse = quotient(1.0f, l);
    const int q = q_first + threadIdx.x % 128 / 32 * 16 + 8 * r + threadIdx.x % 32 / 4;
    if (threadIdx.x % 4 == 0 && q < p.q_len) {
      p.lse[int64(head) * p.q_len + q] = l > 0.0f ? rows[r].m * p.scale + logf(l) : -INFINITY;
    }
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) o[r][f] *= inverse;
  }
}

// O from the registers of four lanes, each of which stores eight neighbouring features.
__device__ __forceinline__ void store_rows(const Params& p, const float (&o)[2][FEATURES], int head, int q_first) {
  const int b = head / p.q_heads, h = head - b * p.q_heads;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int q = q_first + threadIdx.x % 128 / 32 * 16 + 8 * r + threadIdx.x % 32 / 4;
    Element* to = p.O_at + b * p.O_b + h * p.O_h + q * p.O_q + threadIdx.x % 4 * 8;
#pragma unroll
    for (int f = 0; f < FEATURES; f += 8) {
      uint32 word[4] = {pack<Element>(o[r][f], o[r][f + 1]), pack<Element>(o[r][f + 2], o[r][f + 3]),
                        pack<Element>(o[r][f + 4], o[r][f + 5]), pack<Element>(o[r][f + 6], o[r][f + 7])};
      exchange_quad(word);
      if (q < p.q_len) store_vector(reinterpret_cast<uint32*>(to + 4 * f), Vec<uint32, 4>{word[0], word[1], word[2], word[3]});
    }
  }
}

__device__ __forceinline__ void stage_rows(const float (&o)[2][FEATURES], const QTile& to) {
#pragma unroll
  for (int f = 0; f < FEATURES; f += 4) {
    store_left(to, threadIdx.x % 128 / 32 * 16, 4 * f, left_from<Element>(o[0], o[1], f));
  }
}

template <bool VALUE>
struct Is {
  static constexpr bool value = VALUE;
};

__device__ __forceinline__ void consume(const Params& p, int group) {
  const Shared<int32, 16> works(WORK_AT);
  const Pipe<Q_STAGES> queries(q_pipe(group));
  const Pipe<STAGES> k_pipe(K_PIPE_AT), v_pipe(V_PIPE_AT);
  const bool leader = threadIdx.x % 128 == 0;
  const float scale = p.scale * LOG2E;
  const int own_turn = 1 + group, next_turn = 1 + (group + 1) % GROUPS, own = 8 + group;
  Ring<Q_STAGES> q_at;
  Ring<STAGES> k_at, v_at;

  Work work;
  int first;         // the first tile that some row of this consumer sees
  int full_end;      // tiles before this one all its rows see entirely
  int row_seen[2];   // keys that each row of this thread sees
  Row rows[2];
  Work done = {};    // the work before, until its rows are stored
  uint32 done_stage = 0;
  Row done_rows[2] = {};
  float o[2][FEATURES];
  Left<Element> weights[BLOCK_KV / 16];
  bool grew = false;
  int storing = -1;  // the buffer of Q from which O is being stored

  const auto start_work = [&] {
    queries.wait(q_at);
    const Vec<int32, 4> word = load_vector<4>(works, q_at.count % 4 * 4);
    work = {word[0] + 64 * group, word[1], word[2], word[3]};
    if (work.head < 0) return false;
    first = work.end - 1;
    const int last_seen = seen(p, minimum(work.q_first + 63, p.q_len - 1));
    for (int i = 1; PASS_OVER && i < STAGES; ++i) {
      if (first > work.begin && last_seen <= first * BLOCK_KV) --first;
    }
    full_end = seen(p, minimum(work.q_first, p.q_len - 1)) / BLOCK_KV;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_seen[r] = seen(p, work.q_first + threadIdx.x % 128 / 32 * 16 + 8 * r + threadIdx.x % 32 / 4);
    }
    return true;
  };
  const auto start_rows = [&] {
#pragma unroll
    for (int r = 0; r < 2; ++r) rows[r] = {-INFINITY, 0.0f, 1.0f};
  };
  const auto start_sums = [&] {
    grew = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int f = 0; f < FEATURES; ++f) o[r][f] = 0.0f;
    }
  };
  const auto take_turn = [&] {
    if (TURNS) group_sync(own_turn, 256);  // the consumer before has issued its products
  };
  const auto pass_turn = [&] {
    if (TURNS) group_arrive(next_turn, 256);
  };
  const auto free_query = [&] {
    if (leader && storing >= 0) {
      store_wait_read<0>();
      arrive(queries.freed(storing));
    }
    storing = -1;
  };
  const auto free_key = [&](bool last) {
    if (leader) {
      k_pipe.free(k_at);
      if (!STAGED && last) queries.free(q_at);
    }
    k_at.next();
    if (STAGED) free_query();
  };
  const auto free_value = [&] {
    if (leader) v_pipe.free(v_at);
    v_at.next();
  };
  // Nothing joins the warps of a consumer between wait and release here but this barrier.
  const auto pass_over_keys = [&] {
    for (int tile = work.end - 1; tile > first; --tile) {
      k_pipe.wait(k_at);
      group_sync(own, 128);  // all four warps have seen the buffer filled
      free_key(false);
    }
  };
  const auto pass_over_values = [&] {
    for (int tile = work.end - 1; tile > first; --tile) {
      v_pipe.wait(v_at);
      group_sync(own, 128);  // all four warps have seen the buffer filled
      free_value();
    }
  };
  const auto pass_turns = [&] {
    for (int tile = work.end - 1; tile > first; --tile) {
      take_turn();
      pass_turn();
    }
  };
  // S = Q K^T
  const auto multiply_keys = [&](float (&s)[2][COLUMNS]) {
    wgmma_fence();
    multiply(s, q_tile(q_at.stage(), group), transposed(k_tile(k_at.stage())));
    wgmma_commit();
  };
  // O += P V
  const auto multiply_values = [&] {
    v_pipe.wait(v_at);
    wgmma_fence();
    multiply_add(o, weights, v_tile(v_at.stage()));
    wgmma_commit();
  };
  const auto rescale = [&] {
    if (!__any_sync(FULL_WARP, grew)) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int f = 0; f < FEATURES; ++f) o[r][f] *= rows[r].rescale;
    }
  };
  const auto weigh = [&](float (&s)[2][COLUMNS], int tile) {
    if (tile >= full_end) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int beyond = row_seen[r] - tile * BLOCK_KV - threadIdx.x % 4 * 2;
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          if (c / 2 * 8 + c % 2 >= beyond) s[r][c] = -INFINITY;
        }
      }
    }
    grew = softmax(rows, s, scale);
  };
  const auto round_weights = [&](const float (&s)[2][COLUMNS]) {
#pragma unroll
    for (int c = 0; c < COLUMNS; c += 4) weights[c / 4] = left_from<Element>(s[0], s[1], c);
  };
  const auto store = [&] {
    finish(p, o, done_rows, done.head, done.q_first);
    if (STAGED) {
      const QTile tile = q_tile(done_stage, group);
      stage_rows(o, tile);
      fence_async();
      group_sync(own, 128);  // all of O is in shared memory
      if (leader && done.q_first < p.q_len) {
        store_tile(p.O, tile, done.q_first, done.head % p.q_heads, done.head / p.q_heads);
        store_commit();
      }
      storing = done_stage;
    } else {
      store_rows(p, o, done.head, done.q_first);
    }
  };
  // One tile: its scores while the weights of the tile before are multiplied, which may be the last of another work.
  const auto step = [&](int tile, auto starts) {
    float s[2][COLUMNS];
    k_pipe.wait(k_at);
    take_turn();
    multiply_keys(s);
    if (RESCALE_FIRST) rescale();
    multiply_values();
    pass_turn();
    wgmma_wait<1>(s);
    free_key(tile == work.begin);
    if (starts.value) start_rows();
    weigh(s, tile);
    wgmma_wait<0>(o, weights);
    free_value();
    if (starts.value) {
      pass_over_values();
      store();
      start_sums();
    }
    round_weights(s);
    if (!RESCALE_FIRST) rescale();
  };

  if (group == GROUPS - 1) pass_turn();
  start_work();
  start_rows();
  start_sums();
  {
    float s[2][COLUMNS];
    pass_over_keys();
    k_pipe.wait(k_at);
    multiply_keys(s);
    wgmma_wait<0>(s);
    free_key(first == work.begin);
    pass_over_values();
    weigh(s, first);
    round_weights(s);
    grew = false;
  }
  pass_turns();
  for (;;) {
#pragma unroll 1
    for (int tile = first - 1; tile >= work.begin; --tile) step(tile, Is<false>());
    if (STAGED) free_query();
    done = work;
    done_stage = q_at.stage();
    done_rows[0] = rows[0];
    done_rows[1] = rows[1];
    q_at.next();
    if (!start_work()) break;
    pass_over_keys();
    pass_turns();
    step(first, Is<true>());
  }
  if (RESCALE_FIRST) rescale();
  multiply_values();
  wgmma_wait<0>(o, weights);
  store();
  store_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_forward(const __grid_constant__ Params p) {
  if (threadIdx.x == 0) {
    prefetch(p.Q);
    prefetch(p.K);
    prefetch(p.V);
    if (STAGED) prefetch(p.O);
    for (int group = 0; group < GROUPS; ++group) q_pipe(group).init(1);
    Pipe<STAGES>(K_PIPE_AT).init(GROUPS);
    Pipe<STAGES>(V_PIPE_AT).init(GROUPS);
    publish_barriers();
  }
  __syncthreads();  // the barriers are there
  const int group = warpgroup();
  if (group == GROUPS) {
    shrink_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x % 128 < 32 && elect_one()) produce(p);
  } else {
    grow_registers<CONSUMER_REGISTERS>();
    consume(p, group);
  }
}
