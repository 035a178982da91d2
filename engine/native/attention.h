// Attention of a step's queries over the pages, with online softmax.
//
// A row is one query head at one position. Each row walks the context in superblocks of 64 tokens
// at absolute positions, carrying (maximum, sum, output); what a superblock does to a row depends
// on that row, the keys and the values alone. So it does not matter which rows go through a
// superblock together: a tile of 16 may mix the heads of a group, neighbouring positions of one
// prompt, and sequences whose block tables begin with the same pages, whose shared part is then
// read once. A superblock of which a row sees nothing leaves it as it was, bit by bit.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "pointwise.h"
#include "program.h"

namespace forebay {

// Query tokens [first_token, first_token + tokens) of one sequence, as part of a unit.
struct Member {
  int sequence;
  int first_token;
  int tokens;
};

// Members that a worker takes together, for one KV head. Several members are of different sequences
// whose first `shared_tokens` (whole superblocks) lie in the same pages.
struct AttentionItem {
  int first_member;
  int members;
  int shared_tokens;
  int tokens;  // of all members
};

// Who is computed with whom. Made once per step, for all layers and KV heads.
class AttentionPlan {
 public:
  std::vector<Member> members;
  std::vector<AttentionItem> items;

  // Grows the vectors only when a step is larger than all before.
  void build(const Step& step, int group_size, int block_tokens) {
    members.clear();
    items.clear();
    order_.resize(static_cast<size_t>(step.sequences));
    for (int s = 0; s < step.sequences; ++s) order_[s] = s;
    if (step.share_prefixes) {
      std::sort(order_.begin(), order_.end(), [&](int a, int b) {
        const int32_t* x = step.block_tables + static_cast<size_t>(a) * step.table_width;
        const int32_t* y = step.block_tables + static_cast<size_t>(b) * step.table_width;
        for (int i = 0; i < step.table_width; ++i)
          if (x[i] != y[i]) return x[i] < y[i];
        return a < b;
      });
    }
    const int tokens_per_item = std::max(1, kItemRows / group_size);
    const int shared_item_tokens = std::max(1, kTileRows / group_size);
    for (const int s : order_) {
      const int first = step.query_starts[s], count = step.query_starts[s + 1] - first;
      if (step.share_prefixes && count > 0 && join(step, s, first, count, shared_item_tokens,
                                                   block_tokens))
        continue;
      // The last chunk of a prompt sees most and costs most, so it comes first.
      const int chunks = (count + tokens_per_item - 1) / tokens_per_item;
      for (int chunk = chunks - 1; chunk >= 0; --chunk) {
        const int start = chunk * tokens_per_item;
        const int size = std::min(tokens_per_item, count - start);
        items.push_back({static_cast<int>(members.size()), 1, 0, size});
        members.push_back({s, first + start, size});
      }
    }
  }

  // Query tokens of the largest item, which bounds a worker's scratch rows.
  static int max_item_tokens(int group_size) { return std::max(1, kItemRows / group_size); }

 private:
  static constexpr int kItemRows = 128;

  std::vector<int> order_;

  // Adds a short query to the last item if that is short too and enough of their tables agree.
  bool join(const Step& step, int s, int first, int count, int limit, int block_tokens) {
    if (items.empty()) return false;
    AttentionItem& item = items.back();
    const Member& last = members.back();
    if (item.tokens + count > limit) return false;
    const int seen = std::min(step.positions[first], step.positions[last.first_token]);
    int shared = shared_tokens(step, s, last.sequence, block_tokens);
    shared = std::min(shared, seen) / kSuperblockTokens * kSuperblockTokens;
    if (item.members > 1) {
      // A member that agrees with the others on little would make them all read their rest alone.
      if (shared < item.shared_tokens / 2) return false;
      shared = std::min(shared, item.shared_tokens);
    }
    if (shared == 0) return false;
    item.shared_tokens = shared;
    item.members += 1;
    item.tokens += count;
    members.push_back({s, first, count});
    return true;
  }

  static int shared_tokens(const Step& step, int a, int b, int block_tokens) {
    const int32_t* x = step.block_tables + static_cast<size_t>(a) * step.table_width;
    const int32_t* y = step.block_tables + static_cast<size_t>(b) * step.table_width;
    const int tokens = std::min(step.context_lengths[a], step.context_lengths[b]);
    int blocks = 0;
    while (blocks < tokens / block_tokens && x[blocks] == y[blocks]) ++blocks;
    return blocks * block_tokens;
  }
};

// A worker's rows in flight.
struct AttentionScratch {
  Rows queries;  // [rows][padded head_dim] weights' dtype
  Rows outputs;  // [rows][padded head_dim] float32, not yet divided by the sum
  Rows sums;     // [rows][16] float32, one partial sum per lane
  std::vector<float> maxima;
  std::vector<int> positions;
  std::vector<float> products;        // [kTileRows][padded head_dim]
  alignas(64) float scores[kTileRows * kSuperblockTokens];
  alignas(64) char probabilities[kTileRows * kSuperblockTokens * 4];
};

struct AttentionLayer {
  int heads;
  int kv_heads;
  int head_dim;
  int window;  // kNone: none
  float scale;
  KvLayout layout;
  int index;
  int block_tokens;
};

template <class Kernel>
class AttentionUnit {
 public:
  using Element = typename Kernel::Element;

