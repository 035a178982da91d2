// What happens to one token's row at a time: lookup, norms, rotation, storing keys and values.
#pragma once

#include "kernels.h"
#include "linear.h"
#include "memory.h"

namespace forebay {

// Where one layer's keys and values lie in a block, in bytes.
//
// A block is [layer][key | value][kv head][group of 16 tokens][group bytes]. In a group keys are
// [words of head_dim][16 tokens], values [words of 16 tokens][head_dim]: both are the vectors that
// the kernels multiply with, straight from the cache.
struct KvLayout {
  int head_dim;  // padded; the padding stays zero
  int block_groups;
  size_t group_bytes;
  size_t head_bytes;
  size_t side_bytes;  // all keys, or all values, of a layer
  size_t block_bytes;

  KvLayout(int padded_head_dim, int kv_heads, int layers, int block_tokens, size_t element_bytes)
      : head_dim(padded_head_dim),
        block_groups(block_tokens / kGroupTokens),
        group_bytes(kGroupTokens * padded_head_dim * element_bytes),
        head_bytes(group_bytes * block_groups),
        side_bytes(head_bytes * kv_heads),
        block_bytes(side_bytes * 2 * layers) {}

  size_t key_offset(int layer, int kv_head) const {
    return static_cast<size_t>(layer) * 2 * side_bytes + kv_head * head_bytes;
  }
  size_t value_offset(int layer, int kv_head) const {
    return key_offset(layer, kv_head) + side_bytes;
  }
};

template <class Kernel>
void embed_row(const Matrix& matrix, int hidden, int token, float scale, float* out) {
  using Element = typename Kernel::Element;
  if (matrix.row_bytes) {
    const auto* row = reinterpret_cast<const Element*>(matrix.data + token * matrix.row_bytes);
    for (int i = 0; i < hidden; ++i) out[i] = Kernel::to_float(row[i]) * scale;
    return;
  }
  constexpr int kPerWord = Kernel::kElementsPerWord;
  const auto* lane = reinterpret_cast<const Element*>(matrix.panel(token / kLanes)) +
                     token % kLanes * kPerWord;
  for (int i = 0; i < hidden; ++i)
    out[i] = Kernel::to_float(lane[i / kPerWord * kLanes * kPerWord + i % kPerWord]) * scale;
}

// 1 / sqrt(mean(x^2) + eps). `padded` is n rounded up to whole vectors, zero in between.
inline float inverse_rms(const float* x, int n, int padded, float eps) {
  FloatVec squares{};
  for (int i = 0; i < padded; i += kLanes) {
    const FloatVec v = load(x + i);
    squares = squares + v * v;
  }
  return 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(n) + eps);
}

template <class Kernel>
void norm_row(const float* x, const float* weight, int n, float eps,
              typename Kernel::Element* out) {
  const int padded = static_cast<int>(round_up(n, kLanes));
  const float scale = inverse_rms(x, n, padded, eps);
  for (int i = 0; i < padded; i += kLanes)
    Kernel::store(out + i, load(x + i) * scale * load(weight + i));
}

inline void norm_add_row(const float* x, const float* weight, int n, float eps, float* residual) {
  const int padded = static_cast<int>(round_up(n, kLanes));
  const float scale = inverse_rms(x, n, padded, eps);
  for (int i = 0; i < padded; i += kLanes)
    store(residual + i, load(residual + i) + load(x + i) * scale * load(weight + i));
}

struct Rope {
  std::vector<double> inverse_frequencies;
  float amplitude;
  Rows angles;  // [tokens][2][frequencies]: cos, then sin, of this step's tokens

  int frequencies() const { return static_cast<int>(inverse_frequencies.size()); }
};

inline void angle_row(const Rope& rope, int position, float* out) {
  const int n = rope.frequencies();
  for (int i = 0; i < n; ++i) {
    const double angle = position * rope.inverse_frequencies[i];
    out[i] = static_cast<float>(std::cos(angle) * rope.amplitude);
    out[n + i] = static_cast<float>(std::sin(angle) * rope.amplitude);
  }
}

constexpr int kMaxHeadDim = 512;

struct HeadRotation {
  int head_dim;
  float norm_eps;
  int frequencies;
  const float* angles;  // this token's

  // `head` [padded head_dim] = rotated (and, with a weight, normed) x.
  void rotate(const float* x, const float* norm_weight, float* head) const {
    for (int i = 0; i < head_dim; ++i) head[i] = x[i];
    if (norm_weight) {
      const int padded = static_cast<int>(round_up(head_dim, kLanes));
      const float scale = inverse_rms(head, head_dim, padded, norm_eps);
      for (int i = 0; i < padded; i += kLanes)
        store(head + i, load(head + i) * scale * load(norm_weight + i));
    }
    for (int i = 0; i < frequencies; ++i) {
      const float first = head[i], second = head[i + frequencies];
      const float cosine = angles[i], sine = angles[frequencies + i];
      head[i] = first * cosine - second * sine;
      head[i + frequencies] = second * cosine + first * sine;
    }
  }
};

template <class Kernel>
void round_head(const float* head, int padded, typename Kernel::Element* out) {
  for (int i = 0; i < padded; i += kLanes) Kernel::store(out + i, load(head + i));
}

// `at` is the head's keys in a block, `slot` the token's place in the block.
template <class Kernel>
void store_key(char* at, const KvLayout& layout, int slot, const typename Kernel::Element* key) {
  char* group = at + slot / kGroupTokens * layout.group_bytes + slot % kGroupTokens * 4;
  const int words = layout.head_dim / Kernel::kElementsPerWord;
  for (int w = 0; w < words; ++w)
    std::memcpy(group + w * kVectorBytes, reinterpret_cast<const char*>(key) + w * 4, 4);
}

template <class Kernel>
void store_value(char* at, const KvLayout& layout, int slot,
                 const typename Kernel::Element* value) {
  constexpr int kPerWord = Kernel::kElementsPerWord;
  auto* group = reinterpret_cast<typename Kernel::Element*>(at + slot / kGroupTokens *
                                                                     layout.group_bytes);
  const int token = slot % kGroupTokens;
  group += token / kPerWord * layout.head_dim * kPerWord + token % kPerWord;
  for (int d = 0; d < layout.head_dim; ++d) group[d * kPerWord] = value[d];
}

}  // namespace forebay
