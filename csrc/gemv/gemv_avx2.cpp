// What: out = activation(x @ W.T + bias) + residual, or activation(x @ W.T) * (x @ U.T), for 1 to 16 rows of
//   x, with the weight as nn.Linear stores it ([out, in]) or as Conv1D does ([in, out]). Float32 sums,
//   rounded once.
// Work split: Linear: a thread owns a contiguous range of outputs. It walks its range as four streams, each
// an
//   unbroken piece of memory, which share the loads of x; several streams keep more of the hardware
//   prefetchers and line buffers busy than one does, and long ones are what those prefetchers follow. Conv1D:
//   a thread owns a range of inputs (and, with many threads, of outputs) and walks it as eight streams, too;
//   partial sums of the ranges are added in order afterwards.
// Traffic: the weight once, out_features * in_features * element size; x, bias and outputs are small. Conv1D
//   adds two float32 passes over parts * rows * out_features.
// Roofline: read bandwidth for one row of x, then arithmetic: with eight rows half of either. Of a plain read
//   of the same memory (two threads, 25 to 28 GB/s, Xeon 2.6 GHz, 2026-11), all matrices of TinyLlama one
//   after the other: Linear 100 % in every type. Conv1D, of R, 2.8 GHz: 73 to 98 % in 16-bit types, 89 to
//   107 % in float32.
#include "common/avx2_math.h"
#include "common/epilogue_avx2.h"
#include "gemv/gemv_cpu.h"

namespace hf_fastpath {
namespace {

// ---- Linear layout ------------------------------------------------------------------------------------

// Streams of weight rows, and with up to three rows of x the accumulators of a tile: 12, and 4 operands, fill
// the 16 registers. More streams do not read faster: 4 reach the read bandwidth in every type.
constexpr int kRowStreams = 4;
// How far ahead in its stream a row is prefetched: past the end of a page, where the hardware prefetchers
// stop.
constexpr int64_t kRowAheadBytes = 2048;
// Inputs summed into one chain of float32 before it is added to the total: short chains round less. The
// additions are 3 % more arithmetic, hidden behind the loads.
constexpr int64_t kBlock = 256;
// Outputs of a stream computed before bias and activation are applied to them, eight at a time.
constexpr int64_t kRun = 16;

// Where a tile's weight rows are.
template <class Element, int kTile>
struct TileRows {
  const typename Element::Storage* row[kTile];
};

// total[r * stride + m] += sum over n inputs of w.row[r] * x[m], lane by lane.
template <class Element, int kTile, int kM, bool kPrefetch>
HF_INLINE void accumulate(const TileRows<Element, kTile>& w, const float* x, int64_t x_stride, int64_t n,
                          __m256* total, int64_t stride) {
  constexpr int64_t kLine = kCacheLineBytes / static_cast<int64_t>(sizeof(typename Element::Storage));
  constexpr int64_t kAhead = kRowAheadBytes / static_cast<int64_t>(sizeof(typename Element::Storage));
  __m256 sum[kTile][kM];
  for (int r = 0; r < kTile; ++r) {
    for (int m = 0; m < kM; ++m) sum[r][m] = _mm256_setzero_ps();
  }
  const auto step = [&](int64_t k) __attribute__((always_inline)) {
    __m256 value[kM];
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) value[m] = _mm256_loadu_ps(x + m * x_stride + k);
#pragma GCC unroll 8
    for (int r = 0; r < kTile; ++r) {
      const __m256 weight = Element::load(w.row[r] + k);
#pragma GCC unroll 4
      for (int m = 0; m < kM; ++m) sum[r][m] = _mm256_fmadd_ps(weight, value[m], sum[r][m]);
    }
  };
  int64_t k = 0;
  for (; k + kLine <= n; k += kLine) {
    if constexpr (kPrefetch) {
#pragma GCC unroll 8
      for (int r = 0; r < kTile; ++r) {
        _mm_prefetch(reinterpret_cast<const char*>(w.row[r] + k + kAhead), _MM_HINT_T0);
      }
    }
#pragma GCC unroll 4
    for (int64_t j = 0; j < kLine; j += kLanes) step(k + j);
  }
  for (; k + kLanes <= n; k += kLanes) step(k);
  if (k < n) {
    for (int r = 0; r < kTile; ++r) {
      const __m256 weight = Element::load(w.row[r] + k, n - k);
      for (int m = 0; m < kM; ++m) {
        sum[r][m] = _mm256_fmadd_ps(weight, _mm256_loadu_ps(x + m * x_stride + k), sum[r][m]);
      }
    }
  }
  for (int r = 0; r < kTile; ++r) {
    for (int m = 0; m < kM; ++m) total[r * stride + m] = _mm256_add_ps(total[r * stride + m], sum[r][m]);
  }
}

// As above for any number of rows of x, in groups of three; never a last group of one, which would leave the
// FMA units waiting.
template <class Element, int kTile, bool kPrefetch>
void accumulate_rows(const TileRows<Element, kTile>& w, const float* x, int64_t x_stride, int64_t rows,
                     int64_t n, __m256* total) {
  if (rows == 1) return accumulate<Element, kTile, 1, kPrefetch>(w, x, x_stride, n, total, kMaxRows);
  int64_t m = 0;
  if (rows >= 3) {
    accumulate<Element, kTile, 3, kPrefetch>(w, x, x_stride, n, total, kMaxRows);
    m = 3;
    for (; rows - m >= 3 && rows - m != 4; m += 3) {
      accumulate<Element, kTile, 3, false>(w, x + m * x_stride, x_stride, n, total + m, kMaxRows);
    }
  }
  for (; rows - m >= 2; m += 2) {
    accumulate<Element, kTile, 2, kPrefetch>(w, x + m * x_stride, x_stride, n, total + m, kMaxRows);
  }
  if (m < rows) accumulate<Element, kTile, 1, false>(w, x + m * x_stride, x_stride, n, total + m, kMaxRows);
}

// The sum of eight lanes, added in float64: these last additions are the ones of the full magnitude.
HF_INLINE float rounded_sum(__m256 v) {
  const __m256d pairs =
      _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(v)), _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)));
  const __m128d sum = _mm_add_pd(_mm256_castpd256_pd128(pairs), _mm256_extractf128_pd(pairs, 1));
  return static_cast<float>(_mm_cvtsd_f64(_mm_add_sd(sum, _mm_unpackhi_pd(sum, sum))));
}

