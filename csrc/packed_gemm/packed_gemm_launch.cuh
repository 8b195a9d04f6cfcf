// Launches packed_gemm_kernel (packed_gemm_kernel.cuh).
#pragma once

#include "common/tensor_map.h"
#include "packed_gemm/packed_gemm_kernel.cuh"

namespace hf_fastpath {

template <class T, PackedForm kForm, int kTokens>
void launch_gemm_tokens(const PackedGemmParams& p, const PackedGemmPlan& plan, char* workspace,
                        cudaStream_t stream) {
  using Slots = GemmSlots<kTokens>;
  const PackedMatrix& matrix = p.matrix;
  const uint64_t width = uint64_t(matrix.blocks) * kPackedBlock, rows = p.rows, features = matrix.rows;
  const uint64_t row_bytes = width * bits_of(kForm) / 8;
  const CUtensorMap x = tensor_map(workspace, {CU_TENSOR_MAP_DATA_TYPE_UINT16,
                                               CU_TENSOR_MAP_SWIZZLE_128B,
                                               {width, rows, 1},
                                               {width * 2, rows * width * 2},
                                               {kGemmX, kTokens / kGemmCluster, 1}});
  const CUtensorMap quants = tensor_map(p.quants, {CU_TENSOR_MAP_DATA_TYPE_UINT32,
                                                   CU_TENSOR_MAP_SWIZZLE_128B,
                                                   {row_bytes / 4, features, 1},
                                                   {row_bytes, features * row_bytes},
                                                   {32, kGemmFeatures, 1}});
  GemmShare share{};
  share.plan = plan;
  share.rows = p.rows, share.k = p.k;
  share.parts = reinterpret_cast<float*>(workspace + plan.x_bytes);
  share.flags = reinterpret_cast<unsigned*>(workspace + plan.x_bytes + plan.part_bytes);
  const auto kernel = packed_gemm_kernel<T, kForm, kTokens>;
  HF_FASTPATH_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Slots::kBytes));
  HF_FASTPATH_CUDA_CHECK(launch_clusters(kernel, dim3(plan.clusters * kGemmCluster), dim3(kGemmThreads),
                                         Slots::kBytes, stream, true, kGemmCluster, share, matrix, x, quants,
                                         static_cast<const T*>(p.bias), static_cast<T*>(p.out)));
}

template <class T, PackedForm kForm>
void launch_gemm_typed(const PackedGemmParams& p, const PackedGemmPlan& plan, char* workspace,
                       cudaStream_t stream) {
  switch (plan.tokens) {
    case 32:
      return launch_gemm_tokens<T, kForm, 32>(p, plan, workspace, stream);
    case 64:
      return launch_gemm_tokens<T, kForm, 64>(p, plan, workspace, stream);
    case 128:
      return launch_gemm_tokens<T, kForm, 128>(p, plan, workspace, stream);
    default:
      return launch_gemm_tokens<T, kForm, 256>(p, plan, workspace, stream);
  }
}

template <PackedForm kForm>
void launch_packed_gemm_form(const PackedGemmParams& p, const PackedGemmPlan& plan, char* workspace,
                             cudaStream_t stream) {
  if (p.dtype == DType::kFloat16) return launch_gemm_typed<__half, kForm>(p, plan, workspace, stream);
  launch_gemm_typed<__nv_bfloat16, kForm>(p, plan, workspace, stream);
}

}  // namespace hf_fastpath
