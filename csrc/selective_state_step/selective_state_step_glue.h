// What the glue of selective_state_step does on every device. This header is torch-facing.
#pragma once

#include "common/heads_glue.h"
#include "selective_state_step/selective_state_step_params.h"

namespace hf_fastpath {

// The checked arguments and the output of a call; keeps alive what had to be copied.
class SelectiveStateCall {
 public:
  SelectiveStateCall(const Tensor& x, const Tensor& dt, const Tensor& a_log, const Tensor& b, const Tensor& c,
                     const Tensor& state, const std::optional<Tensor>& d,
                     const std::optional<Tensor>& dt_bias, const std::optional<Tensor>& z, int64_t tokens)
      : call_("selective_state_step", dtype_of(x, "selective_state_step")),
        out(empty_like_with_sizes(x, sizes_of(x))) {
    STD_TORCH_CHECK(
        x.dim() == 3 && b.dim() == 3 && (a_log.dim() == 1 || a_log.dim() == 3),
        "hf_fastpath::selective_state_step: expected x [batch, heads, head_dim], b [batch, groups, "
        "state_size] and a_log [heads] or [heads, head_dim, state_size]");
    params.dtype = dtype_of(x, "selective_state_step");
    const int64_t rows = x.size(0), heads = params.heads = x.size(1);
    params.tokens = tokens;
    const int64_t batch = params.batch = sequences_of(rows, tokens, "selective_state_step");
    const int64_t head_dim = params.head_dim = x.size(2), groups = params.groups = b.size(1);
    const int64_t state_size = params.state_size = b.size(2);
    STD_TORCH_CHECK(heads >= 1 && groups >= 1 && heads % groups == 0,
                    "hf_fastpath::selective_state_step: x has ", heads, " heads, expected a multiple of the ",
                    groups, " groups of b and c");
    params.x = call_.heads(x, "x", {rows, heads, head_dim});
    params.b = call_.heads(b, "b", {rows, groups, state_size});
    params.c = call_.heads(c, "c", {rows, groups, state_size});
    params.z = call_.heads(z, "z", {rows, heads, head_dim});
    params.per_channel = a_log.dim() == 3;
    if (params.per_channel) {
      params.dt = call_.heads(dt, "dt", {rows, heads, head_dim});
      params.a_log = call_.parameter(a_log, "a_log", {heads, head_dim, state_size});
      params.d = call_.parameter(d, "d", {heads, head_dim});
      params.dt_bias = call_.parameter(dt_bias, "dt_bias", {heads, head_dim});
    } else {
      params.dt = call_.heads(dt, "dt", {rows, heads});
      params.a_log = call_.parameter(a_log, "a_log", {heads});
      params.d = call_.parameter(d, "d", {heads});
      params.dt_bias = call_.parameter(dt_bias, "dt_bias", {heads});
    }
    params.state = call_.state(state, {batch, heads, head_dim, state_size});
    params.out = out.mutable_data_ptr();
  }

 private:
  HeadsCall call_;

 public:
  Tensor out;
  SelectiveStateParams params = {};
};

}  // namespace hf_fastpath
