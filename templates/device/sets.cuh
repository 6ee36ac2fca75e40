// sets.cuh: the two sets of sixteen rows that a warp has, one in each half of a block's rows, and which of them have
// something to do in a tile.
//
//   Columns own{begin, end}     those that count in a row
//   Reach reach(own, here)      of a set: those of the rows of which lanes say that they are here; all 32 must call
//   reach.some(first, next)     whether columns first .. next - 1 may count in one of these rows
//   reach.all(first, next)      whether all of them count in each
//   by_sets<ROWS>(upper, lower, step)
//       step(set) for rows set.FIRST .. set.LAST - 1 of a thread: those of a set that has nothing to do are left
//       out
#pragma once

#include <warp.cuh>

struct Columns {
  int begin, end;
};

struct Reach {
  int some_begin, some_end, all_begin, all_end;

  __device__ __forceinline__ Reach(Columns own, bool here)
      : some_begin(warp_min(here ? own.begin : 0x7fffffff)),
        some_end(warp_max(here ? own.end : 0)),
        all_begin(warp_max(here ? own.begin : 0)),
        all_end(warp_min(here ? own.end : 0x7fffffff)) {}

  __device__ __forceinline__ bool some(int first, int next) const {
    return some_begin < next && first < some_end;
  }

  __device__ __forceinline__ bool all(int first, int next) const {
    return all_begin <= first && next <= all_end;
  }
};

template <int FIRST_, int LAST_>
struct Rows {
  static constexpr int FIRST = FIRST_, LAST = LAST_;
};

template <int ROWS, class Step>
__device__ __forceinline__ void by_sets(bool upper, bool lower, Step step) {
  if (upper && lower) {
    step(Rows<0, ROWS>());
  } else if (lower) {
    step(Rows<ROWS / 2, ROWS>());
  } else if (upper) {
    step(Rows<0, ROWS / 2>());
  }
}
