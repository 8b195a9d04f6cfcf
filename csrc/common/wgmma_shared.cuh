// Products of warpgroups (common/wgmma.cuh) with both operands in shared memory, k along their rows.
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

// Accumulators c[groups of 8 columns][4] as operands, and as registers of an instruction.
#define HF_WGMMA_C4(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define HF_WGMMA_C8 HF_WGMMA_C4(0), HF_WGMMA_C4(1)
#define HF_WGMMA_C16 HF_WGMMA_C8, HF_WGMMA_C4(2), HF_WGMMA_C4(3)
#define HF_WGMMA_C24 HF_WGMMA_C16, HF_WGMMA_C4(4), HF_WGMMA_C4(5)
#define HF_WGMMA_C32 HF_WGMMA_C24, HF_WGMMA_C4(6), HF_WGMMA_C4(7)
#define HF_WGMMA_C40 HF_WGMMA_C32, HF_WGMMA_C4(8), HF_WGMMA_C4(9)
#define HF_WGMMA_C48 HF_WGMMA_C40, HF_WGMMA_C4(10), HF_WGMMA_C4(11)
#define HF_WGMMA_C64 HF_WGMMA_C48, HF_WGMMA_C4(12), HF_WGMMA_C4(13), HF_WGMMA_C4(14), HF_WGMMA_C4(15)
#define HF_WGMMA_R8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define HF_WGMMA_R16 HF_WGMMA_R8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define HF_WGMMA_R24 HF_WGMMA_R16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define HF_WGMMA_R32 HF_WGMMA_R24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define HF_WGMMA_R40 HF_WGMMA_R32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define HF_WGMMA_R48 HF_WGMMA_R40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define HF_WGMMA_R64 HF_WGMMA_R48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

#define HF_WGMMA_SHARED(N, SUMS, A, B, ADDS, TYPE)                                                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADDS ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N   \
               "k16.f32." TYPE "." TYPE " {" HF_WGMMA_R##SUMS "}, %" #A ", %" #B ", p, 1, 1, 0, 0;\n}\n" \
               : HF_WGMMA_C##SUMS                                                                        \
               : "l"(a), "l"(b), "r"(int(adds)))

#define HF_WGMMA_SHARED_TYPED(N, SUMS, A, B, ADDS) \
  if constexpr (std::is_same_v<T, __half>)         \
    HF_WGMMA_SHARED(N, SUMS, A, B, ADDS, "f16");   \
  else                                             \
    HF_WGMMA_SHARED(N, SUMS, A, B, ADDS, "bf16")

// 2, 4, 6, 8 or 16 groups of 8 columns; without `adds` the accumulators start anew.
template <class T, int kGroups>
__device__ __forceinline__ void wgmma_shared(float (&c)[kGroups][4], uint64_t a, uint64_t b, bool adds) {
  static_assert(kGroups == 2 || kGroups == 4 || kGroups == 6 || kGroups == 8 || kGroups == 16,
                "no such product here");
  if constexpr (kGroups == 2) {
    HF_WGMMA_SHARED_TYPED(16, 8, 8, 9, 10);
  } else if constexpr (kGroups == 4) {
    HF_WGMMA_SHARED_TYPED(32, 16, 16, 17, 18);
  } else if constexpr (kGroups == 6) {
    HF_WGMMA_SHARED_TYPED(48, 24, 24, 25, 26);
  } else if constexpr (kGroups == 8) {
    HF_WGMMA_SHARED_TYPED(64, 32, 32, 33, 34);
  } else {
    HF_WGMMA_SHARED_TYPED(128, 64, 64, 65, 66);
  }
}

#undef HF_WGMMA_SHARED
#undef HF_WGMMA_SHARED_TYPED

#endif  // HF_FASTPATH_WGMMA

}  // namespace hf_fastpath
