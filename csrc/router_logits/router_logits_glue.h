// What the glue of router_logits does on every device. This header is torch-facing.
#pragma once

#include "common/torch_glue.h"
#include "router_logits/router_logits_params.h"

namespace hf_fastpath {

// The checked arguments and the output of a call; keeps alive what had to be copied.
class RouterLogitsCall {
 public:
  RouterLogitsCall(const Tensor& x, const Tensor& weight, bool programmatic_launch)
      : x_(hf_fastpath::contiguous(x)), weight_(rows_of(weight)), out(empty_out(x, weight)) {
    params.dtype = dtype_of(x, kOp), params.weight_dtype = dtype_of(weight, kOp);
    STD_TORCH_CHECK(params.weight_dtype == params.dtype || params.weight_dtype == DType::kFloat32,
                    "hf_fastpath::router_logits: weight has to have x's dtype or float32");
    STD_TORCH_CHECK(weight.size(1) == x.size(x.dim() - 1) && weight.size(1) >= 1,
                    "hf_fastpath::router_logits: weight does not match x's features, or there is none");
    params.inputs = weight.size(1), params.outputs = weight.size(0);
    params.rows = x.numel() / params.inputs;
    params.x = x_.const_data_ptr(), params.weight = weight_.const_data_ptr();
    params.weight_row_stride = weight_.stride(0);
    params.out = static_cast<float*>(out.mutable_data_ptr());
    params.programmatic_launch = programmatic_launch;
  }

 private:
  static constexpr const char* kOp = "router_logits";

  static Tensor rows_of(const Tensor& weight) {
    STD_TORCH_CHECK(weight.dim() == 2, "hf_fastpath::router_logits: weight has to have two dimensions");
    return dense_rows(weight);
  }
  static Tensor empty_out(const Tensor& x, const Tensor& weight) {
    STD_TORCH_CHECK(x.dim() >= 1, "hf_fastpath::router_logits: x has to have a dimension");
    std::vector<int64_t> sizes = sizes_of(x);
    sizes.back() = weight.size(0);
    return torch::stable::new_empty(x, sizes, ScalarType::Float);
  }

  Tensor x_, weight_;

 public:
  Tensor out;
  RouterLogitsParams params = {};
};

}  // namespace hf_fastpath
