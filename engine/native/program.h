// The C ABI: plain structs that Python fills through ctypes. Keep in step with
// engine/executors/native_library.py; kAbi changes whenever a struct or function here does.
#pragma once

#include <cstdint>

namespace forebay {

enum Isa : int32_t { kIsaAuto = 0, kIsaPortable = 1, kIsaAvx512Bf16 = 2, kIsaAmx = 3 };

enum Dtype : int32_t { kFloat32 = 0, kBfloat16 = 1 };

struct Shape {
  int32_t dtype;
  int32_t isa;
  int32_t threads;
  int32_t vocab;
  int32_t hidden;
  int32_t intermediate;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t layers;
  int32_t block_tokens;
  int32_t blocks;
  int32_t max_tokens;  // rows to reserve for; steps may be larger
  float norm_eps;
};

// Buffers of a step. Multiplied ones hold the weights' dtype, the others float32.
enum Buffer : int32_t {
  kResidual = 0,  // [tokens, hidden] float32
  kNormed = 1,    // [tokens, hidden] weights' dtype
  kQkv = 2,       // [tokens, query + 2 kv] float32
  kAttended = 3,  // [tokens, query] weights' dtype
  kDelta = 4,     // [tokens, hidden] float32
  kGated = 5,     // [tokens, intermediate] weights' dtype
  kFinal = 6,     // [logit rows, hidden] weights' dtype
  kLogits = 7,    // [logit rows, vocab] float32, the caller's memory
  kBuffers = 8,
};

enum OpKind : int32_t {
  kAngles = 0,         // cos and sin of this step's positions under `rope`
  kEmbed = 1,          // residual = matrix[token_ids] * scale
  kNorm = 2,           // out = norm(residual) * vector
  kSelect = 3,         // row i of residual and attended = their row logit_rows[i]
  kNormAdd = 4,        // residual += norm(delta) * vector
  kLinear = 5,         // out = src @ matrix (+ vector)
  kLinearAdd = 6,      // residual += src @ matrix (+ vector)
  kGatedLinear = 7,    // gated = act(src @ gate + vector) * (src @ up + vector2)
  kRotateAndStore = 8,  // see engine/decoder.py; vector and vector2 norm queries and keys
  kAttend = 9,
  kOpKinds = 10,
};

// How a call that runs a step ends.
enum Ending : int32_t { kDone = 0, kFailed = 1, kPaused = 2 };

constexpr int kWorkspaces = 2;  // steps that can be under way at a time

enum Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

constexpr int32_t kNone = -1;  // no such vector, or no window

struct Op {
  int32_t kind;
  int32_t src;
  int32_t out;
  int32_t matrix;
  int32_t vector;
  int32_t vector2;
  int32_t layer;
  int32_t rope;
  int32_t window;
  int32_t activation;
  int32_t selected;  // 1: after kSelect, rows are logit rows and not tokens
  float scale;
};

// One step, as engine.executors.base.StepBatch. All memory is the caller's and only read, except
// `pages` and `logits`; it stays as it is until the step is over, pauses included.
struct Step {
  const int32_t* token_ids;
  const int32_t* positions;
  const int32_t* query_starts;
  const int32_t* context_lengths;
  const int32_t* block_tables;  // [sequences, table_width]
  const int32_t* logit_rows;
  char* pages;
  float* logits;
  // Null: the step does not pause. Else it does after the first op whose index is *pause_after or
  // greater, but for the last one; other threads may write here while it runs.
  const int32_t* pause_after;
  int32_t tokens;
  int32_t sequences;
  int32_t table_width;
  int32_t logit_row_count;
  int32_t share_prefixes;  // 0 reads every sequence's prefix on its own; the result is the same
};

}  // namespace forebay
