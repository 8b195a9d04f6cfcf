// What: x in the order in which packed_gemm_kernel's lanes get quants, and which tiles that kernel takes.
// Work split: a thread has 32 inputs of a row of x; a row is padded to whole blocks with zeros.
// Traffic: x once each way; it stays in L2.
// Roofline: latency: two microseconds that overlap with the start of the product's kernel.

#include "packed_gemm/packed_gemm.h"

#include <algorithm>

#include "common/async.cuh"
#include "packed_gemm/packed_gemm_quants.cuh"

namespace hf_fastpath {
namespace {

constexpr int kOrderThreads = 256;
constexpr int kCluster = 2, kTileFeatures = 256;  // see packed_gemm_ring.cuh
constexpr int64_t kAlign = 512;
// x that stays in L2 beside weights and the output: tokens that are computed with the same features.
constexpr int64_t kResidentBytes = 24 << 20;

// Words of 16 bytes; pairs of x in 32 bits are kBits' distance apart.
template <int kBits>
__device__ __forceinline__ void order_stretch(const uint32_t (&in)[16], uint32_t (&out)[16]) {
#pragma unroll
  for (int q = 0; q < 4; ++q)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (kBits == 8)
        out[j * 4 + q] = in[q * 4 + j];
      else
        out[j * 4 + q] = j % 2 ? pair_high(in[q * 4 + j / 2], in[q * 4 + j / 2 + 2])
                               : pair_low(in[q * 4 + j / 2], in[q * 4 + j / 2 + 2]);
    }
}

// `whole`: rows of x are whole 16 bytes, aligned.
template <int kBits>
__global__ void __launch_bounds__(kOrderThreads)
    order_x_kernel(const uint16_t* x, uint4* out, int64_t rows, int64_t k, int stretches, bool whole,
                   unsigned* flags, int num_flags) {
  allow_next_kernel();
  const int64_t item = int64_t(blockIdx.x) * kOrderThreads + threadIdx.x;
  if (item < num_flags) flags[item] = 0;
  if (item >= rows * stretches) return;
  const int64_t row = item / stretches;
  const int at = static_cast<int>(item % stretches) * int(kStretch);
  const uint16_t* const from = x + row * k + at;
  uint32_t in[16], ordered[16];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (whole) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (at + 8 * i < k) v = __ldg(reinterpret_cast<const uint4*>(from) + i);
      in[4 * i] = v.x, in[4 * i + 1] = v.y, in[4 * i + 2] = v.z, in[4 * i + 3] = v.w;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int e = 8 * i + 2 * j;
        const uint32_t low = at + e < k ? from[e] : 0, high = at + e + 1 < k ? from[e + 1] : 0;
        in[4 * i + j] = low | high << 16;
      }
    }
  }
  order_stretch<kBits>(in, ordered);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    out[item * 4 + i] = make_uint4(ordered[4 * i], ordered[4 * i + 1], ordered[4 * i + 2], ordered[4 * i + 3]);
}

int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

int multiprocessors() {
  int device = 0, count = 0;
  HF_FASTPATH_CUDA_CHECK(cudaGetDevice(&device));
  HF_FASTPATH_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// Time of a launch in units of a tensor core's time for 64 inputs of a tile of 32 tokens.
struct Cost {
  int tokens;
  bool whole;
  double time;
};

Cost cost_of(const PackedGemmParams& p, int clusters, int tokens, bool whole) {
  // Of the work for 64 inputs: the products, and what does not depend on their number.
  const double step = tokens / 32.0 + 0.5;
  const int64_t tiles = (p.rows + tokens - 1) / tokens * ((p.matrix.rows + kTileFeatures - 1) / kTileFeatures);
  const double tile = step * p.matrix.blocks * 2;
  const double out = tokens / 32.0 * 6 + 10;
  if (whole) return {tokens, whole, double((tiles + clusters - 1) / clusters) * (tile + out)};
  const double share = double(tiles) / clusters;
  // Sums left, and those of the other clusters of a tile.
  const double others = tiles >= clusters ? 1 : double(clusters) / tiles;
  return {tokens, whole, share * tile + (share < 1 ? 1 : share) * out + (1 + others) * (tokens / 32.0 * 6 + 8)};
}

}  // namespace

