// shared.cuh: the block's dynamic shared memory as typed views.
//
//   Shared<T, COUNT> tile(address)   COUNT elements of T from byte `address` of the block's shared memory,
//                                    a multiple of alignof(T) (of 16 for vector access)
//   tile[i]                          element i, to read or to assign; 0 <= i < COUNT
//   load_vector<N>(tile, i)          elements i .. i + N - 1 as a Vec<T, N>, one access; i a multiple of N
//   store_vector(tile, i, v)         the same, written
//   tile.address_of(i)               block-relative byte address of element i
//   buffer<T>(address, i)            number i of T's that follow one another from byte `address`, T::BYTES each
//
// The launch gives the size in bytes. Views may share bytes where a barrier parts their uses.
#pragma once

#include "types.cuh"

extern __shared__ __align__(1024) unsigned char shared_memory[];

template <class T, int COUNT>
struct Shared {
  uint32 address;

  __device__ __forceinline__ explicit Shared(uint32 address) : address(address) {}

  __device__ __forceinline__ T& operator[](int i) const {
    return reinterpret_cast<T*>(shared_memory + address)[i];
  }

  __device__ __forceinline__ uint32 address_of(int i) const { return address + i * sizeof(T); }
};

template <int N, class T, int COUNT>
__device__ __forceinline__ Vec<T, N> load_vector(const Shared<T, COUNT>& tile, int i) {
  return load_vector<N>(&tile[i]);
}

template <class T, int COUNT, int N>
__device__ __forceinline__ void store_vector(const Shared<T, COUNT>& tile, int i, const Vec<T, N>& value) {
  store_vector(&tile[i], value);
}

template <class T>
__device__ __forceinline__ T buffer(uint32 address, uint32 i) {
  return T(address + i * T::BYTES);
}

// Where instructions on shared memory find byte `address` of the block's, and element i of a view.
__device__ __forceinline__ uint32 window_address(uint32 address) {
  return static_cast<uint32>(__cvta_generic_to_shared(shared_memory)) + address;
}

template <class T, int COUNT>
__device__ __forceinline__ uint32 window_address(const Shared<T, COUNT>& tile, int i) {
  return window_address(tile.address_of(i));
}
