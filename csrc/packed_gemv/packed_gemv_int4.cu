// packed_gemv_kernel for one format.

#include "packed_gemv/packed_gemv_launch.cuh"

namespace hf_fastpath {

template int64_t packed_format_workspace_bytes<PackedFormat::kInt4>(const GemvParams&, const PackedMatrix&);
template void launch_packed_format<PackedFormat::kInt4>(const GemvParams&, int, const PackedMatrix&,
                                                        const RopeAppendParams*, void*, cudaStream_t);

}  // namespace hf_fastpath
