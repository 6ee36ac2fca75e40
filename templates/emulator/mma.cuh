// mma.cuh: products of 16-bit tiles as a warp's tensor core does them, on a CPU.
// The names are those of device/mma.cuh.
#pragma once

#include "../device/layout.cuh"
#include "shared.cuh"
#include "warp.cuh"

template <class T, int ROWS_, int WIDTH_>
struct OperandTile : TileLayout<WIDTH_> {
  using Element = T;
  static constexpr int ROWS = ROWS_, WIDTH = WIDTH_;
  static constexpr uint32 BYTES = ROWS_ * TileLayout<WIDTH_>::PITCH * sizeof(T);
  Shared<T, ROWS_ * TileLayout<WIDTH_>::PITCH> elements;

  explicit OperandTile(uint32 address, int line = __builtin_LINE()) : elements(address, line) {
    if (address % 16 != 0) fagen_finding(line, "a tile of tensor-core operands begins at byte %u", address);
  }

  T& operator()(int row, int column, int line = __builtin_LINE()) const {
    if (row < 0 || row >= ROWS || column < 0 || column >= WIDTH) {
      fagen_finding(line, "row %d, column %d of a tile of %d x %d", row, column, ROWS, WIDTH);
    }
    return *elements.access(this->at(row, column), 1, line);
  }
};

template <int COUNT, class T, int ROWS, int WIDTH>
inline OperandTile<T, COUNT, WIDTH> from_row(const OperandTile<T, ROWS, WIDTH>& tile, int row,
                                             int line = __builtin_LINE()) {
  if (row < 0 || row % 8 != 0 || row + COUNT > ROWS) {
    fagen_finding(line, "%d rows from row %d of a tile of %d", COUNT, row, ROWS);
  }
  return OperandTile<T, COUNT, WIDTH>(tile.elements.address_of(row * TileLayout<WIDTH>::PITCH), line);
}

template <class T>
struct Left {
  uint32 word[4];
};

template <>
struct Left<fp32> {
  uint32 word[8];
};

template <class T>
struct Right {
  uint32 word[4];
};

template <class T>
inline uint32 pack(float low, float high) {
  return from_float<T>(low).bits | static_cast<uint32>(from_float<T>(high).bits) << 16;
}

template <class T>
inline float unpack(uint32 word, int half) {
  return to_float(T{static_cast<unsigned short>(word >> half * 16)});
}

// One lane's part of ldmatrix.x4: the eight elements at the address it gives, and the four words it gets.
struct FagenMatrixLoad {
  unsigned short row[8];
  uint32 word[4];
};

template <bool TRANSPOSED>
inline void fagen_resolve_matrix_load(void* const* arguments, unsigned) {
  for (int lane = 0; lane < 32; ++lane) {
    auto* mine = static_cast<FagenMatrixLoad*>(arguments[lane]);
    for (int matrix = 0; matrix < 4; ++matrix) {
      for (int half = 0; half < 2; ++half) {
        const int across = lane / 4, along = lane % 4 * 2 + half;
        const int row = TRANSPOSED ? along : across, column = TRANSPOSED ? across : along;
        const auto* theirs = static_cast<const FagenMatrixLoad*>(arguments[matrix * 8 + row]);
        const uint32 element = theirs->row[column];
        mine->word[matrix] = half == 0 ? element : mine->word[matrix] | element << 16;
      }
    }
  }
}

// The address must be inside the view, a multiple of 16 bytes; each lane reads its own.
template <bool TRANSPOSED, class T, int ROWS, int WIDTH>
inline void fagen_load_matrices(uint32 (&word)[4], const char* what, const OperandTile<T, ROWS, WIDTH>& tile,
                                int row, int column, LaneChunk lane, int line) {
  if (row % 16 != 0 || column % 16 != 0 || row < 0 || column < 0 || row >= ROWS || column >= WIDTH) {
    fagen_finding(line, "%s of the block at row %d, column %d of a tile of %d x %d", what, row, column, ROWS,
                  WIDTH);
  }
  const uint32 bytes = tile.block_bytes(tile.lane_bytes(lane), row, column);
  FagenMatrixLoad part;
  __builtin_memcpy(part.row, tile.elements.access(bytes / 2, 8, line), 16);
  fagen_warp_meet(what, FULL_WARP, line, &part, fagen_resolve_matrix_load<TRANSPOSED>, false);
  __builtin_memcpy(word, part.word, sizeof word);
}

template <class T, int ROWS, int WIDTH>
inline Left<T> load_left(const OperandTile<T, ROWS, WIDTH>& tile, int row, int column,
                         int line = __builtin_LINE()) {
  Left<T> to;
  fagen_load_matrices<false>(to.word, "load_left", tile, row, column, chunk_by_rows(fagen_self->lane), line);
  return to;
}

template <class T, int ROWS, int WIDTH>
inline Left<T> load_left_transposed(const OperandTile<T, ROWS, WIDTH>& tile, int row, int column,
                                    int line = __builtin_LINE()) {
  Left<T> to;
  fagen_load_matrices<true>(to.word, "load_left_transposed", tile, row, column,
                            chunk_by_columns(fagen_self->lane), line);
  return to;
}

