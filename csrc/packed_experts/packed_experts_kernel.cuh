// What: the products of chosen experts with quantized matrices for few x rows: activation(gate) * up of every
//   choice, or its product with down in float32. Choices are read on the device.
// Work split: blockIdx.y is a choice (row, k) of a group of rows, blockIdx.z the group: eight rows of 16 bits
//   or two in float32, or one row alone. A block takes features of that expert for every row of the group
//   that chose it, and blocks of later choices of the same expert end at once. A warp multiplies 16 rows of
//   the matrix (8 of gate and 8 of up) by a part of k on tensor cores: quants are A, in float16, x is B,
//   float16 times a power of two for every row, or three such terms of a float32. A lane's 16 bytes of quants
//   go from device memory to its registers, kDepth blocks of both of its rows ahead. Warps of a tile that
//   have other parts of k are summed in a fixed order. x that is too long for its part of shared memory comes
//   in phases.
// Traffic: quants, scales and zeros once for each expert that any row of a group chose; x, once a block out
//   of L2, and out are small.
// Roofline: read bandwidth.
#pragma once

#include <algorithm>

#include "common/activation.cuh"
#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "common/mma.cuh"
#include "common/warp.cuh"
#include "packed_experts/packed_experts.h"
#include "packed_gemv/packed_gemv_products.cuh"
#include "weights/packed_values.h"

namespace hf_fastpath {

constexpr int kExpertsWarps = 8;
constexpr int kExpertsThreads = kExpertsWarps * kWarpSize;
constexpr int kExpertsBlocks = 2;  // an SM: leaves 128 registers a thread
constexpr int kBlockUnits = int(kPackedBlock) / 8;  // 16 bytes of B each, of eight values

// Blocks of quants of both rows that a lane has in flight: 16 warps an SM have 48 or 64 KB then.
template <class T, PackedFormat kFormat>
constexpr int kExpertsDepth = kBits<kFormat> == 4 && sizeof(T) == 2 ? 3 : 2;

// Rows of x that columns of B are, of which there are one or eight; and blocks of k that shared memory holds.
template <class T, int kColumns>
constexpr int kExpertsRows = kColumns == 1 ? 1 : kColumns / kXColumns<T>;
template <int kColumns>
constexpr int kPhaseBlocks = kColumns == 1 ? kRowBlocks : kRowsBlocks;
// From column to column; 64 bytes more, so that neighbors lie in other banks.
template <int kColumns>
__host__ __device__ constexpr int column_units(int phase_blocks) {
  return phase_blocks * kBlockUnits + (kColumns > 1 ? 4 : 0);
}

// What a block works on: an expert, and which choice of each row of its group that is.
template <int kX>
struct PackedExpertsWork {
  int64_t expert;
  int first_row;
  int source[kX];  // -1: not chosen
  bool is_some;    // else there is no such expert, or another block has it
};

// By every warp, with all its lanes.
template <int kX>
__device__ __forceinline__ PackedExpertsWork<kX> find_packed_work(const PackedChoices& choices, int lane) {
  PackedExpertsWork<kX> work;
  work.first_row = blockIdx.z * kX;
  const int mine = blockIdx.y / choices.top_k, k = blockIdx.y % choices.top_k;
  const auto choice = [&](int m, int of) -> int64_t {
    if (work.first_row + m >= choices.rows || of >= choices.top_k) return -1;
    const int64_t id = __ldcg(choices.ids + int64_t(work.first_row + m) * choices.top_k + of);
    return id >= 0 && id < choices.num_experts ? id : -1;
  };
  work.expert = choice(mine, k);
  work.is_some = work.expert >= 0;
#pragma unroll
  for (int m = 0; m < kX; ++m) {
    const unsigned same = __ballot_sync(kAllLanes, work.expert >= 0 && choice(m, lane) == work.expert);
    work.source[m] = __ffs(same) - 1;
    if ((m < mine && same != 0) || (m == mine && work.source[m] != k)) work.is_some = false;
  }
  return work;
}

// A lane's part of a block of both of its matrix rows, as it lies.
template <PackedFormat kFormat>
struct StackBlock {
  using Of = Traits<kFormat>;
  static constexpr int kLoads = kBits<kFormat> / 4;
  static constexpr int kScaleBytes = (Of::kScalesSums ? 1 : Of::kScalesPerBlock) * Of::kScaleBytes;
  static_assert(kScaleBytes == 8 || kScaleBytes == 4 || kScaleBytes == 2, "scales of a block are one load");
  uint4 quants[2][kLoads];
  uint2 scales[2];
  uint32_t zeros[2];

