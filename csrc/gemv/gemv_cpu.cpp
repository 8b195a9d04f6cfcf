// gemv on the CPU: checks, allocation, threads, and the portable kernels of the three gemv ops.
#include "gemv/gemv_cpu.h"

#include <numeric>

#include "common/composed_ops.h"
#include "common/cpu_glue.h"
#include "common/cpu_math.h"
#include "gemv/gemv_glue_cpu.h"

namespace hf_fastpath {
namespace {

// Bias, activation, product with `up` and residual of one output, rounded once.
template <class T>
void finish(const LinearArgs& args, int64_t row, int64_t n, float sum, float up) {
  if (args.bias != nullptr) sum += to_float(static_cast<const T*>(args.bias)[n]);
  float value = activate(args.activation, sum);
  if (args.up_weight != nullptr) value *= up;
  if (args.residual != nullptr) {
    value += to_float(static_cast<const T*>(args.residual)[row * args.out_features + n]);
  }
  from_float(value, static_cast<T*>(args.out) + row * args.out_stride + n);
}

// Eight chains a block of 1024 products: short chains round less, and the compiler can use SSE for them.
template <class T>
float dot(const T* weight, const float* x, int64_t n) {
  float total[8] = {};
  for (int64_t block = 0; block < n; block += 1024) {
    float accumulators[8] = {}, wide[8];
    const int64_t stop = std::min<int64_t>(block + 1024, n);
    int64_t k = block;
    for (; k + 8 <= stop; k += 8) {
      for (int i = 0; i < 8; ++i) wide[i] = to_float(weight[k + i]);
      for (int i = 0; i < 8; ++i) accumulators[i] += wide[i] * x[k + i];
    }
    for (; k < stop; ++k) accumulators[k % 8] += to_float(weight[k]) * x[k];
    for (int i = 0; i < 8; ++i) total[i] += accumulators[i];
  }
  return ((total[0] + total[4]) + (total[2] + total[6])) + ((total[1] + total[5]) + (total[3] + total[7]));
}

}  // namespace

void linear_portable(const LinearArgs& args, int64_t begin, int64_t end) {
  with_storage(args.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for (int64_t n = begin; n < end; ++n) {
      const T* weight = static_cast<const T*>(args.weight) + n * args.weight_stride;
      const T* up = static_cast<const T*>(args.up_weight);
      for (int64_t row = 0; row < args.rows; ++row) {
        const float* x = args.x + row * args.x_stride;
        const float gate = dot(weight, x, args.in_features);
        const float other = up != nullptr ? dot(up + n * args.up_stride, x, args.in_features) : 0.0f;
        finish<T>(args, row, n, gate, other);
      }
    }
  });
}

void conv1d_portable(const LinearArgs& args, int64_t k_begin, int64_t k_end, int64_t n_begin, int64_t n_end,
                     float* partial, int64_t partial_stride) {
  constexpr int64_t kRows = 8;  // weight rows summed from zero before they join the chain in memory
  with_storage(args.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for (int64_t row = 0; row < args.rows; ++row) {
      float* accumulators = partial + row * partial_stride;
      const float* x = args.x + row * args.x_stride;
      std::fill(accumulators + n_begin, accumulators + n_end, 0.0f);
      for (int64_t k = k_begin; k < k_end; k += kRows) {
        const T* weight = static_cast<const T*>(args.weight) + k * args.weight_stride;
        const int64_t count = std::min(kRows, k_end - k);
        for (int64_t n = n_begin; n < n_end; ++n) {
          float sum = 0.0f;
          for (int64_t i = 0; i < count; ++i) sum += to_float(weight[i * args.weight_stride + n]) * x[k + i];
          accumulators[n] += sum;
        }
      }
    }
  });
}

void conv1d_merge_portable(const LinearArgs& args, int64_t n_begin, int64_t n_end, const float* partials,
                           int64_t parts, int64_t part_stride, int64_t partial_stride) {
  with_storage(args.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for (int64_t row = 0; row < args.rows; ++row) {
      for (int64_t n = n_begin; n < n_end; ++n) {
        float sum = 0.0f;
        for (int64_t p = 0; p < parts; ++p) sum += partials[p * part_stride + row * partial_stride + n];
        finish<T>(args, row, n, sum, 0.0f);
      }
    }
  });
}

