// Products of warpgroups (common/wgmma.cuh) of append_attention_wgmma.cuh: weights in registers times V.
#pragma once

#include "common/wgmma_shared.cuh"

namespace hf_fastpath {

#if HF_FASTPATH_WGMMA

// A in registers, and k along the columns of B.
#define HF_WGMMA_REGISTERS(N, REGS, COUNT, A, B, TYPE)                                                     \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGS "}, {" A "}, %" B \
               ", 1, 1, 1, 1;\n"                                                                           \
               : COUNT                                                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// kCount groups of 8 columns, of which the first is `c`: 8, 10, 12 or 16.
template <class T, int kCount>
__device__ __forceinline__ void wgmma_registers(float (*c)[4], const uint32_t (&a)[4], uint64_t b) {
  constexpr bool kIsHalf = std::is_same_v<T, __half>;
  static_assert(kCount == 8 || kCount == 10 || kCount == 12 || kCount == 16, "no such product here");
  if constexpr (kCount == 8 && kIsHalf) {
    HF_WGMMA_REGISTERS(64, HF_WGMMA_R32, HF_WGMMA_C32, "%32,%33,%34,%35", "36", "f16");
  } else if constexpr (kCount == 8) {
    HF_WGMMA_REGISTERS(64, HF_WGMMA_R32, HF_WGMMA_C32, "%32,%33,%34,%35", "36", "bf16");
  } else if constexpr (kCount == 10 && kIsHalf) {
    HF_WGMMA_REGISTERS(80, HF_WGMMA_R40, HF_WGMMA_C40, "%40,%41,%42,%43", "44", "f16");
  } else if constexpr (kCount == 10) {
    HF_WGMMA_REGISTERS(80, HF_WGMMA_R40, HF_WGMMA_C40, "%40,%41,%42,%43", "44", "bf16");
  } else if constexpr (kCount == 12 && kIsHalf) {
    HF_WGMMA_REGISTERS(96, HF_WGMMA_R48, HF_WGMMA_C48, "%48,%49,%50,%51", "52", "f16");
  } else if constexpr (kCount == 12) {
    HF_WGMMA_REGISTERS(96, HF_WGMMA_R48, HF_WGMMA_C48, "%48,%49,%50,%51", "52", "bf16");
  } else if constexpr (kIsHalf) {
    HF_WGMMA_REGISTERS(128, HF_WGMMA_R64, HF_WGMMA_C64, "%64,%65,%66,%67", "68", "f16");
  } else {
    HF_WGMMA_REGISTERS(128, HF_WGMMA_R64, HF_WGMMA_C64, "%64,%65,%66,%67", "68", "bf16");
  }
}

#undef HF_WGMMA_REGISTERS

#endif  // HF_FASTPATH_WGMMA

}  // namespace hf_fastpath