bool fits_packed_gemm(const PackedGemmParams& p) {
  if (p.dtype == DType::kFloat32) return false;
  constexpr int kArchs[] = {__CUDA_ARCH_LIST__};
  bool compiled = false;
  for (const int arch : kArchs) compiled = compiled || arch == 900;
  int device = 0, major = 0;
  HF_FASTPATH_CUDA_CHECK(cudaGetDevice(&device));
  HF_FASTPATH_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return compiled && major == 9;
}

PackedGemmPlan plan_packed_gemm(const PackedGemmParams& p, int tokens, int whole) {
  PackedGemmPlan plan{};
  const int piece_blocks = bits_of(p.matrix.form) == 4 ? 2 : 1;
  const int clusters = multiprocessors() / kCluster;
  Cost best{0, false, 0};
  for (const int each : {32, 64, 128, 256}) {
    if (tokens && each != tokens) continue;
    for (const bool are_whole : {true, false}) {
      if (whole >= 0 && are_whole != bool(whole)) continue;
      const Cost cost = cost_of(p, clusters, each, are_whole);
      if (!best.tokens || cost.time < best.time) best = cost;
    }
  }
  plan.tokens = best.tokens;
  plan.feature_tiles = static_cast<int>((p.matrix.rows + kTileFeatures - 1) / kTileFeatures);
  plan.token_tiles = static_cast<int>((p.rows + plan.tokens - 1) / plan.tokens);
  const int64_t width = int64_t(p.matrix.blocks) * kPackedBlock;
  plan.together = static_cast<int>(
      std::clamp<int64_t>(kResidentBytes / (width * 2 * plan.tokens), 1, plan.token_tiles));
  plan.pieces = (p.matrix.blocks + piece_blocks - 1) / piece_blocks;
  const int64_t tiles = int64_t(plan.feature_tiles) * plan.token_tiles;
  plan.unit_pieces = best.whole ? plan.pieces : 1;
  plan.units = tiles * plan.pieces / plan.unit_pieces;
  plan.clusters = static_cast<int>(std::min<int64_t>(clusters, plan.units));
  plan.x_bytes = aligned(p.rows * width * 2);
  const int64_t tiles_apart = best.whole ? 0 : plan.clusters;
  plan.part_bytes = aligned(tiles_apart * kTileFeatures * plan.tokens * 4);
  plan.flag_bytes = aligned(tiles_apart * kCluster * 2 * 4);
  return plan;
}

void launch_packed_gemm(const PackedGemmParams& p, const PackedGemmPlan& plan, void* workspace,
                        cudaStream_t stream) {
  if (p.rows == 0 || p.matrix.rows == 0) return;
  char* const base = static_cast<char*>(workspace);
  const int stretches = static_cast<int>(p.matrix.blocks * kStretches);
  const int num_flags = static_cast<int>(plan.flag_bytes / 4);
  const int64_t items = std::max<int64_t>(p.rows * stretches, num_flags);
  const dim3 grid(static_cast<unsigned>((items + kOrderThreads - 1) / kOrderThreads)), block(kOrderThreads);
  const auto kernel = bits_of(p.matrix.form) == 4 ? order_x_kernel<4> : order_x_kernel<8>;
  kernel<<<grid, block, 0, stream>>>(static_cast<const uint16_t*>(p.x), reinterpret_cast<uint4*>(base), p.rows, p.k,
                                     stretches, p.k % 8 == 0 && is_aligned16(p.x),
                                     reinterpret_cast<unsigned*>(base + plan.x_bytes + plan.part_bytes), num_flags);
  HF_FASTPATH_CUDA_CHECK(cudaGetLastError());
  switch (p.matrix.form) {
    case PackedForm::kInt8:
      return launch_packed_gemm_form<PackedForm::kInt8>(p, plan, base, stream);
    case PackedForm::kFp8:
      return launch_packed_gemm_form<PackedForm::kFp8>(p, plan, base, stream);
    case PackedForm::kInt4:
      return launch_packed_gemm_form<PackedForm::kInt4>(p, plan, base, stream);
    case PackedForm::kInt4G32:
      return launch_packed_gemm_form<PackedForm::kInt4G32>(p, plan, base, stream);
  }
}

}  // namespace hf_fastpath
