// rope_append on the CPU: checks, allocation, threads, and the portable kernel.
#include "rope_append/rope_append_cpu.h"

#include <cmath>

#include "common/composed_ops.h"
#include "common/cpu_glue.h"
#include "common/cpu_math.h"
#include "common/kv_cache_cpu.h"
#include "common/kv_quants.h"
#include "rope_append/head_rows_glue.h"

namespace hf_fastpath {
namespace {

// A head of qkv + bias, or of its norm: (offset + weight) * scale times that.
template <class T>
struct Head {
  const T *x, *bias, *weight;
  float scale, offset;

  float biased(int64_t i) const { return to_float(x[i]) + (bias != nullptr ? to_float(bias[i]) : 0.0f); }
  float operator()(int64_t i) const {
    return weight != nullptr ? biased(i) * scale * (offset + to_float(weight[i])) : biased(i);
  }
  // Makes the norm's scale that of the first `count` elements.
  void measure(int64_t count, float eps) {
    double squares = 0.0;  // one sum of thousands of floats would lose digits
    for (int64_t i = 0; i < count; ++i) squares += double(biased(i)) * biased(i);
    scale = static_cast<float>(1.0 / std::sqrt(squares / static_cast<double>(count) + eps));
  }
  void advance(int64_t dim, int64_t stride, bool norms_all_heads) {
    x += stride;
    if (bias != nullptr) bias += dim;
    if (weight != nullptr && norms_all_heads) weight += dim;
  }
};

template <class T, class Out>
void turn_head(const Head<T>& value, const T* cos, const T* sin, int64_t rotary_dim, bool neighbors,
               int64_t head_dim, Out* out) {
  const int64_t half = rotary_dim / 2;
  for (int64_t pair = 0; pair < half; ++pair) {
    const int64_t i = neighbors ? 2 * pair : pair, j = neighbors ? i + 1 : i + half;
    const float first = value(i), second = value(j);
    from_float(first * to_float(cos[i]) - second * to_float(sin[i]), out + i);
    from_float(second * to_float(cos[j]) + first * to_float(sin[j]), out + j);
  }
  for (int64_t i = rotary_dim; i < head_dim; ++i) from_float(value(i), out + i);
}

// Calls `visit(index, head)` for `count` heads of a token, with the scale of their norm; their bias is next.
template <class T, class Visit>
void each_head(const RopeAppendArgs& args, Head<T>& head, const HeadRows& rows, int64_t token, int64_t count,
               const void* weight, Visit visit) {
  const int64_t dim = args.head_dim;
  head.x = static_cast<const T*>(rows.first) + token * rows.token_stride;
  head.weight = static_cast<const T*>(weight);
  const bool each = weight != nullptr && !args.norms_all_heads;
  if (weight != nullptr && !each) head.measure(count * dim, args.norm_eps);
  for (int64_t h = 0; h < count; ++h, head.advance(dim, rows.head_stride, args.norms_all_heads)) {
    if (each) head.measure(dim, args.norm_eps);
    visit(h, head);
  }
}

template <class T, class Kv>
void append_tokens(const RopeAppendArgs& args, int64_t begin, int64_t end) {
  const int64_t dim = args.head_dim;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t row = t / args.query_len, token = t % args.query_len;
    const TokenPlace to = place_of(args, row, token);
    const int64_t angle = row * args.angle_stride + token * args.rotary_dim;
    const T* cos = static_cast<const T*>(args.cos) + angle;
    const T* sin = static_cast<const T*>(args.sin) + angle;
    const auto append = [&](const Head<T>& head, int64_t rotary_dim, int64_t kv_head, void* cache,
                            uint16_t* scales) {
      const int64_t place = to.first + kv_head * to.apart;
      Kv* out = static_cast<Kv*>(cache) + place * dim;
      if constexpr (kIsQuant<Kv>) {
        float values[kMaxQuantizedHeadDim];
        turn_head(head, cos, sin, rotary_dim, args.neighbors, dim, values);
        quantize_head(values, dim, out, scales + place);
      } else {
        turn_head(head, cos, sin, rotary_dim, args.neighbors, dim, out);
      }
    };
    Head<T> head{nullptr, static_cast<const T*>(args.bias), nullptr, 1.0f, args.norm_offset};
    T* q_out = static_cast<T*>(args.q_out) + t * args.num_heads * dim;
    each_head(args, head, args.q, t, args.num_heads, args.q_norm, [&](int64_t h, const Head<T>& q) {
      turn_head(q, cos, sin, args.rotary_dim, args.neighbors, dim, q_out + h * dim);
    });
    each_head(args, head, args.k, t, args.num_kv_heads, args.k_norm, [&](int64_t h, const Head<T>& k) {
      append(k, args.rotary_dim, h, args.k_cache, args.k_scales);
    });
    each_head(args, head, args.v, t, args.num_kv_heads, nullptr,
              [&](int64_t h, const Head<T>& v) { append(v, 0, h, args.v_cache, args.v_scales); });
  }
}

}  // namespace

void rope_append_portable(const RopeAppendArgs& args, int64_t begin, int64_t end) {
  with_storage(args.dtype, [&](auto* tag) {
    with_kv_storage(args.kv_type, [&](auto* kv_tag) {
      append_tokens<std::remove_pointer_t<decltype(tag)>, std::remove_pointer_t<decltype(kv_tag)>>(
          args, begin, end);
    });
  });
}

