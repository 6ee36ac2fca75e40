// tiles.cuh: matrices in shared memory.
//
//   Tile<ROWS, WIDTH> tile(address)   fp32, from byte `address` of the block's shared memory; a row is followed by four
//                                     elements more, so that threads reading one column of many rows, or one vector
//                                     of each, meet different banks
//   tile(row, column)                 an element, to read or to assign
//   tile.load<N>(row, column)         elements column .. column + N - 1 of a row, one access
//   tile.store(row, column, values)   the same, written
//   fill_tile<THREADS>(tile, first, length, columns, element)
//       by the whole block: row i, column j becomes element(first + i, j). Past `length` the last row is repeated;
//       columns past `columns` become 0. Neighbouring threads ask for neighbouring columns. With a further argument
//       `from` the tile's first column is column `from`.
//   copy_tile<THREADS>(tile, first, length, columns, data, row_step, column_step)
//       the same for data[row * row_step + column * column_step]: in vectors of 16 bytes where the columns lie side by
//       side and all is aligned
//   compute_tile<THREADS>(tile, first, length, columns, read, element)
//       the same for element(read(row, column), row, column), where read gives Reads<N>{...}, N numbers: a thread reads
//       for several elements before it computes the first
//   fill_tile_by_rows copy_tile_by_rows compute_tile_by_rows   the same; neighbouring threads ask for neighbouring rows
//   UNROLL for (...)                  a loop whose every step is written out, so that its arrays are registers
//   add(sums, parts)                  each number of a part to its sum
//   add_exactly(sums, lost, parts)    the same; what rounding takes away is kept in `lost`, and the next part makes up
//                                     for it
//   largest(x) total(x)               of the numbers of an array, an even count: of neighbours first, so that half as many
//                                     operations wait for each other
//   take(rest, n)                     rest % n, and rest becomes rest / n
//   next_tile<BLOCK>(begin, end, from)
//       the first multiple of BLOCK from `from` on where a tile meets one of the ranges begin[i] .. end[i] - 1;
//       the largest int32 if there is none
//   next_tile_of<BLOCK>(begin, end, from, part, parts)
//       the same of those that one of several blocks has: every tile whose number leaves `part`, divided by `parts`
//   previous_tile<BLOCK>(begin, end, before)
//       the last multiple of BLOCK before `before` where a tile meets one of the ranges; -1 if there is none
//   partition_point(length, below)    how many of 0 .. length - 1 come before the first at which below(i) is false
//   place_between(low, high, below)   the same where it is known to lie between these, most often at one of them; with
//                                     further arguments `size` and `length`, the length if it is the size
//   partition_points(Places<N>{length ...}, below ...)
//       the same for N lengths and tests, by a whole warp: each lane asks at one place, for all tests at once
#pragma once

#include <math.cuh>
#include <shared.cuh>
#include <types.cuh>
#include <warp.cuh>

#define UNROLL _Pragma("unroll")

template <int N>
__device__ __forceinline__ void add(float (&sums)[N], const float (&parts)[N]) {
  UNROLL for (int i = 0; i < N; ++i) sums[i] += parts[i];
}

template <int N>
__device__ __forceinline__ void add_exactly(float (&sums)[N], float (&lost)[N], const float (&parts)[N]) {
  UNROLL for (int i = 0; i < N; ++i) {
    const float part = parts[i] - lost[i], sum = sums[i] + part;
    lost[i] = fabsf(sum) < INFINITY ? (sum - sums[i]) - part : 0.0f;
    sums[i] = sum;
  }
}

template <int N>
__device__ __forceinline__ float largest(const float (&x)[N]) {
  float most = maximum(x[0], x[1]);
  UNROLL for (int i = 2; i < N; i += 2) most = maximum(most, maximum(x[i], x[i + 1]));
  return most;
}

template <int N>
__device__ __forceinline__ float total(const float (&x)[N]) {
  float sum = x[0] + x[1];
  UNROLL for (int i = 2; i < N; i += 2) sum += x[i] + x[i + 1];
  return sum;
}

__device__ __forceinline__ int take(int& rest, int n) {
  const uint32 all = rest, count = n;  // neither is negative: a shorter division
  rest = all / count;
  return all % count;
}

template <int ROWS_, int WIDTH_>
struct Tile {
  static constexpr int ROWS = ROWS_, WIDTH = WIDTH_, PITCH = WIDTH_ + 4;
  Shared<float, ROWS_ * PITCH> memory;

  __device__ __forceinline__ explicit Tile(uint32 address) : memory(address) {}

  __device__ __forceinline__ float& operator()(int row, int column) const {
    return memory[row * PITCH + column];
  }

  template <int N>
  __device__ __forceinline__ Vec<float, N> load(int row, int column) const {
    return load_vector<N>(memory, row * PITCH + column);
  }

