// What: a decoder layer of a small model over one token as two kernels: norm, projections, attention and
//   output projection; norm, up projection, activation and down projection. Weights are stored [in, out].
// Work split: clusters of 8 blocks. For attention a cluster has a head, for the MLP a 16th of the inner
//   features. Every block of it takes an 8th of the input's features, so that a weight row's part lies in one
//   piece, and sends its sums to the 7 others through distributed shared memory. Then each has all inner
//   features of the cluster; of the second product it makes an 8th of the outputs, of which the next kernel
//   adds up what the clusters made. So a layer has two exchanges through device memory instead of five, and
//   all weights of a block are in shared memory before its input is there: a kernel takes as long as its
//   chain of latencies. Over cached positions the blocks of a head each take an 8th. The norm's mean and
//   variance are known only after the exchange: products are of (x - center) * weight with a center from the
//   kernel in front, and of the norm's weight and bias alone before the input is there. A word that all
//   blocks ask for at once is asked for by one thread of each: L2 answers one after the other.
// Traffic: the weights once; partial sums out of L2, clusters * clusters in front * hidden * 4 bytes a
// kernel. Roofline: latency. GPT-2 124M, float16: 4.1 us for the MLP, 6.0 for attention at 128 positions
// (H200, 2026-11).

#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/activation.cuh"
#include "common/async.cuh"
#include "common/inverse_root.cuh"
#include "common/numeric.cuh"
#include "common/tensor_map.h"
#include "common/warp.cuh"
#include "decode_layers/cluster_attention.cuh"
#include "decode_layers/cluster_layers.h"
#include "decode_layers/cluster_product.cuh"

namespace hf_fastpath {
namespace {

template <class T, int kHidden, bool kAttention>
struct Shape {
  static constexpr int kSlice = kHidden / kClusterSize;  // of the input and of the output, a block's
  static constexpr int kInner = kAttention ? kClusterHeadDim : 4 * kHidden / kMlpClusters;
  static constexpr int kFirstColumns = kAttention ? 3 * kClusterHeadDim : kInner;
  using First = Product<T, kSlice, kFirstColumns>;
  using Second = Product<T, kInner, kSlice>;
  // The second product's weights wait in L2 and come into the place of the first's while sums travel: with
  // both in shared memory, blocks of two kernels would not fit on an SM.
  static constexpr bool kSecondLater = sizeof(T) == 4;
  static constexpr int kSumBytes =
      First::kSumBytes > Second::kSumBytes ? First::kSumBytes : Second::kSumBytes;