// y[r][m * kRun] = the dot product of weight row r and row m of x, for one tile of weight rows.
template <class Element, int kTile>
void dot_tile(const LinearArgs& args, TileRows<Element, kTile> w, float* const (&y)[kTile]) {
  __m256 total[kTile * kMaxRows];
  for (int r = 0; r < kTile; ++r) {
    for (int64_t m = 0; m < args.rows; ++m) total[r * kMaxRows + m] = _mm256_setzero_ps();
  }
  const int64_t in_features = args.in_features;
  for (int64_t k = 0; k < in_features; k += kBlock) {
    const int64_t n = min_of(kBlock, in_features - k);
    const float* x = args.x + k;
    accumulate_rows<Element, kTile, true>(w, x, args.x_stride, args.rows, n, total);
    for (int r = 0; r < kTile; ++r) w.row[r] += n;
  }
  for (int r = 0; r < kTile; ++r) {
    for (int64_t m = 0; m < args.rows; ++m) y[r][m * kRun] = rounded_sum(total[r * kMaxRows + m]);
  }
}

template <class Element>
void epilogue_rows(const LinearArgs& args, const float* y, int64_t y_stride, const float* up, int64_t begin,
                   int64_t count) {
  using Storage = typename Element::Storage;
  const auto* bias = static_cast<const Storage*>(args.bias);
  const auto* residual = static_cast<const Storage*>(args.residual);
  with_activation(args.activation, [&](auto tag) {
    for (int64_t m = 0; m < args.rows; ++m) {
      epilogue<Element, decltype(tag)::value>(
          y + m * y_stride, up != nullptr ? up + m * y_stride : nullptr,
          bias != nullptr ? bias + begin : nullptr,
          residual != nullptr ? residual + m * args.out_features + begin : nullptr,
          static_cast<Storage*>(args.out) + m * args.out_stride + begin, count);
    }
  });
}

