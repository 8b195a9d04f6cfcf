// Plans and launches packed_gemv_kernel (packed_gemv_ring.cuh).
#pragma once

#include "common/tensor_map.h"
#include "packed_gemv/packed_gemv_ring.cuh"

namespace hf_fastpath {

// Of slots that may be under way at a time, an SM: two slots of both blocks. With one a block, or three,
// products of 4096 to 28672 take up to 6 % longer (H200).
constexpr int kPackedInFlightBytes = 72 * 1024;
// Shared memory of x in a phase, of all warps.
constexpr int kXBytes = 32 * 1024;
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

template <PackedForm kForm>
PackedMaps maps_of(const GemvParams& p, const PackedPlan& plan) {
  using Slot = PackedSlot<kForm>;
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
  maps.scales = tensor_map(matrix.scales,
                           {CU_TENSOR_MAP_DATA_TYPE_UINT16,
                            Slot::kSwizzlesScales ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
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

// Of a row of x, of whole pieces.
template <PackedForm kForm>
int whole_blocks(const PackedMatrix& matrix) {
  return round_up_to(matrix.blocks, PackedSlot<kForm>::kBlocks);
}

template <class T, PackedForm kForm, int kColumns>
RingLaunch plan_packed(const GemvParams& p, const RopeAppendParams* rope, PackedPlan& plan) {
  using Slot = PackedSlot<kForm>;
  using X = PackedX<T, kForm, kColumns>;
  constexpr int kSpanPieces = X::kSpanPieces;
  RingPlan& ring = plan.ring;
  ring.append = rope != nullptr;
  ring.halves = p.gated || ring.append ? 2 : 1;
  const int units = ring.append ? p.n / 2 : p.n;
  plan.pieces = (plan.matrix.blocks + Slot::kBlocks - 1) / Slot::kBlocks;
  const int span_bytes = kRingWarps * X::kSpanBytes;  // of all warps
  const int all_spans = (plan.pieces + kSpanPieces - 1) / kSpanPieces;
  const int spans = std::min(all_spans, std::max(1, kXBytes * (int(sizeof(T)) / 2) / span_bytes));
  plan.phase_pieces = std::min(plan.pieces, spans * kSpanPieces);

  const int sms = multiprocessor_count();
  const int64_t bytes = plan.matrix.rows * plan.matrix.blocks * Slot::kBlockBytes;
  const bool is_large = spans * span_bytes > kXBytes;
  const int blocks_per_sm = !is_large && bytes > int64_t(kRingBytes) * sms ? kRingBlocksPerSm : 1;
  const int64_t dots = int64_t(units) * ring.halves * p.m * 4;  // bytes of all blocks
  const int64_t least = (dots + kMaxPartBytes / 2 - 1) / (kMaxPartBytes / 2);
  const int most_blocks = static_cast<int>(std::max<int64_t>(sms * blocks_per_sm, least));
  plan.together = rows_together(units, most_blocks, rope);
  plan.copy_lines = plan.matrix.blocks * Slot::kBlockBytes % kLineBytes ? 1 : kLines;
  ring.units = units / plan.together;
  const int grid = std::min(ring.units, most_blocks);
  ring.share = ring.units / grid, ring.larger = ring.units % grid;

  // Rows' scales start at a multiple of 16 bytes, as copies want it.
  plan.fetches_scales = Slot::kScaleBytes > 0 &&
                        plan.matrix.groups * (Slot::kZeroBytes > 0 ? 1 : 2) % 16 == 0 &&
                        is_aligned16(plan.matrix.scales) && is_aligned16(plan.matrix.zeros);
  plan.scale_stride = round_up_to(plan.together * Slot::kScaleBytes, kLineBytes);
  plan.zero_stride = round_up_to(plan.together * Slot::kZeroBytes, kLineBytes);
  plan.scales_at = kTileRows * kPieceBytes;
  plan.zeros_at = plan.scales_at + (plan.fetches_scales ? kTileRows / plan.together * plan.scale_stride : 0);
  plan.slot_bytes = round_up_to(
      plan.zeros_at + (plan.fetches_scales ? kTileRows / plan.together * plan.zero_stride : 0), 1024);

  int at = 0;
  const auto take = [&](int bytes) {
    const int start = at;
    at += round_up_to(bytes, 128);
    return start;
  };
  plan.x_at = take(spans * span_bytes);
  plan.sums_at = take(kRingWarps * spans * X::kSpanSteps);
  plan.scratch_at = take(2 * kRingWarps * p.m * 4);
  plan.parts_at = take(2 * kRingWarps * p.m * kTileRows * 4);
  plan.dots_at = take((ring.share + 1) * plan.together * ring.halves * p.m * 4);
  const int most = is_large ? kLargeBlockBytes : kBlockBytes;
  ring.slots = has_hopper_code() ? std::clamp((most - at) / plan.slot_bytes, 1, kMaxRingSlots) : 0;
  const int ring_bytes = ring.slots * plan.slot_bytes;
  for (int* each : {&plan.x_at, &plan.sums_at, &plan.scratch_at, &plan.parts_at, &plan.dots_at})
    *each += ring_bytes;
  ring.in_flight = ring.streaming =
      std::clamp((kPackedInFlightBytes / blocks_per_sm + plan.slot_bytes / 2) / plan.slot_bytes, 1,
                 std::max(1, ring.slots));
  return {ring, grid, ring_bytes + at};
}

template <class T, PackedForm kForm, int kColumns>
void launch_columns(GemvParams p, int x_width, const PackedMatrix& matrix, const RopeAppendParams* rope,
                    char* workspace, cudaStream_t stream) {
  PackedPlan plan{};
  plan.x_width = x_width;
  plan.matrix = matrix;
  if constexpr (kTakesPrepared<T, kColumns>) {
    const PreparedOf<kForm, kColumns> layout{whole_blocks<kForm>(matrix)};
    HF_FASTPATH_CUDA_CHECK(launch_overlapping(
        packed_prepare_kernel<T, kForm, kColumns>, dim3(p.m), dim3(kPrepareThreads), 0, stream, p.overlap,
        static_cast<const T*>(p.x), p.norm, p.k, x_width, workspace, layout));
    plan.prepared = workspace;
    p.norm = {};
  }
  const RingLaunch as = plan_packed<T, kForm, kColumns>(p, rope, plan);
  const PackedMaps maps = has_hopper_code() ? maps_of<kForm>(p, plan) : PackedMaps{};
  with_ring_end(p, rope, [&](auto end) {
    const auto kernel = packed_gemv_kernel<T, kForm, kColumns, decltype(end)::value>;
    HF_FASTPATH_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, as.smem_bytes));
    HF_FASTPATH_CUDA_CHECK(launch_overlapping(
        kernel, dim3(as.grid), dim3(has_hopper_code() ? kRingThreads : kRingConsumers), as.smem_bytes, stream,
        p.overlap, p, rope ? *rope : RopeAppendParams{}, plan, maps));
  });
}

// Calls with_columns(columns of B that p.m rows of x take, as a constant).
template <class T, PackedForm kForm, class Launch>
void with_columns(int m, const PackedMatrix& matrix, Launch launch) {
  const int columns = m * kXColumns<T>;
  if constexpr (kXColumns<T> == 1) {
    // Of 4 bits ByteX takes two blocks at a time.
    if (columns == 1 && (kBits<kForm> == 8 || (matrix.blocks % 2 == 0 && is_aligned16(matrix.scales)))) {
      return launch(std::integral_constant<int, 1>{});
    }
  }
  if (columns <= 4) return launch(std::integral_constant<int, 4>{});
  if (columns <= 8) return launch(std::integral_constant<int, 8>{});
  launch(std::integral_constant<int, 16>{});
}

// As many rows at a time as there are columns for.
template <class T, PackedForm kForm>
void launch_typed(GemvParams p, int x_width, const PackedMatrix& matrix, const RopeAppendParams* rope,
                  char* workspace, cudaStream_t stream) {
  constexpr int kMostRows = 16 / kXColumns<T>;
  for (int left = p.m; left > 0; left -= kMostRows) {
    p.m = std::min(left, kMostRows);
    with_columns<T, kForm>(p.m, matrix, [&](auto columns) {
      launch_columns<T, kForm, decltype(columns)::value>(p, x_width, matrix, rope, workspace, stream);
    });
    p.x = static_cast<const T*>(p.x) + int64_t(kMostRows) * x_width;
    if (p.residual) p.residual = static_cast<const T*>(p.residual) + int64_t(kMostRows) * p.n;
    p.out = static_cast<T*>(p.out) + int64_t(kMostRows) * p.n;
  }
}

template <PackedForm kForm>
int64_t packed_form_workspace_bytes(const GemvParams& p, const PackedMatrix& matrix) {
  int64_t bytes = 0;
  with_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_columns<T, kForm>(std::min(p.m, 16), matrix, [&](auto columns) {
      constexpr int kColumns = decltype(columns)::value;
      if constexpr (kTakesPrepared<T, kColumns>) {
        bytes = PreparedOf<kForm, kColumns>{whole_blocks<kForm>(matrix)}.bytes();
      }
    });
  });
  return bytes;
}

template <PackedForm kForm>
void launch_packed_form(const GemvParams& params, int x_width, const PackedMatrix& matrix,
                        const RopeAppendParams* rope, void* workspace, cudaStream_t stream) {
  with_type(params.dtype, [&](auto zero) {
    launch_typed<decltype(zero), kForm>(params, x_width, matrix, rope, static_cast<char*>(workspace), stream);
  });
}

}  // namespace hf_fastpath
