// What: out = x @ W.T for one row of x and a weight in Q4_0, scales among the quants or apart: the plain way
//   to read these layouts, to measure others against.
// Work split: a warp an output, eight a block; lane l takes groups l, l + 32, ...
// Traffic: 18 bytes for 32 weights, each once. Apart, a warp reads 512 neighboring bytes of quants at a time,
//   16 a lane, and 64 of scales; interleaved, 576 in nine two-byte loads a lane, 18 bytes apart: blocks of 18
//   bytes are aligned to two. x comes from L1.
// Roofline: read bandwidth. Nothing was measured yet.
#include "common/cuda_check.cuh"
#include "common/numeric.cuh"
#include "common/warp.cuh"
#include "q4_0_gemv/q4_0_gemv.h"

namespace hf_fastpath {
namespace {

constexpr int kWarps = 8;        // eight blocks fill an SM's 2048 threads
constexpr int kLeastBlocks = 4;  // room for 64 registers, which misaligned quants take instead of spilling
constexpr int kGroup = 32, kQuantBytes = 16, kBlockBytes = 18;
constexpr float kZero = 8.f;

// A group as it is computed with: 32 quants of four bits, and their scale.
struct Group {
  uint32_t words[4];
  float scale;
};

__device__ __forceinline__ float half_of(uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

// From an address that is aligned to kUnit bytes, 1 or 2.
template <int kUnit>
__device__ __forceinline__ uint32_t two_bytes(const uint8_t* from) {
  if constexpr (kUnit == 2) return __ldg(reinterpret_cast<const unsigned short*>(from));
  return __ldg(from) | __ldg(from + 1) << 8;
}

template <int kUnit>
__device__ __forceinline__ void quants_in_pieces(const uint8_t* from, Group& group) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    group.words[i] = two_bytes<kUnit>(from + 4 * i) | two_bytes<kUnit>(from + 4 * i + 2) << 16;
  }
}

// kUnit 16: aligned quants apart from their scales.
template <bool kInterleaved, int kUnit>
__device__ __forceinline__ Group load_group(const uint8_t* quants, const __half* scales, int64_t index) {
  Group group;
  if constexpr (kInterleaved) {
    const uint8_t* block = quants + index * kBlockBytes;
    group.scale = half_of(two_bytes<kUnit>(block));
    quants_in_pieces<kUnit>(block + 2, group);
  } else {
    group.scale = __half2float(__ldg(scales + index));
    if constexpr (kUnit == 16) {
      const uint4 all = __ldg(reinterpret_cast<const uint4*>(quants) + index);
      group.words[0] = all.x, group.words[1] = all.y, group.words[2] = all.z, group.words[3] = all.w;
    } else {
      quants_in_pieces<1>(quants + index * kQuantBytes, group);
    }
  }
  return group;
}

template <class T, bool kInterleaved, int kUnit, bool kAlignedX>
__global__ void __launch_bounds__(kWarps* kWarpSize, kLeastBlocks)
    q4_0_gemv_kernel(const T* x, const uint8_t* quants, const __half* scales, T* out, int64_t rows,
                     int64_t groups) {
  constexpr int kElems = kAlignedX ? kVecElems<T> : 1;
  using C = Chunk<T, kElems>;
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  if (row >= rows) return;
  float total = 0.f;
  for (int64_t g = lane; g < groups; g += kWarpSize) {
    const Group group = load_group<kInterleaved, kUnit>(quants, scales, row * groups + g);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kGroup; i += kElems) {
      float inputs[kElems];
      C::unpack(C::load_readonly(x + g * kGroup + i), inputs);
#pragma unroll
      for (int e = 0; e < kElems; ++e) {
        const int weight = i + e, byte = weight % kQuantBytes;
        const int shift = byte % 4 * 8 + weight / kQuantBytes * 4;
        sum = fmaf(static_cast<float>(group.words[byte / 4] >> shift & 15u) - kZero, inputs[e], sum);
      }
    }
    total = fmaf(sum, group.scale, total);
  }
  total = warp_sum(total);
  if (lane == 0) out[row] = from_float<T>(total);
}

bool is_aligned(const void* address, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

template <class T, bool kInterleaved, int kUnit>
void launch_for_x(const T* x, const uint8_t* quants, const __half* scales, T* out, int64_t rows,
                  int64_t groups, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((rows + kWarps - 1) / kWarps)), block(kWarps * kWarpSize);
  const size_t smem_bytes = 0;
  if (is_aligned(x, 16)) {
    q4_0_gemv_kernel<T, kInterleaved, kUnit, true>
        <<<grid, block, smem_bytes, stream>>>(x, quants, scales, out, rows, groups);
  } else {
    q4_0_gemv_kernel<T, kInterleaved, kUnit, false>
        <<<grid, block, smem_bytes, stream>>>(x, quants, scales, out, rows, groups);
  }
  HF_FASTPATH_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void launch_q4_0_gemv(const void* x, const uint8_t* quants, const void* scales, void* out, int64_t rows,
                      int64_t groups, DType dtype, cudaStream_t stream) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto launch = [&](auto function) {
      function(static_cast<const T*>(x), quants, static_cast<const __half*>(scales), static_cast<T*>(out),
               rows, groups, stream);
    };
    if (scales == nullptr) {
      launch(is_aligned(quants, 2) ? launch_for_x<T, true, 2> : launch_for_x<T, true, 1>);
    } else {
      launch(is_aligned(quants, 16) ? launch_for_x<T, false, 16> : launch_for_x<T, false, 1>);
    }
  });
}

}  // namespace hf_fastpath
