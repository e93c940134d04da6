// fp16 matmul on an ARM CPU: casting and packing operands, and one register tile of the result.
//
// A vector register holds eight fp16 values or four fp32 ones, and a fused multiply-add takes as long for either. The price is
// range and precision, so an operand is divided into blocks of 64 lines by 128 values along the inner dim, each scaled by the power
// of two that brings its amax to [8, 16); one block (128 terms, below 2^15 together, so nothing overflows) is accumulated in fp16,
// then converted, scaled back and added in fp32.
#pragma once

#include <arm_neon.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace rush::fp16 {

using half_t = float16_t;

constexpr int64_t kLines = 64, kInner = 128;  // a block: lines with one scale, and terms of one fp16 sum
constexpr int64_t kRows = 8, kColumns = 16;  // of the result, held in registers: 16 accumulators of eight numbers
constexpr int64_t kSteps = 8;                // the inner dim is padded with zeros to a multiple of this
constexpr int kLargest = 3;                  // exponent of the largest value of a block
constexpr int kSmallest = -120;              // exponent below which values are scaled as if they had it

inline int64_t rounded_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// An operand: `length` lines (rows of the left one, columns of the right one) of `inner` values. One of the strides is 1.
struct Operand {
  const float* data;
  int64_t line_stride, inner_stride, length, inner;
};

struct Scale {
  float up, inv_scale;  // the scale and its inverse
};

// The power of two for a block with this amax; 1 for zeros, infinities and NaN.
inline Scale scale_of(float largest) {
  if (largest == 0 || !std::isfinite(largest)) return {1, 1};
  const int exponent = std::max(std::ilogb(largest), kSmallest);
  return {std::ldexp(1.0f, kLargest - exponent), std::ldexp(1.0f, exponent - kLargest)};
}

// A contiguous copy of a block as `high` rows of `wide` values, padded with zeros; returns its amax (NaN if it has one).
// Copied, because rows whose stride is a power of two evict each other from the cache.
template <int64_t high, int64_t wide>
float copied(const float* from, int64_t stride, int64_t rows, int64_t columns, float* to) {
  float32x4_t most[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
  if (rows < high || columns < wide) std::fill(to, to + high * wide, 0.0f);
  for (int64_t row = 0; row < rows; ++row, from += stride, to += wide) {
    if (columns < wide) {
      std::copy(from, from + columns, to);
    } else {
      for (int64_t line = 0; line < wide; line += 16) __builtin_prefetch(from + 4 * stride + line);
    }
    const float* source = columns < wide ? to : from;
    for (int64_t column = 0; column < wide; column += 16) {
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {
        const float32x4_t values = vld1q_f32(source + column + 4 * part);
        vst1q_f32(to + column + 4 * part, values);
        most[part] = vmaxq_f32(most[part], vabsq_f32(values));
      }
    }
  }
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(most[0], most[1]), vmaxq_f32(most[2], most[3])));
}

inline float16x8_t cast(const float* from, float32x4_t up) {
  const float16x4_t low = vcvt_f16_f32(vmulq_f32(vld1q_f32(from), up));
  return vcvt_high_f16_f32(low, vmulq_f32(vld1q_f32(from + 4), up));
}

