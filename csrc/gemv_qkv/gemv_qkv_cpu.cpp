// gemv_qkv on the CPU: the three projections of gemv's Linear kernel in one parallel region.
#include "gemv/gemv_glue_cpu.h"

namespace hf_fastpath {
namespace {

constexpr int kProjections = 3;

Tensor gemv_qkv(const Tensor& x, const Tensor& q_weight, const Tensor& k_weight, const Tensor& v_weight,
                std::optional<Tensor> q_bias, std::optional<Tensor> k_bias, std::optional<Tensor> v_bias) {
  const char* op = "gemv_qkv";
  const Activations input = load_activations(x, op);
  const Tensor* weights[kProjections] = {&q_weight, &k_weight, &v_weight};
  const std::optional<Tensor>* biases[kProjections] = {&q_bias, &k_bias, &v_bias};
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
  const auto kernel = use_avx2() ? linear_avx2 : linear_portable;
  const int64_t bytes = total * input.in_features * element_size(input.dtype);
  const int64_t parts = std::min(part_count(bytes, kBytesPerPart), std::max<int64_t>(total, 1));
  for_each_part(parts, [&](int64_t part) {
    const int64_t begin = part_begin(total, parts, part, kOutputGranule);
    const int64_t end = part_begin(total, parts, part + 1, kOutputGranule);
    for (int i = 0; i < kProjections; ++i) {
      const int64_t from = std::max(begin, first[i]), stop = std::min(end, first[i + 1]);
      if (from < stop) kernel(args[i], from - first[i], stop - first[i]);
    }
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(hf_fastpath, CPU, m) { m.impl("gemv_qkv", TORCH_BOX(&gemv_qkv)); }

}  // namespace
}  // namespace hf_fastpath
