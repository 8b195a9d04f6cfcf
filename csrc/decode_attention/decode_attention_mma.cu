// decode_attention on tensor cores, K and V in q's type: see decode_attention_mma.cuh.
#include "decode_attention/decode_attention_mma.cuh"

namespace hf_fastpath {

void launch_decode_attention_mma(const DecodeAttentionParams& params, cudaStream_t stream) {
  if (params.dtype == DType::kFloat16) return launch_typed<__half>(params, stream);
  launch_typed<__nv_bfloat16>(params, stream);
}

}  // namespace hf_fastpath
