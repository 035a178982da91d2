// One model on one pool: its weights, its program, its buffers, and how a step runs.
//
// A step's activations and how far it is lie in a workspace. So one step can pause between two ops
// while another runs in the other workspace, and go on as if nothing had been.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "pointwise.h"
#include "program.h"
#include "threads.h"

namespace forebay {

// What does not depend on the kernel. Errors are std::invalid_argument with the reason.
class Executor : public Work {
 public:
  explicit Executor(const Shape& shape)
      : shape_(shape),
        tiles_(static_cast<size_t>(shape.threads)),
        pool_(shape.threads, [this](int worker) { tiles_[worker].tiles.release(); }) {}

  Pool& pool() { return pool_; }

  // An all-zero matrix of `panels` panels for rows of `columns` elements; returns its number.
  int add_matrix(int panels, int columns) {
    const int words =
        static_cast<int>(round_up(columns, reduction_multiple())) / elements_per_word();
    Matrix matrix;
    matrix.panels = panels;
    matrix.words = words;
    matrix.data = arena_.take(static_cast<size_t>(panels) * words * kVectorBytes);
    matrices_.push_back(matrix);
    return static_cast<int>(matrices_.size()) - 1;
  }

  // Plain rows in the caller's memory, which must outlive the executor. For lookups only.
  int add_table(const void* rows, size_t row_bytes) {
    Matrix matrix;
    matrix.data = static_cast<char*>(const_cast<void*>(rows));
    matrix.row_bytes = row_bytes;
    matrices_.push_back(matrix);
    return static_cast<int>(matrices_.size()) - 1;
  }

  void pack(int matrix, const void* source, int rows, int columns, int first_output,
            int panel_step, int panel_offset);

  int add_vector(const float* values, int count) {
    // Read in whole vectors, and one more where a head's padding is larger.
    auto* at = reinterpret_cast<float*>(arena_.take(round_up(count, 32) * sizeof(float)));
    std::copy(values, values + count, at);
    vectors_.push_back(at);
    return static_cast<int>(vectors_.size()) - 1;
  }

  int add_rope(const double* inverse_frequencies, int count, float amplitude) {
    ropes_.push_back({{inverse_frequencies, inverse_frequencies + count}, amplitude});
    return static_cast<int>(ropes_.size()) - 1;
  }

  void add_op(const Op& op) { ops_.push_back(op); }

  // Runs a step in a workspace, giving up the one that is paused there, if any. kDone or kPaused.
  virtual Ending step(int workspace, const Step& step) = 0;

  // Goes on with the step that is paused in a workspace. kDone or kPaused again.
  virtual Ending resume(int workspace) = 0;

  void profile(bool on) {
    profiling_ = on;
    kind_ns_.fill(0);
  }
  const std::array<int64_t, kOpKinds>& kind_ns() const { return kind_ns_; }

  std::string error;

 protected:
  virtual int reduction_multiple() const = 0;
  virtual int elements_per_word() const = 0;

  // One cache line or more per worker, so that no two share one.
  struct alignas(128) WorkerTiles {
    Tiles tiles;
  };

  Shape shape_;
  Arena arena_;
  std::vector<Matrix> matrices_;
  std::vector<const float*> vectors_;
  std::vector<Rope> ropes_;
  std::vector<Op> ops_;
  std::vector<WorkerTiles> tiles_;
  bool profiling_ = false;
  std::array<int64_t, kOpKinds> kind_ns_{};
  Pool pool_;  // last: its threads end before anything that they use
};

// Spreads [0, count) over the pool in runs of `grain`.
template <class Body>
class Spread : public Work {
 public:
  Spread(int count, int grain, Body body) : count_(count), grain_(grain), body_(body) {}

  void run(Pool& pool) {
    const uint32_t units = static_cast<uint32_t>((count_ + grain_ - 1) / grain_);
    pool.run(*this, &units, 0, 1);
  }
  void unit(int, uint32_t index, int) noexcept override {
    const int first = static_cast<int>(index) * grain_;
    body_(first, std::min(count_, first + grain_));
  }

