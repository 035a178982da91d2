// AMX tile shapes and the block products on them.
//
// A tile configuration names the rows and row bytes of all eight tiles; loading one clears them. A
// worker remembers the one it has, because reloading it between equal blocks would be waste.
#pragma once

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__) && defined(__linux__)
#define FOREBAY_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace forebay {

#if defined(FOREBAY_AMX)

// Linux hands out the tile registers on request, once per process. False: refused.
inline bool request_tiles() {
  constexpr int kArchReqXcompPerm = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
}

class Tiles {
 public:
  // Tiles 0-3 accumulate (0, 1: rows 0-15; 2, 3: rows 16-31), 4 and 5 hold a's rows, 6 and 7
  // weights.
  void panel_shape(int rows) {
    if (key_ == rows) return;
    key_ = rows;
    const int upper = rows < 16 ? rows : 16, lower = rows > 16 ? rows - 16 : 1;
    const int shape[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
    Config config{};
    for (int t = 0; t < 8; ++t) config.set(t, shape[t], 64);
    _tile_loadconfig(&config);
  }

  // Tiles 0-3 accumulate, 4 queries, 5 keys, 6 probabilities of 16 tokens, 7 values of 16 tokens.
  void attention_shape(int rows) {
    if (key_ == -rows) return;
    key_ = -rows;
    Config config{};
    for (int t = 0; t < 5; ++t) config.set(t, rows, 64);
    config.set(5, 16, 64);
    config.set(6, rows, 32);
    config.set(7, 8, 64);
    _tile_loadconfig(&config);
  }

  // Gives the registers back, so that the kernel need not save them while this thread sleeps.
  void release() {
    if (key_ != 0) _tile_release();
    key_ = 0;
  }

 private:
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
    void set(int tile, int row_count, int bytes) {
      rows[tile] = static_cast<uint8_t>(row_count);
      row_bytes[tile] = static_cast<uint16_t>(bytes);
    }
  };
  int key_ = 0;  // rows of the panel shape, minus the rows of the attention shape, 0 for none
};

constexpr size_t kTileBytes = 1024;  // 32 deep, 16 columns
constexpr size_t kTileStep = 64;     // bytes of one row of a along the reduction per tile
constexpr size_t kBlockRowBytes = 128;

// Weights come once from memory, in order: fetch the next tile into the second-level cache while
// this one is multiplied. Further ahead is slower than not at all.
inline void fetch_ahead(const char* tile) {
  for (size_t line = 0; line < kTileBytes; line += 64)
    _mm_prefetch(tile + kTileBytes + line, _MM_HINT_T1);
}

