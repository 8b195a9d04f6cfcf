// What: rows of the embedding at the new tokens, with those of a position embedding added, and rows of other
//   tables at the tokens' positions.
// Work split: a block a row. The kernel behind may start at once: the first products of a step ask for their
//   weights meanwhile.
// Traffic: the rows, read and written once.
// Roofline: latency: an index, then a row.

#include <cassert>

#include "common/async.cuh"
#include "common/numeric.cuh"
#include "step_inputs/step_inputs_cuda.h"

namespace hf_fastpath {
namespace {

constexpr int kThreads = 256;

template <class T>
__device__ __forceinline__ const T* row_of(const GatheredTable& table, int64_t row) {
  assert(row >= 0 && row < table.count &&
         "hf_fastpath::step_inputs: a token or position is outside its table");
  return static_cast<const T*>(table.rows) + row * table.stride;
}

template <class T, int kElems>
__global__ void __launch_bounds__(kThreads) step_inputs_kernel(const __grid_constant__ StepInputsParams p) {
  using C = Chunk<T, kElems>;
  allow_next_kernel();
  const int token = blockIdx.x;
  const GatheredTable& table = p.tables[blockIdx.y];
  const bool adds = blockIdx.y == 0 && p.position_embedding.rows != nullptr;
  const T* from = row_of<T>(table, blockIdx.y == 0 ? p.token_ids[token] : p.positions[token]);
  const T* added = adds ? row_of<T>(p.position_embedding, p.positions[token] + p.position_offset) : nullptr;
  T* to = static_cast<T*>(table.out) + int64_t(token) * table.width;
  for (int i = threadIdx.x * kElems; i < table.width; i += kThreads * kElems) {
    float values[kElems], more[kElems];
    C::unpack(C::load(from + i), values);
    if (adds) {
      C::unpack(C::load(added + i), more);
#pragma unroll
      for (int e = 0; e < kElems; ++e) values[e] += more[e];
    }
    C::store(to + i, values);
  }
  trace(TracePoint::kEnd);
}

template <class T>
bool has_aligned_rows(const GatheredTable& table) {
  return is_aligned16(table.rows) && is_aligned16(table.out) && table.stride % kVecElems<T> == 0 &&
         table.width % kVecElems<T> == 0;
}

}  // namespace

void launch_step_inputs(const StepInputsParams& params, cudaStream_t stream) {
  if (params.tokens == 0) return;
  with_type(params.dtype, [&](auto zero) {
    using T = decltype(zero);
    bool aligned = !params.position_embedding.rows || has_aligned_rows<T>(params.position_embedding);
    for (int i = 0; i < params.num_tables; ++i) aligned = aligned && has_aligned_rows<T>(params.tables[i]);
    const auto kernel = aligned ? step_inputs_kernel<T, kVecElems<T>> : step_inputs_kernel<T, 1>;
    const bool programmatic_launch = false;  // it may follow a kernel that writes tokens or positions
    HF_FASTPATH_CUDA_CHECK(launch_programmatic(kernel, dim3(params.tokens, params.num_tables), dim3(kThreads),
                                               0, stream, programmatic_launch, params));
  });
}

}  // namespace hf_fastpath
