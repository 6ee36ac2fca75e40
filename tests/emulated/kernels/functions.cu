// Every function of the device headers, each in a kernel over arrays: result[i] = f(x[i], y[i], ...).

#include "async.cuh"
#include "atomic.cuh"
#include "math.cuh"
#include "random.cuh"
#include "shared.cuh"
#include "types.cuh"
#include "warp.cuh"

struct Arrays {
  const void* x;
  const void* y;
  void* result;
  int64 count;
};

template <class X, class Result, class Function>
__device__ __forceinline__ void for_each(const Arrays& p, Function function) {
  const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < p.count) {
    static_cast<Result*>(p.result)[i] =
        function(static_cast<const X*>(p.x)[i], static_cast<const X*>(p.y)[i]);
  }
}

extern "C" __global__ void fp16_to_float(const __grid_constant__ Arrays p) {
  for_each<fp16, float>(p, [](fp16 x, fp16) { return to_float(x); });
}

extern "C" __global__ void bf16_to_float(const __grid_constant__ Arrays p) {
  for_each<bf16, float>(p, [](bf16 x, bf16) { return to_float(x); });
}

extern "C" __global__ void float_to_fp16(const __grid_constant__ Arrays p) {
  for_each<float, fp16>(p, [](float x, float) { return from_float<fp16>(x); });
}

extern "C" __global__ void float_to_bf16(const __grid_constant__ Arrays p) {
  for_each<float, bf16>(p, [](float x, float) { return from_float<bf16>(x); });
}

template <class T>
struct Numbers {
  T div, mod, most, least;
};

template <class T>
__device__ __forceinline__ Numbers<T> numbers(T x, T y) {
  return {floor_div(x, y), floor_mod(x, y), maximum(x, y), minimum(x, y)};
}

extern "C" __global__ void numbers_int32(const __grid_constant__ Arrays p) {
  for_each<int32, Numbers<int32>>(p, numbers<int32>);
}

extern "C" __global__ void numbers_int64(const __grid_constant__ Arrays p) {
  for_each<int64, Numbers<int64>>(p, numbers<int64>);
}

extern "C" __global__ void numbers_float(const __grid_constant__ Arrays p) {
  for_each<float, Numbers<float>>(p, numbers<float>);
}

extern "C" __global__ void quotients(const __grid_constant__ Arrays p) {
  for_each<float, float>(p, [](float x, float y) { return divide(x, y); });
}

struct Curves {
  float exp, exp2, log, log2, tanh, erf, sqrt, rsqrt, sin, cos, fabs, floor, exp2_approx, tanh_approx,
      sin_approx, cos_approx;
};

extern "C" __global__ void curves(const __grid_constant__ Arrays p) {
  for_each<float, Curves>(p, [](float x, float) {
    return Curves{expf(x),   exp2f(x), logf(x), log2f(x), tanhf(x),  erff(x),        sqrtf(x),
                  rsqrtf(x), sinf(x),  cosf(x), fabsf(x), floorf(x), exp2_approx(x), tanh_approx(x),
                  sin_approx(x), cos_approx(x)};
  });
}

struct PhiloxCall {
  uint32 key[2], counter[4];
};

extern "C" __global__ void philox_words(const __grid_constant__ Arrays p) {
  for_each<PhiloxCall, RandomWords>(p, [](PhiloxCall x, PhiloxCall) {
    return philox(x.key[0], x.key[1], x.counter[0], x.counter[1], x.counter[2], x.counter[3]);
  });
}

struct DropoutCall {
  uint64 seed;
  int32 ordinal, b, h, q, kv, padding;
};

extern "C" __global__ void dropout_element(const __grid_constant__ Arrays p) {
  for_each<DropoutCall, uint32>(
      p, [](DropoutCall x, DropoutCall) { return dropout_bits(x.seed, x.ordinal, x.b, x.h, x.q, x.kv); });
}

struct Drawn {
  uint32 along[4], across[4];  // of rows: bit c for column c
};

