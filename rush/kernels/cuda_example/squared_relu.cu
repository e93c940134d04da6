// CUDA kernels: every value read once and written once, 16 bytes at a time by each thread.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>

#include "squared_relu.h"

namespace {

constexpr int kThreads = 256;
constexpr int kBytes = 16;  // the widest load of a thread

template <typename scalar_t>
struct alignas(kBytes) Pack {
  static constexpr int size = kBytes / sizeof(scalar_t);
  scalar_t values[size];
};

// `down` is null in the forward pass. A grid-stride loop over packs, then the remainder by the first threads. 64-bit counts: a
// large batch has more than 2^31 elements.
template <typename scalar_t, bool kBackward>
__global__ void squared_relu_kernel(const scalar_t* from, const scalar_t* down, scalar_t* to, int64_t count,
                                    bool aligned) {
  using wide_t = at::opmath_type<scalar_t>;
  constexpr int kSize = Pack<scalar_t>::size;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t packs = aligned ? count / kSize : 0;
  auto one = [](scalar_t x, scalar_t above) {
    const wide_t wide = static_cast<wide_t>(x);
    return static_cast<scalar_t>(kBackward ? static_cast<wide_t>(above) * rush::squared_relu_slope(wide)
                                           : rush::squared_relu(wide));
  };
  for (int64_t i = thread; i < packs; i += threads) {
    const Pack<scalar_t> x = reinterpret_cast<const Pack<scalar_t>*>(from)[i];
    const Pack<scalar_t> above = kBackward ? reinterpret_cast<const Pack<scalar_t>*>(down)[i] : x;
    Pack<scalar_t> result;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      result.values[j] = one(x.values[j], above.values[j]);
    }
    reinterpret_cast<Pack<scalar_t>*>(to)[i] = result;
  }
  for (int64_t i = packs * kSize + thread; i < count; i += threads) {
    to[i] = one(from[i], kBackward ? down[i] : from[i]);
  }
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kBytes == 0; }

template <bool kBackward>
at::Tensor launch(const at::Tensor& input, const at::Tensor& above) {
  at::Tensor output = at::empty_like(input);
  const int64_t count = input.numel();
  if (count == 0) {
    return output;
  }
  const c10::cuda::CUDAGuard guard(input.device());
  const int64_t wanted = (count + kThreads - 1) / kThreads;
  int multiprocessors = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, input.get_device()));
  const int blocks = static_cast<int>(std::min<int64_t>(wanted, 16 * multiprocessors));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, input.scalar_type(), "squared_relu", [&] {
    const scalar_t* from = input.const_data_ptr<scalar_t>();
    const scalar_t* down = kBackward ? above.const_data_ptr<scalar_t>() : nullptr;
    scalar_t* to = output.mutable_data_ptr<scalar_t>();
    const bool aligned = is_aligned(from) && is_aligned(down) && is_aligned(to);
    squared_relu_kernel<scalar_t, kBackward>
        <<<blocks, kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(from, down, to, count, aligned);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return output;
}

at::Tensor forward_cuda(const at::Tensor& x) {
  const at::Tensor input = x.contiguous();
  return launch<false>(input, input);
}

at::Tensor backward_cuda(const at::Tensor& grad, const at::Tensor& x) {
  return launch<true>(x.contiguous(), grad.contiguous());
}

}  // namespace

TORCH_LIBRARY_IMPL(rush, CUDA, library) {
  library.impl("squared_relu", forward_cuda);
  library.impl("squared_relu_backward", backward_cuda);
}
