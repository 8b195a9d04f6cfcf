// What: rows of a quantized matrix in a float type, rounded once: for products of other libraries.
// Work split: a block has a row, a thread eight neighbors of it at a time, which are a word of 4 or two of 8
// bits. Traffic: quants and scales once, the weights out once. Roofline: bandwidth of writes.

#include <utility>

#include "common/cuda_check.cuh"
#include "packed_gemm/packed_gemm.h"
#include "packed_gemm/packed_gemm_quants.cuh"

namespace hf_fastpath {
namespace {

constexpr int kThreads = 256;
constexpr int kNeighbors = 8;

// All values of a format's table are in shared memory, where each has a bank of its own: no lane waits for
// another.
template <PackedFormat kFormat, int kPlace>
constexpr float kTableValue = traits_of(kFormat).table[kPlace];
template <PackedFormat kFormat, int... kPlace>
__device__ __forceinline__ const float* shared_table(std::integer_sequence<int, kPlace...>) {
  __shared__ float table[sizeof...(kPlace)];
  ((int(threadIdx.x) == kPlace ? void(table[kPlace] = kTableValue<kFormat, kPlace>) : void()), ...);
  __syncthreads();  // all of it is there
  return table;
}

template <PackedFormat kFormat>
__device__ __forceinline__ float quant_of(const uint32_t (&words)[2], int i, int zero) {
  if (Traits<kFormat>::kBits == 4) return static_cast<float>(static_cast<int>(words[0] >> 4 * i & 15) - zero);
  const uint32_t byte = words[i / 4] >> i % 4 * 8 & 255;
  if (Traits<kFormat>::kIsSigned) return static_cast<float>(static_cast<int8_t>(byte));
  if (!Traits<kFormat>::kIsFloat) return static_cast<float>(static_cast<int>(byte) - zero);
  // sign, exponent and mantissa as float32 has them, whose exponent's bias is 120 more
  return __uint_as_float((byte & 0x80) << 24 | (byte & 0x7f) << 20) * 0x1p120f;
}

template <class T, PackedFormat kFormat>
__global__ void __launch_bounds__(kThreads)
    packed_dequantize_kernel(PackedMatrix matrix, const uint32_t* quants, int64_t k, int64_t begin, T* out,
                             bool whole) {
  constexpr int kWords = PackedPiece<kFormat>::kBits / 4,
                kBlockWords = int(kPackedBlock) / kNeighbors * kWords;
  using Of = Traits<kFormat>;
  constexpr int kGroups = Of::kEachSubBlock ? int(kSubBlocks) : 1;
  const float* table = nullptr;
  if constexpr (Of::kHasTable) table = shared_table<kFormat>(std::make_integer_sequence<int, 16>());
  const int64_t row = begin + blockIdx.x;
  const uint32_t* const from = quants + row * matrix.blocks * kBlockWords;
  const int64_t groups = row * matrix.groups;
  T* const of_row = out + blockIdx.x * k;
  const int count = matrix.blocks * int(kPackedBlock) / kNeighbors;
#pragma unroll 4
  for (int at = threadIdx.x; at < count; at += kThreads) {
    // Neighbors in memory are of four sub-blocks: a thread takes the word, or two, of one of them.
    const int block = at / 16, sub_block = at % 4, w = at / 4 % 4;
    const int first = block * int(kPackedBlock) + sub_block * int(kSubBlock) + w * kNeighbors;
    if (first >= k) continue;
    uint32_t words[2] = {};
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      words[i] = __ldcs(from + block * kBlockWords + (w * kWords + i) * int(kSubBlocks) + sub_block);
    const int64_t group = Of::kScalesSums ? row : groups + block * kGroups + (kGroups > 1 ? sub_block : 0);
    float scale = matrix.multiplier;
    if constexpr (Of::kScaleBytes == 4) {
      const int of_row = block * Of::kScalesPerBlock + sub_block / Of::kTogether;
      scale *= __ldg(reinterpret_cast<const float*>(matrix.scales + groups) + of_row);
    } else {
      scale *= __half2float(__ushort_as_half(__ldg(matrix.scales + group)));
    }
    const int zero = Of::kHasZeros ? __ldg(matrix.zeros + group) : Of::kZero;
    float values[kNeighbors];
#pragma unroll
    for (int i = 0; i < kNeighbors; ++i) {
      if constexpr (Of::kHasTable) {
        values[i] = table[words[0] >> 4 * i & 15] * scale;
      } else {
        values[i] = quant_of<kFormat>(words, i, zero) * scale;
      }
    }
    T* const to = of_row + first;
    if (whole) {
#pragma unroll
      for (int i = 0; i < kNeighbors; i += kVecElems<T>) {
        float chunk[kVecElems<T>];
#pragma unroll
        for (int e = 0; e < kVecElems<T>; ++e) chunk[e] = values[i + e];
        Chunk<T, kVecElems<T>>::store(to + i, chunk);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kNeighbors; ++i)
        if (first + i < k) to[i] = from_float<T>(values[i]);
    }
  }
}

template <class T>
void launch_typed(const PackedMatrix& matrix, const void* quants, int64_t k, int64_t begin, int64_t end,
                  T* out, cudaStream_t stream) {
  if (end <= begin) return;
  const dim3 grid(static_cast<unsigned>(end - begin)), block(kThreads);
  const bool whole = k % kNeighbors == 0 && is_aligned16(out);
  const auto run = [&](auto kernel) {
    kernel<<<grid, block, 0, stream>>>(matrix, static_cast<const uint32_t*>(quants), k, begin, out, whole);
    HF_FASTPATH_CUDA_CHECK(cudaGetLastError());
  };
  return with_gpu_format(matrix.format,
                         [&](auto tag) { return run(packed_dequantize_kernel<T, decltype(tag)::value>); });
}

}  // namespace

void launch_packed_dequantize(const PackedMatrix& matrix, const void* quants, int64_t k, int64_t begin,
                              int64_t end, DType dtype, void* weight, cudaStream_t stream) {
  if (!has_gpu_products(matrix.format)) {
    return launch_packed_dequantize_any(matrix, quants, k, begin, end, dtype, weight, stream);
  }
  with_type(dtype, [&](auto zero) {
    launch_typed(matrix, quants, k, begin, end, static_cast<decltype(zero)*>(weight), stream);
  });
}

}  // namespace hf_fastpath
