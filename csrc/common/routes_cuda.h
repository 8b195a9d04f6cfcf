// Which kernels compute a product on a GPU: the first row that fits of one table (products/select_cuda.cu).
// Free of torch.
#pragma once

#include <cuda_runtime.h>

#include "common/routes.h"

namespace hf_fastpath {

struct GemvParams;        // gemv/gemv.h
struct RopeAppendParams;  // rope_append/rope_append.h

// What asks for a route.
enum class CudaProduct : int {
  kGemv,  // gemv, gemv_swiglu and qkv_rope_append
  kPackedGemv,
  kPackedGemm,
};

// Code that this library has and that the current device runs, beside what all have.
enum class CudaCode : int { kAny, kHopper, kWgmma };
bool has_cuda_code(CudaCode code);

// What is true of a call, beside its weight, dtype and rows. Each op finds those that its routes ask for.
using CallFacts = uint32_t;
constexpr CallFacts kNorm = 1u << 0;        // in front of the product, of any kind
constexpr CallFacts kLayerNorm = 1u << 1;   // of this kind
constexpr CallFacts kOffsetNorm = 1u << 2;  // whose factors are 1 + weight
constexpr CallFacts kAppend = 1u << 3;      // of what comes out to a cache
constexpr CallFacts kHeadAppend = 1u << 4;  // for which a whole head has to be there
constexpr CallFacts kAligned = 1u << 5;     // rows of x and of the weights are whole chunks of 16 bytes
constexpr CallFacts kRing = 1u << 6;        // so are the norm's and an append's, as copies to rings want them
constexpr CallFacts kFewChunks = 1u << 7;   // a row of x fits the registers of a block
constexpr CallFacts kColumns = 1u << 8;     // fits_gemv_columns()
constexpr CallFacts kDense = 1u << 9;       // a route of kGemv takes it, once its weight is dequantized
constexpr CallFacts kIndexed = 1u << 10;    // tiles and scales are counted in 32 bits

using LaunchGemv = void(const GemvParams& params, const RopeAppendParams* rope, cudaStream_t stream);

struct CudaRoute {
  const char* name;
  CudaProduct product;
  WeightSet weights;
  DTypeSet dtypes;
  struct {
    int64_t min, max;
  } rows;  // of x
  CudaCode code;
  CallFacts needs, lacks;
  LaunchGemv* gemv;  // of kGemv; else null, as the op launches the kernels of its formats
  bool dequantizes;  // the weight, for a product of floats
};

struct CudaAsk {
  CudaProduct product;
  WeightSet weight;  // one of them
  DType dtype;
  int64_t rows;
  CallFacts facts;
};

// The first route that fits, or null.
const CudaRoute* find_cuda_route(const CudaAsk& ask);

}  // namespace hf_fastpath
