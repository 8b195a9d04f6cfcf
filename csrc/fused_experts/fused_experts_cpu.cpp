// fused_experts on the CPU: gemv's Linear kernels over the rows that chose each expert.
#include <cstring>
#include <vector>

#include "common/cpu_math.h"
#include "gemv/gemv_glue_cpu.h"

namespace hf_fastpath {
namespace {

constexpr const char* kOp = "fused_experts";

// The pairs of a row and a choice, sorted by expert: those of one expert lie side by side.
struct Group {
  int64_t expert, begin, count;  // places of its pairs; at most as many as a kernel takes rows
};
struct Pairs {
  std::vector<Group> groups;
  std::vector<int64_t> place;  // of pair row * top_k + k; -1 without an expert
  std::vector<int64_t> row;    // of x, by place
};

Pairs sorted_pairs(const int64_t* ids, int64_t rows, int64_t top_k, int64_t num_experts) {
  Pairs pairs;
  pairs.place.assign(rows * top_k, -1);
  for (int64_t first = 0; first < rows * top_k; ++first) {
    const int64_t expert = ids[first];
    if (expert < 0 || expert >= num_experts || pairs.place[first] >= 0) continue;
    for (int64_t pair = first; pair < rows * top_k; ++pair) {
      if (ids[pair] != expert) continue;
      const int64_t place = static_cast<int64_t>(pairs.row.size());
      if (pair == first || pairs.groups.back().count == kMaxRows) pairs.groups.push_back({expert, place, 0});
      ++pairs.groups.back().count;
      pairs.place[pair] = place;
      pairs.row.push_back(pair / top_k);
    }
  }
  return pairs;
}

// The weights of all experts, [num_experts, features, in_features].
void check_stack(const Tensor& stack, DType dtype, int64_t num_experts, int64_t features, int64_t in_features,
                 const char* name) {
  STD_TORCH_CHECK(dtype_of(stack, kOp) == dtype, "hf_fastpath::fused_experts: ", name,
                  " differs from x in dtype: cast one");
  STD_TORCH_CHECK(stack.dim() == 3 && stack.size(0) == num_experts && stack.size(1) == features &&
                      stack.size(2) == in_features,
                  "hf_fastpath::fused_experts: ", name, " does not match x and the other weight in shape");
  STD_TORCH_CHECK(stack.size(2) <= 1 || stack.stride(2) == 1, "hf_fastpath::fused_experts: ", name,
                  " has strided rows: make them contiguous");
}

// Arguments of a product of one group's rows, `x` [count, x_stride] of float32, with a matrix of its expert.
LinearArgs group_args(const Group& group, DType dtype, const float* x, int64_t x_stride, const Tensor& stack,
                      void* out, int64_t out_features) {
  LinearArgs args{};
  args.dtype = dtype;
  args.rows = group.count;
  args.in_features = stack.size(2);
  args.out_features = out_features;
  args.x = x + group.begin * x_stride;
  args.x_stride = x_stride;
  args.weight = at(stack.const_data_ptr(), group.expert * stack.stride(0), dtype);
  args.weight_stride = stack.stride(1);
  args.out = at(out, group.begin * out_features, dtype);
  args.out_stride = out_features;
  args.activation = Activation::kNone;
  return args;
}

// Outputs that are summed at once, in float32 on the stack.
constexpr int64_t kChunk = 256;

}  // namespace

Tensor fused_experts_cpu(const Tensor& x, const Tensor& expert_ids, const Tensor& expert_weights,
                         const Tensor& gate_up_weight, const Tensor& down_weight,
                         const std::optional<Tensor>& residual, const std::string& activation,
                         bool /*overlap*/) {
  STD_TORCH_CHECK(expert_ids.scalar_type() == ScalarType::Long && expert_ids.dim() == 2,
                  "hf_fastpath::fused_experts: expert_ids has to be int64 [rows, top_k]");
  STD_TORCH_CHECK(
      expert_weights.scalar_type() == ScalarType::Float && sizes_of(expert_weights) == sizes_of(expert_ids),
      "hf_fastpath::fused_experts: expert_weights has to be float32 of expert_ids' shape");
  STD_TORCH_CHECK(down_weight.dim() == 3,
                  "hf_fastpath::fused_experts: down_weight has to be [experts, hidden, intermediate]");
  STD_TORCH_CHECK(x.dim() >= 1, "hf_fastpath::fused_experts: x has no dimensions");
  const int64_t hidden_size = x.size(x.dim() - 1), width = down_weight.size(2),
                num_experts = down_weight.size(0), top_k = expert_ids.size(1);
  const DType dtype = dtype_of(x, kOp);
  check_stack(gate_up_weight, dtype, num_experts, 2 * width, hidden_size, "gate_up_weight");
  check_stack(down_weight, dtype, num_experts, hidden_size, width, "down_weight");
  const Activation gate = activation_of(activation, kOp);
  STD_TORCH_CHECK(gate != Activation::kNone && gate != Activation::kRelu,
                  "hf_fastpath::fused_experts: the activation is not that of a gate");
  if (residual.has_value()) {
    STD_TORCH_CHECK(dtype_of(*residual, kOp) == dtype && sizes_of(*residual) == sizes_of(x),
                    "hf_fastpath::fused_experts: residual differs from x in dtype or shape");
  }
  const Tensor ids = hf_fastpath::contiguous(expert_ids), weights = hf_fastpath::contiguous(expert_weights);
  const std::optional<Tensor> added =
      residual ? std::optional(hf_fastpath::contiguous(*residual)) : std::nullopt;
  const Pairs pairs = sorted_pairs(ids.const_data_ptr<int64_t>(), ids.size(0), top_k, num_experts);
  const int64_t count = static_cast<int64_t>(pairs.row.size());

  // Behind the rows of x: these by pair; the activations as they are rounded, and in float32; the experts'
  // outputs. The rounded ones take half of what is reserved where they are of 16 bits.
  const int64_t x_stride = round_up(hidden_size, 16), width_stride = round_up(width, 16);
  const Activations input =
      load_activations(x, kOp, count * (x_stride + width_stride + round_up(width, 16) + x_stride));
  STD_TORCH_CHECK(input.rows == ids.size(0), "hf_fastpath::fused_experts: x has ", input.rows,
                  " rows, expert_ids has ", ids.size(0));
  float* const x_by_pair = input.spare;
  float* const hidden = x_by_pair + count * x_stride;
  float* const rounded = hidden + count * width_stride;
  float* const outputs = rounded + count * width_stride;
  for (int64_t place = 0; place < count; ++place) {
    std::memcpy(x_by_pair + place * x_stride, input.data + pairs.row[place] * x_stride,
                x_stride * sizeof(float));
  }

  const auto kernel = use_avx2() ? linear_avx2 : linear_portable;
  const auto convert = use_avx2() ? convert_to_float_avx2 : convert_to_float_portable;
  const int64_t num_groups = static_cast<int64_t>(pairs.groups.size());
  const int64_t bytes = num_groups * width * hidden_size * element_size(dtype);  // of one of the three
  // Outputs of all groups one after the other, in tiles.
  const int64_t tiles = (width + kOutputGranule - 1) / kOutputGranule;
  const int64_t units = num_groups * tiles;
  const int64_t parts = std::min(part_count(2 * bytes, kBytesPerPart), units);
  for_each_part(parts, [&](int64_t part) {
    const int64_t begin = part_begin(units, parts, part), end = part_begin(units, parts, part + 1);
    for (int64_t g = begin / tiles; g * tiles < end; ++g) {
      const Group& group = pairs.groups[g];
      LinearArgs args = group_args(group, dtype, x_by_pair, x_stride, gate_up_weight, rounded, width);
      args.up_weight = at(args.weight, width * args.weight_stride, dtype);
      args.up_stride = args.weight_stride;
      args.activation = gate;
      const int64_t from = std::max<int64_t>(begin - g * tiles, 0), to = std::min(end - g * tiles, tiles);
      kernel(args, from * kOutputGranule, std::min(to * kOutputGranule, width));
    }
  });
  for (int64_t place = 0; place < count; ++place) {
    float* const row = hidden + place * width_stride;
    convert(dtype, at(rounded, place * width, dtype), row, width);
    std::fill(row + width, row + width_stride, 0.0f);
  }

  Tensor out = empty_like_with_sizes(x, sizes_of(x));
  void* const to = out.mutable_data_ptr();
  const float* const weight_of = weights.const_data_ptr<float>();
  const int64_t down_parts =
      std::min(part_count(bytes, kBytesPerPart), std::max<int64_t>(hidden_size / kOutputGranule, 1));
  for_each_part(down_parts, [&](int64_t part) {
    const int64_t begin = part_begin(hidden_size, down_parts, part, kOutputGranule);
    const int64_t end = part_begin(hidden_size, down_parts, part + 1, kOutputGranule);
    for (const Group& group : pairs.groups) {
      kernel(group_args(group, dtype, hidden, width_stride, down_weight, outputs, hidden_size), begin, end);
    }
    // A row's experts in the order of its choices, whatever other rows chose.
    for (int64_t row = 0; row < input.rows; ++row) {
      for (int64_t first = begin; first < end; first += kChunk) {
        const int64_t n = std::min(kChunk, end - first);
        float sums[kChunk] = {}, one[kChunk];
        for (int64_t pair = row * top_k; pair < (row + 1) * top_k; ++pair) {
          if (pairs.place[pair] < 0) continue;
          convert(dtype, at(outputs, pairs.place[pair] * hidden_size + first, dtype), one, n);
          for (int64_t i = 0; i < n; ++i) sums[i] += weight_of[pair] * one[i];
        }
        if (added) {
          convert(dtype, at(added->const_data_ptr(), row * hidden_size + first, dtype), one, n);
          for (int64_t i = 0; i < n; ++i) sums[i] += one[i];
        }
        with_storage(dtype, [&](auto* tag) {
          auto* values = static_cast<std::remove_pointer_t<decltype(tag)>*>(to) + row * hidden_size + first;
          for (int64_t i = 0; i < n; ++i) from_float(sums[i], values + i);
        });
      }
    }
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(hf_fastpath, CPU, m) { m.impl("fused_experts", TORCH_BOX(&fused_experts_cpu)); }

}  // namespace hf_fastpath
