// append_attention on tensor cores from sm_80 on, bfloat16: see append_attention_mma.cuh.
#include "append_attention/append_attention_mma.cuh"

namespace hf_fastpath {

void launch_append_attention_mma_bfloat16(const AppendAttentionParams& params,
                                          const AppendAttentionPlan& plan, cudaStream_t stream) {
  append::launch_mma_typed<__nv_bfloat16>(params, plan, stream);
}

}  // namespace hf_fastpath
