// The arithmetic of one element, for the CPU's loop and the GPU's kernel alike. In fp32 whatever the tensor's dtype.
#pragma once

#ifdef __CUDACC__
#define RUSH_BOTH __host__ __device__ __forceinline__
#else
#define RUSH_BOTH inline
#endif

namespace rush {

template <typename wide_t>
RUSH_BOTH wide_t squared_relu(wide_t x) {
  // Not a maximum with zero: that would turn NaN into 0.
  return x < wide_t(0) ? wide_t(0) : x * x;
}

template <typename wide_t>
RUSH_BOTH wide_t squared_relu_slope(wide_t x) {
  return x < wide_t(0) ? wide_t(0) : wide_t(2) * x;
}

}  // namespace rush
