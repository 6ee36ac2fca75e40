// layout.cuh: where the elements of tensor-core operands lie; the part of mma.cuh that is the same
// everywhere.
//
// A tile of 16-bit elements in shared memory is made of chunks of 16 bytes, eight elements of a row. A
// tensor-core load reads one chunk of eight neighbouring rows at once; they must lie on different banks.
// Where a row is a whole number of 128-byte lines, a power of two, the chunks of row r are permuted by an
// exclusive or with r % 8; else a row begins an odd number of chunks after the one before.
#pragma once

#include <types.cuh>

// x, of which the compiler is to know nothing: what is added stays a constant of the instructions that use
// the sum.
__device__ __forceinline__ int opaque(int x) {
  asm("" : "+r"(x));
  return x;
}

template <class T>
__device__ __forceinline__ const T* opaque(const T* x) {
  asm("" : "+l"(x));
  return x;
}

// x, computed where this stands and nowhere else: what is made of it again later need not be kept meanwhile.
__device__ __forceinline__ int again(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// The chunk of a 16 x 16 block whose address a lane gives to a load: its row and its number in the row.
struct LaneChunk {
  int row, chunk;
};

// Quarters of the block in the order upper left, lower left, upper right, lower right ...
__device__ __forceinline__ LaneChunk chunk_by_rows(int lane) {
  return {lane % 16, lane / 16};
}

// ... and upper left, upper right, lower left, lower right.
__device__ __forceinline__ LaneChunk chunk_by_columns(int lane) {
  return {lane / 16 * 8 + lane % 8, lane / 8 % 2};
}

// A bit for each of a lane's columns of a row.
template <bool MANY>
struct ColumnBits {
  using Word = uint32;
};

template <>
struct ColumnBits<true> {
  using Word = uint64;
};

// Of each eight columns a lane has two. Bits make predicates seven at a time, and comparisons one by one.
template <int COLUMNS>
__device__ __forceinline__ typename ColumnBits<(COLUMNS > 32)>::Word columns_before(int end) {
  using Word = typename ColumnBits<(COLUMNS > 32)>::Word;
  constexpr uint32 BITS = 8 * sizeof(Word);
  static_assert(COLUMNS <= BITS);
  const uint32 inside = end < 0 ? 0 : end < 4 * COLUMNS ? end : 4 * COLUMNS;
  const uint32 count = inside / 8 * 2 + (inside % 8 < 2 ? inside % 8 : 2);
  return count < BITS ? (Word(1) << count) - 1 : ~Word(0);
}

template <int WIDTH>
struct TileLayout {
  static_assert(WIDTH % 16 == 0, "tensor cores take 16 columns at a time");
  static constexpr int CHUNKS = WIDTH / 8;
  static constexpr bool SWIZZLED = CHUNKS >= 8 && (CHUNKS & (CHUNKS - 1)) == 0;
  static constexpr int PITCH = 8 * (SWIZZLED ? CHUNKS : CHUNKS | 1);  // elements from a row to the next
  // Neighbouring threads that copy a row together: a line of 128 bytes where a row is made of lines, else all of it;
  // of sixteen threads a few may be idle, then no row is left over.
  static constexpr int TEAM = CHUNKS % 8 == 0 ? 8 : CHUNKS >= 12 && CHUNKS < 16 ? 16 : CHUNKS;

  // The index of an element.
  __device__ __forceinline__ static int at(int row, int column) {
    if (!SWIZZLED) return row * PITCH + column;
    return row * PITCH + ((column / 8 & 7) ^ (row & 7)) * 8 + (column & ~63) + column % 8;
  }

  // Where a lane's chunk of the block from (0, 0) lies, in bytes ...
  __device__ __forceinline__ static uint32 lane_bytes(LaneChunk lane) {
    return lane.row * (2 * PITCH) + (SWIZZLED ? lane.chunk ^ (lane.row & 7) : lane.chunk) * 16;
  }

  // ... and from that that of the block from (row, column), multiples of 16: with at most four numbers of its own a
  // lane reaches all blocks, the rest is the same for all lanes. It may be counted from any multiple of 128.
  __device__ __forceinline__ static uint32 block_bytes(uint32 lane_bytes, int row, int column) {
    if (!SWIZZLED) return lane_bytes + row * (2 * PITCH) + column * 2;
    return (lane_bytes ^ (column / 8 & 7) * 16) + row * (2 * PITCH) + (column & ~63) * 2;
  }
};
