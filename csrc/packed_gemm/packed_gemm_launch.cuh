// Launches packed_gemm_kernel (packed_gemm_kernel.cuh).
#pragma once

#include "common/tensor_map.h"
#include "packed_gemm/packed_gemm_kernel.cuh"

namespace hf_fastpath {

template <class T, PackedFormat kFormat, int kTokens, int kWarpgroups>
void launch_gemm_tile(const PackedGemmParams& p, const PackedGemmPlan& plan, char* workspace,
                      cudaStream_t stream) {
  using Tile = GemmTile<kTokens, kWarpgroups, bits_of(kFormat)>;
  const PackedMatrix& matrix = p.matrix;
  const uint64_t width = p.k, rows = p.rows, features = matrix.rows;
  const uint64_t row_bytes = uint64_t(matrix.blocks) * kPackedBlock * bits_of(kFormat) / 8;
  const uint64_t x_bytes = uint64_t(p.x_stride) * 2;
  const CUtensorMap x = tensor_map(p.x, {CU_TENSOR_MAP_DATA_TYPE_UINT16,
                                         CU_TENSOR_MAP_SWIZZLE_128B,
                                         {width, rows, 1},
                                         {x_bytes, rows * x_bytes},
                                         {kGemmX, kTokens / kGemmCluster, 1}});
  constexpr uint32_t kRowBytes = PackedPiece<kFormat>::kRowBytes;
  const CUtensorMap quants =
      tensor_map(p.quants, {CU_TENSOR_MAP_DATA_TYPE_UINT32,
                            kRowBytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                            {row_bytes / 4, features, 1},
                            {row_bytes, features * row_bytes},
                            {kRowBytes / 4, Tile::kFeatures, 1}});
  const bool whole = features % 8 == 0 && is_aligned16(p.out);
  const CUtensorMap out = !whole ? CUtensorMap{}
                                 : tensor_map(p.out, {CU_TENSOR_MAP_DATA_TYPE_UINT16,
                                                      CU_TENSOR_MAP_SWIZZLE_128B,
                                                      {features, rows, 1},
                                                      {features * 2, rows * features * 2},
                                                      {64, kGemmStepTokens, 1}});
  GemmShare share{};
  share.plan = plan;
  share.rows = p.rows;
  share.whole = whole;
  share.partials = reinterpret_cast<float*>(workspace);
  share.flags = reinterpret_cast<unsigned long long*>(workspace + plan.partial_bytes);
  share.ticket = next_gemm_ticket();
  const auto kernel = packed_gemm_kernel<T, kFormat, Tile>;
  allow_shared_memory(kernel, Tile::kBytes);
  HF_FASTPATH_CUDA_CHECK(launch_clusters(kernel, dim3(plan.clusters * kGemmCluster), dim3(Tile::kThreads),
                                         Tile::kBytes, stream, p.programmatic_launch, kGemmCluster, share,
                                         matrix, x, quants, out, static_cast<const T*>(p.bias),
                                         static_cast<T*>(p.out)));
}

template <class T, PackedFormat kFormat>
void launch_gemm_typed(const PackedGemmParams& p, const PackedGemmPlan& plan, char* workspace,
                       cudaStream_t stream) {
  const auto is = [&](int tokens, int warpgroups) {
    return plan.tokens == tokens && plan.warpgroups == warpgroups;
  };
  if (is(32, 2)) return launch_gemm_tile<T, kFormat, 32, 2>(p, plan, workspace, stream);
  if (is(32, 4)) return launch_gemm_tile<T, kFormat, 32, 4>(p, plan, workspace, stream);
  if (is(64, 2)) return launch_gemm_tile<T, kFormat, 64, 2>(p, plan, workspace, stream);
  if (is(64, 4)) return launch_gemm_tile<T, kFormat, 64, 4>(p, plan, workspace, stream);
  if (is(128, 2)) return launch_gemm_tile<T, kFormat, 128, 2>(p, plan, workspace, stream);
  if (is(256, 2)) return launch_gemm_tile<T, kFormat, 256, 2>(p, plan, workspace, stream);
}

template <PackedFormat kFormat>
void launch_packed_gemm_format(const PackedGemmParams& p, const PackedGemmPlan& plan, char* workspace,
                               cudaStream_t stream) {
  if (p.dtype == DType::kFloat16) return launch_gemm_typed<__half, kFormat>(p, plan, workspace, stream);
  launch_gemm_typed<__nv_bfloat16, kFormat>(p, plan, workspace, stream);
}

}  // namespace hf_fastpath
