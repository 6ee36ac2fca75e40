// add.cuh: what tensor cores have summed, added to a matrix in global memory that other blocks add to as well.
//
// The matrix lies in pieces of 16 rows and 8 columns. The numbers of a piece lie side by side, in the order in which the
// lanes of a warp have them of a product: lane l those of row l / 4 in columns 2 (l % 4) and the next one, then those of
// row l / 4 + 8. So a warp adds to 512 bytes in a row, and what a lane adds at once lies in registers as it is.
//
//   piece_at(row, row_step, column, column_step)   where an element lies, `row_step` and `column_step` from piece to piece
//   add_piece(holds, pointer, upper, lower, i)  adds upper[i], upper[i + 1], lower[i] and lower[i + 1] of all lanes, as
//                                        multiply_add has them, to the piece at `pointer`, where `holds`
//   load_pairs<N>(pointer)               N neighbours of a row from a column that is a multiple of N, 2 or 4
#pragma once

#include <atomic.cuh>

__device__ __forceinline__ int64 piece_at(int row, int64 row_step, int column, int64 column_step) {
  const uint32 r = row, c = column;
  return r / 16 * row_step + c / 8 * column_step + (r % 8 * 16 + c % 8 / 2 * 4 + r % 16 / 8 * 2 + c % 2);
}

template <int N>
__device__ __forceinline__ void add_piece(bool holds, float* to, const float (&upper)[N],
                                          const float (&lower)[N], int i) {
  atomic_add_four(holds, to + threadIdx.x % 32 * 4,
                  Vec<float, 4>{{upper[i], upper[i + 1], lower[i], lower[i + 1]}});
}

template <int N>
__device__ __forceinline__ Vec<float, N> load_pairs(const float* from) {
  Vec<float, N> numbers;
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const Vec<float, 2> pair = load_vector<2>(from + 2 * i);
    numbers[i] = pair[0];
    numbers[i + 1] = pair[1];
  }
  return numbers;
}
