// What the glue of gated_delta_step does on every device. This header is torch-facing.
#pragma once

#include "common/heads_glue.h"
#include "gated_delta_step/gated_delta_step_params.h"

namespace hf_fastpath {

// The checked arguments and the output of a call; keeps alive what had to be copied.
class GatedDeltaCall {
 public:
  GatedDeltaCall(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a, const Tensor& b,
                 const Tensor& a_log, const Tensor& dt_bias, const Tensor& state, double scale, bool l2_norm,
                 double beta_scale, bool programmatic_launch, int64_t tokens)
      : call_("gated_delta_step", dtype_of(q, "gated_delta_step")),
        out(empty_like_with_sizes(q, sizes_of(v))) {
    STD_TORCH_CHECK(q.dim() == 3 && v.dim() == 3 && q.size(2) >= 1 && q.size(2) <= kMaxDeltaKey,
                    "hf_fastpath::gated_delta_step: expected q [batch, k_heads, 1 to ", kMaxDeltaKey,
                    "] and v [batch, v_heads, v_dim]");
    params.dtype = dtype_of(q, "gated_delta_step");
    const int64_t rows = q.size(0);
    params.tokens = tokens;
    const int64_t batch = params.batch = sequences_of(rows, tokens, "gated_delta_step");
    const int64_t k_dim = params.k_dim = q.size(2);
    const int64_t k_heads = params.k_heads = q.size(1);
    const int64_t v_heads = params.v_heads = v.size(1), v_dim = params.v_dim = v.size(2);
    STD_TORCH_CHECK(k_heads >= 1 && v_heads >= 1 && v_heads % k_heads == 0,
                    "hf_fastpath::gated_delta_step: v has ", v_heads, " heads, expected a multiple of the ",
                    k_heads, " heads of q and k");
    params.per_element = a.dim() == 3;
    params.q = call_.heads(q, "q", {rows, k_heads, k_dim});
    params.k = call_.heads(k, "k", {rows, k_heads, k_dim});
    params.v = call_.heads(v, "v", {rows, v_heads, v_dim});
    params.b = call_.heads(b, "b", {rows, v_heads});
    params.a_log = call_.parameter(a_log, "a_log", {v_heads});
    if (params.per_element) {
      params.a = call_.heads(a, "a", {rows, v_heads, k_dim});
      params.dt_bias = call_.parameter(dt_bias, "dt_bias", {v_heads, k_dim});
    } else {
      params.a = call_.heads(a, "a", {rows, v_heads});
      params.dt_bias = call_.parameter(dt_bias, "dt_bias", {v_heads});
    }
    params.state = call_.state(state, {batch, v_heads, k_dim, v_dim});
    params.out = out.mutable_data_ptr();
    params.l2_norm = l2_norm, params.programmatic_launch = programmatic_launch;
    params.scale = static_cast<float>(scale), params.beta_scale = static_cast<float>(beta_scale);
  }

 private:
  HeadsCall call_;

 public:
  Tensor out;
  GatedDeltaParams params = {};
};

}  // namespace hf_fastpath
