// What the glue of gated_rms_norm does on every device. This header is torch-facing.
#pragma once

#include "common/rows_glue.h"
#include "gated_rms_norm/gated_rms_norm_params.h"

namespace hf_fastpath {

// The checked arguments and the output of a call; keeps alive what had to be copied.
class GatedRmsNormCall {
 public:
  GatedRmsNormCall(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps, int64_t groups,
                   bool gate_first, int64_t activation, bool programmatic_launch)
      : x_(row_view(x)),
        gate_(row_view(gate)),
        weight_(hf_fastpath::contiguous(weight)),
        out(empty_like_with_sizes(x, sizes_of(x))) {
    constexpr const char* kOp = "gated_rms_norm";
    const DType dtype = dtype_of(x, kOp);
    const int64_t hidden_size = x_.columns;
    STD_TORCH_CHECK(x.dim() >= 1 && sizes_of(gate) == sizes_of(x) && dtype_of(gate, kOp) == dtype,
                    "hf_fastpath::gated_rms_norm: gate has to be of x's shape and dtype");
    STD_TORCH_CHECK(weight.dim() == 1 && weight.size(0) == hidden_size && dtype_of(weight, kOp) == dtype,
                    "hf_fastpath::gated_rms_norm: weight does not match x's last dimension and dtype");
    STD_TORCH_CHECK(groups >= 1 && hidden_size % groups == 0, "hf_fastpath::gated_rms_norm: groups is ",
                    groups, ", expected a divisor of hidden_size ", hidden_size);
    params = {dtype,
              x_.data,
              x_.stride,
              gate_.data,
              gate_.stride,
              weight_.const_data_ptr(),
              out.mutable_data_ptr(),
              x_.rows,
              hidden_size,
              groups,
              static_cast<float>(eps),
              gate_first,
              choice_of(activation, GateActivation::kSigmoid, kOp, "activation"),
              programmatic_launch};
  }

 private:
  RowView x_, gate_;
  Tensor weight_;

 public:
  Tensor out;
  GatedRmsNormParams params;
};

}  // namespace hf_fastpath
