// qkv_rope_append on the CPU: three projections of gemv's Linear kernel in one parallel region, or the one
// that holds them all, then rope_append.
#include "common/callable_ops.h"
#include "common/composed_ops.h"
#include "gemv/side_by_side_cpu.h"

namespace hf_fastpath {
Tensor qkv_rope_append_cpu(const Tensor& raw, const Tensor& q_weight, const std::optional<Tensor>& k_weight,
                           const std::optional<Tensor>& v_weight, const std::optional<Tensor>& q_bias,
                           const std::optional<Tensor>& k_bias, const std::optional<Tensor>& v_bias,
                           bool transposed, const std::optional<Tensor>& cos,
                           const std::optional<Tensor>& sin, const Tensor& k_cache, const Tensor& v_cache,
                           const Tensor& seq_lens, int64_t num_heads, const std::optional<Tensor>& kv_table,
                           int64_t layer, int64_t norm, const std::optional<Tensor>& norm_weight,
                           const std::optional<Tensor>& norm_bias, double norm_eps,
                           bool /*programmatic_launch*/, const std::optional<Tensor>& k_scales,
                           const std::optional<Tensor>& v_scales, const std::optional<Tensor>& block_table,
                           bool neighbors, const std::optional<Tensor>& q_norm_weight,
                           const std::optional<Tensor>& k_norm_weight, double head_norm_eps,
                           double head_norm_offset) {
  const char* op = "qkv_rope_append";
  check_projections(raw, k_weight, v_weight, k_bias, v_bias, transposed);
  const auto append = [&](const Tensor& qkv) {
    return rope_append_cpu(qkv, std::nullopt, cos, sin, k_cache, v_cache, seq_lens, num_heads, kv_table,
                           layer, k_scales, v_scales, block_table, neighbors, q_norm_weight, k_norm_weight,
                           head_norm_eps, head_norm_offset);
  };
  if (!k_weight) {
    return append(gemv_cpu(raw, q_weight, q_bias, std::nullopt, number_of(Activation::kNone), transposed,
                           norm, norm_weight, norm_bias, norm_eps, false, std::nullopt));
  }
  const Tensor x = normed_cpu(raw, norm_of(norm, op), norm_weight, norm_bias, norm_eps);
  const Tensor qkv = side_by_side(x,
                                  {{q_weight, q_bias, "q_weight", "q_bias"},
                                   {*k_weight, k_bias, "k_weight", "k_bias"},
                                   {*v_weight, v_bias, "v_weight", "v_bias"}},
                                  op);
  return append(qkv);
}

HF_FASTPATH_KERNEL(CPU, "qkv_rope_append", qkv_rope_append_cpu)

}  // namespace hf_fastpath
