// What: adds the bias, rotates the new queries and keys (half-split pairs), writes keys and values into their
//   cache slots and the queries to q_out; one rounding to each destination's type.
// Work split: a thread takes one pair of a head of a token: elements p and p + rotary_dim / 2 of the rotated
//   part, two neighbors of the rest. grid.x counts the tokens of all rows, grid.y covers the pairs of a token.
// Traffic: qkv, bias, cos and sin read once, q_out and the new cache slots written once.
// Roofline: latency of two dependent loads (the table or the lengths, then the slot's address); a few KB a
//   token. 1.8 us for one token of 32/8 heads of 128, float16, in a CUDA graph (H200, 2026-11).

#include "common/cuda_check.cuh"
#include "rope_append/rope_append.cuh"

namespace hf_fastpath {
namespace {

constexpr int kThreads = 128;  // small blocks: a token has a few thousand pairs, which should reach many SMs

template <class T, class Cache>
__global__ void __launch_bounds__(kThreads) rope_append_kernel(RopeAppendParams p) {
  const int pairs = (p.head_dim + 1) / 2;  // of a head; an odd head_dim leaves one element alone
  const int heads = p.num_heads + 2 * p.num_kv_heads;
  const int index = blockIdx.y * kThreads + threadIdx.x;
  if (index >= heads * pairs) return;
  const int head = index / pairs, pair = index % pairs;
  const int token = blockIdx.x, row = token / p.query_len, step = token % p.query_len;

  const bool is_value = head >= p.num_heads + p.num_kv_heads;
  const int half = is_value ? 0 : p.rotary_dim / 2;
  const bool rotate = pair < half;
  const int first = rotate ? pair : 2 * pair;  // pairs past the rotated ones start at element 2 * half
  const int second = rotate ? pair + half : first + 1;
  const bool has_second = second < p.head_dim;

  const int64_t features = int64_t(heads) * p.head_dim, column = int64_t(head) * p.head_dim;
  const CachePlace place = cache_place(p);
  const int64_t slot = cache_slot(p, place.capacity, token);
  const T* qkv = static_cast<const T*>(p.qkv) + token * features + column;
  float a = to_float(qkv[first]), b = has_second ? to_float(qkv[second]) : 0.f;
  if (p.bias) {
    const T* bias = static_cast<const T*>(p.bias) + column;
    a += to_float(bias[first]);
    if (has_second) b += to_float(bias[second]);
  }
  if (rotate) {
    const int64_t at = row * p.cos_batch_stride + int64_t(step) * p.rotary_dim;
    const T* cos = static_cast<const T*>(p.cos) + at;
    const T* sin = static_cast<const T*>(p.sin) + at;
    const float turned_a = a * to_float(cos[first]) - b * to_float(sin[first]);
    const float turned_b = b * to_float(cos[second]) + a * to_float(sin[second]);
    a = turned_a, b = turned_b;
  }

  if (head < p.num_heads) {
    T* out = static_cast<T*>(p.q_out) + (int64_t(token) * p.num_heads + head) * p.head_dim;
    out[first] = from_float<T>(a);
    if (has_second) out[second] = from_float<T>(b);
    return;
  }
  const int kv_head = head - p.num_heads - (is_value ? p.num_kv_heads : 0);
  Cache* out = reinterpret_cast<Cache*>(is_value ? place.v_cache : place.k_cache) +
               ((int64_t(row) * p.num_kv_heads + kv_head) * place.capacity + slot) * p.head_dim;
  out[first] = from_float<Cache>(a);
  if (has_second) out[second] = from_float<Cache>(b);
}

}  // namespace

void launch_rope_append(const RopeAppendParams& params, cudaStream_t stream) {
  const int tokens = params.batch * params.query_len;
  const int pairs = (params.num_heads + 2 * params.num_kv_heads) * ((params.head_dim + 1) / 2);
  if (tokens == 0 || pairs == 0) return;
  const dim3 grid(tokens, (pairs + kThreads - 1) / kThreads), block(kThreads);
  const size_t smem_bytes = 0;
  with_type(params.dtype, [&](auto zero) {
    with_type(params.cache_dtype, [&](auto cache_zero) {
      rope_append_kernel<decltype(zero), decltype(cache_zero)><<<grid, block, smem_bytes, stream>>>(params);
    });
  });
  HF_FASTPATH_CUDA_CHECK(cudaGetLastError());
}

}  // namespace hf_fastpath
