// What: as rope_append.cu, into a cache of int8 or fp8 quants with a scale a head and token; arithmetic and
//   rounding of what is quantized are those of a float32 cache there.
// Work split: a warp takes a head of a token, a lane every 32nd element, which stay in registers between the
//   search of the largest and the quantization. grid.x counts the tokens of all rows, grid.y covers their
//   heads.
// Traffic: q, k, v, bias, cos and sin read once (elements that turn twice, the second time from L1), q_out,
//   quants and scales written once.
// Roofline: latency, as in rope_append.cu, and the reductions over the warp.

#include "common/cuda_check.cuh"
#include "common/inverse_root.cuh"
#include "common/kv_quants.cuh"
#include "common/warp.cuh"
#include "rope_append/rope_append.cuh"

namespace hf_fastpath {
namespace {

constexpr int kWarps = 4;
constexpr int kMaxElems = kMaxQuantizedHeadDim / kWarpSize;  // of a head, in a lane

// A cache of quants: K or V.
struct QuantPlace {
  uint8_t* quants;
  uint16_t* scales;
};

template <class T, class Quant>
__global__ void __launch_bounds__(kWarps* kWarpSize) rope_append_quants_kernel(RopeAppendParams p) {
  const int lane = threadIdx.x % kWarpSize, head = blockIdx.y * kWarps + threadIdx.x / kWarpSize;
  const int heads = p.num_heads + 2 * p.num_kv_heads;
  if (head >= heads) return;
  const int token = blockIdx.x, row = token / p.query_len;
  const bool is_value = head >= p.num_heads + p.num_kv_heads;
  const int rotary_dim = is_value ? 0 : p.rotary_dim, half = rotary_dim / 2;

  const T* x = HeadInput<T>(p, token, head).x;
  const T* bias = p.bias ? static_cast<const T*>(p.bias) + int64_t(head) * p.head_dim : nullptr;
  const auto biased = [&](int d) { return to_float(x[d]) + (bias ? to_float(bias[d]) : 0.f); };
  const bool is_query = head < p.num_heads;
  const T* weight = is_value ? nullptr : static_cast<const T*>(is_query ? p.q_norm : p.k_norm);
  float scale_of_norm = 0.f;
  if (weight) {
    int begin = 0, end = p.head_dim;  // of what the norm is of, counted from this head's first element
    if (p.norms_all_heads) {
      const int first = is_query ? 0 : p.num_heads, count = is_query ? p.num_heads : p.num_kv_heads;
      begin = (first - head) * p.head_dim, end = begin + count * p.head_dim;
      weight -= begin;
    }
    float squares = 0.f;
    for (int d = begin + lane; d < end; d += kWarpSize) squares += biased(d) * biased(d);
    scale_of_norm = inverse_root<T>(warp_sum(squares) / float(end - begin) + p.norm_eps);
  }
  const auto input = [&](int d) {
    return biased(d) * (weight ? scale_of_norm * (p.norm_offset + to_float(weight[d])) : 1.f);
  };
  const T* cos = token_angles<T>(p, p.cos, token);
  const T* sin = token_angles<T>(p, p.sin, token);
  float values[kMaxElems];
#pragma unroll
  for (int e = 0; e < kMaxElems; ++e) {
    const int d = e * kWarpSize + lane;
    values[e] = d < p.head_dim ? input(d) : 0.f;
    if (d < rotary_dim) {  // its half of turn_pair
      const bool is_first = p.neighbors ? d % 2 == 0 : d < half;
      const int apart = p.neighbors ? 1 : half;
      const float other = input(is_first ? d + apart : d - apart), c = to_float(cos[d]), s = to_float(sin[d]);
      values[e] = fmaf(values[e], c, is_first ? -other * s : other * s);
    }
  }
  if (head < p.num_heads) {
    T* out = static_cast<T*>(p.q_out) + (int64_t(token) * p.num_heads + head) * p.head_dim;
#pragma unroll
    for (int e = 0; e < kMaxElems; ++e) {
      const int d = e * kWarpSize + lane;
      if (d < p.head_dim) out[d] = from_float<T>(values[e]);
    }
    return;
  }

  uint32_t largest = 0;  // magnitudes compare as their bits do, and NaN is the largest
#pragma unroll
  for (int e = 0; e < kMaxElems; ++e) largest = max(largest, __float_as_uint(values[e]) & 0x7fffffffu);
  largest = __reduce_max_sync(kAllLanes, largest);
  constexpr float kMost = std::is_same_v<Quant, int8_t> ? kLargestInt8 : kLargestFloat8;
  const uint16_t bits = quant_scale(largest, kMost);
  const Divisor scale(bfloat16_bits_to_float(bits));

  QuantPlace place{static_cast<uint8_t*>(is_value ? p.v_cache : p.k_cache),
                   is_value ? p.v_scales : p.k_scales};
  int64_t capacity = p.capacity;
  if (p.kv_table) {
    const int64_t* entry = p.kv_table + kQuantizedTableColumns * p.layer;
    place.quants = reinterpret_cast<uint8_t*>(entry[is_value ? 1 : 0]);
    place.scales = reinterpret_cast<uint16_t*>(entry[is_value ? 4 : 3]);
    capacity = entry[2];
  }
  const int kv_head = head - p.num_heads - (is_value ? p.num_kv_heads : 0);
  const int64_t at = (int64_t(row) * p.num_kv_heads + kv_head) * capacity + cache_slot(p, capacity, token);
  if (lane == 0) place.scales[at] = bits;
#pragma unroll
  for (int e = 0; e < kMaxElems; ++e) {
    const int d = e * kWarpSize + lane;
    if (d < p.head_dim) place.quants[at * p.head_dim + d] = quantize<Quant>(values[e], scale);
  }
}

template <class T, class Quant>
void launch(const RopeAppendParams& params, cudaStream_t stream) {
  const int heads = params.num_heads + 2 * params.num_kv_heads;
  const dim3 grid(params.batch * params.query_len, (heads + kWarps - 1) / kWarps), block(kWarps * kWarpSize);
  const size_t smem_bytes = 0;
  rope_append_quants_kernel<T, Quant><<<grid, block, smem_bytes, stream>>>(params);
}

}  // namespace

void launch_rope_append_quants(const RopeAppendParams& params, cudaStream_t stream) {
  with_type(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (params.kv_type == KvType::kInt8) return launch<T, int8_t>(params, stream);
    launch<T, Float8>(params, stream);
  });
  HF_FASTPATH_CUDA_CHECK(cudaGetLastError());
}

}  // namespace hf_fastpath
