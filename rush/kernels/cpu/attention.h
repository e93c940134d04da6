// Exact attention of one key/value head and the query heads that share it, forward and backward, for a CPU.
//
// A GPU loops over tiles because its shared memory holds no more. A core's cache holds the scores of a few queries with all their
// keys, up to many thousand, so a block of queries is multiplied with all its keys at once: no running maximum, no rescaling. The
// backward pass saves one number per query, the logsumexp, and recomputes the scores. Masked keys outside a block are skipped.
//
// Shapes: t positions, d head dim, r queries of a block.
#pragma once

#include <algorithm>
#include <vector>

#include "matmul.h"

namespace rush::cpu {

constexpr int64_t kQueries = 16;  // queries of a block: few, so that little is computed above the diagonal

// One head: [t, d] with `stride` between positions and unit stride along d.
struct Head {
  float* data;
  int64_t stride;
};

// The keys a query attends to: from `first` up to itself (causal) or up to `last`, exclusive. Null: all.
struct Mask {
  const int32_t *first, *last;
  int64_t length;
  bool causal;

  int64_t from(int64_t t) const { return first == nullptr ? 0 : first[t]; }
  int64_t to(int64_t t) const { return causal ? t + 1 : (last == nullptr ? length : last[t]); }
};

template <int64_t dim>
class Attention {
 public:
  Attention(const Mask& mask, float scale)
      : mask_(mask), scale_(scale), padded_(rounded_up(mask.length, kPad)), buffer_(padded_ * dim * 5 + kQueries * (2 * dim + 2 * padded_)) {
    float* at = buffer_.data();
    const auto take = [&](int64_t size) { float* here = at; at += size; return here; };
    k_ = take(padded_ * dim), v_ = take(padded_ * dim), k_t_ = take(padded_ * dim);
    dk_ = take(padded_ * dim), dv_ = take(padded_ * dim);
    q_ = take(kQueries * dim), o_ = take(kQueries * dim);
    p_ = take(kQueries * padded_), ds_ = take(kQueries * padded_);
  }

  // Keys and values for the queries that follow.
  void set_keys(const Head& k, const Head& v) {
    copy(k, 0, mask_.length, padded_, k_);
    copy(v, 0, mask_.length, padded_, v_);
    transpose(k_, k_t_);
  }

