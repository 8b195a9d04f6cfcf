// decode_layers: the ops of a decoder layer one after the other, without the way back to Python; the same on
// every device. This header is torch-facing.
#pragma once

#include "common/composed_ops.h"

namespace hf_fastpath {

// Places in `weights`, as LAYER_TENSORS and OUTER_TENSORS of hf_fastpath/ops/decode_layers.py name them.
enum LayerTensor : size_t {
  kAttentionNormWeight,
  kAttentionNormBias,
  kQWeight,
  kQBias,
  kKWeight,
  kKBias,
  kVWeight,
  kVBias,
  kOutWeight,
  kOutBias,
  kMlpNormWeight,
  kMlpNormBias,
  kGateWeight,
  kUpWeight,
  kUpBias,
  kDownWeight,
  kDownBias,
  kLayerTensors,
};
enum OuterTensor : size_t { kFinalNormWeight, kFinalNormBias, kHeadWeight, kHeadBias, kOuterTensors };

inline std::optional<Tensor> given(const Tensor& tensor) {
  return tensor.numel() > 0 ? std::optional<Tensor>(tensor) : std::nullopt;
}

// The arguments of decode_layers, checked.
struct DecodeLayersCall {
  const Tensor& token;
  const std::vector<Tensor>&weights, &k_caches, &v_caches;
  const std::optional<Tensor>&cos, &sin;
  const Tensor& seq_lens;
  const std::optional<Tensor>& starts;
  int64_t num_heads;
  double scale;
  const std::vector<int64_t>& windows;
  int64_t norm;
  double norm_eps;
  int64_t activation;
  bool transposed;
  const std::optional<Tensor>&kv_table, &workspace;
  bool programmatic_launch;

  size_t layers() const { return k_caches.size(); }
  // Tensors of a layer, by LayerTensor; of what follows the last, by OuterTensor.
  const Tensor* layer(size_t i) const { return weights.data() + i * kLayerTensors; }

  void check() const {
    STD_TORCH_CHECK(token.dim() == 3 && token.size(1) == 1,
                    "hf_fastpath::decode_layers: x has to be [batch, 1, hidden_size]");
    STD_TORCH_CHECK(layers() > 0 && v_caches.size() == layers() && windows.size() == layers(),
                    "hf_fastpath::decode_layers: ", layers(), " k_caches, ", v_caches.size(),
                    " v_caches and ", windows.size(), " windows, expected one of each for every layer");
    STD_TORCH_CHECK(weights.size() == layers() * kLayerTensors + kOuterTensors,
                    "hf_fastpath::decode_layers: ", weights.size(), " weights, expected ",
                    layers() * kLayerTensors + kOuterTensors);
    STD_TORCH_CHECK(norm_of(norm, "decode_layers") != NormKind::kNone,
                    "hf_fastpath::decode_layers: norm is none, expected rms, layer or rms_offset");
  }
};

// The layers, op by op. Ops: the functions of composed_ops.h for a device.
template <class Ops>
Tensor layer_by_layer(const DecodeLayersCall& call) {
  const auto& [token, weights, k_caches, v_caches, cos, sin, seq_lens, starts, num_heads, scale, windows,
               norm, norm_eps, activation, transposed, kv_table, workspace, programmatic_launch] = call;
  Tensor x = token;
  for (size_t i = 0; i < call.layers(); ++i) {
    const Tensor* w = call.layer(i);
    const int64_t layer = static_cast<int64_t>(i);
    const Tensor queries = Ops::qkv_rope_append(
        x, w[kQWeight], given(w[kKWeight]), given(w[kVWeight]), given(w[kQBias]), given(w[kKBias]),
        given(w[kVBias]), transposed, cos, sin, k_caches[i], v_caches[i], seq_lens, num_heads, kv_table,
        layer, norm, given(w[kAttentionNormWeight]), given(w[kAttentionNormBias]), norm_eps,
        programmatic_launch, std::nullopt, std::nullopt, std::nullopt, false, std::nullopt, std::nullopt, 0.0,
        0.0);
    const Tensor mixed = Ops::decode_attention(
        queries, k_caches[i], v_caches[i], seq_lens, starts, scale, windows[i], kv_table, layer, workspace,
        programmatic_launch, std::nullopt, std::nullopt, std::nullopt, std::nullopt, 0.0, std::nullopt,
        std::nullopt, std::nullopt, std::nullopt, std::nullopt);
    const bool gated = w[kGateWeight].numel() > 0;
    const std::optional<Tensor> none;
    x = Ops::gemv(mixed, w[kOutWeight], given(w[kOutBias]), x, number_of(Activation::kNone), transposed,
                  number_of(NormKind::kNone), none, none, 0.0, programmatic_launch,
                  w[gated ? kGateWeight : kUpWeight]);
    STD_TORCH_CHECK(!gated || (!transposed && w[kUpBias].numel() == 0),
                    "hf_fastpath::decode_layers: gate_weight goes with neither transposed nor up_bias");
    const std::optional<Tensor> norm_weight = given(w[kMlpNormWeight]), norm_bias = given(w[kMlpNormBias]);
    const Tensor hidden =
        gated ? Ops::gemv_swiglu(x, w[kGateWeight], w[kUpWeight], activation, norm, norm_weight, norm_bias,
                                 norm_eps, programmatic_launch, w[kDownWeight])
              : Ops::gemv(x, w[kUpWeight], given(w[kUpBias]), none, activation, transposed, norm, norm_weight,
                          norm_bias, norm_eps, programmatic_launch, w[kDownWeight]);
    const Tensor* next = call.layer(i + 1);
    x = Ops::gemv(hidden, w[kDownWeight], given(w[kDownBias]), x, number_of(Activation::kNone), transposed,
                  number_of(NormKind::kNone), none, none, 0.0, programmatic_launch,
                  next[i + 1 < call.layers() ? size_t(kQWeight) : size_t(kHeadWeight)]);
  }
  return x;
}

// Ops has besides `at_once`: all layers by kernels of their own, or nothing where there are none for them.
template <class Ops>
Tensor decode_layers(const Tensor& token, const std::vector<Tensor>& weights,
                     const std::vector<Tensor>& k_caches, const std::vector<Tensor>& v_caches,
                     const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                     const Tensor& seq_lens, const std::optional<Tensor>& starts, int64_t num_heads,
                     double scale, const std::vector<int64_t>& windows, int64_t norm, double norm_eps,
                     int64_t activation, bool transposed, const std::optional<Tensor>& kv_table,
                     const std::optional<Tensor>& workspace, bool programmatic_launch) {
  const DecodeLayersCall call{token,    weights,    k_caches,   v_caches, cos,       sin,
                              seq_lens, starts,     num_heads,  scale,    windows,   norm,
                              norm_eps, activation, transposed, kv_table, workspace, programmatic_launch};
  call.check();
  std::optional<Tensor> x = Ops::at_once(call);
  if (!x) x = layer_by_layer<Ops>(call);
  const Tensor* w = call.layer(call.layers());
  return Ops::gemv(*x, w[kHeadWeight], given(w[kHeadBias]), std::nullopt, number_of(Activation::kNone), false,
                   norm, given(w[kFinalNormWeight]), given(w[kFinalNormBias]), norm_eps, programmatic_launch,
                   std::nullopt);
}

}  // namespace hf_fastpath
