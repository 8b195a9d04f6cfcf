// Queries, keys and values that rope_append is given, on every device. This header is torch-facing.
#pragma once

#include <optional>

#include "common/torch_glue.h"
#include "rope_append/head_rows.h"

namespace hf_fastpath {

// Keeps alive what the kernels read.
class HeadInputs {
 public:
  HeadRows q, k, v;

  // Takes one projection of all heads, [batch, query_len, features].
  HeadInputs(const Tensor& qkv, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim) {
    kept_[0] = hf_fastpath::contiguous(qkv);
    const int64_t features = qkv.size(2), size = element_size(dtype_of(qkv, "rope_append"));
    const auto from = [&](int64_t head) {
      const char* const first = static_cast<const char*>(kept_[0]->const_data_ptr());
      return HeadRows{first + head * head_dim * size, features, head_dim};
    };
    q = from(0), k = from(num_heads), v = from(num_heads + num_kv_heads);
  }

  // Takes each by itself, [batch, query_len, heads, head_dim]. They are copied only if tokens are not evenly
  // spaced, a head is not contiguous, or heads are not that are normed at once.
  HeadInputs(const Tensor& queries, const Tensor& keys, const Tensor& values, bool norms_all_heads) {
    q = rows(queries, norms_all_heads, kept_[0]);
    k = rows(keys, norms_all_heads, kept_[1]);
    v = rows(values, false, kept_[2]);
  }

 private:
  std::optional<Tensor> kept_[3];

  static HeadRows rows(const Tensor& x, bool normed_at_once, std::optional<Tensor>& kept) {
    const int64_t batch = x.size(0), query_len = x.size(1), heads = x.size(2), head_dim = x.size(3);
    const bool even = batch <= 1 || query_len == 1 || x.stride(0) == query_len * x.stride(1);
    const bool whole = head_dim <= 1 || x.stride(3) == 1;
    const bool side_by_side = heads <= 1 || x.stride(2) == head_dim;
    kept = even && whole && (side_by_side || !normed_at_once) ? x : torch::stable::contiguous(x);
    return {kept->const_data_ptr(), kept->stride(query_len > 1 ? 1 : 0), kept->stride(2)};
  }
};

// Features of a token in queries, keys and values, which lie in `qkv` alone or each by itself.
inline int64_t head_features(const Tensor& qkv, const std::optional<Tensor>& k,
                             const std::optional<Tensor>& v) {
  STD_TORCH_CHECK(k.has_value() == v.has_value() && (!k || (k->dim() == 4 && v->dim() == 4)),
                  "hf_fastpath::rope_append: k and v go together, [batch, query_len, heads, head_dim] each");
  STD_TORCH_CHECK(qkv.dim() == (k ? 4 : 3) && qkv.size(1) >= 1,
                  "hf_fastpath::rope_append: qkv has to be [batch, 1 or more, features], or with k and v "
                  "[batch, 1 or more, heads, head_dim]");
  return k ? (qkv.size(2) + k->size(2) + v->size(2)) * qkv.size(3) : qkv.size(2);
}

// The same as the kernels read them, once head_features() is known to be right.
inline HeadInputs head_inputs(const Tensor& qkv, const std::optional<Tensor>& k,
                              const std::optional<Tensor>& v, int64_t num_heads, int64_t num_kv_heads,
                              int64_t head_dim, bool norms_all_heads) {
  if (!k) return {qkv, num_heads, num_kv_heads, head_dim};
  std::vector<int64_t> sizes = {qkv.size(0), qkv.size(1), num_heads, head_dim};
  STD_TORCH_CHECK(sizes_of(qkv) == sizes, "hf_fastpath::rope_append: qkv are not the queries of ", num_heads,
                  " heads of ", head_dim);
  sizes[2] = num_kv_heads;
  for (const Tensor* each : {&*k, &*v}) {
    STD_TORCH_CHECK(sizes_of(*each) == sizes && each->scalar_type() == qkv.scalar_type(),
                    "hf_fastpath::rope_append: k and v have to be [batch, query_len, ", num_kv_heads, ", ",
                    head_dim, "] of the queries' dtype");
  }
  return {qkv, *k, *v, norms_all_heads};
}

}  // namespace hf_fastpath
