// gemm on the CPU: checks, allocation, threads, and its routes, with those that use PyTorch's product; also
// of a quantized weight, whose rows are dequantized as they are needed (packed_gemm_cpu.cpp).
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <atomic>
#include <vector>

#include "common/convert_cpu.h"
#include "common/cpu_math.h"
#include "gemm/gemm_glue_cpu.h"
#include "gemm/gemm_routes_cpu.h"
#include "gemv/gemv_glue_cpu.h"
#include "weights/packed_tensors_cpu.h"

namespace hf_fastpath {

void finish_rows_portable(const FinishArgs& args, int64_t begin, int64_t end) {
  with_storage(args.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for (int64_t row = begin; row < end; ++row) {
      const T* residual = static_cast<const T*>(args.residual);
      T* out = static_cast<T*>(args.out) + row * args.stride;
      for (int64_t n = 0; n < args.columns; ++n) {
        const int64_t from = row * args.accumulator_stride + n;
        float value = args.accumulator_dtype == DType::kFloat32
                          ? static_cast<const float*>(args.accumulators)[from]
                          : to_float(static_cast<const T*>(args.accumulators)[from]);
        if (args.bias != nullptr) value += to_float(static_cast<const T*>(args.bias)[n]);
        value = activate(args.activation, value);
        if (residual != nullptr) value += to_float(residual[row * args.stride + n]);
        from_float(value, out + n);
      }
    }
  });
}

namespace {

constexpr int64_t kFloat = sizeof(float);
// x in float32 that is kept at a time, about: for more rows the weight is read and widened again.
constexpr int64_t kInputBytes = 16 << 20;
// Fewest rows that a weight is widened for, where there are more.
constexpr int64_t kMinRows = 96;

auto converter() { return use_avx2() ? convert_to_float_avx2 : convert_to_float_portable; }

// Rows [begin, end) of a weight, where a kernel that is given the whole weight looks for them.
struct WeightRows {
  const void* weight;
  int64_t stride;
  int64_t ahead;  // bytes from a weight to quants that are dequantized next, or 0
};
WeightRows weight_rows(const GemmArgs& args, int64_t begin, int64_t end) {
  if (args.packed == nullptr) return {args.weight, args.weight_stride, 0};
  const int64_t k = args.in_features, floats = (end - begin) * k * element_size(args.dtype) / kFloat + 1;
  float* const rows = scratch<1>(floats);
  dequantizer(*args.packed, args.dtype)(*args.packed, k, args.dtype, begin, end, rows);
  const uint8_t* next = args.packed->quants + end * args.packed->row_bytes();
  return {at(rows, -begin * k, args.dtype), k,
          reinterpret_cast<intptr_t>(next) - reinterpret_cast<intptr_t>(rows)};
}

// ---- own kernels --------------------------------------------------------------------------------------

// Least number of strips for a thread: they are taken in turn, so that none waits long for the last.
constexpr int64_t kStripsPerPart = 2;

// Rows [first, first + rows) of x as the kernels read them.
void convert_blocks(const RowView& x, DType dtype, int64_t first, int64_t rows, float* out) {
  const auto convert = converter();
  for_each_range(rows, rows * x.columns * kFloat, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t k = 0; k < x.columns; k += kGemmDepth) {
        const int64_t count = std::min(kGemmDepth, x.columns - k);
        float* to = out + k * rows + row * kGemmDepth;
        convert(dtype, at(x.data, (first + row) * x.stride + k, dtype), to, count);
        std::fill(to + count, to + round_up(count, 8), 0.0f);
      }
    }
  });
}

