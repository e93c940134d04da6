// The arithmetic of one element, for CPU and GPU kernels. In fp32 for 16-bit tensors.
#pragma once

#ifdef __CUDACC__
#define RUSH_BOTH __host__ __device__ __forceinline__
#else
#define RUSH_BOTH inline
#endif

namespace rush {

template <typename wide_t>
RUSH_BOTH wide_t squared_relu(wide_t x) {
  // Not max(x, 0), which would turn NaN into 0.
  return x < wide_t(0) ? wide_t(0) : x * x;
}

template <typename wide_t>
RUSH_BOTH wide_t squared_relu_slope(wide_t x) {
  return x < wide_t(0) ? wide_t(0) : wide_t(2) * x;
}

}  // namespace rush
