// Rotary embedding and KV append on the CPU: kernel interface, free of torch.
#pragma once

#include "common/dtype.h"
#include "rope_append/head_rows.h"

namespace hf_fastpath {

struct RopeAppendArgs {
  DType dtype;     // of q, k, v, bias, cos, sin and q_out
  KvType kv_type;  // of the caches
  int64_t query_len;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t rotary_dim;  // 0: no rotation
  bool neighbors;      // elements 2i and 2i + 1 turn together, not i and i + rotary_dim / 2
  int64_t capacity;    // slots of the caches
  HeadRows q, k, v;
  const void* bias;      // [(num_heads + 2 * num_kv_heads) * head_dim] or null
  const void* cos;       // [batch or 1, query_len, rotary_dim]
  const void* sin;       // like cos
  int64_t angle_stride;  // elements between the batch rows of cos and sin, 0 if they share one
  void* k_cache;         // [batch, num_kv_heads, capacity, head_dim]
  void* v_cache;         // like k_cache
  uint16_t* k_scales;    // bfloat16 [batch, num_kv_heads, capacity], or null
  uint16_t* v_scales;    // like k_scales
  const int32_t* pages;  // [batch, capacity / page_size], the caches being [pages, num_kv_heads, page_size,
                         // head_dim]; or null
  int64_t page_size;
  const int32_t* seq_lens;  // [batch]
  void* q_out;              // [batch, query_len, num_heads, head_dim]
  const void* q_norm;       // [head_dim], or [num_heads * head_dim] if a norm is of all heads; or null
  const void* k_norm;       // [head_dim], or [num_kv_heads * head_dim]; null if q_norm is
  bool norms_all_heads;     // at once, not each by itself
  float norm_eps;
  float norm_offset;  // the factors are this + weight
};

constexpr int64_t kMaxQuantizedHeadDim = 512;  // of quantized caches

// Where a token goes in the caches, counted in heads of a token: `first` for KV head 0, `apart` to the next.
struct TokenPlace {
  int64_t first, apart;
};

// Place of token `token` of batch row `row`. Internal linkage: AVX2 code must not be merged with it.
[[maybe_unused]] static inline TokenPlace place_of(const RopeAppendArgs& args, int64_t row, int64_t token) {
  int64_t slot = (args.seq_lens[row] - args.query_len + token) % args.capacity;
  if (slot < 0) slot += args.capacity;
  int64_t page = row, size = args.capacity;
  if (args.pages != nullptr) {
    size = args.page_size;
    page = args.pages[row * (args.capacity / size) + slot / size];
    slot %= size;
  }
  return {page * args.num_kv_heads * size + slot, size};
}

// Handles tokens [begin, end) of the batch * query_len tokens.
void rope_append_portable(const RopeAppendArgs& args, int64_t begin, int64_t end);
void rope_append_avx2(const RopeAppendArgs& args, int64_t begin, int64_t end);

}  // namespace hf_fastpath
