// The operators: parallel loops and registration. Only called from Python code that has checked shapes and dtypes.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "activations.h"
#include "attention.h"
#include "softmax_loss.h"

namespace {

using namespace rush::cpu;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kGrain = 16384;  // elements per thread, at least

// Elementwise over contiguous tensors: `work(at, count)` for each full vector and for the remainder.
template <typename Work>
void for_each_vector(int64_t size, const Work& work) {
  const int64_t whole = size / kWidth;
  at::parallel_for(0, whole, kGrain / kWidth, [&](int64_t begin, int64_t end) {
#pragma GCC unroll 4
    for (int64_t index = begin; index < end; ++index) work(index * kWidth, kWidth);
  });
  if (whole * kWidth < size) work(whole * kWidth, size - whole * kWidth);
}

inline Vec load_at(const float* from, int64_t at, int64_t count) {
  return count == kWidth ? load(from + at) : load_part(from + at, count, 0);
}

inline void store_at(float* to, int64_t at, Vec values, int64_t count) {
  if (count == kWidth) store(to + at, values);
  else store_part(to + at, values, count);
}

Tensor gelu_forward(const Tensor& x) {
  Tensor out = at::empty(x.sizes(), x.options());
  const float* from = x.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  for_each_vector(x.numel(), [&](int64_t at, int64_t count) { store_at(to, at, gelu(load_at(from, at, count)), count); });
  return out;
}

Tensor gelu_backward(const Tensor& dout, const Tensor& x) {
  Tensor out = at::empty(x.sizes(), x.options());
  const float *upstream_ptr = dout.const_data_ptr<float>(), *from = x.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  for_each_vector(x.numel(), [&](int64_t at, int64_t count) {
    store_at(to, at, load_at(upstream_ptr, at, count) * gelu_derivative(load_at(from, at, count)), count);
  });
  return out;
}

// A gated activation: a function of gate and up, and the gradients of both.
template <typename Function>
Tensor gated_forward(const Tensor& gate, const Tensor& up, Function function) {
  Tensor out = at::empty(gate.sizes(), gate.options());
  const float *first = gate.const_data_ptr<float>(), *second = up.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  for_each_vector(gate.numel(), [&](int64_t at, int64_t count) {
    store_at(to, at, function(load_at(first, at, count), load_at(second, at, count)), count);
  });
  return out;
}

template <typename Function>
std::tuple<Tensor, Tensor> gated_backward(const Tensor& dout, const Tensor& gate, const Tensor& up, Function gradients_of) {
  Tensor d_gate = at::empty(gate.sizes(), gate.options()), d_up = at::empty(gate.sizes(), gate.options());
  const float *upstream_ptr = dout.const_data_ptr<float>(), *first = gate.const_data_ptr<float>(), *second = up.const_data_ptr<float>();
  float *d_gate_ptr = d_gate.mutable_data_ptr<float>(), *d_up_ptr = d_up.mutable_data_ptr<float>();
  for_each_vector(gate.numel(), [&](int64_t at, int64_t count) {
    const Pair gradients = gradients_of(load_at(upstream_ptr, at, count), load_at(first, at, count), load_at(second, at, count));
    store_at(d_gate_ptr, at, gradients.first, count);
    store_at(d_up_ptr, at, gradients.second, count);
  });
  return {d_gate, d_up};
}

Tensor swiglu_forward(const Tensor& gate, const Tensor& up) {
  return gated_forward(gate, up, [](Vec g, Vec u) { return swiglu(g, u); });
}

std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& dout, const Tensor& gate, const Tensor& up) {
  return gated_backward(dout, gate, up, [](Vec d, Vec g, Vec u) { return swiglu_gradients(d, g, u); });
}

Tensor geglu_forward(const Tensor& gate, const Tensor& up) {
  return gated_forward(gate, up, [](Vec g, Vec u) { return geglu(g, u); });
}

std::tuple<Tensor, Tensor> geglu_backward(const Tensor& dout, const Tensor& gate, const Tensor& up) {
  return gated_backward(dout, gate, up, [](Vec d, Vec g, Vec u) { return geglu_gradients(d, g, u); });
}

int64_t rows_per_thread(int64_t columns) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(columns, 1)); }

void cross_entropy_forward(const Tensor& logits, const Tensor& labels, const Tensor& losses, const OptionalTensor& lse,
                           int64_t columns, int64_t ignore, double scale) {
  float *from = logits.mutable_data_ptr<float>(), *to = losses.mutable_data_ptr<float>();
  float* sums = lse.has_value() ? lse->mutable_data_ptr<float>() : nullptr;
  const int64_t* label_ptr = labels.const_data_ptr<int64_t>();
  const int64_t stride = logits.stride(0), padded = logits.size(1);
  at::parallel_for(0, logits.size(0), rows_per_thread(padded), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* sum = sums == nullptr ? nullptr : sums + row;
      to[row] = row_loss(from + row * stride, columns, padded, label_ptr[row], ignore, static_cast<float>(scale), sum);
    }
  });
}

void cross_entropy_backward(const Tensor& logits, const Tensor& labels, const Tensor& lse, const Tensor& upstream, const Tensor& out,
                            int64_t ignore) {
  const float *from = logits.const_data_ptr<float>(), *sums = lse.const_data_ptr<float>(), *upstream_ptr = upstream.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  const int64_t* label_ptr = labels.const_data_ptr<int64_t>();
  const int64_t columns = logits.size(1), stride = logits.stride(0), out_stride = out.stride(0), step = upstream.stride(0);
  at::parallel_for(0, logits.size(0), rows_per_thread(columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      row_gradient(from + row * stride, to + row * out_stride, columns, label_ptr[row], ignore, sums[row], upstream_ptr[row * step]);
    }
  });
}

