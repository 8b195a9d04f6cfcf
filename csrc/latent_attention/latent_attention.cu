// What: softmax(scale * (q_latent . latents + q_rope . rope_keys)) . latents for each head, whose latents all
//   heads share. This file has the kernel for any sizes and types, whose sums are float64, and the kernel
//   that merges what blocks found; latent_attention_mma.cu has the kernel for tensor cores.
// Work split: grid (splits, heads, batch); the warps of a block take every kWarps-th position, lanes own
//   every 32nd element, softmax is online. A block of the merge takes 128 elements of a head, a thread each.
// Traffic: positions * (rank + rope_dim) * sizeof(T) for each head, from L2 for all but one.
// Roofline: latency of a position's loads. The kernel is for correctness: published models have 16 bits.

#include "common/cuda_check.cuh"
#include "common/heads.cuh"
#include "common/warp.cuh"
#include "latent_attention/latent_attention.h"
#include "latent_attention/latent_range.cuh"

namespace hf_fastpath {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kLaneLatents = kMaxLatentRank / kWarpSize, kLaneRope = kMaxLatentRope / kWarpSize;
constexpr int kMaxSplits = 128;     // of a head
constexpr int kMergeThreads = 128;  // elements of a head
constexpr int kAhead = 8;           // loads in flight while merging
constexpr double kLog2eDouble = 1.4426950408889634;

template <class T>
__global__ void __launch_bounds__(kThreads) latent_attention_kernel(LatentSplits s) {
  const LatentAttentionParams& p = s.p;
  __shared__ double sums[kWarps][kMaxLatentRank], totals[kWarps], maxima[kWarps];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int split = blockIdx.x, head = blockIdx.y, row = blockIdx.z;
  const int rank = static_cast<int>(p.rank), rope_dim = static_cast<int>(p.rope_dim);
  allow_next_kernel();
  wait_for_previous_kernel();
  const LatentRange range(s, row);
  if (split == 0 && head == 0) append_newest<T>(p, range, row);
  if (split >= range.active) return;

  const T* q_latent = head_of<T>(p.q_latent, row, head);
  const T* q_rope = head_of<T>(p.q_rope, row, head);
  float q[kLaneLatents], rotated[kLaneRope];
#pragma unroll
  for (int i = 0; i < kLaneLatents; ++i) {
    const int d = i * kWarpSize + lane;
    q[i] = d < rank ? load_float_l2(q_latent + d) : 0.f;
  }
#pragma unroll
  for (int i = 0; i < kLaneRope; ++i) {
    const int d = i * kWarpSize + lane;
    rotated[i] = d < rope_dim ? rotated_at(p, row, q_rope, d) : 0.f;
  }
  double acc[kLaneLatents] = {}, max = -INFINITY, total = 0.0;
#pragma unroll 1
  for (int position = range.begin(split) + warp; position < range.end(split); position += kWarps) {
    const int64_t slot = int64_t(row) * range.capacity + position;
    const T* latent = static_cast<const T*>(range.latents) + slot * rank;
    const T* rope = static_cast<const T*>(range.rope_keys) + slot * rope_dim;
    const bool is_new = p.new_latent.data && position == range.last - 1;
    float values[kLaneLatents];
    double score = 0.0;
#pragma unroll
    for (int i = 0; i < kLaneLatents; ++i) {
      const int d = i * kWarpSize + lane;
      values[i] = d >= rank ? 0.f : is_new ? to_float(newest<T>(p, row, d)) : load_float_l2(latent + d);
      score += double(q[i]) * values[i];
    }
#pragma unroll
    for (int i = 0; i < kLaneRope; ++i) {
      const int d = i * kWarpSize + lane;
      if (d >= rope_dim) continue;
      const float key = is_new ? to_float(newest<T>(p, row, rank + d)) : load_float_l2(rope + d);
      score += double(rotated[i]) * key;
    }
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
      score += __shfl_xor_sync(kAllLanes, score, offset);
    score *= double(p.scale) * kLog2eDouble;
    const double top = score > max ? score : max, base = top == -INFINITY ? 0.0 : top;
    const double shrink = exp2(max - base), weight = exp2(score - base);
    max = top, total = total * shrink + weight;
#pragma unroll
    for (int i = 0; i < kLaneLatents; ++i) acc[i] = acc[i] * shrink + weight * values[i];
  }
#pragma unroll
  for (int i = 0; i < kLaneLatents; ++i) sums[warp][i * kWarpSize + lane] = acc[i];
  if (lane == 0) totals[warp] = total, maxima[warp] = max;
  __syncthreads();  // every warp's results

  double top = -INFINITY, sum = 0.0, factors[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) top = maxima[w] > top ? maxima[w] : top;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    factors[w] = exp2(maxima[w] - (top == -INFINITY ? 0.0 : top));
    sum += totals[w] * factors[w];
  }
  const int64_t place = (int64_t(row) * p.heads + head) * s.splits + split;
  for (int d = threadIdx.x; d < rank; d += kThreads) {
    double out = 0.0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) out += sums[w][d] * factors[w];
    s.outputs[place * rank + d] = static_cast<float>(out);
  }
  if (threadIdx.x == 0) s.max_sums[place] = make_float2(static_cast<float>(top), static_cast<float>(sum));
}

