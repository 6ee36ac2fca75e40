// shared.cuh: the block's dynamic shared memory as typed views, on a CPU; each access is held to its view.
// The names are those of device/shared.cuh.
#pragma once

#include "types.cuh"

// A number and the line it was written on: the way to an operator's caller.
struct FagenPlace {
  int i, line;
  FagenPlace(int i, int line = __builtin_LINE()) : i(i), line(line) {}
};

template <class T, int COUNT>
struct Shared {
  uint32 address;

  explicit Shared(uint32 address, int line = __builtin_LINE()) : address(address) {
    if (address % alignof(T) != 0 || address + COUNT * sizeof(T) > fagen_self->shared_bytes) {
      fagen_finding(
          line, "a view of %d elements (%u bytes) from byte %u does not fit into %u bytes of shared memory",
          COUNT, static_cast<unsigned>(COUNT * sizeof(T)), address, fagen_self->shared_bytes);
    }
  }

  T& operator[](FagenPlace at) const { return *access(at.i, 1, at.line); }

  uint32 address_of(int i) const { return address + i * sizeof(T); }

  // Where `count` elements from i lie, once that is known to be inside the view.
  T* access(int i, int count, int line) const {
    if (static_cast<uint64>(static_cast<uint32>(i)) + count > COUNT) {
      fagen_finding(line, "element %d of a view of %d elements in shared memory", i, COUNT);
    }
    return reinterpret_cast<T*>(fagen_self->shared + address) + i;
  }
};

template <int N, class T, int COUNT>
inline Vec<T, N> load_vector(const Shared<T, COUNT>& tile, int i, int line = __builtin_LINE()) {
  return load_vector<N>(tile.access(i, N, line), line);
}

template <class T, int COUNT, int N>
inline void store_vector(const Shared<T, COUNT>& tile, int i, const Vec<T, N>& value,
                         int line = __builtin_LINE()) {
  store_vector(tile.access(i, N, line), value, line);
}

template <class T>
inline T buffer(uint32 address, uint32 i) {
  return T(address + i * T::BYTES);
}

inline uint32 window_address(uint32 address) {
  return address;
}