// Head `h` of row `b` of a tensor [b, h, t, d].
Head head_of(const Tensor& x, int64_t b, int64_t h) {
  float* data = const_cast<float*>(x.const_data_ptr<float>());
  return {data + b * x.stride(0) + h * x.stride(1), x.stride(2)};
}

Mask mask_of(const OptionalTensor& first, const OptionalTensor& last, int64_t b, int64_t length, bool causal) {
  if (!first.has_value()) return {nullptr, nullptr, length, causal};
  return {first->const_data_ptr<int32_t>() + b * length, last->const_data_ptr<int32_t>() + b * length, length, causal};
}

// `work(b, kv head)` for each key/value head of each row, in parallel.
template <typename Work>
void for_each_kv_head(const Tensor& k, const Work& work) {
  const int64_t heads = k.size(1);
  at::parallel_for(0, k.size(0) * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) work(index / heads, index % heads);
  });
}

template <int64_t dim>
void forward_of(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& first, const OptionalTensor& last,
                bool causal, float scale, const Tensor& o, const Tensor& lse2) {
  const int64_t length = q.size(2), heads = q.size(1), group = heads / k.size(1);
  float* numbers = lse2.mutable_data_ptr<float>();
  for_each_kv_head(k, [&](int64_t b, int64_t kv) {
    Attention<dim> attention(mask_of(first, last, b, length, causal), scale);
    attention.set_keys(head_of(k, b, kv), head_of(v, b, kv));
    for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
      attention.forward(head_of(q, b, h), head_of(o, b, h), numbers + (b * heads + h) * length);
    }
  });
}

template <int64_t dim>
void backward_of(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lse2,
                 const OptionalTensor& first, const OptionalTensor& last, bool causal, float scale, const Tensor& dq, const Tensor& dk,
                 const Tensor& dv) {
  const int64_t length = q.size(2), heads = q.size(1), group = heads / k.size(1);
  const float* numbers = lse2.const_data_ptr<float>();
  for_each_kv_head(k, [&](int64_t b, int64_t kv) {
    Attention<dim> attention(mask_of(first, last, b, length, causal), scale);
    attention.set_keys(head_of(k, b, kv), head_of(v, b, kv));
    attention.begin_backward();
    const std::vector<float> v_t = attention.transposed_values();
    for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
      attention.backward(head_of(q, b, h), head_of(dout, b, h), numbers + (b * heads + h) * length, v_t.data(),
                         head_of(dq, b, h));
    }
    attention.end_backward(head_of(dk, b, kv), head_of(dv, b, kv));
  });
}

template <typename Work>
void with_dim(int64_t dim, const Work& work) {
  if (dim == 16) return work(std::integral_constant<int64_t, 16>{});
  if (dim == 32) return work(std::integral_constant<int64_t, 32>{});
  if (dim == 64) return work(std::integral_constant<int64_t, 64>{});
  if (dim == 128) return work(std::integral_constant<int64_t, 128>{});
  TORCH_CHECK(dim == 256, "attention supports head dims 16, 32, 64, 128 and 256");
  work(std::integral_constant<int64_t, 256>{});
}

void attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& first, const OptionalTensor& last,
                       bool causal, double scale, const Tensor& o, const Tensor& lse2) {
  with_dim(q.size(3), [&](auto dim) { forward_of<dim>(q, k, v, first, last, causal, static_cast<float>(scale), o, lse2); });
}

void attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lse2,
                        const OptionalTensor& first, const OptionalTensor& last, bool causal, double scale, const Tensor& dq,
                        const Tensor& dk, const Tensor& dv) {
  with_dim(q.size(3), [&](auto dim) {
    backward_of<dim>(dout, q, k, v, lse2, first, last, causal, static_cast<float>(scale), dq, dk, dv);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(rush_cpu, library) {
  library.def("gelu_forward(Tensor x) -> Tensor");
  library.def("gelu_backward(Tensor dout, Tensor x) -> Tensor");
  library.def("swiglu_forward(Tensor gate, Tensor up) -> Tensor");
  library.def("swiglu_backward(Tensor dout, Tensor gate, Tensor up) -> (Tensor, Tensor)");
  library.def("geglu_forward(Tensor gate, Tensor up) -> Tensor");
  library.def("geglu_backward(Tensor dout, Tensor gate, Tensor up) -> (Tensor, Tensor)");
  library.def(
      "cross_entropy_forward(Tensor(a!) logits, Tensor labels, Tensor(b!) losses, Tensor(c!)? lse, int columns, int ignore, "
      "float scale) -> ()");
  library.def(
      "cross_entropy_backward(Tensor logits, Tensor labels, Tensor lse, Tensor upstream, Tensor(a!) out, int ignore) -> ()");
  library.def(
      "attention_forward(Tensor q, Tensor k, Tensor v, Tensor? first, Tensor? last, bool causal, float scale, Tensor(a!) o, "
      "Tensor(b!) lse2) -> ()");
  library.def(
      "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor lse2, Tensor? first, Tensor? last, "
      "bool causal, float scale, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv) -> ()");
}

TORCH_LIBRARY_IMPL(rush_cpu, CPU, library) {
  library.impl("gelu_forward", gelu_forward);
  library.impl("gelu_backward", gelu_backward);
  library.impl("swiglu_forward", swiglu_forward);
  library.impl("swiglu_backward", swiglu_backward);
  library.impl("geglu_forward", geglu_forward);
  library.impl("geglu_backward", geglu_backward);
  library.impl("cross_entropy_forward", cross_entropy_forward);
  library.impl("cross_entropy_backward", cross_entropy_backward);
  library.impl("attention_forward", attention_forward);
  library.impl("attention_backward", attention_backward);
}
