// What: out = quant * scale, where quants are x / scale in float8_e4m3fn or in whole numbers. Divisions are
//   IEEE's, so that quants are those of the reference.
// Work split: of blocks with a scale, 16 lanes take a block of 128 inputs, eight inputs a lane; else a thread
//   block has a row, finds the largest magnitude and reads x once more. Where outliers of one row keep a
//   column in all rows, a kernel in front marks these columns, a thread each, 64 rows a thread block. An RMS
//   norm in front of blocks is a part of the kernel, which then has a thread block a row.
// Traffic: x once or twice, of which the second comes out of L1, and out once.
// Roofline: latency of one load and one store for few rows, as of a norm; bandwidth for many.
#include <cuda_fp8.h>

#include "common/async.cuh"
#include "common/cuda_check.cuh"
#include "common/inverse_root.cuh"
#include "common/numeric.cuh"
#include "common/row_norm.cuh"
#include "common/warp.cuh"
#include "fake_quantize/fake_quantize.h"

namespace hf_fastpath {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 8, kBlockLanes = kFakeBlock / kEach;  // inputs of a lane, and lanes of a block
constexpr int kMarkedRows = 64;
// Rows up to which a kernel starts before the one in front is complete, as a norm does.
constexpr int64_t kMaxOverlappingRows = 64;

template <class T>
struct FakeQuantizeView {
  const T* x;
  T* out;
  int64_t rows, stride;
  int columns;
  float limit;
  uint8_t* marks;
  bool overlaps, aligned;  // aligned: rows of x and out start at 16 bytes, and are whole lanes

