// wgmma.cuh: products of 16-bit tiles by the four warps of a warpgroup, on a CPU.
// The names are those of device/wgmma.cuh.
#pragma once

#include "mma.cuh"
#include "panels.cuh"

inline void wgmma_fence() {
  fagen_product_fence();
}

inline void wgmma_commit() {
  fagen_product_commit();
}

// The arrays that have landed are what a compiler for GPUs is told of.
struct FagenLanded {
  FagenLanded() {}
  template <class Registers>
  FagenLanded(Registers&) {}
};

inline void settle(FagenLanded = {}, FagenLanded = {}, FagenLanded = {}, FagenLanded = {}) {}

template <int GROUPS>
inline void wgmma_wait(FagenLanded = {}, FagenLanded = {}, FagenLanded = {}, FagenLanded = {},
                       FagenLanded = {}, FagenLanded = {}, FagenLanded = {}, FagenLanded = {},
                       int line = __builtin_LINE()) {
  fagen_product_wait(GROUPS, line);
}

// An operand as its descriptor says: where element (i, k) lies, i < 64 or N along the operand, k < 16 along the sum.
struct FagenOperand {
  uint32 start, panel_stride, eight_stride, span;
  bool across;

  FagenOperand(uint64 descriptor, bool across)
      : start((descriptor & 0x3fff) << 4),
        panel_stride((descriptor >> 16 & 0x3fff) << 4),
        eight_stride((descriptor >> 32 & 0x3fff) << 4),
        span(256u >> (descriptor >> 62)),
        across(across) {}

  uint32 at(int i, int k) const {
    const uint32 plain =
        across ? start + i * 2 / span * panel_stride + k / 8 * eight_stride + k % 8 * span + i * 2 % span
               : start + i / 8 * eight_stride + i % 8 * span + k * 2;
    return plain ^ (plain >> 3 & (span - 16) & 0x70);
  }

  uint32 begin() const { return start & -(8 * span); }

  uint32 end(int length) const {
    if (!across) return begin() + (length + 7) / 8 * eight_stride;
    return begin() + (length * 2 - 1) / span * panel_stride + 2 * eight_stride;
  }
};

template <class T, int N, bool LEFT_ACROSS, bool RIGHT_ACROSS, bool LEFT_IN_REGISTERS>
__attribute__((optimize("O3"))) void fagen_run_wgmma(const FagenGroupProduct& product, float* const* sums,
                                                     const uint32* const* left) {
  static thread_local float a[64][16], b[16][N], c[64][N];
  const FagenOperand from_left(product.left, LEFT_ACROSS), from_right(product.right, RIGHT_ACROSS);
  const auto element = [&](uint32 address) {
    T x;
    __builtin_memcpy(&x, product.shared + address, sizeof x);
    return to_float(x);
  };
  for (int thread = 0; thread < 128; ++thread) {
    const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    for (int r = 0; r < 2; ++r) {
      for (int i = 0; i < N / 4; ++i) {
        c[row + 8 * r][i / 2 * 8 + column + i % 2] = product.add ? sums[thread][r * (N / 4) + i] : 0.0f;
      }
    }
    for (int word = 0; LEFT_IN_REGISTERS && word < 4; ++word) {
      for (int half = 0; half < 2; ++half) {
        a[row + word % 2 * 8][column + word / 2 * 8 + half] = unpack<T>(left[thread][word], half);
      }
    }
  }
  for (int k = 0; k < 16; ++k) {
    for (int row = 0; !LEFT_IN_REGISTERS && row < 64; ++row) a[row][k] = element(from_left.at(row, k));
    for (int i = 0; i < N; ++i) b[k][i] = element(from_right.at(i, k));
  }
  for (int row = 0; row < 64; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int i = 0; i < N; ++i) c[row][i] += a[row][k] * b[k][i];
    }
  }
  for (int thread = 0; thread < 128; ++thread) {
    const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    for (int r = 0; r < 2; ++r) {
      for (int i = 0; i < N / 4; ++i)
        sums[thread][r * (N / 4) + i] = c[row + 8 * r][i / 2 * 8 + column + i % 2];
    }
  }
}

