// The table of routes: which kernels compute a product on a GPU. The first row that fits is taken.
#include <string>

#include "common/routes_cuda.h"
#include "gemv/gemv.h"
#include "weights/packed_format.h"

namespace hf_fastpath {
namespace {

// The packed formats that have kernels; and all of them.
constexpr WeightSet packed_with_kernels() {
  WeightSet set = 0;
  for (int format = 0; format <= static_cast<int>(kLastPackedFormat); ++format) {
    if (has_gpu_products(static_cast<PackedFormat>(format))) set |= packed_weight(format);
  }
  return set;
}
constexpr WeightSet kPacked = packed_with_kernels();
// Those that have kernels and records.
constexpr WeightSet packed_with_records() {
  WeightSet set = 0;
  for (int format = 0; format <= static_cast<int>(kLastPackedFormat); ++format) {
    const auto each = static_cast<PackedFormat>(format);
    if (has_kernels(each) && has_records(each)) set |= packed_weight(format);
  }
  return set;
}
constexpr WeightSet kRecords = packed_with_records();
constexpr WeightSet kAnyPacked = packed_weight(static_cast<int>(kLastPackedFormat) + 1) - packed_weight(0);
constexpr WeightSet kPlain = kPlainWeight, kTransposed = kTransposedWeight;

constexpr DTypeSet kF32 = set_of(DType::kFloat32);
constexpr DTypeSet k16 = set_of(DType::kFloat16) | set_of(DType::kBFloat16), kAnyType = kF32 | k16;

constexpr int64_t kMany = INT64_MAX;
constexpr CallFacts kNothing = 0, kMore = kNorm | kAppend;  // than a product
constexpr auto kAny = CudaCode::kAny, kHopper = CudaCode::kHopper, kWgmma = CudaCode::kWgmma;

void gemv_mma(const GemvParams& params, const RopeAppendParams*, cudaStream_t stream) {
  launch_gemv_mma(params, stream);
}
void gemv_rows(const GemvParams& params, const RopeAppendParams*, cudaStream_t stream) {
  launch_gemv_rows(params, stream);
}

constexpr CudaRoute gemv(const char* name, WeightSet weights, DTypeSet dtypes, int64_t min, int64_t max,
                         CudaCode code, CallFacts needs, CallFacts lacks, LaunchGemv* launch) {
  return {name, CudaProduct::kGemv, weights, dtypes, {min, max}, code, needs, lacks, launch, false};
}
constexpr CudaRoute packed(const char* name, CudaProduct product, WeightSet weights, DTypeSet dtypes,
                           int64_t max, CudaCode code, CallFacts needs, CallFacts lacks, bool dequantizes) {
  return {name, product, weights, dtypes, {1, max}, code, needs, lacks, nullptr, dequantizes};
}

// What a step of a model reaches with kernels of gemv, share of read bandwidth on an H200, 2026-11
// (docs/performance.md; benchmarks/trace_step.py and bench_ops.py give the figures again):
//   gemv_ring: Mistral-7B fp16 93 %, TinyLlama bf16 73; code for sm_80 80 and 47, gemv_rows there 72, 46
//   gemv_ring_rows: Mistral-7B fp16 with 2, 4, 8 rows 89, 86, 83 %; for sm_80 77 with 2, 71 with 8
//   gemv_wgmma: see there
//   gemv_mma: 9 to 16 rows 57 to 82 % for single products; for sm_80 a step of 8 rows 70
//   gemv_columns_mma: GPT-2 fp16 20 %, on CUDA cores 18
//   gemv_columns: GPT-2 fp32 30 %
//   gemv_rows: everything else
constexpr CudaRoute kRoutes[] = {
    // Before Hopper only 16-bit types have a ring.
    gemv("gemv_ring", kPlain, kF32, 1, 1, kHopper, kRing | kFewChunks, kNothing, launch_gemv_ring),
    gemv("gemv_ring", kPlain, k16, 1, 1, kAny, kRing | kFewChunks, kNothing, launch_gemv_ring),
    // Registers are short for factors 1 + weight.
    gemv("gemv_ring_rows", kPlain, k16, 2, 8, kAny, kRing, kLayerNorm | kOffsetNorm, launch_gemv_ring_rows),
    gemv("gemv_wgmma", kPlain, k16, 9, kMaxWgmmaRows, kWgmma, kAligned, kMore, launch_gemv_wgmma),
    gemv("gemv_mma", kPlain, k16, 2, kMaxGemvRows, kAny, kAligned, kMore, gemv_mma),
    gemv("gemv_columns_mma", kTransposed, k16, 1, kMaxGemvRows, kAny, kColumns | kAligned, kNothing,
         launch_gemv_columns_mma),
    gemv("gemv_columns", kTransposed, kAnyType, 1, kMaxGemvRows, kAny, kColumns, kNothing,
         launch_gemv_columns),
    gemv("gemv_rows", kPlain, kAnyType, 1, kMaxGemvRows, kAny, kNothing, kMore, gemv_rows),

    // Rows that are appended come four at a time in float32, which take the sixteen columns of a product.
    packed("packed_gemv", CudaProduct::kPackedGemv, kPacked, kF32, 4, kAny, kNothing,
           kLayerNorm | kHeadAppend, false),
    packed("packed_gemv", CudaProduct::kPackedGemv, kPacked, kF32, kMany, kAny, kNothing,
           kLayerNorm | kAppend, false),
    packed("packed_gemv", CudaProduct::kPackedGemv, kPacked, k16, kMany, kAny, kNothing,
           kLayerNorm | kHeadAppend, false),
    packed("packed_gemv_records", CudaProduct::kPackedGemv, kRecords, kAnyType, kMany, kAny, kNothing, kMore,
           false),
    packed("dequantized_gemv", CudaProduct::kPackedGemv, kAnyPacked & ~kPacked & ~kRecords, kAnyType, kMany,
           kAny, kDense, kAppend, true),

    // From 4,096 rows on the kernel loses more to PyTorch's product than dequantizing the weight in front of
    // that takes (H200).
    packed("packed_gemm", CudaProduct::kPackedGemm, kPacked, k16, 4095, kWgmma, kIndexed, kNothing, false),
    packed("dequantized_gemm", CudaProduct::kPackedGemm, kAnyPacked, kAnyType, kMany, kAny, kNothing,
           kNothing, true),
};
constexpr int kRouteCount = sizeof(kRoutes) / sizeof(kRoutes[0]);

// The first route that fits where `has(code)` says which code there is, or null.
template <class Has>
const CudaRoute* first_fit(const CudaAsk& ask, const Has& has) {
  for (const CudaRoute& route : kRoutes) {
    if (route.product != ask.product || (route.weights & ask.weight) == 0) continue;
    if ((route.dtypes & set_of(ask.dtype)) == 0 || ask.rows < route.rows.min || ask.rows > route.rows.max)
      continue;
    if ((ask.facts & route.needs) != route.needs || (ask.facts & route.lacks) != 0) continue;
    if (has(route.code)) return &route;
  }
  return nullptr;
}

}  // namespace

const CudaRoute* find_cuda_route(const CudaAsk& ask) { return first_fit(ask, has_cuda_code); }

}  // namespace hf_fastpath

