// Weight panels and the linears on them.
//
// A matrix [n, k] is kept as n / 16 panels: for each word along k the 16 words of 16 outputs side
// by side. A panel is read front to back, once per pass; an AMX tile is 16 such vectors in place.
#pragma once

#include "kernels.h"
#include "memory.h"
#include "program.h"

namespace forebay {

struct Matrix {
  char* data = nullptr;
  int panels = 0;
  int words = 0;        // per row, padding included
  size_t row_bytes = 0;  // not 0: no panels but plain rows in the caller's memory, for lookups only

  const char* panel(int index) const {
    return data + static_cast<size_t>(index) * words * kVectorBytes;
  }
};

// Copies rows [first, last) of a plain matrix [.., source_words words per row] to their lanes.
// Row r goes to output first_output + r; outputs are dealt to panels offset, offset + step, ...
struct PanelPacker {
  Matrix target;
  const uint32_t* source;
  int source_words;
  int first_output;
  int panel_step;
  int panel_offset;

  void pack(int first, int last) const {
    for (int r = first; r < last;) {
      const int output = first_output + r;
      const int lane = output % kLanes;
      const int panel = output / kLanes * panel_step + panel_offset;
      uint32_t* to = reinterpret_cast<uint32_t*>(target.data) +
                     static_cast<size_t>(panel) * target.words * kLanes + lane;
      const uint32_t* from = source + static_cast<size_t>(r) * source_words;
      if (lane == 0 && last - r >= kLanes) {
        for (int w = 0; w < source_words; ++w)
          for (int i = 0; i < kLanes; ++i)
            to[w * kLanes + i] = from[static_cast<size_t>(i) * source_words + w];
        r += kLanes;
      } else {
        for (int w = 0; w < source_words; ++w) to[static_cast<size_t>(w) * kLanes] = from[w];
        r += 1;
      }
    }
  }
};

// What becomes of a linear's sums. `bias`es are padded to whole panels with zeros.
struct Finish {
  OpKind kind;
  Activation activation;
  const float* bias;
  const float* bias2;
  Rows out;
  int columns;  // of `out`; what lies past them is not written
};

inline void store_columns(float* to, int count, FloatVec v) {
  if (count >= kLanes) {
    store(to, v);
  } else {
    for (int i = 0; i < count; ++i) to[i] = v[i];
  }
}

template <class Kernel>
void finish_block(const Finish& finish, int first_row, int rows, int first_panel, int panels,
                  const float* c) {
  using Element = typename Kernel::Element;
  if (finish.kind == kGatedLinear) {  // panels come in pairs: 16 gates, their 16 ups
    const int column = first_panel / 2 * kLanes;
    const FloatVec gate_bias = finish.bias ? load(finish.bias + column) : FloatVec{};
    const FloatVec up_bias = finish.bias2 ? load(finish.bias2 + column) : FloatVec{};
    for (int r = 0; r < rows; ++r) {
      const FloatVec gate = load(c + r * kBlockStride) + gate_bias;
      const FloatVec up = load(c + r * kBlockStride + kLanes) + up_bias;
      const FloatVec active = finish.activation == kSilu ? silu(gate) : gelu_tanh(gate);
      Kernel::store(finish.out.row<Element>(first_row + r) + column, active * up);
    }
    return;
  }
  for (int p = 0; p < panels; ++p) {
    const int column = (first_panel + p) * kLanes, count = finish.columns - column;
    const FloatVec bias = finish.bias ? load(finish.bias + column) : FloatVec{};
    for (int r = 0; r < rows; ++r) {
      float* to = finish.out.row<float>(first_row + r) + column;
      FloatVec v = load(c + r * kBlockStride + p * kLanes) + bias;
      // Only the residual is added to, and its rows are padded to whole vectors.
      if (finish.kind == kLinearAdd) v = v + load(to);
      store_columns(to, count, v);
    }
  }
}

// How a linear is cut into units: blocks of rows times runs of panels.
struct LinearGrid {
  static constexpr int kRowsPerUnit = 256, kFewRows = 64, kMaxPanels = 8, kUnitsPerThread = 8;

  int rows_per_unit = 0, panels_per_unit = 0, panel_runs = 0;
  uint32_t units = 0;

  LinearGrid() = default;
  LinearGrid(int rows, int panels, int threads, int block_rows) {
    // Few rows: weights come from memory once, units are small enough to end together. Many rows:
    // a unit's rows stay in the second-level cache while its panels pass over them.
    rows_per_unit = rows <= kFewRows ? kFewRows : kRowsPerUnit / block_rows * block_rows;
    panels_per_unit = panels / (threads * kUnitsPerThread) / kPassPanels * kPassPanels;
    if (panels_per_unit > kMaxPanels) panels_per_unit = kMaxPanels;
    if (panels_per_unit < kPassPanels) panels_per_unit = kPassPanels;
    panel_runs = (panels + panels_per_unit - 1) / panels_per_unit;
    units = static_cast<uint32_t>(panel_runs) *
            static_cast<uint32_t>((rows + rows_per_unit - 1) / rows_per_unit);
  }
};

// A worker's sums of one unit while its reduction is cut into stretches.
struct LinearScratch {
  static constexpr size_t kFloats = LinearGrid::kRowsPerUnit * LinearGrid::kMaxPanels * kLanes;
  alignas(64) float sums[kFloats + kMaxBlockRows * kBlockStride];
};

template <class Kernel>
void linear_unit(Tiles& tiles, LinearScratch& scratch, const LinearGrid& grid, uint32_t unit,
                 const Rows& src, int rows, const Matrix& matrix, const Finish& finish) {
  const int first_row = static_cast<int>(unit / grid.panel_runs) * grid.rows_per_unit;
  int last_row = first_row + grid.rows_per_unit;
  if (last_row > rows) last_row = rows;
  const int first_panel = static_cast<int>(unit % grid.panel_runs) * grid.panels_per_unit;
  int last_panel = first_panel + grid.panels_per_unit;
  if (last_panel > matrix.panels) last_panel = matrix.panels;
  // With many rows a long reduction goes stretch by stretch, so that what is read again and again
  // stays in a cache. Sums go on where they stopped: no bit changes.
  const bool many = last_row - first_row > LinearGrid::kFewRows;
  const int stretch = many ? Kernel::kStretchWords : matrix.words;
  for (int word = 0; word < matrix.words; word += stretch) {
    const int words = matrix.words - word < stretch ? matrix.words - word : stretch;
    const bool last = word + words == matrix.words;
    float* c = scratch.sums;
    for (int p = first_panel; p < last_panel; p += kPassPanels) {
      const int panels = last_panel - p < kPassPanels ? last_panel - p : kPassPanels;
      const PanelStretch weights{matrix.panel(p) + word * kVectorBytes,
                                 matrix.words * kVectorBytes, panels, words};
      for (int r = first_row; r < last_row; r += Kernel::kBlockRows) {
        const int count = last_row - r < Kernel::kBlockRows ? last_row - r : Kernel::kBlockRows;
        Kernel::panels(tiles, count, src.data + r * src.stride + word * 4, src.stride, weights,
                       word > 0, c);
        if (last) finish_block<Kernel>(finish, r, count, p, panels, c);
        if (stretch < matrix.words) c += Kernel::kBlockRows * kBlockStride;
      }
    }
  }
}

}  // namespace forebay
