// What: products of few rows of x with a quantized weight whose blocks have records instead of scales
//   (packed_formats.py:RECORDS), with bias, activation and residual, or the gated pair.
// Work split of a 16-bit x, on tensor cores: a thread block of eight warps takes 16 output features at
//   a time, or eight of gate and of up, and goes on to the next ones that are its own. Its warps take a
//   block of weights each in turn, and their sums meet in shared memory. A lane has some such blocks of
//   two rows under way and unpacks them to x's type, which holds quants of eight bits as they are. x lies
//   in shared memory in the order in which quants come out, with the sums over sub-blocks that minimums
//   are multiplied by.
// Work split of float32, on CUDA cores: a warp takes an output feature and up to two rows of x.
// Traffic: quants and records once; x per SM out of L2.
// Roofline: bandwidth, of which an H200 has 45 to 63 % with one row (docs/lab/packed_gemv.md).
#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "common/mma.cuh"
#include "gemv/gemv_device.cuh"
#include "packed_gemv/packed_gemv.h"
#include "weights/packed_records.cuh"

namespace hf_fastpath {
namespace {

// ---- x of 16 bits ----

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kTileRows = 16;  // of the matrix
constexpr int kSharedBytes = 208 * 1024, kTwoBlocksBytes = 108 * 1024;

// What operands of four bits have in excess, which minimums take off again: so little that sums lose nothing
// that x's type could show.
template <class T>
constexpr float kExcess = std::is_same_v<T, __half> ? 16.f : 128.f;

__device__ __forceinline__ uint32_t masked_or(uint32_t word, uint32_t mask, uint32_t bits) {
  uint32_t made;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(made) : "r"(word), "r"(mask), "r"(bits));
  return made;
}

// A lane's word as operands, neighbors as x_order() has them.
template <class T, int kBits>
__device__ __forceinline__ void unpack_operands(uint32_t word, uint32_t (&to)[kBits == 4 ? 4 : 2]) {
  if constexpr (kBits == 4 && std::is_same_v<T, __half>) {  // of 2^4, whose last bit but six is 1
    to[0] = masked_or(word << 6, 0x03c003c0u, 0x4c004c00u);
    to[1] = masked_or(word << 2, 0x03c003c0u, 0x4c004c00u);
    to[2] = masked_or(word >> 2, 0x03c003c0u, 0x4c004c00u);
    to[3] = masked_or(word >> 6, 0x03c003c0u, 0x4c004c00u);
  } else if constexpr (kBits == 4) {  // of 2^7, whose last bit is 1
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = masked_or(word >> 4 * i, 0x000f000fu, 0x43004300u);
  } else if constexpr (std::is_same_v<T, __half>) {
    const uint32_t bytes = word ^ 0x80808080u;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t above = __byte_perm(bytes, 0x64646464u, i == 0 ? 0x4140 : 0x4342);
      const __half2 made = __hsub2(*reinterpret_cast<const __half2*>(&above), __float2half2_rn(1152.f));
      to[i] = *reinterpret_cast<const uint32_t*>(&made);
    }
  } else {
    float quant[4];
    unpack_word<8>(word, quant);
    to[0] = pack2(quant[0], quant[1], T());
    to[1] = pack2(quant[2], quant[3], T());
  }
}

// 16 bytes of x for a lane of place q in a quad: what it multiplies its word of a sub-block by.
template <class T, int kBits>
__device__ __forceinline__ uint4 x_order(const T* of_sub_block, int q, int left) {
  if constexpr (kBits == 4) {  // eight neighbors; a word's first half beside its second one
    if (q * 8 >= left) return make_uint4(0, 0, 0, 0);
    const uint4 x = __ldcg(reinterpret_cast<const uint4*>(of_sub_block) + q);
    return make_uint4(pair_low(x.x, x.z), pair_high(x.x, x.z), pair_low(x.y, x.w), pair_high(x.y, x.w));
  } else {  // four neighbors of each half of the sub-block
    const auto four = [&](int at) {
      return at < left ? __ldcg(reinterpret_cast<const uint2*>(of_sub_block + at)) : make_uint2(0, 0);
    };
    const uint2 front = four(4 * q), back = four(16 + 4 * q);
    return make_uint4(front.x, front.y, back.x, back.y);
  }
}