 private:
  int count_, grain_;
  Body body_;
};

inline void Executor::pack(int matrix, const void* source, int rows, int columns, int first_output,
                           int panel_step, int panel_offset) {
  const PanelPacker packer{matrices_.at(matrix), static_cast<const uint32_t*>(source),
                           columns / elements_per_word(), first_output, panel_step, panel_offset};
  auto body = [&](int first, int last) { packer.pack(first, last); };
  // Two units may share a panel, never a lane of it.
  Spread<decltype(body)>(rows, 4 * kLanes, body).run(pool_);
}

// What a step under way is made of. Kept from step to step, as large as the largest one needed.
struct Workspace {
  Arena arena;
  std::array<Rows, kBuffers> buffers{};
  Rows queries;              // [tokens][heads][padded head_dim], rotated, in the weights' dtype
  std::vector<Rows> angles;  // per rope [tokens][2][frequencies]: cos, then sin
  int capacity = 0;          // tokens that there is room for
  AttentionPlan plan;
  std::vector<uint32_t> units;
  std::vector<LinearGrid> grids;
  const Step* step = nullptr;  // under way, else null
  int next_op = 0;
};

template <class Kernel>
class KernelExecutor : public Executor {
 public:
  using Element = typename Kernel::Element;

  explicit KernelExecutor(const Shape& shape)
      : Executor(shape),
        layout_(padded_head_dim(shape.head_dim), shape.kv_heads, shape.layers, shape.block_tokens,
                sizeof(Element)),
        group_(shape.heads / shape.kv_heads) {
    if (layout_.head_dim > kMaxHeadDim) throw std::invalid_argument("head_dim is over 512");
    for (int worker = 0; worker < shape.threads; ++worker) {
      scratch_.push_back(make_scratch());
      linear_scratch_.push_back(std::make_unique<LinearScratch>());
    }
    reserve(spaces_[0], shape.max_tokens);  // the other one when it is first needed
  }

  static int padded_head_dim(int head_dim) {
    return static_cast<int>(round_up(head_dim, Kernel::kHeadMultiple));
  }

  Ending step(int workspace, const Step& step) override {
    Workspace& space = spaces_.at(workspace);
    space.step = nullptr;
    check(step);
    if (step.tokens > space.capacity) reserve(space, std::max(step.tokens, shape_.max_tokens));
    reserve_angles(space);
    space.plan.build(step, group_, shape_.block_tokens);
    space.buffers[kLogits] = {reinterpret_cast<char*>(step.logits), shape_.vocab * sizeof(float)};
    const size_t ops = ops_.size();
    space.units.resize(ops);
    space.grids.resize(ops);
    space.step = &step;
    space.next_op = 0;
    space_ = &space;
    for (size_t i = 0; i < ops; ++i) space.units[i] = count_units(ops_[i], space.grids[i]);
    return resume(workspace);
  }

  Ending resume(int workspace) override {
    Workspace& space = spaces_.at(workspace);
    if (!space.step) throw std::invalid_argument("no step is paused there");
    space_ = &space;
    pause_after_ = space.step->pause_after;
    const int ops = static_cast<int>(ops_.size()), first = space.next_op;
    if (profiling_) op_ns_.assign(ops_.size(), 0);
    space.next_op = pool_.run(*this, space.units.data(), first, ops,
                              profiling_ ? op_ns_.data() : nullptr);
    if (profiling_)
      for (int i = first; i < space.next_op; ++i) kind_ns_[ops_[i].kind] += op_ns_[i];
    if (space.next_op < ops) return kPaused;
    space.step = nullptr;
    return kDone;
  }

