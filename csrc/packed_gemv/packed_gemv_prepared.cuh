// What: several rows of a 16-bit x as operands of tensor cores, for packed_gemv_ring.cuh: normed, multiplied
//   by a power of two for each row, in the order that quants want, and the sums that take off what quants
//   have in excess. Each block of the product would make the same of all of x, and take longer for that than
//   for its products; so they only copy it.
// Work split: a block a row; every thread takes chunks of eight values, of which it keeps the first four in
//   registers between finding the row's largest magnitude and converting.
// Traffic: x and the norm's weight once, and 2 bytes a value of columns written.
// Roofline: latency: 2 us beside the product's kernel, which reads weights meanwhile (H200, 2026-11).
#pragma once

#include "common/inverse_root.cuh"
#include "packed_gemv/packed_gemv_lanes.cuh"

namespace hf_fastpath {

constexpr int kPrepareThreads = 512;

// What packed_prepare_kernel leaves in device memory: of whole pieces, as they are needed in shared memory.
template <int kColumns, int kSumsOfBlock>
struct PreparedLayout {
  static constexpr int kBlockBytes = int(kSubBlocks) * kColumns * 64;  // operands [kSubBlocks][kColumns][4 q]
  static constexpr int kBlockSums = kSumsOfBlock * kColumns;           // floats
  int blocks;                                                          // of a row, of whole pieces

  __host__ __device__ constexpr int64_t sums_at() const { return int64_t(blocks) * kBlockBytes; }
  __host__ __device__ constexpr int64_t undo_at() const {
    return sums_at() + int64_t(blocks) * kBlockSums * 4;
  }
  __host__ __device__ constexpr int64_t bytes() const { return undo_at() + kColumns * 4; }
};

// A block has so many sums of x, each over the weights of a scale, where quants have something in excess.
template <PackedFormat kFormat>
constexpr int kSumsOfBlock = kTakesOff<kFormat> ? std::max(1, Traits<kFormat>::kScalesPerBlock) : 0;

template <PackedFormat kFormat, int kColumns>
using PreparedOf = PreparedLayout<kColumns, kSumsOfBlock<kFormat>>;

// A block a row of x. `width`: as PackedPlan::x_width.
template <class T, PackedFormat kFormat, int kColumns>
__global__ void __launch_bounds__(kPrepareThreads)
    packed_prepare_kernel(const T* x, GemvNorm norm, int64_t k, int width, char* to,
                          PreparedOf<kFormat, kColumns> layout) {
  constexpr int kHeld = 4;  // chunks of eight values a thread keeps; of longer rows it loads the rest twice
  __shared__ float scratch[2][kPrepareThreads / kWarpSize];
  const int tid = threadIdx.x, warp = tid / kWarpSize, lane = tid % kWarpSize, row = blockIdx.x;
  const bool rms = norm.kind == NormKind::kRms;
  allow_next_kernel();
  const auto chunk_of = [&](const void* from, int chunk, bool is_x) {
    Eight<T> values = {};
    if (chunk * 8 < width) {
      const auto* at = reinterpret_cast<const uint4*>(static_cast<const T*>(from) + chunk * 8);
      values.part[0] = is_x ? __ldcg(at) : __ldg(at);
    }
    return values;
  };
  Eight<T> weights[kHeld], held[kHeld];
  if (rms) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) weights[i] = chunk_of(norm.weight, tid + i * kPrepareThreads, false);
  }
  wait_for_previous_kernel();
  x += int64_t(row) * width;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) held[i] = chunk_of(x, tid + i * kPrepareThreads, true);

  float square = 0.f;
  const auto values_of = [&](const Eight<T>& of_x, const Eight<T>& weight, float (&values)[8],
                             bool sums_squares) {
    of_x.unpack(values);
    if (!rms) return;
    float factors[8];
    weight.unpack(factors);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (sums_squares) square = fmaf(values[e], values[e], square);
      values[e] *= factors[e] + norm.weight_offset;
    }
  };
  // each(chunk, its values) for all chunks of this thread.
  const auto each = [&](bool sums_squares, auto use) {
    float values[8];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int chunk = tid + i * kPrepareThreads;
      if (chunk >= layout.blocks * 16) return;
      values_of(held[i], weights[i], values, sums_squares);
      use(chunk, values);
    }
#pragma unroll 1
    for (int chunk = tid + kHeld * kPrepareThreads; chunk < layout.blocks * 16; chunk += kPrepareThreads) {
      values_of(chunk_of(x, chunk, true), rms ? chunk_of(norm.weight, chunk, false) : Eight<T>{}, values,
                sums_squares);
      use(chunk, values);
    }
  };
  float most = 0.f;
  each(true, [&](int, const float (&values)[8]) {
#pragma unroll
    for (int e = 0; e < 8; ++e) most = fmaxf(most, fabsf(values[e]));
  });
  most = warp_max(most);
  if (rms) square = warp_sum(square);
  if (lane == 0) scratch[0][warp] = most, scratch[1][warp] = square;
  __syncthreads();
  most = 0.f, square = 0.f;
