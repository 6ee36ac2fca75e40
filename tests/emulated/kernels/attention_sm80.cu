// Causal attention in one pass on tensor cores: O = softmax(scale Q K^T + mask) V
//
//   for each tile of BLOCK_Q rows (one block):
//     for each tile of BLOCK_KV columns:   s = Q K^T;  m' = max(m, rowmax s);  w = exp(scale (s - m'))
//                                          l = l exp(scale (m - m')) + rowsum w
//                                          acc = acc exp(scale (m - m')) + w V
//     O = acc / l;  lse = scale m + log l

#include "async.cuh"
#include "edges.cuh"
#include "math.cuh"
#include "mma.cuh"
#include "shared.cuh"
#include "types.cuh"
#include "warp.cuh"

using Element = ELEMENT;

constexpr int HEAD_DIM = 64;
constexpr int BLOCK_Q = 128, BLOCK_KV = 64;
constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int LANES = 4;                         // lanes that share a row
constexpr int ROWS = BLOCK_Q * LANES / THREADS;  // rows of a thread
constexpr int COLUMNS = BLOCK_KV / LANES;        // columns of a thread
constexpr int FEATURES = HEAD_DIM / LANES;       // accumulators of a thread in a row
constexpr int MIN_BLOCKS = 2;                    // on a multiprocessor
constexpr float LOG2E = 1.44269504f;

using QTile = OperandTile<Element, BLOCK_Q, HEAD_DIM>;
using KTile = OperandTile<Element, BLOCK_KV, HEAD_DIM>;

constexpr uint32 Q_AT = 0;
constexpr uint32 K_AT = Q_AT + QTile::BYTES;
constexpr uint32 V_AT = K_AT + KTile::BYTES;

struct Params {
  const Element* Q;  // [b, h, q, d]
  const Element* K;  // [b, h, kv, d]
  const Element* V;  // [b, h, kv, d]
  Element* O;        // [b, h, q, d]
  float* lse;        // [b, h, q]
  int64 Q_b, Q_h, Q_q, K_b, K_h, K_kv, V_b, V_h, V_kv, O_b, O_h, O_q;
  int32 q_len, kv_len, heads, batch;
  float scale;
};

// Issues the copy of a tile's rows, 16 bytes at a time; those past the last of `rows` become 0. A team of
// neighbouring threads copies a row, so that all addresses of a thread differ by constants.
template <int BLOCK>
__device__ __forceinline__ void copy_tile(const OperandTile<Element, BLOCK, HEAD_DIM>& tile,
                                          const Element* from, int64 stride, int rows) {
  constexpr int TEAM = tile.TEAM, STEP = THREADS / TEAM;
  const int row = threadIdx.x / TEAM, column = threadIdx.x % TEAM * 8, at = opaque(tile.at(row, column));
  from += row * stride + column;
#pragma unroll
  for (int i = 0; i < BLOCK; i += STEP) {
#pragma unroll
    for (int j = 0; j < HEAD_DIM; j += TEAM * 8) {
      copy_async<8>(tile.elements, at + i * tile.PITCH + j, from + j, row + i < rows ? 8 : 0);
    }
    from += STEP * stride;
  }
}

// s = Q K^T
__device__ __forceinline__ void scores(float (&s)[ROWS][COLUMNS], const QTile& q_tile, const KTile& k_tile) {
  const int first = threadIdx.x / 32 * (8 * ROWS);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) s[r][c] = 0.0f;
  }
#pragma unroll
  for (int d = 0; d < HEAD_DIM; d += 16) {
    Left<Element> q[ROWS / 2];
#pragma unroll
    for (int r = 0; r < ROWS; r += 2) q[r / 2] = load_left(q_tile, first + 8 * r, d);
#pragma unroll
    for (int c = 0; c < COLUMNS; c += 4) {
      const Right<Element> k = load_right_transposed(k_tile, 4 * c, d);
#pragma unroll
      for (int r = 0; r < ROWS; r += 2) multiply_add(s[r], s[r + 1], c, q[r / 2], k);
    }
  }
}

// acc += w V
__device__ __forceinline__ void weigh(float (&acc)[ROWS][FEATURES], const float (&w)[ROWS][COLUMNS],
                                      const KTile& v_tile) {
#pragma unroll
  for (int c = 0; c < COLUMNS; c += 4) {
    Left<Element> weights[ROWS / 2];
#pragma unroll
    for (int r = 0; r < ROWS; r += 2) weights[r / 2] = left_from<Element>(w[r], w[r + 1], c);
#pragma unroll
    for (int f = 0; f < FEATURES; f += 4) {
      const Right<Element> v = load_right(v_tile, 4 * c, 4 * f);
#pragma unroll
      for (int r = 0; r < ROWS; r += 2) multiply_add(acc[r], acc[r + 1], f, weights[r / 2], v);
    }
  }
}

