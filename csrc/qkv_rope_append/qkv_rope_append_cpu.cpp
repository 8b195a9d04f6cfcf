// qkv_rope_append on the CPU: three projections of gemv's Linear kernel in one parallel region, or the one
// that holds them all, then rope_append.
#include "common/composed_ops.h"
#include "gemv/gemv_glue_cpu.h"

namespace hf_fastpath {
namespace {

constexpr int kProjections = 3;

Tensor project(const Tensor& x, const Tensor* const (&weights)[kProjections],
               const std::optional<Tensor>* const (&biases)[kProjections], const char* op) {
  const Activations input = load_activations(x, op, true);
  const char* weight_names[kProjections] = {"q_weight", "k_weight", "v_weight"};
  const char* bias_names[kProjections] = {"q_bias", "k_bias", "v_bias"};
  int64_t total = 0;
  for (int i = 0; i < kProjections; ++i) {
    check_weight(*weights[i], input, false, op, weight_names[i]);
    check_vector(*biases[i], weights[i]->size(0), input.dtype, op, bias_names[i]);
    total += weights[i]->size(0);
  }
  Tensor out = empty_like_with_sizes(x, sizes_with_last(x, total));
  char* to = static_cast<char*>(out.mutable_data_ptr());
  std::optional<Tensor> holders[kProjections];
  LinearArgs args[kProjections];
  int64_t first[kProjections + 1] = {};  // first output of each projection among all of them
  for (int i = 0; i < kProjections; ++i) {
    args[i] =
        linear_args(input, *weights[i], false, at(static_cast<void*>(to), first[i], input.dtype), total);
    args[i].bias = optional_data(*biases[i], holders[i]);
    first[i + 1] = first[i] + args[i].out_features;
  }
  Linear* const kernel = linear_kernel(input.layout);
  share_outputs(total, input.in_features * element_size(input.dtype), [&](int64_t begin, int64_t end) {
    for (int i = 0; i < kProjections; ++i) {
      const int64_t from = std::max(begin, first[i]), stop = std::min(end, first[i + 1]);
      if (from < stop) kernel(args[i], from - first[i], stop - first[i]);
    }
  });
  return out;
}

}  // namespace

Tensor qkv_rope_append_cpu(const Tensor& raw, const Tensor& q_weight, const std::optional<Tensor>& k_weight,
                           const std::optional<Tensor>& v_weight, const std::optional<Tensor>& q_bias,
                           const std::optional<Tensor>& k_bias, const std::optional<Tensor>& v_bias,
                           bool transposed, const std::optional<Tensor>& cos,
                           const std::optional<Tensor>& sin, const Tensor& k_cache, const Tensor& v_cache,
                           const Tensor& seq_lens, int64_t num_heads, const std::optional<Tensor>& kv_table,
                           int64_t layer, int64_t norm, const std::optional<Tensor>& norm_weight,
                           const std::optional<Tensor>& norm_bias, double norm_eps,
                           bool /*programmatic_launch*/, const std::optional<Tensor>& k_scales,
                           const std::optional<Tensor>& v_scales, const std::optional<Tensor>& block_table,
                           bool neighbors, const std::optional<Tensor>& q_norm_weight,
                           const std::optional<Tensor>& k_norm_weight, double head_norm_eps,
                           double head_norm_offset) {
  const char* op = "qkv_rope_append";
  check_projections(raw, k_weight, v_weight, k_bias, v_bias, transposed);
  const auto append = [&](const Tensor& qkv) {
    return rope_append_cpu(qkv, std::nullopt, cos, sin, k_cache, v_cache, seq_lens, num_heads, kv_table,
                           layer, k_scales, v_scales, block_table, neighbors, q_norm_weight, k_norm_weight,
                           head_norm_eps, head_norm_offset);
  };
  if (!k_weight) {
    return append(gemv_cpu(raw, q_weight, q_bias, std::nullopt, number_of(Activation::kNone), transposed,
                           norm, norm_weight, norm_bias, norm_eps, false, std::nullopt));
  }
  const Tensor x = normed_cpu(raw, norm_of(norm, op), norm_weight, norm_bias, norm_eps);
  const Tensor* weights[] = {&q_weight, &*k_weight, &*v_weight};
  const std::optional<Tensor>* biases[] = {&q_bias, &k_bias, &v_bias};
  const Tensor qkv = project(x, weights, biases, op);
  return append(qkv);
}

STABLE_TORCH_LIBRARY_IMPL(hf_fastpath, CPU, m) { m.impl("qkv_rope_append", TORCH_BOX(&qkv_rope_append_cpu)); }

}  // namespace hf_fastpath
