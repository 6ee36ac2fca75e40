// Causal attention in one pass: out[b, h, q, dv] = sum_kv softmax(scale * q k^T + mask)[q, kv] * v[kv, dv]
//
//   for each tile of BLOCK_Q rows (one block):
//     for each tile of BLOCK_KV columns:   s = q k^T;  m' = max(m, rowmax s);  p = exp(s - m')
//                                          l = l exp(m - m') + rowsum p;  acc = acc exp(m - m') + p v
//     out = acc / l;  lse = m + log l

#include "math.cuh"
#include "shared.cuh"
#include "types.cuh"
#include "warp.cuh"

using Element = ELEMENT;

constexpr int HEAD_DIM = 64;
constexpr int BLOCK_Q = 64, BLOCK_KV = 64;
constexpr int THREADS = 128;
constexpr int LANES = 8;                         // lanes that share a row
constexpr int ROWS = BLOCK_Q * LANES / THREADS;  // rows of a thread: 4
constexpr int COLUMNS = BLOCK_KV / LANES;        // columns of a thread: 8
constexpr int WIDTH = HEAD_DIM / LANES;          // accumulators of a thread in a row: 8
constexpr int PITCH = HEAD_DIM + 4, P_PITCH = BLOCK_KV + 4;

constexpr uint32 Q_AT = 0;
constexpr uint32 K_AT = Q_AT + BLOCK_Q * PITCH * 4;
constexpr uint32 V_AT = K_AT + BLOCK_KV * PITCH * 4;
constexpr uint32 P_AT = V_AT + BLOCK_KV * PITCH * 4;

struct Params {
  const Element* q;  // [heads, q_len, HEAD_DIM]
  const Element* k;  // [heads, kv_len, HEAD_DIM]
  const Element* v;  // [heads, kv_len, HEAD_DIM]
  Element* out;      // [heads, q_len, HEAD_DIM]
  float* lse;        // [heads, q_len]
  int q_len, kv_len;
  float scale;
};

// Copies `rows` rows of a matrix into shared memory, rows past the end as zeros.
template <int BLOCK_ROWS>
__device__ __forceinline__ void load_tile(Shared<float, BLOCK_ROWS * PITCH> tile, const Element* from,
                                          int rows) {
  constexpr int VECTOR = 16 / sizeof(Element);
  for (int i = threadIdx.x * VECTOR; i < BLOCK_ROWS * HEAD_DIM; i += THREADS * VECTOR) {
    const int row = i / HEAD_DIM, column = i % HEAD_DIM;
    Vec<Element, VECTOR> values = {};
    if (row < rows) values = load_vector<VECTOR>(from + i);
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) tile[row * PITCH + column + j] = to_float(values[j]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_forward(const __grid_constant__ Params p) {
  const Shared<float, BLOCK_Q * PITCH> q_tile(Q_AT);
  const Shared<float, BLOCK_KV * PITCH> k_tile(K_AT);
  const Shared<float, BLOCK_KV * PITCH> v_tile(V_AT);
  const Shared<float, BLOCK_Q * P_PITCH> p_tile(P_AT);

  const int head = blockIdx.y;
  const int q_start = blockIdx.x * BLOCK_Q;
  const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;

  load_tile<BLOCK_Q>(q_tile, p.q + (int64(head) * p.q_len + q_start) * HEAD_DIM, p.q_len - q_start);

  float m[ROWS], l[ROWS], acc[ROWS][WIDTH];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    m[r] = -INFINITY;
    l[r] = 0.0f;
#pragma unroll
    for (int c = 0; c < WIDTH; ++c) acc[r][c] = 0.0f;
  }

  const int kv_end = minimum(p.kv_len, q_start + BLOCK_Q);
  for (int kv_start = 0; kv_start < kv_end; kv_start += BLOCK_KV) {
    const int64 tile_at = (int64(head) * p.kv_len + kv_start) * HEAD_DIM;
    load_tile<BLOCK_KV>(k_tile, p.k + tile_at, p.kv_len - kv_start);
    load_tile<BLOCK_KV>(v_tile, p.v + tile_at, p.kv_len - kv_start);
    __syncthreads();  // the tiles are there

    float s[ROWS][COLUMNS] = {};
    for (int d = 0; d < HEAD_DIM; d += 4) {
      Vec<float, 4> q_part[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) q_part[r] = load_vector<4>(q_tile, (group * ROWS + r) * PITCH + d);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        const Vec<float, 4> k_part = load_vector<4>(k_tile, (c * LANES + lane) * PITCH + d);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[r][c] += q_part[r][e] * k_part[e];
        }
      }
    }

#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int q = q_start + group * ROWS + r;
      float row_max = m[r];
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        const int kv = kv_start + c * LANES + lane;
        s[r][c] = kv <= q && kv < p.kv_len ? s[r][c] * p.scale : -INFINITY;
        row_max = maximum(row_max, s[r][c]);
      }
      row_max = lane_max<LANES>(row_max);
      const float rescale = row_max == -INFINITY ? 1.0f : expf(m[r] - row_max);
      float row_sum = 0.0f;
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        const float weight = s[r][c] == -INFINITY ? 0.0f : expf(s[r][c] - row_max);
        row_sum += weight;
        p_tile[(group * ROWS + r) * P_PITCH + c * LANES + lane] = weight;
      }
      m[r] = row_max;
      l[r] = l[r] * rescale + lane_sum<LANES>(row_sum);
#pragma unroll
      for (int c = 0; c < WIDTH; ++c) acc[r][c] *= rescale;
    }
    __syncwarp();  // the rows of p_tile are written and read by the same warp

    for (int kv = 0; kv < BLOCK_KV; ++kv) {
      float weight[ROWS];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) weight[r] = p_tile[(group * ROWS + r) * P_PITCH + kv];
#pragma unroll
      for (int c = 0; c < WIDTH; ++c) {
        const float value = v_tile[kv * PITCH + c * LANES + lane];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) acc[r][c] += weight[r] * value;
      }
    }
    __syncthreads();  // all have read the tiles
  }

#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int q = q_start + group * ROWS + r;
    if (q < p.q_len) {
      const int64 row = int64(head) * p.q_len + q;
#pragma unroll
      for (int c = 0; c < WIDTH; ++c) {
        p.out[row * HEAD_DIM + c * LANES + lane] =
            from_float<Element>(l[r] == 0.0f ? 0.0f : acc[r][c] / l[r]);
      }
      if (lane == 0) p.lse[row] = m[r] + logf(l[r]);
    }
  }
}
