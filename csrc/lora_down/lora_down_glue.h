// What the glue of lora_down does on every device. This header is torch-facing.
#pragma once

#include "common/lora_glue.h"
#include "lora_down/lora_down_params.h"

namespace hf_fastpath {

// The checked arguments, but for the norm's, and the output of a call; keeps alive what had to be copied.
class LoraDownCall {
 public:
  static constexpr const char* kOp = "lora_down";

  LoraDownCall(const Tensor& x, const std::vector<Tensor>& weights, bool programmatic_launch,
               const std::optional<Tensor>& chosen, const std::vector<int64_t>& owners)
      : params(checked(x, weights)),
        x_(hf_fastpath::contiguous(x)),
        out(torch::stable::new_empty(x, sizes_with_last(x, params.matrices.ranks), ScalarType::Float)) {
    params.x = x_.const_data_ptr();
    params.out = static_cast<float*>(out.mutable_data_ptr());
    params.programmatic_launch = programmatic_launch;
    chosen_ = take_owners(params, chosen, owners, kOp);
  }

 private:
  static LoraDownParams checked(const Tensor& x, const std::vector<Tensor>& weights) {
    LoraDownParams p = {};
    p.dtype = dtype_of(x, kOp);
    p.rows = lora_rows(x, kOp, "x");
    p.inputs = static_cast<int>(x.size(-1));
    p.matrices = lora_matrices(weights, p.dtype, 0, kOp);
    for (int m = 0; m < p.matrices.count; ++m)
      STD_TORCH_CHECK(p.matrices.each[m].columns == p.inputs,
                      "hf_fastpath::lora_down: a weight does not match x's last dimension (", p.inputs, ")");
    return p;
  }

 public:
  LoraDownParams params;

 private:
  Tensor x_;
  std::optional<Tensor> chosen_;

 public:
  Tensor out;
};

}  // namespace hf_fastpath