  // Returns the scale of row h and a sub-block.
  __device__ __forceinline__ float scale(int h, int s) const {
    if constexpr (Of::kScaleBytes == 1) {
      return power_value(scales[h].x >> 8 * s & 255u);
    } else if constexpr (Of::kScaleBytes == 4) {
      return __uint_as_float(s < Of::kTogether ? scales[h].x : scales[h].y);
    } else if constexpr (kScaleBytes == 2) {
      return __half2float(__ushort_as_half(static_cast<unsigned short>(scales[h].x)));
    } else {
      const float2 two = unpack2(s < 2 ? scales[h].x : scales[h].y, __half());
      return s % 2 ? two.y : two.x;
    }
  }
  __device__ __forceinline__ int zero(int h, int s) const {
    if constexpr (!Of::kHasZeros) return Of::kZero;
    return Of::kZerosPerBlock == 4 ? static_cast<int>(zeros[h] >> 8 * s & 255u) : static_cast<int>(zeros[h]);
  }
};

// Where a lane reads its two matrix rows.
template <PackedFormat kFormat>
struct StackRows {
  using Of = Traits<kFormat>;
  using Block = StackBlock<kFormat>;
  static constexpr int kBlockBytes = int(kPackedBlock) * kBits<kFormat> / 8;
  static constexpr int kStep = Of::kScalesSums ? 0 : Block::kScaleBytes;  // from block to block
  const char *quants[2], *scales[2];
  const uint8_t* zeros[2];

  __device__ __forceinline__ void find(const PackedExpertsProduct& p, int h, int64_t row) {
    const int64_t blocks = p.matrix.blocks;
    quants[h] = static_cast<const char*>(p.quants) + row * blocks * kBlockBytes +
                threadIdx.x % 4 * (16 * Block::kLoads);
    scales[h] = reinterpret_cast<const char*>(p.matrix.scales) +
                row * (Of::kScalesSums ? Of::kScaleBytes : blocks * Block::kScaleBytes);
    if constexpr (Of::kHasZeros) zeros[h] = p.matrix.zeros + row * blocks * Of::kZerosPerBlock;
  }

  __device__ __forceinline__ void load(Block& to, int block) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < Block::kLoads; ++i) {
        to.quants[h][i] = Chunk<__half, 8>::load_once(reinterpret_cast<const __half*>(
            quants[h] + int64_t(block) * kBlockBytes + 16 * i));
      }
      // Neighboring blocks have theirs in the same sector: through L1.
      const char* const from = scales[h] + int64_t(block) * kStep;
      if constexpr (Block::kScaleBytes == 8) {
        to.scales[h] = __ldg(reinterpret_cast<const uint2*>(from));
      } else if constexpr (Block::kScaleBytes == 4) {
        to.scales[h].x = __ldg(reinterpret_cast<const uint32_t*>(from));
      } else {
        to.scales[h].x = __ldg(reinterpret_cast<const uint16_t*>(from));
      }
      if constexpr (Of::kHasZeros) {
        const uint8_t* const of_block = zeros[h] + block * Of::kZerosPerBlock;
        to.zeros[h] = Of::kZerosPerBlock == 4 ? __ldg(reinterpret_cast<const uint32_t*>(of_block))
                                              : static_cast<uint32_t>(__ldg(of_block));
      }
    }
  }
};

// x as B in shared memory: of each column the blocks of a phase, a unit of 16 bytes for eight values.
template <class T, PackedFormat kFormat, int kColumns>
struct ExpertsX {
  static constexpr int kX = kExpertsRows<T, kColumns>;
  static constexpr int kRowWarps = kExpertsWarps / kX, kRowThreads = kRowWarps * kWarpSize;
  static constexpr int kTerms = kXTerms<T>;
  static constexpr int kHeld = 1;  // units of a thread that it reads once
  static_assert(kExpertsWarps % kX == 0 && (kTerms == 1 || kColumns > 1), "warps share rows evenly");

