// Products of warpgroups (common/wgmma.cuh) of append_attention_wgmma.cuh: scores from shared memory alone,
// and weights in registers times V.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "common/wgmma.cuh"

namespace hf_fastpath {

#if HF_FASTPATH_WGMMA

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
