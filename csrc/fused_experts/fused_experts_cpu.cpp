// fused_experts on the CPU: gemv's Linear kernels over the rows that chose each expert.
#include <cstring>

#include "common/cpu_math.h"
#include "fused_experts/fused_experts_glue_cpu.h"

namespace hf_fastpath {
namespace {

constexpr const char* kOp = "fused_experts";

// Weights stored [features, in_features]: behind x by pair lie the activations as they are rounded, and in
// float32, and the experts' outputs. The rounded ones take half of what is reserved where they are of 16
// bits.
int64_t experts_spare(int64_t pairs, int64_t hidden_size, int64_t width) {
  return pairs * (2 * round_up(width, 16) + round_up(hidden_size, 16));
}

void run_experts(const ExpertsCall& call) {
  const DType dtype = call.dtype;
  const int64_t hidden_size = call.hidden_size, width = call.width;
  const int64_t count = call.pairs.count(), width_stride = round_up(width, 16);
  float* const hidden = call.spare;
  float* const rounded = hidden + count * width_stride;
  float* const outputs = rounded + count * width_stride;
  Linear* const kernel = float_linear_kernel(dtype);
  const auto convert = use_avx2() ? convert_to_float_avx2 : convert_to_float_portable;
  // The arguments for a group's rows, whose outputs are rows of `to` that lie side by side.
  const auto group_args = [&](const ExpertPairs::Group& group, const float* x, int64_t x_stride,
                              const Tensor& stack, void* to, int64_t out_features) {
    LinearArgs args = expert_args(call, group, x, x_stride, stack);
    args.in_features = stack.size(2);
    args.out_features = args.out_stride = out_features;
    args.out = at(to, group.begin * out_features, dtype);
    return args;
  };

  const int64_t num_groups = static_cast<int64_t>(call.pairs.groups.size());
  const int64_t bytes = num_groups * width * hidden_size * element_size(dtype);  // of one of the three
  // Outputs of all groups one after the other, in tiles.
  const int64_t tiles = (width + kOutputGranule - 1) / kOutputGranule;
  const int64_t units = num_groups * tiles;
  for_each_range(units, 2 * bytes, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin / tiles; g * tiles < end; ++g) {
      LinearArgs args = group_args(call.pairs.groups[g], call.x, call.x_stride, call.gate_up, rounded, width);
      args.up_weight = call.gate.is_up ? args.weight : at(args.weight, width * args.weight_stride, dtype);
      args.up_stride = args.weight_stride;
      args.activation = call.gate.activation;
      const int64_t from = std::max<int64_t>(begin - g * tiles, 0), to = std::min(end - g * tiles, tiles);
      kernel(args, from * kOutputGranule, std::min(to * kOutputGranule, width));
    }
  });
  for (int64_t place = 0; place < count; ++place) {
    float* const row = hidden + place * width_stride;
    convert(dtype, at(rounded, place * width, dtype), row, width);
    std::fill(row + width, row + width_stride, 0.0f);
  }

  const int64_t down_parts =
      std::min(part_count(bytes, kBytesPerPart), std::max<int64_t>(hidden_size / kOutputGranule, 1));
  for_each_part(down_parts, [&](int64_t part) {
    const int64_t begin = part_begin(hidden_size, down_parts, part, kOutputGranule);
    const int64_t end = part_begin(hidden_size, down_parts, part + 1, kOutputGranule);
    for (const ExpertPairs::Group& group : call.pairs.groups) {
      kernel(group_args(group, hidden, width_stride, call.down, outputs, hidden_size), begin, end);
    }
    add_choices(call, begin, end, [&](int64_t place, int64_t first, int64_t n, float* to) {
      convert(dtype, at(outputs, place * hidden_size + first, dtype), to, n);
    });
  });
}

}  // namespace

