// Which kernels compute a product on the CPU: the first row that fits of one table (products/select_cpu.cpp).
// Free of torch.
#pragma once

#include <cstdint>

#include "common/cpu_features.h"
#include "common/routes.h"

namespace hf_fastpath {

struct GemmArgs;    // gemm/gemm_cpu.h
struct LinearArgs;  // gemv/gemv_cpu.h
struct RowView;     // common/rows_glue.h
enum class XLayout : int;

// What asks for a route.
enum class Product : int {
  kLinearOfFloats,  // kernels of gemv over x in float32
  kLinear,          // kernels of gemv over x in the layout that the route says
  kGemm,
  kPackedGemv,  // of up to kDequantizedRows rows
  kPackedGemm,
};

// What a route asks of the tuning.
enum class Tuned : int { kAny, kPrefersBf16Dot, kOthersF32Gemm };

// `args` but for x, and x as it lies in memory. False where the route declines, as a result may be wrong:
// then the next route that fits writes all of it.
using RunProduct = bool(const GemmArgs& args, const RowView& x);

struct Route {
  const char* name;
  uint32_t products;  // bits 1 << Product
  WeightSet weights;
  DTypeSet dtypes;
  struct {
    int64_t min, max;
  } rows;  // of x
  CpuFeatures needs, lacks;
  Tuned tuning;
  RunProduct* run;  // null of kLinear and kLinearOfFloats, which have
  void (*linear)(const LinearArgs& args, int64_t begin, int64_t end);
  XLayout layout;
};

struct ProductAsk {
  Product product;
  WeightSet weight;  // one of them
  DType dtype;
  int64_t rows;
};

// The first route behind `behind` that fits, or behind none the first of all. Every ask has one.
const Route& find_route(const ProductAsk& ask, const Route* behind = nullptr);

// Computes a product by the first route that fits and does not decline.
void run_product(Product product, const GemmArgs& args, const RowView& x);

}  // namespace hf_fastpath