// ---- for hf_fastpath/native/cuda.py -----------------------------------------------------------------------

#define HF_FASTPATH_EXPORTED extern "C" __attribute__((visibility("default")))

namespace hf_fastpath {
namespace {

constexpr const char* kProducts[] = {"gemv", "packed_gemv", "packed_gemm"};
constexpr const char* kDTypes[] = {"float32", "float16", "bfloat16"};
constexpr const char* kCodes[] = {"", "hopper", "wgmma"};
constexpr const char* kFacts[] = {"norm", "layer_norm", "offset_norm", "append", "head_append", "aligned",
                                  "ring", "few_chunks", "columns",     "dense",  "indexed"};

std::string names_in(uint32_t set, const char* const* names, int count) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    if ((set >> i & 1u) != 0) text += std::string(text.empty() ? "\"" : ", \"") + names[i] + "\"";
  }
  return "[" + text + "]";
}

std::string json_of(const CudaRoute& route) {
  const char* weights[2 + sizeof(kPackedTraits) / sizeof(kPackedTraits[0])] = {"plain", "transposed"};
  int count = 2;
  for (const PackedTraits& traits : kPackedTraits) weights[count++] = traits.name;
  const std::string most = route.rows.max == kMany ? "null" : std::to_string(route.rows.max);
  std::string text = std::string("{\"name\": \"") + route.name + "\", \"products\": [\"" +
                     kProducts[static_cast<int>(route.product)] + "\"], \"weights\": ";
  text += names_in(route.weights, weights, count) + ", \"dtypes\": " + names_in(route.dtypes, kDTypes, 3);
  text += ", \"rows\": [" + std::to_string(route.rows.min) + ", " + most + "], \"code\": \"" +
          kCodes[static_cast<int>(route.code)] + "\", \"needs\": ";
  constexpr int kFactCount = sizeof(kFacts) / sizeof(kFacts[0]);
  return text + names_in(route.needs, kFacts, kFactCount) +
         ", \"lacks\": " + names_in(route.lacks, kFacts, kFactCount) + "}";
}

}  // namespace
}  // namespace hf_fastpath

// The table as JSON. The text lies in memory of the calling thread.
HF_FASTPATH_EXPORTED const char* hf_fastpath_cuda_routes() {
  using namespace hf_fastpath;
  thread_local std::string text;
  text.clear();
  for (const CudaRoute& route : kRoutes) text += (text.empty() ? "[" : ", ") + json_of(route);
  text += "]";
  return text.c_str();
}

// Numbers of the routes that 1, 2, ... `count` rows find where there is code of these kinds, by the bits of
// their numbers; -1 for none. `weight`: one bit of a WeightSet.
HF_FASTPATH_EXPORTED void hf_fastpath_find_cuda_routes(int product, unsigned weight, int dtype,
                                                       unsigned facts, unsigned codes, int count,
                                                       int* found) {
  using namespace hf_fastpath;
  for (int i = 0; i < count; ++i) {
    const CudaAsk ask{static_cast<CudaProduct>(product), weight, static_cast<DType>(dtype), i + 1, facts};
    const CudaRoute* const route =
        first_fit(ask, [&](CudaCode code) { return (codes >> static_cast<int>(code) & 1u) != 0; });
    found[i] = route == nullptr ? -1 : static_cast<int>(route - kRoutes);
  }
}
