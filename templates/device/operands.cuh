// operands.cuh: tiles of tensor-core operands brought into shared memory by a whole block.
//
//   copy_operand<THREADS, COLUMNS>(tile, first, length, data, row_step)
//       row i, column j becomes data[(first + i) * row_step + j], by asynchronous copies of 16 bytes, to which all
//       rows are aligned; from `length` on rows become 0, columns from COLUMNS on too. The threads commit and wait.
//   fill_operand<THREADS, COLUMNS>(tile, first, length, element)
//       the same for element(first + i, j), a float, which is rounded; done at once
//   round_left(factor, weights)
//       a left operand from a thread's weights of its two rows
//   make_left(factor, [&](int r, int c) { return weight; })
//       the same, each rounded as it is made: in column c of row r
//   store_pair(pointer, pair)   two numbers, rounded, one access; the address is a multiple of their size
//   store_eight(pointer, eight, there)
//       eight numbers of each lane, of every four lanes those of a row: two of each eight columns. The lanes exchange
//       them, so that lane i stores the eight of the columns to which its pointer points, one access, if `there`
//   store_eight(pointer, numbers, first, there)
//       the same for those of more numbers from `first` on; the compiler may move what stands around the store
#pragma once

#include <async.cuh>
#include <math.cuh>
#include <mma.cuh>
#include <quad.cuh>

template <class T, int N, class Weight>
__device__ __forceinline__ void make_left(Left<T> (&factor)[N], Weight weight) {
#pragma unroll
  for (int first = 0; first < 4 * N; first += 4) {
    float weights[2][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) weights[r][c] = weight(r, first + c);
    }
    factor[first / 4] = left_from<T>(weights[0], weights[1], 0);
  }
}

template <class T, int N>
__device__ __forceinline__ void round_left(Left<T> (&factor)[N], const float (&weights)[2][4 * N]) {
#pragma unroll
  for (int first = 0; first < 4 * N; first += 4) {
    factor[first / 4] = left_from<T>(weights[0], weights[1], first);
  }
}

// A team of neighbouring threads copies a row, so that the addresses of a thread differ by constants. So do the numbers
// of its rows, which are compared with how many are left, so that none takes a register; but of rows of several lines,
// of which a thread has few, each is compared with how many there are.
template <int THREADS, int COLUMNS, class T, int ROWS, int WIDTH>
__device__ __forceinline__ void copy_operand(const OperandTile<T, ROWS, WIDTH>& tile, int first, int length,
                                             const T* data, int64 row_step) {
  using Layout = TileLayout<WIDTH>;
  constexpr int TEAM = Layout::TEAM < THREADS / ROWS ? THREADS / ROWS : Layout::TEAM, STEP = THREADS / TEAM;
  constexpr bool STEADY = !Layout::SWIZZLED || STEP % 8 == 0, LINES = Layout::SWIZZLED && WIDTH > 64;
  const int row = threadIdx.x / TEAM, place = threadIdx.x % TEAM * 8;
  const int column = Layout::SWIZZLED ? again(place) : place, at = opaque(tile.at(row, column));
  const int rest = length - first - (LINES ? 0 : row);
  data = opaque(data + static_cast<int>(static_cast<uint32>(first) + row) * row_step + column);
#pragma unroll
  for (int i = 0; i < ROWS; i += STEP) {
#pragma unroll
    for (int j = 0; j < WIDTH; j += TEAM * 8) {
      const int count = WIDTH == COLUMNS ? 8 : maximum(minimum(COLUMNS - column - j, 8), 0);
      if ((j + TEAM * 8 <= WIDTH || column + j < WIDTH) && (i + STEP <= ROWS || row + i < ROWS) &&
          (THREADS % TEAM == 0 || row < STEP)) {
        const int to = STEADY ? at + i * Layout::PITCH + j : tile.at(row + i, column + j);
        copy_async<8>(tile.elements, to, data + j, (LINES ? row + i : i) < rest ? count : 0);
      }
    }
    data = opaque(data + STEP * row_step);
  }
}

template <int THREADS, int COLUMNS, class T, int ROWS, int WIDTH, class Element>
__device__ __forceinline__ void fill_operand(const OperandTile<T, ROWS, WIDTH>& tile, int first, int length,
                                             Element element) {
  for (int chunk = threadIdx.x; chunk < ROWS * WIDTH / 8; chunk += THREADS) {
    const int row = chunk / (WIDTH / 8), column = chunk % (WIDTH / 8) * 8;
    Vec<T, 8> values;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const bool inside = row < length - first && column + j < COLUMNS;
      values[j] = from_float<T>(inside ? element(first + row, column + j) : 0.0f);
    }
    store_vector(tile.elements, tile.at(row, column), values);
  }
}

template <class T>
__device__ __forceinline__ void store_pair(T* to, const float (&pair)[2]) {
  const uint32 word = pack<T>(pair[0], pair[1]);
  store_vector(to,
               Vec<T, 2>{{{static_cast<unsigned short>(word)}, {static_cast<unsigned short>(word >> 16)}}});
}

template <>
__device__ __forceinline__ void store_pair<float>(float* to, const float (&pair)[2]) {
  store_vector(to, Vec<float, 2>{{pair[0], pair[1]}});
}

template <class T>
__device__ __forceinline__ void store_eight(T* to, const float (&eight)[8], bool there) {
  uint32 word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = pack<T>(eight[2 * i], eight[2 * i + 1]);
  exchange_quad(word);
  store_words(to, word, there);
}

template <class T, int N>
__device__ __forceinline__ void store_eight(T* to, const float (&numbers)[N], int first, bool there) {
  uint32 word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = pack<T>(numbers[first + 2 * i], numbers[first + 2 * i + 1]);
  exchange_quad(word);
  if (there) store_vector(reinterpret_cast<uint32*>(to), Vec<uint32, 4>{word[0], word[1], word[2], word[3]});
}