  AttentionUnit(Tiles& tiles, AttentionScratch& scratch, const AttentionLayer& layer,
                const Step& step, int kv_head)
      : tiles_(tiles),
        scratch_(scratch),
        layer_(layer),
        step_(step),
        kv_head_(kv_head),
        group_(layer.heads / layer.kv_heads) {}

  void run(const AttentionItem& item, const Member* members, const Rows& queries,
           const Rows& attended) {
    int rows = 0;
    for (int m = 0; m < item.members; ++m) rows = take_rows(members[m], queries, rows);
    if (item.shared_tokens > 0)
      walk(0, rows, table(members[0]), 0, item.shared_tokens / kSuperblockTokens);
    int row = 0;
    for (int m = 0; m < item.members; ++m) {
      const int count = members[m].tokens * group_;
      walk(row, count, table(members[m]), item.shared_tokens / kSuperblockTokens,
           std::numeric_limits<int>::max());
      row += count;
    }
    row = 0;
    for (int m = 0; m < item.members; ++m) row = give_rows(members[m], attended, row);
  }

 private:
  const int32_t* table(const Member& member) const {
    return step_.block_tables + static_cast<size_t>(member.sequence) * step_.table_width;
  }

  int take_rows(const Member& member, const Rows& queries, int row) {
    const int padded = layer_.layout.head_dim;
    for (int t = 0; t < member.tokens; ++t) {
      const int token = member.first_token + t;
      const Element* from = queries.row<Element>(token) +
                            static_cast<size_t>(kv_head_) * group_ * padded;
      for (int h = 0; h < group_; ++h, ++row) {
        std::memcpy(scratch_.queries.row<Element>(row), from + h * padded,
                    padded * sizeof(Element));
        std::memset(scratch_.outputs.row<float>(row), 0, padded * sizeof(float));
        std::memset(scratch_.sums.row<float>(row), 0, kVectorBytes);
        scratch_.maxima[row] = -std::numeric_limits<float>::infinity();
        scratch_.positions[row] = step_.positions[token];
      }
    }
    return row;
  }

  int give_rows(const Member& member, const Rows& attended, int row) {
    const int head_dim = layer_.head_dim;
    for (int t = 0; t < member.tokens; ++t) {
      Element* to = attended.row<Element>(member.first_token + t) +
                    static_cast<size_t>(kv_head_) * group_ * head_dim;
      for (int h = 0; h < group_; ++h, ++row, to += head_dim) {
        const float* output = scratch_.outputs.row<float>(row);
        const float scale = 1.0f / sum_lanes(load(scratch_.sums.row<float>(row)));
        int d = 0;
        for (; d + kLanes <= head_dim; d += kLanes)
          Kernel::store(to + d, load(output + d) * scale);
        if (d < head_dim) {
          Element rest[kLanes];
          Kernel::store(rest, load(output + d) * scale);
          std::memcpy(to + d, rest, (head_dim - d) * sizeof(Element));
        }
      }
    }
    return row;
  }

  // Takes rows [first, first + count) through superblocks [from, to) of one block table, tile by
  // tile, as far as a tile's rows see.
  void walk(int first, int count, const int32_t* table, int from, int to) {
    for (int row = first; row < first + count; row += kTileRows) {
      const int rows = std::min(kTileRows, first + count - row);
      const auto [low, high] = std::minmax_element(scratch_.positions.begin() + row,
                                                   scratch_.positions.begin() + row + rows);
      const int lowest = *low, highest = *high;
      int begin = from;
      if (layer_.window != kNone)
        begin = std::max(begin, std::max(0, lowest - layer_.window + 1) / kSuperblockTokens);
      const int end = std::min(to, highest / kSuperblockTokens + 1);
      for (int s = begin; s < end; ++s) {
        // Pages are scattered, and the hardware does not guess where the next one is. The first
        // tile brings them in for the others.
        const int next = (s + 1) * kSuperblockTokens;
        if (row == first && s + 1 < end)
          fetch(table, next, (highest - next) / kGroupTokens + 1);
        superblock(row, rows, lowest, highest, table, s);
      }
    }
  }

