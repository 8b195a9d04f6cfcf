// What: puts the newest positions of a quantized KV cache there, for shapes and types of q that
//   decode_attention_quants.cuh does not take: it does that on its way. Arithmetic as in
//   rope_append_quants.cu.
// Work split: a warp takes a head of a token, of K or of V, a lane every 32nd element. grid.x counts them.
// Traffic: new keys and values read once, quants and scales written once.
// Roofline: latency.

#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "common/kv_quants.cuh"
#include "common/warp.cuh"
#include "quantizing_attention/quantizing_attention.h"

namespace hf_fastpath {
namespace {

constexpr int kWarps = 4;

// kMaxElems: of a head, in a lane.
template <class Quant, int kMaxElems>
__global__ void __launch_bounds__(kWarps* kWarpSize) quantize_new_kernel(DecodeAttentionParams p) {
  const int lane = threadIdx.x % kWarpSize, heads = p.batch * p.num_kv_heads * p.query_len;
  const int index = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
  if (index >= 2 * heads) return;
  const bool is_v = index >= heads;
  const int head = is_v ? index - heads : index;  // of [batch, num_kv_heads, query_len]
  const int row = head / p.query_len, step = head - row * p.query_len;

  const float* from = (is_v ? p.new_v : p.new_k) + int64_t(head) * p.head_dim;
  float values[kMaxElems];
  uint32_t largest = 0;  // magnitudes compare as their bits do, and NaN is the largest
#pragma unroll
  for (int e = 0; e < kMaxElems; ++e) {
    const int d = e * kWarpSize + lane;
    values[e] = d < p.head_dim ? from[d] : 0.f;
    largest = max(largest, __float_as_uint(values[e]) & 0x7fffffffu);
  }
  constexpr float kMost = std::is_same_v<Quant, int8_t> ? kLargestInt8 : kLargestFloat8;
  const uint16_t bits = quant_scale(__reduce_max_sync(kAllLanes, largest), kMost);
  const Divisor scale(bfloat16_bits_to_float(bits));

  auto* quants = static_cast<uint8_t*>(const_cast<void*>(is_v ? p.v_cache : p.k_cache));
  auto* scales = const_cast<uint16_t*>(is_v ? p.v_scales : p.k_scales);
  int64_t capacity = p.capacity;
  if (p.kv_table) {
    const int64_t* entry = p.kv_table + kQuantizedTableColumns * p.layer;
    quants = reinterpret_cast<uint8_t*>(entry[is_v]);
    scales = reinterpret_cast<uint16_t*>(entry[3 + is_v]);
    capacity = entry[2];
  }
  const int batch_row = row / p.num_kv_heads, position = p.seq_lens[batch_row] - p.query_len + step;
  if (p.starts && position < p.starts[batch_row]) return;
  int64_t slot = position % capacity;
  if (slot < 0) slot += capacity;  // a wrong length must not write outside the cache
  const int64_t at = int64_t(row) * capacity + slot;
  if (lane == 0) scales[at] = bits;
#pragma unroll
  for (int e = 0; e < kMaxElems; ++e) {
    const int d = e * kWarpSize + lane;
    if (d < p.head_dim) quants[at * p.head_dim + d] = quantize<Quant>(values[e], scale);
  }
}

}  // namespace

void launch_quantizing_attention(const DecodeAttentionParams& params, cudaStream_t stream) {
  if (params.batch == 0 || fits_decode_attention_quants(params))
    return launch_decode_attention(params, stream);
  const int heads = 2 * params.batch * params.num_kv_heads * params.query_len;
  const dim3 grid((heads + kWarps - 1) / kWarps), block(kWarps * kWarpSize);
  const size_t smem_bytes = 0;
  constexpr int kTuned = kMaxTunedHeadDim / kWarpSize, kMost = kMaxHeadDim / kWarpSize;
  const bool is_wide = params.head_dim > kMaxTunedHeadDim;
  const auto kernel =
      params.kv_type == KvType::kInt8
          ? (is_wide ? quantize_new_kernel<int8_t, kMost> : quantize_new_kernel<int8_t, kTuned>)
          : (is_wide ? quantize_new_kernel<Float8, kMost> : quantize_new_kernel<Float8, kTuned>);
  kernel<<<grid, block, smem_bytes, stream>>>(params);
  HF_FASTPATH_CUDA_CHECK(cudaGetLastError());
  DecodeAttentionParams stored = params;
  stored.new_k = stored.new_v = nullptr;
  launch_decode_attention(stored, stream);
}

}  // namespace hf_fastpath