template <bool ADD, class A, class B, int N>
inline void multiply_steps(float (&sums)[2][N], const A& left, const B& right, int line) {
  static_assert(A::LENGTH == 64 && B::LENGTH == 4 * N && A::STEPS == B::STEPS);
  for (int k = 0; k < A::STEPS; ++k) {
    const FagenOperand a(left.step(k), A::ACROSS), b(right.step(k), B::ACROSS);
    const FagenGroupProduct product{fagen_run_wgmma<typename A::Element, 4 * N, A::ACROSS, B::ACROSS, false>,
                                    left.step(k),
                                    right.step(k),
                                    sums[0],
                                    2 * N,
                                    nullptr,
                                    ADD || k > 0,
                                    a.begin(),
                                    a.end(64),
                                    b.begin(),
                                    b.end(4 * N),
                                    fagen_self->shared};
    fagen_product(&product, line);
  }
}

template <bool ADD, class T, int STEPS, class B, int N>
inline void multiply_steps(float (&sums)[2][N], const Left<T> (&left)[STEPS], const B& right, int line) {
  static_assert(B::LENGTH == 4 * N && B::STEPS == STEPS);
  for (int k = 0; k < STEPS; ++k) {
    const FagenOperand b(right.step(k), B::ACROSS);
    const FagenGroupProduct product{fagen_run_wgmma<T, 4 * N, false, B::ACROSS, true>,
                                    0,
                                    right.step(k),
                                    sums[0],
                                    2 * N,
                                    left[k].word,
                                    ADD || k > 0,
                                    0,
                                    0,
                                    b.begin(),
                                    b.end(4 * N),
                                    fagen_self->shared};
    fagen_product(&product, line);
  }
}

template <class T, int STEPS>
inline const Left<T> (&left_operand(const Left<T> (&factor)[STEPS])) [STEPS] { return factor; }

template <class L, class R, int N>
inline void multiply(float (&sums)[2][N], const L& left, const R& right, int line = __builtin_LINE()) {
  multiply_steps<false>(sums, left_operand(left), right_operand(right), line);
}

template <class L, class R, int N>
inline void multiply_add(float (&sums)[2][N], const L& left, const R& right, int line = __builtin_LINE()) {
  multiply_steps<true>(sums, left_operand(left), right_operand(right), line);
}

// How many columns an instruction takes is a matter of registers.
template <int MOST, class L, class R, int N>
inline void multiply_add(float (&sums)[2][N], const L& left, const R& right, int line = __builtin_LINE()) {
  multiply_add(sums, left, right, line);
}

template <class T, int STEPS, class Tile>
inline void load_rows(Left<T> (&factor)[STEPS], const Tile& tile, int line = __builtin_LINE()) {
  static_assert(STEPS == Tile::STEPS && Tile::ROWS == 64);
  const int lane = fagen_self->lane, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
  fagen_warp_meet("load_rows", FULL_WARP, line, nullptr, fagen_resolve_nothing, false);
  for (int k = 0; k < STEPS; ++k) {
    for (int block = 0; block < 4; ++block) {
      const uint32 chunk = tile.chunk_at(row + block % 2 * 8, 16 * k + block / 2 * 8);
      factor[k].word[block] = *Shared<uint32, 1>(chunk + lane % 4 * 4).access(0, 1, line);
    }
  }
}

inline Left<bf16> multiply_pairs(const Left<bf16>& x, const Left<bf16>& y) {
  Left<bf16> products;
  for (int i = 0; i < 4; ++i) {
    products.word[i] = pack<bf16>(unpack<bf16>(x.word[i], 0) * unpack<bf16>(y.word[i], 0),
                                  unpack<bf16>(x.word[i], 1) * unpack<bf16>(y.word[i], 1));
  }
  return products;
}

template <class T, class Tile>
inline void store_left(const Tile& tile, int row, int column, const Left<T>& factor,
                       int line = __builtin_LINE()) {
  // Lane l holds two elements of each of four 8 x 8 blocks, row l / 4.
  const int lane = fagen_self->lane;
  fagen_warp_meet("store_left", FULL_WARP, line, nullptr, fagen_resolve_nothing, false);
  for (int block = 0; block < 4; ++block) {
    const uint32 chunk = tile.chunk_at(row + lane / 4 + block % 2 * 8, column + block / 2 * 8);
    if (chunk % 16 != 0 || chunk + 16 > fagen_self->shared_bytes)
      fagen_finding(line, "store_left to byte %u", chunk);
    fagen_note_write(chunk + lane % 4 * 4, 4, line);
    __builtin_memcpy(fagen_self->shared + chunk + lane % 4 * 4, &factor.word[block], 4);
  }
}
