// How tiles are shared by clusters, and how x and quants get into shared memory, for packed_gemm_kernel.cuh.
#pragma once

#include "common/async.cuh"
#include "common/ring_cursor.cuh"
#include "common/warp.cuh"
#include "packed_gemm/packed_gemm.h"
#include "packed_gemm/packed_gemm_products.cuh"
#include "packed_gemm/packed_gemm_quants.cuh"

namespace hf_fastpath {

constexpr int kGemmCluster = 2;                              // blocks: each fetches half of x's tile for both
constexpr int kGemmStepTokens = 32;                          // that are turned at a time, on their way out
constexpr int kGemmStagingBytes = 64 * kGemmStepTokens * 2;  // of a warpgroup
constexpr int kGemmX = 64;                                   // inputs of a slot of x: 128 bytes of each token

// A block's tile: tokens, and 64 features a warpgroup that computes; slots of shared memory.
template <int tokens, int warpgroups, int bits>
struct GemmTile {
  static constexpr int kTokens = tokens, kWarpgroups = warpgroups;
  static constexpr int kFeatures = 64 * kWarpgroups;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kXBytes = kTokens * 128, kPieceBytes = kFeatures * 128;
  static constexpr int kX = kTokens == 256 ? (bits == 4 ? 5 : 4) : kTokens == 128 ? 6 : 8;
  static constexpr int kPiecesRoom = 226 * 1024 - kX * kXBytes - 2 * kWarpgroups * kGemmStagingBytes;
  static constexpr int kPieces = kPiecesRoom / kPieceBytes < 10 ? kPiecesRoom / kPieceBytes : 10;
  static constexpr int kPiecesAt = kX * kXBytes;
  static constexpr int kStagingAt = kPiecesAt + kPieces * kPieceBytes;
  static constexpr int kBarriersAt = kStagingAt + 2 * kWarpgroups * kGemmStagingBytes;
  static constexpr int kBytes = kBarriersAt + 16 * (kX + kPieces);
  // Registers of a thread: as the block starts, and as warps give theirs to those that compute.
  static constexpr int kFirstRegisters = 65536 / kThreads / 8 * 8;
  static constexpr int kFetchRegisters = kWarpgroups > 2 ? 32 : 40;
  static constexpr int kRegisters =
      (kFirstRegisters * (kWarpgroups + 1) - kFetchRegisters) / kWarpgroups / 8 * 8;
};

// Where a launch's partials lie in device memory, as kernels see it.
struct GemmShare {
  PackedGemmPlan plan;
  int64_t rows;
  float* partials;            // [clusters][2 blocks][warpgroups] tiles of accumulators
  unsigned long long* flags;  // of each: `ticket` once it is complete
  unsigned long long ticket;  // no other launch's
  bool whole;                 // rows of out are whole 16 bytes, aligned
  int zero;                   // 0, which the compiler does not know
};

// A tile, or a part of one: pieces [first, last) of its features and tokens.
struct GemmPart {
  int features, tokens;  // which tile
  int first, last;
  int start;  // of all pieces, the tile's first
};

// The parts of a cluster, from the last to the first: of a tile that several clusters share, the highest of
// them has the last pieces, and finds the others' accumulators, which those computed before anything else.
struct GemmParts {
  int begin, end;  // what is left, in pieces of all tiles

  static __device__ __forceinline__ int boundary(const PackedGemmPlan& plan, int cluster) {
    const int group = cluster / plan.group, of_group = cluster - group * plan.group;
    return (group * plan.group_units + of_group * plan.share + min(of_group, plan.rest)) * plan.unit_pieces;
  }
  __device__ __forceinline__ GemmParts(const PackedGemmPlan& plan, int cluster)
      : begin(boundary(plan, cluster)), end(boundary(plan, cluster + 1)) {}

  __device__ __forceinline__ bool next(const PackedGemmPlan& plan, GemmPart& part) {
    if (end <= begin) return false;
    const int tile = (end - 1) / plan.pieces;
    part.start = tile * plan.pieces;
    const int from = max(part.start, begin);
    part.first = from - part.start, part.last = end - part.start;
    end = from;
    const int of_group = plan.together * plan.feature_tiles, group = tile / of_group;
    const int tokens = min(plan.together, plan.token_tiles - group * plan.together);
    part.features = (tile - group * of_group) / tokens;
    part.tokens = group * plan.together + (tile - group * of_group) % tokens;
    return true;
  }
};

#if HF_FASTPATH_WGMMA

struct GemmBarriers {
  uint32_t x_full, x_empty, full, empty;
};

template <class Tile>
__device__ __forceinline__ GemmBarriers gemm_barriers(uint32_t smem) {
  const uint32_t at = smem + Tile::kBarriersAt;
  return {at, at + 8 * Tile::kX, at + 16 * Tile::kX, at + 16 * Tile::kX + 8 * Tile::kPieces};
}

// The same tile of a tensor for all blocks of the cluster; each one's barrier learns of it.
__device__ __forceinline__ void copy_tile_to_cluster(uint32_t to, const CUtensorMap* map, int x, int y,
                                                     uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(0), "r"(barrier), "h"(static_cast<uint16_t>((1 << kGemmCluster) - 1))
      : "memory");
}

