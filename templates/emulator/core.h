// core.h: CUDA's keywords and built-in variables on a CPU, and what a running thread asks of the scheduler.
//
// The scheduler (runtime.cpp) is compiled once; a kernel is compiled against these declarations alone.
#pragma once

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

struct FagenIndex {
  unsigned x, y, z;
};

// What a CUDA thread knows of itself.
struct FagenThread {
  FagenIndex thread, block, block_dim, grid_dim;
  unsigned char* shared;
  unsigned shared_bytes;
  unsigned lane;
};

extern "C" {
extern __thread FagenThread* fagen_self __attribute__((tls_model("initial-exec")));

// The whole block meets here; orders memory.
void fagen_block_barrier(int line);

// The lanes in `mask` meet here. The last to come calls resolve(arguments, mask), where arguments[lane] is
// what each lane has brought; so whatever a warp does together (a shuffle, a matrix product) is one function.
void fagen_warp_meet(const char* what, unsigned mask, int line, void* argument,
                     void (*resolve)(void* const* arguments, unsigned mask), bool orders_memory);

// This thread found the condition it spins on false (fagen_poll) or true (fagen_polled).
void fagen_poll(const char* what, int line);
void fagen_polled();

// Hands an operation to the hardware: run(data) happens at a moment the seed picks, at the latest when it is
// waited for.
void fagen_issue(void (*run)(void* data), const void* data, unsigned bytes, int line);

// Closes the group of this thread's operations issued so far; waits until at most `groups` are in flight.
void fagen_commit_group();
void fagen_wait_groups(unsigned groups);

// Barriers in shared memory. `bytes` are announced with an arrival; a wait spins.
void fagen_barrier_init(unsigned address, unsigned arrivals, int line);
void fagen_barrier_publish();
void fagen_barrier_arrive(unsigned address, unsigned bytes, int line);
void fagen_barrier_wait(unsigned address, unsigned parity, int line);

// Named barriers, the registers of a warp (false: none are left), and the lane that is elected.
void fagen_group_barrier(int number, unsigned threads, bool waits, int line);
bool fagen_set_registers(unsigned count, bool grows, int line);
unsigned fagen_elected_lane();

// A copy of a box between global and shared memory. A load is one step; a store reads shared memory first, and
// what it has read goes to global memory later.
struct FagenTransfer {
  void (*load)(const FagenTransfer& transfer);
  void (*read)(const FagenTransfer& transfer, unsigned char* into);
  void (*write)(const FagenTransfer& transfer, const unsigned char* from);
  alignas(128) unsigned char map[128];
  unsigned char* shared;
  unsigned address, bytes, barrier;
  int at[5];
};

void fagen_load(const FagenTransfer* transfer, int line);
void fagen_store(const FagenTransfer* transfer, int line);
void fagen_store_commit();
void fagen_store_wait(unsigned groups, bool only_reads, int line);

// This thread wrote to shared memory; what it wrote so far may be read by the units beside it.
void fagen_note_write(unsigned address, unsigned bytes, int line);
void fagen_fence_async();

// One thread's part of a product its warpgroup issues together: where its sums and its words of the left factor
// are, if that is in registers, and which bytes of shared memory are read.
struct FagenGroupProduct {
  void (*run)(const FagenGroupProduct& product, float* const* sums, const unsigned* const* left);
  unsigned long long left, right;
  float* sums;
  unsigned sums_count;
  const unsigned* left_words;
  bool add;
  unsigned left_begin, left_end, right_begin, right_end;
  const unsigned char* shared;
};

void fagen_product_fence();
void fagen_product(const FagenGroupProduct* product, int line);
void fagen_product_commit();
void fagen_product_wait(unsigned groups, int line);

// Ends the launch: this thread did what no kernel may do.
[[noreturn]] void fagen_finding(int line, const char* format, ...) __attribute__((format(printf, 2, 3)));
}

#define threadIdx (fagen_self->thread)
#define blockIdx (fagen_self->block)
#define blockDim (fagen_self->block_dim)
#define gridDim (fagen_self->grid_dim)

// Calls a kernel whose only parameter is a struct, given that struct's bytes.
template <class Params>
inline void fagen_enter(void (*kernel)(Params), const void* params) {
  kernel(*static_cast<const Params*>(params));
}

template <class Params>
constexpr unsigned fagen_params_bytes(void (*)(Params)) {
  return sizeof(Params);
}
