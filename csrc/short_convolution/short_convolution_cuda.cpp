// torch.ops.hf_fastpath.short_convolution on a GPU: see hf_fastpath/ops/short_convolution.py for the
// contract.
#include "common/cuda_glue.h"
#include "short_convolution/short_convolution.h"
#include "short_convolution/short_convolution_glue.h"

namespace hf_fastpath {

Tensor short_convolution_cuda(const Tensor& x, const Tensor& conv_state, const Tensor& weight,
                              const std::optional<Tensor>& bias, int64_t activation,
                              const std::optional<Tensor>& input_gate,
                              const std::optional<Tensor>& output_gate, int64_t tokens) {
  const DeviceGuard guard(x);
  const ShortConvolutionCall call(x, conv_state, weight, bias, activation, input_gate, output_gate, tokens);
  if (call.out.numel() > 0) launch_short_convolution(call.params, current_stream(guard.device()));
  return call.out;
}

HF_FASTPATH_KERNEL(CUDA, "short_convolution", short_convolution_cuda)

}  // namespace hf_fastpath
