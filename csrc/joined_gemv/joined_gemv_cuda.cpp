// torch.ops.hf_fastpath.joined_gemv on a GPU: see hf_fastpath/ops/joined_gemv.py for the contract. The gemv
// kernels over weights where the model keeps them, as for queries, keys and values.
#include "gemv/gemv_cuda_glue.h"

namespace hf_fastpath {
namespace {

Tensor joined_gemv(const Tensor& x, const std::vector<Tensor>& weights, int64_t norm,
                   const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias,
                   double norm_eps, bool programmatic_launch) {
  constexpr const char* kOp = "joined_gemv";
  STD_TORCH_CHECK(!weights.empty() && weights.size() <= kMaxGemvSegments,
                  "hf_fastpath::joined_gemv: ", weights.size(), " weights, expected 1 to ", kMaxGemvSegments);
  const DeviceGuard guard(x);
  const Tensor input = gemv_input(x);
  GemvParams p = gemv_params(input, kOp);
  p.programmatic_launch = programmatic_launch;
  const InputNorm input_norm(input, norm, norm_weight, norm_bias, norm_eps, kOp);
  for (const Tensor& weight : weights) add_segment(p, weight, std::nullopt, kOp);
  Tensor out = empty_like_with_sizes(input, sizes_with_last(input, p.n));
  p.out = out.data_ptr();
  input_norm.launch(p, input, current_stream(guard.device()));
  return out;
}

}  // namespace

HF_FASTPATH_KERNEL(CUDA, "joined_gemv", joined_gemv)

}  // namespace hf_fastpath
