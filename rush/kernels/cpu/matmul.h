// Small matrix products in fp32, tile by tile in registers: C += A · B, all sides padded to whole tiles by the caller.
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
constexpr int64_t kSides = 16;  // a multiple of both sides of a tile, which all matrices are padded to

inline int64_t rounded_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// How the left factor lies: its inner side contiguous (rows of a matrix), or its rows (a matrix turned over).
enum class Left { kStraight, kTurned };

using Tile = Vec[kTileRows][2];

template <Left left>
[[gnu::always_inline]] inline void step(Tile& sums, const float* a, int64_t a_stride, const float* b) {
  const Vec first = load(b), second = load(b + kWidth);
#pragma GCC unroll 8
  for (int64_t row = 0; row < kTileRows; ++row) {
    const float value = left == Left::kStraight ? a[row * a_stride] : a[row];
    sums[row][0] += first * value;
    sums[row][1] += second * value;
  }
}

#if defined(__ARM_NEON)
// A vector times one number of another is one instruction on ARM, so that numbers of A come four at a time.
template <int lane>
[[gnu::always_inline]] inline void row_of(Vec (&sums)[2], Vec first, Vec second, float32x4_t four) {
  sums[0] = vfmaq_laneq_f32(sums[0], first, four, lane);
  sums[1] = vfmaq_laneq_f32(sums[1], second, four, lane);
}

[[gnu::always_inline]] inline void step_turned(Tile& sums, const float* a, const float* b) {
  const Vec first = load(b), second = load(b + kWidth);
#pragma GCC unroll 2
  for (int half = 0; half < 8; half += 4) {
    const float32x4_t four = vld1q_f32(a + half);
    row_of<0>(sums[half], first, second, four);
    row_of<1>(sums[half + 1], first, second, four);
    row_of<2>(sums[half + 2], first, second, four);
    row_of<3>(sums[half + 3], first, second, four);
  }
}

template <int lane>
[[gnu::always_inline]] inline void step_straight(Tile& sums, const float32x4_t (&rows)[8], const float* b) {
  const Vec first = load(b), second = load(b + kWidth);
#pragma GCC unroll 8
  for (int row = 0; row < 8; ++row) row_of<lane>(sums[row], first, second, rows[row]);
}
#endif

template <Left left>
[[gnu::always_inline]] inline void sum_up(Tile& sums, int64_t inner, const float* a, int64_t a_stride, const float* b,
                                          int64_t b_stride) {
#if defined(__ARM_NEON)
  if constexpr (left == Left::kTurned) {
    for (int64_t k = 0; k < inner; ++k) step_turned(sums, a + k * a_stride, b + k * b_stride);
  } else {
    for (int64_t k = 0; k < inner; k += 4, b += 4 * b_stride) {
      float32x4_t rows[8];
#pragma GCC unroll 8
      for (int row = 0; row < 8; ++row) rows[row] = vld1q_f32(a + row * a_stride + k);
      step_straight<0>(sums, rows, b);
      step_straight<1>(sums, rows, b + b_stride);
      step_straight<2>(sums, rows, b + 2 * b_stride);
      step_straight<3>(sums, rows, b + 3 * b_stride);
    }
  }
#else
  for (int64_t k = 0; k < inner; ++k) {
    step<left>(sums, a + (left == Left::kTurned ? k * a_stride : k), a_stride, b + k * b_stride);
  }
#endif
}

// C[rows, columns] = A · B, or added to what is there. Strides are those between the lines in memory.
template <Left left, bool add>
void multiply(int64_t rows, int64_t columns, int64_t inner, const float* a, int64_t a_stride, const float* b, int64_t b_stride,
              float* c, int64_t c_stride) {
  for (int64_t column = 0; column < columns; column += kTileColumns) {
    for (int64_t row = 0; row < rows; row += kTileRows) {
      Tile sums = {};
      sum_up<left>(sums, inner, left == Left::kTurned ? a + row : a + row * a_stride, a_stride, b + column, b_stride);
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