  struct Shared {
    alignas(128) T first[kSecondLater && kInner > kFirstColumns ? kSlice * kInner : kSlice * kFirstColumns];
    alignas(128) T second[kSecondLater ? 1 : kInner * kSlice];
    alignas(16) char sums[kSumBytes];
    float products[kClusterSize][kFirstColumns];  // of x, from every block
    union {
      float constants[2][kClusterSize][kFirstColumns];  // of the norm's weight and bias
      HeadPartials mixed;  // no block sends any before all blocks have read the constants
    };
    float slice_sums[kClusterSize], slice_squares[kClusterSize];
    float x[kSlice], scaled_x[kSlice], norm_weight[kSlice], norm_bias[kSlice];
    float inner[kFirstColumns];  // after the first product
    float mixed_head[kClusterHeadDim];
    float center;
    uint64_t barriers[5];
  };
};

template <class T, int kHidden, bool kAttention>
__global__ void __launch_bounds__(kClusterBlockThreads, 2)
    cluster_kernel(const __grid_constant__ ClusterBlockParams p) {
#if HF_FASTPATH_HOPPER
  using S = Shape<T, kHidden, kAttention>;
  using First = typename S::First;
  using Second = typename S::Second;
  constexpr int kSlice = S::kSlice;
  extern __shared__ __align__(128) char raw_shared[];
  auto& shared = *reinterpret_cast<typename S::Shared*>(raw_shared);
  const int tid = threadIdx.x, lane = tid % kWarpSize, warp = tid / kWarpSize;
  const int rank = blockIdx.x % kClusterSize, cluster = blockIdx.x / kClusterSize;
  const int first_feature = rank * kSlice;
  float* sums = reinterpret_cast<float*>(shared.sums);
  const Inbox constants_in{shared_address(&shared.barriers[0])},
      products_in{shared_address(&shared.barriers[1])}, mixed_in{shared_address(&shared.barriers[2])};

  const Inbox first_in{shared_address(&shared.barriers[3])}, second_in{shared_address(&shared.barriers[4])};
  allow_next_kernel();
  if (tid == kClusterThreads) {
    constants_in.open(int(sizeof(shared.constants)));
    products_in.open(int(sizeof(shared.products) + sizeof(shared.slice_sums) + sizeof(shared.slice_squares)));
    if (kAttention) mixed_in.open(HeadPartials::kBytesIn);
    first_in.open(S::First::kRows * S::First::kColumns * int(sizeof(T)));
    second_in.open(S::Second::kRows * S::Second::kColumns * int(sizeof(T)));
    barrier_init_done();
  }
  __syncwarp();
  arrive_cluster();

  // Weights.
  const int first_output = cluster * S::kInner;  // attention: of each of query, key and value
  const auto first_column = [&](int c) {
    return kAttention ? c / kClusterHeadDim * (p.heads * kClusterHeadDim) + first_output + c % kClusterHeadDim
                      : first_output + c;
  };
  T* second = S::kSecondLater ? shared.first : shared.second;
  const auto fetch_second = [&] {
    copy_tile_to_shared(shared_address(second), &p.second_tiles, first_feature, 0, first_output,
                        second_in.barrier);
  };
  for (int i = tid; i < kSlice; i += kClusterBlockThreads) {
    shared.norm_weight[i] =
        p.norm_weight ? to_float(static_cast<const T*>(p.norm_weight)[first_feature + i]) : 1.f;
    shared.norm_bias[i] = p.norm_bias ? to_float(static_cast<const T*>(p.norm_bias)[first_feature + i]) : 0.f;
  }
  const int output = First::output(), part = tid % First::kSplit;
  const bool has_output = tid < kClusterThreads && output < First::kColumns;
  const float first_bias =
      has_output && p.first_bias ? to_float(static_cast<const T*>(p.first_bias)[first_column(output)]) : 0.f;

  HeadAttention<T, kAttention> attention(p, cluster, rank);  // asks for old positions

  wait_cluster();  // all blocks run, their barriers are ready
  if (tid == kClusterThreads) {
    // By then the kernel that runs has its input, which would else stand behind these weights in the memory
    // system's queues. Float32 has no time to lose.
    if (sizeof(T) == 2) __nanosleep(1000);
    copy_tile_to_shared(shared_address(shared.first), &p.first_tiles, first_output, 0, first_feature,
                        first_in.barrier);
    if (S::kSecondLater) {
      prefetch_tile(&p.second_tiles, first_feature, 0, first_output);
    } else {
      fetch_second();
    }
  }
  __syncthreads();  // norm
  first_in.wait();
  // What the norm's weight and bias make of the first product.
  float of_weight = 0.f, constant = first_bias;
  {
    float constants[2];
    const float* const factors[2] = {shared.norm_weight, shared.norm_bias};
    First::template run<2>(shared.first, factors, sums, constants);
    if (has_output) {
#pragma unroll
      for (int r = 0; r < kClusterSize / First::kSplit; ++r)
#pragma unroll
        for (int which = 0; which < 2; ++which)
          constants_in.send(&shared.constants[which][rank][output], r * First::kSplit + part,
                            constants[which]);
    }
  }
  constants_in.wait();
  if (has_output) {
#pragma unroll
    for (int r = 0; r < kClusterSize; ++r) {
      of_weight += shared.constants[0][r][output];
      constant += shared.constants[1][r][output];
    }
  }
  // The stream's slice.
  constexpr int kMaxPartials = kAttention ? kMlpClusters : kMaxClusterHeads;
  constexpr int kQuads = kSlice / 4, kItems = kMaxPartials * kQuads,
                kRounds = (kItems + kClusterThreads - 1) / kClusterThreads;
  const bool has_feature = tid < kSlice;
  const float in_bias =
      has_feature && p.in.bias ? to_float(static_cast<const T*>(p.in.bias)[first_feature + tid]) : 0.f;
  __syncthreads();  // sums are free again

  wait_for_previous_kernel();
  float base = 0.f;
  if (has_feature) {
    base = p.in.token
               ? to_float(Chunk<T, 1>::load_l2(static_cast<const T*>(p.in.token) + first_feature + tid))
               : __ldcg(p.in.base + first_feature + tid);
  } else if (tid == kClusterThreads) {  // one thread: all blocks ask for this word at the same time
    shared.center = p.center ? __ldcg(p.center) : 0.f;
  }
  if (tid < kClusterThreads) {
    float4 partials[kRounds];
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int item = tid + round * kClusterThreads, in_part = item / kQuads, quad = item - in_part * kQuads;
      partials[round] =
          in_part < p.in.num_partials
              ? __ldcg(reinterpret_cast<const float4*>(p.in.partials + in_part * kHidden + first_feature) +
                       quad)
              : make_float4(0.f, 0.f, 0.f, 0.f);
    }
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int item = tid + round * kClusterThreads;
      if (item < kItems) reinterpret_cast<float4*>(sums)[item] = partials[round];
    }
  }
  __syncthreads();  // partials, center
  const float center = shared.center;
  if (has_feature) {
    float sum = 0.f;
#pragma unroll
    for (int in_part = 0; in_part < kMaxPartials; ++in_part) sum += sums[in_part * kSlice + tid];
    const float x = base + (sum + in_bias);
    shared.x[tid] = x;
    shared.scaled_x[tid] = (x - center) * shared.norm_weight[tid];
    if (cluster == 0) p.stream[first_feature + tid] = x;
  }
  __syncthreads();  // the slice; sums are free again
  trace(TracePoint::kReady);
  if (warp == kClusterWarps) {  // statistics
    constexpr int kEach = (kSlice + kWarpSize - 1) / kWarpSize;
    float values[kEach], sum = 0.f, squares = 0.f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      values[i] = lane + i * kWarpSize < kSlice ? shared.x[lane + i * kWarpSize] : 0.f;
      sum += values[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float off = lane + i * kWarpSize < kSlice ? values[i] - sum / kSlice : 0.f;
      squares = fmaf(off, off, squares);
    }
    squares = warp_sum(squares);
    if (lane < kClusterSize) {
      products_in.send(&shared.slice_sums[rank], lane, sum);
      products_in.send(&shared.slice_squares[rank], lane, squares);
    }
  }
  const float product = First::run(shared.first, shared.scaled_x, sums);
  if (has_output) {
#pragma unroll
    for (int r = 0; r < kClusterSize / First::kSplit; ++r)
      products_in.send(&shared.products[rank][output], r * First::kSplit + part, product);
  }
  if (S::kSecondLater && tid == kClusterThreads) fetch_second();
  trace(TracePoint::kSums);
  products_in.wait();
  {
    float mean = 0.f, squares = 0.f;
#pragma unroll
    for (int r = 0; r < kClusterSize; ++r) mean += shared.slice_sums[r];
    mean /= kHidden;
#pragma unroll
    for (int r = 0; r < kClusterSize; ++r) {
      const float off = shared.slice_sums[r] / kSlice - mean;
      squares += fmaf(off * off, float(kSlice), shared.slice_squares[r]);
    }
    const float scale = inverse_root<T>(squares / kHidden + p.norm_eps);
    if (tid == 0 && cluster == 0 && rank == 0) *p.mean = mean;
    if (has_output) {
      float sum = 0.f;
#pragma unroll
      for (int r = 0; r < kClusterSize; ++r) sum += shared.products[r][output];
      float y = fmaf(scale, sum - (mean - center) * of_weight, constant);
      if (!kAttention) {
        y = activate(y, p.activation);
      } else if (output >= kClusterHeadDim) {
        y = to_float(from_float<T>(y));  // as the cache keeps it
      }
      if (part == 0) shared.inner[output] = y;
    }
  }
  __syncthreads();  // the first product
  trace(TracePoint::kMerged);