// c [rows][32] = (c if `resumes`, else 0) + a times one or two panels, `depth` tiles deep.
inline void tile_block_1x1(const char* a, size_t a_stride, const char* b, int depth,
                           bool resumes, float* c) {
  if (resumes) {
    _tile_loadd(0, c, kBlockRowBytes);
  } else {
    _tile_zero(0);
  }
  for (int k = 0; k < depth; ++k) {
    _tile_loadd(4, a + k * kTileStep, a_stride);
    _tile_loadd(6, b + k * kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
  }
  _tile_stored(0, c, kBlockRowBytes);
}

inline void tile_block_1x2(const char* a, size_t a_stride, const char* b0, const char* b1,
                           int depth, bool resumes, float* c) {
  if (resumes) {
    _tile_loadd(0, c, kBlockRowBytes);
    _tile_loadd(1, c + 16, kBlockRowBytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  for (int k = 0; k < depth; ++k) {
    fetch_ahead(b0 + k * kTileBytes);
    fetch_ahead(b1 + k * kTileBytes);
    _tile_loadd(4, a + k * kTileStep, a_stride);
    _tile_loadd(6, b0 + k * kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b1 + k * kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, c, kBlockRowBytes);
  _tile_stored(1, c + 16, kBlockRowBytes);
}

inline void tile_block_2x1(const char* a, size_t a_stride, const char* b, int depth,
                           bool resumes, float* c) {
  const char* lower = a + 16 * a_stride;
  if (resumes) {
    _tile_loadd(0, c, kBlockRowBytes);
    _tile_loadd(2, c + 16 * 32, kBlockRowBytes);
  } else {
    _tile_zero(0);
    _tile_zero(2);
  }
  for (int k = 0; k < depth; ++k) {
    _tile_loadd(6, b + k * kTileBytes, 64);
    _tile_loadd(4, a + k * kTileStep, a_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, lower + k * kTileStep, a_stride);
    _tile_dpbf16ps(2, 5, 6);
  }
  _tile_stored(0, c, kBlockRowBytes);
  _tile_stored(2, c + 16 * 32, kBlockRowBytes);
}

inline void tile_block_2x2(const char* a, size_t a_stride, const char* b0, const char* b1,
                           int depth, bool resumes, float* c) {
  const char* lower = a + 16 * a_stride;
  if (resumes) {
    _tile_loadd(0, c, kBlockRowBytes);
    _tile_loadd(1, c + 16, kBlockRowBytes);
    _tile_loadd(2, c + 16 * 32, kBlockRowBytes);
    _tile_loadd(3, c + 16 * 32 + 16, kBlockRowBytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int k = 0; k < depth; ++k) {
    _tile_loadd(4, a + k * kTileStep, a_stride);
    _tile_loadd(6, b0 + k * kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b1 + k * kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, lower + k * kTileStep, a_stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, kBlockRowBytes);
  _tile_stored(1, c + 16, kBlockRowBytes);
  _tile_stored(2, c + 16 * 32, kBlockRowBytes);
  _tile_stored(3, c + 16 * 32 + 16, kBlockRowBytes);
}

// c [rows][64]: queries times up to four groups of 16 keys, each `depth` tiles deep.
inline void tile_scores(const char* q, size_t q_stride, const char* const* groups, int group_count,
                        int depth, float* c) {
  constexpr size_t kScoreRowBytes = 256;
  const char* g0 = groups[0];
  const char* g1 = groups[group_count > 1 ? 1 : 0];
  const char* g2 = groups[group_count > 2 ? 2 : 0];
  const char* g3 = groups[group_count > 3 ? 3 : 0];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int k = 0; k < depth; ++k) {
    _tile_loadd(4, q + k * kTileStep, q_stride);
    _tile_loadd(5, g0 + k * kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 5);
    if (group_count > 1) {
      _tile_loadd(5, g1 + k * kTileBytes, 64);
      _tile_dpbf16ps(1, 4, 5);
    }
    if (group_count > 2) {
      _tile_loadd(5, g2 + k * kTileBytes, 64);
      _tile_dpbf16ps(2, 4, 5);
    }
    if (group_count > 3) {
      _tile_loadd(5, g3 + k * kTileBytes, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, c, kScoreRowBytes);
  _tile_stored(1, c + 16, kScoreRowBytes);
  _tile_stored(2, c + 32, kScoreRowBytes);
  _tile_stored(3, c + 48, kScoreRowBytes);
}

// c [rows][head_dim]: probabilities [rows][64] bfloat16 times the values of up to four groups.
inline void tile_values(const char* p, const char* const* groups, int group_count, int head_dim,
                        float* c) {
  constexpr size_t kProbabilityRowBytes = 128, kGroupBytes = 32;
  const size_t pair_bytes = static_cast<size_t>(head_dim) * 4, row_bytes = pair_bytes;
  for (int d = 0; d < head_dim; d += 32) {
    _tile_zero(0);
    _tile_zero(1);
    for (int g = 0; g < group_count; ++g) {
      const char* values = groups[g] + static_cast<size_t>(d) * 4;
      _tile_loadd(6, p + g * kGroupBytes, kProbabilityRowBytes);
      _tile_loadd(7, values, pair_bytes);
      _tile_dpbf16ps(0, 6, 7);
      _tile_loadd(7, values + 64, pair_bytes);
      _tile_dpbf16ps(1, 6, 7);
    }
    _tile_stored(0, c + d, row_bytes);
    _tile_stored(1, c + d + 16, row_bytes);
  }
}

#else

class Tiles {
 public:
  void release() {}
};

#endif

}  // namespace forebay