  void unit(int index, uint32_t unit, int worker) noexcept override {
    // One worker runs an op's first unit: that one decides for all.
    if (unit == 0 && pause_after_ && index >= __atomic_load_n(pause_after_, __ATOMIC_RELAXED) &&
        index + 1 < static_cast<int>(ops_.size()))
      pool_.end_after(index);
    const Op& op = ops_[index];
    switch (static_cast<OpKind>(op.kind)) {
      case kLinear:
      case kLinearAdd:
      case kGatedLinear:
        linear(op, space_->grids[index], unit, worker);
        return;
      case kAttend:
        attend(op, unit, worker);
        return;
      case kSelect:
        select();
        return;
      default:
        break;
    }
    const int rows = rows_of(op);
    const int first = static_cast<int>(unit) * row_grain(rows);
    const int last = std::min(rows, first + row_grain(rows));
    for (int row = first; row < last; ++row) token(op, row);
  }

 protected:
  int reduction_multiple() const override { return Kernel::kReductionMultiple; }
  int elements_per_word() const override { return Kernel::kElementsPerWord; }

 private:
  std::unique_ptr<AttentionScratch> make_scratch() {
    auto scratch = std::make_unique<AttentionScratch>();
    const size_t rows = static_cast<size_t>(AttentionPlan::max_item_tokens(group_)) * group_;
    const size_t head = layout_.head_dim;
    scratch->queries = make_rows(arena_, rows, head * sizeof(Element));
    scratch->outputs = make_rows(arena_, rows, head * sizeof(float));
    scratch->sums = make_rows(arena_, rows, kVectorBytes);
    scratch->maxima.resize(rows);
    scratch->positions.resize(rows);
    scratch->products.resize(kTileRows * head);
    return scratch;
  }

  // A whole number of cache lines, odd, so that the rows of a tile spread over the cache's sets.
  static Rows make_rows(Arena& arena, size_t rows, size_t bytes) {
    size_t lines = (bytes + 63) / 64;
    lines += 1 - lines % 2;
    return {arena.take(rows * lines * 64), lines * 64};
  }

  void reserve(Workspace& space, int tokens) {
    // Tiles read whole blocks of 16 rows only where rows exist; one spare block costs nothing.
    const size_t rows = round_up(static_cast<size_t>(tokens), 32);
    space.capacity = 0;  // until there is room again
    space.arena = Arena();
    const size_t query = static_cast<size_t>(shape_.heads) * shape_.head_dim;
    const size_t kv = static_cast<size_t>(shape_.kv_heads) * shape_.head_dim;
    auto multiplied = [&](size_t columns) {
      return make_rows(space.arena, rows,
                       round_up(columns, Kernel::kReductionMultiple) * sizeof(Element));
    };
    auto floats = [&](size_t columns) {
      return make_rows(space.arena, rows, round_up(columns, kLanes) * sizeof(float));
    };
    space.buffers[kResidual] = floats(shape_.hidden);
    space.buffers[kNormed] = multiplied(shape_.hidden);
    space.buffers[kQkv] = floats(query + 2 * kv);
    space.buffers[kAttended] = multiplied(query);
    space.buffers[kDelta] = floats(shape_.hidden);
    space.buffers[kGated] = multiplied(round_up(shape_.intermediate, kLanes));
    space.buffers[kFinal] = multiplied(shape_.hidden);
    space.queries =
        make_rows(space.arena, rows,
                  static_cast<size_t>(shape_.heads) * layout_.head_dim * sizeof(Element));
    space.angles.clear();
    space.capacity = tokens;
  }

  // Apart from the rest: when the first workspace is made, the ropes are not known yet.
  void reserve_angles(Workspace& space) {
    for (size_t i = space.angles.size(); i < ropes_.size(); ++i)
      space.angles.push_back(make_rows(space.arena, static_cast<size_t>(space.capacity),
                                       2 * ropes_[i].inverse_frequencies.size() * sizeof(float)));
  }