  const float* inner = shared.inner;
  if constexpr (kAttention) {
    attention.mix(p, shared.inner, shared.mixed, mixed_in, shared.mixed_head);
    __syncthreads();  // the head's output
    inner = shared.mixed_head;
  }
  second_in.wait();
  const float sum = Second::run(second, inner, sums);
  const int out = Second::output();
  if (tid < kClusterThreads && out < kSlice && tid % Second::kSplit == 0) {
    p.partials[cluster * kHidden + first_feature + out] = sum;
  }
  trace(TracePoint::kEnd);
#endif
}

template <class T>
__global__ void stream_kernel(const __grid_constant__ StreamIn in, T* out, int hidden) {
  allow_next_kernel();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const float bias = in.bias && i < hidden ? to_float(static_cast<const T*>(in.bias)[i]) : 0.f;
  wait_for_previous_kernel();
  if (i >= hidden) return;
  float sum = 0.f;
#pragma unroll 16
  for (int part = 0; part < in.num_partials; ++part) sum += __ldcg(in.partials + part * hidden + i);
  out[i] = from_float<T>(__ldcg(in.base + i) + (sum + bias));
  trace(TracePoint::kEnd);
}

// Tiles of kRows rows and kColumns columns of a matrix, from each of `pieces` pieces of its columns side by
// side.
template <class T>
CUtensorMap tiles_of(const void* weight, int64_t rows, int64_t columns, int64_t stride, int pieces,
                     int tile_rows, int tile_columns) {
  constexpr CUtensorMapDataType kType = std::is_same_v<T, float>    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                        : std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                    : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const uint64_t piece = columns / pieces;
  return tensor_map(weight, {kType,
                             CU_TENSOR_MAP_SWIZZLE_NONE,
                             {piece, static_cast<uint64_t>(pieces), static_cast<uint64_t>(rows)},
                             {piece * sizeof(T), static_cast<uint64_t>(stride) * sizeof(T)},
                             {static_cast<uint32_t>(tile_columns / pieces), static_cast<uint32_t>(pieces),
                              static_cast<uint32_t>(tile_rows)}});
}