template <class T>
__global__ void __launch_bounds__(kMergeThreads) merge_latents_kernel(LatentSplits s) {
  __shared__ float factors[kMaxSplits];
  const LatentAttentionParams& p = s.p;
  const int rank = static_cast<int>(p.rank), lane = threadIdx.x % kWarpSize;
  const int head = blockIdx.y, row = blockIdx.z, d = blockIdx.x * kMergeThreads + threadIdx.x;
  const int64_t place = int64_t(row) * p.heads + head;
  allow_next_kernel();
  if (!p.programmatic_launch) wait_for_previous_kernel();
  const int active = LatentRange(s, row).active, last = max(active, 1) - 1;
  wait_for_previous_kernel();
  const float* outputs = s.outputs + place * s.splits * rank + min(d, rank - 1);
  float ahead[kAhead];
  const auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead[i] = __ldcg(outputs + int64_t(min(first + i, last)) * rank);
  };
  load(0);
  constexpr int kPerLane = kMaxSplits / kWarpSize;
  float2 found[kPerLane];
  float max = -INFINITY, total = 0.f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int split = lane + i * kWarpSize;
    found[i] = split < active ? __ldcg(s.max_sums + place * s.splits + split) : make_float2(-INFINITY, 0.f);
    max = fmaxf(max, found[i].x);
  }
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, offset));
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const float factor = exp2_below(found[i].x, max);
    total = fmaf(found[i].y, factor, total);
    if (threadIdx.x < kWarpSize) factors[lane + i * kWarpSize] = factor;
  }
  const float inverse = active > 0 ? 1.f / warp_sum(total) : 0.f;
  __syncthreads();  // factors
  float sum = 0.f;
#pragma unroll 1
  for (int first = 0; first < active; first += kAhead) {
    if (first > 0) load(first);
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (first + i < active) sum = fmaf(ahead[i], factors[first + i], sum);
  }
  if (d < rank) static_cast<T*>(p.out)[place * rank + d] = from_float<T>(sum * inverse);
}

}  // namespace

int latent_splits(const LatentAttentionParams& p) {
  constexpr int kRows = 16;  // heads that the tensor cores take at once
  const int64_t units = p.batch * (uses_latent_mma(p) ? (p.heads + kRows - 1) / kRows : p.heads);
  int64_t splits = multiprocessor_count() / units;
  if (!p.kv_table) {  // else the host does not know how long the cache is
    const int64_t chunks = (p.capacity + kMinLatentChunk - 1) / kMinLatentChunk;
    splits = splits < chunks ? splits : chunks;
  }
  return static_cast<int>(splits < 1 ? 1 : splits > kMaxSplits ? kMaxSplits : splits);
}

int64_t latent_workspace_bytes(const LatentAttentionParams& p) {
  return p.batch * p.heads * latent_splits(p) * (p.rank * sizeof(float) + sizeof(float2));
}

void launch_latent_attention(const LatentAttentionParams& p, void* workspace, cudaStream_t stream) {
  LatentSplits s{p, latent_splits(p), nullptr, static_cast<float2*>(workspace)};
  s.outputs = reinterpret_cast<float*>(s.max_sums + p.batch * p.heads * s.splits);
  const size_t smem_bytes = 0;
  const bool programmatic_launch = true;  // nothing is read before the wait
  const unsigned heads = static_cast<unsigned>(p.heads), rows = static_cast<unsigned>(p.batch);
  const unsigned parts = static_cast<unsigned>((p.rank + kMergeThreads - 1) / kMergeThreads);
  with_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (uses_latent_mma(p)) {
      launch_latent_mma(s, stream);
    } else {
      const dim3 grid(s.splits, heads, rows), block(kThreads);
      HF_FASTPATH_CUDA_CHECK(launch_programmatic(latent_attention_kernel<T>, grid, block, smem_bytes, stream,
                                                 programmatic_launch, s));
    }
    const dim3 grid(parts, heads, rows), block(kMergeThreads);
    HF_FASTPATH_CUDA_CHECK(launch_programmatic(merge_latents_kernel<T>, grid, block, smem_bytes, stream,
                                               programmatic_launch, s));
  });
}

}  // namespace hf_fastpath
