// torch.ops.hf_fastpath.fused_experts on a GPU: see hf_fastpath/ops/fused_experts.py for the contract.
#include <climits>

#include "common/cuda_glue.h"
#include "fused_experts/fused_experts.h"

namespace hf_fastpath {
namespace {

constexpr const char* kOp = "fused_experts";

ExpertStack expert_stack(const Tensor& stack, DType dtype, int64_t num_experts, int64_t features,
                         int64_t in_features, const char* name) {
  STD_TORCH_CHECK(dtype_of(stack, kOp) == dtype, "hf_fastpath::fused_experts: ", name,
                  " differs from x in dtype: cast one");
  STD_TORCH_CHECK(stack.dim() == 3 && stack.size(0) == num_experts && stack.size(1) == features &&
                      stack.size(2) == in_features,
                  "hf_fastpath::fused_experts: ", name, " does not match x and the other weight in shape");
  STD_TORCH_CHECK(stack.size(2) <= 1 || stack.stride(2) == 1, "hf_fastpath::fused_experts: ", name,
                  " has strided rows: make them contiguous");
  return {stack.data_ptr(), stack.stride(0), stack.stride(1)};
}

}  // namespace

Tensor fused_experts_cuda(const Tensor& x, const Tensor& expert_ids, const Tensor& expert_weights,
                          const Tensor& gate_up_weight, const Tensor& down_weight,
                          const std::optional<Tensor>& residual, const std::string& activation,
                          bool overlap) {
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
                width = down_weight.size(2), num_experts = down_weight.size(0), top_k = expert_ids.size(1);
  STD_TORCH_CHECK(rows <= kMaxExpertRows && rows == expert_ids.size(0), "hf_fastpath::fused_experts: x has ",
                  rows, " rows, expected those of expert_ids, at most ", kMaxExpertRows);
  STD_TORCH_CHECK(top_k >= 1 && top_k <= kMaxTopK, "hf_fastpath::fused_experts: top_k is ", top_k,
                  ", expected 1 to ", kMaxTopK);
  STD_TORCH_CHECK(hidden_size < INT_MAX && 2 * width < INT_MAX,
                  "hf_fastpath::fused_experts: more than 2^31 features");
  FusedExpertsParams p{};
  p.dtype = dtype_of(x, kOp);
  p.gate_up = expert_stack(gate_up_weight, p.dtype, num_experts, 2 * width, hidden_size, "gate_up_weight");
  p.down = expert_stack(down_weight, p.dtype, num_experts, hidden_size, width, "down_weight");
  p.activation = activation_of(activation, kOp);
  STD_TORCH_CHECK(p.activation != Activation::kNone && p.activation != Activation::kRelu,
                  "hf_fastpath::fused_experts: the activation is not that of a gate");
  const Tensor input = hf_fastpath::contiguous(x), ids = hf_fastpath::contiguous(expert_ids),
               weights = hf_fastpath::contiguous(expert_weights);
  std::optional<Tensor> added;
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
  p.hidden = hidden.data_ptr();
  p.out = out.data_ptr();
  p.num_experts = num_experts;
  p.rows = static_cast<int>(rows);
  p.top_k = static_cast<int>(top_k);
  p.hidden_size = static_cast<int>(hidden_size);
  p.width = static_cast<int>(width);
  p.overlap = overlap;
  launch_fused_experts(p, current_stream(guard.device()));
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(hf_fastpath, CUDA, m) { m.impl("fused_experts", TORCH_BOX(&fused_experts_cuda)); }

}  // namespace hf_fastpath
