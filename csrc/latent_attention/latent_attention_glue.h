// What the glue of latent_attention does on every device. This header is torch-facing.
#pragma once

#include "common/heads_glue.h"
#include "latent_attention/latent_attention_params.h"

namespace hf_fastpath {

// The checked arguments and the output of a call; keeps alive what had to be copied.
class LatentAttentionCall {
 public:
  LatentAttentionCall(const Tensor& q_latent, const Tensor& q_rope, const Tensor& latents,
                      const Tensor& rope_keys, const Tensor& seq_lens, const std::optional<Tensor>& starts,
                      double scale, const std::optional<Tensor>& kv_table, int64_t layer,
                      const std::optional<Tensor>& new_latent, const std::optional<Tensor>& new_rope,
                      const std::optional<Tensor>& cos, const std::optional<Tensor>& sin, int64_t rotation,
                      bool programmatic_launch)
      : call_(kOp, dtype_of(q_latent, kOp)),
        lens_(hf_fastpath::contiguous(seq_lens)),
        out(empty_like_with_sizes(q_latent, sizes_of(q_latent))) {
    STD_TORCH_CHECK(q_latent.dim() == 3 && q_rope.dim() == 3 && latents.dim() == 4,
                    "hf_fastpath::latent_attention: expected q_latent [batch, heads, rank], q_rope [batch, "
                    "heads, rope_dim] and latents [batch, 1, capacity, rank]");
    params.dtype = dtype_of(q_latent, kOp);
    const int64_t batch = params.batch = q_latent.size(0), heads = params.heads = q_latent.size(1);
    const int64_t rank = params.rank = q_latent.size(2), rope_dim = params.rope_dim = q_rope.size(2);
    STD_TORCH_CHECK(rank >= 1 && rank <= kMaxLatentRank && rope_dim >= 1 && rope_dim <= kMaxLatentRope,
                    "hf_fastpath::latent_attention: expected a rank of 1 to ", kMaxLatentRank,
                    " and a rope_dim of 1 to ", kMaxLatentRope);
    params.capacity = latents.size(2);
    params.q_latent = call_.heads(q_latent, "q_latent", {batch, heads, rank});
    params.q_rope = call_.heads(q_rope, "q_rope", {batch, heads, rope_dim});
    params.latents = cache(latents, {batch, 1, params.capacity, rank});
    params.rope_keys = cache(rope_keys, {batch, 1, params.capacity, rope_dim});
    check_numbers(seq_lens);
    params.seq_lens = static_cast<const int32_t*>(lens_.const_data_ptr());
    if (starts) {
      check_numbers(*starts);
      starts_ = hf_fastpath::contiguous(*starts);
      params.starts = static_cast<const int32_t*>(starts_->const_data_ptr());
    }
    check_kv_table(kv_table, layer, kv_type(params.dtype), kOp);
    if (kv_table) {
      table_ = hf_fastpath::contiguous(*kv_table);
      params.kv_table = static_cast<const int64_t*>(table_->const_data_ptr()) + layer * kTableColumns;
    }
    STD_TORCH_CHECK(
        new_latent.has_value() == new_rope.has_value() && cos.has_value() == sin.has_value(),
        "hf_fastpath::latent_attention: new_latent and new_rope go together, and so do cos and sin");
    params.new_latent = call_.rows(new_latent, "new_latent", batch, rank);
    params.new_rope = call_.rows(new_rope, "new_rope", batch, rope_dim);
    STD_TORCH_CHECK(!cos || rope_dim % 2 == 0, "hf_fastpath::latent_attention: rope_dim is ", rope_dim,
                    ", expected an even number to turn");
    params.cos = call_.rows(cos, "cos", batch, rope_dim, true);
    params.sin = call_.rows(sin, "sin", batch, rope_dim, true);
    params.rotation = choice_of(rotation, Rotation::kNeighborsToHalves, kOp, "rotation");
    params.out = out.mutable_data_ptr();
    params.scale = static_cast<float>(scale);
    params.programmatic_launch = programmatic_launch;
  }

 private:
  static constexpr const char* kOp = "latent_attention";

  void* cache(const Tensor& tensor, std::initializer_list<int64_t> sizes) const {
    STD_TORCH_CHECK(
        has_sizes(tensor, sizes) && tensor.is_contiguous() && dtype_of(tensor, kOp) == params.dtype,
        "hf_fastpath::latent_attention: latents and rope_keys have to be contiguous [batch, 1, capacity, "
        "rank] "
        "and [batch, 1, capacity, rope_dim] of q_latent's dtype");
    return tensor.data_ptr();
  }
  void check_numbers(const Tensor& tensor) const {
    STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Int && has_sizes(tensor, {params.batch}),
                    "hf_fastpath::latent_attention: seq_lens and starts have to be int32 [batch]");
  }

  HeadsCall call_;
  Tensor lens_;
  std::optional<Tensor> starts_, table_;

 public:
  Tensor out;
  LatentAttentionParams params = {};
};

}  // namespace hf_fastpath
