// What the glue of head_products does on every device. This header is torch-facing.
#pragma once

#include "common/heads_glue.h"
#include "head_products/head_products_params.h"

namespace hf_fastpath {

// The checked arguments and the output of a call; keeps alive what had to be copied.
class HeadProductsCall {
 public:
  HeadProductsCall(const Tensor& x, const Tensor& weight, bool transposed, bool programmatic_launch)
      : call_(kOp, dtype_of(x, kOp)),
        weight_(rows_of(weight)),
        out(empty_like_with_sizes(x, out_sizes(x, weight, transposed))) {
    const int64_t batch = params.batch = x.size(0), heads = params.heads = x.size(1);
    const int64_t inputs = params.inputs = x.size(2), outputs = params.outputs = out.size(2);
    params.dtype = dtype_of(x, kOp);
    STD_TORCH_CHECK(
        dtype_of(weight, kOp) == params.dtype &&
            has_sizes(weight, {heads, transposed ? inputs : outputs, transposed ? outputs : inputs}),
        "hf_fastpath::head_products: weight does not match x's heads, inputs and dtype");
    params.x = call_.heads(x, "x", {batch, heads, inputs});
    params.weight = weight_.const_data_ptr();
    params.weight_head_stride = weight_.stride(0), params.weight_row_stride = weight_.stride(1);
    params.out = out.mutable_data_ptr();
    params.transposed = transposed, params.programmatic_launch = programmatic_launch;
  }

 private:
  static constexpr const char* kOp = "head_products";

  static Tensor rows_of(const Tensor& weight) {
    STD_TORCH_CHECK(weight.dim() == 3, "hf_fastpath::head_products: weight has to have three dimensions");
    return dense_rows(weight);
  }
  static std::vector<int64_t> out_sizes(const Tensor& x, const Tensor& weight, bool transposed) {
    STD_TORCH_CHECK(x.dim() == 3 && x.size(2) >= 1 && x.size(2) <= kMaxHeadInputs,
                    "hf_fastpath::head_products: expected x [batch, heads, 1 to ", kMaxHeadInputs, "]");
    return {x.size(0), x.size(1), weight.size(transposed ? 2 : 1)};
  }

  HeadsCall call_;
  Tensor weight_;

 public:
  Tensor out;
  HeadProductsParams params = {};
};

}  // namespace hf_fastpath