// One warp: a lane has rows 8 apart, of each two of every eight columns, from the even ones of a block of 16 on.
extern "C" __global__ void random_tests(const __grid_constant__ Arrays p) {
  for_each<DropoutCall, Drawn>(p, [](DropoutCall x, DropoutCall) {
    const int row = threadIdx.x / 4, column = threadIdx.x % 4 * 2;
    RandomTests<4, 24> along, across;
    along.draw<20000>(x.seed, x.ordinal, x.b, x.h, x.q + row, x.kv + column);
    across.draw_across<50000>(x.seed, x.ordinal, x.b, x.h, x.q + column, x.kv + row);
    Drawn drawn = {};
    for (int r = 0; r < 4; ++r) {
      for (int c = 0; c < 24; ++c) {
        drawn.along[r] |= static_cast<uint32>(along(r, c)) << c;
        drawn.across[r] |= static_cast<uint32>(across(r, c)) << c;
      }
    }
    return drawn;
  });
}

struct Exchanges {
  float from_3, flipped_5, down_2, flipped_in_8, down_in_8, sum_8, max_32, min_4;
  uint32 votes, votes_of_half;
};

// One block of one warp: x holds 32 floats.
extern "C" __global__ void exchanges(const __grid_constant__ Arrays p) {
  for_each<float, Exchanges>(p, [](float x, float) {
    Exchanges e;
    e.from_3 = __shfl_sync(FULL_WARP, x, 3);
    e.flipped_5 = __shfl_xor_sync(FULL_WARP, x, 5);
    e.down_2 = __shfl_down_sync(FULL_WARP, x, 2);
    e.flipped_in_8 = __shfl_xor_sync(FULL_WARP, x, 9, 8);
    e.down_in_8 = __shfl_down_sync(FULL_WARP, x, 3, 8);
    e.sum_8 = lane_sum<8>(x);
    e.max_32 = lane_max<32>(x);
    e.min_4 = lane_min<4>(x);
    e.votes = __ballot_sync(FULL_WARP, x > 0.0f);
    e.votes_of_half = 0;
    if (threadIdx.x < 16) e.votes_of_half = __ballot_sync(0xffffu, x > 0.0f);
    return e;
  });
}

// result[0] sums x in fp32 and the last two in fp64; result[1] counts the threads; result[2 + i] says that number i was
// given out.
extern "C" __global__ void atomics(const __grid_constant__ Arrays p) {
  const int64 i = int64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < p.count) {
    const float x = static_cast<const float*>(p.x)[i];
    atomic_add(static_cast<float*>(p.result), x);
    atomic_add(reinterpret_cast<double*>(static_cast<float*>(p.result) + 2 + p.count), x);
    const int32 number = fetch_next(static_cast<int32*>(p.result) + 1);
    static_cast<int32*>(p.result)[2 + number] = 1;
  }
}

// Blocks add to result[1] in the order of their numbers: total = total * 3 + number. result[0] is the turn.
extern "C" __global__ void turns(const __grid_constant__ Arrays p) {
  if (threadIdx.x == 0) {
    int32* turn = static_cast<int32*>(p.result);
    const int32 number = static_cast<const int32*>(p.x)[blockIdx.x];
    wait_for_turn(turn, number);
    turn[1] = turn[1] * 3 + number;
    pass_turn(turn);
  }
}

// Each thread brings 4 vectors into a ring of two and sums them: result[i] = sum of x[i * 16 .. i * 16 + 15].
extern "C" __global__ void pipelined_sum(const __grid_constant__ Arrays p) {
  const Shared<float, 2 * 32 * 4> ring(0);
  const int i = threadIdx.x;
  const float* from = static_cast<const float*>(p.x) + (blockIdx.x * 32 + i) * 16;
  float sum = 0.0f;
  copy_async<4>(ring, i * 4, from);
  copy_async_commit();
  for (int step = 0; step < 4; ++step) {
    if (step < 3) copy_async<4>(ring, ((step + 1) % 2 * 32 + i) * 4, from + (step + 1) * 4);
    copy_async_commit();
    copy_async_wait<1>();
    const Vec<float, 4> values = load_vector<4>(ring, (step % 2 * 32 + i) * 4);
    for (int j = 0; j < 4; ++j) sum += values[j];
  }
  static_cast<float*>(p.result)[blockIdx.x * 32 + i] = sum;
}