// The position of a thread's row r in its tile, and of its column c.
__device__ __forceinline__ int row_of(int r) {
  return threadIdx.x / 32 * (8 * ROWS) + 8 * r + threadIdx.x % 32 / LANES;
}

__device__ __forceinline__ int column_of(int c) {
  return 8 * (c / 2) + 2 * (threadIdx.x % LANES) + c % 2;
}

// What a row keeps from tile to tile.
struct Row {
  float m, l;
};

// The statistics of a tile's scores, which become weights. Only where PARTIAL, elements may be masked.
template <bool PARTIAL>
__device__ __forceinline__ void softmax(Row (&rows)[ROWS], float (&acc)[ROWS][FEATURES],
                                        float (&s)[ROWS][COLUMNS], const Params& p, int q_first,
                                        int kv_first) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    Row& row = rows[r];
    const float m_old = row.m;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      if (PARTIAL) {
        const int kv = kv_first + column_of(c);
        if (kv > q_first + row_of(r) || kv >= p.kv_len) s[r][c] = -INFINITY;
      }
      row.m = fmaxf(row.m, s[r][c]);
    }
    row.m = fmaxf(row.m, __shfl_xor_sync(FULL_WARP, row.m, 1));
    row.m = fmaxf(row.m, __shfl_xor_sync(FULL_WARP, row.m, 2));
    const float scale = p.scale * LOG2E, shift = scale * finite_or_zero(row.m);
    const float rescale = exp2_approx(fmaf(m_old, scale, -shift));
    row.l *= rescale;
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) acc[r][f] *= rescale;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      s[r][c] = exp2_approx(fmaf(s[r][c], scale, -shift));
      row.l += s[r][c];
    }
  }
}

template <bool VALUE>
struct Partial {
  static constexpr bool value = VALUE;
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    attention_forward(const __grid_constant__ Params p) {
  const QTile q_tile(Q_AT);
  const KTile k_tile(K_AT), v_tile(V_AT);

  // Longest rows first, heads innermost.
  const int tiles = (p.q_len + BLOCK_Q - 1) / BLOCK_Q, heads = p.heads * p.batch;
  const int b = blockIdx.x % heads / p.heads, h = blockIdx.x % heads % p.heads;
  const int q_first = (tiles - 1 - int(blockIdx.x) / heads) * BLOCK_Q;

  const Element* Q = p.Q + b * p.Q_b + h * p.Q_h;
  const Element* K = p.K + b * p.K_b + h * p.K_h;
  const Element* V = p.V + b * p.V_b + h * p.V_h;
  copy_tile(q_tile, Q + q_first * p.Q_q, p.Q_q, p.q_len - q_first);
  copy_tile(k_tile, K, p.K_kv, p.kv_len);
  copy_async_commit();

  Row rows[ROWS];
  float acc[ROWS][FEATURES];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    rows[r] = {-INFINITY, 0.0f};
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) acc[r][f] = 0.0f;
  }

  const int end =
      minimum(p.kv_len, q_first + BLOCK_Q);  // the keys that some row sees, and the tiles that all see
  const int full_end = minimum(p.kv_len, q_first + 1) / BLOCK_KV * BLOCK_KV;

  const auto visit = [&](int kv_first, auto partial) {
    copy_async_wait<0>();  // for this thread's part of K
    __syncthreads();       // K is there, and all have read V
    copy_tile(v_tile, V + kv_first * p.V_kv, p.V_kv, p.kv_len - kv_first);
    copy_async_commit();
    float s[ROWS][COLUMNS];
    scores(s, q_tile, k_tile);
    copy_async_wait<0>();  // for this thread's part of V
    __syncthreads();       // V is there, and all have read K
    if (kv_first + BLOCK_KV < end) {
      copy_tile(k_tile, K + (kv_first + BLOCK_KV) * p.K_kv, p.K_kv, p.kv_len - kv_first - BLOCK_KV);
    }
    copy_async_commit();
    softmax<partial.value>(rows, acc, s, p, q_first, kv_first);
    weigh(acc, s, v_tile);
  };
  int kv_first = 0;
  for (; kv_first < full_end; kv_first += BLOCK_KV) visit(kv_first, Partial<false>());
  for (; kv_first < end; kv_first += BLOCK_KV) visit(kv_first, Partial<true>());

#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int q = q_first + row_of(r);
    const float l = lane_sum<LANES>(rows[r].l);
    if (q < p.q_len) {
      const float inverse = quotient(1.0f, l);
      Element* O = p.O + b * p.O_b + h * p.O_h + q * p.O_q;
#pragma unroll
      for (int f = 0; f < FEATURES; f += 2) {
        const Vec<Element, 2> pair = {
            {from_float<Element>(acc[r][f] * inverse), from_float<Element>(acc[r][f + 1] * inverse)}};
        store_vector(O + column_of(f), pair);
      }
      if (threadIdx.x % LANES == 0) {
        p.lse[(int64(b) * p.heads + h) * p.q_len + q] = rows[r].m * p.scale + logf(l);
      }
    }
  }
}
