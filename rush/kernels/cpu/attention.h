// Exact attention of one key/value head and the query heads that share it, forward and backward, for a CPU.
//
// A GPU walks over tiles because its fast memory holds no more. A core's cache holds the scores of a few queries with all their
// keys, up to many thousand, so here a group of queries meets all its keys at once: no running maximum, no rescaling. What is kept
// for the backward pass is one number a query; scores are made again there. Keys outside of a group's sight are not touched.
//
// Shapes: t positions, d head dim, r queries of a group.
#pragma once

#include <algorithm>
#include <vector>

#include "matmul.h"

namespace rush::cpu {

constexpr int64_t kQueries = 16;  // of a group: few, so that little is computed above the diagonal

// One head's positions: `stride` numbers from one to the next, the numbers of a position side by side.
struct Head {
  float* data;
  int64_t stride;
};

// What a position sees: from `first` on, up to itself or (not causal) up to one before `last`. Null: all.
struct Sight {
  const int32_t *first, *last;
  int64_t length;
  bool causal;

  int64_t from(int64_t t) const { return first == nullptr ? 0 : first[t]; }
  int64_t to(int64_t t) const { return causal ? t + 1 : (last == nullptr ? length : last[t]); }
};

template <int64_t dim>
class Attention {
 public:
  Attention(const Sight& sight, float scale)
      : sight_(sight), scale_(scale), padded_(rounded_up(sight.length, kSides)), room_(padded_ * dim * 5 + kQueries * (2 * dim + 2 * padded_)) {
    float* at = room_.data();
    const auto take = [&](int64_t size) { float* here = at; at += size; return here; };
    k_ = take(padded_ * dim), v_ = take(padded_ * dim), turned_ = take(padded_ * dim);
    dk_ = take(padded_ * dim), dv_ = take(padded_ * dim);
    q_ = take(kQueries * dim), o_ = take(kQueries * dim);
    p_ = take(kQueries * padded_), ds_ = take(kQueries * padded_);
  }

  // Keys and values of the next queries.
  void meet(const Head& k, const Head& v) {
    copy(k, 0, sight_.length, padded_, k_);
    copy(v, 0, sight_.length, padded_, v_);
    turn(k_, turned_);
  }

