// packed_gemv on the CPU: checks, x as the kernels want it, threads, and the portable kernel.
#include <vector>

#include "common/composed_ops.h"
#include "common/cpu_glue.h"
#include "gemm/gemm_glue_cpu.h"
#include "packed_gemv/packed_gemv_glue_cpu.h"
#include "weights/packed_values_cpu.h"

namespace hf_fastpath {

void packed_gemv_portable(const PackedArgs& args, int64_t begin, int64_t end) {
  float weights[kPackedBlock];
  with_storage(args.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for (int64_t n = begin; n < end; ++n) {
      float accumulators[kPackedRows] = {};
      for (int64_t b = 0; b < args.weight.blocks; ++b) {
        for (int64_t place = 0; place < kPackedBlock; ++place) {
          weights[place] = scaled_at(args.weight, n, b, place);
        }
        for (int64_t m = 0; m < args.rows; ++m) {
          const float* x = args.x + (m * args.weight.blocks + b) * kPackedBlock;
          float sum[8] = {};
          for (int64_t i = 0; i < kPackedBlock; ++i) sum[i % 8] += weights[i] * x[i];
          accumulators[m] +=
              ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
        }
      }
      for (int64_t m = 0; m < args.rows; ++m) {
        float value = accumulators[m] * args.weight.multiplier;
        if (args.bias != nullptr) value += to_float(static_cast<const T*>(args.bias)[n]);
        value = activate(args.activation, value);
        const int64_t at = m * args.weight.out_features + n;
        if (args.residual != nullptr) value += to_float(static_cast<const T*>(args.residual)[at]);
        from_float(value, static_cast<T*>(args.out) + at);
      }
    }
  });
}

namespace {

PackedGemv* kernel_for(const PackedArgs& args) {
  if (!use_avx2()) return packed_gemv_portable;
  // Also rows that have no steps, as they are not finite.
  const bool in_steps = args.steps != nullptr || is_float(args.weight.format);
  if (!in_steps || takes_floats(args.dtype, args.weight.format, args.rows)) return packed_floats_avx2;
  if (!use_avx512()) return packed_gemv_avx2;
  return use_avx512_vnni() ? packed_gemv_avx512_vnni : packed_gemv_avx512;
}

// Whether the tiles of AMX are faster: the more so the more rows share a weight that is dequantized.
bool faster_in_tiles(DType dtype, PackedFormat format, int64_t rows) {
  if (!use_amx_products(dtype)) return false;
  if (format == PackedFormat::kFp8) return rows >= 4;
  if (format == PackedFormat::kInt4) return rows >= (dtype == DType::kBFloat16 ? 5 : 8);
  return rows >= (dtype == DType::kBFloat16 ? 6 : 12);
}

// Inputs as the weights lie: to[i] = x[weight_at(format, i)] in every block.
template <int64_t kWord>
void order(const float* x, float* to, int64_t blocks) {
  for (int64_t b = 0; b < blocks; ++b, x += kPackedBlock) {
    for (int64_t word = 0; word < kPackedBlock / kWord; ++word, to += kWord) {
      std::copy_n(x + word % kStretches * kStretch + word / kStretches * kWord, kWord, to);
    }
  }
}

template <class T>
T* take(float*& memory, int64_t count) {
  T* taken = reinterpret_cast<T*>(memory);
  memory += round_up(count * int64_t(sizeof(T)) / 4, 16);
  return taken;
}

}  // namespace

