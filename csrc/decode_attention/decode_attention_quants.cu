// decode_attention over K and V in int8 or fp8: see decode_attention_quants.cuh.
#include "decode_attention/decode_attention_quants.cuh"

namespace hf_fastpath {
namespace {

template <class T, class Quant, int kDims, int kHalves, int kWarps, int kRing>
void launch_ring(const DecodeAttentionParams& p, cudaStream_t stream) {
  constexpr int kBlocksPerSm = kDims > 64 && kDims <= 128 ? 1 : 2;
  const dim3 grid = split_grid(p, kHalves * 8, kBlocksPerSm), block(kWarps * kWarpSize);
  const size_t smem_bytes = kWarps * QuantTiles<kDims, kRing>::kBytes;
  launch_attention(decode_attention_quants_kernel<T, Quant, kDims, kHalves, kWarps, kRing>, grid, block,
                   smem_bytes, stream, p);
}

template <class T, class Quant, int kDims, int kHalves>
void launch(const DecodeAttentionParams& p, cudaStream_t stream) {
  constexpr int kWarps = kDims > 128 ? 4 : 8, kRing = kDims > 64 ? 2 : 3;
  constexpr int kBytes = kWarps * QuantTiles<kDims, kRing>::kBytes;
  if constexpr (kBytes > kSharedBytesEverywhere) {
    if (kBytes > shared_bytes_of_block())
      return launch_ring<T, Quant, kDims, kHalves, kWarps / 2, kRing>(p, stream);
  }
  launch_ring<T, Quant, kDims, kHalves, kWarps, kRing>(p, stream);
}

template <class T, class Quant>
void launch_typed(const DecodeAttentionParams& p, cudaStream_t stream) {
  const bool few = rows_per_kv_head(p) <= 8;
  if (p.head_dim <= 64) return few ? launch<T, Quant, 64, 1>(p, stream) : launch<T, Quant, 64, 2>(p, stream);
  if (p.head_dim <= 128)
    return few ? launch<T, Quant, 128, 1>(p, stream) : launch<T, Quant, 128, 2>(p, stream);
  launch<T, Quant, 256, 1>(p, stream);  // 16 rows would not fit in registers
}

template <class T>
void launch_quants(const DecodeAttentionParams& p, cudaStream_t stream) {
  if (p.kv_type == KvType::kInt8) return launch_typed<T, int8_t>(p, stream);
  launch_typed<T, Float8>(p, stream);
}

}  // namespace

bool fits_decode_attention_quants(const DecodeAttentionParams& params) {
  return is_quantized(params.kv_type) && params.dtype != DType::kFloat32 &&
         is_tuned_head_dim(params.head_dim) && params.head_dim % 16 == 0;
}

void launch_decode_attention_quants(const DecodeAttentionParams& params, cudaStream_t stream) {
  if (params.dtype == DType::kFloat16) return launch_quants<__half>(params, stream);
  launch_quants<__nv_bfloat16>(params, stream);
}

}  // namespace hf_fastpath
