// torch.ops.hf_fastpath.fused_experts on a GPU: see hf_fastpath/ops/fused_experts.py for the contract.
#include <climits>

#include "common/cuda_glue.h"
#include "fused_experts/fused_experts.h"
#include "fused_experts/fused_experts_glue.h"

namespace hf_fastpath {
namespace {

constexpr const char* kOp = "fused_experts";

ExpertStack expert_stack(const Tensor& stack) { return {stack.data_ptr(), stack.stride(0), stack.stride(1)}; }

}  // namespace

Tensor fused_experts_cuda(const Tensor& x, const Tensor& expert_ids, const Tensor& expert_weights,
                          const Tensor& gate_up_weight, const Tensor& down_weight,
                          const std::optional<Tensor>& residual, int64_t activation, bool programmatic_launch,
                          const std::optional<Tensor>& gate_up_bias, const std::optional<Tensor>& down_bias,
                          bool transposed, double alpha, double limit, bool concatenated) {
  const DeviceGuard guard(x);
  STD_TORCH_CHECK(x.dim() >= 1 && x.numel() > 0 && gate_up_weight.numel() > 0,
                  "hf_fastpath::fused_experts: x or a weight is empty");
  STD_TORCH_CHECK(expert_ids.scalar_type() == ScalarType::Long && expert_ids.dim() == 2,
                  "hf_fastpath::fused_experts: expert_ids has to be int64 [rows, top_k]");
  STD_TORCH_CHECK(
      expert_weights.scalar_type() == ScalarType::Float && sizes_of(expert_weights) == sizes_of(expert_ids),
      "hf_fastpath::fused_experts: expert_weights has to be float32 of expert_ids' shape");
  STD_TORCH_CHECK(down_weight.dim() == 3,
                  "hf_fastpath::fused_experts: down_weight has to be [experts, hidden, intermediate]");
  const int64_t hidden_size = x.size(x.dim() - 1), rows = x.numel() / hidden_size,
                width = down_weight.size(transposed ? 1 : 2), num_experts = down_weight.size(0),
                top_k = expert_ids.size(1);
  STD_TORCH_CHECK(rows <= kMaxExpertRows && rows == expert_ids.size(0), "hf_fastpath::fused_experts: x has ",
                  rows, " rows, expected those of expert_ids, at most ", kMaxExpertRows);
  STD_TORCH_CHECK(top_k >= 1 && top_k <= kMaxTopK, "hf_fastpath::fused_experts: top_k is ", top_k,
                  ", expected 1 to ", kMaxTopK);
  STD_TORCH_CHECK(hidden_size < INT_MAX && 2 * width < INT_MAX,
                  "hf_fastpath::fused_experts: more than 2^31 features");
  FusedExpertsParams p{};
  p.dtype = dtype_of(x, kOp);
  STD_TORCH_CHECK(transposed || !concatenated,
                  "hf_fastpath::fused_experts: concatenated goes with transposed");
  const ExpertGate gate = expert_gate(activation, transposed);
  check_stack(gate_up_weight, p.dtype, num_experts, gate.matrices() * width, hidden_size, transposed,
              "gate_up_weight");
  check_stack(down_weight, p.dtype, num_experts, hidden_size, width, transposed, "down_weight");
  check_stack_bias(gate_up_bias, p.dtype, num_experts, 2 * width, transposed, "gate_up_bias");
  check_stack_bias(down_bias, p.dtype, num_experts, hidden_size, transposed, "down_bias");
  p.gate_up = expert_stack(gate_up_weight);
  p.down = expert_stack(down_weight);
  p.activation = gate.activation;
  p.clamped = gate.clamped;
  p.up_row = gate.is_up ? 0 : static_cast<int>(width);
  p.concatenated = concatenated;
  p.alpha = static_cast<float>(alpha);
  p.limit = static_cast<float>(limit);
  const Tensor input = hf_fastpath::contiguous(x), ids = hf_fastpath::contiguous(expert_ids),
               weights = hf_fastpath::contiguous(expert_weights);
  std::optional<Tensor> added, gate_up_addend, down_addend, products;
  if (gate_up_bias) gate_up_addend = hf_fastpath::contiguous(*gate_up_bias);
  if (down_bias) down_addend = hf_fastpath::contiguous(*down_bias);
  if (transposed) products = torch::stable::new_empty(input, {rows, top_k, hidden_size}, ScalarType::Float);
  if (residual) {
    STD_TORCH_CHECK(dtype_of(*residual, kOp) == p.dtype && sizes_of(*residual) == sizes_of(x),
                    "hf_fastpath::fused_experts: residual differs from x in dtype or shape");
    added = hf_fastpath::contiguous(*residual);
  }
  Tensor hidden = empty_like_with_sizes(input, {rows, top_k, width});
  Tensor out = empty_like_with_sizes(input, sizes_of(x));
  p.x = input.data_ptr();
  p.expert_ids = static_cast<const int64_t*>(ids.data_ptr());
  p.expert_weights = static_cast<const float*>(weights.data_ptr());
  p.residual = data_or_null(added);
  p.gate_up_bias = data_or_null(gate_up_addend);
  p.down_bias = data_or_null(down_addend);
  p.hidden = hidden.data_ptr();
  p.products = transposed ? static_cast<float*>(products->data_ptr()) : nullptr;
  p.out = out.data_ptr();
  p.num_experts = num_experts;
  p.rows = static_cast<int>(rows);
  p.top_k = static_cast<int>(top_k);
  p.hidden_size = static_cast<int>(hidden_size);
  p.width = static_cast<int>(width);
  p.programmatic_launch = programmatic_launch;
  const cudaStream_t stream = current_stream(guard.device());
  transposed ? launch_fused_experts_columns(p, stream) : launch_fused_experts(p, stream);
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(hf_fastpath, CUDA, m) { m.impl("fused_experts", TORCH_BOX(&fused_experts_cuda)); }

}  // namespace hf_fastpath