  uint4* units;
  int stride;   // of a column, in units
  float* undo;  // [kX]: what sums are multiplied by

  // Loads blocks [begin, end) of k. All threads call it; a barrier has to follow, and has to be in front where
  // something reads what was there.
  __device__ __forceinline__ void load(const PackedExpertsProduct& p, const PackedExpertsWork<kX>& work,
                                       int begin, int end) const {
    __shared__ float most_of[kExpertsWarps], squares_of[kExpertsWarps];
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int m = warp / kRowWarps, thread = threadIdx.x - m * kRowThreads;
    const int count = (end - begin) * kBlockUnits, first = begin * int(kPackedBlock);
    int source = -1;  // work.source[m], without an array indexed at run time
#pragma unroll
    for (int i = 0; i < kX; ++i) {
      if (i == m) source = work.source[i];
    }
    const int64_t row = work.first_row + m;
    const T* const x = static_cast<const T*>(p.x) + (p.gated ? row : row * p.choices.top_k + source) * p.k;
    const bool rms = p.norm_weight != nullptr;
    const auto eight = [&](const T* from, int at, float (&to)[8]) {  // what is behind k is zero
      if (p.aligned) {
#pragma unroll
        for (int part = 0; part < 8; part += kVecElems<T>) {
          float some[kVecElems<T>] = {};
          if (at + part < p.k) Chunk<T, kVecElems<T>>::unpack(
              Chunk<T, kVecElems<T>>::load_l2(from + at + part), some);
#pragma unroll
          for (int e = 0; e < kVecElems<T>; ++e) to[part + e] = some[e];
        }
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) to[e] = at + e < p.k ? to_float(Chunk<T, 1>::load_l2(from + at + e)) : 0.f;
      }
    };
    float most = 0.f, squares = 0.f;
    const auto values_of = [&](int unit, float (&values)[8], bool sums_squares) {
      eight(x, first + unit * 8, values);
      if (!rms) return;
      float factors[8];
      eight(static_cast<const T*>(p.norm_weight), first + unit * 8, factors);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (sums_squares) squares = fmaf(values[e], values[e], squares);
        values[e] *= factors[e] + p.norm_offset;
      }
    };
    float held[kHeld][8];
    const auto keep_largest = [&](const float (&values)[8]) {
#pragma unroll
      for (int e = 0; e < 8; ++e) most = fmaxf(most, fabsf(values[e]));
    };
    if (source >= 0) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (thread + i * kRowThreads >= count) continue;
        values_of(thread + i * kRowThreads, held[i], true);
        keep_largest(held[i]);
      }
#pragma unroll 1
      for (int unit = thread + kHeld * kRowThreads; unit < count; unit += kRowThreads) {
        float values[8];
        values_of(unit, values, true);
        keep_largest(values);
      }
    }
    most = warp_max(most), squares = warp_sum(squares);
    if (lane == 0) most_of[warp] = most, squares_of[warp] = squares;
    __syncthreads();  // every warp's largest and squares
    squares = 0.f;
#pragma unroll
    for (int w = 0; w < kRowWarps; ++w) {
      most = fmaxf(most, most_of[m * kRowWarps + w]);
      squares += squares_of[m * kRowWarps + w];
    }
    // The largest comes to lie below 2^15.
    const int exponent = max(14 - 126, int(__float_as_uint(most) >> 23) - 127);
    const float factor = __uint_as_float(unsigned(127 + 14 - exponent) << 23);
    if (thread == 0) {
      const float back = __uint_as_float(unsigned(127 - 14 + exponent) << 23);
      undo[m] = rms ? back * rsqrtf(squares / p.k + p.norm_eps) : back;
    }
    const auto store = [&](int unit, float (&values)[8]) {
#pragma unroll
      for (int e = 0; e < 8; ++e) values[e] *= factor;
#pragma unroll
      for (int term = 0; term < kTerms; ++term) {
        uint32_t rounded[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          rounded[i] = pack2(values[2 * i], values[2 * i + 1], __half());
          if (kTerms == 1) continue;
          const float2 taken = unpack2(rounded[i], __half());
          values[2 * i] = (values[2 * i] - taken.x) * kNextTerm;
          values[2 * i + 1] = (values[2 * i + 1] - taken.y) * kNextTerm;
        }
        const int column = kColumns == 1 ? 0 : m * kXColumns<T> + term;
        units[column * stride + unit] = as_operand<kFormat, true>(rounded);
      }
    };
    if (source >= 0) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (thread + i * kRowThreads < count) store(thread + i * kRowThreads, held[i]);
      }
