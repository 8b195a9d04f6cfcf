// decode_attention on tensor cores, K and V in int8 or fp8: see decode_attention_mma.cuh.
#include "decode_attention/decode_attention_mma.cuh"

namespace hf_fastpath {
namespace {

template <class T>
void launch_quants(const DecodeAttentionParams& params, cudaStream_t stream) {
  if (params.kv_type == KvType::kInt8) return launch_typed<T, int8_t>(params, stream);
  launch_typed<T, Float8>(params, stream);
}

}  // namespace

void launch_decode_attention_mma_quants(const DecodeAttentionParams& params, cudaStream_t stream) {
  if (params.dtype == DType::kFloat16) return launch_quants<__half>(params, stream);
  launch_quants<__nv_bfloat16>(params, stream);
}

}  // namespace hf_fastpath
