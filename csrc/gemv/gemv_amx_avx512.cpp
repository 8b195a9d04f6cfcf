// What: gemv_avx512.cpp's product for 5 to 32 rows of x in 16 bits, in the tiles of AMX: 16 weight rows times
//   32 inputs, as they lie in memory, times 32 inputs of 16 columns that x has been laid out as. Tiles
//   multiply bfloat16 and sum in float32. Of float16 weights each becomes the sum of two bfloat16, its first
//   eight significant bits and the other three, and so does x, in 16 columns for eight rows: all products
//   are exact. Blocks with weights of 64 and more, infinities or NaNs are left to gemv_avx512.cpp's kernel.
//   An output's sums differ by float32 rounding from those for other numbers of rows, as their order does.
//   Subnormal bfloat16 count as zeros.
// Work split: a thread takes a range of outputs, 16 at a time.
// Traffic: the weight once; x from the first- and second-level cache once for 16 outputs.
// Roofline: read bandwidth. All matrices of TinyLlama one after the other, eight rows, two threads, Xeon,
//   2026-11, of a read: 90 % in bfloat16, 91 in float16; with weights in the cache they take 17 and 64 % of
//   a read's time. float16 widened to float32 and then cut in two: 87 and 73 %. 32 rows take 97 ms in
//   bfloat16 and 149 in float16, as calls of gemm in turn, where 16 rows take 87 and 107: x in float16 has
//   64 columns then, 4 KB for every 32 inputs, more than the first-level cache holds of a row.
#include "common/amx_tiles.h"
#include "gemv/gemv_linear.h"

