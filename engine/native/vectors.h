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

typedef float FloatVec8 __attribute__((vector_size(32)));
typedef float FloatVec4 __attribute__((vector_size(16)));

template <class Half>
struct Halves {
  Half low, high;
};

template <class Half, class Whole>
inline Halves<Half> split(Whole v) {
  Halves<Half> halves;
  static_assert(sizeof halves == sizeof v, "two halves make a whole");
  std::memcpy(&halves, &v, sizeof v);
  return halves;
}

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

// Halves until one lane is left: the same tree everywhere.
inline float sum_lanes(FloatVec v) {
  Halves<FloatVec8> a = split<FloatVec8>(v);
  Halves<FloatVec4> b = split<FloatVec4>(a.low + a.high);
  const FloatVec4 c = b.low + b.high;
  return (c[0] + c[2]) + (c[1] + c[3]);
}

inline float max_lanes(FloatVec v) {
  Halves<FloatVec8> a = split<FloatVec8>(v);
  Halves<FloatVec4> b = split<FloatVec4>(a.low > a.high ? a.low : a.high);
  const FloatVec4 c = b.low > b.high ? b.low : b.high;
  const float even = c[0] > c[2] ? c[0] : c[2], odd = c[1] > c[3] ? c[1] : c[3];
  return even > odd ? even : odd;
}

// 2^r for |r| <= 0.5: Taylor's series, relative error under 1.3e-7.
inline FloatVec exp2_fraction(FloatVec r) {
  FloatVec p = splat(1.5403530e-4f);
  p = p * r + 1.3333558e-3f;
  p = p * r + 9.6181291e-3f;
  p = p * r + 5.5504109e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  return p * r + 1.0f;
}

// 2^x for x <= 127; of minus infinity exactly 0.
inline FloatVec exp2(FloatVec x) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
  constexpr int kNearest = 0;  // to whole numbers; what is left of an infinity is 0
  constexpr __mmask16 kAll = 0xffff;  // GCC warns of its own header in the unmasked forms
  const __m512 in = reinterpret_cast<__m512>(x);
  const __m512 fraction = _mm512_maskz_reduce_ps(kAll, in, kNearest);
  const __m512 whole = _mm512_maskz_roundscale_ps(kAll, in, kNearest);
  const FloatVec p = exp2_fraction(reinterpret_cast<FloatVec>(fraction));
  return reinterpret_cast<FloatVec>(
      _mm512_maskz_scalef_ps(kAll, reinterpret_cast<__m512>(p), whole));
#else
  // Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low mantissa bits.
  const FloatVec bounded = max(x, splat(-127.0f));
  const FloatVec shifted = bounded + 12582912.0f;
  const FloatVec p = exp2_fraction(bounded - (shifted - 12582912.0f));
  const IntVec scaled = reinterpret_cast<IntVec>(p) + (reinterpret_cast<IntVec>(shifted) << 23);
  return x < splat(-126.0f) ? FloatVec{} : reinterpret_cast<FloatVec>(scaled);
#endif
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