  __device__ __forceinline__ void begin() const {
    if (!overlaps) return;
    allow_next_kernel();
    wait_for_previous_kernel();
    drop_l1();
  }
};

__device__ __forceinline__ float nearest_float8(float value) {  // of magnitudes up to 448
  const __nv_fp8_e4m3 quant(value);
  return static_cast<float>(quant);
}
__device__ __forceinline__ float cut(float value, float most) {  // NaN stays NaN
  return value > most ? most : value < -most ? -most : value;
}
__device__ __forceinline__ uint32_t magnitude_bits(float value) {  // those of NaN are the largest
  return __float_as_uint(value) & 0x7fffffffu;
}
template <class T>
__device__ __forceinline__ float narrow(float value) {
  return to_float(from_float<T>(value));
}
template <class T>
constexpr float kEpsilon = std::is_same_v<T, float>    ? 0x1p-23f
                           : std::is_same_v<T, __half> ? 0x1p-10f
                                                       : 0x1p-7f;

template <InputQuants kQuants>
constexpr bool kIsNarrow = is_narrow(kQuants);
template <InputQuants kQuants>
constexpr float kSteps = steps_of(kQuants);

struct Float8Scale {
  float scale, divisor;
  __device__ __forceinline__ explicit Float8Scale(float most) {
    scale = __fdiv_rn(most, kLargestFloat8);
    divisor = scale < kLeastFakeScale ? kLeastFakeScale : scale;
  }
  __device__ __forceinline__ float operator()(float value) const {
    return nearest_float8(cut(__fdiv_rn(value, divisor), kLargestFloat8)) * scale;
  }
};

// Eight values of a row, from `at` on; those behind its end are 0.
template <class T>
__device__ __forceinline__ void load_each(const FakeQuantizeView<T>& p, int64_t row, int at,
                                          float (&to)[kEach]) {
  const T* const from = p.x + row * p.stride + at;
  if (p.aligned && at < p.columns) {
    constexpr int kElems = kVecElems<T>;
#pragma unroll
    for (int part = 0; part < kEach / kElems; ++part) {
      float some[kElems];
      Chunk<T, kElems>::unpack(Chunk<T, kElems>::load(from + part * kElems), some);
#pragma unroll
      for (int e = 0; e < kElems; ++e) to[part * kElems + e] = some[e];
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) to[e] = at + e < p.columns ? to_float(from[e]) : 0.f;
}

template <class T>
__device__ __forceinline__ void store_each(const FakeQuantizeView<T>& p, int64_t row, int at,
                                           const float (&values)[kEach]) {
  T* const to = p.out + row * p.columns + at;
  if (p.aligned && at < p.columns) {
    constexpr int kElems = kVecElems<T>;
#pragma unroll
    for (int part = 0; part < kEach / kElems; ++part) {
      float some[kElems];
#pragma unroll
      for (int e = 0; e < kElems; ++e) some[e] = values[part * kElems + e];
      Chunk<T, kElems>::store(to + part * kElems, some);
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e)
    if (at + e < p.columns) to[e] = from_float<T>(values[e]);
}

// The same, with scales, quotients and results rounded to T.
template <class T>
struct NarrowFloat8Scale {
  float scale;
  __device__ __forceinline__ explicit NarrowFloat8Scale(float most) {
    scale = narrow<T>(__fdiv_rn(most, kLargestFloat8));
    if (scale == 0.f) scale = kEpsilon<T>;
  }
  __device__ __forceinline__ float operator()(float value) const {
    return nearest_float8(cut(narrow<T>(__fdiv_rn(value, scale)), kLargestFloat8)) * scale;
  }
};

template <class T, class Scale>
__global__ void __launch_bounds__(kThreads) fake_quantize_blocks_kernel(FakeQuantizeView<T> p, int blocks) {
  p.begin();
  const int64_t unit = int64_t(blockIdx.x) * (kThreads / kBlockLanes) + threadIdx.x / kBlockLanes;
  const int64_t row = unit / blocks;
  const int at = static_cast<int>(unit % blocks) * kFakeBlock + threadIdx.x % kBlockLanes * kEach;
  float values[kEach] = {};
  if (row < p.rows) load_each(p, row, at, values);
  uint32_t most = 0;
#pragma unroll
  for (int e = 0; e < kEach; ++e) most = max(most, magnitude_bits(values[e]));
#pragma unroll
  for (int offset = 1; offset < kBlockLanes; offset *= 2)
    most = max(most, __shfl_xor_sync(kAllLanes, most, offset));
  const Scale rounded(__uint_as_float(most));
#pragma unroll
  for (int e = 0; e < kEach; ++e) values[e] = rounded(values[e]);
  if (row < p.rows) store_each(p, row, at, values);
}

// The value of x that counts for the row's scale.
template <class T, InputQuants kQuants>
__device__ __forceinline__ float counted(const FakeQuantizeView<T>& p, float value) {
  if constexpr (kQuants != InputQuants::kInt8Outliers) return value;
  const float half = narrow<__half>(value);
  return p.limit > 0.f && fabsf(half) >= p.limit ? 0.f : half;
}

template <class T, InputQuants kQuants>
__global__ void __launch_bounds__(kThreads) fake_quantize_rows_kernel(FakeQuantizeView<T> p) {
  __shared__ uint32_t largest[kThreads / kWarpSize];
  p.begin();
  const int64_t row = blockIdx.x;
  const int first = threadIdx.x * kEach, stride = kThreads * kEach;
  float values[kEach];
  uint32_t most = 0;
#pragma unroll 2
  for (int at = first; at < p.columns; at += stride) {
    load_each(p, row, at, values);
#pragma unroll
    for (int e = 0; e < kEach; ++e) most = max(most, magnitude_bits(counted<T, kQuants>(p, values[e])));
  }
  most = __reduce_max_sync(kAllLanes, most);
  if (threadIdx.x % kWarpSize == 0) largest[threadIdx.x / kWarpSize] = most;
  __syncthreads();  // every warp's largest
  most = 0;
#pragma unroll
  for (int w = 0; w < kThreads / kWarpSize; ++w) most = max(most, largest[w]);
  float magnitude = __uint_as_float(most);
  if (kQuants == InputQuants::kFp8Row && p.limit > 0.f && magnitude > p.limit) magnitude = p.limit;

  const Float8Scale float8(magnitude);
  float scale = __fdiv_rn(magnitude, kSteps<kQuants>), factor = 0.f;
  if constexpr (kIsNarrow<kQuants>) {
    scale = narrow<T>(scale);
    if (scale == 0.f && kQuants != InputQuants::kInt8Row) scale = kEpsilon<T>;
  }
  if constexpr (kQuants == InputQuants::kInt8Row) {
    if (scale < kLeastInt8Scale) scale = kLeastInt8Scale;
    factor = __fdiv_rn(1.f, scale);
  }
  if constexpr (kQuants == InputQuants::kInt8Outliers)
    factor = magnitude == 0.f ? 0.f : __fdiv_rn(1.f, magnitude) * kLargestInt8;
#pragma unroll 2
  for (int at = first; at < p.columns; at += stride) {
    load_each(p, row, at, values);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      float& value = values[e];
      if constexpr (kQuants == InputQuants::kFp8Row) {
        value = float8(value);
      } else if constexpr (kQuants == InputQuants::kFp8RowNarrow) {
        value = NarrowFloat8Scale<T>(magnitude)(value);
      } else if constexpr (kQuants == InputQuants::kInt8RowNarrow) {
        const float steps = narrow<T>(__fdiv_rn(value, scale));
        value = rintf(steps > 127.f ? 127.f : steps < -128.f ? -128.f : steps) * scale;
      } else if constexpr (kQuants == InputQuants::kInt8Row) {
        const float steps = value * factor;
        value = rintf(steps > 127.f ? 127.f : steps < -128.f ? -128.f : steps) * scale;
      } else {
        const float within = counted<T, kQuants>(p, value);
        bool stays = p.limit > 0.f && fabsf(narrow<__half>(value)) >= p.limit;
        if (p.marks) stays = at + e < p.columns && p.marks[at + e] != 0;
        if (!stays) value = rintf(within * factor) * scale;
      }
    }
    store_each(p, row, at, values);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) mark_outliers_kernel(FakeQuantizeView<T> p) {
  const int column = blockIdx.x * kThreads + threadIdx.x;
  if (column >= p.columns) return;
  const int64_t begin = int64_t(blockIdx.y) * kMarkedRows, end = min(begin + kMarkedRows, p.rows);
  bool found = false;
#pragma unroll 8
  for (int64_t row = begin; row < end; ++row)
    found |= fabsf(narrow<__half>(to_float(p.x[row * p.stride + column]))) >= p.limit;
  if (found) p.marks[column] = 1;  // others write the same
}

// An RMS norm in front, of the same bits as rms_norm's: a block a row, whose lanes keep kChunks times 16
// bytes, so that neighbors of a scale lie in lanes beside each other.
template <class T, class Scale, int kChunks>
__global__ void __launch_bounds__(kMaxNormThreads) normed_fake_quantize_kernel(NormParams<T> p) {
  constexpr int kElems = kVecElems<T>, kLanes = kFakeBlock / kElems;
  using C = Chunk<T, kElems>;
  __shared__ float scratch[kWarpSize];
  const int64_t first = blockIdx.x * int64_t(p.columns);
  typename C::Raw weight[kChunks], raw[kChunks];
  const auto place = [&](int c) { return static_cast<int>((threadIdx.x + c * blockDim.x) * kElems); };
  allow_next_kernel();
  if (!p.programmatic_launch) wait_for_previous_kernel();
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
    weight[c] = place(c) < p.columns ? C::load_shared_line(p.weight + place(c)) : C::zero();
  wait_for_previous_kernel();
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
    raw[c] = place(c) < p.columns ? C::load_l2(p.x + first + place(c)) : C::zero();
  float squares = 0.f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    float values[kElems];
    C::unpack(raw[c], values);
#pragma unroll
    for (int e = 0; e < kElems; ++e) squares = fmaf(values[e], values[e], squares);
  }
  const float scale = inverse_root<T>(block_sum(squares, scratch) / p.columns + p.eps);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    float values[kElems], factors[kElems];
    C::unpack(raw[c], values);
    C::unpack(weight[c], factors);
    uint32_t most = 0;
#pragma unroll
    for (int e = 0; e < kElems; ++e) {
      values[e] = narrow<T>(values[e] * (scale * (factors[e] + p.weight_offset)));
      most = max(most, magnitude_bits(values[e]));
    }
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2)
      most = max(most, __shfl_xor_sync(kAllLanes, most, offset));
    const Scale rounded(__uint_as_float(most));
#pragma unroll
    for (int e = 0; e < kElems; ++e) values[e] = rounded(values[e]);
    if (place(c) < p.columns) C::store(p.out + first + place(c), values);
  }
}

