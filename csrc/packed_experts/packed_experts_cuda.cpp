// torch.ops.hf_fastpath.packed_experts on a GPU: see hf_fastpath/ops/packed_experts.py for the contract.
#include <climits>

#include "common/cuda_glue.h"
#include "packed_experts/packed_experts.h"
#include "packed_experts/packed_experts_glue.h"

namespace hf_fastpath {
namespace {

constexpr const char* kOp = "packed_experts";

bool starts_access(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// The matrices of all experts, as an op takes them. The tensors are kept until the launch.
struct PackedStack {
  Tensor quants, scales;
  std::optional<Tensor> zeros;

  PackedStack(const Tensor& raw_quants, const Tensor& raw_scales, const std::optional<Tensor>& raw_zeros)
      : quants(aligned(raw_quants)), scales(aligned(raw_scales)) {
    if (raw_zeros) zeros = aligned(*raw_zeros);
  }

  // Sets its part of `p`.
  void set(PackedExpertsProduct& p, int64_t k, double multiplier, int64_t format) const {
    const PackedShape shape = check_packed(k, quants, scales, zeros, format, kOp);
    STD_TORCH_CHECK(has_gpu_experts(shape.format) || reads_records(shape.format),
                    "hf_fastpath::packed_experts: format ", traits_of(shape.format).name,
                    " has no kernels for a GPU: use another one");
    STD_TORCH_CHECK(k < INT_MAX / 2 && shape.blocks < INT_MAX / 1024,
                    "hf_fastpath::packed_experts: more than 2^31 features");
    p.matrix.format = shape.format, p.matrix.rows = shape.rows;
    p.matrix.blocks = static_cast<int>(shape.blocks), p.matrix.groups = static_cast<int>(shape.groups);
    p.matrix.scales = static_cast<const uint16_t*>(scales.data_ptr());
    p.matrix.zeros = static_cast<const uint8_t*>(data_or_null(zeros));
    p.matrix.multiplier = static_cast<float>(multiplier);
    p.quants = quants.data_ptr();
    p.k = static_cast<int>(k);
  }
};

}  // namespace

Tensor packed_experts_cuda(const Tensor& x, const Tensor& expert_ids, const Tensor& expert_weights,
                           const Tensor& gate_up_quants, const Tensor& gate_up_scales,
                           const std::optional<Tensor>& gate_up_zeros, double gate_up_multiplier,
                           int64_t gate_up_format, const Tensor& down_quants, const Tensor& down_scales,
                           const std::optional<Tensor>& down_zeros, double down_multiplier,
                           int64_t down_format, const std::optional<Tensor>& residual, int64_t activation,
                           const std::optional<Tensor>& gate_up_bias, const std::optional<Tensor>& down_bias,
                           bool alternating, double alpha, double limit, int64_t norm,
                           const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias,
                           double norm_eps, bool programmatic_launch) {
  const DeviceGuard guard(x);
  const PackedExpertsShape shape = packed_experts_shape(x, expert_ids, expert_weights, gate_up_quants,
                                                        down_quants, gate_up_bias, down_bias, residual);
  const PackedGate gate = packed_gate(activation, alternating, alpha, limit);
  const DType dtype = dtype_of(x, kOp);
  STD_TORCH_CHECK(shape.rows <= 16, "hf_fastpath::packed_experts: x has ", shape.rows,
                  " rows, expected at most 16");
  STD_TORCH_CHECK(shape.hidden_size < INT_MAX / 2 && shape.width < INT_MAX / 2,
                  "hf_fastpath::packed_experts: more than 2^31 features");
  const PackedStack first(gate_up_quants, gate_up_scales, gate_up_zeros);
  const PackedStack second(down_quants, down_scales, down_zeros);
  const Tensor ids = hf_fastpath::contiguous(expert_ids), weights = hf_fastpath::contiguous(expert_weights);
  const PackedChoices choices{static_cast<const int64_t*>(ids.data_ptr()),
                              static_cast<const float*>(weights.data_ptr()), shape.num_experts,
                              static_cast<int>(shape.rows), static_cast<int>(shape.top_k)};
  std::optional<Tensor> first_bias, second_bias, added, factors;
  if (gate_up_bias) first_bias = hf_fastpath::contiguous(*gate_up_bias);
  if (down_bias) second_bias = hf_fastpath::contiguous(*down_bias);
  if (residual) added = hf_fastpath::contiguous(*residual);
  Tensor input = hf_fastpath::contiguous(x);
  const int64_t row_bytes = shape.hidden_size * element_size(dtype);

  PackedExpertsProduct p{};
  p.choices = choices;
  first.set(p, shape.hidden_size, gate_up_multiplier, gate_up_format);
  p.bias = data_or_null(first_bias);
  p.features = static_cast<int>(shape.width);
  p.gated = true, p.alternating = gate.alternating, p.clamped = gate.clamped;
  p.activation = gate.activation, p.alpha = gate.alpha, p.limit = gate.limit;
  p.dtype = dtype, p.programmatic_launch = programmatic_launch;
  const NormKind kind = norm_of(norm, kOp);
  if (is_rms(kind) && fits_packed_experts_norm(p)) {
    STD_TORCH_CHECK(norm_weight && !norm_bias && norm_weight->numel() == shape.hidden_size &&
                        dtype_of(*norm_weight, kOp) == dtype,
                    "hf_fastpath::packed_experts: norm_weight does not match x and norm");
    factors = hf_fastpath::contiguous(*norm_weight);
    p.norm_weight = factors->data_ptr();
    p.norm_eps = static_cast<float>(norm_eps), p.norm_offset = static_cast<float>(weight_offset(kind));
  } else if (kind != NormKind::kNone) {
    input = normed_cuda(input, kind, norm_weight, norm_bias, norm_eps);
  }
  p.x = input.data_ptr();
  p.aligned = starts_access(p.x) && row_bytes % 16 == 0 && starts_access(p.norm_weight);
  const Tensor hidden = empty_like_with_sizes(input, {shape.rows, shape.top_k, shape.width});
  p.out = hidden.data_ptr();
  const cudaStream_t stream = current_stream(guard.device());
  launch_packed_experts(p, stream);

  PackedExpertsProduct d{};
  d.choices = choices;
  second.set(d, shape.width, down_multiplier, down_format);
  d.x = hidden.data_ptr(), d.bias = data_or_null(second_bias);
  d.features = static_cast<int>(shape.hidden_size);
  d.dtype = dtype;
  d.aligned = starts_access(d.x) && shape.width * element_size(dtype) % 16 == 0;
  const Tensor products =
      torch::stable::new_empty(input, {shape.rows, shape.top_k, shape.hidden_size}, ScalarType::Float);
  d.out = products.data_ptr();
  launch_packed_experts(d, stream);

  Tensor out = empty_like_with_sizes(input, sizes_of(x));
  PackedExpertsSum sum{};
  sum.choices = choices;
  sum.products = static_cast<const float*>(products.data_ptr());
  sum.residual = data_or_null(added), sum.out = out.data_ptr();
  sum.hidden_size = static_cast<int>(shape.hidden_size), sum.dtype = dtype;
  launch_packed_experts_sum(sum, stream);
  return out;
}

HF_FASTPATH_KERNEL(CUDA, "packed_experts", packed_experts_cuda)

}  // namespace hf_fastpath