template <bool kAttention, class T, int kHidden>
void launch(ClusterBlockParams p, cudaStream_t stream) {
  using S = Shape<T, kHidden, kAttention>;
  const int inner = kAttention ? p.heads * kClusterHeadDim : 4 * kHidden, pieces = kAttention ? 3 : 1;
  p.first_tiles = tiles_of<T>(p.first_weight, kHidden, pieces * inner, p.first_stride, pieces,
                              S::First::kRows, S::First::kColumns);
  p.second_tiles =
      tiles_of<T>(p.second_weight, inner, kHidden, p.second_stride, 1, S::Second::kRows, S::Second::kColumns);
  const auto kernel = cluster_kernel<T, kHidden, kAttention>;
  constexpr int kBytes = int(sizeof(typename S::Shared));
  allow_shared_memory(kernel, kBytes);
  const int clusters = kAttention ? p.heads : kMlpClusters;
  HF_FASTPATH_CUDA_CHECK(launch_clusters(kernel, dim3(clusters * kClusterSize), dim3(kClusterBlockThreads),
                                         kBytes, stream, p.programmatic_launch, kClusterSize, p));
}

template <bool kAttention>
void launch_sized(const ClusterBlockParams& p, cudaStream_t stream) {
  with_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (sizeof(T) == 2) {
      if (p.hidden == 1024) return launch<kAttention, T, 1024>(p, stream);
    }
    launch<kAttention, T, 768>(p, stream);
  });
}

}  // namespace

bool fits_cluster_layers(int64_t hidden, int64_t heads, DType dtype) {
  return has_hopper_code() && heads <= kMaxClusterHeads &&
         (hidden == 768 || (hidden == 1024 && dtype != DType::kFloat32));
}

void launch_cluster_attention(const ClusterBlockParams& params, cudaStream_t stream) {
  launch_sized<true>(params, stream);
}

void launch_cluster_mlp(const ClusterBlockParams& params, cudaStream_t stream) {
  launch_sized<false>(params, stream);
}

void launch_cluster_stream(const StreamIn& in, void* out, int hidden, DType dtype, bool programmatic_launch,
                           cudaStream_t stream) {
  constexpr int kBlock = 128;
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    HF_FASTPATH_CUDA_CHECK(launch_programmatic(stream_kernel<T>, dim3((hidden + kBlock - 1) / kBlock),
                                               dim3(kBlock), 0, stream, programmatic_launch, in,
                                               static_cast<T*>(out), hidden));
  });
}

}  // namespace hf_fastpath