void run_blocked(GemmArgs whole, const RowView& x, GemmStrip* kernel) {
  const int64_t padded = round_up(whole.in_features, kGemmDepth);
  const int64_t pieces = std::max<int64_t>(1, x.rows / std::max(kMinRows, kInputBytes / kFloat / padded));
  const int64_t most = (x.rows + pieces - 1) / pieces;
  const int64_t threads = part_count(most * whole.out_features * whole.in_features, kWorkPerPart);
  const int64_t wanted = threads > 1 ? threads * kStripsPerPart : 1;
  // Narrower strips where there are few outputs, and where even these are too few, rows apart.
  const int64_t width =
      std::clamp(whole.out_features / wanted / kGemmPanel * kGemmPanel, kGemmPanel, kGemmStrip);
  const int64_t strips = (whole.out_features + width - 1) / width;
  const int64_t splits = std::clamp<int64_t>(wanted / strips, 1, std::max<int64_t>(1, most / kMinRows));
  const int64_t each = gemm_scratch_floats((most + splits - 1) / splits);
  float* memory = scratch(padded * most + threads * each);
  whole.x = memory;
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t first = part_begin(x.rows, pieces, piece);
    const GemmArgs args = rows_of(whole, first, part_begin(x.rows, pieces, piece + 1) - first);
    convert_blocks(x, args.dtype, first, args.rows, memory);
    std::atomic<int64_t> next{0};
    for_each_part(threads, [&](int64_t part) {
      for (int64_t item = next++; item < strips * splits; item = next++) {
        const int64_t begin = item / splits * width, split = item % splits;
        const int64_t end = std::min(begin + width, args.out_features);
        const WeightRows rows = weight_rows(args, begin, end);
        GemmArgs of_strip = args;
        of_strip.weight = rows.weight, of_strip.weight_stride = rows.stride;
        kernel(of_strip, part_begin(args.rows, splits, split), part_begin(args.rows, splits, split + 1),
               begin, end, memory + padded * most + part * each);
      }
    });
  }
}

// ---- the kernels of gemv --------------------------------------------------------------------------------

// Bytes of a weight over which all rows pass before the next are read: the second-level cache holds them.
constexpr int64_t kPassedBytes = 512 << 10;

// `rows` rows of x from `first` on as the linear kernel for `layout` takes them.
LinearArgs linear_args(const GemmArgs& args, const RowView& x, int64_t first, int64_t rows, XLayout layout,
                       float* floats, uint16_t* laid_out) {
  LinearArgs out{};
  out.dtype = args.dtype;
  out.rows = rows;
  out.in_features = args.in_features;
  out.out_features = out.out_stride = args.out_features;
  out.x = floats;
  out.x_stride = row_stride(args.in_features);
  out.laid_out = laid_out;
  out.weight = args.weight;
  out.weight_stride = args.weight_stride;
  out.bias = args.bias;
  if (args.residual != nullptr) out.residual = at(args.residual, first * args.out_features, args.dtype);
  out.out = at(args.out, first * args.out_features, args.dtype);
  out.activation = args.activation;
  lay_out(layout, args.dtype, x, first, rows, floats, laid_out);
  return out;
}

}  // namespace

bool gemm_by_gemv(const GemmArgs& args, const RowView& x) {
  const Route& route = linear_route(args.dtype, x.rows);
  const XLayout layout = route.layout;
  const int64_t most = layout == XLayout::kAmxTiles ? kMaxAmxRows : kMaxRows,
                stride = row_stride(args.in_features);
  const int64_t pieces = (x.rows + most - 1) / most;
  const int64_t others = round_up(laid_out_elements(layout, args.dtype, most, args.in_features) / 2, 16);
  float* const memory = scratch(pieces * others + (layout == XLayout::kBFloat16 ? 0 : x.rows * stride));
  float* const floats = memory + pieces * others;
  const int64_t row_bytes = args.in_features * element_size(args.dtype);
  const int64_t block = std::max(kOutputGranule, kPassedBytes / row_bytes / kOutputGranule * kOutputGranule);
  Linear* const kernel = route.linear;
  std::vector<LinearArgs> linear(pieces);
  for_each_range(pieces, x.rows * stride * kFloat, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = part_begin(x.rows, pieces, i), rows = part_begin(x.rows, pieces, i + 1) - first;
      linear[i] = linear_args(args, x, first, rows, layout, floats + first * stride,
                              reinterpret_cast<uint16_t*>(memory + i * others));
    }
  });
  share_outputs(args.out_features, row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n += block) {
      const int64_t stop = std::min(n + block, end);
      const WeightRows rows = weight_rows(args, n, stop);
      for (LinearArgs each : linear) {
        each.weight = rows.weight, each.weight_stride = rows.stride, each.ahead = rows.ahead;
        kernel(each, n, stop);
      }
    }
  });
  return true;
}