  void superblock(int row, int rows, int lowest, int highest, const int32_t* table, int index) {
    const int first_token = index * kSuperblockTokens;
    const int groups =
        std::min(kSuperblockGroups, (highest - first_token) / kGroupTokens + 1);
    const char* keys[kSuperblockGroups];
    const char* values[kSuperblockGroups];
    locate(table, first_token, groups, keys, values);
    const KvLayout& layout = layer_.layout;
    const int words = layout.head_dim / Kernel::kElementsPerWord;
    Kernel::scores(tiles_, rows, scratch_.queries.row<char>(row), scratch_.queries.stride, keys,
                   groups, words, scratch_.scores);
    const bool masked = first_token + groups * kGroupTokens - 1 > lowest ||
                        (layer_.window != kNone && first_token <= highest - layer_.window);
    if (masked) hide(row, rows, first_token, groups);
    alignas(64) float decays[kTileRows];
    raise_maxima(row, rows, groups, decays);
    for (int r = 0; r < rows; ++r) soften(row + r, r, groups, decays[r]);
    Kernel::values(tiles_, rows, scratch_.probabilities, values, groups, layout.head_dim,
                   scratch_.products.data());
    for (int r = 0; r < rows; ++r) {
      float* output = scratch_.outputs.row<float>(row + r);
      const float* product = scratch_.products.data() + r * layout.head_dim;
      for (int d = 0; d < layout.head_dim; d += kLanes)
        store(output + d, load(output + d) * decays[r] + load(product + d));
    }
  }

  void locate(const int32_t* table, int first_token, int groups, const char** keys,
              const char** values) const {
    const KvLayout& layout = layer_.layout;
    for (int g = 0; g < groups; ++g) {
      const int token = first_token + g * kGroupTokens;
      const size_t block = static_cast<size_t>(table[token / layer_.block_tokens]);
      keys[g] = step_.pages + block * layout.block_bytes +
                layout.group(layer_.index, kv_head_, token % layer_.block_tokens);
      values[g] = keys[g] + layout.side_bytes;
    }
  }

  // Starts loading a superblock of which `groups` groups (at most four count) will be wanted.
  void fetch(const int32_t* table, int first_token, int groups) const {
    const char* keys[kSuperblockGroups];
    const char* values[kSuperblockGroups];
    groups = std::min(groups, kSuperblockGroups);
    locate(table, first_token, groups, keys, values);
    for (int g = 0; g < groups; ++g)
      for (size_t line = 0; line < 2 * layer_.layout.side_bytes; line += 64)
        __builtin_prefetch(keys[g] + line, 0, 2);
  }

  // Scores of tokens that a row must not see become minus infinity.
  void hide(int row, int rows, int first_token, int groups) {
    constexpr float kHidden = -std::numeric_limits<float>::infinity();
    for (int r = 0; r < rows; ++r) {
      const int position = scratch_.positions[row + r];
      for (int g = 0; g < groups; ++g) {
        float* at = scratch_.scores + r * kSuperblockTokens + g * kLanes;
        // Distances are small whole numbers, exact as floats.
        const FloatVec ahead =
            lane_numbers() + static_cast<float>(first_token + g * kGroupTokens - position);
        FloatVec x = ahead > splat(0.0f) ? splat(kHidden) : load(at);
        if (layer_.window != kNone)
          x = ahead <= splat(static_cast<float>(-layer_.window)) ? splat(kHidden) : x;
        store(at, x);
      }
    }
  }

  // Brings the rows' maxima up to the tile's scores. Their earlier sums and outputs have to be
  // multiplied with `decays`.
  void raise_maxima(int row, int rows, int groups, float* decays) {
    constexpr float kHidden = -std::numeric_limits<float>::infinity();
    const float scale = layer_.scale * kLog2E;
    alignas(64) float fall[kTileRows] = {};
    for (int r = 0; r < rows; ++r) {
      const float* scores = scratch_.scores + r * kSuperblockTokens;
      FloatVec highest = load(scores);
      for (int g = 1; g < groups; ++g) highest = max(highest, load(scores + g * kLanes));
      const float before = scratch_.maxima[row + r];
      const float after = std::max(before, max_lanes(highest) * scale);
      // Nothing seen yet: no difference of infinities, and any decay of nothing is nothing.
      fall[r] = after == kHidden ? 0.0f : before - after;
      scratch_.maxima[row + r] = after;
    }
    store(decays, exp2(load(fall)));
  }

  // Turns row r of the tile's scores into probabilities against the row's maximum.
  void soften(int row, int r, int groups, float decay) {
    constexpr float kHidden = -std::numeric_limits<float>::infinity();
    const float scale = layer_.scale * kLog2E;
    const float maximum = scratch_.maxima[row];
    const float base = maximum == kHidden ? 0.0f : maximum;  // nothing seen yet: all become 0
    const float* scores = scratch_.scores + r * kSuperblockTokens;
    auto* out = reinterpret_cast<Element*>(scratch_.probabilities) + r * kSuperblockTokens;
    FloatVec sum = load(scratch_.sums.row<float>(row)) * decay;
    for (int g = 0; g < groups; ++g) {
      const FloatVec p = exp2(load(scores + g * kLanes) * scale - base);
      sum = sum + p;
      Kernel::store(out + g * kLanes, p);
    }
    store(scratch_.sums.row<float>(row), sum);
  }

  Tiles& tiles_;
  AttentionScratch& scratch_;
  const AttentionLayer& layer_;
  const Step& step_;
  int kv_head_;
  int group_;
};

}  // namespace forebay
