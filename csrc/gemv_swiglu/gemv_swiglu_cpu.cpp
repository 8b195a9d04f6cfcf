// gemv_swiglu on the CPU: gemv's Linear kernel over two weights at once.
#include "common/composed_ops.h"
#include "gemv/gemv_glue_cpu.h"

namespace hf_fastpath {

Tensor gemv_swiglu_cpu(const Tensor& raw, const Tensor& gate_weight, const Tensor& up_weight,
                       int64_t activation, int64_t norm, const std::optional<Tensor>& norm_weight,
                       const std::optional<Tensor>& norm_bias, double norm_eps, bool /*programmatic_launch*/,
                       const std::optional<Tensor>& /*next_weight*/) {
  const char* op = "gemv_swiglu";
  const Tensor x = normed_cpu(raw, norm_of(norm, op), norm_weight, norm_bias, norm_eps);
  const Activations input = load_activations(x, op, true);
  check_weight(gate_weight, input, false, op, "gate_weight");
  check_weight(up_weight, input, false, op, "up_weight");
  const int64_t out_features = gate_weight.size(0);
  STD_TORCH_CHECK(up_weight.size(0) == out_features, "hf_fastpath::gemv_swiglu: up_weight has ",
                  up_weight.size(0), " rows, expected gate_weight's ", out_features);
  Tensor out = empty_like_with_sizes(x, sizes_with_last(x, out_features));
  LinearArgs args = linear_args(input, gate_weight, false, out.mutable_data_ptr(), out_features);
  args.up_weight = up_weight.const_data_ptr();
  args.up_stride = up_weight.stride(0);
  args.activation = activation_of(activation, op);
  run_linear(args, input.kernel);
  return out;
}

HF_FASTPATH_KERNEL(CPU, "gemv_swiglu", gemv_swiglu_cpu)

}  // namespace hf_fastpath
