// parts.cuh: parts of fp32 sums, on their way to memory, which they are added to, on a CPU.
// The names are those of device/parts.cuh.
#pragma once

#include "tma.cuh"

template <int COLUMNS_>
struct Part {
  static constexpr int ROWS = 64, COLUMNS = COLUMNS_, PANEL = 32;
  static constexpr uint32 PANEL_BYTES = ROWS * PANEL * 4, BYTES = COLUMNS / PANEL * PANEL_BYTES;
  uint32 address;

  explicit Part(uint32 address) : address(address) {}

  uint32 pair_at(int row, int column) const {
    const uint32 bytes = row * 128 + column % PANEL * 4;
    return address + column / PANEL * PANEL_BYTES + (bytes ^ (bytes >> 3 & 0x70));
  }
};

template <int COLUMNS, int N>
inline void store_part(const Part<COLUMNS>& part, const float (&sums)[2][N], int first = 0,
                       int line = __builtin_LINE()) {
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
  for (int r = 0; r < 2; ++r) {
    for (int i = 0; i < COLUMNS / 4; i += 2) {
      const uint32 to = part.pair_at(row + 8 * r, 4 * i + 2 * lane);
      if (to % 8 != 0 || to + 8 > fagen_self->shared_bytes) fagen_finding(line, "store_part to byte %u", to);
      fagen_note_write(to, 8, line);
      __builtin_memcpy(fagen_self->shared + to, &sums[r][first / 4 + i], 8);
    }
  }
}

// Each number is added by itself: other blocks add at the same time.
inline void fagen_run_add(const FagenTransfer& transfer, const unsigned char* from) {
  fagen_each_chunk(transfer, [&](uint32 address, unsigned char* to, int bytes) {
    for (int i = 0; i < bytes; i += 4) {
      float part, seen, sum;
      __builtin_memcpy(&part, from + (address - transfer.address) + i, 4);
      auto* place = reinterpret_cast<float*>(to + i);
      __atomic_load(place, &seen, __ATOMIC_RELAXED);
      do {
        sum = seen + part;
      } while (!__atomic_compare_exchange(place, &seen, &sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    }
  });
}

template <int COLUMNS>
inline void add_part(const TensorMap& map, const Part<COLUMNS>& part, int row, int column, int head,
                     int batch, int line = __builtin_LINE()) {
  using Tile = Part<COLUMNS>;
  if (map.element_bytes != 4 || map.panel_bytes != 128 || map.box[1] != Tile::ROWS ||
      map.box[2] != COLUMNS / Tile::PANEL) {
    fagen_finding(line, "a part of 64 x %d by a map of boxes of %d x %d panels of %d bytes", COLUMNS,
                  map.box[1], map.box[2], map.panel_bytes);
  }
  FagenTransfer box = fagen_transfer(part.address, map, 0, row, head, batch, line);
  box.write = fagen_run_add;
  box.at[2] = column / Tile::PANEL;
  fagen_store(&box, line);
}