#pragma unroll 1
      for (int unit = thread + kHeld * kRowThreads; unit < count; unit += kRowThreads) {
        float values[8];
        values_of(unit, values, false);
        store(unit, values);
      }
    }
  }

  // The lane's column, or one that has values where nobody reads the lane's sums; -1 for zeros.
  __device__ __forceinline__ int column(const PackedExpertsWork<kX>& work) const {
    const int g = threadIdx.x % kWarpSize / 4;
    if constexpr (kColumns == 1) return 0;
    const int m = g / kXColumns<T>;
    bool is_there = false;
#pragma unroll
    for (int i = 0; i < kX; ++i) is_there = is_there || (i == m && work.source[i] >= 0);
    return is_there && g % kXColumns<T> < kTerms ? g : -1;
  }
};

// Adds a block's products with x, of which a lane's operands lie at `of_lane`; is_there: else they are zeros.
template <class T, PackedFormat kFormat>
__device__ __forceinline__ void add_stack_block(const StackBlock<kFormat>& block, uint32_t of_lane,
                                                bool is_there, float (&accumulators)[4]) {
  using Of = Traits<kFormat>;
  constexpr bool kHasRest = kTermsOf<T, kFormat> == 2;
  BlockWords<kFormat> words;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int i = 0; i < words.kLoads; ++i) {
      const uint4& raw = block.quants[h][i];
      words.word[h][i][0] = raw.x, words.word[h][i][1] = raw.y, words.word[h][i][2] = raw.z,
      words.word[h][i][3] = raw.w;
    }
  float c[2][4] = {}, rest[kHasRest ? 2 : 1][4] = {};  // two chains
#pragma unroll
  for (int s = 0; s < int(kSubBlocks); ++s) {
    const int zeros[2] = {block.zero(0, s), block.zero(1, s)};
    uint32_t a[2][4];
    words.template operands<true>(a, s, zeros);
    uint4 b = make_uint4(0, 0, 0, 0);
    if (is_there) b = load_shared(of_lane + s * 64);
    mma<__half>(c[0], a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
    mma<__half>(c[1], a[1][0], a[1][1], a[1][2], a[1][3], b.z, b.w);
    if constexpr (kHasRest) {
      words.template operands<true, 1>(a, s, zeros);
      mma<__half>(rest[0], a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
      mma<__half>(rest[1], a[1][0], a[1][1], a[1][2], a[1][3], b.z, b.w);
    }
    if ((s + 1) % Of::kTogether != 0) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float sum = c[0][i] + c[1][i];
      if constexpr (kHasRest) sum += rest[0][i] + rest[1][i], rest[0][i] = rest[1][i] = 0.f;
      accumulators[i] = fmaf(block.scale(i / 2, s), sum, accumulators[i]);
      c[0][i] = c[1][i] = 0.f;
    }
  }
}

