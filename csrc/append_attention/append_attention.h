// Torch-free launch of append_attention on a GPU.
// Experiments: docs/lab/append_attention.md
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"
#include "common/head_dims.h"

namespace hf_fastpath {

struct AppendAttentionParams {
  const void* q;            // [batch, query_len, num_heads, head_dim] contiguous, dtype, 16-byte aligned
  const void* k_cache;      // [batch, num_kv_heads, capacity, head_dim], as q
  const void* v_cache;      // as k_cache
  const int32_t* seq_lens;  // [batch], on the device; at most capacity
  const int32_t* starts;    // [batch], on the device, or null for 0
  const void* sinks;  // [num_heads], dtype: a score more in each head's softmax, without a value; or null
  int64_t capacity;
  void* out;        // [batch, query_len, num_heads * head_dim], dtype
  void* workspace;  // append_attention_workspace_bytes, or null if that is 0
  float scale;
  float softcap;  // scores are softcap * tanh(score / softcap); 0: none
  int window;     // 0: none
  int batch, query_len, num_heads, num_kv_heads, head_dim;
  int group;                 // num_heads / num_kv_heads: query heads that share a KV head
  bool programmatic_launch;  // old positions and lengths may be read before the kernel in front is complete
  DType dtype;
};

// How a call is cut; `plan_append_attention` chooses it.
struct AppendAttentionPlan {
  bool uses_wgmma;
  int rows;       // of a tile
  int positions;  // of a tile
  int units;      // tiles of rows, of all KV heads
  int splits;     // blocks over the positions of a tile of rows
  int cluster;    // neighbors among them that merge through each other's shared memory
};

AppendAttentionPlan plan_append_attention(const AppendAttentionParams& params);

// Bytes of workspace, for partial results of clusters.
int64_t append_attention_workspace_bytes(const AppendAttentionParams& params,
                                         const AppendAttentionPlan& plan);

void launch_append_attention(const AppendAttentionParams& params, const AppendAttentionPlan& plan,
                             cudaStream_t stream);

// Merges partial results of clusters.
void launch_append_attention_merge(const AppendAttentionParams& params, const AppendAttentionPlan& plan,
                                   cudaStream_t stream);

// The kernels: of one 16-bit type each, and of any type.
void launch_append_attention_portable(const AppendAttentionParams& params, cudaStream_t stream);
void launch_append_attention_mma_half(const AppendAttentionParams&, const AppendAttentionPlan&, cudaStream_t);
void launch_append_attention_mma_bfloat16(const AppendAttentionParams&, const AppendAttentionPlan&,
                                          cudaStream_t);
void launch_append_attention_wgmma_half(const AppendAttentionParams&, const AppendAttentionPlan&,
                                        cudaStream_t);
void launch_append_attention_wgmma_bfloat16(const AppendAttentionParams&, const AppendAttentionPlan&,
                                            cudaStream_t);

}  // namespace hf_fastpath