// Where things are in shared memory, for m rows of x.
struct RecordsLayout {
  int m, columns, sub_blocks, sums_at, partials_at, bytes;

  RecordsLayout(int m, int blocks)
      : m(m),
        columns((m + 1) / 2 * 2),
        sub_blocks(blocks * int(kSubBlocks)),
        sums_at(sub_blocks * m * 64),
        partials_at(sums_at + sub_blocks * columns * 4),
        bytes(partials_at + 2 * kWarps * kTileRows * columns * 4) {}
};

// What a lane needs of a block, of two rows.
template <PackedFormat kFormat>
struct LaneBlock {
  static constexpr int kBits = Traits<kFormat>::kBits, kPlaces = kBits, kLoads = kBits / 4;
  static constexpr int kAhead = 16 / kBits;       // blocks that a lane has under way: of 8 KB a warp
  static constexpr int kAheadOfRows = 8 / kBits;  // beside several rows of x, for which it needs registers
  uint4 raw[2][kLoads];
  Record<kFormat> record[2];

  __device__ __forceinline__ void load(const PackedMatrix& matrix, const uint4* quants, const int (&rows)[2],
                                       int block, int q) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        raw[h][i] = __ldcs(quants + (int64_t(rows[h]) * matrix.blocks + block) * kPlaces + q + 4 * i);
      record[h].load(matrix, rows[h], block);
    }
  }
  // Takes pairs away that belong to sub-blocks behind the last of `left` inputs; other records have none.
  __device__ __forceinline__ void drop_behind(int left) {
    if constexpr (Record<kFormat>::kArePairs) {
#pragma unroll
      for (int s = 1; s < int(kSubBlocks); ++s)
        if (s * int(kSubBlock) >= left) record[0].word[s] = record[1].word[s] = 0;
    }
  }
  __device__ __forceinline__ uint32_t word(int h, int i, int s) const {
    const uint4& four = raw[h][i];
    return s == 0 ? four.x : s == 1 ? four.y : s == 2 ? four.z : four.w;
  }
};

// Brings x to shared memory, in x_order(), and its sums over sub-blocks. kOne: m is 1.
template <class T, PackedFormat kFormat, bool kOne>
__device__ __forceinline__ void load_x(const GemvParams& p, int width, const RecordsLayout& layout,
                                       uint4* operands, float* sums) {
  constexpr int kTogether = 4;  // of a thread under way: neighbors in x, or rows
  const int m = kOne ? 1 : layout.m, of_row = layout.sub_blocks * 4, lane = threadIdx.x % kWarpSize;
  const auto* const x = static_cast<const T*>(p.x);
#pragma unroll 1
  for (int first = threadIdx.x; first - lane < of_row; first += kThreads * (kOne ? kTogether : 1)) {
#pragma unroll 1
    for (int first_row = 0; first_row < m; first_row += kOne ? 1 : kTogether) {
      uint4 made[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int at = first + (kOne ? i * kThreads : 0), row = first_row + (kOne ? 0 : i);
        const int left = at < of_row && row < m ? width - at / 4 * int(kSubBlock) : 0;
        made[i] = x_order<T, Traits<kFormat>::kBits>(x + int64_t(row) * width + at / 4 * int(kSubBlock),
                                                     at % 4, left);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int at = first + (kOne ? i * kThreads : 0), row = first_row + (kOne ? 0 : i);
        const bool present = at < of_row && row < m;
        if (present) operands[(at / 4 * m + row) * 4 + at % 4] = made[i];
        if constexpr (Traits<kFormat>::kHasMinimums) {
          const float2 a = unpack2(made[i].x, T()), b = unpack2(made[i].y, T()), c = unpack2(made[i].z, T()),
                       d = unpack2(made[i].w, T());
          float sum = ((a.x + a.y) + (b.x + b.y)) + ((c.x + c.y) + (d.x + d.y));
          sum += __shfl_xor_sync(kAllLanes, sum, 1);
          sum += __shfl_xor_sync(kAllLanes, sum, 2);
          if (present && at % 4 == 0) sums[at / 4 * layout.columns + row] = sum;
        }
      }
    }
  }
}

