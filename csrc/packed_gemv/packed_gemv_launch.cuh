// Plans and launches packed_gemv_kernel (packed_gemv_ring.cuh).
#pragma once

#include "common/tensor_map.h"
#include "packed_gemv/packed_gemv_ring.cuh"

namespace hf_fastpath {

// Slots of an SM that may be under way at a time have so many bytes: two slots of both blocks. With one a
// block, or three, products of 4096 to 28672 take up to 6 % longer (H200).
constexpr int kPackedInFlightBytes = 72 * 1024;
// So much of what the next kernel reads is brought to L2, an SM, by a product that is all in its rings before
// its input is there. Memory would rest until it is done (H200: 2.3 % of a token's time in int4_g32, 2.5 % in
// int8; what other products bring while they end costs as much as it gains, or more).
constexpr int kPackedNextBytes = 192 * 1024;
// Shared memory of x in a phase, of all warps.
constexpr int kXBytes = 32 * 1024;
// Weights, in blocks, up to which products prepare several rows of x themselves: 4096 by 16384 (H200: 1.9 us
// less for 4096 to 4096, 0.3 to 1.1 us more for 4096 to 28672).
constexpr int64_t kMostLaneBlocks = int64_t(4096) * 16384 / kPackedBlock;
// Where x and the sums leave little room for a ring, one block takes more than half of an SM.
constexpr int kLargeBlockBytes = 200 * 1024;

inline constexpr int round_up_to(int value, int unit) { return (value + unit - 1) / unit * unit; }

// Rows that follow each other in the matrix for every unit that a block may start with, fetched as one: as
// many as blocks' shares stay even with.
inline int rows_together(int units, int grid, const RopeAppendParams* rope) {
  for (int rows = 8; rows > 1; rows /= 2) {
    if (units % rows || (rope && (rope->head_dim / 2 % rows || rope->rotary_dim / 2 % rows))) continue;
    const int share = (units / rows + grid - 1) / grid * rows;
    if (int64_t(share) * grid <= int64_t(units) * 21 / 20 + grid) return rows;
  }
  return 1;
}

inline CUtensorMapSwizzle swizzle_of(int bytes) {
  return bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
         : bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
         : bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                       : CU_TENSOR_MAP_SWIZZLE_NONE;
}

template <PackedFormat kFormat, int kLines>
PackedMaps maps_of(const GemvParams& p, const PackedPlan& plan) {
  using Slot = PackedSlot<kFormat, kLines>;
  const PackedMatrix& matrix = plan.matrix;
  const uint64_t row_bytes = uint64_t(matrix.blocks) * Slot::kBlockBytes, rows = matrix.rows,
                 groups = matrix.groups;
  const uint32_t together = plan.together;
  PackedMaps maps{};
  TensorTiles quants{CU_TENSOR_MAP_DATA_TYPE_UINT32, CU_TENSOR_MAP_SWIZZLE_128B};
  if (plan.copy_lines == 1) {
    quants = {quants.type,
              quants.swizzle,
              {row_bytes / 4, rows, 1},
              {row_bytes, rows * row_bytes},
              {kLineBytes / 4, together, 1}};
  } else {
    quants = {quants.type,
              quants.swizzle,
              {kLineBytes / 4, rows, row_bytes / kLineBytes},
              {row_bytes, kLineBytes},
              {kLineBytes / 4, together, kLines}};
  }
  maps.quants = tensor_map(p.segments[0].weight, quants);
  if (!plan.fetches_scales) return maps;
  maps.scales = tensor_map(matrix.scales, {CU_TENSOR_MAP_DATA_TYPE_UINT16,
                                           swizzle_of(Slot::kSwizzlesScales ? Slot::kScaleBytes : 0),
                                           {groups, rows, 1},
                                           {groups * 2, rows * groups * 2},
                                           {Slot::kScaleBytes / 2, together, 1}});
  if (Slot::kZeroBytes > 0) {
    maps.zeros = tensor_map(matrix.zeros, {CU_TENSOR_MAP_DATA_TYPE_UINT8,
                                           CU_TENSOR_MAP_SWIZZLE_NONE,
                                           {groups, rows, 1},
                                           {groups, rows * groups},
                                           {Slot::kZeroBytes, together, 1}});
  }
  return maps;
}

// Returns the blocks of a row of x, in whole pieces, as a kernel in front leaves it.
template <PackedFormat kFormat>
int whole_blocks(const PackedMatrix& matrix) {
  return round_up_to(matrix.blocks, PackedSlot<kFormat, kRingWarps>::kBlocks);
}

// Whether rows' scales and zeros start at multiples of 16 bytes, as copies want it; rows with one scale have
// none to copy.
template <PackedFormat kFormat>
bool fetches_scales(const PackedMatrix& matrix) {
  return Traits<kFormat>::kScalesSums || (matrix.groups * (Traits<kFormat>::kHasZeros ? 1 : 2) % 16 == 0 &&
                                          is_aligned16(matrix.scales) && is_aligned16(matrix.zeros));
}

// Whether a product makes operands of several rows of x itself: where clusters have room for it, half of k a
// block, and the matrix is not so large that what this takes longer for each tile outweighs a kernel in
// front.
template <class T, PackedFormat kFormat, int kColumns>
bool takes_lanes(const PackedMatrix& matrix) {
  using X = LaneX<T, kFormat, kColumns>;
  const int pieces = (matrix.blocks + X::Slot::kBlocks - 1) / X::Slot::kBlocks;
  return has_hopper_code() && matrix.rows * matrix.blocks <= kMostLaneBlocks &&
         fetches_scales<kFormat>(matrix) && (pieces + 1) / 2 * X::kLines * X::kSpanBytes <= kXBytes;
}

// Whether a kernel in front of the product prepares x.
template <class T, PackedFormat kFormat, int kColumns>
bool takes_prepared(const PackedMatrix& matrix) {
  if constexpr (sizeof(T) == 4 || kColumns == 1) return false;
  if constexpr (sizeof(T) == 2 && (kColumns == 4 || kColumns == 8)) {
    return !takes_lanes<T, kFormat, kColumns>(matrix);
  }
  return true;
}

template <class T, PackedFormat kFormat, int kColumns, bool kPrepared>
RingLaunch plan_packed(const GemvParams& p, const RopeAppendParams* rope, PackedPlan& plan) {
  using X = PackedX<T, kFormat, kColumns, kPrepared>;
  constexpr int kLines = kLinesOf<T, kColumns, kPrepared>, kSpanPieces = X::kSpanPieces;
  using Slot = PackedSlot<kFormat, kLines>;
  RingPlan& ring = plan.ring;
  ring.append = rope != nullptr;
  ring.halves = p.gated || ring.append ? 2 : 1;
  const int units = ring.append ? p.n / 2 : p.n;
  plan.pieces = (plan.matrix.blocks + Slot::kBlocks - 1) / Slot::kBlocks;
  const int span_bytes = kLines * X::kSpanBytes;  // of all lines
  plan.ranks = kTakesLanes<T, kColumns, kPrepared> ? std::min(2, plan.pieces) : 1;
  const int of_rank = (plan.pieces + plan.ranks - 1) / plan.ranks;
  const int all_spans = (of_rank + kSpanPieces - 1) / kSpanPieces;
  const int spans = std::min(all_spans, std::max(1, kXBytes * (int(sizeof(T)) / 2) / span_bytes));
  plan.phase_pieces = std::min(of_rank, spans * kSpanPieces);

  const int sms = multiprocessor_count();
  const int64_t bytes = plan.matrix.rows * plan.matrix.blocks * Slot::kBlockBytes;
  const bool is_large = spans * span_bytes > kXBytes;
  // One block an SM where its ring holds all that the SM reads, but not two tiles one after the other: two
  // blocks with one each take less time (int4_g32 4096 to 4096, 1.5 % of a layer).
  const bool is_small = bytes <= int64_t(kRingBytes) * sms;
  const bool one_tile_each =
      is_small && !is_large && plan.matrix.rows * plan.ranks / (int64_t(sms) * Slot::kWeightRows) == 1;
  const int blocks_per_sm = (is_small && !one_tile_each) || is_large ? 1 : kRingBlocksPerSm;
  const int64_t dots = int64_t(units) * ring.halves * p.m * 4;  // bytes of all clusters
  const int64_t least = (dots + kMaxPartialBytes / 2 - 1) / (kMaxPartialBytes / 2);
  const int most_clusters =
      static_cast<int>(std::max<int64_t>(sms * blocks_per_sm / plan.ranks, least * plan.ranks));
  plan.together = rows_together(units, most_clusters, rope);
  plan.copy_lines = plan.matrix.blocks * Slot::kBlockBytes % kLineBytes ? 1 : kLines;
  ring.units = units / plan.together;
  const int clusters = std::min(ring.units, most_clusters);
  ring.share = ring.units / clusters, ring.larger = ring.units % clusters;

  plan.fetches_scales = !Traits<kFormat>::kScalesSums && fetches_scales<kFormat>(plan.matrix);
  plan.scale_stride = round_up_to(plan.together * Slot::kScaleBytes, kLineBytes);
  plan.zero_stride = round_up_to(plan.together * Slot::kZeroBytes, kLineBytes);
  const int groups = plan.fetches_scales ? Slot::kWeightRows / plan.together : 0;
  plan.scales_at = Slot::kWeightRows * Slot::kPieceBytes;
  plan.zeros_at = plan.scales_at + groups * plan.scale_stride;
  plan.slot_bytes = round_up_to(plan.zeros_at + groups * plan.zero_stride, 1024);

  int at = 0;
  const auto take = [&](int bytes) {
    const int start = at;
    at += round_up_to(bytes, 128);
    return start;
  };
  const int most_units = (ring.share + (ring.larger > 0)) * plan.together;
  const bool is_cluster = plan.ranks > 1;
  plan.x_at = take(spans * span_bytes);
  plan.sums_at = take(kLines * spans * X::kSpanSteps);
  plan.norm_at = take(p.norm.kind == NormKind::kRms ? kLines * spans * X::kSpanNorm : 0);
  plan.scratch_at = take(kRingWarps * (2 * p.m + 16) * 4);
  plan.partials_at = take(2 * kLines * p.m * Slot::kWeightRows * 4);
  plan.dots_at = take(is_cluster ? 0 : most_units * ring.halves * p.m * 4);
  plan.received_at = take(is_cluster ? (round_up_to(most_units, 2) * ring.halves + 2) * p.m * 4 : 0);
  constexpr int kTable = kTableBytes<T, kFormat, kColumns>;
  const int most = (is_large ? kLargeBlockBytes : kBlockBytes) - kTable;
  ring.slots = has_hopper_code() ? std::clamp((most - at) / plan.slot_bytes, 1, kMaxRingSlots) : 0;
  if (one_tile_each) ring.slots = std::min(ring.slots, of_rank);
  const int ring_bytes = ring.slots * plan.slot_bytes;
  for (int* each : {&plan.x_at, &plan.sums_at, &plan.norm_at, &plan.scratch_at, &plan.partials_at,
                    &plan.dots_at, &plan.received_at})
    *each += ring_bytes;
  ring.in_flight = ring.streaming =
      std::clamp((kPackedInFlightBytes / blocks_per_sm + plan.slot_bytes / 2) / plan.slot_bytes, 1,
                 std::max(1, ring.slots));
  const int grid = clusters * plan.ranks, tiles = (most_units * ring.halves - 1) / Slot::kWeightRows + 1;
  if (kTakesRow<T, kColumns> && tiles * of_rank <= ring.slots)
    plan_next(p, grid, kPackedNextBytes / blocks_per_sm, ring);
  return {ring, grid, kTable + ring_bytes + at};
}

template <class T, PackedFormat kFormat, int kColumns, bool kPrepared>
void launch_planned(const GemvParams& p, const RopeAppendParams* rope, PackedPlan& plan,
                    cudaStream_t stream) {
  const RingLaunch as = plan_packed<T, kFormat, kColumns, kPrepared>(p, rope, plan);
  const PackedMaps maps =
      has_hopper_code() ? maps_of<kFormat, kLinesOf<T, kColumns, kPrepared>>(p, plan) : PackedMaps{};
  with_ring_end(p, rope, [&](auto end) {
    const auto kernel = packed_gemv_kernel<T, kFormat, kColumns, decltype(end)::value, kPrepared>;
    allow_shared_memory(kernel, as.smem_bytes);
    HF_FASTPATH_CUDA_CHECK(launch_clusters(
        kernel, dim3(as.grid), dim3(has_hopper_code() ? kRingThreads : kRingConsumers), as.smem_bytes, stream,
        p.programmatic_launch, plan.ranks, p, rope ? *rope : RopeAppendParams{}, plan, maps));
  });
}

template <class T, PackedFormat kFormat, int kColumns>
void launch_columns(GemvParams p, int x_width, const PackedMatrix& matrix, const RopeAppendParams* rope,
                    char* workspace, cudaStream_t stream) {
  PackedPlan plan{};
  plan.x_width = x_width;
  plan.matrix = matrix;
  if constexpr (sizeof(T) == 2 && kColumns > 1) {
    if (takes_prepared<T, kFormat, kColumns>(matrix)) {
      const PreparedOf<kFormat, kColumns> layout{whole_blocks<kFormat>(matrix)};
      HF_FASTPATH_CUDA_CHECK(launch_programmatic(
          packed_prepare_kernel<T, kFormat, kColumns>, dim3(p.m), dim3(kPrepareThreads), 0, stream,
          p.programmatic_launch, static_cast<const T*>(p.x), p.norm, p.k, x_width, workspace, layout));
      plan.prepared = workspace;
      p.norm = {};
      return launch_planned<T, kFormat, kColumns, true>(p, rope, plan, stream);
    }
  }
  if constexpr (sizeof(T) == 4 || kColumns <= 8)
    launch_planned<T, kFormat, kColumns, false>(p, rope, plan, stream);
}

// Calls with_columns(columns of B that p.m rows of x take, as a constant).
template <class T, PackedFormat kFormat, class Launch>
void with_columns(int m, const PackedMatrix& matrix, Launch launch) {
  const int columns = m * kXColumns<T>;
  if constexpr (kXColumns<T> == 1) {
    // ByteX and TableX take two blocks of 4 bits at a time.
    if (columns == 1 && (kBits<kFormat> == 8 || (matrix.blocks % 2 == 0 && is_aligned16(matrix.scales)))) {
      return launch(std::integral_constant<int, 1>{});
    }
  }
  if (columns <= 4) return launch(std::integral_constant<int, 4>{});
  if (columns <= 8) return launch(std::integral_constant<int, 8>{});
  launch(std::integral_constant<int, 16>{});
}

// Takes as many rows at a time as there are columns for.
template <class T, PackedFormat kFormat>
void launch_typed(GemvParams p, int x_width, const PackedMatrix& matrix, const RopeAppendParams* rope,
                  char* workspace, cudaStream_t stream) {
  constexpr int kMostRows = 16 / kXColumns<T>;
  for (int left = p.m; left > 0; left -= kMostRows) {
    p.m = std::min(left, kMostRows);
    with_columns<T, kFormat>(p.m, matrix, [&](auto columns) {
      launch_columns<T, kFormat, decltype(columns)::value>(p, x_width, matrix, rope, workspace, stream);
    });
    p.x = static_cast<const T*>(p.x) + int64_t(kMostRows) * x_width;
    if (p.residual) p.residual = static_cast<const T*>(p.residual) + int64_t(kMostRows) * p.n;
    p.out = static_cast<T*>(p.out) + int64_t(kMostRows) * p.n;
  }
}

template <PackedFormat kFormat>
int64_t packed_format_workspace_bytes(const GemvParams& p, const PackedMatrix& matrix) {
  int64_t bytes = 0;
  with_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_columns<T, kFormat>(std::min(p.m, 16), matrix, [&](auto columns) {
      constexpr int kColumns = decltype(columns)::value;
      if (takes_prepared<T, kFormat, kColumns>(matrix)) {
        bytes = PreparedOf<kFormat, kColumns>{whole_blocks<kFormat>(matrix)}.bytes();
      }
    });
  });
  return bytes;
}

template <PackedFormat kFormat>
void launch_packed_format(const GemvParams& params, int x_width, const PackedMatrix& matrix,
                          const RopeAppendParams* rope, void* workspace, cudaStream_t stream) {
  with_type(params.dtype, [&](auto zero) {
    launch_typed<decltype(zero), kFormat>(params, x_width, matrix, rope, static_cast<char*>(workspace),
                                          stream);
  });
}

}  // namespace hf_fastpath
