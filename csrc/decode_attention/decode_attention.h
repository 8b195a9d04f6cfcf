// Torch-free launch of decode_attention on a GPU.
// Experiments: docs/lab/decode_attention.md
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"
#include "common/head_dims.h"
#include "common/pages.h"

namespace hf_fastpath {

constexpr int kMaxQueryLen = 16;
// Most blocks over one KV head's cache; the same number as MAX_SPLITS in hf_fastpath/ops/decode_attention.py.
constexpr int kMaxSplits = 64;

struct DecodeAttentionParams {
  const void* q;             // [batch, query_len, num_heads, head_dim] contiguous, dtype
  const void* k_cache;       // [batch, num_kv_heads, capacity, head_dim] contiguous, kv_type, 16-byte aligned
  const void* v_cache;       // as k_cache
  const uint16_t* k_scales;  // bfloat16 [batch, num_kv_heads, capacity] of quantized caches, else null
  const uint16_t* v_scales;  // as k_scales
  const float* new_k;  // [batch, num_kv_heads, query_len, head_dim], 16-byte aligned: the newest positions of
                       // quantized caches, which the kernel appends; or null where they are there
  const float* new_v;  // as new_k
  const int32_t* seq_lens;  // [batch], on the device
  const int32_t* starts;    // [batch], on the device, or null for 0
  const void* sinks;  // [num_heads], dtype: a score more in each head's softmax, without a value; or null
  const void* other;  // [batch, query_len, num_heads * head_dim], dtype, 16-byte aligned: the same queries'
                      // attention over other keys, which are then in the softmax as well; or null
  const float* other_lse;   // [batch, query_len, num_heads]: log of the sum of exp(score) over these keys
  float* lse;               // as other_lse, of all keys that the output is of; written unless null
  const int64_t* kv_table;  // [layers, 3 or 5] on the device, see kTableColumns, or null
  int64_t layer;            // row of kv_table
  int64_t capacity;
  void* out;        // [batch, query_len, num_heads * head_dim], dtype
  void* workspace;  // see decode_attention_workspace_bytes
  int64_t workspace_bytes;
  float scale;
  float softcap;        // of scores, cap * tanh(score / cap); 0: none
  const float* slopes;  // [num_heads]: added to a score for each position further on; or null; not with sinks
  const float* biases;  // [num_heads, distances]: added to a score of a position so far behind the one token
  int distances;        // of each row, or further behind for the last; or null; not with slopes and sinks
  int bias_heads;       // num_heads if each batch row has such biases, one after the other; else 0
  int window;           // 0: none
  int batch, query_len, num_heads, num_kv_heads, head_dim;
  int group;                                     // num_heads / num_kv_heads: query heads that share a KV head
  uint32_t group_inverse, num_kv_heads_inverse;  // see inverse_of
  uint32_t zero;                                 // see behind_reads
  Pages pages;  // of caches in pages, [pages, num_kv_heads, page size, head_dim]; with a kv_table, [layers,
                // kPagedTableColumns], capacity and address of the block table come from there
  bool programmatic_launch;  // old positions, lengths and table may be read before the kernel in front is
                             // complete
  DType dtype;
  KvType kv_type;
};

// What a number below 2^31 / divisor is multiplied by, and shifted right by 31 bits, to be divided.
constexpr uint32_t inverse_of(int divisor) {
  return static_cast<uint32_t>(((int64_t(1) << 31) + divisor - 1) / divisor);
}

// Bytes of workspace for this shape: for every query and head kMaxSplits partial outputs with their maximum
// and sum from the start of the buffer, and counters, which have to be zero before the first call and are
// zero after each, from its end backwards. So calls of different shapes may share one buffer.
int64_t decode_attention_workspace_bytes(const DecodeAttentionParams& params);

// Bytes at the end of the workspace that hold counters.
int64_t decode_attention_counter_bytes(const DecodeAttentionParams& params);

// The kernel on tensor cores: q and the caches in the same 16-bit type. launch_decode_attention uses it, as
// the next, where it fits.
void launch_decode_attention_mma(const DecodeAttentionParams& params, cudaStream_t stream);

// The same for caches in pages.
void launch_decode_attention_mma_paged(const DecodeAttentionParams& params, cudaStream_t stream);

// The same for quantized caches, which appends new_k and new_v: q in a 16-bit type, head_dim a multiple
// of 16.
bool fits_decode_attention_quants(const DecodeAttentionParams& params);
void launch_decode_attention_quants(const DecodeAttentionParams& params, cudaStream_t stream);

// The kernel for head dims that is_tuned_head_dim() does not hold of.
void launch_decode_attention_any(const DecodeAttentionParams& params, cudaStream_t stream);

void launch_decode_attention(const DecodeAttentionParams& params, cudaStream_t stream);

}  // namespace hf_fastpath
