// mma.cuh: products of 16-bit tiles on tensor cores, summed in fp32 (mma.sync m16n8k16, ldmatrix; from sm_80
// on).
//
//   OperandTile<T, ROWS, WIDTH> tile(address)
//       ROWS x WIDTH elements of fp16 or bf16 from byte `address` of the block's shared memory, BYTES of it;
//       WIDTH is a multiple of 16, the address of 128
//   tile(row, column)
//       an element, to read or to assign: tile.elements[tile.at(row, column)]; the eight from a column that
//       is a multiple of 8 lie together
//   from_row<COUNT>(tile, row)
//       COUNT rows of a tile from `row` on, a multiple of 8, as a tile: where a warp's rows lie it computes once, and
//       blocks of them differ by constants
//   load_left(tile, row, column)              the 16 x 16 elements there as left operand: columns are summed
//   load_left_transposed(tile, row, column)   their transpose as left operand: rows are summed
//   load_right(tile, row, column)             as right operand: rows are summed
//   load_right_transposed(tile, row, column)  their transpose as right operand: columns are summed
//   left_from<T>(upper, lower, i)             upper[i .. i + 3], lower[i .. i + 3], rounded, as left operand;
//                                             as fp32 (TF32: eleven bits, any exponent) to be multiplied by fp16;
//                                             past the end of an array of 16-bit values are zeros
//   store_pair(tile, row, column, low, high)  two elements from an even column on, rounded, one access
//   value_of(factor, row, column)            of an array of left operands, the value in row 0 (upper) or 1 (lower)
//   columns_before<COLUMNS>(end)              those columns of a lane's rows, up to 64, that lie before position `end`,
//                                             counted from its first, as bits
//   multiply_add(upper, lower, i, l, r)       adds the product to upper[i .. i + 3] and lower[i .. i + 3]
//
// Of 16 x 16 values a lane has rows lane / 4 (upper) and lane / 4 + 8 (lower), columns 2 (lane % 4) + 0, 1,
// 8, 9. All 32 lanes of a warp call together; none of these orders memory.
#pragma once

#include "layout.cuh"
#include "shared.cuh"

template <class T, int ROWS_, int WIDTH_>
struct OperandTile : TileLayout<WIDTH_> {
  using Element = T;
  static constexpr int ROWS = ROWS_, WIDTH = WIDTH_;
  static constexpr uint32 BYTES = ROWS_ * TileLayout<WIDTH_>::PITCH * sizeof(T);
  Shared<T, ROWS_ * TileLayout<WIDTH_>::PITCH> elements;

  __device__ __forceinline__ explicit OperandTile(uint32 address) : elements(address) {}

  __device__ __forceinline__ T& operator()(int row, int column) const {
    return elements[this->at(row, column)];
  }
};

template <int COUNT, class T, int ROWS, int WIDTH>
__device__ __forceinline__ OperandTile<T, COUNT, WIDTH> from_row(const OperandTile<T, ROWS, WIDTH>& tile,
                                                                 int row) {
  return OperandTile<T, COUNT, WIDTH>(tile.elements.address + row * (2 * TileLayout<WIDTH>::PITCH));
}

// What a lane holds of a 16 x 16 operand.
template <class T>
struct Left {
  uint32 word[4];
};

// Columns 0, 2, 4, 6 of the first eight, then 1, 3, 5, 7; then the other eight: a lane has all it needs.
template <>
struct Left<fp32> {
  uint32 word[8];
};

template <class T>
struct Right {
  uint32 word[4];
};

template <class T>
__device__ __forceinline__ uint32 pack(float low, float high);

template <>
__device__ __forceinline__ uint32 pack<fp16>(float low, float high) {
  uint32 result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

template <>
__device__ __forceinline__ uint32 pack<bf16>(float low, float high) {
  uint32 result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// The lane's part comes first: it is a register that many loads share, the rest a constant of the instruction.
template <class T, int ROWS, int WIDTH>
__device__ __forceinline__ uint32 chunk_address(const OperandTile<T, ROWS, WIDTH>& tile, int row, int column,
                                                LaneChunk lane) {
  return tile.block_bytes(opaque(window_address(tile.elements, 0) + tile.lane_bytes(lane)), row, column);
}

template <class T, int ROWS, int WIDTH>
__device__ __forceinline__ Left<T> load_left(const OperandTile<T, ROWS, WIDTH>& tile, int row, int column) {
  Left<T> to;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to.word[0]), "=r"(to.word[1]), "=r"(to.word[2]), "=r"(to.word[3])
               : "r"(chunk_address(tile, row, column, chunk_by_rows(threadIdx.x % 32))));
  return to;
}