inline void transpose(float16x8_t (&rows)[8]) {
  float16x8_t pairs[8];
  float32x4_t quads[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = vtrn1q_f16(rows[i], rows[i + 1]);
    pairs[i + 1] = vtrn2q_f16(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += (i % 4 == 1 ? 3 : 1)) {
    const float32x4_t first = vreinterpretq_f32_f16(pairs[i]), second = vreinterpretq_f32_f16(pairs[i + 2]);
    quads[i] = vtrn1q_f32(first, second);
    quads[i + 2] = vtrn2q_f32(first, second);
  }
  for (int i = 0; i < 4; ++i) {
    const float64x2_t first = vreinterpretq_f64_f32(quads[i]), second = vreinterpretq_f64_f32(quads[i + 4]);
    rows[i] = vreinterpretq_f16_f64(vtrn1q_f64(first, second));
    rows[i + 4] = vreinterpretq_f16_f64(vtrn2q_f64(first, second));
  }
}

// Cast one block of an operand and pack it into panels of `width` lines: for each step along the inner dim, the values of a
// panel's lines are contiguous. `panel` is the stride between panels. Returns the inverse scale. If `sums` is given, the sum of each
// line's values is added to it.
template <int64_t width>
float pack(const Operand& operand, int64_t line, int64_t inner, half_t* to, int64_t panel, float* sums = nullptr) {
  alignas(64) float block[kLines * kInner];
  const int64_t lines = std::min(kLines, operand.length - line), steps = std::min(kInner, operand.inner - inner);
  const float* from = operand.data + line * operand.line_stride + inner * operand.inner_stride;
  const bool transposed = operand.inner_stride == 1;  // contiguous along the inner dim
  const float largest = transposed ? copied<kLines, kInner>(from, operand.line_stride, lines, steps, block)
                               : copied<kInner, kLines>(from, operand.inner_stride, steps, lines, block);
  const Scale scale = scale_of(largest);
  const float32x4_t up = vdupq_n_f32(scale.up);
  const int64_t padded = rounded_up(steps, kSteps);
  if (transposed) {
    for (int64_t i = 0; i < kLines; i += 8) {
      half_t* panel_to = to + i / width * panel + i % width;
      for (int64_t k = 0; k < padded; k += 8) {
        float16x8_t rows[8];
        for (int r = 0; r < 8; ++r) rows[r] = cast(block + (i + r) * kInner + k, up);
        transpose(rows);
        for (int r = 0; r < 8; ++r) vst1q_f16(panel_to + (k + r) * width, rows[r]);
      }
    }
  } else {
    for (int64_t k = 0; k < padded; ++k) {
      for (int64_t i = 0; i < kLines; i += 8) {
        vst1q_f16(to + i / width * panel + k * width + i % width, cast(block + k * kLines + i, up));
      }
    }
  }
  if (sums != nullptr) {
    alignas(64) float here[kLines] = {};
    for (int64_t k = 0; k < steps; ++k) {
      for (int64_t i = 0; i < kLines; ++i) here[i] += transposed ? block[i * kInner + k] : block[k * kLines + i];
    }
    for (int64_t i = 0; i < lines; ++i) sums[i] += here[i];
  }
  return scale.inv_scale;
}

// One register tile of the result over `steps` steps of one block, added to `base` (which may be the tile itself, or one row for
// all) or stored alone.
template <bool add>
[[gnu::always_inline]] inline void multiply(int64_t steps, const half_t* left, const half_t* right, float inv_scale, const float* base, int64_t base_stride,
              float* to, int64_t stride) {
  float16x8_t sums[kRows][2];
  for (auto& row : sums) row[0] = row[1] = vdupq_n_f16(0);
  for (int64_t step = 0; step < steps; step += 4) {
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part, left += kRows, right += kColumns) {
      const float16x8_t rows = vld1q_f16(left), first = vld1q_f16(right), second = vld1q_f16(right + 8);
// In assembler, because GCC would copy the one number out first. In which order they stand is left to it: orders that were
// forced were 3 to 7 % slower.
#define RUSH_ROW(i)                                                                           \
  asm("fmla %0.8h, %1.8h, %2.h[" #i "]" : "+w"(sums[i][0]) : "w"(first), "x"(rows)); \
  asm("fmla %0.8h, %1.8h, %2.h[" #i "]" : "+w"(sums[i][1]) : "w"(second), "x"(rows));
      RUSH_ROW(0) RUSH_ROW(1) RUSH_ROW(2) RUSH_ROW(3) RUSH_ROW(4) RUSH_ROW(5) RUSH_ROW(6) RUSH_ROW(7)
#undef RUSH_ROW
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; ++row, to += stride, base += base_stride) {
#pragma GCC unroll 2
    for (int part = 0; part < 16; part += 8) {
      const float16x8_t sum = sums[row][part / 8];
      const float32x4_t low = vcvt_f32_f16(vget_low_f16(sum)), high = vcvt_high_f32_f16(sum);
      vst1q_f32(to + part, add ? vfmaq_n_f32(vld1q_f32(base + part), low, inv_scale) : vmulq_n_f32(low, inv_scale));
      vst1q_f32(to + part + 4, add ? vfmaq_n_f32(vld1q_f32(base + part + 4), high, inv_scale) : vmulq_n_f32(high, inv_scale));
    }
  }
}

}  // namespace rush::fp16
