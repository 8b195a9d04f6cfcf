// Which tiles packed_gemm_kernel (packed_gemm_kernel.cuh) takes, and how clusters share them.

#include <algorithm>
#include <atomic>
#include <random>

#include "common/cuda_check.cuh"
#include "common/routes_cuda.h"
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

// A schedule to run over a shape. `split`: clusters of each tile, 0: all clusters share all tiles evenly.
struct Schedule {
  int tokens, warpgroups, split;
};

// What tiles take on an H200, in microseconds: 64 inputs of one with every SM at work (int4_g32, float16,
// 2026-11).
struct TileTime {
  int tokens, warpgroups;
  double step;
};
constexpr TileTime kTileTimes[] = {{32, 2, 0.34},  {32, 4, 0.54},   {64, 2, 0.395},
                                   {64, 4, 0.625}, {128, 2, 0.476}, {256, 2, 0.68}};
constexpr int kMostSplit = 8;

int features_of(int warpgroups) { return kCluster * 64 * warpgroups; }

int64_t tiles_of(const PackedGemmParams& p, const TileTime& tile) {
  const int features = features_of(tile.warpgroups);
  return (p.rows + tile.tokens - 1) / tile.tokens * ((p.matrix.rows + features - 1) / features);
}

double time_of(const PackedGemmParams& p, int clusters, const TileTime& tile, int split) {
  const double accumulators = tile.tokens * tile.warpgroups / 2;  // of a block, in units of its 64 features
  const double start = 3.2 + accumulators * 0.008, out = 0.6 + accumulators * 0.004,
               whole = p.matrix.blocks * 2 * tile.step;
  const double leave = 0.8 + accumulators * 0.008, collect = 1.0 + accumulators * 0.001,
               other = 0.1 + accumulators * 0.009;
  const int64_t tiles = tiles_of(p, tile);
  if (split == 1) return start + double((tiles + clusters - 1) / clusters) * (whole + out);
  if (split > 1) return start + whole / split + leave + collect + (split - 1) * other + out;
  const double share = double(tiles) / clusters;
  const double others = share < 1 ? 1 / share : 1;  // of a tile, besides the one that writes it
  constexpr double kNextPart = 1;
  return start + share * whole + leave + collect + others * other + (share < 1 ? 1 : share) * out + kNextPart;
}

}  // namespace

bool fits_packed_gemm(const PackedGemmParams& p) {
  constexpr int64_t kMostPieces = 1 << 30;  // of the smallest tiles
  const bool is_indexed = (p.rows / 32 + 1) * (p.matrix.rows / 256 + 1) * p.matrix.blocks <= kMostPieces &&
                          p.matrix.rows * p.matrix.groups <= INT32_MAX;  // places of scales
  const CudaRoute* const route =
      find_cuda_route({CudaProduct::kPackedGemm, packed_weight(static_cast<int>(p.matrix.format)), p.dtype,
                       p.rows, is_indexed ? kIndexed : 0});
  return route != nullptr && !route->dequantizes;
}

PackedGemmPlan plan_packed_gemm(const PackedGemmParams& p, int tokens, int split, int warpgroups) {
  PackedGemmPlan plan{};
  const int piece_blocks = bits_of(p.matrix.format) == 4 ? 2 : 1;
  plan.pieces = (p.matrix.blocks + piece_blocks - 1) / piece_blocks;
  const int clusters = std::max(1, multiprocessors() / kCluster);
  double best = 0;
  for (const TileTime& tile : kTileTimes) {
    if ((tokens && tile.tokens != tokens) || (warpgroups && tile.warpgroups != warpgroups)) continue;
    const int64_t room = clusters / tiles_of(p, tile);
    const int most = static_cast<int>(std::clamp<int64_t>(room, 1, std::min(kMostSplit, plan.pieces)));
    for (int each = 0; each <= most; ++each) {
      if (split >= 0 && each != std::min(split, most)) continue;
      const double time = time_of(p, clusters, tile, each);
      if (plan.tokens && time >= best) continue;
      best = time;
      plan.tokens = tile.tokens, plan.warpgroups = tile.warpgroups, plan.split = each;
    }
  }
  const int features = features_of(plan.warpgroups);
  plan.feature_tiles = static_cast<int>((p.matrix.rows + features - 1) / features);
  plan.token_tiles = static_cast<int>((p.rows + plan.tokens - 1) / plan.tokens);
  const int64_t width = int64_t(p.matrix.blocks) * kPackedBlock;
  plan.together =
      static_cast<int>(std::clamp<int64_t>(kResidentBytes / (width * 2 * plan.tokens), 1, plan.token_tiles));
  const int64_t tiles = int64_t(plan.feature_tiles) * plan.token_tiles;
  plan.clusters = static_cast<int>(std::min<int64_t>(plan.split > 1 ? tiles * plan.split : clusters,
                                                     plan.split == 1 ? tiles : tiles * plan.pieces));
  plan.group = plan.split > 1 ? plan.split : plan.clusters;
  plan.unit_pieces = plan.split == 1 ? plan.pieces : 1;
  plan.group_units = static_cast<int>(tiles * plan.pieces / plan.unit_pieces / (plan.clusters / plan.group));
  plan.share = plan.group_units / plan.group, plan.rest = plan.group_units % plan.group;
  const int64_t tiles_apart = plan.split == 1 ? 0 : plan.clusters;
  plan.partial_bytes = aligned(tiles_apart * features * plan.tokens * 4);
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
  return with_gpu_format(p.matrix.format, [&](auto tag) {
    return launch_packed_gemm_format<decltype(tag)::value>(p, plan, base, stream);
  });
}

}  // namespace hf_fastpath
