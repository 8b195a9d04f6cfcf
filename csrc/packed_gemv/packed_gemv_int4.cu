// packed_gemv_kernel for one format.

#include "packed_gemv/packed_gemv_launch.cuh"

namespace hf_fastpath {

template void launch_packed_form<PackedForm::kInt4>(const GemvParams&, int, const PackedMatrix&,
                                                    const RopeAppendParams*, cudaStream_t);

}  // namespace hf_fastpath