template <class T, int ROWS, int WIDTH>
__device__ __forceinline__ Left<T> load_left_transposed(const OperandTile<T, ROWS, WIDTH>& tile, int row,
                                                        int column) {
  Left<T> to;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to.word[0]), "=r"(to.word[1]), "=r"(to.word[2]), "=r"(to.word[3])
               : "r"(chunk_address(tile, row, column, chunk_by_columns(threadIdx.x % 32))));
  return to;
}

template <class T, int ROWS, int WIDTH>
__device__ __forceinline__ Right<T> load_right(const OperandTile<T, ROWS, WIDTH>& tile, int row, int column) {
  Right<T> to;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to.word[0]), "=r"(to.word[1]), "=r"(to.word[2]), "=r"(to.word[3])
               : "r"(chunk_address(tile, row, column, chunk_by_rows(threadIdx.x % 32))));
  return to;
}

template <class T, int ROWS, int WIDTH>
__device__ __forceinline__ Right<T> load_right_transposed(const OperandTile<T, ROWS, WIDTH>& tile, int row,
                                                          int column) {
  Right<T> to;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to.word[0]), "=r"(to.word[1]), "=r"(to.word[2]), "=r"(to.word[3])
               : "r"(chunk_address(tile, row, column, chunk_by_columns(threadIdx.x % 32))));
  return to;
}

__device__ __forceinline__ uint32 to_tf32(float x) {
  uint32 result;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(x));
  return result;
}

template <class T, int N>
__device__ __forceinline__ float value_of(const Left<T> (&factor)[N], int row, int column) {
  const uint32 word = factor[column / 4].word[row + column % 4 / 2 * 2];
  return to_float(T{static_cast<unsigned short>(column % 2 ? word >> 16 : word)});
}

template <class T, int N>
__device__ __forceinline__ Left<T> left_from(const float (&upper)[N], const float (&lower)[N], int i) {
  Left<T> to;
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        to.word[2 * (j + k)] = to_tf32(upper[i + j + k]);
        to.word[2 * (j + k) + 1] = to_tf32(lower[i + j + k]);
      }
    } else {
      const bool there = N % 4 == 0 || i + j < N;
      to.word[j] = there ? pack<T>(upper[i + j], upper[i + j + 1]) : 0;
      to.word[j + 1] = there ? pack<T>(lower[i + j], lower[i + j + 1]) : 0;
    }
  }
  return to;
}

// Two numbers of a row from an even column on, rounded.
template <class T, int ROWS, int WIDTH>
__device__ __forceinline__ void store_pair(const OperandTile<T, ROWS, WIDTH>& tile, int row, int column,
                                           float low, float high) {
  reinterpret_cast<uint32&>(tile(row, column)) = pack<T>(low, high);
}

// A 16 x 8 sum: c0, c1 of the upper row, c2, c3 of the lower.
__device__ __forceinline__ void mma(float& c0, float& c1, float& c2, float& c3, const Left<fp16>& a,
                                    uint32 b0, uint32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
      : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma(float& c0, float& c1, float& c2, float& c3, const Left<bf16>& a,
                                    uint32 b0, uint32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
      : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]), "r"(b0), "r"(b1));
}

template <class T, int N>
__device__ __forceinline__ void multiply_add(float (&upper)[N], float (&lower)[N], int i, const Left<T>& left,
                                             const Right<T>& right) {
  mma(upper[i], upper[i + 1], lower[i], lower[i + 1], left, right.word[0], right.word[1]);
  mma(upper[i + 2], upper[i + 3], lower[i + 2], lower[i + 3], left, right.word[2], right.word[3]);
}

// The two halves of a word are rows 2 (lane % 4) and the next, which the left operand has in this order.
template <int N>
__device__ __forceinline__ void multiply_add(float (&upper)[N], float (&lower)[N], int i,
                                             const Left<fp32>& left, const Right<fp16>& right) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32 word = right.word[j];
    const float even = to_float(fp16{static_cast<unsigned short>(word)});
    const float odd = to_float(fp16{static_cast<unsigned short>(word >> 16)});
    const uint32* a = left.word + j % 2 * 4;
    float *c = upper + i + j / 2 * 2, *d = lower + i + j / 2 * 2;
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(d[0]), "+f"(d[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(__float_as_uint(even)), "r"(__float_as_uint(odd)));
  }
}
