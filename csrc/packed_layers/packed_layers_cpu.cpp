// torch.ops.hf_fastpath.packed_layers on the CPU: see hf_fastpath/ops/packed_layers.py for the contract. The
// ops of a decoder layer one after the other, without the way back to Python.
#include "common/callable_ops.h"
#include "common/composed_ops.h"

namespace hf_fastpath {
namespace {

// Places in `weights`, as LAYER_TENSORS of hf_fastpath/ops/packed_layers.py names them; of a matrix the first
// of three: quants, scales, zeros.
enum LayerTensor : size_t {
  kAttentionNormWeight,
  kAttentionNormBias,
  kQkv,
  kOut = kQkv + 3,
  kMlpNormWeight = kOut + 3,
  kMlpNormBias,
  kUp,
  kDown = kUp + 3,
  kLayerTensors = kDown + 3,
};
constexpr size_t kMatrices = 4;  // of a layer; each has a multiplier

std::optional<Tensor> given(const Tensor& tensor) {
  return tensor.numel() > 0 ? std::optional<Tensor>(tensor) : std::nullopt;
}

Tensor packed_layers(const Tensor& token, const std::vector<Tensor>& weights,
                     const std::vector<double>& multipliers, int64_t format,
                     const std::vector<Tensor>& k_caches, const std::vector<Tensor>& v_caches,
                     const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                     const Tensor& seq_lens, const std::optional<Tensor>& starts, int64_t num_heads,
                     double scale, const std::vector<int64_t>& windows, int64_t norm, double norm_eps,
                     int64_t activation, bool gated) {
  const char* op = "packed_layers";
  const size_t layers = k_caches.size();
  STD_TORCH_CHECK(token.dim() == 3 && token.size(1) == 1,
                  "hf_fastpath::packed_layers: x has to be [batch, 1, hidden_size]");
  STD_TORCH_CHECK(layers > 0 && v_caches.size() == layers && windows.size() == layers &&
                      weights.size() == layers * kLayerTensors && multipliers.size() == layers * kMatrices,
                  "hf_fastpath::packed_layers: the lists' lengths are not those of ", layers, " layers");
  STD_TORCH_CHECK(norm_of(norm, op) != NormKind::kNone,
                  "hf_fastpath::packed_layers: norm is none, expected rms, layer or rms_offset");
  const std::optional<Tensor> none;
  Tensor x = token;
  for (size_t i = 0; i < layers; ++i) {
    const Tensor* w = weights.data() + i * kLayerTensors;
    const double* multiplier = multipliers.data() + i * kMatrices;
    const auto product = [&](const Tensor& input, size_t matrix, double factor,
                             const std::optional<Tensor>& residual, int64_t act) {
      return packed_gemv_cpu(input, w[matrix], w[matrix + 1], given(w[matrix + 2]), factor, format, none,
                             residual, act, number_of(NormKind::kNone), none, none, 0.0, false);
    };
    const auto of_normed = [&](size_t matrix, double factor, size_t norm_weight, int64_t act) {
      return packed_gemv_cpu(x, w[matrix], w[matrix + 1], given(w[matrix + 2]), factor, format, none, none,
                             act, norm, given(w[norm_weight]), given(w[norm_weight + 1]), norm_eps, false);
    };
    const Tensor qkv = of_normed(kQkv, multiplier[0], kAttentionNormWeight, number_of(Activation::kNone));
    const Tensor queries = rope_append_cpu(qkv, none, cos, sin, k_caches[i], v_caches[i], seq_lens, num_heads,
                                           none, static_cast<int64_t>(i), none, none);
    const Tensor mixed =
        decode_attention_cpu(queries, k_caches[i], v_caches[i], seq_lens, starts, scale, windows[i], none,
                             static_cast<int64_t>(i), none, false, none, none, none);
    x = product(mixed, kOut, multiplier[1], x, number_of(Activation::kNone));
    Tensor hidden =
        of_normed(kUp, multiplier[2], kMlpNormWeight, gated ? number_of(Activation::kNone) : activation);
    if (gated) {
      const int64_t inner = hidden.size(2) / 2;
      hidden = fused_swiglu_cpu(torch::stable::narrow(hidden, 2, 0, inner),
                                torch::stable::narrow(hidden, 2, inner, inner), activation);
    }
    x = product(hidden, kDown, multiplier[3], x, number_of(Activation::kNone));
  }
  return x;
}

HF_FASTPATH_KERNEL(CPU, "packed_layers", packed_layers)

}  // namespace
}  // namespace hf_fastpath