namespace {

// Inputs a part of a Conv1D product sums over, about; fewer would leave its eight streams too short to
// prefetch.
constexpr int64_t kInputsPerPart = 384;
// More parts than this cost more to merge than they balance.
constexpr int64_t kMaxInputParts = 8;
// Least outputs a part covers when outputs are divided too: 512 bytes of a 16-bit weight row.
constexpr int64_t kMinOutputs = 256;
// Partial sums worth another thread in the merge.
constexpr int64_t kMergePerPart = 32 * 1024;

// The division depends on the shape only, so that the sums do not depend on the number of threads.
int64_t input_parts(int64_t in_features) {
  return std::clamp<int64_t>(in_features / kInputsPerPart, 1, kMaxInputParts);
}

void run_conv1d(const LinearArgs& args, float* partials, int64_t partial_stride) {
  const auto kernel = use_avx2() ? conv1d_avx2 : conv1d_portable;
  const auto merge = use_avx2() ? conv1d_merge_avx2 : conv1d_merge_portable;
  const int64_t splits = input_parts(args.in_features);
  const int64_t part_stride = args.rows * partial_stride;
  const int64_t bytes = args.out_features * args.in_features * element_size(args.dtype);
  const int64_t threads = part_count(bytes, kBytesPerPart);
  // Strips of outputs, only as many as give every thread the same number of (input range, strip) items.
  const int64_t strips =
      std::min(threads / std::gcd(threads, splits), std::max<int64_t>(1, args.out_features / kMinOutputs));
  const int64_t items = splits * strips;
  const int64_t parts = std::min(threads, items);
  for_each_part(parts, [&](int64_t part) {
    for (int64_t item = part_begin(items, parts, part); item < part_begin(items, parts, part + 1); ++item) {
      const int64_t split = item / strips, strip = item % strips;
      kernel(args, part_begin(args.in_features, splits, split),
             part_begin(args.in_features, splits, split + 1),
             part_begin(args.out_features, strips, strip, 64),
             part_begin(args.out_features, strips, strip + 1, 64), partials + split * part_stride,
             partial_stride);
    }
  });
  const int64_t mergers = part_count(splits * args.rows * args.out_features, kMergePerPart);
  for_each_part(mergers, [&](int64_t part) {
    merge(args, part_begin(args.out_features, mergers, part, 64),
          part_begin(args.out_features, mergers, part + 1, 64), partials, splits, part_stride,
          partial_stride);
  });
}

}  // namespace

Tensor gemv_cpu(const Tensor& raw, const Tensor& weight, const std::optional<Tensor>& bias,
                const std::optional<Tensor>& residual, int64_t activation, bool transposed, int64_t norm,
                const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias,
                double norm_eps, bool /*programmatic_launch*/, const std::optional<Tensor>& /*next_weight*/) {
  const char* op = "gemv";
  STD_TORCH_CHECK(weight.dim() == 2, "hf_fastpath::gemv: weight is not a matrix");
  const Tensor x = normed_cpu(raw, norm_of(norm, op), norm_weight, norm_bias, norm_eps);
  const int64_t out_features = weight.size(transposed ? 1 : 0);
  const int64_t partial_stride = round_up(out_features, 16);
  const int64_t partials = transposed ? input_parts(weight.size(0)) * kMaxRows * partial_stride : 0;
  const Activations input = load_activations(x, op, !transposed, partials);
  check_weight(weight, input, transposed, op, "weight");
  check_vector(bias, out_features, input.dtype, op, "bias");
  const std::vector<int64_t> sizes = sizes_with_last(x, out_features);
  if (residual.has_value()) {
    STD_TORCH_CHECK(dtype_of(*residual, op) == input.dtype && sizes_of(*residual) == sizes,
                    "hf_fastpath::gemv: residual differs from the output in dtype or shape");
  }
  Tensor out = empty_like_with_sizes(x, sizes);
  std::optional<Tensor> bias_holder, residual_holder;
  LinearArgs args = linear_args(input, weight, transposed, out.mutable_data_ptr(), out_features);
  args.bias = optional_data(bias, bias_holder);
  args.residual = optional_data(residual, residual_holder);
  args.activation = activation_of(activation, op);
  if (transposed) {
    run_conv1d(args, input.spare, partial_stride);
  } else {
    run_linear(args, input.kernel);
  }
  return out;
}

HF_FASTPATH_KERNEL(CPU, "gemv", gemv_cpu)

}  // namespace hf_fastpath
