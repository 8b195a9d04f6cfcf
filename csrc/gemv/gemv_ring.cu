// Which form of gemv_ring_kernel (gemv_ring.cuh) a shape gets.

#include <algorithm>

#include "gemv/gemv_ring.cuh"

namespace hf_fastpath {
namespace {

// A block's shared memory: two blocks of different kernels have to fit on an SM, and the static arrays.
constexpr int kRingBytes = 96 * 1024, kBlockBytes = 112 * 1024;
constexpr int kInFlightBytes = 64 * 1024, kStreamingBytes = 96 * 1024;  // an SM

// Chunks a lane: template arguments that exist.
constexpr int kMaxChunks = 8;

int64_t chunks_of(const GemvParams& p) { return p.k * element_size(p.dtype) / 16; }

template <class T, int kChunks, int kGroupWarps, RingEnd kEnd>
void launch_end(const GemvParams& p, const RopeAppendParams* rope, cudaStream_t stream) {
  using Shape = RingShape<kChunks, kGroupWarps>;
  RingPlan plan{};
  plan.append = rope != nullptr;
  plan.halves = p.gated || plan.append ? 2 : 1;
  plan.units = plan.append ? p.n / 2 : p.n;
  const int sms = multiprocessor_count();
  const int64_t bytes = int64_t(plan.units) * plan.halves * p.k * int64_t(sizeof(T));
  // One block where its ring holds all that the SM reads: it is easier to place beside blocks of other
  // kernels.
  const int blocks_per_sm = bytes > int64_t(kRingBytes) * sms ? kRingBlocksPerSm : 1;
  plan.slots = kRingBytes / Shape::kSlotBytes;
  if (plan.slots > kMaxRingSlots) plan.slots = kMaxRingSlots;
  const int grid = plan.units < sms * blocks_per_sm ? plan.units : sms * blocks_per_sm;
  plan.share = plan.units / grid, plan.larger = plan.units % grid;
  const int64_t rows = int64_t(plan.share + 1) * plan.halves;
  const int64_t part_bytes = rows * kGroupWarps * int64_t(sizeof(RingSum<T>));
  while (plan.slots > 3 && plan.slots * Shape::kSlotBytes + part_bytes > kBlockBytes) --plan.slots;
  const auto slots_of = [&](int bytes) {
    return std::clamp(bytes / blocks_per_sm / Shape::kSlotBytes, 1, plan.slots);
  };
  plan.in_flight = slots_of(kInFlightBytes);
  plan.streaming = slots_of(kStreamingBytes);
  const size_t smem_bytes = plan.slots * Shape::kSlotBytes + part_bytes;
  const auto kernel = gemv_ring_kernel<T, kChunks, kGroupWarps, kEnd>;
  HF_FASTPATH_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              static_cast<int>(smem_bytes)));
  HF_FASTPATH_CUDA_CHECK(launch_overlapping(kernel, dim3(grid), dim3(kRingThreads), smem_bytes, stream,
                                            p.overlap, p, rope ? *rope : RopeAppendParams{}, plan));
}

template <class T, int kChunks, int kGroupWarps>
void launch_form(const GemvParams& p, const RopeAppendParams* rope, cudaStream_t stream) {
  if (rope) return launch_end<T, kChunks, kGroupWarps, RingEnd::kAppend>(p, rope, stream);
  if (p.gated) return launch_end<T, kChunks, kGroupWarps, RingEnd::kGated>(p, rope, stream);
  launch_end<T, kChunks, kGroupWarps, RingEnd::kPlain>(p, rope, stream);
}

template <class T>
void launch_typed(const GemvParams& p, const RopeAppendParams* rope, cudaStream_t stream) {
  const int chunks = static_cast<int>(chunks_of(p));
  if (chunks > 64 && chunks <= 96) return launch_form<T, 3, 1>(p, rope, stream);
  if (chunks <= 128) return launch_form<T, 1, 4>(p, rope, stream);
  if (chunks <= 256) return launch_form<T, 2, 4>(p, rope, stream);
  if (chunks <= 384) return launch_form<T, 3, 4>(p, rope, stream);
  switch ((chunks + kRingConsumers - 1) / kRingConsumers) {
    case 2:
      return launch_form<T, 2, 8>(p, rope, stream);
    case 3:
      return launch_form<T, 3, 8>(p, rope, stream);
    case 4:
      return launch_form<T, 4, 8>(p, rope, stream);
    case 5:
      return launch_form<T, 5, 8>(p, rope, stream);
    case 6:
      return launch_form<T, 6, 8>(p, rope, stream);
    case 7:
      return launch_form<T, 7, 8>(p, rope, stream);
    default:
      return launch_form<T, 8, 8>(p, rope, stream);
  }
}

}  // namespace

bool fits_gemv_ring(const GemvParams& p, const RopeAppendParams* rope) {
  const int elems = static_cast<int>(16 / element_size(p.dtype));
  bool fits = p.m == 1 && p.n > 0 && !p.transposed && p.k % elems == 0 && is_aligned16(p.x) &&
              chunks_of(p) <= kMaxChunks * kRingConsumers && is_aligned16(p.norm.weight) &&
              is_aligned16(p.norm.bias);
  if (p.norm.kind != Norm::kNone) {
    fits = fits && p.norm.weight && chunks_of(p) <= kMaxNormedChunks * kRingConsumers;
  }
  for (int i = 0; i < p.num_segments; ++i) {
    fits = fits && is_aligned16(p.segments[i].weight) && p.segments[i].stride % elems == 0;
  }
  if (rope) fits = fits && rope->head_dim % 2 == 0;
  // Sums of all rows of a block wait in shared memory.
  const int64_t rows = int64_t(p.n) * (p.gated ? 2 : 1) / multiprocessor_count() + 2;
  fits = fits && rows * kRingWarps * int64_t(sizeof(double)) <= 32 * 1024;
  return fits && has_hopper_code();
}

void launch_gemv_ring(const GemvParams& params, const RopeAppendParams* rope, cudaStream_t stream) {
  with_type(params.dtype, [&](auto zero) { launch_typed<decltype(zero)>(params, rope, stream); });
}

}  // namespace hf_fastpath
