// fused_experts of transposed weights on the CPU: gemv's Conv1D kernels over the rows that chose each expert.
#include <cmath>

#include "common/cpu_math.h"
#include "fused_experts/fused_experts_glue_cpu.h"

namespace hf_fastpath {
namespace {

// Inputs that are summed by themselves, about: more make longer chains of sums. The division depends on the
// shape only, so that a row's result depends neither on other rows nor on the number of threads.
constexpr int64_t kInputsPerSplit = 768;
// Least outputs of a strip: 512 bytes of a 16-bit weight row.
constexpr int64_t kMinOutputs = 256;

int64_t input_splits(int64_t in_features) { return std::clamp<int64_t>(in_features / kInputsPerSplit, 1, 4); }

// Sums of all pairs by split of the inputs.
struct Partials {
  float* data;
  int64_t splits, split_stride, stride;

  Partials(float* data, int64_t pairs, int64_t in_features, int64_t features)
      : data(data), splits(input_splits(in_features)), stride(round_up(features, 16)) {
    split_stride = pairs * stride;
  }
  int64_t floats() const { return splits * split_stride; }
  float sum(int64_t place, int64_t feature) const {
    const float* from = data + place * stride + feature;
    float sum = from[0];
    for (int64_t split = 1; split < splits; ++split) sum += from[split * split_stride];
    return sum;
  }
};

// The products of all pairs with their experts' matrices.
void multiply(const ExpertsCall& call, const float* x, int64_t x_stride, const Tensor& stack,
              const Partials& to) {
  const auto kernel = use_avx2() ? conv1d_avx2 : conv1d_portable;
  const int64_t in_features = stack.size(1), features = stack.size(2);
  const int64_t groups = static_cast<int64_t>(call.pairs.groups.size());
  const int64_t threads =
      part_count(groups * in_features * features * element_size(call.dtype), kBytesPerPart);
  // There are as many strips of outputs as threads: one is a thread's share of an expert.
  const int64_t strips = std::min(threads, std::max<int64_t>(1, features / kMinOutputs));
  const int64_t units = groups * to.splits * strips, parts = std::min(threads, units);
  for_each_part(parts, [&](int64_t part) {
    const int64_t end = part_begin(units, parts, part + 1);
    for (int64_t unit = part_begin(units, parts, part); unit < end; ++unit) {
      const int64_t strip = unit % strips, split = unit / strips % to.splits;
      const ExpertPairs::Group& group = call.pairs.groups[unit / strips / to.splits];
      kernel(expert_args(call, group, x, x_stride, stack), part_begin(in_features, to.splits, split),
             part_begin(in_features, to.splits, split + 1), part_begin(features, strips, strip, 64),
             part_begin(features, strips, strip + 1, 64),
             to.data + split * to.split_stride + group.begin * to.stride, to.stride);
    }
  });
}

float gated(const ExpertsCall& call, float gate, float up) {
  if (!call.gate.clamped) return activate(call.gate.activation, gate) * up;
  gate = gate > call.limit ? call.limit : gate;  // NaN stays NaN
  up = up > call.limit ? call.limit : up < -call.limit ? -call.limit : up;
  return gate / (1.0f + std::exp(-call.alpha * gate)) * (up + 1.0f);
}

// What the activations of a pair give, rounded to dtype.
template <class T>
void activate_pair(const ExpertsCall& call, const Partials& sums, int64_t place, int64_t expert, float* to) {
  const T* bias = static_cast<const T*>(call.gate_up_bias);
  if (bias != nullptr) bias += expert * 2 * call.width;
  const int64_t step = call.concatenated ? 1 : 2, to_up = call.concatenated ? call.width : 1;
  for (int64_t i = 0; i < call.width; ++i) {
    const int64_t at = step * i;
    float gate = sums.sum(place, at), up = sums.sum(place, at + to_up);
    if (bias != nullptr) gate += to_float(bias[at]), up += to_float(bias[at + to_up]);
    T rounded;
    from_float(gated(call, gate, up), &rounded);
    to[i] = to_float(rounded);
  }
}

}  // namespace

int64_t experts_spare_columns(int64_t pairs, int64_t hidden_size, int64_t width) {
  const Partials gate_up(nullptr, pairs, hidden_size, 2 * width), down(nullptr, pairs, width, hidden_size);
  return pairs * round_up(width, 16) + gate_up.floats() + down.floats();
}

void run_experts_columns(const ExpertsCall& call) {
  const int64_t count = call.pairs.count(), width_stride = round_up(call.width, 16);
  float* const hidden = call.spare;
  const Partials gate_up(hidden + count * width_stride, count, call.hidden_size, 2 * call.width);
  const Partials down(gate_up.data + gate_up.floats(), count, call.width, call.hidden_size);
  std::vector<int64_t> expert_of(count);
  for (const auto& group : call.pairs.groups) {
    std::fill_n(expert_of.begin() + group.begin, group.count, group.expert);
  }

  multiply(call, call.x, call.x_stride, call.gate_up, gate_up);
  constexpr int64_t kFeaturesPerPart = 2048;  // activations worth another thread
  const int64_t pairs_parts = std::min(part_count(count * call.width, kFeaturesPerPart), count);
  for_each_part(pairs_parts, [&](int64_t part) {
    const int64_t end = part_begin(count, pairs_parts, part + 1);
    for (int64_t place = part_begin(count, pairs_parts, part); place < end; ++place) {
      with_storage(call.dtype, [&](auto* tag) {
        using T = std::remove_pointer_t<decltype(tag)>;
        activate_pair<T>(call, gate_up, place, expert_of[place], hidden + place * width_stride);
      });
    }
  });

  multiply(call, hidden, width_stride, call.down, down);
  const int64_t parts = std::min(part_count(count * call.hidden_size, 4 * kFeaturesPerPart),
                                 std::max<int64_t>(call.hidden_size / kMinOutputs, 1));
  const auto convert = use_avx2() ? convert_to_float_avx2 : convert_to_float_portable;
  for_each_part(parts, [&](int64_t part) {
    const int64_t begin = part_begin(call.hidden_size, parts, part, 64);
    add_choices(call, begin, part_begin(call.hidden_size, parts, part + 1, 64),
                [&](int64_t place, int64_t first, int64_t n, float* to) {
                  float bias[kExpertChunk] = {};
                  if (call.down_bias != nullptr) {
                    const int64_t from = expert_of[place] * call.hidden_size + first;
                    convert(call.dtype, at(call.down_bias, from, call.dtype), bias, n);
                  }
                  for (int64_t i = 0; i < n; ++i) to[i] = down.sum(place, first + i) + bias[i];
                });
  });
}

}  // namespace hf_fastpath
