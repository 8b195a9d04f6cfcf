// torch.ops.hf_fastpath.routed_experts on a GPU: see hf_fastpath/ops/routed_experts.py for the contract.
#include "common/composed_ops.h"
#include "fused_experts/fused_experts_cuda_glue.h"
#include "topk_softmax/topk_softmax_glue.h"

namespace hf_fastpath {

Tensor topk_softmax_cuda(const Tensor& logits, const Tensor& expert_ids, bool normalized, bool rounded,
                         bool programmatic_launch);

namespace {

constexpr const char* kOp = "routed_experts";

// Whether the experts' kernels can norm x by this weight.
bool fits_norm(const Tensor& x, const std::optional<Tensor>& weight) {
  return weight && weight->dim() == 1 && weight->size(0) == x.size(x.dim() - 1) &&
         dtype_of(*weight, kOp) == dtype_of(x, kOp) &&
         reinterpret_cast<uintptr_t>(weight->const_data_ptr()) % 16 == 0;
}

}  // namespace

Tensor routed_experts_cuda(const Tensor& x, const Tensor& logits, const Tensor& gate_up_weight,
                           const Tensor& down_weight, int64_t top_k, const std::optional<Tensor>& residual,
                           bool normalized, bool rounded, int64_t activation, bool programmatic_launch,
                           const std::optional<Tensor>& gate_up_bias, const std::optional<Tensor>& down_bias,
                           bool transposed, double alpha, double limit, bool concatenated,
                           const std::optional<int64_t>& first_expert, int64_t norm,
                           const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias,
                           double norm_eps) {
  const DeviceGuard guard(x);
  const int64_t num_experts = check_scores(logits, down_weight, first_expert),
                rows = logits.numel() / num_experts;
  ExpertsOnGpu call(kOp, x, rows, top_k, gate_up_weight, down_weight, residual, activation,
                    programmatic_launch, gate_up_bias, down_bias, transposed, alpha, limit, concatenated);
  FusedExpertsParams& p = call.params;
  p.first_expert = first_expert.value_or(0);
  const cudaStream_t stream = current_stream(guard.device());
  const Tensor scores = call.keep(logits);
  const DType dtype = dtype_of(logits, kOp);
  const NormKind kind = norm_of(norm, kOp);
  const bool is_row = !transposed && takes_row(p);
  if (is_rms(kind) && is_row && fits_norm(x, norm_weight)) {
    p.norm_weight = call.keep(*norm_weight).data_ptr();
    p.norm_eps = static_cast<float>(norm_eps), p.norm_offset = static_cast<float>(weight_offset(kind));
  } else if (kind != NormKind::kNone) {
    p.x = call.keep(normed_cuda(x, kind, norm_weight, norm_bias, norm_eps)).data_ptr();
  }
  if ((dtype == p.dtype || dtype == DType::kFloat32) && num_experts <= kMostRouted && is_row) {
    p.logits = scores.data_ptr(), p.logits_dtype = dtype;
    p.num_scored = static_cast<int>(num_experts);
    p.normalized = normalized, p.rounded = rounded;
    return call.launch(stream);
  }
  const Tensor ids = torch::stable::new_empty(scores, {rows, top_k}, ScalarType::Long);
  const Tensor weights = topk_softmax_cuda(torch::stable::view(scores, {rows, num_experts}), ids, normalized,
                                           rounded, programmatic_launch);
  p.expert_ids = static_cast<const int64_t*>(ids.data_ptr());
  p.expert_weights = static_cast<const float*>(weights.data_ptr());
  return call.launch(stream);
}

STABLE_TORCH_LIBRARY_IMPL(hf_fastpath, CUDA, m) { m.impl("routed_experts", TORCH_BOX(&routed_experts_cuda)); }

}  // namespace hf_fastpath
