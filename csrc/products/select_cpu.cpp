// The table of routes: which kernels compute a product on the CPU. The first row that fits is taken; a route
// may decline at run time, and then the next row that fits is. The numbers of rows were measured:
// docs/lab/gemm.md, docs/lab/gemv_cpu.md, docs/lab/packed_gemm.md and docs/lab/packed_gemv_cpu.md say where.
#include <stdexcept>
#include <string>

#include "common/cpu_names.h"
#include "common/routes_cpu.h"
#include "common/rows_glue.h"
#include "gemm/gemm_cpu.h"
#include "gemm/gemm_routes_cpu.h"
#include "gemv/gemv_cpu.h"
#include "packed_gemm/packed_gemm_routes_cpu.h"
#include "packed_gemv/packed_gemv_routes_cpu.h"
#include "weights/packed_format.h"

namespace hf_fastpath {
namespace {

constexpr uint32_t bit(Product product) { return 1u << static_cast<int>(product); }
constexpr uint32_t kOfFloats = bit(Product::kLinearOfFloats);
constexpr uint32_t kLinear = bit(Product::kLinear);
constexpr uint32_t kGemm = bit(Product::kGemm);
constexpr uint32_t kFewPacked = bit(Product::kPackedGemv);
constexpr uint32_t kManyPacked = bit(Product::kPackedGemm);

constexpr WeightSet of(PackedFormat format) { return packed_weight(static_cast<int>(format)); }
constexpr WeightSet kInt4 = of(PackedFormat::kInt4);

// The packed formats that have kernels and for which `has` holds.
template <class Has>
constexpr WeightSet packed_that(const Has& has) {
  WeightSet set = 0;
  for (int format = 0; format <= static_cast<int>(kLastPackedFormat); ++format) {
    const auto each = static_cast<PackedFormat>(format);
    if (has_kernels(each) && has(each)) set |= packed_weight(format);
  }
  return set;
}
constexpr WeightSet kPacked = packed_that([](PackedFormat) { return true; });
constexpr WeightSet kFloats = packed_that([](PackedFormat format) { return is_float(format); });
constexpr WeightSet kIntegers = kPacked & ~kFloats;
constexpr WeightSet kBytes = packed_that([](PackedFormat format) { return bits_of(format) == 8; });
constexpr WeightSet kNibbles = kPacked & ~kBytes;
constexpr WeightSet kTables = packed_that(has_table);
constexpr WeightSet kInt8 = kBytes & ~kFloats, kInt4G32 = kNibbles & ~kTables & ~kInt4;  // of any groups
// All of them, also those without kernels, which are read one weight at a time.
constexpr WeightSet kAnyPacked = packed_weight(static_cast<int>(kLastPackedFormat) + 1) - packed_weight(0);
constexpr WeightSet kPlain = kPlainWeight, kInRows = kPlain | kAnyPacked,
                    kAnyWeight = kInRows | kTransposedWeight;

constexpr DTypeSet kF32 = set_of(DType::kFloat32), kF16 = set_of(DType::kFloat16);
constexpr DTypeSet kBf16 = set_of(DType::kBFloat16), k16 = kF16 | kBf16, kAnyType = kF32 | k16;

constexpr int64_t kMany = INT64_MAX;
constexpr CpuFeatures kNone = kBaseline;
constexpr CpuFeatures kTiles = kAmxBf16 | kBf16Dot;  // what *_amx_avx512_bf16.cpp needs
constexpr auto kAny = Tuned::kAny, kDot = Tuned::kPrefersBf16Dot;
constexpr auto kFloatLayout = XLayout::kFloats;

constexpr Route product(const char* name, uint32_t products, WeightSet weights, DTypeSet dtypes, int64_t min,
                        int64_t max, CpuFeatures needs, CpuFeatures lacks, Tuned tuning, RunProduct* run) {
  return {name, products, weights, dtypes, {min, max}, needs, lacks, tuning, run, nullptr, kFloatLayout};
}
constexpr Route linear(const char* name, uint32_t products, DTypeSet dtypes, int64_t min, CpuFeatures needs,
                       Tuned tuning, Linear* kernel, XLayout layout = kFloatLayout) {
  return {name, products, kPlain, dtypes, {min, kMany}, needs, kNone, tuning, nullptr, kernel, layout};
}

constexpr Route kRoutes[] = {
#if defined(__x86_64__)
    // These are the kernels of gemv. The tiles of AMX pay off from five rows on.
    linear("linear_amx", kLinear, k16, 5, kAmxBf16, kAny, linear_amx, XLayout::kAmxTiles),
    linear("linear_avx512_bf16", kLinear, kBf16, 1, kBf16Dot, kDot, linear_avx512_bf16, XLayout::kBFloat16),
    linear("linear_avx512", kLinear | kOfFloats, kAnyType, 1, kAvx512, kAny, linear_avx512),
    linear("linear_avx2", kLinear | kOfFloats, kAnyType, 1, kAvx2, kAny, linear_avx2),
#endif
    linear("linear_portable", kLinear | kOfFloats, kAnyType, 1, kNone, kAny, linear_portable),

#if defined(__x86_64__)
    // These take few rows with a quantized weight. Pairs of bfloat16 pay off from as many rows on as make
    // up for dequantizing the weight.
    product("pairs", kFewPacked, kFloats | kInt4, kBf16, 4, 512, kBf16Dot, kNone, kDot, gemm_in_pairs),
    product("pairs", kFewPacked, kInt8 | kInt4G32 | kTables, kBf16, 6, 512, kBf16Dot, kNone, kDot,
            gemm_in_pairs),
    // Tiles are the faster the more rows share a weight that is dequantized.
    product("packed_tiles", kFewPacked, kFloats, k16, 4, kMany, kTiles, kNone, kAny, packed_in_tiles),
    product("packed_tiles", kFewPacked, kInt4, kBf16, 5, kMany, kTiles, kNone, kAny, packed_in_tiles),
    product("packed_tiles", kFewPacked, kInt4, kF16, 8, kMany, kTiles, kNone, kAny, packed_in_tiles),
    product("packed_tiles", kFewPacked, kInt8 | kInt4G32 | kTables, kBf16, 6, kMany, kTiles, kNone, kAny,
            packed_in_tiles),
    product("packed_tiles", kFewPacked, kInt8 | kInt4G32 | kTables, kF16, 12, kMany, kTiles, kNone, kAny,
            packed_in_tiles),
    // Integers meet 16-bit steps; in float32 weights are dequantized once for all rows.
    product("packed_floats_avx2", kFewPacked, kIntegers, kF32, 1, kMany, kAvx2, kNone, kAny,
            packed_in_floats),
    product("packed_steps_vnni", kFewPacked, kIntegers, k16, 1, kMany, kVnni, kNone, kAny,
            packed_in_steps_vnni),
    product("packed_steps_avx512", kFewPacked, kIntegers, k16, 1, kMany, kAvx512, kNone, kAny,
            packed_in_steps_avx512),
    product("packed_fp8_vnni", kFewPacked, kFloats, kAnyType, 1, kMany, kVnni, kNone, kAny,
            packed_in_fp8_vnni),
    product("packed_fp8_avx512", kFewPacked, kFloats, kAnyType, 1, kMany, kAvx512, kNone, kAny,
            packed_in_fp8_avx512),
    // With AVX2 that is also faster for bytes, from a few rows on.
    product("packed_floats_avx2", kFewPacked, kFloats, kAnyType, 3, kMany, kAvx2, kNone, kAny,
            packed_in_floats),
    product("packed_floats_avx2", kFewPacked, kBytes & ~kFloats, k16, 5, kMany, kAvx2, kNone, kAny,
            packed_in_floats),
    product("packed_steps_avx2", kFewPacked, kIntegers, k16, 1, kMany, kAvx2, kNone, kAny,
            packed_in_steps_avx2),
    product("packed_fp8_avx2", kFewPacked, kFloats, kAnyType, 1, kMany, kAvx2, kNone, kAny,
            packed_in_fp8_avx2),
#endif
    product("packed_portable", kFewPacked, kAnyPacked, kAnyType, 1, kMany, kNone, kNone, kAny,
            packed_portable),

#if defined(__x86_64__)
    // Up to 64 rows share tiles of a weight that is dequantized once; where these decline, some rows at a
    // time are multiplied as few rows are. More rows of x are laid out in tiles themselves.
    product("packed_tiles", kManyPacked, kPacked, k16, 17, 64, kTiles, kNone, kAny, packed_in_tiles),
    product("packed_pieces_16", kManyPacked, kPacked, k16, 17, 64, kTiles, kNone, kAny, packed_in_pieces_16),
    product("amx", kGemm | kManyPacked, kPlain | kTransposedWeight | kPacked, k16, 65, kMany, kTiles, kNone,
            kAny, gemm_in_tiles),
    // Pairs of bfloat16 are used of quantized weights up to where oneDNN is as fast, and of others where the
    // kernels of gemv pass over a weight more than once.
    product("pairs", kManyPacked, kFloats | kInt4, kBf16, 4, 512, kBf16Dot, kNone, kDot, gemm_in_pairs),
    product("pairs", kManyPacked, kInt8 | kInt4G32 | kTables, kBf16, 6, 512, kBf16Dot, kNone, kDot,
            gemm_in_pairs),
    product("pairs", kGemm, kPlain, kBf16, 17, 32, kBf16Dot, kNone, kDot, gemm_in_pairs),
    // Some rows at a time go through the kernels of packed_gemv, where this takes less time than dequantizing
    // the weight: up to more rows the fewer bytes there are, and the faster products are beside x's type's.
    product("packed_pieces_16", kManyPacked, kPacked, k16, 1, 16, kAmxBf16, kNone, kAny, packed_in_pieces_16),
    product("packed_pieces_16", kManyPacked, kFloats, k16, 1, 48, kAvx512, kAmxBf16, kAny,
            packed_in_pieces_16),
    product("packed_pieces_16", kManyPacked, kFloats, kF32, 1, 48, kAvx512, kNone, kAny, packed_in_pieces_16),
    product("packed_pieces_16", kManyPacked, kIntegers, kF32, 1, 16, kAvx512, kNone, kAny,
            packed_in_pieces_16),
    product("packed_pieces_16", kManyPacked, kInt8, k16, 1, 256, kAvx512, kAmxBf16, kAny,
            packed_in_pieces_16),
    product("packed_pieces_16", kManyPacked, kNibbles, k16, 1, 96, kAvx512, kAmxBf16, kAny,
            packed_in_pieces_16),
    product("packed_pieces_32", kManyPacked, kBytes, k16, 1, 96, kAvx2, kAvx512, kAny, packed_in_pieces_32),
    product("packed_pieces_16", kManyPacked, kNibbles, k16, 1, 96, kAvx2, kAvx512, kAny, packed_in_pieces_16),
    product("packed_pieces_32", kManyPacked, kBytes, kF32, 1, 48, kAvx2, kAvx512, kAny, packed_in_pieces_32),
    product("packed_pieces_32", kManyPacked, kNibbles, kF32, 1, 32, kAvx2, kAvx512, kAny,
            packed_in_pieces_32),
    // The kernels of gemv read a weight as it lies in memory.
    product("gemv", kGemm | kManyPacked, kInRows, k16, 5, 64, kAmxBf16, kNone, kAny, gemm_by_gemv),
    product("gemv", kGemm | kManyPacked, kInRows, kAnyType, 1, 32, kAvx2, kNone, kAny, gemm_by_gemv),
#endif
    // PyTorch's product is MKL's in float32, else oneDNN's, where a CPU has faster products than float32's.
    product("torch", kGemm | kManyPacked, kAnyWeight, kF32, 1, kMany, kNone, kAvx2, kAny, gemm_by_torch),
    product("torch", kGemm | kManyPacked, kAnyWeight, kF32, 1, kMany, kNone, kNone, Tuned::kOthersF32Gemm,
            gemm_by_torch),
#if defined(__x86_64__)
    product("torch", kGemm | kManyPacked, kAnyWeight, kF16, 1, kMany, kAmxFp16, kNone, kAny, gemm_by_torch),
    product("torch", kGemm | kManyPacked, kAnyWeight, kBf16, 1, kMany, kAmxBf16, kNone, kAny, gemm_by_torch),
    product("torch", kGemm | kManyPacked, kAnyWeight, kBf16, 1, kMany, kBf16Dot, kNone, kDot, gemm_by_torch),
    product("blocked_avx512", kGemm | kManyPacked, kAnyWeight, kAnyType, 1, kMany, kAvx512, kNone, kAny,
            gemm_blocked_avx512),
    product("blocked_avx2", kGemm | kManyPacked, kAnyWeight, kAnyType, 1, kMany, kAvx2, kNone, kAny,
            gemm_blocked_avx2),
#endif
    product("widened", kGemm | kManyPacked, kAnyWeight, kAnyType, 1, kMany, kNone, kNone, kAny, gemm_widened),
};
constexpr int kRouteCount = sizeof(kRoutes) / sizeof(kRoutes[0]);

bool suits(Tuned wanted, const CpuTuning& tuning) {
  switch (wanted) {
    case Tuned::kAny:
      return true;
    case Tuned::kPrefersBf16Dot:
      return tuning.prefers_bf16_dot;
    case Tuned::kOthersF32Gemm:
      return !tuning.own_f32_gemm;
  }
  return false;
}

// The number of the first route from `begin` on that fits, or kRouteCount.
int first_fit(int begin, const ProductAsk& ask, CpuFeatures has, const CpuTuning& tuning) {
  const DTypeSet dtype = set_of(ask.dtype);
  for (int i = begin; i < kRouteCount; ++i) {
    const Route& route = kRoutes[i];
    if ((route.products & bit(ask.product)) == 0 || (route.weights & ask.weight) == 0) continue;
    if ((route.dtypes & dtype) == 0 || ask.rows < route.rows.min || ask.rows > route.rows.max) continue;
    if ((has & route.needs) != route.needs || (route.lacks != kNone && (has & route.lacks) == route.lacks))
      continue;
    if (suits(route.tuning, tuning)) return i;
  }
  return kRouteCount;
}

}  // namespace

const Route& find_route(const ProductAsk& ask, const Route* behind) {
  const int begin = behind != nullptr ? static_cast<int>(behind - kRoutes) + 1 : 0;
  const int found = first_fit(begin, ask, cpu_features(), cpu_tuning());
  if (found == kRouteCount) throw std::runtime_error("hf_fastpath: no route for a product: report this");
  return kRoutes[found];
}

void run_product(Product product, const GemmArgs& args, const RowView& x) {
  if (x.rows == 0 || args.out_features == 0) return;
  const WeightSet weight = args.packed != nullptr ? of(args.packed->format)
                           : args.transposed      ? kTransposedWeight
                                                  : kPlainWeight;
  const ProductAsk ask{product, weight, args.dtype, x.rows};
  const Route* route = nullptr;
  do {
    route = &find_route(ask, route);
  } while (!route->run(args, x));
}

}  // namespace hf_fastpath