template <class T, PackedFormat kFormat, int kTiles, bool kOne, bool kGated>
__global__ void __launch_bounds__(kThreads, kTiles == 1 ? 2 : 1)
    packed_gemv_records_mma_kernel(const __grid_constant__ GemvParams p, PackedMatrix matrix, int x_width,
                                   RecordsLayout layout) {
  using Block = LaneBlock<kFormat>;
  constexpr int kAhead = kOne ? Block::kAhead : Block::kAheadOfRows, kBits = Traits<kFormat>::kBits,
                kOuts = kGated ? kTileRows / 2 : kTileRows;
  constexpr bool kHalves = Traits<kFormat>::kScalesHalves, kHasMinimums = Traits<kFormat>::kHasMinimums;
  static_assert(kBits == 8 || kHasMinimums, "which take off the excess");
  extern __shared__ __align__(16) char shared[];
  uint4* const operands = reinterpret_cast<uint4*>(shared);                       // [sub-block][m][4]
  float* const x_sums = reinterpret_cast<float*>(shared + layout.sums_at);        // [sub-block][columns]
  float* const partials = reinterpret_cast<float*>(shared + layout.partials_at);  // [2][warp][row][columns]
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, g = lane / 4, q = lane % 4;
  const int tiles = (p.n + kOuts - 1) / kOuts;
  const int m = kOne ? 1 : layout.m, columns = kOne ? 2 : layout.columns;
  const auto* const quants = static_cast<const uint4*>(p.segments[0].weight);
  const auto find_rows = [&](int tile, int (&rows)[2]) {
    rows[0] = min(tile * kOuts + g, p.n - 1);
    rows[1] = kGated ? rows[0] + p.n : min(tile * kOuts + g + 8, p.n - 1);
  };
  // A lane's part of x and of its sums; columns that there are not are others again, whose results nobody
  // takes.
  const uint4* of_lane[kTiles];
  const float* sums_of_lane[kTiles];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    of_lane[t] = operands + min(t * 8 + g, m - 1) * 4 + q;
    sums_of_lane[t] = x_sums + min(t * 8 + 2 * q, columns - 2);
  }
  const int whole_blocks = x_width / int(kPackedBlock);

  allow_next_kernel();
  Block under_way[kAhead];
  int rows[2];
  int tile = blockIdx.x;
  if (tile < tiles) {
    find_rows(tile, rows);
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      const int block = warp + u * kWarps;
      if (block < matrix.blocks) under_way[u].load(matrix, quants, rows, block, q);
    }
  }
  wait_for_previous_kernel();
  load_x<T, kFormat, kOne>(p, x_width, layout, operands, x_sums);
  __syncthreads();

  for (int turn = 0; tile < tiles; ++turn) {
    const int next = tile + gridDim.x;
    const int of_tile = threadIdx.x / m, row_of_x = threadIdx.x % m, n = tile * kOuts + of_tile;
    const bool finishes = of_tile < kOuts && n < p.n;
    Addends<T> addends;
    if (!kGated && finishes) addends = load_addends<T>(p, row_of_x, n);
    float sums[kTiles][4] = {};
#pragma unroll 1
    for (int first = warp; first < matrix.blocks; first += kAhead * kWarps) {
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int block = first + u * kWarps;
        if (block >= matrix.blocks) break;
        if (block >= whole_blocks) under_way[u].drop_behind(x_width - block * int(kPackedBlock));
        const int of_block = block * int(kSubBlocks);
#pragma unroll
        for (int s = 0; s < int(kSubBlocks); ++s) {
          uint32_t a[2][4];
          float2 factors[2][2];  // of rows and halves
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if constexpr (kBits == 4) {
              unpack_operands<T, 4>(under_way[u].word(h, 0, s), a[h]);
            } else {
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                uint32_t two[2];
                unpack_operands<T, 8>(under_way[u].word(h, i, s), two);
                a[h][2 * i] = two[0], a[h][2 * i + 1] = two[1];
              }
            }
            factors[h][0] = under_way[u].record[h].factors(s, false);
            if constexpr (kHalves) factors[h][1] = under_way[u].record[h].factors(s, true);
            if constexpr (kBits == 4) factors[h][0].y = fmaf(-kExcess<T>, factors[h][0].x, factors[h][0].y);
          }
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            const uint4 b = of_lane[t][(of_block + s) * m * 4];
            float c[2][4] = {};
            mma<T>(c[0], a[0][0], a[1][0], a[0][1], a[1][1], b.x, b.y);
            mma<T>(c[kHalves], a[0][2], a[1][2], a[0][3], a[1][3], b.z, b.w);
            float2 of_x = {};
            if constexpr (kHasMinimums)
              of_x = *reinterpret_cast<const float2*>(sums_of_lane[t] + (of_block + s) * columns);
#pragma unroll
            for (int i = 0; i < 4; i += kOne ? 2 : 1) {
              const int h = i / 2;
              sums[t][i] = fmaf(factors[h][0].x, c[0][i], sums[t][i]);
              if constexpr (kHalves) sums[t][i] = fmaf(factors[h][1].x, c[1][i], sums[t][i]);
              if constexpr (kHasMinimums)
                sums[t][i] = fmaf(factors[h][0].y, i % 2 ? of_x.y : of_x.x, sums[t][i]);
            }
          }
        }
        int after = block + kAhead * kWarps;
        if (after < matrix.blocks) {
          under_way[u].load(matrix, quants, rows, after, q);
        } else if (next < tiles) {  // the next tile's, at its beginning
          after = warp + u * kWarps;
          int others[2];
          find_rows(next, others);
          under_way[u].load(matrix, quants, others, after, q);
        }
      }
    }
    float* const of_turn = partials + turn % 2 * kWarps * kTileRows * columns;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int column = t * 8 + 2 * q;
      if (column >= columns) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h)
        *reinterpret_cast<float2*>(of_turn + (warp * kTileRows + g + 8 * h) * columns + column) =
            make_float2(sums[t][2 * h], sums[t][2 * h + 1]);
    }
    __syncthreads();  // the other turn's sums have been read by all that passed here before
    if (finishes) {
      float all[2] = {};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        all[0] += of_turn[(w * kTileRows + of_tile) * columns + row_of_x];
        if constexpr (kGated) all[1] += of_turn[(w * kTileRows + of_tile + 8) * columns + row_of_x];
      }
      if constexpr (kGated) {
        finish_gated<T>(p, row_of_x, n, all[0] * matrix.multiplier, all[1] * matrix.multiplier);
      } else {
        finish<T>(p, row_of_x, n, all[0] * matrix.multiplier, addends);
      }
    }
    tile = next;
    if (tile < tiles) find_rows(tile, rows);
  }
}

