// Which variant of gemv_ring_kernel (gemv_ring.cuh) a shape gets.

#include "gemv/gemv_ring.cuh"

namespace hf_fastpath {
namespace {

// Chunks a lane: template arguments that exist.
constexpr int kMaxChunks = 8;

int64_t row_chunks(const GemvParams& p) { return p.k * element_size(p.dtype) / 16; }

template <class T, int kChunks, int kGroupWarps>
void launch_variant(const GemvParams& p, const RopeAppendParams* rope, cudaStream_t stream) {
  const RingLaunch as =
      plan_ring<RingShape<kChunks, kGroupWarps>>(p, rope, kGroupWarps * int(sizeof(RingSum<T>)));
  with_ring_end(p, rope, [&](auto end) {
    launch_ring(gemv_ring_kernel<T, kChunks, kGroupWarps, decltype(end)::value>, as, p, rope, stream);
  });
}

template <class T>
void launch_typed(const GemvParams& p, const RopeAppendParams* rope, cudaStream_t stream) {
  const int chunks = static_cast<int>(row_chunks(p));
  if (chunks > 64 && chunks <= 96) return launch_variant<T, 3, 1>(p, rope, stream);
  if (chunks <= 128) return launch_variant<T, 1, 4>(p, rope, stream);
  if (chunks <= 256) return launch_variant<T, 2, 4>(p, rope, stream);
  if (chunks <= 384) return launch_variant<T, 3, 4>(p, rope, stream);
  switch ((chunks + kRingConsumers - 1) / kRingConsumers) {
    case 2:
      return launch_variant<T, 2, 8>(p, rope, stream);
    case 3:
      return launch_variant<T, 3, 8>(p, rope, stream);
    case 4:
      return launch_variant<T, 4, 8>(p, rope, stream);
    case 5:
      return launch_variant<T, 5, 8>(p, rope, stream);
    case 6:
      return launch_variant<T, 6, 8>(p, rope, stream);
    case 7:
      return launch_variant<T, 7, 8>(p, rope, stream);
    default:
      return launch_variant<T, 8, 8>(p, rope, stream);
  }
}

}  // namespace

bool has_few_chunks(const GemvParams& p) {
  const int most = p.norm.kind == NormKind::kNone ? kMaxChunks : kMaxNormedChunks;
  return row_chunks(p) <= most * kRingConsumers;
}

void launch_gemv_ring(const GemvParams& params, const RopeAppendParams* rope, cudaStream_t stream) {
  with_type(params.dtype, [&](auto zero) { launch_typed<decltype(zero)>(params, rope, stream); });
}

}  // namespace hf_fastpath
