// tma.cuh: copies of whole tiles between global and shared memory, on a CPU.
// The names are those of device/tma.cuh.
#pragma once

#include "mbarrier.cuh"
#include "panels.cuh"

// How a tensor lies in memory: what the map of a GPU says, in a form of its own.
struct alignas(128) TensorMap {
  unsigned char* base;
  int64 strides[4];            // bytes from one position of axes 1 to 4 to the next
  uint32 lengths[5];           // of the axes
  unsigned short box[5];       // positions of each axis that are copied at once
  unsigned short panel_bytes;  // of a box in shared memory: a row of it, whose chunks are permuted
  unsigned short element_bytes;
};

// Calls copy(chunk in shared memory, chunk in global memory or null, its bytes that lie in the tensor) for each 16
// bytes of a box.
template <class Copy>
inline void fagen_each_chunk(const FagenTransfer& transfer, Copy copy) {
  const auto& map = *reinterpret_cast<const TensorMap*>(transfer.map);
  const int row_bytes = map.panel_bytes;
  const int rows = transfer.bytes / row_bytes;
  for (int row = 0; row < rows; ++row) {
    int64 offset = 0;
    bool inside = true;
    for (int axis = 1, rest = row; axis < 5; rest /= map.box[axis], ++axis) {
      const int64 at = transfer.at[axis] + rest % map.box[axis];
      inside &= at >= 0 && at < map.lengths[axis];
      offset += at * map.strides[axis - 1];
    }
    for (int byte = 0; byte < row_bytes; byte += 16) {
      const int element = map.element_bytes;
      const int64 column = transfer.at[0] + byte / element;
      const int64 left = inside && column >= 0 ? map.lengths[0] - column : 0;
      const uint32 plain = transfer.address + row * row_bytes + byte;
      const uint32 address = plain ^ (plain >> 3 & (row_bytes - 16) & 0x70);
      copy(address, map.base + offset + column * element,
           left < 0              ? 0
           : left < 16 / element ? element * static_cast<int>(left)
                                 : 16);
    }
  }
}

inline void fagen_run_load(const FagenTransfer& transfer) {
  fagen_each_chunk(transfer, [&](uint32 address, const unsigned char* from, int bytes) {
    unsigned char chunk[16] = {};
    __builtin_memcpy(chunk, from, bytes);
    __builtin_memcpy(transfer.shared + address, chunk, 16);
  });
}

inline void fagen_run_read(const FagenTransfer& transfer, unsigned char* into) {
  __builtin_memcpy(into, transfer.shared + transfer.address, transfer.bytes);
}

inline void fagen_run_write(const FagenTransfer& transfer, const unsigned char* from) {
  fagen_each_chunk(transfer, [&](uint32 address, unsigned char* to, int bytes) {
    __builtin_memcpy(to, from + (address - transfer.address), bytes);
  });
}

inline void prefetch(const TensorMap&) {}

inline FagenTransfer fagen_transfer(uint32 address, const TensorMap& map, int column, int row, int head,
                                    int batch, int line) {
  FagenTransfer transfer{fagen_run_load,
                         fagen_run_read,
                         fagen_run_write,
                         {},
                         fagen_self->shared,
                         address,
                         0,
                         0,
                         {column, row, 0, head, batch}};
  __builtin_memcpy(transfer.map, &map, sizeof map);
  transfer.bytes = map.panel_bytes * map.box[1] * map.box[2] * map.box[3] * map.box[4];
  if (address % 1024 != 0 || address + transfer.bytes > fagen_self->shared_bytes) {
    fagen_finding(line, "a box of %u bytes at byte %u of %u", transfer.bytes, address,
                  fagen_self->shared_bytes);
  }
  return transfer;
}

template <class Tile>
inline void fagen_check_box(const TensorMap& map, int line) {
  constexpr int PANELS = Tile::WHOLE ? Tile::PANELS : 1;
  if (map.panel_bytes != Tile::ROW_BYTES || map.box[1] != Tile::ROWS || map.box[2] != PANELS) {
    fagen_finding(line,
                  "a tile of %d x %d in panels of %u bytes from a map of boxes of %d x %d panels of %d bytes",
                  Tile::ROWS, Tile::COLUMNS, Tile::ROW_BYTES, map.box[1], map.box[2], map.panel_bytes);
  }
}

template <class Tile>
inline void load_tile(const Tile& tile, const TensorMap& map, Barrier barrier, int row, int head, int batch,
                      int line = __builtin_LINE()) {
  fagen_check_box<Tile>(map, line);
  for (int i = 0; i < (Tile::WHOLE ? 1 : Tile::PANELS); ++i) {
    FagenTransfer box =
        fagen_transfer(tile.address + i * Tile::PANEL_BYTES, map, i * Tile::PANEL, row, head, batch, line);
    box.barrier = barrier.address;
    fagen_load(&box, line);
  }
}

template <class Tile>
inline void load_heads(const Tile& tile, const TensorMap& map, Barrier barrier, int head, int row, int batch,
                       int line = __builtin_LINE()) {
  if (map.panel_bytes != Tile::ROW_BYTES || map.box[1] * map.box[3] != Tile::ROWS || map.box[2] != 1) {
    fagen_finding(line, "a tile of %d rows in panels of %u bytes from a map of boxes of %d rows of %d heads",
                  Tile::ROWS, Tile::ROW_BYTES, map.box[3], map.box[1]);
  }
  for (int i = 0; i < Tile::PANELS; ++i) {
    FagenTransfer box =
        fagen_transfer(tile.address + i * Tile::PANEL_BYTES, map, i * Tile::PANEL, head, row, batch, line);
    box.barrier = barrier.address;
    fagen_load(&box, line);
  }
}

template <class Tile>
inline void store_tile(const TensorMap& map, const Tile& tile, int row, int head, int batch,
                       int line = __builtin_LINE()) {
  fagen_check_box<Tile>(map, line);
  for (int i = 0; i < (Tile::WHOLE ? 1 : Tile::PANELS); ++i) {
    const FagenTransfer box =
        fagen_transfer(tile.address + i * Tile::PANEL_BYTES, map, i * Tile::PANEL, row, head, batch, line);
    fagen_store(&box, line);
  }
}

inline void store_commit() {
  fagen_store_commit();
}

template <int GROUPS>
inline void store_wait_read(int line = __builtin_LINE()) {
  fagen_store_wait(GROUPS, true, line);
}

template <int GROUPS>
inline void store_wait(int line = __builtin_LINE()) {
  fagen_store_wait(GROUPS, false, line);
}

inline void fence_async_global() {}

inline void fence_async() {
  fagen_fence_async();
}