template <class T, class Scale>
bool launch_normed(const FakeQuantizeParams& params, cudaStream_t stream) {
  constexpr int kElems = kVecElems<T>;
  const int64_t chunks = params.columns / kElems;
  const bool aligned = params.columns % kElems == 0 && params.stride == params.columns &&
                       is_aligned16(params.x) && is_aligned16(params.out) && is_aligned16(params.norm_weight);
  if (!aligned || chunks > 4 * kMaxNormThreads) return false;
  const NormParams<T> p{static_cast<const T*>(params.x),
                        static_cast<const T*>(params.norm_weight),
                        nullptr,
                        nullptr,
                        static_cast<T*>(params.out),
                        params.rows,
                        static_cast<int>(params.columns),
                        params.norm_eps,
                        params.norm_offset,
                        params.programmatic_launch,
                        nullptr};
  const auto launch = [&](auto kernel, int each) {
    const int64_t threads = ((chunks + each - 1) / each + kWarpSize - 1) / kWarpSize * kWarpSize;
    HF_FASTPATH_CUDA_CHECK(launch_programmatic(kernel, dim3(static_cast<unsigned>(params.rows)),
                                               dim3(static_cast<unsigned>(threads)), 0, stream,
                                               params.rows <= kMaxOverlappingRows, p));
    return true;
  };
  if (chunks <= kMaxNormThreads) return launch(normed_fake_quantize_kernel<T, Scale, 1>, 1);
  if (chunks <= 2 * kMaxNormThreads) return launch(normed_fake_quantize_kernel<T, Scale, 2>, 2);
  return launch(normed_fake_quantize_kernel<T, Scale, 4>, 4);
}