// `splits`: warps that share a tile, 1 to kExpertsWarps; a power of two.
template <class T, PackedFormat kFormat, int kColumns, bool kGated>
__global__ void __launch_bounds__(kExpertsThreads, kExpertsBlocks)
    packed_experts_kernel(const __grid_constant__ PackedExpertsProduct p, int phase_blocks, int splits) {
  using X = ExpertsX<T, kFormat, kColumns>;
  constexpr int kX = X::kX, kDepth = kExpertsDepth<T, kFormat>;
  constexpr int kTile = kGated ? kMmaRows / 2 : kMmaRows;  // features of a tile
  // Quants are asked for before x is there; with zeros registers are too few for both.
  constexpr bool kStartsEarly = !Traits<kFormat>::kHasZeros;
  extern __shared__ __align__(16) char experts_x[];
  __shared__ float sums[kExpertsWarps][kX][kMmaRows], undo[kX];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, g = lane / 4, q = lane % 4;

  // The next kernel reads choices before it waits: it may only start once the one that made them is complete.
  // The kernel behind `down` waits first.
  if constexpr (kGated) {
    wait_and_allow_next_kernel();
  } else {
    allow_next_kernel();
  }
  const PackedExpertsWork<kX> work = find_packed_work<kX>(p.choices, lane);
  if (!work.is_some) {
    if constexpr (!kGated) wait_for_previous_kernel();  // so that this one is complete behind it
    return;
  }

  const X x{reinterpret_cast<uint4*>(experts_x), column_units<kColumns>(phase_blocks), undo};
  const int column = x.column(work);
  const uint32_t of_lane = shared_address(x.units + max(column, 0) * x.stride + q);
  const int blocks = p.matrix.blocks, tiles = (p.features + kTile - 1) / kTile;
  const int at_once = kExpertsWarps / splits, split = warp % splits;
  const int64_t first_row = work.expert * p.features * (kGated ? 2 : 1);
  const bool has_phases = phase_blocks < blocks;
  StackRows<kFormat> rows;
  StackBlock<kFormat> some[kDepth];
  const auto find_rows = [&](int tile) {
    const int feature = min(tile * kTile + g, p.features - 1);
    if constexpr (kGated) {
      rows.find(p, 0, first_row + (p.alternating ? 2 * feature : feature));
      rows.find(p, 1, first_row + (p.alternating ? 2 * feature + 1 : p.features + feature));
    } else {
      rows.find(p, 0, first_row + feature);
      rows.find(p, 1, first_row + min(feature + 8, p.features - 1));
    }
  };
  // This warp's blocks of a phase that begins with block `phase`.
  const auto part = [&](int phase, int of_split) {
    return phase + min(phase_blocks, blocks - phase) * of_split / splits;
  };
  const auto start = [&](int phase) {
    const int end = part(phase, split + 1);
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const int block = part(phase, split) + d;
      if (block < end) rows.load(some[d], block);
    }
  };

  bool is_first = true;
