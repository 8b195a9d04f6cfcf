// Pairs of a row and the experts that it has chosen, and the sums of what these give, on the CPU. This header
// is torch-facing, and *_cpu.cpp alone include it.
#pragma once

#include <vector>

#include "common/convert_cpu.h"
#include "common/cpu_glue.h"
#include "common/cpu_math.h"

namespace hf_fastpath {

// The pairs of a row and a choice, sorted by expert: those of one expert lie side by side.
struct ExpertPairs {
  struct Group {
    int64_t expert, begin, count;  // places of its pairs; at most as many as a kernel takes rows
  };
  std::vector<Group> groups;
  std::vector<int64_t> place;  // of pair row * top_k + k; -1 without an expert
  std::vector<int64_t> row;    // of x, by place

  int64_t count() const { return static_cast<int64_t>(row.size()); }
};

// `most`: pairs of a group.
inline ExpertPairs sorted_pairs(const int64_t* ids, int64_t rows, int64_t top_k, int64_t num_experts,
                                int64_t most) {
  ExpertPairs pairs;
  pairs.place.assign(rows * top_k, -1);
  for (int64_t first = 0; first < rows * top_k; ++first) {
    const int64_t expert = ids[first];
    if (expert < 0 || expert >= num_experts || pairs.place[first] >= 0) continue;
    for (int64_t pair = first; pair < rows * top_k; ++pair) {
      if (ids[pair] != expert) continue;
      const int64_t place = static_cast<int64_t>(pairs.row.size());
      if (pair == first || pairs.groups.back().count == most) pairs.groups.push_back({expert, place, 0});
      ++pairs.groups.back().count;
      pairs.place[pair] = place;
      pairs.row.push_back(pair / top_k);
    }
  }
  return pairs;
}

// Outputs that are summed at once, on the stack.
constexpr int64_t kExpertChunk = 256;

// Weighs and adds what a row's experts give for outputs [begin, end), in the order of its choices, whatever
// other rows chose; and the residual. read(place, first, n, to) gives n outputs of a pair. A call has rows,
// top_k, hidden_size and dtype, pairs, weights [rows, top_k], residual or null, and out.
template <class Call, class Read>
void add_choices(const Call& call, int64_t begin, int64_t end, const Read& read) {
  const auto convert = use_avx2() ? convert_to_float_avx2 : convert_to_float_portable;
  for (int64_t row = 0; row < call.rows; ++row) {
    for (int64_t first = begin; first < end; first += kExpertChunk) {
      const int64_t n = std::min(kExpertChunk, end - first);
      double accumulators[kExpertChunk] = {};  // of up to 32 choices, whose roundings would add up
      float one[kExpertChunk];
      for (int64_t pair = row * call.top_k; pair < (row + 1) * call.top_k; ++pair) {
        if (call.pairs.place[pair] < 0) continue;
        read(call.pairs.place[pair], first, n, one);
        for (int64_t i = 0; i < n; ++i) accumulators[i] += double(call.weights[pair]) * one[i];
      }
      if (call.residual != nullptr) {
        convert(call.dtype, at(call.residual, row * call.hidden_size + first, call.dtype), one, n);
        for (int64_t i = 0; i < n; ++i) accumulators[i] += one[i];
      }
      with_storage(call.dtype, [&](auto* tag) {
        using T = std::remove_pointer_t<decltype(tag)>;
        T* values = static_cast<T*>(call.out) + row * call.hidden_size + first;
        for (int64_t i = 0; i < n; ++i) from_float(static_cast<float>(accumulators[i]), values + i);
      });
    }
  }
}

}  // namespace hf_fastpath
