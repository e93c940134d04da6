// Cross-entropy of one row of logits and its gradient.
#pragma once

#include <algorithm>

#include "vectors.h"

namespace rush::cpu {

struct LossSettings {
  int64_t ignore;
  float smoothing, z_loss, scale;
};

inline float row_largest(const float* row, int64_t columns) {
  const float least = -std::numeric_limits<float>::infinity();
  Vec tops[4] = {all(least), all(least), all(least), all(least)};
  int64_t at = 0;
  for (; at + 4 * kWidth <= columns; at += 4 * kWidth) {
    for (int64_t i = 0; i < 4; ++i) tops[i] = larger(tops[i], load(row + at + i * kWidth));
  }
  for (; at < columns; at += kWidth) {
    tops[0] = larger(tops[0], at + kWidth <= columns ? load(row + at) : load_part(row + at, columns - at, least));
  }
  return largest(larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])));
}

inline float row_mean(const float* row, int64_t columns) {
  double out = 0;
  for (int64_t at = 0; at < columns; ++at) out += row[at];
  return static_cast<float>(out / columns);
}

// Σ exp(x − top). The powers are put down at `to`, if given.
inline float row_powers(const float* row, int64_t columns, float top, float* to) {
  Vec sums[2] = {};
  int64_t at = 0;
  const auto take = [&](int64_t which) {
    const Vec e = power(load(row + at) - top);
    if (to != nullptr) store(to + at, e);
    sums[which] += e;
    at += kWidth;
  };
  while (at + 2 * kWidth <= columns) {
    take(0);
    take(1);
  }
  if (at + kWidth <= columns) take(0);
  float rest = 0;
  if (at < columns) {
    const Vec e = power(load_part(row + at, columns - at, -std::numeric_limits<float>::infinity()) - top);
    if (to != nullptr) store_part(to + at, e, columns - at);
    for (int64_t i = 0; i < columns - at; ++i) rest += e[i];
  }
  return sum(sums[0] + sums[1]) + rest;
}

// The loss of a row; `lse` gets the log of the softmax's denominator, or, where it is null, the gradient takes the place of the
// logits, zero in the padding. A label outside the vocabulary gives a loss that is not a number.
inline float row_loss(float* row, int64_t columns, int64_t padded, int64_t label, const LossSettings& set, float* lse) {
  if (label == set.ignore) {
    if (lse != nullptr) *lse = 0;
    else std::fill(row, row + padded, 0.0f);
    return 0;
  }
  const bool known = label >= 0 && label < columns;
  const float own = known ? row[label] : std::numeric_limits<float>::quiet_NaN();
  const float mean = set.smoothing > 0 ? row_mean(row, columns) : 0;
  const float top = row_largest(row, columns);
  const float total = row_powers(row, columns, top, lse == nullptr ? row : nullptr);
  const float log_sum = top + std::log(total);
  const float loss = log_sum - (1 - set.smoothing) * own - set.smoothing * mean + set.z_loss * log_sum * log_sum;
  if (lse != nullptr) {
    *lse = log_sum;
    return loss;
  }
  const float slope = (1 + 2 * set.z_loss * log_sum) * set.scale, flat = set.smoothing / columns * set.scale;
  const float times = slope / total;
  int64_t at = 0;
  for (; at + kWidth <= columns; at += kWidth) store(row + at, load(row + at) * times - flat);
  for (; at < columns; ++at) row[at] = row[at] * times - flat;
  std::fill(row + columns, row + padded, 0.0f);
  if (known) row[label] -= (1 - set.smoothing) * set.scale;
  return loss;
}

// The gradient of a row's logits, given that of its loss; it may take the place of the logits.
inline void row_gradient(const float* row, float* to, int64_t columns, int64_t label, float lse, float upstream,
                         const LossSettings& set) {
  if (label == set.ignore) {
    std::fill(to, to + columns, 0.0f);
    return;
  }
  const float slope = (1 + 2 * set.z_loss * lse) * upstream, flat = set.smoothing / columns * upstream;
  for (int64_t at = 0; at < columns; at += kWidth) {
    const int64_t count = std::min(kWidth, columns - at);
    const Vec x = count == kWidth ? load(row + at) : load_part(row + at, count, lse);
    const Vec gradient = power(x - lse) * slope - flat;
    if (count == kWidth) store(to + at, gradient);
    else store_part(to + at, gradient, count);
  }
  if (label >= 0 && label < columns) to[label] -= (1 - set.smoothing) * upstream;
}

}  // namespace rush::cpu