// All blocks of the cluster have come here. No more than that: what they wrote before is not visible by it.
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Arrives at the barrier of a block of the cluster. No release for all of the cluster, which would wait for
// memory: what comes before are reads that are complete.
__device__ __forceinline__ void arrive_at(uint32_t barrier, int rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_address(barrier, rank))
               : "memory");
}

// Slots of x that a piece takes: the last one may end before.
template <PackedFormat kFormat>
__device__ __forceinline__ int x_slots(const PackedMatrix& matrix, int piece) {
  constexpr int kBlocks = PackedPiece<kFormat>::kBlocks;
  return min(kBlocks, matrix.blocks - piece * kBlocks) * int(kPackedBlock) / kGemmX;
}

// One lane's work.
template <PackedFormat kFormat, class Tile>
__device__ __forceinline__ void fetch_x(const GemmShare& share, const PackedMatrix& matrix,
                                        const CUtensorMap* map, uint32_t smem, int cluster, int rank) {
  constexpr int kHalf = Tile::kTokens / kGemmCluster, kSlotsOfPiece = PackedPiece<kFormat>::kBlocks * 2;
  const GemmBarriers barriers = gemm_barriers<Tile>(smem);
  RingCursor at;
  GemmParts parts(share.plan, cluster);
  GemmPart part;
  while (parts.next(share.plan, part)) {
    const int token = part.tokens * Tile::kTokens + rank * kHalf;
#pragma unroll 1
    for (int piece = part.first; piece < part.last; ++piece) {
      const int slots = x_slots<kFormat>(matrix, piece);
#pragma unroll 1
      for (int i = 0; i < slots; ++i) {
        barrier_wait(barriers.x_empty + 8 * at.slot, at.parity ^ 1);
        const uint32_t full = barriers.x_full + 8 * at.slot;
        barrier_arrive_expect(full, Tile::kXBytes);
        copy_tile_to_cluster(smem + at.slot * Tile::kXBytes + rank * kHalf * 128, map,
                             (piece * kSlotsOfPiece + i) * kGemmX, token, full);
        at.advance(Tile::kX);
      }
    }
  }
  // Until the other block's warpgroups have arrived here for the last time, and this block may end.
#pragma unroll 1
  for (int i = 0; i < Tile::kX; ++i) {
    barrier_wait(barriers.x_empty + 8 * at.slot, at.parity ^ 1);
    at.advance(Tile::kX);
  }
}

// One lane's work.
template <PackedFormat kFormat, class Tile>
__device__ __forceinline__ void fetch_pieces(const GemmShare& share, const CUtensorMap* map, uint32_t smem,
                                             int cluster, int rank) {
  using Piece = PackedPiece<kFormat>;
  const GemmBarriers barriers = gemm_barriers<Tile>(smem);
  RingCursor at;
  GemmParts parts(share.plan, cluster);
  GemmPart part;
  while (parts.next(share.plan, part)) {
    const int row = (part.features * kGemmCluster + rank) * Tile::kFeatures;
#pragma unroll 1
    for (int piece = part.first; piece < part.last; ++piece) {
      barrier_wait(barriers.empty + 8 * at.slot, at.parity ^ 1);
      const uint32_t full = barriers.full + 8 * at.slot;
      barrier_arrive_expect(full, Tile::kPieceBytes);
      const uint32_t to = smem + Tile::kPiecesAt + at.slot * Tile::kPieceBytes;
#pragma unroll
      for (int b = 0; b < Piece::kBlocks; ++b)
        copy_tile_to_shared(to + b * Tile::kFeatures * Piece::kRowBytes, map,
                            (piece * Piece::kBlocks + b) * (Piece::kRowBytes / 4), row, 0, full);
      at.advance(Tile::kPieces);
    }
  }
}

// A warp brings what its block will read of scales and zeros into L2, which the lanes that use them load one
// piece ahead.
template <PackedFormat kFormat, class Tile>
__device__ __forceinline__ void prefetch_scales(const GemmShare& share, const PackedMatrix& matrix,
                                                int cluster, int rank, int lane) {
  using Piece = PackedPiece<kFormat>;
  constexpr int kLine = 128;
  GemmParts parts(share.plan, cluster);
  GemmPart part;
  int known = -1;
  while (Piece::kScales && parts.next(share.plan, part)) {
    const int first = (part.features * kGemmCluster + rank) * Tile::kFeatures;
    if (first == known) continue;
    known = first;
    const int group = part.first * Piece::kBlocks * Piece::kScales;
    const int groups = min(part.last * Piece::kBlocks * Piece::kScales, matrix.groups);
    for (int i = lane; i < Tile::kFeatures; i += kWarpSize) {
      if (first + i >= matrix.rows) continue;
      const int64_t row = int64_t(first + i) * matrix.groups;
      for (int at = group; at < groups; at += kLine / 2) prefetch_l2(matrix.scales + row + at);
      if (Traits<kFormat>::kHasZeros)
        for (int at = group; at < groups; at += kLine) prefetch_l2(matrix.zeros + row + at);
    }
  }
}

#endif  // HF_FASTPATH_WGMMA

}  // namespace hf_fastpath
