// packed_qkv_rope_append on the CPU: packed_gemv of all projections, then rope_append.
#include "common/callable_ops.h"
#include "common/composed_ops.h"

namespace hf_fastpath {

Tensor packed_qkv_rope_append_cpu(const Tensor& x, const Tensor& quants, const Tensor& scales,
                                  const std::optional<Tensor>& zeros, double multiplier, int64_t format,
                                  const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                                  const Tensor& k_cache, const Tensor& v_cache, const Tensor& seq_lens,
                                  int64_t num_heads, const std::optional<Tensor>& kv_table, int64_t layer,
                                  int64_t norm, const std::optional<Tensor>& norm_weight,
                                  const std::optional<Tensor>& norm_bias, double norm_eps,
                                  bool programmatic_launch, const std::optional<Tensor>& k_scales,
                                  const std::optional<Tensor>& v_scales, bool neighbors) {
  STD_TORCH_CHECK(x.dim() == 3,
                  "hf_fastpath::packed_qkv_rope_append: x has to be [batch, query_len, hidden_size]");
  const Tensor qkv = packed_gemv_cpu(x, quants, scales, zeros, multiplier, format, std::nullopt, std::nullopt,
                                     number_of(Activation::kNone), norm, norm_weight, norm_bias, norm_eps,
                                     programmatic_launch);
  return rope_append_cpu(qkv, std::nullopt, cos, sin, k_cache, v_cache, seq_lens, num_heads, kv_table, layer,
                         k_scales, v_scales, std::nullopt, neighbors);
}

HF_FASTPATH_KERNEL(CPU, "packed_qkv_rope_append", packed_qkv_rope_append_cpu)

}  // namespace hf_fastpath