// Outputs [begin, end) as kStreams streams of equal length, or with a gate as half as many of both weights;
// returns where the streams end, fewer than kStreams outputs before `end`. The sums of an output run in the
// same order whatever the number of streams.
template <class Element, int kStreams, bool kGated>
int64_t linear_streams(const LinearArgs& args, int64_t begin, int64_t end) {
  using Storage = typename Element::Storage;
  constexpr int kEach = kGated ? kStreams / 2 : kStreams;
  alignas(32) float y[kStreams][kMaxRows * kRun];
  const int64_t length = (end - begin) / kEach;
  for (int64_t i = 0; i < length; i += kRun) {
    const int64_t count = min_of(kRun, length - i);
    for (int64_t j = 0; j < count; ++j) {
      TileRows<Element, kStreams> w;
      float* to[kStreams];
      for (int s = 0; s < kStreams; ++s) {
        const bool is_up = kGated && s >= kEach;
        const auto* weight = static_cast<const Storage*>(is_up ? args.up_weight : args.weight);
        w.row[s] =
            weight + (begin + s % kEach * length + i + j) * (is_up ? args.up_stride : args.weight_stride);
        to[s] = y[s] + j;
      }
      dot_tile<Element, kStreams>(args, w, to);
    }
    for (int s = 0; s < kEach; ++s) {
      epilogue_rows<Element>(args, y[s], kRun, kGated ? y[kEach + s] : nullptr, begin + s * length + i,
                             count);
    }
  }
  return begin + kEach * length;
}

template <class Element>
void linear_range(const LinearArgs& args, int64_t begin, int64_t end) {
  if (args.up_weight != nullptr) {
    linear_streams<Element, 2, true>(args, linear_streams<Element, kRowStreams, true>(args, begin, end), end);
  } else {
    linear_streams<Element, 1, false>(args, linear_streams<Element, kRowStreams, false>(args, begin, end),
                                      end);
  }
}

// ---- Conv1D layout ------------------------------------------------------------------------------------

constexpr int kStreams = 8;               // weight rows read at once, each from its own piece of memory
constexpr int64_t kPrefetchBytes = 1024;  // ahead in the same stream
// Float32 sums one pass keeps: half of a 48 KiB first-level cache.
constexpr int64_t kPassFloats = 6144;
// Outputs merged before bias and activation are applied to them.
constexpr int64_t kChunk = 64;

// sums[m][c] += sum over streams s of x[m][s] * w[s][c], for kM rows and kVectors vectors of columns.
template <class Element, int kS, int kM, int kVectors>
HF_INLINE void axpy_tile(const typename Element::Storage* const (&w)[kS], const float (*x)[kS], int64_t c,
                         float* sums, int64_t stride) {
  __m256 sum[kM][kVectors];
  for (int m = 0; m < kM; ++m) {
    for (int v = 0; v < kVectors; ++v) sum[m][v] = _mm256_setzero_ps();
  }
#pragma GCC unroll 8
  for (int s = 0; s < kS; ++s) {
    __m256 weight[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) weight[v] = Element::load(w[s] + c + v * kLanes);
#pragma GCC unroll 4
    for (int m = 0; m < kM; ++m) {
      const __m256 value = _mm256_broadcast_ss(&x[m][s]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[m][v] = _mm256_fmadd_ps(weight[v], value, sum[m][v]);
    }
  }
  // The streams are summed from zero first: the chain in memory is then kS times shorter, and rounds less.
  for (int m = 0; m < kM; ++m) {
    for (int v = 0; v < kVectors; ++v) {
      float* to = sums + m * stride + c + v * kLanes;
      _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), sum[m][v]));
    }
  }
}

// The last columns, fewer than a vector; same order of sums.
template <class Element, int kS>
void axpy_tail(const typename Element::Storage* const (&w)[kS], const float (*x)[kS], int64_t rows, int64_t c,
               int64_t count, float* sums, int64_t stride) {
  for (int64_t m = 0; m < rows; ++m) {
    __m256 sum = _mm256_setzero_ps();
    for (int s = 0; s < kS; ++s) {
      sum = _mm256_fmadd_ps(Element::load(w[s] + c, count), _mm256_broadcast_ss(&x[m][s]), sum);
    }
    float* to = sums + m * stride + c;
    F32::store(to, _mm256_add_ps(F32::load(to, count), sum), count);
  }
}

