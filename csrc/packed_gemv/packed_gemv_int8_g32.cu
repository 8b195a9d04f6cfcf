// Written by the build (hf_fastpath/native/generated.py) from hf_fastpath/packed_formats.py.
#include "packed_gemv/packed_gemv_launch.cuh"

namespace hf_fastpath {

constexpr PackedFormat kMade = PackedFormat::kInt8G32;

template int64_t packed_format_workspace_bytes<kMade>(const GemvParams&, const PackedMatrix&);
template void launch_packed_format<kMade>(const GemvParams&, int, const PackedMatrix&,
                                          const RopeAppendParams*, void*, cudaStream_t);

}  // namespace hf_fastpath
