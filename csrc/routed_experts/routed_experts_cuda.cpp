// torch.ops.hf_fastpath.routed_experts on a GPU: see hf_fastpath/ops/routed_experts.py for the contract.
#include "choose_experts/choose_experts_glue.h"
#include "common/composed_ops.h"
#include "fused_experts/fused_experts_cuda_glue.h"
#include "routed_experts/shared_expert_glue.h"

namespace hf_fastpath {

namespace {

constexpr const char* kOp = "routed_experts";

// Whether the experts' kernels can norm x by this weight.
bool fits_norm(const Tensor& x, const std::optional<Tensor>& weight) {
  return weight && weight->dim() == 1 && weight->size(0) == x.size(x.dim() - 1) &&
         dtype_of(*weight, kOp) == dtype_of(x, kOp) &&
         reinterpret_cast<uintptr_t>(weight->const_data_ptr()) % 16 == 0;
}

// The places that a shared expert takes among those of one row; 0 if the experts' kernels do not take it.
int places_of(const FusedExpertsParams& p, const SharedWeights& shared) {
  if (!shared.are_there() || p.up_row == 0 || shared.gate->size(0) % p.width != 0) return 0;
  const int64_t places = shared.gate->size(0) / p.width;
  return places + p.top_k <= kMaxTopK ? static_cast<int>(places) : 0;
}

}  // namespace

Tensor routed_experts_cuda(
    const Tensor& x, const Tensor& logits, const Tensor& gate_up_weight, const Tensor& down_weight,
    int64_t top_k, const std::optional<Tensor>& residual, bool normalized, bool rounded, int64_t activation,
    bool programmatic_launch, const std::optional<Tensor>& gate_up_bias,
    const std::optional<Tensor>& down_bias, bool transposed, double alpha, double limit, bool concatenated,
    const std::optional<int64_t>& first_expert, int64_t norm, const std::optional<Tensor>& norm_weight,
    const std::optional<Tensor>& norm_bias, double norm_eps, const std::optional<Tensor>& shared_gate_weight,
    const std::optional<Tensor>& shared_up_weight, const std::optional<Tensor>& shared_down_weight,
    const std::optional<Tensor>& shared_logits, int64_t scoring, const std::optional<Tensor>& correction_bias,
    int64_t num_groups, int64_t top_groups, int64_t group_tops, double factor, double sum_eps) {
  const DeviceGuard guard(x);
  const int64_t num_experts = check_scores(logits, down_weight, first_expert),
                rows = logits.numel() / num_experts;
  const RouterArguments router{normalized, rounded,    scoring, correction_bias, num_groups,
                               top_groups, group_tops, factor,  sum_eps};
  const int64_t most = check_router(router, num_experts, kOp);
  STD_TORCH_CHECK(top_k >= 1 && top_k <= most, "hf_fastpath::routed_experts: top_k is ", top_k,
                  ", expected 1 to ", most);
  const SharedWeights shared{shared_gate_weight, shared_up_weight, shared_down_weight, shared_logits};
  check_shared(shared, x, rows, kOp);
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
  const int places = is_row ? places_of(p, shared) : 0;
  if (places > 0) {
    call.share({shared.gate->data_ptr(), shared.up->data_ptr(), shared.down->data_ptr(),
                shared.gate->stride(0), shared.up->stride(0), shared.down->stride(0),
                shared.logits ? shared.logits->data_ptr() : nullptr, places});
  }
  const auto launched = [&] {
    const Tensor out = call.launch(stream);
    if (!shared.are_there() || places > 0) return out;
    return with_shared_cuda(out, shared, x, activation, kind, norm_weight, norm_bias, norm_eps,
                            programmatic_launch);
  };
  if ((dtype == p.dtype || dtype == DType::kFloat32) && is_row &&
      num_experts <= (router.is_plain() ? kMostRouted : kMostScored)) {
    p.logits = scores.data_ptr(), p.logits_dtype = dtype;
    p.router = router_params(router, num_experts, top_k);
    return launched();
  }
  const Tensor ids = torch::stable::new_empty(scores, {rows, top_k}, ScalarType::Long);
  const Tensor weights =
      chosen_experts_cuda(torch::stable::view(scores, {rows, num_experts}), ids, router, programmatic_launch);
  p.expert_ids = static_cast<const int64_t*>(ids.data_ptr());
  p.expert_weights = static_cast<const float*>(weights.data_ptr());
  return launched();
}

HF_FASTPATH_KERNEL(CUDA, "routed_experts", routed_experts_cuda)

}  // namespace hf_fastpath
