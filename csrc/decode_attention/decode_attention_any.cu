// What: decode_attention for head sizes that no other kernel is made for: any even one, at any alignment, of
//   any types. Sums are float64.
// Work split: grid (rows of a KV head, KV heads, batch rows). A block's warps take every kWarps-th
//   position, one after the other; lanes own every 32nd dim, softmax is online. The first warp's lanes merge
//   what the warps found.
// Traffic: 2 * positions * head_dim * sizeof(KV) a row, from L2 for all but the first row of a KV head.
// Roofline: latency of a position's loads; the kernel is for correctness: few models but those of
//   tests have such sizes.

#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "common/kv_quants.cuh"
#include "common/warp.cuh"
#include "decode_attention/decode_attention.h"
#include "decode_attention/scores.cuh"
#include "decode_attention/split.cuh"

namespace hf_fastpath {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;

// One value of a cache, but for the scale of quants.
template <class KV>
__device__ __forceinline__ float cached_value(const KV* from) {
  if constexpr (std::is_same_v<KV, int8_t>) {
    return float(*from);
  } else if constexpr (std::is_same_v<KV, Float8>) {
    // Sign, exponent and mantissa as float16 has them, whose exponent's bias is 8 more.
    const uint16_t bits = uint16_t((from->bits & 0x80u) << 8 | (from->bits & 0x7fu) << 7);
    return __half2float(__ushort_as_half(bits)) * (1.f / kQuantUnit<KV>);
  } else {
    return to_float(*from);
  }
}

// kLaneDims: dims that a lane owns, at most.
template <class KV, int kLaneDims, bool kPaged>
__global__ void __launch_bounds__(kThreads, 1) decode_attention_any_kernel(DecodeAttentionParams p) {
  __shared__ double sums[kWarps][kLaneDims * kWarpSize], totals[kWarps], maxima[kWarps];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int row = blockIdx.x, kv_head = blockIdx.y, batch_row = blockIdx.z;
  allow_next_kernel();
  wait_for_previous_kernel();  // it appends the newest positions
  const auto s = find_split<kPaged>(p, batch_row, kv_head, 0, 1, 0, sizeof(KV));
  const RowPlace place = row_place(p, s, kv_head, row);
  const int64_t at = out_offset(p, batch_row, place);
  const int newest = s.seq_len - p.query_len + place.token;
  const int first = max(s.first_visible(newest, p.window), s.begin), end = min(newest + 1, s.end);
  Scales scales{};
  if constexpr (kIsQuant<KV>) scales = find_scales(p, s, batch_row, kv_head);

  double q[kLaneDims], acc[kLaneDims] = {};
#pragma unroll
  for (int i = 0; i < kLaneDims; ++i) {
    const int d = i * kWarpSize + lane;
    q[i] = d < p.head_dim ? double(load_as_float(p.q, at + d, p.dtype)) * p.scale : 0.0;
  }
  double max = -INFINITY, total = 0.0;
#pragma unroll 1
  for (int position = first + warp; position < end; position += kWarps) {
    const uint32_t slot = s.slot(position - s.begin);
    const uint64_t from = uint64_t(slot) * uint32_t(p.head_dim);
    const KV* k = reinterpret_cast<const KV*>(s.k) + from;
    const KV* v = reinterpret_cast<const KV*>(s.v) + from;
    double score = 0.0;
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) {
      const int d = i * kWarpSize + lane;
      if (d < p.head_dim) score += q[i] * cached_value(k + d);
    }
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
      score += __shfl_xor_sync(kAllLanes, score, offset);
    if constexpr (kIsQuant<KV>) score *= bfloat16_bits_to_float(scales.k[slot]);
    if (p.softcap > 0.f) score = p.softcap * tanh(score / p.softcap);
    if (p.slopes) score += double(p.slopes[place.head]) * (position - newest);
    if (p.biases) score += bias_at(p, bias_row(p, batch_row, place.head), newest - position);
    const double top = score > max ? score : max;
    const double shrink = max == -INFINITY ? 0.0 : exp(max - top);
    double weight = exp(score - (top == -INFINITY ? 0.0 : top));
    max = top, total = total * shrink + weight;
    if constexpr (kIsQuant<KV>) weight *= bfloat16_bits_to_float(scales.v[slot]);
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) {
      const int d = i * kWarpSize + lane;
      if (d < p.head_dim) acc[i] = acc[i] * shrink + weight * cached_value(v + d);
    }
  }
#pragma unroll
  for (int i = 0; i < kLaneDims; ++i) sums[warp][i * kWarpSize + lane] = acc[i];
  if (lane == 0) totals[warp] = total, maxima[warp] = max;
  __syncthreads();  // every warp's results

  const int out_row = output_row(p, batch_row, place);
  const double sink =
      p.sinks && place.sees_any ? double(load_as_float(p.sinks, place.head, p.dtype)) : -INFINITY;
  const double other_lse = p.other ? double(p.other_lse[out_row]) : -INFINITY;
  double top = sink > other_lse ? sink : other_lse, sum = 0.0;
  for (int w = 0; w < kWarps; ++w) top = maxima[w] > top ? maxima[w] : top;
  double factors[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    factors[w] = maxima[w] == -INFINITY ? 0.0 : exp(maxima[w] - top);
    // A warp whose scores were all NaN has no maximum, but a sum that says so.
    sum += isnan(totals[w]) ? totals[w] : totals[w] * factors[w];
  }
  const double of_sink = sink == -INFINITY ? 0.0 : exp(sink - top),
               of_other = other_lse == -INFINITY ? 0.0 : exp(other_lse - top);
  sum += of_sink + of_other;
  if (p.lse && threadIdx.x == 0) p.lse[out_row] = float(top + log(sum));
  const bool sees_none = !place.sees_any && sum == 0.0;
  for (int d = threadIdx.x; d < p.head_dim; d += kThreads) {
    double out = p.other ? of_other * load_as_float(p.other, at + d, p.dtype) : 0.0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) out += sums[w][d] * factors[w];
    store_from_float(p.out, at + d, p.dtype, sees_none ? 0.f : float(out / sum));
  }
}

template <class KV, int kLaneDims>
void launch(const DecodeAttentionParams& p, cudaStream_t stream) {
  const dim3 grid(rows_per_kv_head(p), p.num_kv_heads, p.batch), block(kThreads);
  const size_t smem_bytes = 0;
  if constexpr (!kIsQuant<KV>) {
    if (p.pages.table) {
      const auto kernel = decode_attention_any_kernel<KV, kLaneDims, true>;
      return launch_attention(kernel, grid, block, smem_bytes, stream, p);
    }
  }
  launch_attention(decode_attention_any_kernel<KV, kLaneDims, false>, grid, block, smem_bytes, stream, p);
}

}  // namespace

void launch_decode_attention_any(const DecodeAttentionParams& params, cudaStream_t stream) {
  with_kv_type(params.kv_type, [&](auto zero) {
    using KV = decltype(zero);
    if (params.head_dim <= 2 * kWarpSize) return launch<KV, 2>(params, stream);
    launch<KV, kMaxHeadDim / kWarpSize>(params, stream);
  });
}

}  // namespace hf_fastpath
