// The multiply kernels: float32, bfloat16 by dot products, bfloat16 by shifts, bfloat16 on AMX.
//
// All data that is multiplied is seen as 32-bit words: one float, or a pair of bfloat16 that are
// neighbours along the reduction. A "step" multiplies one word of a row with one 64-byte vector of
// 16 words. Weight panels, stored keys and stored values all are runs of such vectors, so one block
// kernel serves linears, scores and weighted values.
//
// Every output element is one accumulator that walks the reduction in order. How many rows or
// panels share a pass changes no element's arithmetic.
#pragma once

#include "tiles.h"
#include "vectors.h"

namespace forebay {

constexpr int kTileRows = 16;        // query rows that go through a superblock together
constexpr int kGroupTokens = 16;     // tokens side by side in one stored vector
constexpr int kSuperblockTokens = 64;  // the grain of online softmax, at absolute positions
constexpr int kSuperblockGroups = kSuperblockTokens / kGroupTokens;
constexpr int kPassPanels = 2;       // panels (16 output columns each) that one multiply() covers
constexpr int kMaxBlockRows = 32;    // rows of the largest multiply()
constexpr int kBlockStride = kPassPanels * kLanes;

#if defined(__AVX512F__)
constexpr int kRegisterRows = 12, kRegisterVectors = 2;  // 24 of 32 zmm accumulate
#else
constexpr int kRegisterRows = 6, kRegisterVectors = 1;  // 12 of 16 ymm, or 24 of 32 NEON registers
#endif

struct Float32 {
  using Element = float;
  static constexpr int kElementsPerWord = 1;
  static constexpr int kReductionMultiple = 1;
  static constexpr int kHeadMultiple = 16;

  static FloatVec step(FloatVec sum, uint32_t word, const char* vector) {
    float a;
    std::memcpy(&a, &word, sizeof a);
    return sum + a * as_floats(load_words(vector));
  }
  static void store(Element* to, FloatVec v) { forebay::store(to, v); }
  static float to_float(Element x) { return x; }
};

struct Bf16 {
  using Element = uint16_t;
  static constexpr int kElementsPerWord = 2;
  // One AMX tile is 32 deep. The other kernels share the packing, so that the layout has one name.
  static constexpr int kReductionMultiple = 32;
  static constexpr int kHeadMultiple = 32;

  // Rounds to nearest even.
  static void store(Element* to, FloatVec v) {
#if defined(__AVX512BF16__)
    const __m256bh rounded = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(v));
    std::memcpy(to, &rounded, sizeof rounded);
#else
    const WordVec bits = reinterpret_cast<WordVec>(v);
    const WordVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    for (int i = 0; i < kLanes; ++i) to[i] = static_cast<Element>(rounded[i]);
#endif
  }
  static float to_float(Element x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
};

struct Bf16Shift : Bf16 {
  static FloatVec step(FloatVec sum, uint32_t word, const char* vector) {
    const uint32_t low_bits = word << 16, high_bits = word & 0xffff0000u;
    float low, high;
    std::memcpy(&low, &low_bits, sizeof low);
    std::memcpy(&high, &high_bits, sizeof high);
    const WordVec b = load_words(vector);
    sum = sum + low * as_floats(b << 16);
    return sum + high * as_floats(b & 0xffff0000u);
  }
};

#if defined(__AVX512BF16__)
struct Bf16Dot : Bf16 {
  static FloatVec step(FloatVec sum, uint32_t word, const char* vector) {
    const __m512i a = _mm512_set1_epi32(static_cast<int>(word));
    const __m512i b = _mm512_loadu_si512(vector);
    return reinterpret_cast<FloatVec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum),
                                                       reinterpret_cast<__m512bh>(a),
                                                       reinterpret_cast<__m512bh>(b)));
  }
};
#endif

// What a run of vectors looks like to a kernel: `segments` runs of `words` vectors, `step_bytes`
// apart inside a run, each segment with its own start.
struct Reduction {
  const char* const* starts;  // [segments]
  int segments;
  int words;
  size_t step_bytes;
  size_t fetch_ahead;  // bytes to prefetch ahead of what is read; 0 where the next bytes are no use
  bool resumes;        // the sums go on from c, which holds what came before along the reduction
};

// Part of the reduction of one or two neighbouring panels.
struct PanelStretch {
  const char* start;   // in the first panel
  size_t panel_bytes;  // from one panel to the next
  int panels;
  int words;
};

// Weights come from memory in order, and the multiplications fill the reorder window before loads
// from far enough ahead have started: without a prefetch a streamed pass takes twice as long.
constexpr size_t kFetchAhead = 2048;

template <class Kernel, int Rows, int Vectors>
void multiply_registers(const char* a, size_t a_stride, const Reduction& b, const size_t* offsets,
                        float* c, size_t c_stride) {
  FloatVec sums[Rows][Vectors];
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v)
      sums[r][v] = b.resumes ? load(c + r * c_stride + v * kLanes) : FloatVec{};
  for (int s = 0; s < b.segments; ++s) {
    const char* row_words = a + static_cast<size_t>(s) * b.words * 4;
    const char* vectors[Vectors];
    for (int v = 0; v < Vectors; ++v) vectors[v] = b.starts[s] + offsets[v];
    for (int w = 0; w < b.words; ++w) {
      for (int v = 0; v < Vectors; ++v)
        __builtin_prefetch(vectors[v] + w * b.step_bytes + b.fetch_ahead, 0, 3);
#pragma GCC unroll 12
      for (int r = 0; r < Rows; ++r) {
        uint32_t word;
        std::memcpy(&word, row_words + r * a_stride + w * 4, sizeof word);
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) {
          sums[r][v] = Kernel::step(sums[r][v], word, vectors[v] + w * b.step_bytes);
        }
      }
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vectors; ++v) store(c + r * c_stride + v * kLanes, sums[r][v]);
}

