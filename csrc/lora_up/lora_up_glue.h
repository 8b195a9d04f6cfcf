// What the glue of lora_up does on every device. This header is torch-facing.
#pragma once

#include "common/lora_glue.h"
#include "lora_up/lora_up_params.h"

namespace hf_fastpath {

// The checked arguments and the output of a call; keeps alive what had to be copied.
class LoraUpCall {
 public:
  static constexpr const char* kOp = "lora_up";

  LoraUpCall(const Tensor& base, const Tensor& hidden, const std::vector<Tensor>& weights,
             const std::vector<double>& scales, const std::vector<int64_t>& firsts,
             const std::optional<Tensor>& residual, int64_t activation, bool gated, bool programmatic_launch,
             const std::optional<Tensor>& chosen, const std::vector<int64_t>& owners)
      : params(checked(base, weights, scales, firsts, gated)),
        base_(hf_fastpath::contiguous(base)),
        hidden_(hf_fastpath::contiguous(hidden)),
        out(empty_like_with_sizes(base, sizes_with_last(base, params.outputs))) {
    params.activation = activation_of(activation, kOp);
    STD_TORCH_CHECK(hidden.scalar_type() == ScalarType::Float && hidden.dim() == base.dim() &&
                        sizes_of(hidden) == sizes_with_last(base, params.matrices.ranks),
                    "hf_fastpath::lora_up: hidden has to be float32 [rows of base, ", params.matrices.ranks,
                    "]");
    if (residual) {
      STD_TORCH_CHECK(
          !gated && dtype_of(*residual, kOp) == params.dtype && sizes_of(*residual) == sizes_of(out),
          "hf_fastpath::lora_up: residual has to be like the result, which is not gated");
      residual_ = hf_fastpath::contiguous(*residual);
      params.residual = residual_->const_data_ptr();
    }
    chosen_ = take_owners(params, chosen, owners, kOp);
    params.base = base_.const_data_ptr();
    params.hidden = static_cast<const float*>(hidden_.const_data_ptr());
    params.out = out.mutable_data_ptr();
    params.programmatic_launch = programmatic_launch;
  }

 private:
  static LoraUpParams checked(const Tensor& base, const std::vector<Tensor>& weights,
                              const std::vector<double>& scales, const std::vector<int64_t>& firsts,
                              bool gated) {
    LoraUpParams p = {};
    p.dtype = dtype_of(base, kOp);
    p.rows = lora_rows(base, kOp, "base");
    p.features = static_cast<int>(base.size(-1));
    STD_TORCH_CHECK(!gated || p.features % 2 == 0,
                    "hf_fastpath::lora_up: gated takes an even number of features");
    p.gated = gated;
    p.outputs = gated ? p.features / 2 : p.features;
    p.matrices = lora_matrices(weights, p.dtype, 1, kOp);
    STD_TORCH_CHECK(scales.size() == weights.size() && firsts.size() == weights.size(),
                    "hf_fastpath::lora_up: ", weights.size(), " weights, ", scales.size(), " scales and ",
                    firsts.size(), " firsts");
    for (int m = 0; m < p.matrices.count; ++m) {
      STD_TORCH_CHECK(firsts[m] >= 0 && firsts[m] <= p.features - p.matrices.each[m].rows,
                      "hf_fastpath::lora_up: a weight of ", p.matrices.each[m].rows,
                      " features reaches beyond base's ", p.features, " from feature ", firsts[m], " on");
      p.scale[m] = static_cast<float>(scales[m]);
      p.first_feature[m] = static_cast<int>(firsts[m]);
    }
    return p;
  }

 public:
  LoraUpParams params;

 private:
  Tensor base_, hidden_;
  std::optional<Tensor> residual_, chosen_;

 public:
  Tensor out;
};

}  // namespace hf_fastpath