#if defined(__x86_64__)

// ---- the tiles of AMX ----------------------------------------------------------------------------------

namespace {

// Rows of x that pass over a weight at a time, and most outputs of a strip: a block of these rows and the
// strip's accumulators are in the second-level cache.
constexpr int64_t kAmxPassRows = 512, kAmxStrip = 256;

}  // namespace

bool gemm_in_tiles(const GemmArgs& asked, const RowView& x) {
  GemmArgs whole = asked;
  const int64_t pieces = (x.rows + kAmxPassRows - 1) / kAmxPassRows;
  const int64_t most = round_up((x.rows + pieces - 1) / pieces, kAmxPairRows);
  const int64_t threads = part_count(most * whole.out_features * whole.in_features, kWorkPerPart);
  const int64_t width = std::clamp(
      whole.out_features / (threads * kStripsPerPart) / kAmxPairRows * kAmxPairRows, kAmxPairRows, kAmxStrip);
  const int64_t tile_floats = most * gemm_padded_width(whole.in_features) * tile_terms(whole.dtype) *
                              int64_t(sizeof(uint16_t)) / kFloat;
  float* const memory = scratch(tile_floats + threads * width * most);
  auto* const tiles = reinterpret_cast<uint16_t*>(memory);
  whole.tiles = tiles;
  std::atomic<bool> finite{true};
  for (int64_t first = 0; first < x.rows; first += most) {
    const GemmArgs args = rows_of(whole, first, std::min(most, x.rows - first));
    const void* const rows = at(x.data, first * x.stride, args.dtype);
    const int64_t groups = (args.rows + kAmxGroupRows - 1) / kAmxGroupRows;
    for_each_range(groups, args.rows * x.columns * kFloat, [&](int64_t begin, int64_t end) {
      gemm_tiles_amx(args, rows, x.stride, begin, end, tiles);
    });
    std::atomic<int64_t> next{0};
    for_each_part(threads, [&](int64_t part) {
      for (int64_t begin = next.fetch_add(width); begin < args.out_features; begin = next.fetch_add(width)) {
        const int64_t end = std::min(begin + width, args.out_features);
        if (!gemm_strip_amx(args, begin, end, memory + tile_floats + part * width * most)) {
          finite.store(false, std::memory_order_relaxed);
        }
      }
    });
  }
  return finite;
}

// ---- pairs of bfloat16 ---------------------------------------------------------------------------------

bool gemm_in_pairs(const GemmArgs& whole, const RowView& x) {
  constexpr int64_t kRowsAtOnce = 256;  // of x: a block of them is in the second-level cache
  const int64_t pieces = (x.rows + kRowsAtOnce - 1) / kRowsAtOnce, most = (x.rows + pieces - 1) / pieces;
  auto* const laid_out =
      reinterpret_cast<uint16_t*>(scratch(most * gemm_padded_width(whole.in_features) / 2));
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t first = part_begin(x.rows, pieces, piece);
    GemmArgs args = rows_of(whole, first, part_begin(x.rows, pieces, piece + 1) - first);
    args.tiles = laid_out;
    const void* const rows = at(x.data, first * x.stride, args.dtype);
    const int64_t groups = gemm_paired_groups(args.rows);
    for_each_range(groups, args.rows * x.columns * kFloat, [&](int64_t begin, int64_t end) {
      gemm_paired_rows_avx512_bf16(args, rows, x.stride, begin, end, laid_out);
    });
    const int64_t threads = part_count(args.rows * args.out_features * args.in_features, kWorkPerPart);
    share_out(args.out_features, threads, kPairedStrip, kPairedStrip, [&](int64_t begin, int64_t end) {
      gemm_pairs_avx512_bf16(args, begin, end, scratch<1>(gemm_paired_floats(args.rows)));
    });
  }
  return true;
}

