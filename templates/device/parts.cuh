// parts.cuh: parts of fp32 sums, on their way to memory, which they are added to by a unit beside the threads (sm_90).
//
//   Part<COLUMNS> part(address)            64 rows of 32 or 64 sums in shared memory from byte `address`, a multiple of
//                                          1,024; it takes Part::BYTES
//   store_part(part, sums)                 by a warpgroup: the sums of a product, float sums[2][N]; with a further
//                                          argument, a multiple of 32, those from that column on
//   add_part(map, part, row, column, head, batch)
//                                          by one thread: adds it to a tensor from there on, a multiple of 32 columns;
//                                          what lies outside is left out. It is a store, for store_commit() and the
//                                          waits. Parts that others add at the same time come in any order.
#pragma once

#include "tma.cuh"

template <int COLUMNS_>
struct Part {
  static constexpr int ROWS = 64, COLUMNS = COLUMNS_, PANEL = 32;
  static constexpr uint32 PANEL_BYTES = ROWS * PANEL * 4, BYTES = COLUMNS / PANEL * PANEL_BYTES;
  uint32 address;

  __device__ __forceinline__ explicit Part(uint32 address) : address(address) {}
};

// Chunks of 16 bytes are permuted as in Panels. Half a warp stores at once, and of its four rows two have their chunks
// permuted into the same ones: every second row stores columns 16 further on, or back, so that all banks are used.
template <int COLUMNS, int N>
__device__ __forceinline__ void store_part(const Part<COLUMNS>& part, const float (&sums)[2][N],
                                           int first = 0) {
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
  const bool odd = row % 2;
  const uint32 byte = lane * 8 ^ row % 8 * 16 ^ (odd ? 64 : 0);  // of a row of 128
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32 line = part.address + (row + 8 * r) * 128;
#pragma unroll
    for (int i = 0; i < COLUMNS / 4; i += 2) {
      const int even = first / 4 + i, other = first / 4 + (i ^ 4);
      const float even_pair[2] = {sums[r][even], sums[r][even + 1]};
      const float odd_pair[2] = {sums[r][other], sums[r][other + 1]};
      const Shared<float, 2> to(line + i / 8 * Part<COLUMNS>::PANEL_BYTES + (byte ^ i % 8 * 16));
      store_vector(to, 0, Vec<float, 2>{odd ? odd_pair[0] : even_pair[0], odd ? odd_pair[1] : even_pair[1]});
    }
  }
}

template <int COLUMNS>
__device__ __forceinline__ void add_part(const TensorMap& map, const Part<COLUMNS>& part, int row, int column,
                                         int head, int batch) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], "
      "[%1];" ::"l"(&map),
      "r"(window_address(part.address)), "r"(0), "r"(row), "r"(column / Part<COLUMNS>::PANEL), "r"(head),
      "r"(batch)
      : "memory");
}