template <class T, PackedFormat kFormat, int kTiles, bool kOne, bool kGated>
void launch_mma(const GemvParams& p, int x_width, const PackedMatrix& matrix, cudaStream_t stream) {
  const RecordsLayout layout(p.m, matrix.blocks);
  const auto kernel = packed_gemv_records_mma_kernel<T, kFormat, kTiles, kOne, kGated>;
  allow_shared_memory(kernel, layout.bytes);
  constexpr int kOuts = kGated ? kTileRows / 2 : kTileRows;
  const int most = multiprocessor_count() * (layout.bytes <= kTwoBlocksBytes ? 2 : 1);
  const dim3 grid(std::min((p.n + kOuts - 1) / kOuts, most));
  HF_FASTPATH_CUDA_CHECK(launch_programmatic(kernel, grid, dim3(kThreads), layout.bytes, stream,
                                             p.programmatic_launch, p, matrix, x_width, layout));
}

template <class T, PackedFormat kFormat, bool kGated>
void launch_rows(const GemvParams& p, int x_width, const PackedMatrix& matrix, cudaStream_t stream) {
  if (p.m == 1) return launch_mma<T, kFormat, 1, true, kGated>(p, x_width, matrix, stream);
  if (p.m <= 8) return launch_mma<T, kFormat, 1, false, kGated>(p, x_width, matrix, stream);
  launch_mma<T, kFormat, 2, false, kGated>(p, x_width, matrix, stream);
}

