// Vectors of fp32 numbers as wide as the CPU's registers, by the compiler's own vector types: one source for ARM and x86.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace rush::cpu {

#if defined(__AVX2__)
constexpr int64_t kWidth = 8;
#else
constexpr int64_t kWidth = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kWidth)));
typedef int32_t Whole __attribute__((vector_size(4 * kWidth)));

inline Vec load(const float* from) {
  Vec out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

inline void store(float* to, Vec values) { std::memcpy(to, &values, sizeof values); }

inline Vec all(float value) { return Vec{} + value; }

// The first `count` of them; the rest as `other` says.
inline Vec load_part(const float* from, int64_t count, float other) {
  float room[kWidth];
  for (int64_t i = 0; i < kWidth; ++i) room[i] = i < count ? from[i] : other;
  return load(room);
}

inline void store_part(float* to, Vec values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = values[i];
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

inline float sum(Vec values) {
  float out = 0;
  for (int64_t i = 0; i < kWidth; ++i) out += values[i];
  return out;
}

inline float largest(Vec values) {
  float out = values[0];
  for (int64_t i = 1; i < kWidth; ++i) out = values[i] > out ? values[i] : out;
  return out;
}

constexpr float kLog2E = 1.44269504088896341f;

// Two to the x for x up to 127, to about one unit in the last place. x = n + r with a whole n and |r| up to 1/2: the power of r by a
// polynomial that is off by at most 2e-9 of it, then n is added to the exponent. Zero below −126, where fp32 has only denormal
// numbers left; NaN stays NaN. The polynomial is added up in pairs: one after the other its terms would wait for each other.
inline Vec power_of_2(Vec x) {
  const Vec shift = all(12582912.0f);  // 1.5 · 2^23: added and taken off again, it leaves a whole number
  const Vec shifted = x + shift, r = x - (shifted - shift), square = r * r;
  const Vec low = 1.0f + 0.693147203f * r, middle = 0.240226479f + 0.0555033232f * r, high = 0.00961843798f + 0.00133989391f * r;
  const Vec series = (low + middle * square) + (high + 0.000153533101f * square) * (square * square);
  Whole bits, of_series;
  std::memcpy(&bits, &shifted, sizeof bits);
  std::memcpy(&of_series, &series, sizeof bits);
  of_series += bits << 23;  // the lowest bits of the shifted number are n
  Vec out;
  std::memcpy(&out, &of_series, sizeof out);
  return x < all(-126.0f) ? Vec{} : out;
}

// e to the x.
inline Vec power(Vec x) { return power_of_2(x * kLog2E); }

}  // namespace rush::cpu
