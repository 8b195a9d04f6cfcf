// What: rows of a quantized matrix in a float type, rounded once: for products of other libraries.
// Work split: a thread has eight neighbors of a row, which for 4 bits are a word and for 8 bits two.
// Traffic: quants and scales once, the weights out once.
// Roofline: bandwidth of writes.

#include "packed_gemm/packed_gemm.h"
#include "common/cuda_check.cuh"
#include "packed_gemm/packed_gemm_quants.cuh"

namespace hf_fastpath {
namespace {

constexpr int kThreads = 256;
constexpr int kNeighbors = 8;

__device__ __forceinline__ float quant_of(PackedForm form, const uint32_t (&words)[2], int i, int zero) {
  if (form == PackedForm::kInt4 || form == PackedForm::kInt4G32)
    return static_cast<float>(static_cast<int>(words[0] >> 4 * i & 15) - zero);
  const uint32_t byte = words[i / 4] >> i % 4 * 8 & 255;
  if (form == PackedForm::kInt8) return static_cast<float>(static_cast<int8_t>(byte));
  // sign, exponent and mantissa as float32 has them, whose exponent's bias is 120 more
  return __uint_as_float((byte & 0x80) << 24 | (byte & 0x7f) << 20) * 0x1p120f;
}

template <class T, PackedForm kForm>
__global__ void __launch_bounds__(kThreads)
    packed_dequantize_kernel(PackedMatrix matrix, const uint32_t* quants, int64_t k, int64_t begin, int64_t end,
                             T* out, bool whole) {
  constexpr int kBits = PackedPiece<kForm>::kBits, kWords = kBits / 4;
  const int per_row = matrix.blocks * int(kPackedBlock) / kNeighbors;
  const int64_t item = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = begin + item / per_row;
  if (row >= end) return;
  // Neighbors in memory are of four stretches: a lane takes the word, or two, of one of them.
  const int at = static_cast<int>(item % per_row), block = at / 16, stretch = at % 4, w = at / 4 % 4;
  const int first = block * int(kPackedBlock) + stretch * int(kStretch) + w * kNeighbors;
  if (first >= k) return;
  const uint32_t* const from = quants + (row * matrix.blocks + block) * (kPackedBlock * kBits / 32);
  uint32_t words[2] = {};
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = __ldcs(from + (w * kWords + i) * int(kStretches) + stretch);
  constexpr int kGroups = kForm == PackedForm::kInt4G32 ? int(kStretches) : 1;
  const int64_t group = kForm == PackedForm::kFp8
                            ? row
                            : row * matrix.groups + block * kGroups + (kGroups > 1 ? stretch : 0);
  const float scale = __half2float(__ushort_as_half(__ldg(matrix.scales + group))) * matrix.multiplier;
  const int zero = kForm == PackedForm::kInt4 ? __ldg(matrix.zeros + group) : 8;
  float values[kNeighbors];
#pragma unroll
  for (int i = 0; i < kNeighbors; ++i) values[i] = quant_of(kForm, words, i, zero) * scale;
  T* const to = out + (row - begin) * k + first;
  if (whole) {
#pragma unroll
    for (int i = 0; i < kNeighbors; i += kVecElems<T>) {
      float chunk[kVecElems<T>];
#pragma unroll
      for (int e = 0; e < kVecElems<T>; ++e) chunk[e] = values[i + e];
      Chunk<T, kVecElems<T>>::store(to + i, chunk);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kNeighbors; ++i)
    if (first + i < k) to[i] = from_float<T>(values[i]);
}

template <class T>
void launch_typed(const PackedMatrix& matrix, const void* quants, int64_t k, int64_t begin, int64_t end, T* out,
                  cudaStream_t stream) {
  const int64_t items = (end - begin) * (matrix.blocks * kPackedBlock / kNeighbors);
  if (items <= 0) return;
  const dim3 grid(static_cast<unsigned>((items + kThreads - 1) / kThreads)), block(kThreads);
  const bool whole = k % kNeighbors == 0 && is_aligned16(out);
  const auto run = [&](auto kernel) {
    kernel<<<grid, block, 0, stream>>>(matrix, static_cast<const uint32_t*>(quants), k, begin, end, out, whole);
    HF_FASTPATH_CUDA_CHECK(cudaGetLastError());
  };
  switch (matrix.form) {
    case PackedForm::kInt8:
      return run(packed_dequantize_kernel<T, PackedForm::kInt8>);
    case PackedForm::kFp8:
      return run(packed_dequantize_kernel<T, PackedForm::kFp8>);
    case PackedForm::kInt4:
      return run(packed_dequantize_kernel<T, PackedForm::kInt4>);
    case PackedForm::kInt4G32:
      return run(packed_dequantize_kernel<T, PackedForm::kInt4G32>);
  }
}

}  // namespace

void launch_packed_dequantize(const PackedMatrix& matrix, const void* quants, int64_t k, int64_t begin, int64_t end,
                              DType dtype, void* weight, cudaStream_t stream) {
  with_type(dtype, [&](auto zero) {
    launch_typed(matrix, quants, k, begin, end, static_cast<decltype(zero)*>(weight), stream);
  });
}

}  // namespace hf_fastpath
