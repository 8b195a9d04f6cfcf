// How weight rows get into a ring of slots in shared memory, and the launch of kernels that read them there.
// On Hopper one warp of a block brings them by bulk copies; on older devices every thread copies what it will
// read, which needs no barrier.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "common/ring_cursor.cuh"
#include "gemv/gemv_device.cuh"
#include "gemv/gemv_ring_end.cuh"

namespace hf_fastpath {

constexpr int kRingWarps = 8;  // that compute
constexpr int kRingConsumers = kRingWarps * kWarpSize;
constexpr int kRingThreads = kRingConsumers + kWarpSize;
constexpr int kRingBlocksPerSm = 2;
constexpr int kMaxRingSlots = 32;

// How a launch runs over a shape.
struct RingPlan {
  int units;      // output features, or pairs of them
  int share;      // units of a block,
  int larger;     // of which this many have one more
  int halves;     // weight rows of a unit: 1 or 2
  int slots;      // of the ring
  int in_flight;  // slots that may be under way at a time until the ring has been filled once
  int streaming;  // and from then on
  bool append;    // rotate and append instead of writing the output
  uint32_t zero;  // see behind_reads
  int phases;     // pieces of k that every row is taken in, all rows before the next (gemv_ring_rows.cuh)
  // What the kernel behind this one reads first: every block brings as many pieces to L2, of its share of it.
  const char* next;
  uint32_t next_share;  // bytes
  int next_pieces;
};

// How rows lie in the ring's slots: kChunks 16-byte chunks a lane of each row, kGroupWarps warps a row.
template <int kChunks, int kGroupWarps>
struct RingShape {
  static constexpr int kGroups = kRingWarps / kGroupWarps;
  static constexpr int kColumnBytes =
      kGroupWarps * kWarpSize * 16;       // of a row that one load of its warps covers
  static constexpr int kSlotColumns = 4;  // of all groups together: 16 KB
  static constexpr int kPieces = (kChunks + kSlotColumns - 1) / kSlotColumns;  // slots a row takes
  static constexpr int kPieceChunks = (kChunks + kPieces - 1) / kPieces;
  static constexpr int kRows = kPieces > 1                  ? 1
                               : kSlotColumns / kChunks < 4 ? (kSlotColumns / kChunks < 2 ? 1 : 2)
                                                            : 4;
  static constexpr int kSlotRows = kRows * kGroups;
  static constexpr int kPieceBytes = kPieceChunks * kColumnBytes;  // of a row in a slot
  static constexpr int kSlotBytes = kSlotRows * kPieceBytes;
  static_assert(kPieces == 1 || kGroups == 1, "only rows of all warps are cut in pieces");
};

constexpr int kOwnSlots = 3;  // of a ring that every thread fills for itself

// A block's shared memory: two blocks of different kernels have to fit on an SM, and the static arrays.
constexpr int kRingBytes = 98 * 1024, kBlockBytes = 112 * 1024;
constexpr int kMaxPartialBytes = 48 * 1024;                             // of it, where sums over warps wait
constexpr int kInFlightBytes = 64 * 1024, kStreamingBytes = 96 * 1024;  // an SM

// Memory would rest between two kernels once the second one's rings are full, so the first one prefetches
// some of what follows into L2. A matrix of which rings hold more than half gains nothing: it is there in
// time, and what is brought besides is in the way of small reads.
constexpr int kNextBytes = 48 * 1024;  // an SM
constexpr int64_t kNextLeastBytes = 48 << 20;
constexpr int kNextPieceBytes = 4096;

// Sets what a kernel of `grid` blocks prefetches into L2, `block_bytes` each.
inline void plan_next(const GemvParams& p, int grid, int block_bytes, RingPlan& plan) {
  if (p.next_bytes < kNextLeastBytes || !is_aligned16(p.next_weight)) return;
  plan.next = static_cast<const char*>(p.next_weight);
  plan.next_share = static_cast<uint32_t>(p.next_bytes / grid / 16 * 16);
  plan.next_pieces = std::min<int64_t>(block_bytes, plan.next_share) / kNextPieceBytes;
}

struct RingLaunch {
  RingPlan plan;
  int grid;
  int smem_bytes;
};

// `row_partial_bytes`: what the sums of one weight row take until the end.
template <class Shape>
RingLaunch plan_ring(const GemvParams& p, const RopeAppendParams* rope, int row_partial_bytes) {
  RingPlan plan{};
  plan.append = rope != nullptr;
  plan.halves = p.gated || plan.append ? 2 : 1;
  plan.units = plan.append ? p.n / 2 : p.n;
  plan.phases = 1;
  const int sms = multiprocessor_count();
  const int64_t rows = int64_t(plan.units) * plan.halves, bytes = rows * p.k * element_size(p.dtype);
  // One block where its ring holds all that the SM reads: it is easier to place beside blocks of other
  // kernels.
  const int blocks_per_sm = bytes > int64_t(kRingBytes) * sms ? kRingBlocksPerSm : 1;
  const int64_t least = (rows * row_partial_bytes + kMaxPartialBytes - 1) / kMaxPartialBytes;
  const int grid =
      static_cast<int>(std::min<int64_t>(plan.units, std::max<int64_t>(sms * blocks_per_sm, least)));
  plan.share = plan.units / grid, plan.larger = plan.units % grid;
  const int partial_bytes = (plan.share + 1) * plan.halves * row_partial_bytes;
  plan.slots = std::min({kRingBytes / Shape::kSlotBytes, (kBlockBytes - partial_bytes) / Shape::kSlotBytes,
                         has_hopper_code() ? kMaxRingSlots : kOwnSlots});
  const auto slots_of = [&](int bytes) {
    return std::clamp(bytes / blocks_per_sm / Shape::kSlotBytes, 1, plan.slots);
  };
  plan.in_flight = slots_of(kInFlightBytes);
  plan.streaming = slots_of(kStreamingBytes);
  if (blocks_per_sm == kRingBlocksPerSm) plan_next(p, grid, kNextBytes / blocks_per_sm, plan);
  return {plan, grid, plan.slots * Shape::kSlotBytes + partial_bytes};
}

// Launches a kernel over a ring.
inline void launch_ring(void (*kernel)(GemvParams, RopeAppendParams, RingPlan), const RingLaunch& as,
                        const GemvParams& p, const RopeAppendParams* rope, cudaStream_t stream) {
  allow_shared_memory(kernel, as.smem_bytes);
  HF_FASTPATH_CUDA_CHECK(launch_programmatic(
      kernel, dim3(as.grid), dim3(has_hopper_code() ? kRingThreads : kRingConsumers), as.smem_bytes, stream,
      p.programmatic_launch, p, rope ? *rope : RopeAppendParams{}, as.plan));
}

// Launches for the end that a product has: launch(RingEnd as a constant).
template <class Launch>
void with_ring_end(const GemvParams& p, const RopeAppendParams* rope, Launch launch) {
  if (rope) return launch(std::integral_constant<RingEnd, RingEnd::kAppend>{});
  if (p.gated) return launch(std::integral_constant<RingEnd, RingEnd::kGated>{});
  launch(std::integral_constant<RingEnd, RingEnd::kPlain>{});
}

// Which of as many shares is this block's. Two blocks of an SM are neighbors, so that SMs get the same number
// of units within one.
__device__ __forceinline__ int ring_share() {
  const int block = blockIdx.x, blocks = gridDim.x, half = blocks / 2;
  return blocks % 2 ? block : block < half ? 2 * block : 2 * (block - half) + 1;
}

// Units of this block.
__device__ __forceinline__ void ring_range(const RingPlan& plan, int& begin, int& end) {
  const int at = ring_share();
  begin = at * plan.share + min(at, plan.larger);
  end = begin + plan.share + (at < plan.larger);
}

// The weight row of one half of a unit.
template <class T>
__device__ __forceinline__ const T* ring_row(const GemvParams& p, const RopeAppendParams& rope,
                                             const RingPlan& plan, int unit, int half) {
  if (p.gated) return weight_row<T, true>(p, unit, half);
  return weight_row<T, false>(p, plan.append ? pair_feature(rope, unit, half) : unit, 0);
}

// Sum of kCount neighbors at a multiple of 16 bytes, in their order.
template <int kCount, class Sum>
__device__ __forceinline__ Sum sum_of(const Sum* values) {
  Sum sum = 0;
  if constexpr (std::is_same_v<Sum, float> && kCount % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const float4 x = reinterpret_cast<const float4*>(values)[i];
      sum = sum + x.x + x.y + x.z + x.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += values[i];
  }
  return sum;
}

// The ring's slots one after the other, for the warps that compute: start(), then wait() and release() for
// each.
template <class EachRow, class EachOffset>
struct RingReaderBase {
  const GemvParams& p;
  const RopeAppendParams& rope;
  const RingPlan& plan;
  char* ring;
  EachRow each_row;        // each_row(f): f(row of the slot) for every row that this lane reads
  EachOffset each_offset;  // each_offset(f): f(offset in bytes) for every 16 bytes of such a row
};

#if HF_FASTPATH_HOPPER

// Brings this block's part of what the next kernel reads to L2.
__device__ __forceinline__ void bring_next(const RingPlan& plan, int lane) {
  for (int piece = lane; piece < plan.next_pieces; piece += kWarpSize) {
    prefetch_bulk(plan.next + uint64_t(ring_share()) * plan.next_share + piece * kNextPieceBytes,
                  kNextPieceBytes);
  }
}

// Fetches the rows of this block, in order, in every phase.
template <class T, class Shape, bool kPhased = false>
__device__ __forceinline__ void ring_fetch(const GemvParams& p, const RopeAppendParams& rope,
                                           const RingPlan& plan, uint32_t ring, uint32_t full, uint32_t empty,
                                           int lane) {
  int begin, end;
  ring_range(plan, begin, end);
  const int units = end - begin, rows = units * plan.halves;
  const int row_bytes = static_cast<int>(p.k) * static_cast<int>(sizeof(T));
  const uint64_t policy = read_once_policy();
  RingCursor at, oldest;
  int under_way = 0, fetched = 0;
#pragma unroll 1
  for (int phase = 0; phase < (kPhased ? plan.phases : 1); ++phase)
#pragma unroll 1
    for (int first = 0; first < rows; first += Shape::kSlotRows) {
      const int here = min(Shape::kSlotRows, rows - first), row = first + lane;
      const char* from = nullptr;
      if (lane < here) {
        const int half = row >= units;
        from = reinterpret_cast<const char*>(ring_row<T>(p, rope, plan, begin + row - half * units, half));
      }
#pragma unroll 1
      for (int piece = 0; piece < Shape::kPieces; ++piece) {
        const int start = (phase * Shape::kPieces + piece) * Shape::kPieceBytes;
        const int bytes = min(Shape::kPieceBytes, row_bytes - start);
        if (fetched >= plan.slots) barrier_wait(empty + 8 * at.slot, at.parity ^ 1);
        if (under_way >= (fetched < plan.slots ? plan.in_flight : plan.streaming)) {
          barrier_wait(full + 8 * oldest.slot, oldest.parity);
          oldest.advance(plan.slots);
        } else {
          ++under_way;
        }
        ++fetched;
        if (lane == 0) barrier_arrive_expect(full + 8 * at.slot, here * bytes);
        __syncwarp();  // announced before anything can arrive
        if (lane < here) {
          copy_to_shared(ring + at.slot * Shape::kSlotBytes + lane * Shape::kPieceBytes, from + start, bytes,
                         full + 8 * at.slot, policy);
        }
        at.advance(plan.slots);
      }
    }
  bring_next(plan, lane);
}

struct RingBarriers {
  uint32_t full, empty;  // one of each a slot

