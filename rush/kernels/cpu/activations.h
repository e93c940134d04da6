// GELU (tanh approximation), SwiGLU and GeGLU, elementwise, forward and backward. All are x times a sigmoid; 1 − sigmoid(x) is computed
// from the exponential too, not by subtraction, so nothing cancels.
#pragma once

#include "vectors.h"

namespace rush::cpu {

// sigmoid(2·√(2/π)·(x + 0.044715·x³)) by exp2: the coefficients of x and x³ times −log2(e); and those of the derivative.
constexpr float kFirst = -2.302208198f, kThird = -0.1029432396f, kDerivativeFirst = 1.5957691216f, kDerivativeThird = 0.2140644488f;

struct Sigmoid {
  Vec value, rest;  // rest is 1 − value
};

// sigmoid(−x·ln 2).
inline Sigmoid sigmoid_exp2(Vec x) {
  const Vec e = exp2(x > all(126.0f) ? all(126.0f) : x), value = 1.0f / (1.0f + e);
  return {value, e * value};
}

inline Sigmoid sigmoid(Vec x) { return sigmoid_exp2(x * -kLog2E); }

inline Vec gelu(Vec x) { return x * sigmoid_exp2(x * (kFirst + kThird * (x * x))).value; }

inline Vec gelu_derivative(Vec x) {
  const Vec square = x * x;
  const Sigmoid s = sigmoid_exp2(x * (kFirst + kThird * square));
  // Where the sigmoid is 0 or 1 its derivative is 0, even if x³ is infinite.
  const Vec derivative = s.value * s.rest, inner = x * (kDerivativeFirst + kDerivativeThird * square);
  return s.value + (derivative == Vec{} ? Vec{} : derivative * inner);
}

inline Vec swiglu(Vec gate, Vec up) { return gate * sigmoid(gate).value * up; }

struct Pair {
  Vec first, second;
};

// The gradients of gate and up.
inline Pair swiglu_gradients(Vec dout, Vec gate, Vec up) {
  const Sigmoid s = sigmoid(gate);
  const Vec derivative = s.value * s.rest;
  return {dout * up * (s.value + (derivative == Vec{} ? Vec{} : gate * derivative)), dout * gate * s.value};
}

inline Vec geglu(Vec gate, Vec up) { return gelu(gate) * up; }

inline Pair geglu_gradients(Vec dout, Vec gate, Vec up) { return {dout * up * gelu_derivative(gate), dout * gelu(gate)}; }

}  // namespace rush::cpu
