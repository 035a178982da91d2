// The exported functions: see engine/executors/native_library.py for their Python side.
//
// No exception crosses this boundary. What can fail returns a status (0: done) or a null handle and
// leaves its reason in forebay_error.
#include <stdexcept>

#include "executor.h"

using namespace forebay;

namespace {

thread_local std::string last_error;

bool tiles_usable() {
#if defined(FOREBAY_AMX)
  static const bool granted = request_tiles();
  return granted;
#else
  return false;
#endif
}

// The ISA that a request ends up with, kNone where the build or the machine lacks it.
int choose_isa(int wanted) {
#if defined(__AVX512BF16__)
  constexpr bool kDot = true;
#else
  constexpr bool kDot = false;
#endif
  switch (wanted) {
    case kIsaAuto:
      return tiles_usable() ? kIsaAmx : kDot ? kIsaAvx512Bf16 : kIsaPortable;
    case kIsaAmx:
      return tiles_usable() ? kIsaAmx : kNone;
    case kIsaAvx512Bf16:
      return kDot ? kIsaAvx512Bf16 : kNone;
    case kIsaPortable:
      return kIsaPortable;
    default:
      return kNone;
  }
}

Executor* make_executor(const Shape& shape) {
  if (shape.dtype == kFloat32) return new KernelExecutor<OnVectors<Float32>>(shape);
  switch (choose_isa(shape.isa)) {
#if defined(FOREBAY_AMX)
    case kIsaAmx:
      return new KernelExecutor<OnTiles>(shape);
#endif
#if defined(__AVX512BF16__)
    case kIsaAvx512Bf16:
      return new KernelExecutor<OnVectors<Bf16Dot>>(shape);
#endif
    case kIsaPortable:
      return new KernelExecutor<OnVectors<Bf16Shift>>(shape);
    default:
      throw std::invalid_argument("this machine lacks the instruction set asked for");
  }
}

template <class Body>
int guarded(Body body) {
  try {
    body();
    return 0;
  } catch (const std::exception& problem) {
    last_error = problem.what();
    return 1;
  }
}

Executor& at(void* handle) { return *static_cast<Executor*>(handle); }

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

const char* forebay_error() { return last_error.c_str(); }

int forebay_isa(int wanted) { return choose_isa(wanted); }

void* forebay_create(const Shape* shape) {
  void* handle = nullptr;
  guarded([&] { handle = make_executor(*shape); });
  return handle;
}

void forebay_destroy(void* handle) { delete static_cast<Executor*>(handle); }

// Returns the matrix's number, or -1.
int forebay_add_matrix(void* handle, int panels, int columns) {
  int index = -1;
  guarded([&] { index = at(handle).add_matrix(panels, columns); });
  return index;
}

int forebay_add_table(void* handle, const void* rows, int64_t row_bytes) {
  int index = -1;
  guarded([&] { index = at(handle).add_table(rows, static_cast<size_t>(row_bytes)); });
  return index;
}

int forebay_pack(void* handle, int matrix, const void* source, int rows, int columns,
                 int first_output, int panel_step, int panel_offset) {
  return guarded([&] {
    at(handle).pack(matrix, source, rows, columns, first_output, panel_step, panel_offset);
  });
}

int forebay_add_vector(void* handle, const float* values, int count) {
  int index = -1;
  guarded([&] { index = at(handle).add_vector(values, count); });
  return index;
}

int forebay_add_rope(void* handle, const double* inverse_frequencies, int count,
                     float amplitude) {
  int index = -1;
  guarded([&] { index = at(handle).add_rope(inverse_frequencies, count, amplitude); });
  return index;
}

int forebay_add_op(void* handle, const Op* op) {
  return guarded([&] { at(handle).add_op(*op); });
}

// Runs a step in a workspace. Returns how it ended; kPaused: it is to be resumed there.
int forebay_step(void* handle, int workspace, const Step* step) {
  int ending = kFailed;
  guarded([&] { ending = at(handle).step(workspace, *step); });
  return ending;
}

int forebay_resume(void* handle, int workspace) {
  int ending = kFailed;
  guarded([&] { ending = at(handle).resume(workspace); });
  return ending;
}

// Starts (or, off, ends) counting; `ns` gets what was counted since, per OpKind.
void forebay_profile(void* handle, int on, int64_t* ns) {
  const auto& counted = at(handle).kind_ns();
  std::copy(counted.begin(), counted.end(), ns);
  at(handle).profile(on != 0);
}

// Reads `bytes` on all threads, for comparing a step with the memory's speed. Returns a checksum.
int64_t forebay_read(void* handle, const char* from, int64_t bytes) {
  constexpr int64_t kGrain = 1 << 20;
  std::atomic<int64_t> total{0};
  auto body = [&](int first, int last) {
    WordVec sums[4] = {};
    const char* at = from + first * kGrain;
    const char* end = from + std::min(last * kGrain, bytes);
    for (; at + 256 <= end; at += 256)
      for (int i = 0; i < 4; ++i) sums[i] += load_words(at + i * 64);
    const WordVec sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    int64_t lanes = 0;
    for (int i = 0; i < kLanes; ++i) lanes += sum[i];
    total += lanes;
  };
  Spread<decltype(body)>(static_cast<int>((bytes + kGrain - 1) / kGrain), 1, body)
      .run(at(handle).pool());
  return total;
}

}  // extern "C"
#pragma GCC visibility pop
