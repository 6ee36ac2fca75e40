// shared.cuh: the block's dynamic shared memory as typed views.
//
//   Shared<T, COUNT> tile(address)   COUNT elements of T from byte `address` of the block's shared memory,
//                                    a multiple of sizeof(T) (of 16 for vector access)
//   tile[i]                          element i, to read or to assign; 0 <= i < COUNT
//   tile.vector<N>(i)                elements i .. i + N - 1 as a Vec<T, N>, one access; i a multiple of N
//   tile.set_vector(i, v)            the same, written
//   tile.address_of(i)               block-relative byte address of element i
//
// The launch gives the size in bytes. Views may overlap in time, never between two barriers.
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

  template <int N>
  __device__ __forceinline__ Vec<T, N> vector(int i) const {
    return load_vector<N>(&(*this)[i]);
  }

  template <int N>
  __device__ __forceinline__ void set_vector(int i, const Vec<T, N>& value) const {
    store_vector(&(*this)[i], value);
  }

  __device__ __forceinline__ uint32 address_of(int i) const { return address + i * sizeof(T); }
};
