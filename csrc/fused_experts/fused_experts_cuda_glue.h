// What fused_experts and routed_experts check and allocate alike on a GPU. This header is torch-facing.
#pragma once

#include <climits>
#include <vector>

#include "common/cuda_glue.h"
#include "fused_experts/fused_experts.h"
#include "fused_experts/fused_experts_glue.h"

namespace hf_fastpath {

// The checked arguments of the experts' products and the output; keeps alive what had to be copied. What
// chooses experts is left open.
class ExpertsOnGpu {
 public:
  ExpertsOnGpu(const char* op, const Tensor& x, int64_t choosing_rows, int64_t top_k,
               const Tensor& gate_up_weight, const Tensor& down_weight, const std::optional<Tensor>& residual,
               int64_t activation, bool programmatic_launch, const std::optional<Tensor>& gate_up_bias,
               const std::optional<Tensor>& down_bias, bool transposed, double alpha, double limit,
               bool concatenated)
      : transposed_(transposed) {
    STD_TORCH_CHECK(x.dim() >= 1 && x.numel() > 0 && gate_up_weight.numel() > 0, "hf_fastpath::", op,
                    ": x or a weight is empty");
    STD_TORCH_CHECK(down_weight.dim() == 3, "hf_fastpath::", op,
                    ": down_weight has to be [experts, hidden, intermediate]");
    const int64_t hidden_size = x.size(x.dim() - 1), rows = x.numel() / hidden_size,
                  width = down_weight.size(transposed ? 1 : 2), num_experts = down_weight.size(0);
    STD_TORCH_CHECK(rows <= kMaxExpertRows && rows == choosing_rows, "hf_fastpath::", op, ": x has ", rows,
                    " rows, expected ", choosing_rows, ", at most ", kMaxExpertRows);
    STD_TORCH_CHECK(top_k >= 1 && top_k <= kMaxTopK, "hf_fastpath::", op, ": top_k is ", top_k,
                    ", expected 1 to ", kMaxTopK);
    STD_TORCH_CHECK(hidden_size < INT_MAX && 2 * width < INT_MAX && num_experts < INT_MAX,
                    "hf_fastpath::", op, ": more than 2^31 features or experts");
    params.dtype = dtype_of(x, op);
    STD_TORCH_CHECK(transposed || !concatenated, "hf_fastpath::", op, ": concatenated goes with transposed");
    const ExpertGate gate = expert_gate(activation, transposed);
    check_stack(gate_up_weight, params.dtype, num_experts, gate.matrices() * width, hidden_size, transposed,
                "gate_up_weight");
    check_stack(down_weight, params.dtype, num_experts, hidden_size, width, transposed, "down_weight");
    check_stack_bias(gate_up_bias, params.dtype, num_experts, 2 * width, transposed, "gate_up_bias");
    check_stack_bias(down_bias, params.dtype, num_experts, hidden_size, transposed, "down_bias");
    params.gate_up = stack_of(gate_up_weight);
    params.down = stack_of(down_weight);
    params.activation = gate.activation;
    params.clamped = gate.clamped;
    params.up_row = gate.is_up ? 0 : static_cast<int>(width);
    params.concatenated = concatenated;
    params.alpha = static_cast<float>(alpha);
    params.limit = static_cast<float>(limit);
    const Tensor input = keep(x);
    if (gate_up_bias) params.gate_up_bias = keep(*gate_up_bias).data_ptr();
    if (down_bias) params.down_bias = keep(*down_bias).data_ptr();
    if (transposed) {
      kept_.push_back(torch::stable::new_empty(input, {rows, top_k, hidden_size}, ScalarType::Float));
      params.products = static_cast<float*>(kept_.back().data_ptr());
    }
    if (residual) {
      STD_TORCH_CHECK(dtype_of(*residual, op) == params.dtype && sizes_of(*residual) == sizes_of(x),
                      "hf_fastpath::", op, ": residual differs from x in dtype or shape");
      params.residual = keep(*residual).data_ptr();
    }
    kept_.push_back(empty_like_with_sizes(input, {rows, top_k, width}));
    params.hidden = kept_.back().data_ptr();
    out = empty_like_with_sizes(input, sizes_of(x));
    params.x = input.data_ptr();
    params.out = out.data_ptr();
    params.num_experts = num_experts;
    params.rows = static_cast<int>(rows);
    params.top_k = static_cast<int>(top_k);
    params.hidden_size = static_cast<int>(hidden_size);
    params.width = static_cast<int>(width);
    params.programmatic_launch = programmatic_launch;
  }

  // Lets a shared expert take places in front of the chosen ones, which takes_row has to have allowed.
  void share(const SharedExpert& shared) {
    params.shared = shared;
    kept_.push_back(
        empty_like_with_sizes(out, {params.rows, params.top_k + shared.places, int64_t(params.width)}));
    params.hidden = kept_.back().data_ptr();
  }

  // Contiguous, alive as long as this call.
  Tensor keep(const Tensor& tensor) {
    kept_.push_back(hf_fastpath::contiguous(tensor));
    return kept_.back();
  }

  Tensor launch(cudaStream_t stream) const {
    transposed_ ? launch_fused_experts_columns(params, stream) : launch_fused_experts(params, stream);
    return out;
  }

  FusedExpertsParams params = {};
  Tensor out;

 private:
  static ExpertStack stack_of(const Tensor& stack) {
    return {stack.data_ptr(), stack.stride(0), stack.stride(1)};
  }

  bool transposed_;
  std::vector<Tensor> kept_;
};

}  // namespace hf_fastpath
