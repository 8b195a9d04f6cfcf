// What: append_attention for types that tensor cores do not multiply exactly, float32, and for head sizes
//   that they are not made for. Sums are float64.
// Work split: grid (rows of a KV head, KV heads, batch rows), a warp each: lanes own dims, positions come one
//   after the other, softmax is online.
// Traffic: 2 * positions * head_dim * 4 bytes a row, from L2 for all but the first that run together.
// Roofline: arithmetic, in chains; for correctness: models in float32 call PyTorch's attention.
#include "append_attention/append_attention.h"
#include "append_attention/row_tile.cuh"
#include "common/cuda_check.cuh"

namespace hf_fastpath {
namespace append {
namespace {

// kLaneDims: dims that a lane owns, at most.
template <int kLaneDims>
__global__ void __launch_bounds__(kWarpSize, 1) append_attention_kernel(AppendAttentionParams p) {
  RowTile t;
  t.batch_row = blockIdx.z, t.kv_head = blockIdx.y, t.first_row = blockIdx.x;
  t.seq_len = length_of(p, t.batch_row);
  t.start = p.starts ? max(__ldg(p.starts + t.batch_row), 0) : 0;
  t.past = t.seq_len - p.query_len;
  const RowPlace place = row_place(p, t, 0);
  const int64_t at = row_offset(p, t, place);
  const uint64_t head = uint64_t(t.batch_row * p.num_kv_heads + t.kv_head) * p.capacity;
  double q[kLaneDims], acc[kLaneDims] = {};
#pragma unroll
  for (int i = 0; i < kLaneDims; ++i) {
    const int d = i * kWarpSize + threadIdx.x;
    q[i] = d < p.head_dim ? double(load_as_float(p.q, at + d, p.dtype)) * p.scale : 0.0;
  }
  double max = -INFINITY, sum = 0.0;
  if (p.sinks) max = load_as_float(p.sinks, place.head, p.dtype), sum = 1.0;
  for (int position = place.first; position <= place.last; ++position) {
    const int64_t from = (head + position) * p.head_dim;
    double score = 0.0;
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) {
      const int d = i * kWarpSize + threadIdx.x;
      if (d < p.head_dim) score += q[i] * load_as_float(p.k_cache, from + d, p.dtype);
    }
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
      score += __shfl_xor_sync(kAllLanes, score, offset);
    if (p.softcap > 0.f) score = p.softcap * tanh(score / p.softcap);
    const double top = score > max ? score : max;
    const double shrink = max == -INFINITY ? 0.0 : exp(max - top),
                 weight = exp(score - (top == -INFINITY ? 0.0 : top));
    max = top, sum = sum * shrink + weight;
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) {
      const int d = i * kWarpSize + threadIdx.x;
      if (d < p.head_dim) acc[i] = acc[i] * shrink + weight * load_as_float(p.v_cache, from + d, p.dtype);
    }
  }
#pragma unroll
  for (int i = 0; i < kLaneDims; ++i) {
    const int d = i * kWarpSize + threadIdx.x;
    if (d >= p.head_dim) continue;
    store_from_float(p.out, at + d, p.dtype, place.first > place.last ? 0.f : float(acc[i] / sum));
  }
}

}  // namespace
}  // namespace append

void launch_append_attention_portable(const AppendAttentionParams& params, cudaStream_t stream) {
  const dim3 grid(append::rows_per_kv_head(params), params.num_kv_heads, params.batch), block(kWarpSize);
  const auto kernel = params.head_dim > kMaxTunedHeadDim
                          ? append::append_attention_kernel<kMaxHeadDim / kWarpSize>
                          : append::append_attention_kernel<kMaxTunedHeadDim / kWarpSize>;
  kernel<<<grid, block, 0, stream>>>(params);
  HF_FASTPATH_CUDA_CHECK(cudaGetLastError());
}

}  // namespace hf_fastpath