  template <int N>
  __device__ __forceinline__ void store(int row, int column, const Vec<float, N>& values) const {
    store_vector(memory, row * PITCH + column, values);
  }
};

// How many of `count` accesses a thread has on their way at once.
__device__ constexpr int batch_of(int count, int threads, int most) {
  return count <= threads ? 1 : count >= most * threads ? most : (count + threads - 1) / threads;
}

template <int N>
struct Reads {
  float values[N];
  __device__ __forceinline__ float operator[](int i) const { return values[i]; }
};

template <int THREADS, bool BY_ROWS = false, int ROWS, int WIDTH, class Read, class Element>
__device__ __forceinline__ void compute_tile(const Tile<ROWS, WIDTH>& tile, int first, int length,
                                             int columns, Read read, Element element, int from = 0) {
  constexpr int COUNT = ROWS * WIDTH, BATCH = batch_of(COUNT, THREADS, 8);
  const int last_row = length - first - 1, last_column = columns - from - 1;
  for (int start = threadIdx.x; start < COUNT; start += THREADS * BATCH) {
    decltype(read(0, 0)) got[BATCH];
    UNROLL for (int i = 0; i < BATCH; ++i) {
      const int at = minimum(start + i * THREADS, COUNT - 1);
      const int row = BY_ROWS ? at % ROWS : at / WIDTH, column = BY_ROWS ? at / ROWS : at % WIDTH;
      got[i] = read(first + minimum(row, last_row), from + minimum(column, last_column));
    }
    UNROLL for (int i = 0; i < BATCH; ++i) {
      const int at = start + i * THREADS;
      const int row = BY_ROWS ? at % ROWS : at / WIDTH, column = BY_ROWS ? at / ROWS : at % WIDTH;
      const float value =
          element(got[i], first + minimum(row, last_row), from + minimum(column, last_column));
      if (at < COUNT) tile(row, column) = column <= last_column ? value : 0.0f;
    }
  }
}

template <int THREADS, bool BY_ROWS = false, int ROWS, int WIDTH, class Element>
__device__ __forceinline__ void fill_tile(const Tile<ROWS, WIDTH>& tile, int first, int length, int columns,
                                          Element element, int from = 0) {
  const auto as_it_is = [](float value, int, int) { return value; };
  compute_tile<THREADS, BY_ROWS>(tile, first, length, columns, element, as_it_is, from);
}

template <int THREADS, bool BY_ROWS = false, int ROWS, int WIDTH, class T>
__device__ __forceinline__ void copy_tile(const Tile<ROWS, WIDTH>& tile, int first, int length, int columns,
                                          const T* data, int64 row_step, int64 column_step, int from = 0) {
  constexpr int N = 16 / sizeof(T), NEAR = BY_ROWS ? ROWS : WIDTH, FAR = BY_ROWS ? WIDTH : ROWS;
  const int near_first = BY_ROWS ? first : from, far_first = BY_ROWS ? from : first;
  const int near_end = BY_ROWS ? length : columns, far_end = BY_ROWS ? columns : length;
  const int64 near_step = BY_ROWS ? row_step : column_step, far_step = BY_ROWS ? column_step : row_step;
  const bool aligned = reinterpret_cast<uint64>(data) % 16 == 0 && far_step % N == 0;
  if (NEAR % N != 0 || near_step != 1 || !aligned || near_first % N != 0 || near_end % N != 0) {
    const auto element = [&](int row, int column) {
      return to_float(data[row * row_step + column * column_step]);
    };
    return fill_tile<THREADS, BY_ROWS>(tile, first, length, columns, element, from);
  }
  constexpr int COUNT = NEAR / N * FAR, BATCH = batch_of(COUNT, THREADS, 4);
  const int near_last = near_end - near_first - N, far_last = far_end - far_first - 1;
  data += near_first + far_first * far_step;
  for (int start = threadIdx.x; start < COUNT; start += THREADS * BATCH) {
    Vec<T, N> values[BATCH];
    UNROLL for (int i = 0; i < BATCH; ++i) {
      const int at = minimum(start + i * THREADS, COUNT - 1);
      const int near = at % (NEAR / N) * N, far = at / (NEAR / N);
      values[i] = load_vector<N>(data + minimum(near, near_last) + minimum(far, far_last) * far_step);
      if (BY_ROWS ? far > far_last : near > near_last) values[i] = {};
    }
    UNROLL for (int i = 0; i < BATCH; ++i) {
      const int at = start + i * THREADS;
      const int near = at % (NEAR / N) * N, far = at / (NEAR / N);
      if (at < COUNT) {
        UNROLL for (int e = 0; e < N; e += 4) {
          Vec<float, 4> four;
          UNROLL for (int j = 0; j < 4; ++j) four[j] = to_float(values[i][e + j]);
          if (!BY_ROWS) tile.store(far, near + e, four);
          UNROLL for (int j = 0; BY_ROWS && j < 4; ++j) tile(near + e + j, far) = four[j];
        }
      }
    }
  }
}

