// How gemv_ring_mma_kernel (gemv_ring_mma.cuh) runs over a shape.

#include <algorithm>

#include "gemv/gemv_ring_mma.cuh"

namespace hf_fastpath {
namespace {

// A ring as deep as shared memory allows, and not much of it under way: with 96 KB the kernel is slower. For
// few rows a shorter one is faster (H200, 2026-11).
constexpr int kSlots = 6, kSlotsFewRows = 4, kFewRows = 4;
constexpr int kInFlight = 2;

int phases_of(const GemvParams& p) {
  const int slices = static_cast<int>(p.k) / kMmaSlice;
  return (slices + kMmaPhaseSteps - 1) / kMmaPhaseSteps;
}

template <class T>
void launch(const GemvParams& p, const RopeAppendParams* rope, cudaStream_t stream) {
  MmaRingPlan plan{};
  plan.ring.append = rope != nullptr;
  plan.ring.halves = p.gated || plan.ring.append ? 2 : 1;
  plan.ring.units = plan.ring.append ? p.n / 2 : p.n;
  plan.ring.slots = p.m <= kFewRows ? kSlotsFewRows : kSlots;
  plan.ring.in_flight = kInFlight;
  plan.phases = phases_of(p);
  const int smem_bytes = plan.ring.slots * kMmaSlotBytes + kMmaParts * kMmaPartBytes;
  const int grid = std::min(plan.ring.units, multiprocessor_count());
  const auto kernel = gemv_ring_mma_kernel<T>;
  HF_FASTPATH_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes));
  HF_FASTPATH_CUDA_CHECK(launch_overlapping(kernel, dim3(grid), dim3(kMmaThreads), smem_bytes, stream,
                                            p.overlap, p, rope ? *rope : RopeAppendParams{}, plan));
}

}  // namespace

bool fits_gemv_ring_mma(const GemvParams& p, const RopeAppendParams* rope) {
  constexpr int kElems = kVecElems<__half>;
  bool fits = p.dtype != DType::kFloat32 && p.m >= 2 && p.m <= kMmaXRows && p.n > 0 && !p.transposed &&
              p.k > 0 && p.k % kMmaSlice == 0 && is_aligned16(p.x) && p.norm.kind == Norm::kNone;
  for (int i = 0; i < p.num_segments; ++i) {
    fits = fits && is_aligned16(p.segments[i].weight) && p.segments[i].stride % kElems == 0;
  }
  if (rope) fits = fits && rope->head_dim % 2 == 0;
  return fits && has_hopper_code();
}

void launch_gemv_ring_mma(const GemvParams& params, const RopeAppendParams* rope, cudaStream_t stream) {
  if (params.dtype == DType::kFloat16) return launch<__half>(params, rope, stream);
  launch<__nv_bfloat16>(params, rope, stream);
}

}  // namespace hf_fastpath