// ---- for hf_fastpath/native/cpu.py ------------------------------------------------------------------------

#define HF_FASTPATH_EXPORTED extern "C" __attribute__((visibility("default")))

namespace hf_fastpath {
namespace {

std::string names_in(uint32_t set, const char* const* names, int count) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    if ((set >> i & 1u) != 0) text += std::string(text.empty() ? "\"" : ", \"") + names[i] + "\"";
  }
  return "[" + text + "]";
}

std::string json_of(const Route& route) {
  constexpr const char* kProducts[] = {"linear_of_floats", "linear", "gemm", "packed_gemv", "packed_gemm"};
  constexpr const char* kDTypes[] = {"float32", "float16", "bfloat16"};
  constexpr const char* kTuned[] = {"", "prefers_bf16_dot", "not own_f32_gemm"};
  const char* weights[2 + sizeof(kPackedTraits) / sizeof(kPackedTraits[0])] = {"plain", "transposed"};
  int count = 2;
  for (const PackedTraits& traits : kPackedTraits) weights[count++] = traits.name;
  std::string text = std::string("{\"name\": \"") + route.name + "\", \"products\": ";
  text +=
      names_in(route.products, kProducts, 5) + ", \"weights\": " + names_in(route.weights, weights, count);
  text += ", \"dtypes\": " + names_in(route.dtypes, kDTypes, 3) + ", \"rows\": [" +
          std::to_string(route.rows.min);
  text += ", " + (route.rows.max == kMany ? "null" : std::to_string(route.rows.max)) + "], \"needs\": [";
  text +=
      feature_names(route.needs, false, "\"") + "], \"lacks\": [" + feature_names(route.lacks, false, "\"");
  return text + "], \"tuning\": \"" + kTuned[static_cast<int>(route.tuning)] + "\"}";
}

}  // namespace
}  // namespace hf_fastpath

// The table as JSON. The text lies in memory of the calling thread.
HF_FASTPATH_EXPORTED const char* hf_fastpath_routes() {
  using namespace hf_fastpath;
  thread_local std::string text;
  text.clear();
  for (const Route& route : kRoutes) text += (text.empty() ? "[" : ", ") + json_of(route);
  text += "]";
  return text.c_str();
}

// Numbers of the routes that `count` asks of 1, 2, ... rows find on a CPU with features by number of their
// names (feature_names()) and a tuning by name, from route `begin` on; -1 for none. `weight`: one bit of a
// WeightSet.
HF_FASTPATH_EXPORTED int hf_fastpath_find_routes(int product, unsigned weight, int dtype, unsigned features,
                                                 const char* tuning, int begin, int count, int* found) {
  using namespace hf_fastpath;
  const CpuTuning* const tuned = tuning_named(tuning);
  if (tuned == nullptr) return -1;
  for (int i = 0; i < count; ++i) {
    const ProductAsk ask{static_cast<Product>(product), weight, static_cast<DType>(dtype), i + 1};
    const int route = first_fit(begin, ask, features, *tuned);
    found[i] = route == kRouteCount ? -1 : route;
  }
  return 0;
}