Tensor packed_rows_cpu(const Tensor& x, const Tensor& raw_quants, const Tensor& raw_scales,
                       const std::optional<Tensor>& raw_zeros, double multiplier, int64_t format,
                       const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                       int64_t activation) {
  const char* op = "packed_gemv";
  const RowView view = row_view(x);
  const PackedTensors tensors(raw_quants, raw_scales, raw_zeros);
  PackedArgs args{};
  args.weight = tensors.weight(view.columns, multiplier, format, op);
  args.dtype = dtype_of(x, op);
  args.rows = view.rows;
  check_vector(bias, args.weight.out_features, args.dtype, op, "bias");
  const std::vector<int64_t> sizes = sizes_with_last(x, args.weight.out_features);
  if (residual.has_value()) {
    STD_TORCH_CHECK(dtype_of(*residual, op) == args.dtype && sizes_of(*residual) == sizes,
                    "hf_fastpath::packed_gemv: residual differs from the output in dtype or shape");
  }
  Tensor out = empty_like_with_sizes(x, sizes);
  std::optional<Tensor> bias_holder, residual_holder;
  args.bias = optional_data(bias, bias_holder);
  args.residual = optional_data(residual, residual_holder);
  args.out = out.mutable_data_ptr();
  args.activation = activation_of(activation, op);

  GemmArgs gemm{};
  gemm.dtype = args.dtype, gemm.in_features = view.columns, gemm.out_features = args.weight.out_features;
  gemm.packed = &args.weight, gemm.bias = args.bias, gemm.residual = args.residual, gemm.out = args.out;
  gemm.activation = args.activation;
  if (takes_pairs(gemm, args.rows)) {
    run_in_pairs(gemm, view);
    return out;
  }
  args.step_blocks = round_up(args.weight.blocks, 4);
  const int64_t width = args.weight.blocks * kPackedBlock;
  const int64_t step_bytes = args.step_blocks * kStepBytes,
                lanes = args.step_blocks * lanes_of(args.weight.format);
  const bool tiled = faster_in_tiles(args.dtype, args.weight.format, args.rows);
  const int64_t tile_elements = tiled ? packed_tile_elements(args.dtype, args.rows, width) : 0;
  float* memory = scratch(args.rows * (2 * width + step_bytes / 4 + 2 * lanes) + tile_elements / 2 + 6 * 16);
  float* given = take<float>(memory, args.rows * width);
  convert_rows(args.dtype, view, width, given);
  if (tiled) {
    auto* const tiles = take<uint16_t>(memory, tile_elements);
    packed_tiles_amx(args.dtype, args.rows, width, given, tiles);
    args.tiles = tiles;
    if (run_packed_amx(args)) return out;
  }
  const auto run = [&](const PackedArgs& call) {
    PackedGemv* const kernel = kernel_for(call);
    share_out(args.weight.out_features, output_parts(args.weight), 8, least_piece(args.weight.output_bytes()),
              [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
  };
  float* ordered = take<float>(memory, args.rows * width);
  args.x = ordered;
  const auto order_rows = [&](int64_t first, int64_t count) {
    (bits_of(args.weight.format) == 8 ? order<4> : order<8>)(given + first * width, ordered + first * width,
                                                             count * args.weight.blocks);
  };
  if (use_avx2() && !is_float(args.weight.format) &&
      !takes_floats(args.dtype, args.weight.format, args.rows)) {
    args.split = !use_avx512() || use_avx512_vnni();  // in bytes, but for products of int16 without VNNI
    char* steps = take<char>(memory, args.rows * step_bytes);
    float* step_sizes = take<float>(memory, args.rows * lanes);
    float* step_offsets = take<float>(memory, args.rows * lanes);
    std::vector<PackedArgs> infinite;  // rows that are not finite, each by itself in float32
    for (int64_t row = 0; row < args.rows; ++row) {
      char* const of_row = steps + row * step_bytes;
      float* const sizes_of_row = step_sizes + row * lanes;
      float* const offsets_of_row = step_offsets + row * lanes;
      if (packed_steps_avx2(args, given + row * width, of_row, sizes_of_row, offsets_of_row)) continue;
      std::fill(of_row, of_row + step_bytes, char{0});
      std::fill(sizes_of_row, sizes_of_row + lanes, 0.0f);
      std::fill(offsets_of_row, offsets_of_row + lanes, 0.0f);
      order_rows(row, 1);
      PackedArgs& alone = infinite.emplace_back(args);
      alone.rows = 1, alone.x += row * width;
      if (alone.residual != nullptr)
        alone.residual = at(alone.residual, row * args.weight.out_features, args.dtype);
      alone.out = at(alone.out, row * args.weight.out_features, args.dtype);
    }
    args.steps = steps, args.step_sizes = step_sizes, args.step_offsets = step_offsets;
    run(args);
    for (const PackedArgs& alone : infinite) run(alone);
  } else {
    order_rows(0, args.rows);
    run(args);
  }
  return out;
}

Tensor packed_gemv_cpu(const Tensor& raw, const Tensor& quants, const Tensor& scales,
                       const std::optional<Tensor>& zeros, double multiplier, int64_t format,
                       const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                       int64_t activation, int64_t norm, const std::optional<Tensor>& norm_weight,
                       const std::optional<Tensor>& norm_bias, double norm_eps, bool /*programmatic_launch*/,
                       const std::optional<Tensor>& /*next_weight*/) {
  const Tensor x = normed_cpu(raw, norm_of(norm, "packed_gemv"), norm_weight, norm_bias, norm_eps);
  const int64_t rows = row_view(x).rows;
  STD_TORCH_CHECK(x.dim() >= 1 && rows >= 1 && rows <= kPackedRows,
                  "hf_fastpath::packed_gemv: x has to have 1 to 16 rows");
  return packed_rows_cpu(x, quants, scales, zeros, multiplier, format, bias, residual, activation);
}

STABLE_TORCH_LIBRARY_IMPL(hf_fastpath, CPU, m) { m.impl("packed_gemv", TORCH_BOX(&packed_gemv_cpu)); }

}  // namespace hf_fastpath