template <int THREADS, int ROWS, int WIDTH, class Element>
__device__ __forceinline__ void fill_tile_by_rows(const Tile<ROWS, WIDTH>& tile, int first, int length,
                                                  int columns, Element element, int from = 0) {
  fill_tile<THREADS, true>(tile, first, length, columns, element, from);
}

template <int THREADS, int ROWS, int WIDTH, class T>
__device__ __forceinline__ void copy_tile_by_rows(const Tile<ROWS, WIDTH>& tile, int first, int length,
                                                  int columns, const T* data, int64 row_step,
                                                  int64 column_step, int from = 0) {
  copy_tile<THREADS, true>(tile, first, length, columns, data, row_step, column_step, from);
}

template <int THREADS, int ROWS, int WIDTH, class Read, class Element>
__device__ __forceinline__ void compute_tile_by_rows(const Tile<ROWS, WIDTH>& tile, int first, int length,
                                                     int columns, Read read, Element element, int from = 0) {
  compute_tile<THREADS, true>(tile, first, length, columns, read, element, from);
}

template <int BLOCK, int N>
__device__ __forceinline__ int next_tile(const int (&begin)[N], const int (&end)[N], int from) {
  int next = 0x7fffffff;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int start = begin[i] / BLOCK * BLOCK > from ? begin[i] / BLOCK * BLOCK : from;
    if (start < end[i] && start < next) next = start;
  }
  return next;
}

template <int BLOCK, int N>
__device__ __forceinline__ int next_tile_of(const int (&begin)[N], const int (&end)[N], int from, int part,
                                            int parts) {
  while (true) {
    const int next = next_tile<BLOCK>(begin, end, from);
    if (next == 0x7fffffff) return next;
    const int past = next / BLOCK % parts;
    if (past == part) return next;
    from = next + (part - past + (part < past ? parts : 0)) * BLOCK;
  }
}

template <int BLOCK, int N>
__device__ __forceinline__ int previous_tile(const int (&begin)[N], const int (&end)[N], int before) {
  int previous = -1;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int last = (end[i] - 1) / BLOCK * BLOCK, start = last < before ? last : before - BLOCK;
    if (begin[i] < end[i] && start >= begin[i] / BLOCK * BLOCK && start > previous) previous = start;
  }
  return previous;
}

template <class Below>
__device__ __forceinline__ int partition_point(int low, int high, Below below) {
  constexpr int PLACES = 8;  // are asked at once: reads of memory take long, however many there are
  while (low < high) {
    const int step = (high - low + PLACES - 1) / PLACES;
    int before = 0;
    UNROLL for (int i = 0; i < PLACES; ++i) {
      const int last = low + (i + 1) * step - 1;
      if (last < high && below(last)) ++before;
    }
    low += before * step;
    high = minimum(high, low + step - 1);
  }
  return low;
}

template <class Below>
__device__ __forceinline__ int partition_point(int length, Below below) {
  return partition_point(0, length, below);
}

template <class Below>
__device__ __forceinline__ int place_between(int low, int high, Below below) {
  if (low < high && !below(low)) high = low;
  if (low < high && below(high - 1)) low = high;
#pragma unroll 1
  while (low < high) {  // seldom: as little text as can be
    const int middle = (low + high) / 2;
    const bool before = below(middle);
    low = before ? middle + 1 : low;
    high = before ? high : middle;
  }
  return low;
}

template <class Below>
__device__ __forceinline__ int place_between(int low, int high, Below below, int size, int length) {
  const int place = place_between(low, high, below);
  return place == size ? length : place;
}

template <int N>
struct Places {
  int place[N];
  __device__ __forceinline__ int& operator[](int n) { return place[n]; }
  __device__ __forceinline__ int operator[](int n) const { return place[n]; }
};

template <class... Below>
__device__ __forceinline__ Places<sizeof...(Below)> partition_points(Places<sizeof...(Below)> high,
                                                                     Below... below) {
  constexpr int N = sizeof...(Below);
  const int lane = threadIdx.x % 32;
  Places<N> low = {};
  for (bool more = true; more;) {
    int step[N], last[N], n = 0;
    UNROLL for (int i = 0; i < N; ++i) {
      step[i] = (high[i] - low[i] + 31) / 32;
      last[i] = low[i] + (lane + 1) * step[i] - 1;
    }
    bool before[N];  // of a search that has ended, at place 0 maybe, no lane asks
    ((before[n] = low[n] < high[n] && last[n] < high[n] && below(last[n]), ++n), ...);
    more = false;
    UNROLL for (int i = 0; i < N; ++i) {
      low[i] += __popc(__ballot_sync(FULL_WARP, before[i])) * step[i];
      high[i] = minimum(high[i], low[i] + step[i] - 1);
      more |= low[i] < high[i];
    }
  }
  return low;
}
