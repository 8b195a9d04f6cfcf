// packed_experts on the CPU: the routes of packed_gemv over the rows that chose each expert.
#include <cmath>
#include <cstring>

#include "common/routes_cpu.h"
#include "fused_experts/expert_pairs_cpu.h"
#include "gemm/gemm_cpu.h"
#include "packed_experts/packed_experts_glue.h"
#include "packed_gemv/packed_gemv_cpu.h"
#include "weights/packed_tensors_cpu.h"

namespace hf_fastpath {
namespace {

constexpr const char* kOp = "packed_experts";

// What add_choices() asks of a call.
struct ChosenSums {
  DType dtype;
  int64_t rows, top_k, hidden_size;
  const float* weights;
  const void* residual;
  void* out;
  const ExpertPairs& pairs;
};

// The matrix of an expert, which has `features` rows of the weight.
PackedWeight matrix_of(const PackedWeight& all, int64_t expert, int64_t features) {
  PackedWeight matrix = all;
  const int64_t first = expert * features;
  matrix.out_features = features;
  matrix.quants += first * all.row_bytes();
  matrix.scales = static_cast<const char*>(all.scales) + first * all.scale_row_bytes();
  if (all.zeros != nullptr) matrix.zeros += first * all.groups;
  return matrix;
}

// out[place] = x[place] @ matrix.T + bias of the expert, for all pairs; x [pairs, in_features], out [pairs,
// features], contiguous.
void multiply(const ExpertPairs& pairs, const Tensor& x, const PackedWeight& all, const void* bias,
              const Tensor& out) {
  const DType dtype = dtype_of(x, kOp);
  const int64_t in_features = x.size(1), features = out.size(1);
  for (const ExpertPairs::Group& group : pairs.groups) {
    const PackedWeight matrix = matrix_of(all, group.expert, features);
    GemmArgs args{};
    args.dtype = dtype, args.rows = group.count;
    args.in_features = in_features, args.out_features = features;
    args.packed = &matrix;
    args.bias = bias == nullptr ? nullptr : at(bias, group.expert * features, dtype);
    args.out = const_cast<char*>(at(out.mutable_data_ptr(), group.begin * features, dtype));
    args.activation = Activation::kNone;
    run_product(
        Product::kPackedGemv, args,
        {x, at(x.const_data_ptr(), group.begin * in_features, dtype), group.count, in_features, in_features});
  }
}

float gated(const PackedGate& how, float gate, float up) {
  if (!how.clamped) return activate(how.activation, gate) * up;
  gate = gate > how.limit ? how.limit : gate;  // NaN stays NaN
  up = up > how.limit ? how.limit : up < -how.limit ? -how.limit : up;
  return gate / (1.0f + std::exp(-how.alpha * gate)) * (up + 1.0f);
}

// hidden[place] of both[place], whose gate and up lie as `how` says.
void apply_gate(const PackedGate& how, const Tensor& both, const Tensor& hidden) {
  const int64_t width = hidden.size(1), step = how.alternating ? 2 : 1, to_up = how.alternating ? 1 : width;
  with_storage(dtype_of(both, kOp), [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const T* const from = static_cast<const T*>(both.const_data_ptr());
    T* const to = static_cast<T*>(hidden.mutable_data_ptr());
    for_each_range(hidden.size(0), hidden.numel() * 32, [&](int64_t begin, int64_t end) {
      for (int64_t place = begin; place < end; ++place) {
        const T* const row = from + place * 2 * width;
        for (int64_t i = 0; i < width; ++i)
          from_float(gated(how, to_float(row[i * step]), to_float(row[i * step + to_up])),
                     to + place * width + i);
      }
    });
  });
}

}  // namespace

Tensor packed_experts_cpu(const Tensor& raw, const Tensor& expert_ids, const Tensor& expert_weights,
                          const Tensor& gate_up_quants, const Tensor& gate_up_scales,
                          const std::optional<Tensor>& gate_up_zeros, double gate_up_multiplier,
                          int64_t gate_up_format, const Tensor& down_quants, const Tensor& down_scales,
                          const std::optional<Tensor>& down_zeros, double down_multiplier,
                          int64_t down_format, const std::optional<Tensor>& residual, int64_t activation,
                          const std::optional<Tensor>& gate_up_bias, const std::optional<Tensor>& down_bias,
                          bool alternating, double alpha, double limit, int64_t norm,
                          const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias,
                          double norm_eps, bool /*programmatic_launch*/) {
  const PackedExpertsShape shape = packed_experts_shape(raw, expert_ids, expert_weights, gate_up_quants,
                                                        down_quants, gate_up_bias, down_bias, residual);
  const PackedGate gate = packed_gate(activation, alternating, alpha, limit);
  const int64_t rows = shape.rows, top_k = shape.top_k, hidden_size = shape.hidden_size, width = shape.width,
                num_experts = shape.num_experts;
  const DType dtype = dtype_of(raw, kOp);
  const PackedTensors first(gate_up_quants, gate_up_scales, gate_up_zeros);
  const PackedTensors second(down_quants, down_scales, down_zeros);
  const PackedWeight gate_up = first.weight(hidden_size, gate_up_multiplier, gate_up_format, kOp);
  const PackedWeight down = second.weight(width, down_multiplier, down_format, kOp);
  const Tensor x =
      hf_fastpath::contiguous(normed_cpu(raw, norm_of(norm, kOp), norm_weight, norm_bias, norm_eps));
  const Tensor ids = hf_fastpath::contiguous(expert_ids), weights = hf_fastpath::contiguous(expert_weights);
  const ExpertPairs pairs =
      sorted_pairs(ids.const_data_ptr<int64_t>(), rows, top_k, num_experts, kPackedRows);

  const int64_t count = pairs.count(), row_bytes = hidden_size * element_size(dtype);
  const Tensor by_pair = empty_like_with_sizes(x, {count, hidden_size});
  for (int64_t place = 0; place < count; ++place) {
    std::memcpy(static_cast<char*>(by_pair.mutable_data_ptr()) + place * row_bytes,
                static_cast<const char*>(x.const_data_ptr()) + pairs.row[place] * row_bytes, row_bytes);
  }
  std::optional<Tensor> gate_up_holder, down_holder, residual_holder;
  const Tensor both = empty_like_with_sizes(x, {count, 2 * width});
  multiply(pairs, by_pair, gate_up, optional_data(gate_up_bias, gate_up_holder), both);
  const Tensor hidden = empty_like_with_sizes(x, {count, width});
  apply_gate(gate, both, hidden);
  const Tensor products = by_pair;  // which nothing reads any more
  multiply(pairs, hidden, down, optional_data(down_bias, down_holder), products);

  const Tensor out = empty_like_with_sizes(x, sizes_of(raw));
  const ChosenSums sums{dtype,
                        rows,
                        top_k,
                        hidden_size,
                        weights.const_data_ptr<float>(),
                        optional_data(residual, residual_holder),
                        out.mutable_data_ptr(),
                        pairs};
  const auto convert = use_avx2() ? convert_to_float_avx2 : convert_to_float_portable;
  const void* const products_data = products.const_data_ptr();
  for_each_range(hidden_size, count * row_bytes, [&](int64_t begin, int64_t end) {
    add_choices(sums, begin, end, [&](int64_t place, int64_t from, int64_t n, float* to) {
      convert(dtype, at(products_data, place * hidden_size + from, dtype), to, n);
    });
  });
  return out;
}

HF_FASTPATH_KERNEL(CPU, "packed_experts", packed_experts_cpu)

}  // namespace hf_fastpath