template <class T, int ROWS, int WIDTH>
inline Right<T> load_right(const OperandTile<T, ROWS, WIDTH>& tile, int row, int column,
                           int line = __builtin_LINE()) {
  Right<T> to;
  fagen_load_matrices<true>(to.word, "load_right", tile, row, column, chunk_by_rows(fagen_self->lane), line);
  return to;
}

template <class T, int ROWS, int WIDTH>
inline Right<T> load_right_transposed(const OperandTile<T, ROWS, WIDTH>& tile, int row, int column,
                                      int line = __builtin_LINE()) {
  Right<T> to;
  fagen_load_matrices<false>(to.word, "load_right_transposed", tile, row, column,
                             chunk_by_columns(fagen_self->lane), line);
  return to;
}

// Eleven bits, to the nearest number, ties away from 0.
inline uint32 to_tf32(float x) {
  return x - x == 0.0f ? (bits_of(x) + 0x1000u) & ~0x1fffu : bits_of(x);
}

template <class T, int N>
inline float value_of(const Left<T> (&factor)[N], int row, int column) {
  return unpack<T>(factor[column / 4].word[row + column % 4 / 2 * 2], column % 2);
}

template <class T, int N>
inline Left<T> left_from(const float (&upper)[N], const float (&lower)[N], int i) {
  Left<T> to;
  for (int j = 0; j < 4; j += 2) {
    if constexpr (sizeof(T) == 4) {
      for (int k = 0; k < 2; ++k) {
        to.word[2 * (j + k)] = to_tf32(upper[i + j + k]);
        to.word[2 * (j + k) + 1] = to_tf32(lower[i + j + k]);
      }
    } else {
      const bool there = i + j < N;
      to.word[j] = there ? pack<T>(upper[i + j], upper[i + j + 1]) : 0;
      to.word[j + 1] = there ? pack<T>(lower[i + j], lower[i + j + 1]) : 0;
    }
  }
  return to;
}

template <class T, int ROWS, int WIDTH>
inline void store_pair(const OperandTile<T, ROWS, WIDTH>& tile, int row, int column, float low, float high,
                       int line = __builtin_LINE()) {
  const uint32 word = pack<T>(low, high);
  if (column % 2 != 0) fagen_finding(line, "store_pair from column %d on", column);
  __builtin_memcpy(tile.elements.access(tile.at(row, column), 2, line), &word, sizeof word);
}

// One lane's part of two mma.m16n8k16 side by side: of a lane's words, word 0 holds row lane / 4 and columns
// 2 (lane % 4), + 1 of the left operand, word 1 the row 8 further down, words 2 and 3 the columns 8 further
// on; of the right one, words 0 and 1 hold rows 2 (lane % 4), + 1 and those 8 further down of column lane /
// 4, words 2 and 3 the same of the column 8 further on.
template <class A, class B>
struct FagenProduct {
  const Left<A>* left;
  const Right<B>* right;
  float *upper, *lower;
};

// The element at row lane / 4 + 8 * down and column 2 (lane % 4) + 8 * on + half of a left operand.
template <class T>
inline float fagen_left(const Left<T>& left, int down, int on, int half) {
  return unpack<T>(left.word[down + 2 * on], half);
}

inline float fagen_left(const Left<fp32>& left, int down, int on, int half) {
  return float_of(left.word[4 * on + 2 * half + down]);
}

template <class A, class B>
inline void fagen_resolve_product(void* const* arguments, unsigned) {
  float a[16][16], b[16][16], c[16][16];
  for (int lane = 0; lane < 32; ++lane) {
    const auto* part = static_cast<const FagenProduct<A, B>*>(arguments[lane]);
    const int across = lane / 4, along = lane % 4 * 2;
    for (int word = 0; word < 4; ++word) {
      for (int half = 0; half < 2; ++half) {
        a[across + word % 2 * 8][along + word / 2 * 8 + half] =
            fagen_left(*part->left, word % 2, word / 2, half);
        b[along + word % 2 * 8 + half][across + word / 2 * 8] = unpack<B>(part->right->word[word], half);
        c[across][along + word / 2 * 8 + half] = part->upper[word / 2 * 2 + half];
        c[across + 8][along + word / 2 * 8 + half] = part->lower[word / 2 * 2 + half];
      }
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 16; ++column) c[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto* part = static_cast<const FagenProduct<A, B>*>(arguments[lane]);
    const int across = lane / 4, along = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      part->upper[i] = c[across][along + i / 2 * 8 + i % 2];
      part->lower[i] = c[across + 8][along + i / 2 * 8 + i % 2];
    }
  }
}

template <class A, class B, int N>
inline void multiply_add(float (&upper)[N], float (&lower)[N], int i, const Left<A>& left,
                         const Right<B>& right, int line = __builtin_LINE()) {
  if (i < 0 || i + 4 > N) fagen_finding(line, "multiply_add to elements %d to %d of %d", i, i + 3, N);
  FagenProduct<A, B> part{&left, &right, upper + i, lower + i};
  fagen_warp_meet("multiply_add", FULL_WARP, line, &part, fagen_resolve_product<A, B>, false);
}
