// Which variant of gemv_ring_rows_kernel (gemv_ring_rows.cuh) a shape gets.

#include "gemv/gemv_ring_rows.cuh"

namespace hf_fastpath {
namespace {

// Chunks a thread of a row that x in registers allows in a phase: more cost registers, and those cost more
// than phases do.
template <int kXRows>
constexpr int kMostChunks = 8 / kXRows;

// Returns how many chunks of a whole row a thread has.
int thread_chunks(const GemvParams& p) {
  return static_cast<int>((p.k * element_size(p.dtype) / 16 + kRingConsumers - 1) / kRingConsumers);
}

template <class T, int kChunks, int kXRows>
void launch_variant(const GemvParams& p, const RopeAppendParams* rope, cudaStream_t stream) {
  RingLaunch as =
      plan_ring<RingShape<kChunks, kRingWarps>>(p, rope, kXRows * kRingWarps * int(sizeof(float)));
  as.plan.phases = (thread_chunks(p) + kChunks - 1) / kChunks;
  with_ring_end(p, rope, [&](auto end) {
    launch_ring(gemv_ring_rows_kernel<T, kChunks, kXRows, decltype(end)::value>, as, p, rope, stream);
  });
}

template <class T, int kXRows>
void launch_rows(const GemvParams& p, const RopeAppendParams* rope, cudaStream_t stream) {
  constexpr int kMost = kMostChunks<kXRows>;
  const int chunks = thread_chunks(p);
  if (kMost == 1 || chunks == 1) return launch_variant<T, 1, kXRows>(p, rope, stream);
  if constexpr (kMost == 2) {
    launch_variant<T, 2, kXRows>(p, rope, stream);
  } else if constexpr (kMost == 4) {
    if (chunks == 2) return launch_variant<T, 2, kXRows>(p, rope, stream);
    launch_variant<T, 4, kXRows>(p, rope, stream);
  }
}

template <class T>
void launch_typed(const GemvParams& p, const RopeAppendParams* rope, cudaStream_t stream) {
  if (p.m <= 2) return launch_rows<T, 2>(p, rope, stream);
  if (p.m <= 4) return launch_rows<T, 4>(p, rope, stream);
  launch_rows<T, 8>(p, rope, stream);
}

}  // namespace

void launch_gemv_ring_rows(const GemvParams& params, const RopeAppendParams* rope, cudaStream_t stream) {
  if (params.dtype == DType::kFloat16) return launch_typed<__half>(params, rope, stream);
  launch_typed<__nv_bfloat16>(params, rope, stream);
}

}  // namespace hf_fastpath
