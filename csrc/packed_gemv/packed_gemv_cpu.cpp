// packed_gemv on the CPU: checks, x as the kernels want it, threads, its routes, and the portable kernel.
#include <atomic>
#include <vector>

#include "common/composed_ops.h"
#include "common/cpu_glue.h"
#include "gemm/gemm_glue_cpu.h"
#include "packed_gemv/packed_gemv_glue_cpu.h"
#include "packed_gemv/packed_gemv_routes_cpu.h"
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

// Inputs as the weights lie: to[i] = x[weight_at(format, i)] in every block.
template <int64_t kWord>
void order(const float* x, float* to, int64_t blocks) {
  for (int64_t b = 0; b < blocks; ++b, x += kPackedBlock) {
    for (int64_t word = 0; word < kPackedBlock / kWord; ++word, to += kWord) {
      std::copy_n(x + word % kSubBlocks * kSubBlock + word / kSubBlocks * kWord, kWord, to);
    }
  }
}

template <class T>
T* take(float*& memory, int64_t count) {
  T* taken = reinterpret_cast<T*>(memory);
  memory += round_up(count * int64_t(sizeof(T)) / 4, 16);
  return taken;
}

// The call of a kernel but for x.
PackedArgs call_of(const GemmArgs& gemm, const RowView& x) {
  PackedArgs args{};
  args.weight = *gemm.packed, args.dtype = gemm.dtype, args.rows = x.rows;
  args.bias = gemm.bias, args.residual = gemm.residual, args.out = gemm.out;
  args.activation = gemm.activation;
  args.step_blocks = round_up(args.weight.blocks, 4);
  return args;
}

// Computes all outputs of a call.
void run(const PackedArgs& call, PackedGemv* kernel) {
  share_out(call.weight.out_features, output_parts(call.weight), 8, least_piece(call.weight.output_bytes()),
            [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
}

// `rows` rows of x in float32, as the weights lie.
void order_rows(const PackedWeight& weight, const float* x, float* to, int64_t rows) {
  (bits_of(weight.format) == 8 ? order<4> : order<8>)(x, to, rows * weight.blocks);
}

// Runs a kernel that takes x in float32.
bool run_in_floats(const GemmArgs& gemm, const RowView& x, PackedGemv* kernel) {
  PackedArgs args = call_of(gemm, x);
  const int64_t width = args.weight.blocks * kPackedBlock;
  float* memory = scratch(2 * args.rows * width + 2 * 16);
  float* given = take<float>(memory, args.rows * width);
  float* ordered = take<float>(memory, args.rows * width);
  convert_rows(args.dtype, x, width, given);
  order_rows(args.weight, given, ordered, args.rows);
  args.x = ordered;
  run(args, kernel);
  return true;
}

#if defined(__x86_64__)

// Runs a kernel that takes x in steps; `split`: in bytes, unless quants have 16 bits in a table.
bool run_in_steps(const GemmArgs& gemm, const RowView& x, PackedGemv* kernel, bool split) {
  PackedArgs args = call_of(gemm, x);
  args.split = split && !has_table(args.weight.format);
  const int64_t width = args.weight.blocks * kPackedBlock;
  const int64_t step_bytes = args.step_blocks * kStepBytes,
                lanes = args.step_blocks * lanes_of(args.weight.format);
  float* memory = scratch(args.rows * (2 * width + step_bytes / 4 + 2 * lanes) + 5 * 16);
  float* given = take<float>(memory, args.rows * width);
  float* ordered = take<float>(memory, args.rows * width);
  convert_rows(args.dtype, x, width, given);
  args.x = ordered;
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
    order_rows(args.weight, given + row * width, ordered + row * width, 1);
    PackedArgs& alone = infinite.emplace_back(args);
    alone.rows = 1, alone.x += row * width;
    if (alone.residual != nullptr)
      alone.residual = at(alone.residual, row * args.weight.out_features, args.dtype);
    alone.out = at(alone.out, row * args.weight.out_features, args.dtype);
  }
  args.steps = steps, args.step_sizes = step_sizes, args.step_offsets = step_offsets;
  run(args, kernel);
  for (const PackedArgs& alone : infinite) run(alone, packed_floats_avx2);
  return true;
}

#endif

}  // namespace