#endif

namespace {

// ---- PyTorch's product --------------------------------------------------------------------------------

// Weight in float32 that is kept at a time, about.
constexpr int64_t kWeightBytes = 4 << 20;

// out = x @ weight, not through the dispatcher: there autocast would step in.
void multiply(const Tensor& out, const Tensor& x, const Tensor& weight) {
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out.get(), x.get(), weight.get()));
}

void finish(const FinishArgs& args) {
  const auto kernel = use_avx2() ? finish_rows_avx2 : finish_rows_portable;
  for_each_range(args.rows, args.rows * args.columns * kFloat,
                 [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

// PyTorch's product in the tensors' own type: the product is rounded, too.
void run_torch(const GemmArgs& args, const RowView& x) {
  const int64_t n = args.out_features, k = args.in_features, stride = args.weight_stride;
  multiply(matrix(args.out, args.dtype, x.rows, n, n, 1), matrix(x.data, args.dtype, x.rows, k, x.stride, 1),
           args.transposed ? matrix(args.weight, args.dtype, k, n, stride, 1)
                           : matrix(args.weight, args.dtype, k, n, 1, stride));
  if (args.bias == nullptr && args.residual == nullptr && args.activation == Activation::kNone) return;
  finish({args.dtype, args.dtype, x.rows, n, args.out, n, args.bias, args.residual, args.out, n,
          args.activation});
}

// The same over pieces of a weight that is dequantized, of about so many bytes: TinyLlama's products of 17 to
// 64 rows in bfloat16 take 3.9 to 8.3 ms, and 5 to 10, 12 to 20 and 40 to 80 % longer with a half, a quarter
// and an eighth.
constexpr int64_t kDequantizedBytes = 8 << 20;

void run_torch_packed(const GemmArgs& args, const RowView& x) {
  const int64_t n = args.out_features, k = args.in_features, size = element_size(args.dtype);
  const int64_t width = std::min(n, std::max<int64_t>(64, kDequantizedBytes / size / k / 16 * 16));
  DequantizePacked* const dequantize = dequantizer(*args.packed, args.dtype);
  float* const block = scratch(round_up(width * k, 16) + x.rows * width);
  float* const accumulators = block + round_up(width * k, 16);
  for (int64_t begin = 0; begin < n; begin += width) {
    const int64_t columns = std::min(width, n - begin);
    for_each_range(columns, columns * k * size, [&](int64_t first, int64_t last) {
      dequantize(*args.packed, k, args.dtype, begin + first, begin + last, at(block, first * k, args.dtype));
    });
    multiply(matrix(accumulators, args.dtype, x.rows, columns, columns, 1),
             matrix(x.data, args.dtype, x.rows, k, x.stride, 1), matrix(block, args.dtype, k, columns, 1, k));
    finish({args.dtype, args.dtype, x.rows, columns, accumulators, columns,
            args.bias != nullptr ? at(args.bias, begin, args.dtype) : nullptr,
            args.residual != nullptr ? at(args.residual, begin, args.dtype) : nullptr,
            at(args.out, begin, args.dtype), n, args.activation});
  }
}

// PyTorch's product in float32, over pieces of x and of the weight that are widened.
void run_widened(const GemmArgs& args, const RowView& x) {
  const auto widen = [&](const void* from, int64_t stride, int64_t rows, int64_t columns, float* to) {
    for_each_range(rows, rows * columns * kFloat, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        converter()(args.dtype, at(from, row * stride, args.dtype), to + row * columns, columns);
      }
    });
  };
  const int64_t n = args.out_features, k = args.in_features;
  const int64_t most = std::min(x.rows, std::max(kMinRows, kInputBytes / kFloat / k));
  const int64_t width = std::min(n, std::max<int64_t>(64, kWeightBytes / kFloat / k / 16 * 16));
  float* input = scratch(round_up(most * k, 16) + round_up(width * k, 16) + most * width);
  float* block = input + round_up(most * k, 16);
  float* accumulators = block + round_up(width * k, 16);
  for (int64_t first = 0; first < x.rows; first += most) {
    const int64_t rows = std::min(most, x.rows - first);
    widen(at(x.data, first * x.stride, args.dtype), x.stride, rows, k, input);
    for (int64_t begin = 0; begin < n; begin += width) {
      const int64_t columns = std::min(width, n - begin), corner = first * n + begin;
      if (args.packed != nullptr) {
        dequantize_packed_portable(*args.packed, k, DType::kFloat32, begin, begin + columns, block);
      } else {
        const void* weight =
            at(args.weight, args.transposed ? begin : begin * args.weight_stride, args.dtype);
        widen(weight, args.weight_stride, args.transposed ? k : columns, args.transposed ? columns : k,
              block);
      }
      multiply(matrix(accumulators, DType::kFloat32, rows, columns, columns, 1),
               matrix(input, DType::kFloat32, rows, k, k, 1),
               args.transposed ? matrix(block, DType::kFloat32, k, columns, columns, 1)
                               : matrix(block, DType::kFloat32, k, columns, 1, k));
      finish({args.dtype, DType::kFloat32, rows, columns, accumulators, columns,
              args.bias != nullptr ? at(args.bias, begin, args.dtype) : nullptr,
              args.residual != nullptr ? at(args.residual, corner, args.dtype) : nullptr,
              at(args.out, corner, args.dtype), n, args.activation});
    }
  }
}

}  // namespace

