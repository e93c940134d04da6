// The operators' schemas and CPU kernels. Where nvcc is present, squared_relu.cu is built too.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "squared_relu.h"

namespace {

constexpr int64_t kGrain = 32768;  // elements per thread, at least

at::Tensor forward_cpu(const at::Tensor& x) {
  const at::Tensor input = x.contiguous();
  at::Tensor output = at::empty_like(input);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, input.scalar_type(), "squared_relu", [&] {
    using wide_t = at::opmath_type<scalar_t>;
    const scalar_t* from = input.const_data_ptr<scalar_t>();
    scalar_t* to = output.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, input.numel(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        to[i] = static_cast<scalar_t>(rush::squared_relu(static_cast<wide_t>(from[i])));
      }
    });
  });
  return output;
}

at::Tensor backward_cpu(const at::Tensor& grad, const at::Tensor& x) {
  const at::Tensor input = x.contiguous(), above = grad.contiguous();
  at::Tensor output = at::empty_like(input);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, input.scalar_type(), "squared_relu_backward", [&] {
    using wide_t = at::opmath_type<scalar_t>;
    const scalar_t* from = input.const_data_ptr<scalar_t>();
    const scalar_t* down = above.const_data_ptr<scalar_t>();
    scalar_t* to = output.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, input.numel(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const wide_t slope = rush::squared_relu_slope(static_cast<wide_t>(from[i]));
        to[i] = static_cast<scalar_t>(static_cast<wide_t>(down[i]) * slope);
      }
    });
  });
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(rush, library) {
  library.def("squared_relu(Tensor x) -> Tensor");
  library.def("squared_relu_backward(Tensor grad, Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(rush, CPU, library) {
  library.impl("squared_relu", forward_cpu);
  library.impl("squared_relu_backward", backward_cpu);
}
