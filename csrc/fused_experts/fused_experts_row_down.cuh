// What: the second half of fused_experts for one row on Hopper: the weighted sum of what down makes of the
//   features of every place.
// Work split: a warp takes one output. Its rows of down, one a place, come by bulk copies into a ring of
//   slots of its own in shared memory: first those of the shared expert, then, once the block's last warp
//   knows the choices, the others; all that before the kernel in front is complete. What that kernel gives is
//   read once a block, and lies beside the ring.
// Traffic: width * hidden_size * sizeof(T) for every place.
// Roofline: read bandwidth.
// Experiments: docs/lab/recording.md
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "common/ring_cursor.cuh"
#include "common/warp.cuh"
#include "fused_experts/fused_experts_row.cuh"

namespace hf_fastpath {

constexpr int kDownWarps = 8;
constexpr int kDownThreads = kDownWarps * kWarpSize;
constexpr int kDownBlocks = 2;                          // an SM
constexpr int kDownBytes = 110 * 1024;                  // shared memory of a block, besides `chosen`
constexpr int kDownInFlight = 64 * 1024 / kDownBlocks;  // bytes of a block, until the features are asked for

// How a launch runs. More slots under way before the features are asked for would be in their way: 12.6
// instead of 10.9 us for Qwen3.5-35B-A3B with all 9 instead of 4 (H100, 2026-11).
struct DownPlan {
  int slots, first_slots;  // a warp; first_slots are filled before the kernel in front is complete
  int row_bytes;           // of a row of down of one expert
  uint32_t zero;           // see behind_reads
};

// `slots` is 0 if no ring fits.
inline DownPlan down_plan(const FusedExpertsParams& p) {
  const int places = p.top_k + p.shared.places, row_bytes = p.width * element_size(p.dtype);
  const int bytes = std::min(kDownBytes, shared_bytes_of_block() - static_cast<int>(sizeof(Chosen<1>)) - 16);
  const int most = (bytes - places * row_bytes) / (kDownWarps * (row_bytes + 8));
  const int slots = std::min(most, places), first = std::max(kDownInFlight / (kDownWarps * row_bytes), 2);
  return {slots >= 2 ? slots : 0, std::min(first, slots), row_bytes, 0};
}

template <class T, int kPerLane>
__global__ void __launch_bounds__(kDownThreads, kDownBlocks)
    down_row_kernel(FusedExpertsParams p, DownPlan plan) {
#if HF_FASTPATH_HOPPER
  constexpr int kElems = kVecElems<T>;
  using C = Chunk<T, kElems>;
  using Raw = typename C::Raw;
  extern __shared__ __align__(128) char shared[];
  __shared__ Chosen<1> chosen;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int output = blockIdx.x * kDownWarps + warp, n = min(output, p.hidden_size - 1);
  // Slots of all warps, barriers of all warps, features of all places.
  const int ring_bytes = plan.slots * plan.row_bytes;
  const char* const ring = shared + warp * ring_bytes;
  const uint32_t slots = shared_address(ring);
  const uint32_t barriers = shared_address(shared + kDownWarps * ring_bytes) + warp * plan.slots * 8;
  const int hidden_at = (kDownWarps * plan.slots * (plan.row_bytes + 8) + 15) / 16 * 16;
  Raw* const hidden = reinterpret_cast<Raw*>(shared + hidden_at);
  const uint64_t policy = read_once_policy();

  allow_next_kernel();
  if (lane < plan.slots) barrier_init(barriers + lane * 8, 1);
  barrier_init_done();
  __syncwarp();
  // Asks for the row of a place; `behind`: 0, known once the slot is free.
  const auto ask = [&](int place, int slot, uint32_t behind) {
    if (!is_elected()) return;
    const uint32_t barrier = barriers + slot * 8;
    barrier_arrive_expect(barrier, plan.row_bytes);
    copy_to_shared(slots + slot * plan.row_bytes + behind, down_row<T>(p, chosen, place, n), plan.row_bytes,
                   barrier, policy);
  };
  const int early = min(p.shared.places, plan.first_slots);
  for (int place = 0; place < early; ++place) ask(place, place, 0);
  OnlyRow<T, kPerLane> only(p, lane);
  const bool chooses = warp == kDownWarps - 1;
  if (chooses) only.find(chosen);
  __syncthreads();  // the row's choices
  const int count = chosen.count;
  for (int place = early; place < min(count, plan.first_slots); ++place) ask(place, place, 0);
  if (chooses) only.weigh(chosen);
  wait_for_previous_kernel();  // for its features

  const int chunks = p.width / kElems;
  for (int i = threadIdx.x; i < count * chunks; i += kDownThreads) {
    const int place = i / chunks;
    hidden[i] = C::load_l2(static_cast<const T*>(p.hidden) + int64_t(chosen.source[place][0]) * p.width +
                           int64_t(i - place * chunks) * kElems);
  }
  for (int place = plan.first_slots; place < min(count, plan.slots); ++place) ask(place, place, 0);
  __syncthreads();  // features and weights

  float sum = 0.f;
  RingCursor at;
  for (int place = 0; place < count; ++place) {
    barrier_wait(barriers + at.slot * 8, at.parity);
    const Raw* const row = reinterpret_cast<const Raw*>(ring + at.slot * plan.row_bytes);
    float product = 0.f;
    for (int chunk = lane; chunk < chunks; chunk += kWarpSize) {
      float w[kElems], h[kElems];
      C::unpack(row[chunk], w);
      C::unpack(hidden[place * chunks + chunk], h);
#pragma unroll
      for (int e = 0; e < kElems; ++e) product = fmaf(w[e], h[e], product);
    }
    sum = fmaf(chosen.weight[place][0], product, sum);
    if (place + plan.slots < count) {
      const uint32_t read = __reduce_or_sync(kAllLanes, __float_as_uint(sum) & plan.zero);
      ask(place + plan.slots, at.slot, read);
    }
    at.advance(plan.slots);
  }
  std::conditional_t<sizeof(T) == 4, double, float> wide[1] = {sum};
  sum = static_cast<float>(warp_sums<1>(wide, lane));
  if (lane != 0 || output >= p.hidden_size) return;
  if (p.residual) sum += to_float(Chunk<T, 1>::load_l2(static_cast<const T*>(p.residual) + output));
  static_cast<T*>(p.out)[output] = from_float<T>(sum);
#endif
}

// Launches it behind the kernel that writes the features. p and its weights are aligned, for whole chunks.
template <class T, int kPerLane>
void launch_row_down(const FusedExpertsParams& p, const DownPlan& plan, cudaStream_t stream) {
  const auto kernel = down_row_kernel<T, kPerLane>;
  const int places = p.top_k + p.shared.places;
  const int bytes = kDownWarps * plan.slots * (plan.row_bytes + 8) + 16 + places * plan.row_bytes;
  allow_shared_memory(kernel, bytes);
  const dim3 grid((p.hidden_size + kDownWarps - 1) / kDownWarps);
  // The kernel in front is our own: it writes nothing that is read early.
  HF_FASTPATH_CUDA_CHECK(
      launch_programmatic(kernel, grid, dim3(kDownThreads), size_t(bytes), stream, true, p, plan));
}

}  // namespace hf_fastpath