  // Everything that is used as an index, so that a wrong step is an error and not a stray write.
  void check(const Step& step) const {
    for (int t = 0; t < step.tokens; ++t) {
      if (step.token_ids[t] < 0 || step.token_ids[t] >= shape_.vocab)
        throw std::invalid_argument("token id " + std::to_string(step.token_ids[t]) +
                                    " is outside the vocabulary of " +
                                    std::to_string(shape_.vocab));
    }
    for (int r = 0; r < step.logit_row_count; ++r) {
      if (step.logit_rows[r] < 0 || step.logit_rows[r] >= step.tokens)
        throw std::invalid_argument("logit row " + std::to_string(step.logit_rows[r]) +
                                    " is outside the step's " + std::to_string(step.tokens) +
                                    " tokens");
      if (r > 0 && step.logit_rows[r] <= step.logit_rows[r - 1])
        throw std::invalid_argument("logit rows do not ascend");
    }
    if (step.query_starts[0] != 0 || step.query_starts[step.sequences] != step.tokens)
      throw std::invalid_argument("query_starts does not cover the step's tokens");
    for (int s = 0; s < step.sequences; ++s) check_sequence(step, s);
  }

  void check_sequence(const Step& step, int s) const {
    const int first = step.query_starts[s], last = step.query_starts[s + 1];
    const int length = step.context_lengths[s];
    const std::string name = "sequence " + std::to_string(s);
    if (first > last || last - first > length)
      throw std::invalid_argument(name + " has more query tokens than context");
    for (int t = first; t < last; ++t) {
      if (step.positions[t] != length - (last - t))
        throw std::invalid_argument(name + "'s positions do not end at its context length");
    }
    const int blocks = (length + shape_.block_tokens - 1) / shape_.block_tokens;
    if (blocks > step.table_width)
      throw std::invalid_argument(name + "'s block table is shorter than its context");
    const int32_t* table = step.block_tables + static_cast<size_t>(s) * step.table_width;
    for (int b = 0; b < blocks; ++b) {
      if (table[b] < 0 || table[b] >= shape_.blocks)
        throw std::invalid_argument(name + "'s block table names block " +
                                    std::to_string(table[b]) + " of " +
                                    std::to_string(shape_.blocks));
    }
  }

  int rows_of(const Op& op) const {
    return op.selected ? space_->step->logit_row_count : space_->step->tokens;
  }

  // Rows per unit of a row-wise op: small enough to share the work, large enough to be worth it.
  int row_grain(int rows) const {
    const int grain = rows / (shape_.threads * 4);
    return grain < 1 ? 1 : grain > 16 ? 16 : grain;
  }

  uint32_t count_units(const Op& op, LinearGrid& grid) const {
    const int rows = rows_of(op);
    switch (static_cast<OpKind>(op.kind)) {
      case kLinear:
      case kLinearAdd:
      case kGatedLinear:
        grid = LinearGrid(rows, matrices_[op.matrix].panels, shape_.threads, Kernel::kBlockRows);
        return grid.units;
      case kAttend:
        return static_cast<uint32_t>(space_->plan.items.size()) * shape_.kv_heads;
      case kSelect:
        return 1;
      default:
        return static_cast<uint32_t>((rows + row_grain(rows) - 1) / row_grain(rows));
    }
  }

  const float* vector(int index) const { return index == kNone ? nullptr : vectors_[index]; }

  void linear(const Op& op, const LinearGrid& grid, uint32_t unit, int worker) {
    const Matrix& matrix = matrices_[op.matrix];
    Finish finish{static_cast<OpKind>(op.kind), static_cast<Activation>(op.activation),
                  vector(op.vector), vector(op.vector2),
                  space_->buffers[op.out],
                  op.out == kLogits ? shape_.vocab : matrix.panels * kLanes};
    linear_unit<Kernel>(tiles_[worker].tiles, *linear_scratch_[worker], grid, unit,
                        space_->buffers[op.src], rows_of(op), matrix, finish);
  }

  void attend(const Op& op, uint32_t unit, int worker) {
    const AttentionPlan& plan = space_->plan;
    const AttentionItem& item = plan.items[unit / shape_.kv_heads];
    const AttentionLayer layer{shape_.heads, shape_.kv_heads, shape_.head_dim, op.window, op.scale,
                               layout_, op.layer, shape_.block_tokens};
    AttentionUnit<Kernel>(tiles_[worker].tiles, *scratch_[worker], layer, *space_->step,
                          static_cast<int>(unit % shape_.kv_heads))
        .run(item, plan.members.data() + item.first_member, space_->queries,
             space_->buffers[kAttended]);
  }

