// torch.ops.hf_fastpath.decode_layers on a GPU: see hf_fastpath/ops/decode_layers.py for the contract.
#include "common/cuda_glue.h"
#include "common/lengths.h"
#include "decode_layers/cluster_layers.h"

namespace hf_fastpath {
namespace {

// Places in `weights`, as LAYER_TENSORS of hf_fastpath/ops/decode_layers.py names them.
enum LayerTensor : size_t {
  kAttentionNormWeight,
  kAttentionNormBias,
  kQkvWeight,
  kQkvBias,
  kOutWeight,
  kOutBias,
  kMlpNormWeight,
  kMlpNormBias,
  kUpWeight,
  kUpBias,
  kDownWeight,
  kDownBias,
  kLayerTensors,
};

bool is_aligned16(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0; }

void check_matrix(const Tensor& weight, const Tensor& x, int64_t rows, int64_t columns) {
  const int64_t elems = 16 / element_size(dtype_of(x, "decode_layers"));
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(0) == rows && weight.size(1) == columns &&
                      weight.stride(1) == 1 && weight.stride(0) % elems == 0 && is_aligned16(weight) &&
                      weight.scalar_type() == x.scalar_type(),
                  "hf_fastpath::decode_layers: a matrix has to be [", rows, ", ", columns,
                  "] in x's dtype, and its rows have to begin at 16 bytes");
}

void check_vector(const Tensor& vector, const Tensor& x, int64_t size) {
  STD_TORCH_CHECK(vector.numel() == 0 || (vector.numel() == size && vector.is_contiguous() &&
                                          vector.scalar_type() == x.scalar_type()),
                  "hf_fastpath::decode_layers: a bias, or vector of a norm, has to be [", size,
                  "] in x's dtype, or empty");
}

void check_layer(const Tensor* w, const Tensor& x, int64_t heads) {
  const int64_t hidden = x.size(2), inner = 4 * hidden, features = heads * kClusterHeadDim;
  check_matrix(w[kQkvWeight], x, hidden, 3 * features);
  check_matrix(w[kOutWeight], x, features, hidden);
  check_matrix(w[kUpWeight], x, hidden, inner);
  check_matrix(w[kDownWeight], x, inner, hidden);
  check_vector(w[kQkvBias], x, 3 * features);
  check_vector(w[kUpBias], x, inner);
  for (const LayerTensor place :
       {kAttentionNormWeight, kAttentionNormBias, kOutBias, kMlpNormWeight, kMlpNormBias, kDownBias}) {
    check_vector(w[place], x, hidden);
  }
}

void check_cache(const Tensor& cache, const Tensor& x, int64_t heads, int64_t capacity, bool has_table) {
  STD_TORCH_CHECK(cache.dim() == 4 && cache.size(0) == 1 && cache.size(1) == heads &&
                      cache.size(2) == capacity && (capacity > 0 || has_table) &&
                      cache.size(3) == kClusterHeadDim && cache.is_contiguous() && is_aligned16(cache) &&
                      cache.scalar_type() == x.scalar_type(),
                  "hf_fastpath::decode_layers: a cache has to be [1, ", heads, ", capacity, ",
                  kClusterHeadDim, "] in x's dtype, contiguous and aligned to 16 bytes");
}

const void* data_or_none(const Tensor& tensor) { return tensor.numel() > 0 ? tensor.data_ptr() : nullptr; }

// All layers, by two kernels each.
Tensor decode_layers(const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Tensor>& k_caches,
                     const std::vector<Tensor>& v_caches, const Tensor& seq_lens,
                     const std::optional<Tensor>& starts, int64_t num_heads, double scale,
                     const std::vector<int64_t>& windows, double norm_eps, int64_t activation,
                     const std::optional<Tensor>& kv_table, bool programmatic_launch) {
  const size_t layers = k_caches.size();
  STD_TORCH_CHECK(x.dim() == 3 && x.size(0) == 1 && x.size(1) == 1 && x.is_contiguous(),
                  "hf_fastpath::decode_layers: x has to be [1, 1, hidden_size] and contiguous");
  STD_TORCH_CHECK(layers > 0 && v_caches.size() == layers && windows.size() == layers,
                  "hf_fastpath::decode_layers: ", layers, " k_caches, ", v_caches.size(), " v_caches and ",
                  windows.size(), " windows, expected one of each for every layer");
  STD_TORCH_CHECK(weights.size() == layers * kLayerTensors, "hf_fastpath::decode_layers: ", weights.size(),
                  " weights, expected ", layers * static_cast<size_t>(kLayerTensors));
  STD_TORCH_CHECK(seq_lens.numel() == 1 && seq_lens.scalar_type() == ScalarType::Int &&
                      (!starts || (starts->numel() == 1 && starts->scalar_type() == ScalarType::Int)),
                  "hf_fastpath::decode_layers: seq_lens and starts have to be int32 [1]");
  STD_TORCH_CHECK(!kv_table || (kv_table->dim() == 2 && kv_table->is_contiguous() &&
                                kv_table->size(0) >= static_cast<int64_t>(layers)),
                  "hf_fastpath::decode_layers: kv_table has to be contiguous, with a row for every layer");
  const DeviceGuard guard(x);
  const DType dtype = dtype_of(x, "decode_layers");
  STD_TORCH_CHECK(fits_cluster_layers(x.size(2), num_heads, dtype),
                  "hf_fastpath::decode_layers: no kernels for a hidden_size of ", x.size(2), " and ",
                  num_heads, " heads in this dtype on this GPU");
  for (size_t i = 0; i < layers; ++i) {
    check_layer(&weights[i * kLayerTensors], x, num_heads);
    for (const Tensor* cache : {&k_caches[i], &v_caches[i]}) {
      check_cache(*cache, x, num_heads, k_caches[i].size(2), kv_table.has_value());
    }
  }
  const cudaStream_t stream = current_stream(guard.device());
  const int hidden = static_cast<int>(x.size(2)), heads = static_cast<int>(num_heads);

  // Streams in front of attention and of the MLP, partial sums behind them, means.
  const int64_t floats = int64_t(2 + heads + kMlpClusters) * hidden + 2;
  const Tensor scratch = empty_like_with_sizes(x, {floats * 4 / element_size(dtype)});
  float* stream_of[2] = {static_cast<float*>(scratch.data_ptr()),
                         static_cast<float*>(scratch.data_ptr()) + hidden};
  float* partials_of[2] = {stream_of[1] + hidden, stream_of[1] + hidden + int64_t(heads) * hidden};
  float* mean_of = partials_of[1] + int64_t(kMlpClusters) * hidden;

  ClusterBlockParams p{};
  p.hidden = hidden, p.heads = heads;
  p.norm_eps = static_cast<float>(norm_eps);
  p.dtype = dtype;
  p.activation = activation_of(activation, "decode_layers");
  p.programmatic_launch = programmatic_launch;
  p.scale = static_cast<float>(scale);
  p.seq_lens = static_cast<const int32_t*>(seq_lens.data_ptr());
  p.starts = static_cast<const int32_t*>(data_or_null(starts));
  p.kv_table = static_cast<const int64_t*>(data_or_null(kv_table));
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
  for (size_t i = 0; i < layers; ++i) {
    const Tensor* w = &weights[i * kLayerTensors];
    p.k_cache = k_caches[i].data_ptr(), p.v_cache = v_caches[i].data_ptr();
    p.layer = static_cast<int64_t>(i);
    p.capacity = k_caches[i].size(2);
    p.window = bounded_window(windows[i]);
    launch(0, w, kAttentionNormWeight, kQkvWeight, kOutWeight, launch_cluster_attention);
    launch(1, w, kMlpNormWeight, kUpWeight, kDownWeight, launch_cluster_mlp);
  }
  Tensor out = empty_like_with_sizes(x, sizes_of(x));
  launch_cluster_stream(p.in, out.data_ptr(), hidden, p.dtype, p.programmatic_launch, stream);
  return out;
}

}  // namespace

HF_FASTPATH_KERNEL(CUDA, "decode_layers", decode_layers)

}  // namespace hf_fastpath