  void forward(const Head& q, const Head& o, float* lse2) {
    for (int64_t t = 0; t < mask_.length; t += kQueries) {
      const int64_t rows = std::min(kQueries, mask_.length - t);
      const Span span = seen(t, rows);
      scores(q, t, rows, span);
      float inverse[kQueries];
      for (int64_t r = 0; r < rows; ++r) {
        float* row = p_ + r * padded_;
        const int64_t from = mask_.from(t + r), to = mask_.to(t + r);
        const float top = row_max(row, from, to);
        const float total = sum_exp(row, span, from, to, top);
        inverse[r] = 1 / total;
        lse2[t + r] = (top + std::log(total)) * kLog2E;
      }
      matmul<Left::kRowMajor, false>(kQueries, dim, span.size(), p_ + span.from, padded_, v_ + span.from * dim, dim, o_, dim);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t d = 0; d < dim; d += kWidth) store(o.data + (t + r) * o.stride + d, load(o_ + r * dim + d) * inverse[r]);
      }
    }
  }

  // dk and dv are summed over all query heads of the group.
  void begin_backward() { std::fill(dk_, dk_ + 2 * padded_ * dim, 0.0f); }

  // `v_t`: the values transposed, from `transposed_values`.
  void backward(const Head& q, const Head& dout, const float* lse2, const float* v_t, const Head& dq) {
    for (int64_t t = 0; t < mask_.length; t += kQueries) {
      const int64_t rows = std::min(kQueries, mask_.length - t), size = seen(t, rows).size();
      const Span span = seen(t, rows);
      scores(q, t, rows, span);
      copy(dout, t, rows, kQueries, o_);
      matmul<Left::kRowMajor, false>(kQueries, size, dim, o_, dim, v_t + span.from, padded_, ds_ + span.from, padded_);
      for (int64_t r = 0; r < rows; ++r) {
        float *p = p_ + r * padded_, *ds = ds_ + r * padded_;
        const float total = sum_exp(p, span, mask_.from(t + r), mask_.to(t + r), lse2[t + r] / kLog2E);
        // delta = Σ p·dp, summed from the values it is subtracted from, so that what cancels, cancels exactly. (Σ o·do is the
        // same sum in another order, with other rounding.)
        Vec mean = {};
        for (int64_t s = span.from; s < span.to; s += kWidth) mean += load(p + s) * load(ds + s);
        const float off = reduce_sum(mean) / total;
        for (int64_t s = span.from; s < span.to; s += kWidth) store(ds + s, load(p + s) * (load(ds + s) - off));
      }
      for (int64_t r = rows; r < kQueries; ++r) {
        std::fill(p_ + r * padded_ + span.from, p_ + r * padded_ + span.to, 0.0f);
        std::fill(ds_ + r * padded_ + span.from, ds_ + r * padded_ + span.to, 0.0f);
      }
      matmul<Left::kTransposed, true>(size, dim, kQueries, p_ + span.from, padded_, o_, dim, dv_ + span.from * dim, dim);
      matmul<Left::kTransposed, true>(size, dim, kQueries, ds_ + span.from, padded_, q_, dim, dk_ + span.from * dim, dim);
      matmul<Left::kRowMajor, false>(kQueries, dim, size, ds_ + span.from, padded_, k_ + span.from * dim, dim, o_, dim);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t d = 0; d < dim; d += kWidth) store(dq.data + (t + r) * dq.stride + d, load(o_ + r * dim + d) * scale_);
      }
    }
  }

  void end_backward(const Head& dk, const Head& dv) const {
    for (int64_t t = 0; t < mask_.length; ++t) {
      std::copy(dk_ + t * dim, dk_ + (t + 1) * dim, dk.data + t * dk.stride);
      std::copy(dv_ + t * dim, dv_ + (t + 1) * dim, dv.data + t * dv.stride);
    }
  }

  std::vector<float> transposed_values() const {
    std::vector<float> out(padded_ * dim);
    transpose(v_, out.data());
    return out;
  }

 private:
  // Keys that any query of a block attends to, in whole tiles.
  struct Span {
    int64_t from, to;
    int64_t size() const { return to - from; }
  };

  Span seen(int64_t t, int64_t rows) const {
    int64_t from = mask_.length, to = 0;
    for (int64_t r = 0; r < rows; ++r) from = std::min(from, mask_.from(t + r)), to = std::max(to, mask_.to(t + r));
    return {from / kPad * kPad, rounded_up(to, kPad)};
  }

  // Copy positions, then pad with zeros up to `whole` of them.
  static void copy(const Head& from, int64_t t, int64_t count, int64_t whole, float* to, float times = 1) {
    for (int64_t i = 0; i < count; ++i) {
      const float* source = from.data + (t + i) * from.stride;
      for (int64_t d = 0; d < dim; d += kWidth) store(to + i * dim + d, load(source + d) * times);
    }
    std::fill(to + count * dim, to + whole * dim, 0.0f);
  }

  void transpose(const float* from, float* to) const {
    for (int64_t t = 0; t < padded_; t += kWidth) {
      for (int64_t d = 0; d < dim; ++d) {
        for (int64_t i = 0; i < kWidth; ++i) to[d * padded_ + t + i] = from[(t + i) * dim + d];
      }
    }
  }

  void scores(const Head& q, int64_t t, int64_t rows, const Span& span) {
    copy(q, t, rows, kQueries, q_, scale_);
    matmul<Left::kRowMajor, false>(kQueries, span.size(), dim, q_, dim, k_t_ + span.from, padded_, p_ + span.from, padded_);
  }

  static float row_max(const float* row, int64_t from, int64_t to) {
    float out = row[from];
    int64_t at = from;
    if (to - from >= kWidth) {
      Vec top = load(row + at);
      for (at += kWidth; at + kWidth <= to; at += kWidth) top = max(top, load(row + at));
      out = reduce_max(top);
    }
    for (; at < to; ++at) out = std::max(out, row[at]);
    return out;
  }

  // exp(score − top) for the keys from `from` to `to`, zero for the others of the span; returns their sum.
  static float sum_exp(float* row, const Span& span, int64_t from, int64_t to, float top) {
    const int64_t last = rounded_up(to, kWidth);
    Vec total = {};
    std::fill(row + span.from, row + from, -std::numeric_limits<float>::infinity());
    std::fill(row + to, row + last, -std::numeric_limits<float>::infinity());
    std::fill(row + last, row + span.to, 0.0f);
    const int64_t first = from / kWidth * kWidth;
    std::fill(row + span.from, row + first, 0.0f);
    for (int64_t s = first; s < last; s += kWidth) {
      const Vec e = exp(load(row + s) - top);
      store(row + s, e);
      total += e;
    }
    return reduce_sum(total);
  }

  Mask mask_;
  float scale_;
  int64_t padded_;
  std::vector<float> buffer_;
  float *k_, *v_, *k_t_, *dk_, *dv_, *q_, *o_, *p_, *ds_;
};

}  // namespace rush::cpu
