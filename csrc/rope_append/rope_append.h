// Torch-free launch of rope_append on a GPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"
#include "rope_append/head_rows.h"

namespace hf_fastpath {

struct RopeAppendParams {
  HeadRows q, k, v;          // dtype
  const void* bias;          // [(num_heads + 2 * num_kv_heads) * head_dim], dtype, or null
  const void* cos;           // [batch or 1, query_len, rotary_dim], dtype, or null for no rotation
  const void* sin;           // as cos
  void* k_cache;             // [batch, num_kv_heads, capacity, head_dim], kv_type
  void* v_cache;             // as k_cache
  uint16_t* k_scales;        // bfloat16 [batch, num_kv_heads, capacity] of quantized caches, else null
  uint16_t* v_scales;        // as k_scales
  void* q_out;               // [batch, query_len, num_heads, head_dim], dtype
  const int32_t* seq_lens;   // [batch], tokens a row holds after this append
  const int64_t* kv_table;   // [layers, 3]: addresses of K and V and the capacity, which replace k_cache,
                             // v_cache and capacity; or null; of quantized caches [layers, 5]
  int64_t layer;             // row of kv_table
  int64_t capacity;          // slots of a cache row
  int64_t cos_batch_stride;  // elements between batch rows of cos and sin; 0 when they have one row
  int batch, query_len, num_heads, num_kv_heads, head_dim, rotary_dim;
  DType dtype;
  KvType kv_type;        // of the caches
  bool neighbors;        // elements 2i and 2i + 1 turn together, not i and i + rotary_dim / 2
  bool norms_all_heads;  // at once, not each by itself
  bool norms_early;      // their weights may be read before the kernel in front is complete
  const void* q_norm;    // [head_dim], or [num_heads * head_dim] if a norm is of all heads, dtype; or null
  const void* k_norm;    // [head_dim], or [num_kv_heads * head_dim]; null if q_norm is
  float norm_eps, norm_offset;  // of both norms; the factors are norm_offset + weight
};

constexpr int kMaxQuantizedHeadDim = 512;  // of quantized caches

// The kernel for quantized caches, which launch_rope_append uses for these.
void launch_rope_append_quants(const RopeAppendParams& params, cudaStream_t stream);

// The kernel for a few tokens' 16-bit heads and a cache of their type, which launch_rope_append uses where it
// fits.
bool fits_rope_append_heads(const RopeAppendParams& params);
void launch_rope_append_heads(const RopeAppendParams& params, bool programmatic_launch, cudaStream_t stream);

// `programmatic_launch`: lengths and tables may be read before the kernel in front is complete; quantized
// caches wait.
void launch_rope_append(const RopeAppendParams& params, bool programmatic_launch, cudaStream_t stream);

}  // namespace hf_fastpath