  __device__ __forceinline__ void wait_until_ready() const { sync_some(2, kRingThreads); }
};

template <class T, class Shape, class EachRow, class EachOffset>
struct RingReader : RingReaderBase<EachRow, EachOffset> {
  RingBarriers barriers;
  RingCursor at = {};

  __device__ __forceinline__ void start() {}
  __device__ __forceinline__ const char* wait() const {
    barrier_wait(barriers.full + 8 * at.slot, at.parity);
    return this->ring + at.slot * Shape::kSlotBytes;
  }
  // Every lane has read its part of the slot; `sums` comes of all of it.
  __device__ __forceinline__ void release(uint32_t sums) {
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) {
      barrier_arrive(behind_reads(barriers.empty + 8 * at.slot, sums, this->plan.zero));
    }
    at.advance(this->plan.slots);
  }
};

// What every kernel over a ring does: the last warp fetches, the others compute(barriers).
template <class T, class Shape, bool kPhased, class Compute>
__device__ __forceinline__ void run_ring(const GemvParams& p, const RopeAppendParams& rope,
                                         const RingPlan& plan, const char* ring, Compute compute) {
  __shared__ __align__(8) uint64_t barriers[2][kMaxRingSlots];
  const uint32_t full = shared_address(barriers[0]), empty = shared_address(barriers[1]);
  allow_next_kernel();
  if (threadIdx.x >= kRingConsumers) {
    const int lane = threadIdx.x % kWarpSize;
    if (lane < plan.slots) {
      barrier_init(full + 8 * lane, 1);
      barrier_init(empty + 8 * lane, kRingWarps);
      barrier_init_done();
    }
    __syncwarp();
    arrive_some(2, kRingThreads);  // initialized barriers: this warp waits for nobody
    ring_fetch<T, Shape, kPhased>(p, rope, plan, shared_address(ring), full, empty, lane);
    return;
  }
  compute(RingBarriers{full, empty});
  trace(TracePoint::kEnd);
}

