// Sixteen float lanes by compiler vector extensions: one zmm, two ymm or four NEON registers.
//
// Everything here is per lane or a reduction in a fixed order, so that a row's numbers never depend
// on what else is computed beside it.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace forebay {

constexpr int kLanes = 16;
constexpr size_t kVectorBytes = 64;

typedef float FloatVec __attribute__((vector_size(64)));
typedef int32_t IntVec __attribute__((vector_size(64)));
typedef uint32_t WordVec __attribute__((vector_size(64)));
// The same lanes at any float boundary; only ever read or written through a pointer.
typedef float LooseFloatVec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t LooseWordVec __attribute__((vector_size(64), aligned(4), may_alias));

inline FloatVec load(const float* from) { return *reinterpret_cast<const LooseFloatVec*>(from); }

inline void store(float* to, FloatVec v) { *reinterpret_cast<LooseFloatVec*>(to) = v; }

inline WordVec load_words(const void* from) {
  return *reinterpret_cast<const LooseWordVec*>(from);
}

inline FloatVec splat(float x) { return FloatVec{} + x; }

inline FloatVec max(FloatVec a, FloatVec b) { return a > b ? a : b; }

inline FloatVec as_floats(WordVec v) { return reinterpret_cast<FloatVec>(v); }

inline FloatVec lane_numbers() {
  return FloatVec{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}

inline float sum_lanes(FloatVec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(v));
#else
  float x[kLanes];
  store(x, v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  return x[0];
#endif
}

inline float max_lanes(FloatVec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(reinterpret_cast<__m512>(v));
#else
  float x[kLanes];
  store(x, v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
  return x[0];
#endif
}

// 2^x for x <= 127; below -126 (minus infinity included) exactly 0. Relative error under 2e-7.
inline FloatVec exp2(FloatVec x) {
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low mantissa bits.
  const FloatVec shifted = max(x, splat(-127.0f)) + 12582912.0f;
  const FloatVec r = x - (shifted - 12582912.0f);
  FloatVec p = splat(1.5252734e-5f);
  p = p * r + 1.5403530e-4f;
  p = p * r + 1.3333558e-3f;
  p = p * r + 9.6181291e-3f;
  p = p * r + 5.5504109e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.0f;
  const IntVec scaled =
      reinterpret_cast<IntVec>(p) + (reinterpret_cast<IntVec>(shifted) << 23);
  return x < splat(-126.0f) ? FloatVec{} : reinterpret_cast<FloatVec>(scaled);
}

constexpr float kLog2E = 1.44269504f;

// x * sigmoid(z), the shape of both SiLU (z = x) and tanh-GELU.
inline FloatVec times_sigmoid(FloatVec x, FloatVec z) {
  const FloatVec limit = splat(126.0f);
  const FloatVec t = z * -kLog2E;
  return x / (exp2(t > limit ? limit : t) + 1.0f);
}

inline FloatVec silu(FloatVec x) { return times_sigmoid(x, x); }

// 0.5 x (1 + tanh(y)) is x * sigmoid(2 y).
inline FloatVec gelu_tanh(FloatVec x) {
  return times_sigmoid(x, (x + x * x * x * 0.044715f) * 1.5957691216f);
}

}  // namespace forebay
