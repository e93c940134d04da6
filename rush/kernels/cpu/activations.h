// GELU in its tanh form and SwiGLU, element by element, forward and backward. Both are a number times a sigmoid, which is written so
// that nothing cancels: 1 − sigmoid(x) is made from the power as well, not by subtraction.
#pragma once

#include "vectors.h"

namespace rush::cpu {

// sigmoid(2·√(2/π)·(x + 0.044715·x³)) by a power of 2: the factors of x and x³ times −log2(e); and those of the slope.
constexpr float kFirst = -2.302208198f, kThird = -0.1029432396f, kSlopeFirst = 1.5957691216f, kSlopeThird = 0.2140644488f;

struct Sigmoid {
  Vec value, rest;  // rest is 1 − value
};

// The sigmoid whose argument is −x·ln 2.
inline Sigmoid sigmoid_of_power(Vec x) {
  const Vec e = power_of_2(x > all(126.0f) ? all(126.0f) : x), value = 1.0f / (1.0f + e);
  return {value, e * value};
}

inline Sigmoid sigmoid(Vec x) { return sigmoid_of_power(x * -kLog2E); }

inline Vec gelu(Vec x) { return x * sigmoid_of_power(x * (kFirst + kThird * (x * x))).value; }

inline Vec gelu_slope(Vec x) {
  const Vec square = x * x;
  const Sigmoid s = sigmoid_of_power(x * (kFirst + kThird * square));
  // Where the sigmoid is 0 or 1 its slope is 0, whatever it is multiplied by: x³ may be infinite there.
  const Vec bend = s.value * s.rest, reach = x * (kSlopeFirst + kSlopeThird * square);
  return s.value + (bend == Vec{} ? Vec{} : bend * reach);
}

inline Vec swiglu(Vec gate, Vec up) { return gate * sigmoid(gate).value * up; }

struct Pair {
  Vec first, second;
};

// The gradients of gate and up.
inline Pair swiglu_slopes(Vec dout, Vec gate, Vec up) {
  const Sigmoid s = sigmoid(gate);
  const Vec bend = s.value * s.rest;
  return {dout * up * (s.value + (bend == Vec{} ? Vec{} : gate * bend)), dout * gate * s.value};
}

}  // namespace rush::cpu