// Adds rows k + s * length + j (stream s, step j) times x to sums[m][n], n in [n_begin, n_end).
template <class Element, int kS>
void axpy_streams(const LinearArgs& args, int64_t k, int64_t length, int64_t n_begin, int64_t n_end,
                  float* sums, int64_t stride) {
  using Storage = typename Element::Storage;
  constexpr int64_t kLine = kCacheLineBytes / static_cast<int64_t>(sizeof(Storage));
  constexpr int64_t kAhead = kPrefetchBytes / static_cast<int64_t>(sizeof(Storage));
  const int64_t rows = args.rows;
  for (int64_t j = 0; j < length; ++j) {
    const Storage* w[kS];
    float x[kMaxRows][kS];
    for (int s = 0; s < kS; ++s) {
      const int64_t input = k + s * length + j;
      w[s] = static_cast<const Storage*>(args.weight) + input * args.weight_stride;
      for (int64_t m = 0; m < rows; ++m) x[m][s] = args.x[m * args.x_stride + input];
    }
    int64_t c = n_begin;
    for (; c + kLine <= n_end; c += kLine) {
#pragma GCC unroll 8
      for (int s = 0; s < kS; ++s)
        _mm_prefetch(reinterpret_cast<const char*>(w[s] + c + kAhead), _MM_HINT_T0);
      if (rows == 1) {
        for (int64_t i = 0; i < kLine; i += 2 * kLanes)
          axpy_tile<Element, kS, 1, 2>(w, x, c + i, sums, stride);
        continue;
      }
      for (int64_t i = 0; i < kLine; i += 2 * kLanes) {
        int64_t m = 0;
        for (; m + 4 <= rows; m += 4) {
          axpy_tile<Element, kS, 4, 2>(w, x + m, c + i, sums + m * stride, stride);
        }
        for (; m + 2 <= rows; m += 2)
          axpy_tile<Element, kS, 2, 2>(w, x + m, c + i, sums + m * stride, stride);
        if (m < rows) axpy_tile<Element, kS, 1, 2>(w, x + m, c + i, sums + m * stride, stride);
      }
    }
    for (; c + kLanes <= n_end; c += kLanes) {
      for (int64_t m = 0; m < rows; ++m) axpy_tile<Element, kS, 1, 1>(w, x + m, c, sums + m * stride, stride);
    }
    if (c < n_end) axpy_tail<Element, kS>(w, x, rows, c, n_end - c, sums, stride);
  }
}

template <class Element>
void conv1d_range(const LinearArgs& args, int64_t k_begin, int64_t k_end, int64_t n_begin, int64_t n_end,
                  float* partial, int64_t stride) {
  const int64_t length = (k_end - k_begin) / kStreams;
  const int64_t rest = k_begin + length * kStreams;
  const int64_t width = kPassFloats / args.rows / kLanes * kLanes;
  for (int64_t n = n_begin; n < n_end; n += width) {
    const int64_t stop = min_of(n + width, n_end);
    for (int64_t m = 0; m < args.rows; ++m) {
      for (int64_t c = n; c < stop; ++c) partial[m * stride + c] = 0.0f;
    }
    axpy_streams<Element, kStreams>(args, k_begin, length, n, stop, partial, stride);
    axpy_streams<Element, 1>(args, rest, k_end - rest, n, stop, partial, stride);
  }
}

template <class Element>
void merge_range(const LinearArgs& args, int64_t n_begin, int64_t n_end, const float* partials, int64_t parts,
                 int64_t part_stride, int64_t partial_stride) {
  alignas(32) float y[kMaxRows * kChunk];
  for (int64_t n = n_begin; n < n_end; n += kChunk) {
    const int64_t count = min_of(kChunk, n_end - n);
    for (int64_t m = 0; m < args.rows; ++m) {
      for (int64_t i = 0; i < count; i += kLanes) {  // partial rows are padded to whole vectors
        const float* from = partials + m * partial_stride + n + i;
        __m256 sum = _mm256_loadu_ps(from);
        for (int64_t p = 1; p < parts; ++p) sum = _mm256_add_ps(sum, _mm256_loadu_ps(from + p * part_stride));
        _mm256_store_ps(y + m * kChunk + i, sum);
      }
    }
    epilogue_rows<Element>(args, y, kChunk, nullptr, n, count);
  }
}

}  // namespace

void linear_avx2(const LinearArgs& args, int64_t begin, int64_t end) {
  with_element(args.dtype, [&](auto element) { linear_range<decltype(element)>(args, begin, end); });
}

void conv1d_avx2(const LinearArgs& args, int64_t k_begin, int64_t k_end, int64_t n_begin, int64_t n_end,
                 float* partial, int64_t partial_stride) {
  with_element(args.dtype, [&](auto element) {
    conv1d_range<decltype(element)>(args, k_begin, k_end, n_begin, n_end, partial, partial_stride);
  });
}

void conv1d_merge_avx2(const LinearArgs& args, int64_t n_begin, int64_t n_end, const float* partials,
                       int64_t parts, int64_t part_stride, int64_t partial_stride) {
  with_element(args.dtype, [&](auto element) {
    merge_range<decltype(element)>(args, n_begin, n_end, partials, parts, part_stride, partial_stride);
  });
}

}  // namespace hf_fastpath