bool packed_portable(const GemmArgs& args, const RowView& x) {
  return run_in_floats(args, x, packed_gemv_portable);
}

#if defined(__x86_64__)

bool packed_in_floats(const GemmArgs& args, const RowView& x) {
  return run_in_floats(args, x, packed_floats_avx2);
}
bool packed_in_fp8_avx2(const GemmArgs& args, const RowView& x) {
  return run_in_floats(args, x, packed_gemv_avx2);
}
bool packed_in_fp8_avx512(const GemmArgs& args, const RowView& x) {
  return run_in_floats(args, x, packed_gemv_avx512);
}
bool packed_in_fp8_vnni(const GemmArgs& args, const RowView& x) {
  return run_in_floats(args, x, packed_gemv_avx512_vnni);
}

bool packed_in_steps_avx2(const GemmArgs& args, const RowView& x) {
  return run_in_steps(args, x, packed_gemv_avx2, true);
}
bool packed_in_steps_avx512(const GemmArgs& args, const RowView& x) {
  return run_in_steps(args, x, packed_gemv_avx512, false);  // its products of nibbles are of int16
}
bool packed_in_steps_vnni(const GemmArgs& args, const RowView& x) {
  return run_in_steps(args, x, packed_gemv_avx512_vnni, true);
}

bool packed_in_tiles(const GemmArgs& gemm, const RowView& x) {
  PackedArgs args = call_of(gemm, x);
  const int64_t width = args.weight.blocks * kPackedBlock;
  const int64_t tile_floats = packed_tile_elements(args.dtype, x.rows, width) / 2;
  float* const memory = scratch(tile_floats + x.rows * width);
  auto* const tiles = reinterpret_cast<uint16_t*>(memory);
  float* const floats = memory + tile_floats;
  convert_rows(args.dtype, x, width, floats);
  packed_tiles_amx(args.dtype, x.rows, width, floats, tiles);
  args.tiles = tiles;
  constexpr int64_t kGranule = 32;  // the most outputs that the kernel takes at a time
  std::atomic<bool> finite{true};
  share_out(args.weight.out_features, output_parts(args.weight), kGranule,
            least_piece(args.weight.output_bytes()), [&](int64_t begin, int64_t end) {
              if (!packed_gemm_amx(args, begin, end)) finite.store(false, std::memory_order_relaxed);
            });
  return finite;
}

#endif

Tensor packed_gemv_cpu(const Tensor& raw, const Tensor& raw_quants, const Tensor& raw_scales,
                       const std::optional<Tensor>& raw_zeros, double multiplier, int64_t format,
                       const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                       int64_t activation, int64_t norm, const std::optional<Tensor>& norm_weight,
                       const std::optional<Tensor>& norm_bias, double norm_eps, bool /*programmatic_launch*/,
                       const std::optional<Tensor>& /*next_weight*/) {
  const char* op = "packed_gemv";
  const Tensor x = normed_cpu(raw, norm_of(norm, op), norm_weight, norm_bias, norm_eps);
  const RowView view = row_view(x);
  STD_TORCH_CHECK(x.dim() >= 1 && view.rows >= 1 && view.rows <= kPackedRows,
                  "hf_fastpath::packed_gemv: x has to have 1 to 16 rows");
  const PackedTensors tensors(raw_quants, raw_scales, raw_zeros);
  const PackedWeight weight = tensors.weight(view.columns, multiplier, format, op);
  GemmArgs args{};
  args.dtype = dtype_of(x, op);
  args.in_features = view.columns, args.out_features = weight.out_features;
  args.packed = &weight;
  check_vector(bias, args.out_features, args.dtype, op, "bias");
  const std::vector<int64_t> sizes = sizes_with_last(x, args.out_features);
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
  run_product(Product::kPackedGemv, args, view);
  return out;
}

HF_FASTPATH_KERNEL(CPU, "packed_gemv", packed_gemv_cpu)

}  // namespace hf_fastpath
