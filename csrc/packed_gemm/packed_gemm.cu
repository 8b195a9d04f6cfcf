// Which tiles packed_gemm_kernel (packed_gemm_kernel.cuh) takes, and how clusters share them.

#include <algorithm>
#include <atomic>
#include <random>

#include "common/async.cuh"
#include "packed_gemm/packed_gemm.h"

namespace hf_fastpath {
namespace {

constexpr int kCluster = 2;  // see packed_gemm_ring.cuh
constexpr int64_t kAlign = 512;
// x that stays in L2 beside weights and the output: tokens that are computed with the same features.
constexpr int64_t kResidentBytes = 24 << 20;

int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

int multiprocessors() {
  int device = 0, count = 0;
  HF_FASTPATH_CUDA_CHECK(cudaGetDevice(&device));
  HF_FASTPATH_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// Time of a launch in units of a tensor core's time for 64 inputs of a tile of 32 tokens.
struct Cost {
  int tokens, warpgroups;
  bool whole;
  double time;

  int features() const { return kCluster * 64 * warpgroups; }
  int64_t tiles(const PackedGemmParams& p) const {
    return (p.rows + tokens - 1) / tokens * ((p.matrix.rows + features() - 1) / features());
  }
};

double cost_of(const PackedGemmParams& p, int clusters, const Cost& as) {
  const double wide = as.tokens / 32.0 * as.warpgroups / 2;  // sums of a block
  // Of the work for 64 inputs: the products, and what does not depend on their number.
  const double tile = (wide + 0.5) * p.matrix.blocks * 2, out = wide * 6 + 10;
  const int64_t tiles = as.tiles(p);
  if (as.whole) return double((tiles + clusters - 1) / clusters) * (tile + out);
  const double share = double(tiles) / clusters;
  // Sums left, and those of the other clusters of a tile.
  const double others = tiles >= clusters ? 1 : double(clusters) / tiles;
  return share * tile + (share < 1 ? 1 : share) * out + (1 + others) * (wide * 6 + 8);
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

PackedGemmPlan plan_packed_gemm(const PackedGemmParams& p, int tokens, int whole, int warpgroups) {
  PackedGemmPlan plan{};
  const int piece_blocks = bits_of(p.matrix.form) == 4 ? 2 : 1;
  const int clusters = multiprocessors() / kCluster;
  Cost best{};
  for (const int each : {32, 64, 128, 256}) {
    if (tokens && each != tokens) continue;
    for (const int groups : {2, 4}) {
      if ((warpgroups && groups != warpgroups) || (groups == 4 && each > 64)) continue;
      for (const bool are_whole : {true, false}) {
        if (whole >= 0 && are_whole != bool(whole)) continue;
        Cost cost{each, groups, are_whole, 0};
        cost.time = cost_of(p, clusters, cost);
        if (!best.tokens || cost.time < best.time) best = cost;
      }
    }
  }
  plan.tokens = best.tokens;
  plan.warpgroups = best.warpgroups;
  plan.feature_tiles = static_cast<int>((p.matrix.rows + best.features() - 1) / best.features());
  plan.token_tiles = static_cast<int>((p.rows + plan.tokens - 1) / plan.tokens);
  const int64_t width = int64_t(p.matrix.blocks) * kPackedBlock;
  plan.together =
      static_cast<int>(std::clamp<int64_t>(kResidentBytes / (width * 2 * plan.tokens), 1, plan.token_tiles));
  plan.pieces = (p.matrix.blocks + piece_blocks - 1) / piece_blocks;
  const int64_t tiles = int64_t(plan.feature_tiles) * plan.token_tiles;
  plan.unit_pieces = best.whole ? plan.pieces : 1;
  plan.units = tiles * plan.pieces / plan.unit_pieces;
  plan.clusters = static_cast<int>(std::min<int64_t>(clusters, plan.units));
  const int64_t tiles_apart = best.whole ? 0 : plan.clusters;
  plan.part_bytes = aligned(tiles_apart * best.features() * plan.tokens * 4);
  plan.flag_bytes = aligned(tiles_apart * kCluster * plan.warpgroups * 8);
  return plan;
}

unsigned long long next_gemm_ticket() {
  static std::atomic<unsigned long long> next = [] {
    std::random_device random;
    return (static_cast<unsigned long long>(random()) << 32 | random()) | 1;
  }();
  return next += 2;  // never zero
}

void launch_packed_gemm(const PackedGemmParams& p, const PackedGemmPlan& plan, void* workspace,
                        cudaStream_t stream) {
  if (p.rows == 0 || p.matrix.rows == 0) return;
  char* const base = static_cast<char*>(workspace);
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
