// Small fp32 matmuls, tile by tile in registers: C += A · B, all sides padded to whole tiles by the caller.
#pragma once

#include "vectors.h"
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace rush::cpu {

// A tile of the result stays in registers: 16 accumulators where there are 32 registers, 8 where there are 16.
#if defined(__AVX2__)
constexpr int64_t kTileRows = 4;
#else
constexpr int64_t kTileRows = 8;
#endif
constexpr int64_t kTileColumns = 2 * kWidth;
constexpr int64_t kPad = 16;  // all matrices are padded to this, a multiple of both sides of a tile

inline int64_t rounded_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Layout of the left operand.
enum class Left { kRowMajor, kTransposed };

using Tile = Vec[kTileRows][2];

template <Left left>
[[gnu::always_inline]] inline void step(Tile& sums, const float* a, int64_t a_stride, const float* b) {
  const Vec first = load(b), second = load(b + kWidth);
#pragma GCC unroll 8
  for (int64_t row = 0; row < kTileRows; ++row) {
    const float value = left == Left::kRowMajor ? a[row * a_stride] : a[row];
    sums[row][0] += first * value;
    sums[row][1] += second * value;
  }
}

#if defined(__ARM_NEON)
// ARM multiplies a vector by one lane of another in one instruction, so A is loaded four values at a time.
template <int lane>
[[gnu::always_inline]] inline void fma_row(Vec (&sums)[2], Vec first, Vec second, float32x4_t four) {
  sums[0] = vfmaq_laneq_f32(sums[0], first, four, lane);
  sums[1] = vfmaq_laneq_f32(sums[1], second, four, lane);
}

[[gnu::always_inline]] inline void step_transposed(Tile& sums, const float* a, const float* b) {
  const Vec first = load(b), second = load(b + kWidth);
#pragma GCC unroll 2
  for (int half = 0; half < 8; half += 4) {
    const float32x4_t four = vld1q_f32(a + half);
    fma_row<0>(sums[half], first, second, four);
    fma_row<1>(sums[half + 1], first, second, four);
    fma_row<2>(sums[half + 2], first, second, four);
    fma_row<3>(sums[half + 3], first, second, four);
  }
}

template <int lane>
[[gnu::always_inline]] inline void step_row_major(Tile& sums, const float32x4_t (&rows)[8], const float* b) {
  const Vec first = load(b), second = load(b + kWidth);
#pragma GCC unroll 8
  for (int row = 0; row < 8; ++row) fma_row<lane>(sums[row], first, second, rows[row]);
}
#endif

template <Left left>
[[gnu::always_inline]] inline void accumulate(Tile& sums, int64_t inner, const float* a, int64_t a_stride, const float* b,
                                          int64_t b_stride) {
#if defined(__ARM_NEON)
  if constexpr (left == Left::kTransposed) {
    for (int64_t k = 0; k < inner; ++k) step_transposed(sums, a + k * a_stride, b + k * b_stride);
  } else {
    for (int64_t k = 0; k < inner; k += 4, b += 4 * b_stride) {
      float32x4_t rows[8];
#pragma GCC unroll 8
      for (int row = 0; row < 8; ++row) rows[row] = vld1q_f32(a + row * a_stride + k);
      step_row_major<0>(sums, rows, b);
      step_row_major<1>(sums, rows, b + b_stride);
      step_row_major<2>(sums, rows, b + 2 * b_stride);
      step_row_major<3>(sums, rows, b + 3 * b_stride);
    }
  }
#else
  for (int64_t k = 0; k < inner; ++k) {
    step<left>(sums, a + (left == Left::kTransposed ? k * a_stride : k), a_stride, b + k * b_stride);
  }
#endif
}

// C[rows, columns] = A · B, or C += A · B (`add`). Strides are leading dimensions.
template <Left left, bool add>
void matmul(int64_t rows, int64_t columns, int64_t inner, const float* a, int64_t a_stride, const float* b, int64_t b_stride,
              float* c, int64_t c_stride) {
  for (int64_t column = 0; column < columns; column += kTileColumns) {
    for (int64_t row = 0; row < rows; row += kTileRows) {
      Tile sums = {};
      accumulate<left>(sums, inner, left == Left::kTransposed ? a + row : a + row * a_stride, a_stride, b + column, b_stride);
      float* to = c + row * c_stride + column;
#pragma GCC unroll 8
      for (int64_t i = 0; i < kTileRows; ++i, to += c_stride) {
        store(to, add ? load(to) + sums[i][0] : sums[i][0]);
        store(to + kWidth, add ? load(to + kWidth) + sums[i][1] : sums[i][1]);
      }
    }
  }
}

}  // namespace rush::cpu
