// Hopper's products of warpgroups: C[64, N] += A[64, 16] * B[16, N], 16-bit operands, float32 sums. A warp of
// the group has 16 rows of C, in operand C of common/mma.cuh for every 8 columns; A comes from shared memory
// or, as operand A of common/mma.cuh, from registers; B from shared memory.
//
// In shared memory both lie as copies with a swizzle of 128 bytes leave them: boxes of 64 elements, rows of
// 128 bytes, box after box, aligned to 1024 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace hf_fastpath {

// Whether this compilation is for a device that has them: 9.0 alone.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HF_FASTPATH_WGMMA 1
#else
#define HF_FASTPATH_WGMMA 0
#endif

#if HF_FASTPATH_WGMMA

// Describes an operand at a shared address: boxes of `box_bytes` where the operand has columns across boxes
// (rows are k: V), anything where k runs along rows (Q and K).
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t address, uint32_t box_bytes = 16) {
  constexpr uint64_t kSwizzle128 = uint64_t(1) << 62, kEightRows = uint64_t(1024 >> 4) << 32;
  return kSwizzle128 | kEightRows | uint64_t(box_bytes >> 4) << 16 | (address & 0x3ffff) >> 4;
}

// Before the first product of a batch: registers that it reads are written.
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
// Registers that products write change here, for all the compiler knows.
template <int kCount>
__device__ __forceinline__ void wgmma_touch(float (&c)[kCount][4]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(c[n][i])::"memory");
}

#define HF_C4(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define HF_C32 HF_C4(0), HF_C4(1), HF_C4(2), HF_C4(3), HF_C4(4), HF_C4(5), HF_C4(6), HF_C4(7)
#define HF_C40 HF_C32, HF_C4(8), HF_C4(9)
#define HF_C48 HF_C40, HF_C4(10), HF_C4(11)
#define HF_C64 HF_C48, HF_C4(12), HF_C4(13), HF_C4(14), HF_C4(15)
#define HF_R32                                                                                         \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26," \
  "%27,%28,%29,%30,%31"
#define HF_R40 HF_R32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define HF_R48 HF_R40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define HF_R64 HF_R48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// Both operands in shared memory, k along their rows; without `adds` the sums start anew.
#define HF_WGMMA_SHARED(N, REGS, COUNT, A, B, ADDS, TYPE)                                                 \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" ADDS                                                  \
               ", 0;\n"                                                                                   \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGS "}, %" A ", %" B \
               ", p, 1, 1, 0, 0;\n}\n"                                                                    \
               : COUNT                                                                                    \
               : "l"(a), "l"(b), "r"(int(adds)))

// A in registers, and k along the columns of B.
#define HF_WGMMA_REGISTERS(N, REGS, COUNT, A, B, TYPE)                                                     \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGS "}, {" A "}, %" B \
               ", 1, 1, 1, 1;\n"                                                                           \
               : COUNT                                                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

template <class T>
__device__ __forceinline__ void wgmma_shared(float (&c)[8][4], uint64_t a, uint64_t b, bool adds) {
  if constexpr (std::is_same_v<T, __half>)
    HF_WGMMA_SHARED(64, HF_R32, HF_C32, "32", "33", "34", "f16");
  else
    HF_WGMMA_SHARED(64, HF_R32, HF_C32, "32", "33", "34", "bf16");
}
template <class T>
__device__ __forceinline__ void wgmma_shared(float (&c)[16][4], uint64_t a, uint64_t b, bool adds) {
  if constexpr (std::is_same_v<T, __half>)
    HF_WGMMA_SHARED(128, HF_R64, HF_C64, "64", "65", "66", "f16");
  else
    HF_WGMMA_SHARED(128, HF_R64, HF_C64, "64", "65", "66", "bf16");
}

// kCount groups of 8 columns, of which the first is `c`: 8, 10, 12 or 16.
template <class T, int kCount>
__device__ __forceinline__ void wgmma_registers(float (*c)[4], const uint32_t (&a)[4], uint64_t b) {
  constexpr bool kIsHalf = std::is_same_v<T, __half>;
  static_assert(kCount == 8 || kCount == 10 || kCount == 12 || kCount == 16, "no such product here");
  if constexpr (kCount == 8 && kIsHalf) {
    HF_WGMMA_REGISTERS(64, HF_R32, HF_C32, "%32,%33,%34,%35", "36", "f16");
  } else if constexpr (kCount == 8) {
    HF_WGMMA_REGISTERS(64, HF_R32, HF_C32, "%32,%33,%34,%35", "36", "bf16");
  } else if constexpr (kCount == 10 && kIsHalf) {
    HF_WGMMA_REGISTERS(80, HF_R40, HF_C40, "%40,%41,%42,%43", "44", "f16");
  } else if constexpr (kCount == 10) {
    HF_WGMMA_REGISTERS(80, HF_R40, HF_C40, "%40,%41,%42,%43", "44", "bf16");
  } else if constexpr (kCount == 12 && kIsHalf) {
    HF_WGMMA_REGISTERS(96, HF_R48, HF_C48, "%48,%49,%50,%51", "52", "f16");
  } else if constexpr (kCount == 12) {
    HF_WGMMA_REGISTERS(96, HF_R48, HF_C48, "%48,%49,%50,%51", "52", "bf16");
  } else if constexpr (kIsHalf) {
    HF_WGMMA_REGISTERS(128, HF_R64, HF_C64, "%64,%65,%66,%67", "68", "f16");
  } else {
    HF_WGMMA_REGISTERS(128, HF_R64, HF_C64, "%64,%65,%66,%67", "68", "bf16");
  }
}

#undef HF_C4
#undef HF_C32
#undef HF_C40
#undef HF_C48
#undef HF_C64
#undef HF_R32
#undef HF_R40
#undef HF_R48
#undef HF_R64
#undef HF_WGMMA_SHARED
#undef HF_WGMMA_REGISTERS

#endif  // HF_FASTPATH_WGMMA

}  // namespace hf_fastpath