#pragma unroll 1
  for (int base = blockIdx.x * at_once; base < tiles; base += gridDim.x * at_once) {
    const int tile = base + warp / splits;  // one behind the last is multiplied, and not written
    find_rows(tile);
    float total[4] = {};
#pragma unroll 1
    for (int phase = 0; phase < blocks; phase += phase_blocks) {
      if constexpr (kStartsEarly) start(phase);
      if (is_first || has_phases) {
        if (is_first && !kGated) wait_for_previous_kernel();  // for x
        if (!is_first) __syncthreads();                       // all warps are done with the x before
        x.load(p, work, phase, min(blocks, phase + phase_blocks));
        __syncthreads();  // x and what undoes its factors
        is_first = false;
      }
      if constexpr (!kStartsEarly) start(phase);
      const int end = part(phase, split + 1);
      float accumulators[4] = {};
#pragma unroll 1
      for (int block = part(phase, split); block < end; block += kDepth) {
#pragma unroll
        for (int d = 0; d < kDepth; ++d) {
          if (block + d >= end) break;
          add_stack_block<T, kFormat>(some[d], of_lane + (block + d - phase) * (kBlockUnits * 16),
                                      column >= 0, accumulators);
          if (block + d + kDepth < end) rows.load(some[d], block + d + kDepth);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int m = kColumns == 1 ? 0 : (2 * q + i % 2) / kXColumns<T>;
        total[i] = fmaf(undo[m], accumulators[i], total[i]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float of_columns[2] = {total[2 * h], total[2 * h + 1]};
      if constexpr (kColumns == 1) {  // all columns are the same
        if (q == 0) sums[warp][0][g + 8 * h] = of_columns[0];
      } else if constexpr (sizeof(T) == 4) {  // terms in a lane's two columns and the neighbor's first
        const float low = of_columns[q % 2 ? 0 : 1] * (q % 2 ? 1.f / (kNextTerm * kNextTerm) : 1.f / kNextTerm);
        const float sum = (q % 2 ? 0.f : of_columns[0]) + (low + __shfl_xor_sync(kAllLanes, q % 2 ? low : 0.f, 1));
        if (q % 2 == 0) sums[warp][q / 2][g + 8 * h] = sum;
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) sums[warp][2 * q + i][g + 8 * h] = of_columns[i];
      }
    }
    __syncthreads();  // every warp's sums
#pragma unroll 1
    for (int i = threadIdx.x; i < at_once * kTile * kX; i += kExpertsThreads) {
      const int feature_of_tile = i % kTile, m = i / kTile % kX, of_block = i / (kTile * kX);
      const int feature = (base + of_block) * kTile + feature_of_tile;
      int source = -1;  // work.source[m], without an array indexed at run time
#pragma unroll
      for (int j = 0; j < kX; ++j) {
        if (j == m) source = work.source[j];
      }
      if (source < 0 || feature >= p.features) continue;
      const float unit = kUndoQuants<kFormat, true> * p.matrix.multiplier;
      const auto sum_of = [&](int row, int64_t of_expert) {
        float sum = 0.f;
        for (int w = 0; w < splits; ++w) sum += sums[of_block * splits + w][m][row];
        sum *= unit;
        if (p.bias) sum += to_float(static_cast<const T*>(p.bias)[first_row + of_expert]);
        return sum;
      };
      const int64_t at = ((work.first_row + m) * int64_t(p.choices.top_k) + source) * p.features + feature;
      if constexpr (kGated) {
        float gate = sum_of(feature_of_tile, p.alternating ? 2 * feature : feature);
        float up = sum_of(feature_of_tile + 8, p.alternating ? 2 * feature + 1 : p.features + feature);
        if (p.clamped) {  // NaN stays NaN
          gate = gate > p.limit ? p.limit : gate;
          up = up > p.limit ? p.limit : up < -p.limit ? -p.limit : up;
          gate = times_sigmoid<true>(gate, p.alpha * gate), up += 1.f;
        } else {
          gate = activate(gate, p.activation);
        }
        static_cast<T*>(p.out)[at] = from_float<T>(gate * up);
      } else {
        static_cast<float*>(p.out)[at] = sum_of(feature_of_tile, feature);
      }
    }
    __syncthreads();  // sums are read
  }
}

template <class T, PackedFormat kFormat, int kColumns, bool kGated>
void launch_experts_variant(const PackedExpertsProduct& p, cudaStream_t stream) {
  constexpr int kX = kExpertsRows<T, kColumns>, kTile = kGated ? kMmaRows / 2 : kMmaRows;
  const int blocks = p.matrix.blocks, tiles = (p.features + kTile - 1) / kTile;
  const int choices = std::min(p.choices.rows, kX) * p.choices.top_k, groups = (p.choices.rows + kX - 1) / kX;
  const int room = multiprocessor_count() * kExpertsBlocks;
  // As many warps a tile as it takes to fill the GPU, each with two blocks or more.
  int splits = 1;
  while (splits < kExpertsWarps && blocks >= 4 * splits &&
         (tiles * splits + kExpertsWarps - 1) / kExpertsWarps * choices * groups < room)
    splits *= 2;
  const int needed = (tiles * splits + kExpertsWarps - 1) / kExpertsWarps;
  const dim3 grid(std::min(needed, std::max(1, (room + choices * groups - 1) / (choices * groups))), choices,
                  groups);
  const int phases = (blocks + kPhaseBlocks<kColumns> - 1) / kPhaseBlocks<kColumns>;
  const int phase_blocks = (blocks + phases - 1) / phases;
  const int bytes = kColumns * column_units<kColumns>(phase_blocks) * 16;
  const auto kernel = packed_experts_kernel<T, kFormat, kColumns, kGated>;
  HF_FASTPATH_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  // In front of down is our own kernel: it writes nothing that is read early.
  HF_FASTPATH_CUDA_CHECK(launch_programmatic(kernel, grid, dim3(kExpertsThreads), size_t(bytes), stream,
                                             !kGated || p.programmatic_launch, p, phase_blocks, splits));
}

template <PackedFormat kFormat>
void launch_packed_experts_format(const PackedExpertsProduct& p, cudaStream_t stream) {
  with_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto launch = [&](auto columns) {
      constexpr int kColumns = decltype(columns)::value;
      return p.gated ? launch_experts_variant<T, kFormat, kColumns, true>(p, stream)
                     : launch_experts_variant<T, kFormat, kColumns, false>(p, stream);
    };
    if constexpr (sizeof(T) == 2) {
      if (p.choices.rows == 1) return launch(std::integral_constant<int, 1>{});
    }
    launch(std::integral_constant<int, 8>{});
  });
}

}  // namespace hf_fastpath
