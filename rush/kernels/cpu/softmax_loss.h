// Cross-entropy of one row of logits and its gradient.
#pragma once

#include <algorithm>

#include "vectors.h"

namespace rush::cpu {

inline float row_max(const float* row, int64_t columns) {
  const float least = -std::numeric_limits<float>::infinity();
  Vec tops[4] = {all(least), all(least), all(least), all(least)};
  int64_t at = 0;
  for (; at + 4 * kWidth <= columns; at += 4 * kWidth) {
    for (int64_t i = 0; i < 4; ++i) tops[i] = max(tops[i], load(row + at + i * kWidth));
  }
  for (; at < columns; at += kWidth) {
    tops[0] = max(tops[0], at + kWidth <= columns ? load(row + at) : load_part(row + at, columns - at, least));
  }
  return reduce_max(max(max(tops[0], tops[1]), max(tops[2], tops[3])));
}

// Σ exp(x − top). The exponentials are stored to `to` unless it is null.
inline float row_sum_exp(const float* row, int64_t columns, float top, float* to) {
  Vec sums[2] = {};
  int64_t at = 0;
  const auto take = [&](int64_t which) {
    const Vec e = exp(load(row + at) - top);
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
    const Vec e = exp(load_part(row + at, columns - at, -std::numeric_limits<float>::infinity()) - top);
    if (to != nullptr) store_part(to + at, e, columns - at);
    for (int64_t i = 0; i < columns - at; ++i) rest += e[i];
  }
  return reduce_sum(sums[0] + sums[1]) + rest;
}

// The loss of a row. `lse` receives the logsumexp; where it is null, the gradient times `scale` overwrites the logits, zero in
// the padding. A label outside the vocabulary gives NaN.
inline float row_loss(float* row, int64_t columns, int64_t padded, int64_t label, int64_t ignore, float scale, float* lse) {
  if (label == ignore) {
    if (lse != nullptr) *lse = 0;
    else std::fill(row, row + padded, 0.0f);
    return 0;
  }
  const bool known = label >= 0 && label < columns;
  const float label_logit = known ? row[label] : std::numeric_limits<float>::quiet_NaN();
  const float top = row_max(row, columns);
  const float total = row_sum_exp(row, columns, top, lse == nullptr ? row : nullptr);
  const float log_sum = top + std::log(total);
  const float loss = log_sum - label_logit;
  if (lse != nullptr) {
    *lse = log_sum;
    return loss;
  }
  const float times = scale / total;
  int64_t at = 0;
  for (; at + kWidth <= columns; at += kWidth) store(row + at, load(row + at) * times);
  for (; at < columns; ++at) row[at] *= times;
  std::fill(row + columns, row + padded, 0.0f);
  if (known) row[label] -= scale;
  return loss;
}

// The gradient of a row's logits, given that of its loss; `to` may be the logits.
inline void row_gradient(const float* row, float* to, int64_t columns, int64_t label, int64_t ignore, float lse, float upstream) {
  if (label == ignore) {
    std::fill(to, to + columns, 0.0f);
    return;
  }
  for (int64_t at = 0; at < columns; at += kWidth) {
    const int64_t count = std::min(kWidth, columns - at);
    const Vec x = count == kWidth ? load(row + at) : load_part(row + at, count, lse);
    const Vec gradient = exp(x - lse) * upstream;
    if (count == kWidth) store(to + at, gradient);
    else store_part(to + at, gradient, count);
  }
  if (label >= 0 && label < columns) to[label] -= upstream;
}

}  // namespace rush::cpu
