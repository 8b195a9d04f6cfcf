// How gemv_wgmma_kernel (gemv_wgmma.cuh) divides a product, and its launch.

#include <algorithm>

#include "common/tensor_map.h"
#include "gemv/gemv_wgmma.cuh"

namespace hf_fastpath {
namespace {

constexpr int kMaxSlots = 24;
constexpr int kSlotBytes = 32 * 1024;  // about: what a copy of more inputs at a time stays below
constexpr int kMinSlots = 4;
constexpr int kMinRows = 8;                               // of a tile
constexpr int kOverrun = (kWgmmaRows - 8) * kChunkBytes;  // of a tile of 8 rows, which A reads as 64

// Tiles of `features` each, no tile of two segments.
int count_tiles(const GemvParams& p, int features, int (&first)[kMaxGemvSegments]) {
  int tiles = 0;
  for (int i = 0; i < (p.gated ? 1 : p.num_segments); ++i) {
    first[i] = tiles;
    tiles += (segment_end(p, i) - p.segments[i].first + features - 1) / features;
  }
  return tiles;
}

// The smallest tiles that give each of `places` the same number of them.
void divide(const GemvParams& p, int places, int features_a_row, WgmmaPlan& plan) {
  for (int each = 1;; ++each) {
    for (plan.rows = kMinRows; plan.rows <= kWgmmaRows; ++plan.rows) {
      plan.tiles = count_tiles(p, plan.rows * features_a_row, plan.first);
      if (plan.tiles <= int64_t(places) * each) return;
    }
  }
}

WgmmaPlan plan_tiles(const GemvParams& p, int x_rows, int& parts) {
  WgmmaPlan plan{};
  const int sms = multiprocessor_count(), chunks = static_cast<int>((p.k + kChunk - 1) / kChunk);
  // One tile a block where two share k, so that what they send each other needs no answer.
  plan.split = !p.gated && p.n <= kWgmmaRows * (sms / 2 - p.num_segments) && chunks > 1 ? 2 : 1;
  parts = p.gated || p.n > kWgmmaRows * sms ? 2 : 1;
  divide(p, sms / plan.split, p.gated ? 1 : parts, plan);
  plan.x_chunk = x_rows * kChunkBytes;
  plan.weight_chunk = (plan.rows + 7) / 8 * 8 * parts * kChunkBytes;
  // What a second round of 48 rows reads behind them.
  const int unused = x_rows > kRoundRows ? x_rows % kRoundRows : 0;
  const int sums = (parts * x_rows + unused) * kSumsStride * 4,
            sent = parts * (x_rows / 16) * kComputing * 16;
  const int rest = std::max(sums, kOverrun) + (plan.split > 1 ? sent : 0) + (2 * kMaxSlots + 1) * 8;
  const int room = shared_bytes_of_block() - rest;
  for (plan.chunks = 4; plan.chunks > 1; plan.chunks /= 2) {
    const int bytes = plan.chunks * (plan.x_chunk + plan.weight_chunk);
    if (bytes <= kSlotBytes && room / bytes >= kMinSlots) break;
  }
  plan.chunks = std::min(plan.chunks, std::max(1, chunks / plan.split));
  plan.steps = (chunks + plan.chunks - 1) / plan.chunks;
  plan.slot = plan.chunks * (plan.x_chunk + plan.weight_chunk);
  plan.slots = std::min(kMaxSlots, room / plan.slot);
  plan.sums_at = plan.slots * plan.slot;
  plan.received_at = plan.sums_at + std::max(sums, kOverrun);
  plan.barriers_at = plan.received_at + (plan.split > 1 ? sent : 0);
  plan.all = plan.barriers_at + (2 * plan.slots + 1) * 8;
  return plan;
}

CUtensorMap rows_map(const GemvParams& p, const void* rows, int64_t count, int64_t stride, int box) {
  const bool half = p.dtype == DType::kFloat16;
  return tensor_map(rows, {half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                           CU_TENSOR_MAP_SWIZZLE_128B,
                           {uint64_t(p.k), uint64_t(count), 1},
                           {uint64_t(stride) * 2, uint64_t(stride) * 2 * count},
                           {kChunk, uint32_t(box), 1}});
}

template <class T, int kX, int kParts>
void launch_parts(const GemvParams& p, const WgmmaPlan& plan, cudaStream_t stream) {
  static_assert(kMaxGemvSegments == 4, "the kernel takes a map of each segment");
  CUtensorMap maps[kMaxGemvSegments];
  for (int i = 0; i < kMaxGemvSegments; ++i) {
    const int of = i < p.num_segments ? i : 0;
    const int first = p.gated ? 0 : p.segments[of].first;
    maps[i] =
        rows_map(p, p.segments[of].weight, segment_end(p, of) - first, p.segments[of].stride, plan.rows);
  }
  const auto kernel = gemv_wgmma_kernel<T, kX, kParts>;
  allow_shared_memory(kernel, plan.all);
  const int places = multiprocessor_count() / plan.split;
  const dim3 grid(std::min(plan.tiles, places) * plan.split);
  HF_FASTPATH_CUDA_CHECK(launch_clusters(kernel, grid, dim3(kThreads), plan.all, stream,
                                         p.programmatic_launch, plan.split, p, plan,
                                         rows_map(p, p.x, p.m, p.k, kX), maps[0], maps[1], maps[2], maps[3]));
}

template <class T, int kX>
void launch_rows(const GemvParams& p, cudaStream_t stream) {
  int parts = 1;
  const WgmmaPlan plan = plan_tiles(p, kX, parts);
  if (parts == 1) return launch_parts<T, kX, 1>(p, plan, stream);
  launch_parts<T, kX, 2>(p, plan, stream);
}

template <class T>
void launch_typed(const GemvParams& p, cudaStream_t stream) {
  if (p.m <= 16) return launch_rows<T, 16>(p, stream);
  if (p.m <= 32) return launch_rows<T, 32>(p, stream);
  if (p.m <= 48) return launch_rows<T, 48>(p, stream);
  launch_rows<T, 64>(p, stream);
}

}  // namespace

void launch_gemv_wgmma(const GemvParams& params, const RopeAppendParams*, cudaStream_t stream) {
  if (params.dtype == DType::kFloat16) return launch_typed<__half>(params, stream);
  launch_typed<__nv_bfloat16>(params, stream);
}

}  // namespace hf_fastpath
