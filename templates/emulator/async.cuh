// async.cuh: copies from global to shared memory that run beside the thread, on a CPU: each happens at a
// moment the seed picks between issue and wait, and until then its destination is NaN.
// The names are those of device/async.cuh.
#pragma once

#include "shared.cuh"

struct FagenCopy {
  const void* from;
  void* to;
  unsigned bytes;
};

template <int BYTES>
inline void fagen_run_copy(void* data) {
  const auto* copy = static_cast<const FagenCopy*>(data);
  __builtin_memset(copy->to, 0, BYTES);
  __builtin_memcpy(copy->to, copy->from, copy->bytes);
}

template <int N, class T, int COUNT>
inline void copy_async(const Shared<T, COUNT>& tile, int i, const T* from, int count = N,
                       int line = __builtin_LINE()) {
  constexpr int BYTES = N * sizeof(T);
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "an asynchronous copy moves 4, 8 or 16 bytes");
  if (count < 0 || count > N) fagen_finding(line, "a copy of %d elements, of which %d are read", N, count);
  T* to = tile.access(i, N, line);
  fagen_check_alignment(to, BYTES, line);
  fagen_check_alignment(from, BYTES, line);
  __builtin_memset(to, 0xff, BYTES);
  const FagenCopy copy{from, to, static_cast<unsigned>(count * sizeof(T))};
  fagen_issue(fagen_run_copy<BYTES>, &copy, sizeof copy, line);
}

inline void copy_async_commit() {
  fagen_commit_group();
}

template <int GROUPS>
inline void copy_async_wait() {
  fagen_wait_groups(GROUPS);
}
