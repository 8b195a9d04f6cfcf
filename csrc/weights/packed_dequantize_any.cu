// A quantized weight of any format as floats in device memory: what packed_gemm/packed_dequantize.cu does for
// formats that have kernels, with all that is known of a format read from its traits at run time.
//
// Work split: a block has a row, a thread a 32-bit word at a time, which are four or eight neighbors.
// Traffic: quants and scales once, the weights out once. Roofline: bandwidth of writes, which are of one
// element at a time: a format that is to be fast has kernels.
#include "common/cuda_check.cuh"
#include "common/numeric.cuh"
#include "weights/packed_matrix.h"
#include "weights/packed_values.h"

namespace hf_fastpath {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads)
    packed_dequantize_any_kernel(const __grid_constant__ PackedTraits traits, PackedMatrix matrix,
                                 const uint32_t* quants, int64_t k, int64_t begin, T* out) {
  const int bits = traits.bits, neighbors = 32 / bits, block_words = int(kPackedBlock) / neighbors;
  const int count = matrix.blocks * block_words;
  const int64_t row = begin + blockIdx.x;
  const int64_t groups = traits.group == 0 ? 1 : matrix.blocks * (kPackedBlock / traits.group);
  const uint32_t* const from = quants + row * count;
  T* const to = out + blockIdx.x * k;
  for (int at = threadIdx.x; at < count; at += kThreads) {
    const int block = at / block_words, place = at % block_words;  // words of the sub-blocks take turns
    const int64_t first =
        block * kPackedBlock + place % int(kSubBlocks) * kSubBlock + place / int(kSubBlocks) * neighbors;
    if (first >= k) continue;
    const uint32_t word = __ldcs(from + at);
    if (traits.record_bytes > 0) {
      const auto* record = reinterpret_cast<const uint8_t*>(matrix.scales) +
                           (row * matrix.blocks + block) * traits.record_bytes;
      const PackedFactors of = record_factors(traits, record, int(first - block * kPackedBlock));
      for (int i = 0; i < neighbors && first + i < k; ++i) {
        const uint32_t quant = word >> bits * i & ((1u << bits) - 1);
        const float value = __fmul_rn(quant_value(traits, quant), of.scale);  // the sum alone is rounded
        to[first + i] = from_float<T>(__fadd_rn(value, of.minimum) * matrix.multiplier);
      }
      continue;
    }
    const int64_t group = row * groups + (traits.group == 0 ? 0 : first / traits.group);
    const float scale = scale_value(traits, matrix.scales, group) * matrix.multiplier;
    const float zero = traits.zeros == PackedZeros::kOfGroup ? float(__ldg(matrix.zeros + group)) : 0.f;
    for (int i = 0; i < neighbors && first + i < k; ++i) {
      const uint32_t quant = word >> bits * i & ((1u << bits) - 1);
      to[first + i] = from_float<T>((quant_value(traits, quant) - zero) * scale);
    }
  }
}

}  // namespace

void launch_packed_dequantize_any(const PackedMatrix& matrix, const void* quants, int64_t k, int64_t begin,
                                  int64_t end, DType dtype, void* weight, cudaStream_t stream) {
  if (end <= begin) return;
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    const dim3 grid(static_cast<unsigned>(end - begin)), block(kThreads);
    packed_dequantize_any_kernel<<<grid, block, 0, stream>>>(traits_of(matrix.format), matrix,
                                                             static_cast<const uint32_t*>(quants), k, begin,
                                                             static_cast<T*>(weight));
    HF_FASTPATH_CUDA_CHECK(cudaGetLastError());
  });
}

}  // namespace hf_fastpath
