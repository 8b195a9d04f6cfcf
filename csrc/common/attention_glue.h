// Torch-facing checks and preparations that the attention ops share on a GPU.
#pragma once

#include "common/cuda_glue.h"
#include "common/head_dims.h"
#include "common/lengths.h"

namespace hf_fastpath {

inline bool is_aligned16(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
}

// What the arguments of attention of either op have to be; q is [batch, query_len, heads, head_dim] already.
// `in_pages`: the caches' first dimension is that of pages.
inline void check_attention(const char* op, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                            bool in_pages, const Tensor& seq_lens, const std::optional<Tensor>& starts,
                            const std::optional<Tensor>& sinks) {
  const int64_t batch = q.size(0), num_heads = q.size(2), head_dim = q.size(3);
  STD_TORCH_CHECK(takes_head_dim(head_dim), "hf_fastpath::", op, ": head_dim is ", head_dim,
                  ", expected an even number up to ", kMaxHeadDim);
  STD_TORCH_CHECK(
      k_cache.dim() == 4 && sizes_of(k_cache) == sizes_of(v_cache) &&
          (in_pages || k_cache.size(0) == batch) && k_cache.size(3) == head_dim && k_cache.size(1) > 0 &&
          num_heads % k_cache.size(1) == 0,
      "hf_fastpath::", op,
      ": the caches do not match q: expected [batch, kv_heads, capacity, head_dim] with kv_heads a "
      "divisor of q's heads");
  STD_TORCH_CHECK(k_cache.is_contiguous() && v_cache.is_contiguous(), "hf_fastpath::", op,
                  ": the caches have to be contiguous");
  STD_TORCH_CHECK(seq_lens.numel() == batch && seq_lens.scalar_type() == ScalarType::Int &&
                      (!starts || (starts->numel() == batch && starts->scalar_type() == ScalarType::Int)),
                  "hf_fastpath::", op, ": seq_lens and starts have to be int32 [batch]");
  STD_TORCH_CHECK(
      !sinks || (dtype_of(*sinks, op) == dtype_of(q, op) && sinks->dim() == 1 && sinks->size(0) == num_heads),
      "hf_fastpath::", op, ": sinks has to be [heads] in q's dtype");
}

// Tensors of checked arguments as kernels take them: contiguous, q and the caches from addresses that are
// multiples of 16 bytes; copies where they are not.
struct AttentionTensors {
  Tensor q, k_cache, v_cache, seq_lens;
  std::optional<Tensor> starts, sinks;
  Tensor out;

  AttentionTensors(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& seq_lens,
                   const std::optional<Tensor>& starts, const std::optional<Tensor>& sinks)
      : q(aligned(hf_fastpath::contiguous(q))),
        k_cache(aligned(k_cache)),
        v_cache(aligned(v_cache)),
        seq_lens(hf_fastpath::contiguous(seq_lens)),
        starts(contiguous_or_none(starts)),
        sinks(contiguous_or_none(sinks)),
        out(empty_like_with_sizes(this->q, {q.size(0), q.size(1), q.size(2) * q.size(3)})) {}

  // Params: those of either op.
  template <class Params>
  Params params(const char* op, double scale, int64_t window, bool programmatic_launch) const {
    Params p{};
    p.q = q.data_ptr();
    p.k_cache = k_cache.data_ptr();
    p.v_cache = v_cache.data_ptr();
    p.seq_lens = static_cast<const int32_t*>(seq_lens.data_ptr());
    p.starts = static_cast<const int32_t*>(data_or_null(starts));
    p.sinks = data_or_null(sinks);
    p.capacity = k_cache.size(2);
    p.out = out.data_ptr();
    p.scale = static_cast<float>(scale);
    p.window = bounded_window(window);
    p.programmatic_launch = programmatic_launch;
    p.batch = static_cast<int>(q.size(0));
    p.query_len = static_cast<int>(q.size(1));
    p.num_heads = static_cast<int>(q.size(2));
    p.num_kv_heads = static_cast<int>(k_cache.size(1));
    p.group = p.num_heads / p.num_kv_heads;
    p.head_dim = static_cast<int>(q.size(3));
    p.dtype = dtype_of(q, op);
    return p;
  }

  static Tensor aligned(const Tensor& tensor) {
    return is_aligned16(tensor) ? tensor : torch::stable::clone(tensor);  // a view that starts anywhere
  }
  static std::optional<Tensor> contiguous_or_none(const std::optional<Tensor>& tensor) {
    return tensor ? std::optional(hf_fastpath::contiguous(*tensor)) : std::nullopt;
  }
};

}  // namespace hf_fastpath