bool gemm_by_torch(const GemmArgs& args, const RowView& x) {
  (args.packed != nullptr ? run_torch_packed : run_torch)(args, x);
  return true;
}

bool gemm_widened(const GemmArgs& args, const RowView& x) {
  run_widened(args, x);
  return true;
}

#if defined(__x86_64__)
bool gemm_blocked_avx512(const GemmArgs& args, const RowView& x) {
  run_blocked(args, x, gemm_strip_avx512);
  return true;
}
bool gemm_blocked_avx2(const GemmArgs& args, const RowView& x) {
  run_blocked(args, x, gemm_strip_avx2);
  return true;
}
#endif

// ---- the op -------------------------------------------------------------------------------------------

namespace {

Tensor gemm(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
            const std::optional<Tensor>& residual, int64_t activation, bool transposed) {
  const char* op = "gemm";
  GemmArgs args{};
  args.dtype = dtype_of(x, op);
  STD_TORCH_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) > 0, "hf_fastpath::gemm: x has no features");
  const RowView view = row_view(x);
  args.in_features = view.columns;
  STD_TORCH_CHECK(dtype_of(weight, op) == args.dtype,
                  "hf_fastpath::gemm: weight differs from x in dtype: cast one");
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(transposed ? 0 : 1) == args.in_features,
                  "hf_fastpath::gemm: weight is not a matrix over x's ", args.in_features, " features");
  STD_TORCH_CHECK(weight.size(1) <= 1 || weight.stride(1) == 1,
                  "hf_fastpath::gemm: weight has strided rows: make them contiguous");
  args.out_features = weight.size(transposed ? 1 : 0);
  args.weight = weight.const_data_ptr();
  args.weight_stride = weight.stride(0);
  args.transposed = transposed;
  args.activation = activation_of(activation, op);
  check_vector(bias, args.out_features, args.dtype, op, "bias");
  const std::vector<int64_t> sizes = sizes_with_last(x, args.out_features);
  if (residual.has_value()) {
    STD_TORCH_CHECK(dtype_of(*residual, op) == args.dtype && sizes_of(*residual) == sizes,
                    "hf_fastpath::gemm: residual differs from the output in dtype or shape");
  }
  Tensor out = empty_like_with_sizes(x, sizes);
  std::optional<Tensor> bias_holder, residual_holder;
  args.bias = optional_data(bias, bias_holder);
  args.residual = optional_data(residual, residual_holder);
  args.out = out.mutable_data_ptr();
  run_product(Product::kGemm, args, view);
  return out;
}

HF_FASTPATH_KERNEL(CPU, "gemm", gemm)

}  // namespace
}  // namespace hf_fastpath
