// packed_gemv_swiglu on the CPU: packed_gemv of both projections, then their gated activation.
#include "common/callable_ops.h"
#include "common/composed_ops.h"

namespace hf_fastpath {

Tensor packed_gemv_swiglu_cpu(const Tensor& x, const Tensor& quants, const Tensor& scales,
                              const std::optional<Tensor>& zeros, double multiplier, int64_t format,
                              int64_t activation, int64_t norm, const std::optional<Tensor>& norm_weight,
                              const std::optional<Tensor>& norm_bias, double norm_eps,
                              bool programmatic_launch) {
  const int64_t features = quants.size(0) / 2;
  STD_TORCH_CHECK(quants.size(0) == 2 * features, "hf_fastpath::packed_gemv_swiglu: quants have ",
                  quants.size(0), " rows, expected as many of gate as of up");
  Tensor both = packed_gemv_cpu(x, quants, scales, zeros, multiplier, format, std::nullopt, std::nullopt,
                                number_of(Activation::kNone), norm, norm_weight, norm_bias, norm_eps,
                                programmatic_launch);
  const int64_t last = both.dim() - 1;
  return fused_swiglu_cpu(torch::stable::narrow(both, last, 0, features),
                          torch::stable::narrow(both, last, features, features), activation);
}

HF_FASTPATH_KERNEL(CPU, "packed_gemv_swiglu", packed_gemv_swiglu_cpu)

}  // namespace hf_fastpath
