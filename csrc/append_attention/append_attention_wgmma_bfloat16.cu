// append_attention on Hopper's tensor cores, bfloat16: see append_attention_wgmma.cuh.
#include "append_attention/append_attention_wgmma.cuh"

namespace hf_fastpath {

void launch_append_attention_wgmma_bfloat16(const AppendAttentionParams& params,
                                            const AppendAttentionPlan& plan, cudaStream_t stream) {
  append::launch_wgmma_typed<__nv_bfloat16>(params, plan, stream);
}

}  // namespace hf_fastpath