#else

struct RingBarriers {
  __device__ __forceinline__ void wait_until_ready() const {}
};

template <class T, class Shape, class EachRow, class EachOffset>
struct RingReader : RingReaderBase<EachRow, EachOffset> {
  RingBarriers barriers;
  int slot = 0, to_fetch = 0, first = 0, piece = 0, phase = 0;  // first, piece and phase: of what to fetch

  __device__ __forceinline__ void start() {
    for (int i = 0; i < kOwnSlots; ++i) fetch();
  }
  __device__ __forceinline__ const char* wait() const {
    wait_for_copies<kOwnSlots - 1>();
    return this->ring + slot * Shape::kSlotBytes;
  }
  __device__ __forceinline__ void release(uint32_t) {
    fetch();
    slot = slot + 1 == kOwnSlots ? 0 : slot + 1;
  }

  __device__ __forceinline__ void fetch() {
    const GemvParams& p = this->p;
    const RingPlan& plan = this->plan;
    int begin, end;
    ring_range(plan, begin, end);
    const int units = end - begin, rows = units * plan.halves;
    const int row_bytes = static_cast<int>(p.k) * static_cast<int>(sizeof(T));
    const int start = (phase * Shape::kPieces + piece) * Shape::kPieceBytes;
    if (phase < plan.phases) {
      this->each_row([&](int row_of_slot) {
        const int row = first + row_of_slot, half = row >= units;
        const bool there = row < rows;
        const T* from = there ? ring_row<T>(p, this->rope, plan, begin + row - half * units, half) : nullptr;
        this->each_offset([&](int offset) {
          const bool present = there && start + offset < row_bytes;
          copy_async(this->ring + to_fetch * Shape::kSlotBytes + row_of_slot * Shape::kPieceBytes + offset,
                     present ? reinterpret_cast<const char*>(from) + start + offset : p.x, present);
        });
      });
      if (++piece == Shape::kPieces) piece = 0, first += Shape::kSlotRows;
      if (first >= rows) first = 0, ++phase;
    }
    commit_copies();
    to_fetch = to_fetch + 1 == kOwnSlots ? 0 : to_fetch + 1;
  }
};

template <class T, class Shape, bool kPhased, class Compute>
__device__ __forceinline__ void run_ring(const GemvParams&, const RopeAppendParams&, const RingPlan&,
                                         const char*, Compute compute) {
  compute(RingBarriers{});
}

#endif  // HF_FASTPATH_HOPPER

template <class T, class Shape, class EachRow, class EachOffset>
__device__ __forceinline__ RingReader<T, Shape, EachRow, EachOffset> ring_reader(
    const GemvParams& p, const RopeAppendParams& rope, const RingPlan& plan, char* ring,
    RingBarriers barriers, EachRow each_row, EachOffset each_offset) {
  return {{p, rope, plan, ring, each_row, each_offset}, barriers};
}

}  // namespace hf_fastpath
