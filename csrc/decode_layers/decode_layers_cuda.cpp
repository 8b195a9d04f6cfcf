// torch.ops.hf_fastpath.decode_layers on a GPU: see hf_fastpath/ops/decode_layers.py for the contract.
#include "common/cuda_glue.h"
#include "common/lengths.h"
#include "decode_layers/cluster_layers.h"
#include "decode_layers/decode_layers_glue.h"

namespace hf_fastpath {
namespace {

bool is_aligned16(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0; }

// A matrix of weights whose rows are of this shape, aligned.
bool has_rows(const Tensor& weight, const Tensor& x, int64_t rows, int64_t columns) {
  const int64_t elems = 16 / element_size(dtype_of(x, "decode_layers"));
  return weight.dim() == 2 && weight.size(0) == rows && weight.size(1) == columns && weight.stride(1) == 1 &&
         weight.stride(0) % elems == 0 && is_aligned16(weight) && weight.scalar_type() == x.scalar_type();
}

// A vector of `size` features, or none.
bool has_features(const Tensor& vector, const Tensor& x, int64_t size) {
  return vector.numel() == 0 ||
         (vector.numel() == size && vector.is_contiguous() && vector.scalar_type() == x.scalar_type());
}

// Whether launch_cluster_attention and launch_cluster_mlp take every layer.
bool fits_cluster_layers(const DecodeLayersCall& call) {
  const Tensor& x = call.token;
  const int64_t hidden = x.size(2), heads = call.num_heads, inner = 4 * hidden,
                features = heads * kClusterHeadDim;
  if (x.size(0) != 1 || !call.transposed || call.cos ||
      norm_of(call.norm, "decode_layers") != NormKind::kLayer || !x.is_contiguous() ||
      !fits_cluster_layers(hidden, heads, dtype_of(x, "decode_layers"))) {
    return false;
  }
  for (size_t i = 0; i < call.layers(); ++i) {
    const Tensor* w = call.layer(i);
    const bool fits =
        has_rows(w[kQWeight], x, hidden, 3 * features) && has_rows(w[kOutWeight], x, features, hidden) &&
        has_rows(w[kUpWeight], x, hidden, inner) && has_rows(w[kDownWeight], x, inner, hidden) &&
        has_features(w[kQBias], x, 3 * features) && has_features(w[kOutBias], x, hidden) &&
        has_features(w[kUpBias], x, inner) && has_features(w[kDownBias], x, hidden) &&
        has_features(w[kAttentionNormWeight], x, hidden) && has_features(w[kAttentionNormBias], x, hidden) &&
        has_features(w[kMlpNormWeight], x, hidden) && has_features(w[kMlpNormBias], x, hidden);
    if (!fits) return false;
    for (const Tensor* cache : {&call.k_caches[i], &call.v_caches[i]}) {
      if (cache->dim() != 4 || cache->size(0) != 1 || cache->size(1) != heads ||
          (cache->size(2) == 0 && !call.kv_table) || cache->size(3) != kClusterHeadDim ||
          cache->size(2) != call.k_caches[i].size(2) || !cache->is_contiguous() || !is_aligned16(*cache) ||
          cache->scalar_type() != x.scalar_type()) {
        return false;
      }
    }
  }
  return true;
}

const void* data_or_none(const Tensor& tensor) { return tensor.numel() > 0 ? tensor.data_ptr() : nullptr; }

// The layers by two kernels each.
std::optional<Tensor> cluster_layers(const DecodeLayersCall& call) {
  if (!fits_cluster_layers(call)) return std::nullopt;
  const Tensor& x = call.token;
  STD_TORCH_CHECK(
      call.seq_lens.numel() == 1 && call.seq_lens.scalar_type() == ScalarType::Int &&
          (!call.starts || (call.starts->numel() == 1 && call.starts->scalar_type() == ScalarType::Int)),
      "hf_fastpath::decode_layers: seq_lens and starts have to be int32 [1]");
  STD_TORCH_CHECK(!call.kv_table || (call.kv_table->dim() == 2 && call.kv_table->is_contiguous() &&
                                     call.kv_table->size(0) >= static_cast<int64_t>(call.layers())),
                  "hf_fastpath::decode_layers: kv_table has to be contiguous, with a row for every layer");
  const DeviceGuard guard(x);
  const cudaStream_t stream = current_stream(guard.device());
  const int hidden = static_cast<int>(x.size(2)), heads = static_cast<int>(call.num_heads);

  // Streams in front of attention and of the MLP, partial sums behind them, means.
  const int64_t floats = int64_t(2 + heads + kMlpClusters) * hidden + 2;
  const Tensor scratch = empty_like_with_sizes(x, {floats * 4 / element_size(dtype_of(x, "decode_layers"))});
  float* stream_of[2] = {static_cast<float*>(scratch.data_ptr()),
                         static_cast<float*>(scratch.data_ptr()) + hidden};
  float* partials_of[2] = {stream_of[1] + hidden, stream_of[1] + hidden + int64_t(heads) * hidden};
  float* mean_of = partials_of[1] + int64_t(kMlpClusters) * hidden;

  ClusterBlockParams p{};
  p.hidden = hidden, p.heads = heads;
  p.norm_eps = static_cast<float>(call.norm_eps);
  p.dtype = dtype_of(x, "decode_layers");
  p.activation = activation_of(call.activation, "decode_layers");
  p.programmatic_launch = call.programmatic_launch;
  p.scale = static_cast<float>(call.scale);
  p.seq_lens = static_cast<const int32_t*>(call.seq_lens.data_ptr());
  p.starts = static_cast<const int32_t*>(data_or_null(call.starts));
  p.kv_table = static_cast<const int64_t*>(data_or_null(call.kv_table));
  p.in.token = x.data_ptr();
  const auto launch = [&](int which, const Tensor* w, LayerTensor norm, LayerTensor first, LayerTensor second,
                          auto launch_kernel) {
    p.stream = stream_of[which], p.partials = partials_of[which], p.mean = mean_of + which;
    p.norm_weight = data_or_none(w[norm]), p.norm_bias = data_or_none(w[norm + 1]);
    p.first_weight = w[first].data_ptr(), p.first_bias = data_or_none(w[first + 1]);
    p.first_stride = w[first].stride(0);
    p.second_weight = w[second].data_ptr(), p.second_stride = w[second].stride(0);
    launch_kernel(p, stream);
    // What the next kernel takes.
    p.in = {nullptr, p.stream, p.partials, data_or_none(w[second + 1]), which == 0 ? heads : kMlpClusters};
    p.center = p.mean;
  };
  for (size_t i = 0; i < call.layers(); ++i) {
    const Tensor* w = call.layer(i);
    p.k_cache = call.k_caches[i].data_ptr(), p.v_cache = call.v_caches[i].data_ptr();
    p.layer = static_cast<int64_t>(i);
    p.capacity = call.k_caches[i].size(2);
    p.window = bounded_window(call.windows[i]);
    launch(0, w, kAttentionNormWeight, kQWeight, kOutWeight, launch_cluster_attention);
    launch(1, w, kMlpNormWeight, kUpWeight, kDownWeight, launch_cluster_mlp);
  }
  Tensor out = empty_like_with_sizes(x, sizes_of(x));
  launch_cluster_stream(p.in, out.data_ptr(), hidden, p.dtype, p.programmatic_launch, stream);
  return out;
}

struct Ops {
  static constexpr auto qkv_rope_append = qkv_rope_append_cuda;
  static constexpr auto decode_attention = decode_attention_cuda;
  static constexpr auto gemv = gemv_cuda;
  static constexpr auto gemv_swiglu = gemv_swiglu_cuda;
  static constexpr auto at_once = cluster_layers;
};

}  // namespace

HF_FASTPATH_KERNEL(CUDA, "decode_layers", decode_layers<Ops>)

}  // namespace hf_fastpath
