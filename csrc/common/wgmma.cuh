// Hopper's products of warpgroups, C[64, N] += A[64, 16] * B[16, N], 16-bit operands and float32
// accumulators: what all of them share. A warp of the group has 16 rows of A and C, laid out as
// common/mma.cuh has A and, for every eight columns, C. A comes from shared memory or from registers, B from
// shared memory; there they lie as copies with a swizzle of 128 bytes leave them: boxes of 64 elements, rows
// of 128 bytes, box after box, aligned to 1024 bytes.
#pragma once

#include <cstdint>

#include "common/async.cuh"

// Whether this compilation is for a device that has them: 9.0 alone.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HF_FASTPATH_WGMMA 1
#else
#define HF_FASTPATH_WGMMA 0
#endif

namespace hf_fastpath {

// Whether kernels that need them do something here.
inline bool has_wgmma_code() {
  return has_code([](int arch) { return arch == 900; });
}

#if HF_FASTPATH_WGMMA

// Describes an operand at a shared address: boxes of `box_bytes` where the operand has columns across boxes
// (rows are k), anything where k runs along rows.
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t address, uint32_t box_bytes = 16) {
  constexpr uint64_t kSwizzle128 = uint64_t(1) << 62, kEightRows = uint64_t(1024 >> 4) << 32;
  return kSwizzle128 | kEightRows | uint64_t(box_bytes >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// Before the first product of a batch, and behind whatever else wrote registers that products take.
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes a batch of products.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits for all but the newest kBatches.
template <int kBatches>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kBatches) : "memory");
}

#endif  // HF_FASTPATH_WGMMA

}  // namespace hf_fastpath