Tensor fused_experts_cpu(const Tensor& x, const Tensor& expert_ids, const Tensor& expert_weights,
                         const Tensor& gate_up_weight, const Tensor& down_weight,
                         const std::optional<Tensor>& residual, int64_t activation,
                         bool /*programmatic_launch*/, const std::optional<Tensor>& gate_up_bias,
                         const std::optional<Tensor>& down_bias, bool transposed, double alpha, double limit,
                         bool concatenated) {
  STD_TORCH_CHECK(expert_ids.scalar_type() == ScalarType::Long && expert_ids.dim() == 2,
                  "hf_fastpath::fused_experts: expert_ids has to be int64 [rows, top_k]");
  STD_TORCH_CHECK(
      expert_weights.scalar_type() == ScalarType::Float && sizes_of(expert_weights) == sizes_of(expert_ids),
      "hf_fastpath::fused_experts: expert_weights has to be float32 of expert_ids' shape");
  STD_TORCH_CHECK(down_weight.dim() == 3,
                  "hf_fastpath::fused_experts: down_weight has to be [experts, hidden, intermediate]");
  STD_TORCH_CHECK(x.dim() >= 1, "hf_fastpath::fused_experts: x has no dimensions");
  const int64_t hidden_size = x.size(x.dim() - 1), width = down_weight.size(transposed ? 1 : 2),
                num_experts = down_weight.size(0), top_k = expert_ids.size(1);
  const DType dtype = dtype_of(x, kOp);
  STD_TORCH_CHECK(transposed || !concatenated,
                  "hf_fastpath::fused_experts: concatenated goes with transposed");
  const ExpertGate gate = expert_gate(activation, transposed);
  check_stack(gate_up_weight, dtype, num_experts, gate.matrices() * width, hidden_size, transposed,
              "gate_up_weight");
  check_stack(down_weight, dtype, num_experts, hidden_size, width, transposed, "down_weight");
  check_stack_bias(gate_up_bias, dtype, num_experts, 2 * width, transposed, "gate_up_bias");
  check_stack_bias(down_bias, dtype, num_experts, hidden_size, transposed, "down_bias");
  if (residual.has_value()) {
    STD_TORCH_CHECK(dtype_of(*residual, kOp) == dtype && sizes_of(*residual) == sizes_of(x),
                    "hf_fastpath::fused_experts: residual differs from x in dtype or shape");
  }
  const Tensor ids = hf_fastpath::contiguous(expert_ids), weights = hf_fastpath::contiguous(expert_weights);
  const ExpertPairs pairs =
      sorted_pairs(ids.const_data_ptr<int64_t>(), ids.size(0), top_k, num_experts, kMaxRows);

  const int64_t count = pairs.count(), x_stride = row_stride(hidden_size);
  const int64_t spare = transposed ? experts_spare_columns(count, hidden_size, width)
                                   : experts_spare(count, hidden_size, width);
  const Activations input = load_activations(x, kOp, false, count * x_stride + spare);
  STD_TORCH_CHECK(input.rows == ids.size(0), "hf_fastpath::fused_experts: x has ", input.rows,
                  " rows, expert_ids has ", ids.size(0));
  float* const x_by_pair = input.spare;
  for (int64_t place = 0; place < count; ++place) {
    std::memcpy(x_by_pair + place * x_stride, input.data + pairs.row[place] * x_stride,
                x_stride * sizeof(float));
  }

  Tensor out = empty_like_with_sizes(x, sizes_of(x));
  std::optional<Tensor> residual_holder, gate_up_holder, down_holder;
  const ExpertsCall call{dtype,
                         input.rows,
                         top_k,
                         hidden_size,
                         width,
                         gate_up_weight,
                         down_weight,
                         gate,
                         optional_data(gate_up_bias, gate_up_holder),
                         optional_data(down_bias, down_holder),
                         static_cast<float>(alpha),
                         static_cast<float>(limit),
                         concatenated,
                         weights.const_data_ptr<float>(),
                         optional_data(residual, residual_holder),
                         out.mutable_data_ptr(),
                         pairs,
                         x_by_pair,
                         x_stride,
                         x_by_pair + count * x_stride};
  transposed ? run_experts_columns(call) : run_experts(call);
  return out;
}

HF_FASTPATH_KERNEL(CPU, "fused_experts", fused_experts_cpu)

}  // namespace hf_fastpath
