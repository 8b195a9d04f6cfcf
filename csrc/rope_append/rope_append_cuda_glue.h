// Torch-facing checks that rope_append and qkv_rope_append share on a GPU.
#pragma once

#include "common/composed_ops.h"
#include "common/cuda_glue.h"
#include "common/pages_glue.h"
#include "rope_append/head_rows_glue.h"
#include "rope_append/rope_append_paged.h"

namespace hf_fastpath {

// The arguments of an append of `tokens` [batch, query_len] tokens of `features` features: all but the
// inputs, bias and q_out. Keeps what the launch reads alive.
struct RopeAppendCall {
  RopeAppendParams params{};
  Pages pages;
  std::optional<Tensor> cos, sin, lens, table, q_norm, k_norm;

  RopeAppendCall(int64_t batch, int64_t query_len, int64_t features, DType dtype,
                 const std::optional<Tensor>& cos_in, const std::optional<Tensor>& sin_in,
                 const Tensor& k_cache, const Tensor& v_cache, const Tensor& seq_lens, int64_t num_heads,
                 const std::optional<Tensor>& kv_table, int64_t layer, const std::optional<Tensor>& k_scales,
                 const std::optional<Tensor>& v_scales, const std::optional<Tensor>& block_table,
                 bool neighbors, const char* op) {
    STD_TORCH_CHECK(k_cache.dim() == 4 && sizes_of(k_cache) == sizes_of(v_cache), "hf_fastpath::", op,
                    ": expected caches of one shape [batch, kv_heads, capacity, head_dim]");
    const int64_t kv_heads = k_cache.size(1), head_dim = k_cache.size(3);
    STD_TORCH_CHECK(
        features == (num_heads + 2 * kv_heads) * head_dim && (block_table || k_cache.size(0) == batch),
        "hf_fastpath::", op, ": ", features, " features and batch ", batch,
        ", expected (heads + 2*kv_heads)*head_dim = ", (num_heads + 2 * kv_heads) * head_dim, " and batch ",
        k_cache.size(0));
    STD_TORCH_CHECK(
        k_cache.is_contiguous() && v_cache.is_contiguous() && seq_lens.numel() == batch &&
            seq_lens.scalar_type() == ScalarType::Int && kv_type_of(v_cache, op) == kv_type_of(k_cache, op),
        "hf_fastpath::", op, ": the caches have to be contiguous and alike, seq_lens int32 [batch]");
    STD_TORCH_CHECK(cos_in.has_value() == sin_in.has_value(), "hf_fastpath::", op,
                    ": cos and sin go together");
    for (const std::optional<Tensor>* given : {&cos_in, &sin_in}) {
      STD_TORCH_CHECK(!*given || dtype_of(**given, op) == dtype, "hf_fastpath::", op,
                      ": cos and sin have to be of the projections' dtype");
    }
    STD_TORCH_CHECK(
        !cos_in || (cos_in->dim() == 3 && sizes_of(*cos_in) == sizes_of(*sin_in) &&
                    cos_in->size(1) == query_len && (cos_in->size(0) == 1 || cos_in->size(0) == batch) &&
                    cos_in->size(2) <= head_dim && cos_in->size(2) % 2 == 0),
        "hf_fastpath::", op, ": cos and sin have to be [batch or 1, query_len, rotary_dim]");
    params.kv_type = kv_type_of(k_cache, op);
    check_kv_scales(k_cache, k_scales, params.kv_type, op, "k_scales");
    check_kv_scales(k_cache, v_scales, params.kv_type, op, "v_scales");
    pages = load_pages(block_table, kv_table, layer, k_cache, params.kv_type, batch, op);
    if (!pages) check_kv_table(kv_table, layer, params.kv_type, op);
    const int64_t capacity = pages ? pages.capacity : k_cache.size(2);
    STD_TORCH_CHECK(kv_table || query_len <= capacity, "hf_fastpath::", op, ": query_len ", query_len,
                    " exceeds the cache's capacity ", capacity, ": grow the cache first");
    STD_TORCH_CHECK(!is_quantized(params.kv_type) || head_dim <= kMaxQuantizedHeadDim, "hf_fastpath::", op,
                    ": head_dim is ", head_dim, ", expected at most ", kMaxQuantizedHeadDim,
                    " in a quantized cache");
    if (cos_in) cos = hf_fastpath::contiguous(*cos_in), sin = hf_fastpath::contiguous(*sin_in);
    if (kv_table) table = hf_fastpath::contiguous(*kv_table);
    lens = hf_fastpath::contiguous(seq_lens);
    params.cos = data_or_null(cos);
    params.sin = data_or_null(sin);
    params.k_cache = k_cache.data_ptr();
    params.v_cache = v_cache.data_ptr();
    params.seq_lens = static_cast<const int32_t*>(lens->data_ptr());
    params.kv_table = static_cast<const int64_t*>(data_or_null(table));
    params.layer = layer;
    params.capacity = k_cache.size(2);
    params.batch = static_cast<int>(batch);
    params.query_len = static_cast<int>(query_len);
    params.num_heads = static_cast<int>(num_heads);
    params.num_kv_heads = static_cast<int>(kv_heads);
    params.head_dim = static_cast<int>(head_dim);
    params.rotary_dim = cos ? static_cast<int>(cos->size(2)) : 0;
    params.cos_batch_stride = cos && cos->size(0) > 1 ? query_len * params.rotary_dim : 0;
    params.dtype = dtype;
    params.neighbors = neighbors;
    if (k_scales) params.k_scales = static_cast<uint16_t*>(k_scales->data_ptr());
    if (v_scales) params.v_scales = static_cast<uint16_t*>(v_scales->data_ptr());
  }

  // Norms of queries and keys in front of the rotation.
  void add_head_norms(const std::optional<Tensor>& q_norm_weight, const std::optional<Tensor>& k_norm_weight,
                      double eps, double offset, const char* op) {
    params.norms_all_heads = check_head_norms(q_norm_weight, k_norm_weight, params.dtype, params.num_heads,
                                              params.num_kv_heads, params.head_dim, op);
    if (!q_norm_weight) return;
    q_norm = hf_fastpath::contiguous(*q_norm_weight), k_norm = hf_fastpath::contiguous(*k_norm_weight);
    params.q_norm = q_norm->data_ptr(), params.k_norm = k_norm->data_ptr();
    params.norm_eps = static_cast<float>(eps), params.norm_offset = static_cast<float>(offset);
  }

  // Says where to read; `inputs` has to live until the launch.
  void read(const HeadInputs& inputs) { params.q = inputs.q, params.k = inputs.k, params.v = inputs.v; }

  // The launch() of a product of all heads, [batch, query_len, features].
  void launch_joined(const Tensor& qkv, cudaStream_t stream, bool programmatic_launch) {
    const HeadInputs inputs(qkv, params.num_heads, params.num_kv_heads, params.head_dim);
    read(inputs);
    launch(stream, programmatic_launch);
  }

  // `programmatic_launch`: as for launch_rope_append.
  void launch(cudaStream_t stream, bool programmatic_launch) {
    params.norms_early = programmatic_launch;
    if (pages) return launch_rope_append_paged(params, pages, programmatic_launch, stream);
    launch_rope_append(params, programmatic_launch, stream);
  }
};

}  // namespace hf_fastpath