  void forward(const Head& q, const Head& o, float* lse2) {
    for (int64_t t = 0; t < sight_.length; t += kQueries) {
      const int64_t rows = std::min(kQueries, sight_.length - t);
      const Span span = seen(t, rows);
      scores(q, t, rows, span);
      float inverse[kQueries];
      for (int64_t r = 0; r < rows; ++r) {
        float* row = p_ + r * padded_;
        const int64_t from = sight_.from(t + r), to = sight_.to(t + r);
        const float top = highest(row, from, to);
        const float total = powers(row, span, from, to, top);
        inverse[r] = 1 / total;
        lse2[t + r] = (top + std::log(total)) * kLog2E;
      }
      multiply<Left::kStraight, false>(kQueries, dim, span.size(), p_ + span.from, padded_, v_ + span.from * dim, dim, o_, dim);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t d = 0; d < dim; d += kWidth) store(o.data + (t + r) * o.stride + d, load(o_ + r * dim + d) * inverse[r]);
      }
    }
  }

  // Sums over all query heads of the group, so they start at nothing here.
  void begin_backward() { std::fill(dk_, dk_ + 2 * padded_ * dim, 0.0f); }

  // `turned_v` has the values turned over, as `turned` makes them.
  void backward(const Head& q, const Head& dout, const float* lse2, const float* turned_v, const Head& dq) {
    for (int64_t t = 0; t < sight_.length; t += kQueries) {
      const int64_t rows = std::min(kQueries, sight_.length - t), size = seen(t, rows).size();
      const Span span = seen(t, rows);
      scores(q, t, rows, span);
      copy(dout, t, rows, kQueries, o_);
      multiply<Left::kStraight, false>(kQueries, size, dim, o_, dim, turned_v + span.from, padded_, ds_ + span.from, padded_);
      for (int64_t r = 0; r < rows; ++r) {
        float *p = p_ + r * padded_, *ds = ds_ + r * padded_;
        const float total = powers(p, span, sight_.from(t + r), sight_.to(t + r), lse2[t + r] / kLog2E);
        // The mean of the row's gradients under its probabilities, from the numbers it is taken off: what cancels, cancels
        // exactly. (The dot product of output and gradient is the same sum in another order, with other rounding.)
        Vec mean = {};
        for (int64_t s = span.from; s < span.to; s += kWidth) mean += load(p + s) * load(ds + s);
        const float off = sum(mean) / total;
        for (int64_t s = span.from; s < span.to; s += kWidth) store(ds + s, load(p + s) * (load(ds + s) - off));
      }
      for (int64_t r = rows; r < kQueries; ++r) {
        std::fill(p_ + r * padded_ + span.from, p_ + r * padded_ + span.to, 0.0f);
        std::fill(ds_ + r * padded_ + span.from, ds_ + r * padded_ + span.to, 0.0f);
      }
      multiply<Left::kTurned, true>(size, dim, kQueries, p_ + span.from, padded_, o_, dim, dv_ + span.from * dim, dim);
      multiply<Left::kTurned, true>(size, dim, kQueries, ds_ + span.from, padded_, q_, dim, dk_ + span.from * dim, dim);
      multiply<Left::kStraight, false>(kQueries, dim, size, ds_ + span.from, padded_, k_ + span.from * dim, dim, o_, dim);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t d = 0; d < dim; d += kWidth) store(dq.data + (t + r) * dq.stride + d, load(o_ + r * dim + d) * scale_);
      }
    }
  }

  void end_backward(const Head& dk, const Head& dv) const {
    for (int64_t t = 0; t < sight_.length; ++t) {
      std::copy(dk_ + t * dim, dk_ + (t + 1) * dim, dk.data + t * dk.stride);
      std::copy(dv_ + t * dim, dv_ + (t + 1) * dim, dv.data + t * dv.stride);
    }
  }

  std::vector<float> turned_values() const {
    std::vector<float> out(padded_ * dim);
    turn(v_, out.data());
    return out;
  }

 private:
  // Keys that some of a group's queries see, in whole tiles.
  struct Span {
    int64_t from, to;
    int64_t size() const { return to - from; }
  };

  Span seen(int64_t t, int64_t rows) const {
    int64_t from = sight_.length, to = 0;
    for (int64_t r = 0; r < rows; ++r) from = std::min(from, sight_.from(t + r)), to = std::max(to, sight_.to(t + r));
    return {from / kSides * kSides, rounded_up(to, kSides)};
  }

  // Positions side by side, then zeros up to `whole` of them.
  static void copy(const Head& from, int64_t t, int64_t count, int64_t whole, float* to, float times = 1) {
    for (int64_t i = 0; i < count; ++i) {
      const float* source = from.data + (t + i) * from.stride;
      for (int64_t d = 0; d < dim; d += kWidth) store(to + i * dim + d, load(source + d) * times);
    }
    std::fill(to + count * dim, to + whole * dim, 0.0f);
  }

  void turn(const float* from, float* to) const {
    for (int64_t t = 0; t < padded_; t += kWidth) {
      for (int64_t d = 0; d < dim; ++d) {
        for (int64_t i = 0; i < kWidth; ++i) to[d * padded_ + t + i] = from[(t + i) * dim + d];
      }
    }
  }

  void scores(const Head& q, int64_t t, int64_t rows, const Span& span) {
    copy(q, t, rows, kQueries, q_, scale_);
    multiply<Left::kStraight, false>(kQueries, span.size(), dim, q_, dim, turned_ + span.from, padded_, p_ + span.from, padded_);
  }

  static float highest(const float* row, int64_t from, int64_t to) {
    float out = row[from];
    int64_t at = from;
    if (to - from >= kWidth) {
      Vec top = load(row + at);
      for (at += kWidth; at + kWidth <= to; at += kWidth) top = larger(top, load(row + at));
      out = largest(top);
    }
    for (; at < to; ++at) out = std::max(out, row[at]);
    return out;
  }

  // exp(score − top) for the keys from `from` to `to`, nothing for the others of the span; their sum.
  static float powers(float* row, const Span& span, int64_t from, int64_t to, float top) {
    const int64_t last = rounded_up(to, kWidth);
    Vec total = {};
    std::fill(row + span.from, row + from, -std::numeric_limits<float>::infinity());
    std::fill(row + to, row + last, -std::numeric_limits<float>::infinity());
    std::fill(row + last, row + span.to, 0.0f);
    const int64_t first = from / kWidth * kWidth;
    std::fill(row + span.from, row + first, 0.0f);
    for (int64_t s = first; s < last; s += kWidth) {
      const Vec e = power(load(row + s) - top);
      store(row + s, e);
      total += e;
    }
    return sum(total);
  }

  Sight sight_;
  float scale_;
  int64_t padded_;
  std::vector<float> room_;
  float *k_, *v_, *turned_, *dk_, *dv_, *q_, *o_, *p_, *ds_;
};

}  // namespace rush::cpu