Tensor rope_append_cpu(const Tensor& qkv, const std::optional<Tensor>& bias, const std::optional<Tensor>& cos,
                       const std::optional<Tensor>& sin, const Tensor& k_cache, const Tensor& v_cache,
                       const Tensor& seq_lens, int64_t num_heads, const std::optional<Tensor>& kv_table,
                       int64_t layer, const std::optional<Tensor>& k_scales,
                       const std::optional<Tensor>& v_scales, const std::optional<Tensor>& block_table,
                       bool neighbors, const std::optional<Tensor>& q_norm_weight,
                       const std::optional<Tensor>& k_norm_weight, double head_norm_eps,
                       double head_norm_offset, bool /*programmatic_launch*/, const std::optional<Tensor>& k,
                       const std::optional<Tensor>& v) {
  const char* op = "rope_append";
  const DType dtype = dtype_of(qkv, op);
  const int64_t features = head_features(qkv, k, v), batch = qkv.size(0), query_len = qkv.size(1);
  const KvCache cache =
      load_kv_cache(k_cache, v_cache, k_scales, v_scales, kv_table, layer, block_table, batch, op);
  STD_TORCH_CHECK(!is_quantized(cache.type) || cache.head_dim <= kMaxQuantizedHeadDim,
                  "hf_fastpath::rope_append: head_dim is ", cache.head_dim, ", expected at most ",
                  kMaxQuantizedHeadDim, " in a quantized cache");
  STD_TORCH_CHECK(num_heads >= 0 && features == (num_heads + 2 * cache.num_kv_heads) * cache.head_dim,
                  "hf_fastpath::rope_append: qkv has ", features,
                  " features, expected (heads + 2*kv_heads)*head_dim");
  STD_TORCH_CHECK(query_len <= cache.capacity, "hf_fastpath::rope_append: query_len ", query_len,
                  " exceeds the cache's capacity ", cache.capacity, ": grow the cache first");
  check_vector(bias, features, dtype, op, "bias");
  STD_TORCH_CHECK(cos.has_value() == sin.has_value(), "hf_fastpath::rope_append: cos and sin go together");
  int64_t rotary_dim = 0, angle_rows = 1;
  if (cos.has_value()) {
    STD_TORCH_CHECK(cos->dim() == 3 && sin->dim() == 3 && (cos->size(0) == 1 || cos->size(0) == batch) &&
                        cos->size(1) == query_len && cos->size(2) % 2 == 0 &&
                        cos->size(2) <= cache.head_dim && sin->size(0) == cos->size(0) &&
                        sin->size(1) == cos->size(1) && sin->size(2) == cos->size(2),
                    "hf_fastpath::rope_append: cos and sin have to be [batch or 1, query_len, even]");
    STD_TORCH_CHECK(dtype_of(*cos, op) == dtype && dtype_of(*sin, op) == dtype,
                    "hf_fastpath::rope_append: cos and sin differ from qkv in dtype: cast them");
    rotary_dim = cos->size(2);
    angle_rows = cos->size(0);
  }
  const bool norms_all_heads = check_head_norms(q_norm_weight, k_norm_weight, dtype, num_heads,
                                                cache.num_kv_heads, cache.head_dim, op);
  std::optional<Tensor> lens_holder, bias_holder, cos_holder, sin_holder, q_norm_holder, k_norm_holder;
  const HeadInputs inputs =
      head_inputs(qkv, k, v, num_heads, cache.num_kv_heads, cache.head_dim, norms_all_heads);
  Tensor out = empty_like_with_sizes(qkv, {batch, query_len, num_heads, cache.head_dim});
  RopeAppendArgs args{};
  args.dtype = dtype;
  args.kv_type = cache.type;
  args.query_len = query_len;
  args.num_heads = num_heads;
  args.num_kv_heads = cache.num_kv_heads;
  args.head_dim = cache.head_dim;
  args.rotary_dim = rotary_dim;
  args.neighbors = neighbors;
  args.capacity = cache.capacity;
  args.q = inputs.q, args.k = inputs.k, args.v = inputs.v;
  args.bias = optional_data(bias, bias_holder);
  args.cos = optional_data(cos, cos_holder);
  args.sin = optional_data(sin, sin_holder);
  args.angle_stride = angle_rows > 1 ? query_len * rotary_dim : 0;
  args.k_cache = cache.k;
  args.v_cache = cache.v;
  args.k_scales = cache.k_scales;
  args.v_scales = cache.v_scales;
  args.pages = cache.pages;
  args.page_size = cache.page_size;
  args.seq_lens = load_int_vector(seq_lens, batch, lens_holder, op, "seq_lens");
  args.q_out = out.mutable_data_ptr();
  args.q_norm = optional_data(q_norm_weight, q_norm_holder);
  args.k_norm = optional_data(k_norm_weight, k_norm_holder);
  args.norms_all_heads = norms_all_heads;
  args.norm_eps = static_cast<float>(head_norm_eps);
  args.norm_offset = static_cast<float>(head_norm_offset);
  for (int64_t b = 0; b < batch; ++b) {
    check_pages(cache, b, int64_t(args.seq_lens[b]) - query_len, args.seq_lens[b], op);
  }
  const auto kernel = use_avx2() ? rope_append_avx2 : rope_append_portable;
  const int64_t tokens = batch * query_len;
  for_each_range(tokens, 2 * tokens * features * element_size(dtype),
                 [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  return out;
}

HF_FASTPATH_KERNEL(CPU, "rope_append", rope_append_cpu)

}  // namespace hf_fastpath
