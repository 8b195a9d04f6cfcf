// Written by the build (hf_fastpath/native/generated.py) from hf_fastpath/packed_formats.py.
#include "packed_gemm/packed_gemm_launch.cuh"

namespace hf_fastpath {

constexpr PackedFormat kMade = PackedFormat::kInt8G32;

template void launch_packed_gemm_format<kMade>(const PackedGemmParams&, const PackedGemmPlan&, char*,
                                               cudaStream_t);

}  // namespace hf_fastpath