#pragma unroll
  for (int w = 0; w < kPrepareThreads / kWarpSize; ++w) {
    most = fmaxf(most, scratch[0][w]);
    square += scratch[1][w];
  }
  // The largest comes to lie below 2^15.
  const int exponent = max(14 - 126, int(__float_as_uint(most) >> 23) - 127);
  const float factor = __uint_as_float(unsigned(127 + 14 - exponent) << 23);
  if (tid == 0) {
    const float undo = __uint_as_float(unsigned(127 - 14 + exponent) << 23);
    reinterpret_cast<float*>(to + layout.undo_at())[row] =
        rms ? undo * inverse_root<T>(square / k + norm.eps) : undo;
  }
  each(false, [&](int chunk, const float (&values)[8]) {
    uint32_t rounded[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      rounded[i] = pack2(values[2 * i] * factor, values[2 * i + 1] * factor, __half());
    const uint4 operand = as_operand<kFormat, kCenters<T, kFormat>>(rounded);
    reinterpret_cast<uint4*>(to)[(chunk / 4 * kColumns + row) * 4 + chunk % 4] = operand;
    if constexpr (layout.kBlockSums > 0) {  // what quants have in excess, or each of the zero, times x
      constexpr float kHigh = kBits<kFormat> == 4 ? 16.f : 1.f;  // see Quants
      const auto sum_of_pair = [](uint32_t pair) {
        const float2 two = unpack2(pair, __half());
        return two.x + two.y;
      };
      float sum = sum_of_pair(operand.x) + sum_of_pair(operand.z) +
                  kHigh * (sum_of_pair(operand.y) + sum_of_pair(operand.w));
      constexpr int kLanes = 16 / kSumsOfBlock<kFormat>;
#pragma unroll
      for (int offset = 1; offset < kLanes; offset *= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
      constexpr float kOffset = -static_cast<float>(kExcess<kFormat>);
      if (chunk % kLanes == 0)
        reinterpret_cast<float*>(to + layout.sums_at())[chunk / kLanes * kColumns + row] =
            sum * (kOffset * kQuantUnit);
    }
  });
}

// What the product's kernel has of it in shared memory: the blocks of a phase.
template <class T, PackedFormat kFormat, int kColumns>
struct PreparedX {
  using Slot = PackedSlot<kFormat, kRingWarps>;
  using Layout = PreparedOf<kFormat, kColumns>;
  static constexpr int kSpanPieces = 1;
  static constexpr int kSpanBytes = Slot::kWarpBlocks * Layout::kBlockBytes;  // of a warp in a piece
  static constexpr int kSpanSteps = Slot::kWarpBlocks * Layout::kBlockSums * 4, kSpanNorm = 0;
  static constexpr int kPieceBlocks = Slot::kBlocks, kPieceSteps = Slot::kBlocks * Layout::kBlockSums * 4;

  uint4* operands;
  float* all_sums;
  float* sums;  // from this warp's first block on
  float* undo;

  __device__ __forceinline__ PreparedX(char* ring, const PackedPlan& plan, int warp, int, int)
      : operands(reinterpret_cast<uint4*>(ring + plan.x_at)),
        all_sums(reinterpret_cast<float*>(ring + plan.sums_at)),
        sums(all_sums + warp * Slot::kWarpBlocks * Layout::kBlockSums),
        undo(reinterpret_cast<float*>(ring + plan.scratch_at)) {}

  // They are as those of LaneX.
  __device__ __forceinline__ uint32_t operands_of_lane() const {
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    return shared_address(operands) + warp * Slot::kWarpBlocks * Layout::kBlockBytes +
           lane % (kColumns == 4 ? 16 : kWarpSize) * 16;
  }
  __device__ __forceinline__ uint32_t excess_of_lane() const {
    return shared_address(sums) + excess_lane<kColumns>();
  }
  __device__ __forceinline__ float undo_of(int m) const { return undo[m]; }

  // Does what WarpX::load does.
  template <class WaitForInput>
  __device__ __forceinline__ void load(const GemvParams& p, const PackedPlan& plan, int begin, int end,
                                       bool is_first, WaitForInput wait_for_input) const {
    const Layout layout{plan.pieces * Slot::kBlocks};
    const int first = begin * Slot::kBlocks, blocks = (end - begin) * Slot::kBlocks;
    if (is_first) {
      wait_for_input();
    } else {
      sync_some(1, kRingConsumers);  // all warps are done with the phase before
    }
    const auto copy = [&](void* to, int64_t from, int bytes) {
#pragma unroll 4
      for (int at = threadIdx.x * 16; at < bytes; at += kRingConsumers * 16)
        copy_async(static_cast<char*>(to) + at, plan.prepared + from + at, true);
    };
    copy(operands, int64_t(first) * Layout::kBlockBytes, blocks * Layout::kBlockBytes);
    if constexpr (Layout::kBlockSums > 0)
      copy(all_sums, layout.sums_at() + int64_t(first) * Layout::kBlockSums * 4,
           blocks * Layout::kBlockSums * 4);
    if (is_first && int(threadIdx.x) < p.m)
      undo[threadIdx.x] =
          __ldcg(reinterpret_cast<const float*>(plan.prepared + layout.undo_at()) + threadIdx.x);
    commit_copies();
    wait_for_copies<0>();
    sync_some(1, kRingConsumers);
    if constexpr (Traits<kFormat>::kEachSubBlock && Layout::kBlockSums > 0) {
#pragma unroll 1
      for (int piece = 0; piece < end - begin; ++piece)
        split_excess<kColumns>(sums + piece * Slot::kBlocks * Layout::kBlockSums);
    }
  }
};

}  // namespace hf_fastpath
