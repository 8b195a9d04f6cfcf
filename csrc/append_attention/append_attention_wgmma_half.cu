// append_attention on Hopper's tensor cores, half: see append_attention_wgmma.cuh.
#include "append_attention/append_attention_wgmma.cuh"

namespace hf_fastpath {

void launch_append_attention_wgmma_half(const AppendAttentionParams& params, const AppendAttentionPlan& plan,
                                        cudaStream_t stream) {
  append::launch_wgmma_typed<__half>(params, plan, stream);
}

}  // namespace hf_fastpath