template <class Kernel, int Vectors, int Rows = kRegisterRows>
void multiply_few(int rows, const char* a, size_t a_stride, const Reduction& b,
                  const size_t* offsets, float* c, size_t c_stride) {
  if (rows == Rows) {
    multiply_registers<Kernel, Rows, Vectors>(a, a_stride, b, offsets, c, c_stride);
  } else if constexpr (Rows > 1) {
    multiply_few<Kernel, Vectors, Rows - 1>(rows, a, a_stride, b, offsets, c, c_stride);
  }
}

// c[r][16 v + lane] = sum over the reduction, for `rows` rows of a and `vectors` vector columns
// `vector_bytes` apart. Strides of a are in bytes, of c in floats.
template <class Kernel>
void multiply_vectors(int rows, const char* a, size_t a_stride, const Reduction& b, int vectors,
                      size_t vector_bytes, float* c, size_t c_stride) {
  const int passes = (rows + kRegisterRows - 1) / kRegisterRows;
  const int rows_per_pass = (rows + passes - 1) / passes;
  for (int v = 0; v < vectors; v += kRegisterVectors) {
    const bool alone = kRegisterVectors > 1 && v + 1 == vectors;
    const size_t offsets[2] = {v * vector_bytes, (v + 1) * vector_bytes};
    for (int r = 0; r < rows; r += rows_per_pass) {
      const int count = rows - r < rows_per_pass ? rows - r : rows_per_pass;
      const char* a_rows = a + r * a_stride;
      float* c_rows = c + r * c_stride + v * kLanes;
      if (alone) {
        multiply_few<Kernel, 1>(count, a_rows, a_stride, b, offsets, c_rows, c_stride);
      } else {
        multiply_few<Kernel, kRegisterVectors>(count, a_rows, a_stride, b, offsets, c_rows,
                                               c_stride);
      }
    }
  }
}

// The three products of a decoder on registers. `Tiles` is state of the calling worker.
template <class Multiply>
struct OnVectors : Multiply {
  static constexpr int kBlockRows = kRegisterRows;
  static constexpr int kStretchWords = 1024;  // 256 rows of them fit a second-level cache

  // c [rows][32] = (c if `resumes`, else 0) + a times a stretch of one or two weight panels.
  static void panels(Tiles&, int rows, const char* a, size_t a_stride, const PanelStretch& weights,
                     bool resumes, float* c) {
    const Reduction b{&weights.start, 1, weights.words, kVectorBytes, kFetchAhead, resumes};
    multiply_vectors<Multiply>(rows, a, a_stride, b, weights.panels, weights.panel_bytes, c,
                               kBlockStride);
  }

  // c [rows][64] = queries times the keys of up to four token groups.
  static void scores(Tiles&, int rows, const char* q, size_t q_stride, const char* const* groups,
                     int group_count, int words, float* c) {
    for (int g = 0; g < group_count; ++g) {
      const Reduction b{groups + g, 1, words, kVectorBytes, 0, false};
      multiply_vectors<Multiply>(rows, q, q_stride, b, 1, 0, c + g * kGroupTokens,
                                 kSuperblockTokens);
    }
  }

  // c [rows][head_dim] = probabilities times the values of up to four token groups.
  static void values(Tiles&, int rows, const char* p, const char* const* groups, int group_count,
                     int head_dim, float* c) {
    const size_t p_stride = kSuperblockTokens * sizeof(typename Multiply::Element);
    const Reduction b{groups, group_count, kGroupTokens / Multiply::kElementsPerWord,
                      static_cast<size_t>(head_dim) * 4, 0, false};
    multiply_vectors<Multiply>(rows, p, p_stride, b, head_dim / kLanes, kVectorBytes, c, head_dim);
  }
};

#if defined(FOREBAY_AMX)
// The same products on AMX tiles. TDPBF16PS adds to each element the sum of its row's products
// along the tile, in order: again nothing depends on the other rows.
struct OnTiles : Bf16 {
  static constexpr int kBlockRows = 32;
  static constexpr int kStretchWords = 128;  // two panels and 32 rows of them fit the first level

  static void panels(Tiles& tiles, int rows, const char* a, size_t a_stride,
                     const PanelStretch& weights, bool resumes, float* c) {
    tiles.panel_shape(rows);
    const char* second = weights.start + weights.panel_bytes;
    const int depth = weights.words / 16;
    if (rows > 16) {
      if (weights.panels == 2) {
        tile_block_2x2(a, a_stride, weights.start, second, depth, resumes, c);
      } else {
        tile_block_2x1(a, a_stride, weights.start, depth, resumes, c);
      }
    } else if (weights.panels == 2) {
      tile_block_1x2(a, a_stride, weights.start, second, depth, resumes, c);
    } else {
      tile_block_1x1(a, a_stride, weights.start, depth, resumes, c);
    }
  }

  static void scores(Tiles& tiles, int rows, const char* q, size_t q_stride,
                     const char* const* groups, int group_count, int words, float* c) {
    tiles.attention_shape(rows);
    tile_scores(q, q_stride, groups, group_count, words / 16, c);
  }

  static void values(Tiles& tiles, int rows, const char* p, const char* const* groups,
                     int group_count, int head_dim, float* c) {
    tiles.attention_shape(rows);
    tile_values(p, groups, group_count, head_dim, c);
  }
};
#endif

}  // namespace forebay