namespace hf_fastpath {
namespace {

// Bytes ahead in its row that a weight is asked for. Rows that lie whole pages apart share sets of the
// first-level cache, so far ahead is no better.
constexpr int64_t kWholeAhead = 2048, kSplitAhead = 1024;

// 32 float16 times 2^-102 as bfloat16, what does not fit cut off, and that in `rest`. Times 2^10 none is
// subnormal, nor is what is cut off, so that bits only have to move: exponents of bfloat16 are larger by 112.
// From 64 on, and where they are no numbers, `odd` becomes NaN instead.
HF_INLINE __m512i split_weights(__m512i bits, __m512i& rest, __m512i& odd) {
  const __m512i sign_and_low = _mm512_set1_epi16(static_cast<short>(0x8fff));
  __m512i scaled, low;
  asm("vmulph %2, %1, %0" : "=v"(scaled) : "v"(bits), "v"(_mm512_set1_epi16(0x6400)));  // 1024
  const __m512i high = _mm512_and_si512(scaled, _mm512_set1_epi16(static_cast<short>(0xfff8)));
  asm("vsubph %2, %1, %0" : "=v"(low) : "v"(scaled), "v"(high));
  asm("vaddph %1, %0, %0" : "+v"(odd) : "v"(low));
  rest = _mm512_and_si512(_mm512_srai_epi16(low, 3), sign_and_low);
  return _mm512_and_si512(_mm512_srai_epi16(scaled, 3), sign_and_low);
}

// Where 16 rows of a weight are, and the 16 that will be read after them.
struct Rows {
  const uint16_t* weight;
  const uint16_t* next;
  int64_t stride, count;  // elements between rows; how many there are of them
};

template <bool kSplit>
HF_INLINE void prefetch(const Rows& rows, int64_t k, int64_t in_features) {
  const int64_t ahead = k + (kSplit ? kSplitAhead : kWholeAhead) / 2;
  const uint16_t* from = ahead < in_features ? rows.weight + ahead : rows.next + ahead - in_features;
#pragma GCC unroll 16
  for (int r = 0; r < kAmxRows; ++r, from += rows.stride) {
    _mm_prefetch(reinterpret_cast<const char*>(from), kSplit ? _MM_HINT_T1 : _MM_HINT_T0);
  }
}

// 32 inputs of a block's rows from `from` on, of which `mask` says which exist, as tiles 6 and, in two parts,
// 7.
template <bool kSplit>
HF_INLINE void load_weights(const uint16_t* from, const Rows& rows, __mmask32 mask, uint16_t* buffer,
                            __m512i& odd) {
  constexpr __mmask32 kAll = ~__mmask32{0};
  if (!kSplit && mask == kAll) return load_tile<6>(from, rows.stride * 2);
  const auto stage = [&](int64_t r) __attribute__((always_inline)) {
    const uint16_t* row = from + r * rows.stride;
    const __m512i bits = mask == kAll ? _mm512_loadu_si512(row) : _mm512_maskz_loadu_epi16(mask, row);
    if constexpr (kSplit) {
      __m512i rest;
      _mm512_store_si512(buffer + r * kAmxInputs, split_weights(bits, rest, odd));
      _mm512_store_si512(buffer + (kAmxRows + r) * kAmxInputs, rest);
    } else {
      _mm512_store_si512(buffer + r * kAmxInputs, bits);
    }
  };
  if (rows.count == kAmxRows) {
#pragma GCC unroll 16
    for (int64_t r = 0; r < kAmxRows; ++r) stage(r);
  } else {
    for (int64_t r = 0; r < rows.count; ++r) stage(r);
  }
  load_tile<6>(buffer, kAmxRowBytes);
  if constexpr (kSplit) load_tile<7>(buffer + kAmxRows * kAmxInputs, kAmxRowBytes);
}

// accumulators[r][c] of a block of weight rows and kGroups times 16 columns of x. False if a weight cannot be
// split.
template <bool kSplit, int kGroups>
HF_INLINE bool multiply(const LinearArgs& args, const Rows& rows, float* accumulators) {
  static_assert(kGroups <= (kSplit ? 4 : 2));
  // Chains of sums of a group: of the parts of a weight or of every other product, as short chains round
  // less, where registers are left.
  constexpr int kChains = kGroups > 2 ? 1 : 2;
  constexpr std::make_integer_sequence<int, kGroups> kEachGroup;
  constexpr std::make_integer_sequence<int, kGroups * kChains> kEachSum;
  alignas(64) uint16_t buffer[2][2 * kAmxRows * kAmxInputs];
  const int64_t columns = tile_columns(args.dtype, args.rows), row_bytes = columns * 4;
  const int64_t step = kAmxPairs * columns * 2;
  const int64_t group = (args.in_features + kAmxInputs - 1) / kAmxInputs * step;
  const uint16_t* x = args.laid_out;
  __m512i odd = _mm512_setzero_si512();
  for_each_index(kEachSum, [&](auto sum) __attribute__((always_inline)) { zero_tile<sum.value>(); });
  const auto product = [&](int64_t k, auto turn, __mmask32 mask) __attribute__((always_inline)) {
    constexpr int kTurn = decltype(turn)::value;
    prefetch<kSplit>(rows, k, args.in_features);
    load_tile<4>(x, row_bytes);
    load_weights<kSplit>(rows.weight + k, rows, mask, buffer[kTurn], odd);
    for_each_index(kEachGroup, [&](auto of) __attribute__((always_inline)) {
      constexpr int g = of.value, kX = 4 + g % 2;
      if constexpr (g > 0) load_tile<kX>(x + g * group, row_bytes);
      if constexpr (kSplit) {
        multiply_bf16<g * kChains, 6, kX>();
        multiply_bf16<g * kChains + kChains - 1, 7, kX>();
      } else {
        multiply_bf16<g * kChains + kTurn, 6, kX>();
      }
    });
    x += step;
  };
  constexpr std::integral_constant<int, 0> kEven;
  constexpr std::integral_constant<int, 1> kOdd;
  constexpr __mmask32 kAll = ~__mmask32{0};
  int64_t k = 0;
  for (; k + 2 * kAmxInputs <= args.in_features; k += 2 * kAmxInputs) {
    product(k, kEven, kAll);
    product(k + kAmxInputs, kOdd, kAll);
  }
  for (; k < args.in_features; k += kAmxInputs) {
    const int64_t left = args.in_features - k;
    product(k, kEven, left < kAmxInputs ? (__mmask32{1} << left) - 1 : kAll);
  }
  alignas(64) float parts[kGroups * kChains][kAmxRows * kAmxRows] = {};
  for_each_index(kEachSum, [&](auto sum) __attribute__((always_inline)) {
    store_tile<sum.value>(parts[sum.value], kAmxRowBytes);
  });
  for (int g = 0; g < kGroups; ++g) {
    for (int64_t i = 0; i < kAmxRows * kAmxRows; i += 16) {
      __m512 sum = _mm512_load_ps(parts[g * kChains] + i);
      if constexpr (kChains == 2) sum = _mm512_add_ps(sum, _mm512_load_ps(parts[g * kChains + 1] + i));
      _mm512_store_ps(accumulators + g * kAmxRows * kAmxRows + i, sum);
    }
  }
  const __m512i exponents = _mm512_set1_epi16(0x7c00);
  return !kSplit || _mm512_cmpeq_epi16_mask(_mm512_and_si512(odd, exponents), exponents) == 0;
}

// Runs linear_avx512 over as many rows at a time as that takes.
void without_tiles(const LinearArgs& args, int64_t begin, int64_t end) {
  const int64_t row_bytes = args.out_features * 2;
  for (int64_t row = 0; row < args.rows; row += kMaxRows) {
    LinearArgs some = args;
    some.rows = min_of(kMaxRows, args.rows - row);
    some.x += row * args.x_stride;
    if (args.residual != nullptr) some.residual = static_cast<const char*>(args.residual) + row * row_bytes;
    some.out = static_cast<char*>(args.out) + row * args.out_stride * 2;
    linear_avx512(some, begin, end);
  }
}

template <class Element, int kGroups>
void tiles_range(const LinearArgs& args, int64_t begin, int64_t end) {
  constexpr bool kSplit = std::is_same_v<Element, F16>;
  const auto* weight = static_cast<const uint16_t*>(args.weight);
  const auto* up = static_cast<const uint16_t*>(args.up_weight);
  alignas(64) float accumulators[kGroups * kAmxRows * kAmxRows];
  alignas(64) float y[2][kMaxAmxRows * kRun];
  const int64_t columns = tile_columns(args.dtype, args.rows);
  use_tiles_for(min_of(kAmxRows, end - begin), columns);
  for (int64_t n = begin; n < end; n += kAmxRows) {
    const int64_t count = min_of(kAmxRows, end - n), next = n + count < end ? n + count : n;
    if (count < kAmxRows && n > begin) use_tiles_for(count, columns);
    const uint16_t* gate = weight + n * args.weight_stride;
    const uint16_t* then = weight + next * args.weight_stride;
    const uint16_t* beside = up != nullptr ? up + n * args.up_stride : nullptr;
    bool finite = multiply<kSplit, kGroups>(
        args, {gate, up != nullptr ? beside : then, args.weight_stride, count}, accumulators);
    finite = (rows_of_x<kSplit, kGroups>(accumulators, y[0]) || !kSplit) && finite;
    if (up != nullptr) {
      finite = multiply<kSplit, kGroups>(args, {beside, then, args.up_stride, count}, accumulators) && finite;
      finite = (rows_of_x<kSplit, kGroups>(accumulators, y[1]) || !kSplit) && finite;
    }
    if (finite) {
      epilogue_rows<Element>(args, y[0], kRun, up != nullptr ? y[1] : nullptr, n, count);
    } else {
      without_tiles(args, n, n + count);  // infinity in two parts is infinity and NaN
    }
  }
  release_tiles();
}

}  // namespace

void tiles_of_rows_amx(DType dtype, int64_t rows, int64_t in_features, const float* x, int64_t x_stride,
                       uint16_t* tiles) {
  const bool in_two = dtype == DType::kFloat16;
  const int64_t columns = tile_columns(dtype, rows), most = in_two ? kAmxRows / 2 : kAmxRows;
  const __m512 scale = _mm512_set1_ps(0x1p102f);  // see split_weights
  for (int64_t first = 0; first < rows; first += most) {
    for (int64_t k = 0; k < in_features; k += kAmxInputs, tiles += kAmxPairs * columns * 2) {
      const int64_t left = min_of(kAmxInputs, in_features - k);
      const auto mask = static_cast<uint32_t>((uint64_t{1} << left) - 1);
      __m512i v[kAmxRows] = {};
      for (int64_t m = 0; m < min_of(most, rows - first); ++m) {
        const float* from = x + (first + m) * x_stride + k;
        __m512 front = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), from);
        __m512 back = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), from + 16);
        if (in_two) front = _mm512_mul_ps(front, scale), back = _mm512_mul_ps(back, scale);
        v[m] = narrow(front, back);
        if (in_two) v[m + most] = narrow(rest_of(front), rest_of(back));
      }
      transpose_16(v);
      for (int64_t pair = 0; pair < kAmxPairs; ++pair) {
        if (columns == kAmxRows) {
          _mm512_store_si512(tiles + pair * columns * 2, v[pair]);
        } else {
          _mm256_store_si256(reinterpret_cast<__m256i*>(tiles + pair * columns * 2),
                             _mm512_castsi512_si256(v[pair]));
        }
      }
    }
  }
}

void linear_amx(const LinearArgs& args, int64_t begin, int64_t end) {
  const bool half = args.dtype == DType::kFloat16;
  const int64_t groups = tile_groups(args.dtype, args.rows);
  if (groups == 1) return (half ? tiles_range<F16, 1> : tiles_range<BF16, 1>)(args, begin, end);
  if (groups == 2) return (half ? tiles_range<F16, 2> : tiles_range<BF16, 2>)(args, begin, end);
  return (groups == 3 ? tiles_range<F16, 3> : tiles_range<F16, 4>)(args, begin, end);
}

}  // namespace hf_fastpath
