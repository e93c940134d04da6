// SIMD vectors of fp32 as wide as the CPU's registers, by the compiler's vector extensions: one source for ARM and x86.
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
typedef int32_t IntVec __attribute__((vector_size(4 * kWidth)));

inline Vec load(const float* from) {
  Vec out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

inline void store(float* to, Vec values) { std::memcpy(to, &values, sizeof values); }

inline Vec all(float value) { return Vec{} + value; }

// The first `count` values; the rest are `other`.
inline Vec load_part(const float* from, int64_t count, float other) {
  float values[kWidth];
  for (int64_t i = 0; i < kWidth; ++i) values[i] = i < count ? from[i] : other;
  return load(values);
}

inline void store_part(float* to, Vec values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = values[i];
}

inline Vec max(Vec a, Vec b) { return a > b ? a : b; }

inline float reduce_sum(Vec values) {
  float out = 0;
  for (int64_t i = 0; i < kWidth; ++i) out += values[i];
  return out;
}

inline float reduce_max(Vec values) {
  float out = values[0];
  for (int64_t i = 1; i < kWidth; ++i) out = values[i] > out ? values[i] : out;
  return out;
}

constexpr float kLog2E = 1.44269504088896341f;

// 2^x for x up to 127, to about 1 ulp. x = n + r with an integer n and |r| <= 1/2: 2^r by a polynomial with a relative error of
// at most 2e-9, then n is added to the exponent. Zero below −126, where fp32 is denormal; NaN stays NaN. The polynomial is summed in
// pairs, to shorten the dependency chain.
inline Vec exp2(Vec x) {
  const Vec shift = all(12582912.0f);  // 1.5 · 2^23: adding and subtracting it rounds to an integer
  const Vec shifted = x + shift, r = x - (shifted - shift), square = r * r;
  const Vec low = 1.0f + 0.693147203f * r, middle = 0.240226479f + 0.0555033232f * r, high = 0.00961843798f + 0.00133989391f * r;
  const Vec series = (low + middle * square) + (high + 0.000153533101f * square) * (square * square);
  IntVec bits, series_bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  std::memcpy(&series_bits, &series, sizeof bits);
  series_bits += bits << 23;  // the lowest bits of `shifted` are n
  Vec out;
  std::memcpy(&out, &series_bits, sizeof out);
  return x < all(-126.0f) ? Vec{} : out;
}

inline Vec exp(Vec x) { return exp2(x * kLog2E); }

}  // namespace rush::cpu
