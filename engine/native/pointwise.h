// What happens to one token's row at a time: lookup, norms, rotation, storing keys and values.
#pragma once

#include "kernels.h"
#include "linear.h"
#include "memory.h"

namespace forebay {

// Where keys and values lie in a block.
//
// A block is [layer][kv head][group of 16 tokens][keys | values]. A group's keys are [words of
// head_dim][16 tokens], its values [words of 16 tokens][head_dim]: both are the vectors that the
// kernels multiply with, straight from the cache. They lie side by side because attention reads
// them together, and memory is faster the longer the pieces.
struct KvLayout {
  int head_dim;  // padded; the padding stays zero
  int kv_heads;
  int block_groups;
  size_t side_bytes;  // a group's keys, or its values
  size_t block_bytes;

  KvLayout(int padded_head_dim, int kv_head_count, int layers, int block_tokens,
           size_t element_bytes)
      : head_dim(padded_head_dim),
        kv_heads(kv_head_count),
        block_groups(block_tokens / kGroupTokens),
        side_bytes(kGroupTokens * padded_head_dim * element_bytes),
        block_bytes(2 * side_bytes * block_groups * kv_heads * layers) {}

  // Offset in a block of the group that holds `slot`; keys first, values side_bytes after.
  size_t group(int layer, int kv_head, int slot) const {
    const size_t head = static_cast<size_t>(layer) * kv_heads + kv_head;
    return (head * block_groups + slot / kGroupTokens) * 2 * side_bytes;
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

  int frequencies() const { return static_cast<int>(inverse_frequencies.size()); }
};

// Writes cos, then sin, of every frequency's angle at `position`.
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

// `keys` are a group's, `lane` the token's place in it.
template <class Kernel>
void store_key(char* keys, const KvLayout& layout, int lane, const typename Kernel::Element* key) {
  const int words = layout.head_dim / Kernel::kElementsPerWord;
  for (int w = 0; w < words; ++w)
    std::memcpy(keys + w * kVectorBytes + lane * 4, reinterpret_cast<const char*>(key) + w * 4, 4);
}

template <class Kernel>
void store_value(char* values, const KvLayout& layout, int lane,
                 const typename Kernel::Element* value) {
  constexpr int kPerWord = Kernel::kElementsPerWord;
  auto* at = reinterpret_cast<typename Kernel::Element*>(values) +
             lane / kPerWord * layout.head_dim * kPerWord + lane % kPerWord;
  for (int d = 0; d < layout.head_dim; ++d) at[d * kPerWord] = value[d];
}

}  // namespace forebay