  // One unit, because rows move towards the front, over others that have moved already.
  void select() {
    const Step& step = *space_->step;
    for (int row = 0; row < step.logit_row_count; ++row) {
      const int from = step.logit_rows[row];
      if (from == row) continue;
      for (const Buffer buffer : {kResidual, kAttended}) {
        const Rows& rows = space_->buffers[buffer];
        std::memcpy(rows.row<char>(row), rows.row<char>(from), rows.stride);
      }
    }
  }

  void token(const Op& op, int row) {
    const int hidden = shape_.hidden;
    const float eps = shape_.norm_eps;
    const std::array<Rows, kBuffers>& buffers = space_->buffers;
    float* residual = buffers[kResidual].row<float>(row);
    switch (static_cast<OpKind>(op.kind)) {
      case kAngles:
        angle_row(ropes_[op.rope], space_->step->positions[row],
                  space_->angles[op.rope].row<float>(row));
        return;
      case kEmbed:
        embed_row<Kernel>(matrices_[op.matrix], hidden, space_->step->token_ids[row], op.scale,
                          residual);
        return;
      case kNorm:
        norm_row<Kernel>(residual, vectors_[op.vector], hidden, eps,
                         buffers[op.out].row<Element>(row));
        return;
      case kNormAdd:
        norm_add_row(buffers[kDelta].row<float>(row), vectors_[op.vector], hidden, eps, residual);
        return;
      case kRotateAndStore:
        rotate_and_store(op, row);
        return;
      default:
        return;
    }
  }

  void rotate_and_store(const Op& op, int row) {
    const Rope& rope = ropes_[op.rope];
    const HeadRotation rotation{shape_.head_dim, shape_.norm_eps, rope.frequencies(),
                                space_->angles[op.rope].row<float>(row)};
    alignas(64) float head[kMaxHeadDim] = {};
    const int padded = layout_.head_dim;
    const float* from = space_->buffers[kQkv].row<float>(row);
    Element* query = space_->queries.row<Element>(row);
    for (int h = 0; h < shape_.heads; ++h, from += shape_.head_dim, query += padded) {
      rotation.rotate(from, vector(op.vector), head);
      round_head<Kernel>(head, padded, query);
    }
    const Step& step = *space_->step;
    const int position = step.positions[row], slot = position % shape_.block_tokens;
    char* block = step.pages + page_of(row, position) * layout_.block_bytes;
    alignas(64) Element rounded[kMaxHeadDim];
    const float* values = from + shape_.kv_heads * shape_.head_dim;
    for (int h = 0; h < shape_.kv_heads; ++h) {
      char* group = block + layout_.group(op.layer, h, slot);
      rotation.rotate(from + h * shape_.head_dim, vector(op.vector2), head);
      round_head<Kernel>(head, padded, rounded);
      store_key<Kernel>(group, layout_, slot % kGroupTokens, rounded);
      std::copy_n(values + h * shape_.head_dim, shape_.head_dim, head);
      round_head<Kernel>(head, padded, rounded);
      store_value<Kernel>(group + layout_.side_bytes, layout_, slot % kGroupTokens, rounded);
    }
  }

  size_t page_of(int row, int position) const {
    const Step& step = *space_->step;
    const int32_t* starts = step.query_starts;
    const int s = static_cast<int>(
        std::upper_bound(starts, starts + step.sequences + 1, row) - starts - 1);
    const int32_t* table = step.block_tables + static_cast<size_t>(s) * step.table_width;
    return static_cast<size_t>(table[position / shape_.block_tokens]);
  }

  KvLayout layout_;
  int group_;  // query heads per KV head
  std::vector<std::unique_ptr<AttentionScratch>> scratch_;
  std::vector<std::unique_ptr<LinearScratch>> linear_scratch_;
  std::array<Workspace, kWorkspaces> spaces_;
  Workspace* space_ = nullptr;  // of the step that runs
  const int32_t* pause_after_ = nullptr;  // of the step that runs
  std::vector<int64_t> op_ns_;
};

}  // namespace forebay