template <class T>
void launch_typed(const FakeQuantizeParams& params, cudaStream_t stream) {
  FakeQuantizeView<T> p{static_cast<const T*>(params.x),
                        static_cast<T*>(params.out),
                        params.rows,
                        params.stride,
                        static_cast<int>(params.columns),
                        params.limit,
                        params.marks,
                        params.rows <= kMaxOverlappingRows && params.marks == nullptr,
                        params.columns % kEach == 0 && params.stride % kEach == 0 && is_aligned16(params.x) &&
                            is_aligned16(params.out)};
  const auto launch = [&](auto kernel, int64_t grid, auto... more) {
    HF_FASTPATH_CUDA_CHECK(launch_programmatic(kernel, dim3(static_cast<unsigned>(grid)), dim3(kThreads), 0,
                                               stream, p.overlaps, p, more...));
  };
  if (params.marks != nullptr) {
    HF_FASTPATH_CUDA_CHECK(cudaMemsetAsync(params.marks, 0, params.columns, stream));
    const dim3 grid(static_cast<unsigned>((params.columns + kThreads - 1) / kThreads),
                    static_cast<unsigned>((params.rows + kMarkedRows - 1) / kMarkedRows));
    mark_outliers_kernel<T><<<grid, kThreads, 0, stream>>>(p);
    HF_FASTPATH_CUDA_CHECK(cudaGetLastError());
  }
  switch (params.quants) {
    case InputQuants::kFp8Block:
    case InputQuants::kFp8BlockNarrow: {
      const int blocks = static_cast<int>((params.columns + kFakeBlock - 1) / kFakeBlock);
      constexpr int kUnits = kThreads / kBlockLanes;
      const int64_t grid = (params.rows * blocks + kUnits - 1) / kUnits;
      if (params.quants == InputQuants::kFp8Block)
        return launch(fake_quantize_blocks_kernel<T, Float8Scale>, grid, blocks);
      return launch(fake_quantize_blocks_kernel<T, NarrowFloat8Scale<T>>, grid, blocks);
    }
    case InputQuants::kFp8Row:
      return launch(fake_quantize_rows_kernel<T, InputQuants::kFp8Row>, params.rows);
    case InputQuants::kFp8RowNarrow:
      return launch(fake_quantize_rows_kernel<T, InputQuants::kFp8RowNarrow>, params.rows);
    case InputQuants::kInt8RowNarrow:
      return launch(fake_quantize_rows_kernel<T, InputQuants::kInt8RowNarrow>, params.rows);
    case InputQuants::kInt8Row:
      return launch(fake_quantize_rows_kernel<T, InputQuants::kInt8Row>, params.rows);
    case InputQuants::kInt8Outliers:
      return launch(fake_quantize_rows_kernel<T, InputQuants::kInt8Outliers>, params.rows);
  }
}

}  // namespace

bool launch_normed_fake_quantize(const FakeQuantizeParams& params, cudaStream_t stream) {
  bool done = false;
  with_type(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    if (params.quants == InputQuants::kFp8Block) done = launch_normed<T, Float8Scale>(params, stream);
    if (params.quants == InputQuants::kFp8BlockNarrow)
      done = launch_normed<T, NarrowFloat8Scale<T>>(params, stream);
  });
  return done;
}

void launch_fake_quantize(const FakeQuantizeParams& params, cudaStream_t stream) {
  with_type(params.dtype, [&](auto zero) { launch_typed<decltype(zero)>(params, stream); });
}

}  // namespace hf_fastpath
