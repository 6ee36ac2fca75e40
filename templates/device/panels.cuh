// panels.cuh: tiles in shared memory as bulk tensor copies write them and wgmma reads them.
//
//   Panels<T, ROWS, COLUMNS> tile(address)   ROWS x COLUMNS elements of fp16 or bf16 from byte `address`, a multiple
//                                            of 1,024; it takes Panels::BYTES. A fourth number is the columns of a
//                                            panel: 64 (the default), 32 or 16
//   transposed(tile)                         the same memory, as the transpose of the tile
//   tile.panel(i)                            panel i of a tile, as a tile
//   tile.chunk_at(row, column)               byte address of the eight elements from a column that is a multiple of 8
//
// A tile is made of panels of 128, 64 or 32 bytes a row. The 16-byte chunks of a panel's row are permuted by an
// exclusive or with some bits of the row, so that one chunk of eight neighbouring rows lies on different banks. Past
// COLUMNS the last panel is filled with zeros.
#pragma once

#include <shared.cuh>

template <class T, int ROWS_, int COLUMNS_, int PANEL_ = 64>
struct Panels {
  static_assert(sizeof(T) == 2, "wgmma takes 16-bit elements here");
  static_assert(ROWS_ % 8 == 0 && (PANEL_ == 64 || PANEL_ == 32 || PANEL_ == 16));
  using Element = T;
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, PANEL = PANEL_;
  static constexpr int PANELS = (COLUMNS + PANEL - 1) / PANEL;
  static constexpr int STEPS = (COLUMNS + 15) / 16;    // of a product that sums over its columns
  static constexpr bool WHOLE = COLUMNS % PANEL == 0;  // no panel is part of zeros
  static constexpr uint32 ROW_BYTES = PANEL * 2, PANEL_BYTES = ROWS * ROW_BYTES, BYTES = PANELS * PANEL_BYTES;
  static constexpr uint32 ALIGNMENT = 1024;

  uint32 address;

  __device__ __forceinline__ explicit Panels(uint32 address) : address(address) {}

  __device__ __forceinline__ Panels<T, ROWS, PANEL, PANEL> panel(int i) const {
    return Panels<T, ROWS, PANEL, PANEL>(address + i * PANEL_BYTES);
  }

  __device__ __forceinline__ uint32 chunk_at(int row, int column) const {
    const uint32 bytes = row * ROW_BYTES + column % PANEL * 2;
    return address + column / PANEL * PANEL_BYTES + (bytes ^ (bytes >> 3 & (ROW_BYTES - 16) & 0x70));
  }
};

// How wgmma is told where an operand lies: the first of four fields of a descriptor are addresses and distances in
// units of 16 bytes, at bits 0, 16 and 32; at bit 62 stands the permutation of a panel's rows.
template <class Tile>
__device__ __forceinline__ uint64 descriptor(uint32 window, uint32 panel_stride) {
  constexpr uint64 PERMUTATION = Tile::PANEL == 64 ? 1 : Tile::PANEL == 32 ? 2 : 3;
  constexpr uint32 EIGHT_ROWS = 8 * Tile::ROW_BYTES;
  return (window & 0x3ffff) >> 4 | static_cast<uint64>(panel_stride >> 4) << 16 |
         static_cast<uint64>(EIGHT_ROWS >> 4) << 32 | PERMUTATION << 62;
}

// An operand whose rows lie in memory along the sum: step k sums over columns 16 k to 16 k + 15 of the tile.
template <class Tile>
struct SummedColumns {
  using Element = typename Tile::Element;
  static constexpr int LENGTH = Tile::ROWS, STEPS = Tile::STEPS;
  static constexpr bool ACROSS = false;
  uint64 first;

  __device__ __forceinline__ explicit SummedColumns(const Tile& tile)
      : first(descriptor<Tile>(window_address(tile.address), 16)) {}

  __device__ __forceinline__ uint64 step(int k) const {
    return first + ((16 * k / Tile::PANEL * Tile::PANEL_BYTES + 16 * k % Tile::PANEL * 2) >> 4);
  }

  // What a step is further on whose operand begins in that row, a multiple of 8.
  __device__ __forceinline__ static uint64 from(int row) { return row * Tile::ROW_BYTES >> 4; }
};

// An operand whose rows lie across the sum: step k sums over rows 16 k to 16 k + 15 of the tile.
template <class Tile>
struct SummedRows {
  using Element = typename Tile::Element;
  static constexpr int LENGTH = (Tile::COLUMNS + 7) / 8 * 8, STEPS = Tile::ROWS / 16;
  static constexpr bool ACROSS = true;
  uint64 first;

  __device__ __forceinline__ explicit SummedRows(const Tile& tile)
      : first(descriptor<Tile>(window_address(tile.address), Tile::PANEL_BYTES)) {}

  __device__ __forceinline__ uint64 step(int k) const { return first + ((16 * k * Tile::ROW_BYTES) >> 4); }

  // What a step is further on whose operand begins in that column, the first of a panel.
  __device__ __forceinline__ static uint64 from(int column) {
    return column / Tile::PANEL * Tile::PANEL_BYTES >> 4;
  }
};

template <class Tile>
struct Transposed {
  Tile tile;
};

template <class Tile>
__device__ __forceinline__ Transposed<Tile> transposed(const Tile& tile) {
  return {tile};
}

template <class T, int ROWS, int COLUMNS, int PANEL>
__device__ __forceinline__ auto left_operand(const Panels<T, ROWS, COLUMNS, PANEL>& tile) {
  return SummedColumns<Panels<T, ROWS, COLUMNS, PANEL>>(tile);
}

template <class Tile>
__device__ __forceinline__ auto left_operand(const Transposed<Tile>& factor) {
  return SummedRows<Tile>(factor.tile);
}

template <class T, int ROWS, int COLUMNS, int PANEL>
__device__ __forceinline__ auto right_operand(const Panels<T, ROWS, COLUMNS, PANEL>& tile) {
  return SummedRows<Panels<T, ROWS, COLUMNS, PANEL>>(tile);
}

template <class Tile>
__device__ __forceinline__ auto right_operand(const Transposed<Tile>& factor) {
  return SummedColumns<Tile>(factor.tile);
}
