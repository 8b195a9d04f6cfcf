// packed_gemm_kernel for one format.

#include "packed_gemm/packed_gemm_launch.cuh"

namespace hf_fastpath {

template void launch_packed_gemm_format<PackedFormat::kInt4G32>(const PackedGemmParams&,
                                                                const PackedGemmPlan&, char*, cudaStream_t);

}  // namespace hf_fastpath
