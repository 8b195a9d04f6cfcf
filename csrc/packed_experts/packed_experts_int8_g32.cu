// Written by the build (hf_fastpath/native/generated.py) from hf_fastpath/packed_formats.py.
#include "packed_experts/packed_experts_kernel.cuh"

namespace hf_fastpath {

constexpr PackedFormat kMade = PackedFormat::kInt8G32;

template void launch_packed_experts_format<kMade>(const PackedExpertsProduct&, cudaStream_t);

}  // namespace hf_fastpath
