// tma.cuh: copies of whole tiles between global and shared memory, done by a unit of their own (sm_90).
//
//   TensorMap                              how a tensor lies in global memory and in which boxes it is copied; made by
//                                          the host. Its axes: column in a panel, row, panel, head, batch
//   prefetch(map)                          brings a map near, by one thread, early
//   load_tile(tile, map, barrier, row, head, batch)
//                                          by one thread: a tile of Panels from `row` on; what lies outside the tensor
//                                          becomes 0. Reports Panels::BYTES on the barrier
//   load_heads(tile, map, barrier, head, row, batch)
//                                          the same of a map of boxes of several heads: row i of the tile is the one of
//                                          head i % heads, and the next one after so many
//   store_tile(map, tile, row, head, batch)
//                                          by one thread: the part of a tile that lies inside the tensor
//   store_commit()                         closes the group of this thread's stores issued so far
//   store_wait_read<GROUPS>()              waits until at most so many groups have still to read shared memory
//   store_wait<GROUPS>()                   until at most so many are not in global memory yet
//   fence_async_global()                   by a thread that saw what other blocks wrote to global memory, before it has
//                                          more added to it
//   fence_async()                          by each thread that wrote to shared memory, before the barrier after which
//                                          stores or products read it
#pragma once

#include "mbarrier.cuh"
#include "panels.cuh"

struct alignas(128) TensorMap {
  uint64 word[16];
};

__device__ __forceinline__ void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void load_box(uint32 to, const TensorMap& map, Barrier barrier, int column,
                                         int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
      "%5, %6, %7}], "
      "[%2];" ::"r"(window_address(to)),
      "l"(&map), "r"(window_address(barrier.address)), "r"(column), "r"(row), "r"(0), "r"(head), "r"(batch)
      : "memory");
}

__device__ __forceinline__ void store_box(const TensorMap& map, uint32 from, int column, int row, int head,
                                          int batch) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(
          &map),
      "r"(window_address(from)), "r"(column), "r"(row), "r"(0), "r"(head), "r"(batch)
      : "memory");
}

// A box is a whole tile, or a panel where the last one reaches past the columns.
template <class Tile>
__device__ __forceinline__ void load_tile(const Tile& tile, const TensorMap& map, Barrier barrier, int row,
                                          int head, int batch) {
  constexpr int BOXES = Tile::WHOLE ? 1 : Tile::PANELS;
#pragma unroll
  for (int i = 0; i < BOXES; ++i) {
    load_box(tile.address + i * Tile::PANEL_BYTES, map, barrier, i * Tile::PANEL, row, head, batch);
  }
}

// Panel by panel: a map has no axis more.
template <class Tile>
__device__ __forceinline__ void load_heads(const Tile& tile, const TensorMap& map, Barrier barrier, int head,
                                           int row, int batch) {
#pragma unroll
  for (int i = 0; i < Tile::PANELS; ++i) {
    load_box(tile.address + i * Tile::PANEL_BYTES, map, barrier, i * Tile::PANEL, head, row, batch);
  }
}

template <class Tile>
__device__ __forceinline__ void store_tile(const TensorMap& map, const Tile& tile, int row, int head,
                                           int batch) {
  constexpr int BOXES = Tile::WHOLE ? 1 : Tile::PANELS;
#pragma unroll
  for (int i = 0; i < BOXES; ++i) {
    store_box(map, tile.address + i * Tile::PANEL_BYTES, i * Tile::PANEL, row, head, batch);
  }
}

__device__ __forceinline__ void store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

template <int GROUPS>
__device__ __forceinline__ void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(GROUPS) : "memory");
}

template <int GROUPS>
__device__ __forceinline__ void store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(GROUPS) : "memory");
}

__device__ __forceinline__ void fence_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