// As many rows of x at a time as shared memory has room for, and about as many each time.
template <class T, PackedFormat kFormat>
void launch_on_tensor_cores(GemvParams p, int x_width, const PackedMatrix& matrix, cudaStream_t stream) {
  int most = 16;
  while (most > 1 && RecordsLayout(most, matrix.blocks).bytes > kSharedBytes) --most;
  const int times = (p.m + most - 1) / most, each = (p.m + times - 1) / times;
  for (int left = p.m; left > 0; left -= each) {
    p.m = std::min(left, each);
    if (p.gated) {
      launch_rows<T, kFormat, true>(p, x_width, matrix, stream);
    } else {
      launch_rows<T, kFormat, false>(p, x_width, matrix, stream);
    }
    p.x = static_cast<const T*>(p.x) + int64_t(each) * x_width;
    if (p.residual) p.residual = static_cast<const T*>(p.residual) + int64_t(each) * p.n;
    p.out = static_cast<T*>(p.out) + int64_t(each) * p.n;
  }
}

// ---- x of float32 ----

constexpr int kFloatWarps = 4;  // of a block: enough blocks for all SMs where features are few
constexpr int kFloatThreads = kFloatWarps * kWarpSize;

template <PackedFormat kFormat, int kX, bool kGated>
__global__ void __launch_bounds__(kFloatThreads)
    packed_gemv_records_kernel(const __grid_constant__ GemvParams p, PackedMatrix matrix, int x_width) {
  constexpr int kParts = kGated ? 2 : 1;
  const int n = blockIdx.x * kFloatWarps + threadIdx.x / kWarpSize, first_m = blockIdx.y * kX;
  if (n >= p.n) return;
  const float* const x = static_cast<const float*>(p.x);
  double sums[kParts][kX] = {};
  int64_t rows[kParts];
#pragma unroll
  for (int part = 0; part < kParts; ++part) rows[part] = n + int64_t(part) * p.n;
  const auto x_of = [&](int m) { return x + int64_t(min(first_m + m, p.m - 1)) * x_width; };
  add_record_products<kFormat, true>(matrix, p.segments[0].weight, rows, x_width, x_of, sums);
#pragma unroll
  for (int m = 0; m < kX; ++m) {
    float all[kParts];
#pragma unroll
    for (int part = 0; part < kParts; ++part) all[part] = sum_of_lanes(sums[part][m]) * matrix.multiplier;
    const int row = first_m + m;
    if (threadIdx.x % kWarpSize != 0 || row >= p.m) continue;
    if constexpr (kGated) {
      finish_gated<float>(p, row, n, all[0], all[1]);
    } else {
      finish<float>(p, row, n, all[0], load_addends<float>(p, row, n));
    }
  }
}

template <PackedFormat kFormat, int kX>
void launch_floats(const GemvParams& p, const PackedMatrix& matrix, int x_width, cudaStream_t stream) {
  const dim3 grid((p.n + kFloatWarps - 1) / kFloatWarps, (p.m + kX - 1) / kX), block(kFloatThreads);
  if (p.gated) {
    packed_gemv_records_kernel<kFormat, kX, true><<<grid, block, 0, stream>>>(p, matrix, x_width);
  } else {
    packed_gemv_records_kernel<kFormat, kX, false><<<grid, block, 0, stream>>>(p, matrix, x_width);
  }
  HF_FASTPATH_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void launch_packed_gemv_records(const GemvParams& p, int x_width, const PackedMatrix& matrix,
                                cudaStream_t stream) {
  with_type(p.dtype, [&](auto zero) {
    using T = decltype(zero);
    with_format(matrix.format, [&](auto format) {
      constexpr PackedFormat kFormat = decltype(format)::value;
      if constexpr (reads_records(kFormat)) {
        if constexpr (sizeof(T) == 2) {
          launch_on_tensor_cores<T, kFormat>(p, x_width, matrix, stream);
        } else if (p.m == 1) {
          launch_floats<kFormat, 1>(p, matrix, x_width, stream);
        } else {
          launch_floats<kFormat, 2>(p, matrix, x_width, stream);
        }
      }
    });
  });
}

}  // namespace hf_fastpath
