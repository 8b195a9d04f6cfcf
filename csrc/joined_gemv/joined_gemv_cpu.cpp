// joined_gemv on the CPU: gemv's Linear kernel over several weights in one parallel region.
#include "common/callable_ops.h"
#include "common/composed_ops.h"
#include "gemv/side_by_side_cpu.h"

namespace hf_fastpath {
namespace {

Tensor joined_gemv(const Tensor& raw, const std::vector<Tensor>& weights, int64_t norm,
                   const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias,
                   double norm_eps, bool /*programmatic_launch*/) {
  const char* op = "joined_gemv";
  STD_TORCH_CHECK(!weights.empty() && weights.size() <= kMaxProjections,
                  "hf_fastpath::joined_gemv: ", weights.size(), " weights, expected 1 to ", kMaxProjections);
  const Tensor x = normed_cpu(raw, norm_of(norm, op), norm_weight, norm_bias, norm_eps);
  std::vector<Projection> projections;
  for (const Tensor& weight : weights) projections.push_back({weight, std::nullopt, "a weight", "a bias"});
  return side_by_side(x, projections, op);
}

}  // namespace

HF_FASTPATH_KERNEL(CPU, "joined_gemv", joined_gemv)

}  // namespace hf_fastpath
