// What the glue of short_convolution does on every device. This header is torch-facing.
#pragma once

#include <optional>

#include "common/heads_glue.h"
#include "common/rows_glue.h"
#include "short_convolution/short_convolution_params.h"

namespace hf_fastpath {

// The checked arguments and the output of a call; keeps alive what had to be copied.
class ShortConvolutionCall {
 public:
  ShortConvolutionCall(const Tensor& x, const Tensor& conv_state, const Tensor& weight,
                       const std::optional<Tensor>& bias, int64_t activation,
                       const std::optional<Tensor>& input_gate, const std::optional<Tensor>& output_gate,
                       int64_t tokens)
      : x_(row_view(x)),
        weight_(hf_fastpath::contiguous(weight)),
        out(empty_like_with_sizes(x, sizes_of(x))) {
    constexpr const char* kOp = "short_convolution";
    const DType dtype = dtype_of(x, kOp);
    STD_TORCH_CHECK(
        x.dim() == 2 && weight.dim() == 2 && weight.size(0) == x.size(1) && weight.size(1) >= 1 &&
            weight.size(1) <= kMaxConvolutionWidth && dtype_of(weight, kOp) == dtype,
        "hf_fastpath::short_convolution: expected x [batch, channels] and weight [channels, 1 to ",
        kMaxConvolutionWidth, "] of one dtype");
    const int64_t batch = sequences_of(x.size(0), tokens, kOp), channels = x.size(1), width = weight.size(1);
    STD_TORCH_CHECK(conv_state.dim() == 3 && conv_state.size(0) == batch && conv_state.size(1) == channels &&
                        conv_state.size(2) == width && conv_state.is_contiguous() &&
                        dtype_of(conv_state, kOp) == dtype,
                    "hf_fastpath::short_convolution: conv_state has to be contiguous [", batch, ", ",
                    channels, ", ", width, "] of x's dtype");
    STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == channels && dtype_of(*bias, kOp) == dtype),
                    "hf_fastpath::short_convolution: bias has to be [", channels, "] of x's dtype");
    if (bias) bias_ = hf_fastpath::contiguous(*bias);
    params = {};
    params.dtype = dtype;
    params.x = x_.data, params.x_stride = x_.stride;
    params.state = conv_state.data_ptr();
    params.weight = weight_.const_data_ptr();
    params.bias = bias_ ? bias_->const_data_ptr() : nullptr;
    set_gate(x, input_gate, input_gate_, &params.input_gate, &params.input_gate_stride);
    set_gate(x, output_gate, output_gate_, &params.output_gate, &params.output_gate_stride);
    params.out = out.mutable_data_ptr();
    params.batch = batch, params.tokens = tokens, params.channels = channels, params.width = width;
    params.activation = activation_of(activation, kOp);
  }

 private:
  static void set_gate(const Tensor& x, const std::optional<Tensor>& gate, std::optional<RowView>& kept,
                       const void** data, int64_t* stride) {
    if (!gate) return;
    constexpr const char* kOp = "short_convolution";
    STD_TORCH_CHECK(sizes_of(*gate) == sizes_of(x) && dtype_of(*gate, kOp) == dtype_of(x, kOp),
                    "hf_fastpath::short_convolution: gates have to be of x's shape and dtype");
    kept = row_view(*gate);
    *data = kept->data, *stride = kept->stride;
  }

  RowView x_;
  Tensor weight_;
  std::optional<Tensor> bias_;
  std::optional<RowView> input_gate_, output_gate_;

 public:
  Tensor out;
  ShortConvolutionParams params;
};

}  // namespace hf_fastpath
