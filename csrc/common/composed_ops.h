// Ops that other ops consist of where no kernel does all at once, as C++ functions. This header is
// torch-facing.
#pragma once

#include <optional>

#include "common/torch_glue.h"

namespace hf_fastpath {

// Refuses what is to be added to x's norm and is not like x.
inline void check_residual(const Tensor& x, const std::optional<Tensor>& residual, const char* op) {
  STD_TORCH_CHECK(
      !residual || (sizes_of(*residual) == sizes_of(x) && dtype_of(*residual, op) == dtype_of(x, op)),
      "hf_fastpath::", op, ": residual has to be of x's shape and dtype");
}

// Refuses a factor of x's norm that is not one number of x's dtype.
inline void check_factor(const Tensor& x, const std::optional<Tensor>& factor, const char* op) {
  STD_TORCH_CHECK(!factor || (factor->numel() == 1 && dtype_of(*factor, op) == dtype_of(x, op)),
                  "hf_fastpath::", op, ": factor has to be one number of x's dtype");
}

// Refuses what add_rms_norm cannot add and norm.
inline void check_added(const Tensor& x, const Tensor& residual, const Tensor& weight, const char* op) {
  STD_TORCH_CHECK(x.dim() >= 1 && weight.dim() == 1 && weight.size(0) == x.size(x.dim() - 1) &&
                      dtype_of(weight, op) == dtype_of(x, op),
                  "hf_fastpath::", op, ": weight does not match x's last dimension and dtype");
  STD_TORCH_CHECK(sizes_of(residual) == sizes_of(x) && dtype_of(residual, op) == DType::kFloat32,
                  "hf_fastpath::", op, ": residual has to be float32, of x's shape");
}

// Refuses weights of norms over queries and keys that do not fit. Returns whether a norm is of all heads at
// once, not of each by itself.
inline bool check_head_norms(const std::optional<Tensor>& q_norm_weight,
                             const std::optional<Tensor>& k_norm_weight, DType dtype, int64_t num_heads,
                             int64_t num_kv_heads, int64_t head_dim, const char* op) {
  STD_TORCH_CHECK(q_norm_weight.has_value() == k_norm_weight.has_value(), "hf_fastpath::", op,
                  ": q_norm_weight and k_norm_weight go together");
  if (!q_norm_weight) return false;
  const int64_t q = q_norm_weight->numel(), k = k_norm_weight->numel();
  const bool each = q == head_dim && k == head_dim;
  STD_TORCH_CHECK(each || (q == num_heads * head_dim && k == num_kv_heads * head_dim), "hf_fastpath::", op,
                  ": q_norm_weight and k_norm_weight have ", q, " and ", k, " elements, expected ", head_dim,
                  " both, or ", num_heads * head_dim, " and ", num_kv_heads * head_dim);
  STD_TORCH_CHECK(dtype_of(*q_norm_weight, op) == dtype && dtype_of(*k_norm_weight, op) == dtype,
                  "hf_fastpath::", op, ": q_norm_weight and k_norm_weight have to be of qkv's dtype");
  return !each;
}

// Refuses what decode_attention cannot do to scores.
inline void check_score_changes(const char* op, const Tensor& q, const std::optional<Tensor>& sinks,
                                double softcap, const std::optional<Tensor>& slopes,
                                const std::optional<Tensor>& biases) {
  const int64_t num_heads = q.size(2);
  STD_TORCH_CHECK(softcap >= 0.0, "hf_fastpath::", op, ": softcap is ", softcap, ", expected 0 or more");
  STD_TORCH_CHECK(!slopes || (slopes->numel() == num_heads && dtype_of(*slopes, op) == DType::kFloat32),
                  "hf_fastpath::", op, ": slopes have to be float32 [heads]");
  STD_TORCH_CHECK(!slopes || !sinks, "hf_fastpath::", op, ": slopes and sinks do not go together");
  const bool of_rows = biases && biases->dim() == 3 && biases->size(0) == q.size(0);
  STD_TORCH_CHECK(!biases || ((of_rows || biases->dim() == 2) && biases->size(-2) == num_heads &&
                              biases->size(-1) > 0 && dtype_of(*biases, op) == DType::kFloat32),
                  "hf_fastpath::", op,
                  ": biases have to be float32 [heads, distances], or these for each row");
  STD_TORCH_CHECK(!biases || (q.size(1) == 1 && !slopes && !sinks), "hf_fastpath::", op,
                  ": biases take one token, and do not go with slopes or sinks");
}

// Refuses attention over other keys that does not fit q, and an lse that cannot be written.
inline void check_other_keys(const char* op, const Tensor& q, const std::optional<Tensor>& other,
                             const std::optional<Tensor>& other_lse, const std::optional<Tensor>& lse) {
  const std::vector<int64_t> rows = {q.size(0), q.size(1), q.size(2)};
  const auto is_of_rows = [&](const Tensor& each) {
    return sizes_of(each) == rows && dtype_of(each, op) == DType::kFloat32;
  };
  STD_TORCH_CHECK(other.has_value() == other_lse.has_value(), "hf_fastpath::", op,
                  ": other and other_lse go together");
  STD_TORCH_CHECK(
      !other || (dtype_of(*other, op) == dtype_of(q, op) && is_of_rows(*other_lse) &&
                 sizes_of(*other) == std::vector<int64_t>({rows[0], rows[1], rows[2] * q.size(3)})),
      "hf_fastpath::", op,
      ": other has to be [batch, query_len, heads*head_dim] in q's dtype, other_lse float32 [batch, "
      "query_len, heads]");
  STD_TORCH_CHECK(!lse || (is_of_rows(*lse) && lse->is_contiguous()), "hf_fastpath::", op,
                  ": lse has to be contiguous float32 [batch, query_len, heads]");
}

inline NormKind norm_of(int64_t number, const char* op) {
  return choice_of(number, NormKind::kRmsOffset, op, "norm");
}

// Refuses projections of qkv_rope_append that do not go together.
inline void check_projections(const Tensor& x, const std::optional<Tensor>& k_weight,
                              const std::optional<Tensor>& v_weight, const std::optional<Tensor>& k_bias,
                              const std::optional<Tensor>& v_bias, bool transposed) {
  STD_TORCH_CHECK(x.dim() == 3, "hf_fastpath::qkv_rope_append: x has to be [batch, query_len, hidden_size]");
  STD_TORCH_CHECK(k_weight.has_value() == v_weight.has_value() && (k_weight || !(k_bias || v_bias)),
                  "hf_fastpath::qkv_rope_append: k_weight and v_weight go together, with their biases");
  STD_TORCH_CHECK(!transposed || !k_weight,
                  "hf_fastpath::qkv_rope_append: transposed takes all projections in q_weight");
}

#define HF_FASTPATH_COMPOSED_OPS(device)                                                                  \
  Tensor rms_norm_##device(const Tensor& x, const std::optional<Tensor>& weight, double eps,              \
                           const std::optional<Tensor>& residual, double weight_offset = 0.0,             \
                           bool programmatic_launch = false,                                              \
                           const std::optional<Tensor>& factor = std::nullopt);                           \
  Tensor layer_norm_##device(const Tensor& x, const std::optional<Tensor>& weight,                        \
                             const std::optional<Tensor>& bias, double eps,                               \
                             const std::optional<Tensor>& residual = std::nullopt);                       \
  Tensor rope_append_##device(                                                                            \
      const Tensor& qkv, const std::optional<Tensor>& bias, const std::optional<Tensor>& cos,             \
      const std::optional<Tensor>& sin, const Tensor& k_cache, const Tensor& v_cache,                     \
      const Tensor& seq_lens, int64_t num_heads, const std::optional<Tensor>& kv_table, int64_t layer,    \
      const std::optional<Tensor>& k_scales, const std::optional<Tensor>& v_scales,                       \
      const std::optional<Tensor>& block_table = std::nullopt, bool neighbors = false,                    \
      const std::optional<Tensor>& q_norm_weight = std::nullopt,                                          \
      const std::optional<Tensor>& k_norm_weight = std::nullopt, double head_norm_eps = 0.0,              \
      double head_norm_offset = 0.0, bool programmatic_launch = false,                                    \
      const std::optional<Tensor>& k = std::nullopt, const std::optional<Tensor>& v = std::nullopt);      \
  Tensor gemv_##device(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,          \
                       const std::optional<Tensor>& residual, int64_t activation, bool transposed,        \
                       int64_t norm, const std::optional<Tensor>& norm_weight,                            \
                       const std::optional<Tensor>& norm_bias, double norm_eps, bool programmatic_launch, \
                       const std::optional<Tensor>& next_weight);                                         \
  Tensor gemv_swiglu_##device(const Tensor& x, const Tensor& gate_weight, const Tensor& up_weight,        \
                              int64_t activation, int64_t norm, const std::optional<Tensor>& norm_weight, \
                              const std::optional<Tensor>& norm_bias, double norm_eps,                    \
                              bool programmatic_launch, const std::optional<Tensor>& next_weight);        \
  Tensor fused_swiglu_##device(const Tensor& gate, const Tensor& up, int64_t activation);                 \
  inline Tensor normed_##device(const Tensor& x, NormKind norm, const std::optional<Tensor>& weight,      \
                                const std::optional<Tensor>& bias, double eps) {                          \
    if (norm == NormKind::kNone) return x;                                                                \
    STD_TORCH_CHECK(!is_rms(norm) || (weight && !bias),                                                   \
                    "hf_fastpath: norm 'rms' takes norm_weight and no norm_bias");                        \
    return is_rms(norm) ? rms_norm_##device(x, *weight, eps, std::nullopt, weight_offset(norm))           \
                        : layer_norm_##device(x, weight, bias, eps);                                      \
  }

HF_FASTPATH_COMPOSED_OPS(cpu)
HF_FASTPATH_COMPOSED_OPS(cuda)

#undef HF_FASTPATH_COMPOSED_OPS

Tensor packed_gemv_cpu(const Tensor& x, const Tensor& quants, const Tensor& scales,
                       const std::optional<Tensor>& zeros, double multiplier, int64_t format,
                       const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                       int64_t activation, int64_t norm, const std::optional<Tensor>& norm_weight,
                       const std::optional<Tensor>& norm_bias, double norm_eps, bool programmatic_launch,
                       const std::optional<Tensor>& next_weight = std::nullopt);

}  // namespace hf_fastpath
