// A matrix product of 1 to 64 x rows by the kernel of its route.

#include <stdexcept>
#include <string>

#include "common/routes_cuda.h"
#include "gemv/gemv_device.cuh"

namespace hf_fastpath {
namespace {

// What routes ask of a call.
CallFacts facts_of(const GemvParams& p, const RopeAppendParams* rope) {
  const auto fact = [](CallFacts facts, bool holds) { return holds ? facts : 0; };
  return norm_facts(p.norm) | fact(kAppend, rope != nullptr) | fact(kAligned, has_aligned_rows(p)) |
         fact(kRing, fits_ring(p, rope)) | fact(kFewChunks, has_few_chunks(p)) |
         fact(kColumns, fits_gemv_columns(p, rope));
}

const CudaRoute* route_of(const GemvParams& p, const RopeAppendParams* rope) {
  const WeightSet weight = p.transposed ? kTransposedWeight : kPlainWeight;
  return find_cuda_route({CudaProduct::kGemv, weight, p.dtype, p.m, facts_of(p, rope)});
}

}  // namespace

CallFacts norm_facts(const GemvNorm& norm) {
  CallFacts facts = norm.kind == NormKind::kNone ? 0 : kNorm;
  if (norm.kind == NormKind::kLayer) facts |= kLayerNorm;
  if (norm.weight_offset != 0.f) facts |= kOffsetNorm;
  return facts;
}

// Whole, aligned 16-byte chunks of x, of weight rows and of a norm.
bool fits_ring(const GemvParams& p, const RopeAppendParams* rope) {
  bool fits =
      p.n > 0 && p.k > 0 && has_aligned_rows(p) && is_aligned16(p.norm.weight) && is_aligned16(p.norm.bias);
  if (p.norm.kind != NormKind::kNone) fits = fits && p.norm.weight;
  if (rope) fits = fits && rope->head_dim % 2 == 0;
  return fits;
}

bool fits_one_kernel(const GemvParams& params, const RopeAppendParams* rope) {
  return route_of(params, rope) != nullptr;
}

void launch_gemv(const GemvParams& params, const RopeAppendParams* rope, cudaStream_t stream) {
  if (params.n == 0) return;
  const CudaRoute* const route = route_of(params, rope);
  if (!route) {
    throw std::runtime_error("hf_fastpath: x has " + std::to_string(params.m) + " rows, expected at most " +
                             std::to_string(kMaxGemvRows) +
                             " (64 with aligned 16-bit rows of [out, in] weights, on compute capability "
                             "9.0): use nn.Linear");
  }
  route->gemv(params, rope, stream);
}

}  // namespace hf_fastpath
