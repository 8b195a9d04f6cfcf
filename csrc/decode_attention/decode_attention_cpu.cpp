// decode_attention on the CPU: checks, allocation, division into chunks, threads, and the portable kernel.
#include "decode_attention/decode_attention_cpu.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common/composed_ops.h"
#include "common/convert_cpu.h"
#include "common/cpu_glue.h"
#include "common/cpu_math.h"
#include "common/head_dims.h"
#include "common/kv_cache_cpu.h"
#include "common/kv_quants.h"

namespace hf_fastpath {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Sums are in double precision: one chain of float32 over a chunk's positions rounds more than PyTorch's
// blocks do.
template <class T>
void run_chunk(const AttentionChunk& chunk) {
  const int64_t dim = chunk.head_dim, queries = chunk.query_len * chunk.group;
  std::vector<double> all_accumulators(queries * dim), all_weights(queries), maxima(queries, kMinusInfinity);
  for (int64_t j = chunk.begin; j < chunk.end; ++j) {
    const int64_t slot = row_of(chunk, j);
    const T* k = static_cast<const T*>(chunk.k) + slot * dim;
    const T* v = static_cast<const T*>(chunk.v) + slot * dim;
    float k_scale = chunk.scale, v_scale = 1.0f;
    if constexpr (kIsQuant<T>) {
      k_scale *= to_float(BFloat16{chunk.k_scales[slot]});
      v_scale = to_float(BFloat16{chunk.v_scales[slot]});
    }
    for (int64_t m = 0; m < queries; ++m) {
      const int64_t position = chunk.first_query + m / chunk.group;
      if (j > position || (chunk.window > 0 && j <= position - chunk.window)) continue;
      const float* q = chunk.q + m * dim;
      double* accumulators = all_accumulators.data() + m * dim;
      double parts[4] = {};
      for (int64_t d = 0; d < dim; ++d) parts[d % 4] += static_cast<double>(to_float(k[d])) * q[d];
      double exact = k_scale * ((parts[0] + parts[2]) + (parts[1] + parts[3]));
      if (chunk.softcap > 0.0f) exact = chunk.softcap * std::tanh(exact / chunk.softcap);
      if (chunk.slopes != nullptr) exact += double(chunk.slopes[m % chunk.group]) * double(j - position);
      if (chunk.biases != nullptr) {
        exact += chunk.biases[m * chunk.distances + std::min(position - j, chunk.distances - 1)];
      }
      const float rounded = static_cast<float>(exact);
      const double score = std::isfinite(rounded) ? exact : rounded, before = maxima[m];
      const double now = score > before ? score : before;
      if (now == kMinusInfinity && score == kMinusInfinity) continue;  // weighs nothing
      const double base = now == kMinusInfinity ? 0.0 : now;           // score may be NaN
      const double shrink = before == kMinusInfinity ? 0.0 : std::exp(before - base),
                   weight = std::exp(score - base);
      const bool rescale = now != before;
      const double share = weight * v_scale;
      all_weights[m] = (rescale ? all_weights[m] * shrink : all_weights[m]) + weight;
      for (int64_t d = 0; d < dim; ++d) {
        accumulators[d] = (rescale ? accumulators[d] * shrink : accumulators[d]) + share * to_float(v[d]);
      }
      maxima[m] = now;
    }
  }
  std::copy(all_accumulators.begin(), all_accumulators.end(), chunk.accumulators);
  std::copy(all_weights.begin(), all_weights.end(), chunk.weights);
  std::copy(maxima.begin(), maxima.end(), chunk.maxima);
}

}  // namespace

void attention_chunk_portable(const AttentionChunk& chunk) {
  with_kv_storage(chunk.kv_type, [&](auto* tag) { run_chunk<std::remove_pointer_t<decltype(tag)>>(chunk); });
}

void attention_merge_portable(DType dtype, const float* accumulators, float* maxima, const float* weights,
                              int64_t parts, int64_t accumulator_stride, int64_t stat_stride,
                              int64_t head_dim, float sink, void* out) {
  float top = sink;
  for (int64_t p = 0; p < parts; ++p) top = std::max(top, maxima[p * stat_stride]);
  float total = sink == kMinusInfinity ? 0.0f : std::exp(sink - top);
  for (int64_t p = 0; p < parts; ++p) {
    float* maximum = maxima + p * stat_stride;
    *maximum = *maximum == kMinusInfinity ? 0.0f : std::exp(*maximum - top);  // the part's factor
    total += weights[p * stat_stride] * *maximum;
  }
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
  with_storage(dtype, [&](auto* tag) {
    auto* to = static_cast<std::remove_pointer_t<decltype(tag)>*>(out);
    for (int64_t d = 0; d < head_dim; ++d) {
      float sum = 0.0f;
      for (int64_t p = 0; p < parts; ++p)
        sum += accumulators[p * accumulator_stride + d] * maxima[p * stat_stride];
      from_float(sum * inverse, to + d);
    }
  });
}

namespace {

// Positions of a chunk, about: at least enough to outweigh its merge, and as many as leave this many chunks
// in all, to balance a handful of heads over the threads. The division depends on lengths and heads only, so
// that results do not depend on the number of threads.
constexpr int64_t kMinChunkPositions = 256, kMaxChunkPositions = 2048, kTargetChunks = 64;
// Partial results worth another thread in the merge.
constexpr int64_t kMergeFloatsPerPart = 64 * 1024;

// Below this many positions a query is not worth its steps.
constexpr int64_t kMinStepPositions = 64;

// Queries [rows, head_dim] in 16-bit steps, and the size of each one's. False if one is not finite.
bool queries_in_steps(const float* q, int64_t rows, int64_t head_dim, int16_t* steps, float* units) {
  constexpr float kMostSteps = 32767.0f, kRounding = 0x1.8p23f;  // adding it rounds to an integer
  for (int64_t r = 0; r < rows; ++r, q += head_dim, steps += head_dim) {
    float largest = 0.0f, sum = 0.0f;
    for (int64_t d = 0; d < head_dim; ++d) {
      const float magnitude = std::fabs(q[d]);
      largest = magnitude > largest ? magnitude : largest;
      sum += magnitude;
    }
    if (!(sum <= std::numeric_limits<float>::max())) return false;
    units[r] = largest / kMostSteps;
    const float inverse = units[r] > std::numeric_limits<float>::min() ? 1.0f / units[r] : 0.0f;
    for (int64_t d = 0; d < head_dim; ++d) {
      steps[d] = static_cast<int16_t>(float_to_bits(q[d] * inverse + kRounding) - float_to_bits(kRounding));
    }
  }
  return true;
}

// The visible cache of one batch row, the union over its tokens. Its parts are the chunks, and attention over
// other keys where there is some; first_part counts those of the rows in front.
struct VisibleRange {
  int64_t begin, end, first_query, chunks, parts, first_part;
};

// Log of the sum of exp(score) that the parts of a row and its sink make, see attention_merge_portable.
float log_sum_exp(const float* maxima, const float* weights, int64_t parts, int64_t stride, float sink) {
  float top = sink;
  for (int64_t p = 0; p < parts; ++p) top = std::max(top, maxima[p * stride]);
  if (top == kMinusInfinity) return top;
  double sum = std::exp(double(sink) - top);
  for (int64_t p = 0; p < parts; ++p) sum += weights[p * stride] * std::exp(double(maxima[p * stride]) - top);
  return static_cast<float>(top + std::log(sum));
}

// First position of chunk `chunk`, in whole blocks.
int64_t chunk_begin(const VisibleRange& range, int64_t chunk) {
  return range.begin + part_begin(range.end - range.begin, range.chunks, chunk, kBlockPositions);
}

}  // namespace

Tensor decode_attention_cpu(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                            const Tensor& seq_lens, const std::optional<Tensor>& starts, double scale,
                            int64_t window, const std::optional<Tensor>& kv_table, int64_t layer,
                            const std::optional<Tensor>& /*workspace*/, bool /*programmatic_launch*/,
                            const std::optional<Tensor>& sinks, const std::optional<Tensor>& k_scales,
                            const std::optional<Tensor>& v_scales, const std::optional<Tensor>& block_table,
                            double softcap, const std::optional<Tensor>& slopes,
                            const std::optional<Tensor>& biases, const std::optional<Tensor>& other,
                            const std::optional<Tensor>& other_lse, const std::optional<Tensor>& lse) {
  const char* op = "decode_attention";
  const DType dtype = dtype_of(q, op);
  STD_TORCH_CHECK(q.dim() == 4 && q.size(1) >= 1 && q.size(1) <= kMaxQueryLen,
                  "hf_fastpath::decode_attention: q has to be [batch, 1 to ", kMaxQueryLen,
                  ", heads, head_dim]");
  const int64_t batch = q.size(0), query_len = q.size(1), num_heads = q.size(2), dim = q.size(3);
  const KvCache cache =
      load_kv_cache(k_cache, v_cache, k_scales, v_scales, kv_table, layer, block_table, batch, op);
  STD_TORCH_CHECK(cache.head_dim == dim && num_heads % cache.num_kv_heads == 0 && num_heads > 0,
                  "hf_fastpath::decode_attention: q has ", num_heads, " heads of ", dim, ", the cache ",
                  cache.num_kv_heads, " of ", cache.head_dim);
  STD_TORCH_CHECK(takes_head_dim(dim), "hf_fastpath::decode_attention: head_dim is ", dim,
                  ", expected an even number up to ", kMaxHeadDim);
  check_score_changes(op, q, sinks, softcap, slopes, biases);
  check_other_keys(op, q, other, other_lse, lse);
  std::optional<Tensor> slopes_holder, biases_holder;
  const float* const bias_of = static_cast<const float*>(optional_data(biases, biases_holder));
  const int64_t distances = biases ? biases->size(-1) : 0;
  const int64_t bias_heads = biases && biases->dim() == 3 ? num_heads : 0;  // of a batch row
  const float* const slope_of = static_cast<const float*>(optional_data(slopes, slopes_holder));
  STD_TORCH_CHECK(window >= 0, "hf_fastpath::decode_attention: window is ", window, ", expected 0 or more");
  std::optional<Tensor> lens_holder, starts_holder;
  const int32_t* lens = load_int_vector(seq_lens, batch, lens_holder, op, "seq_lens");
  const int32_t* first =
      starts.has_value() ? load_int_vector(*starts, batch, starts_holder, op, "starts") : nullptr;

  check_vector(sinks, num_heads, dtype, op, "sinks");
  std::optional<Tensor> sinks_holder;
  const void* sink_of = optional_data(sinks, sinks_holder);
  std::optional<Tensor> other_holder, other_lse_holder;
  const void* const other_of = optional_data(other, other_holder);
  const float* const other_lse_of = static_cast<const float*>(optional_data(other_lse, other_lse_holder));
  float* const lse_to = lse ? static_cast<float*>(lse->mutable_data_ptr()) : nullptr;

  // What is visible, and its chunks.
  thread_local std::vector<VisibleRange> range_buffer;
  range_buffer.resize(batch);
  VisibleRange* const ranges =
      range_buffer.data();  // not the vector: in another thread its name is another one
  int64_t positions = 0;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t end = lens[b], first_query = end - query_len;
    // The ring holds the newest `capacity` positions.
    int64_t begin = std::max<int64_t>({0, end - cache.capacity, first != nullptr ? first[b] : 0});
    if (window > 0) begin = std::max(begin, first_query - window + 1);
    ranges[b] = {begin, std::max(begin, end), first_query, 0, 0, 0};
    check_pages(cache, b, begin, end, op);
    positions += ranges[b].end - begin;
  }
  const int64_t chunk_positions =
      std::clamp(positions * cache.num_kv_heads / kTargetChunks, kMinChunkPositions, kMaxChunkPositions);
  int64_t row_parts = 0;
  for (int64_t b = 0; b < batch; ++b) {
    ranges[b].chunks = (ranges[b].end - ranges[b].begin + chunk_positions - 1) / chunk_positions;
    ranges[b].parts = ranges[b].chunks + (other ? 1 : 0);
    ranges[b].first_part = row_parts;
    row_parts += ranges[b].parts;
  }
  const int64_t group = num_heads / cache.num_kv_heads, queries = query_len * group;
  const int64_t heads = cache.num_kv_heads, items = row_parts * heads;
  const int64_t bytes = 2 * positions * heads * dim * element_size(cache.type);
  const int64_t parts = std::max<int64_t>(1, std::min(part_count(bytes, kBytesPerPart), items));

  // Scratch: q by (row, KV head, token, head of the group); partial results by item; block scores by part.
  const int64_t q_floats = batch * query_len * num_heads * dim;
  const int64_t accumulator_floats = items * queries * dim, stat_floats = round_up(items * queries, 16);
  const int64_t score_floats = attention_scratch_floats(queries);
  const bool may_step = use_avx512_vnni() && cache.type == KvType::kInt8 && dtype != DType::kFloat32 &&
                        dim % 32 == 0 && positions >= kMinStepPositions * batch;
  const int64_t q_rows = batch * query_len * num_heads;
  const int64_t step_floats = may_step ? round_up(q_floats / 2, 16) + q_rows : 0;
  float* float_q = scratch(round_up(q_floats, 16) + accumulator_floats + 2 * stat_floats +
                           parts * score_floats + step_floats);
  float* accumulators = float_q + round_up(q_floats, 16);
  float* maxima = accumulators + accumulator_floats;
  float* weights = maxima + stat_floats;
  float* scores = weights + stat_floats;
  auto* const q_steps = reinterpret_cast<int16_t*>(scores + parts * score_floats);
  float* const q_units = scores + parts * score_floats + round_up(q_floats / 2, 16);
  const Tensor input = hf_fastpath::contiguous(q);
  const void* q_data = input.const_data_ptr();
  const bool avx2 = use_avx2() && dim % 8 == 0;  // its vectors know no tails
  const auto convert = avx2 ? convert_to_float_avx2 : convert_to_float_portable;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t i = 0; i < query_len; ++i) {
      for (int64_t h = 0; h < heads; ++h) {
        convert(dtype, at(q_data, ((b * query_len + i) * num_heads + h * group) * dim, dtype),
                float_q + (((b * heads + h) * query_len + i) * group) * dim, group * dim);
      }
    }
  }

  const bool in_steps = may_step && queries_in_steps(float_q, q_rows, dim, q_steps, q_units);

  // Items in the order (row, KV head, part); a row's first item is heads * first_part.
  const auto widest = use_avx512() && dim % 16 == 0 ? attention_chunk_avx512 : attention_chunk_avx2;
  const auto kernel = avx2 ? widest : attention_chunk_portable;
  for_each_part(parts, [&](int64_t part) {
    const int64_t begin = part_begin(items, parts, part), end = part_begin(items, parts, part + 1);
    int64_t b = 0;
    for (int64_t item = begin; item < end; ++item) {
      while (item >= heads * (ranges[b].first_part + ranges[b].parts)) ++b;
      const VisibleRange& range = ranges[b];
      const int64_t within = item - heads * range.first_part, h = within / range.parts,
                    c = within % range.parts;
      if (c == range.chunks) {
        for (int64_t m = item * queries; m < (item + 1) * queries; ++m) {
          const int64_t i = m - item * queries,
                        row = (b * query_len + i / group) * num_heads + h * group + i % group;
          convert(dtype, at(other_of, row * dim, dtype), accumulators + m * dim, dim);
          maxima[m] = other_lse_of[row];
          weights[m] = 1.0f;
        }
        continue;
      }
      AttentionChunk chunk{};
      chunk.kv_type = cache.type;
      chunk.head_dim = dim;
      chunk.capacity = cache.capacity;
      const int64_t base = cache.pages != nullptr ? h * cache.page_size : (b * heads + h) * cache.capacity,
                    bytes_before = base * dim * element_size(cache.type);
      chunk.k = static_cast<const char*>(cache.k) + bytes_before;
      chunk.v = static_cast<const char*>(cache.v) + bytes_before;
      if (is_quantized(cache.type)) {
        chunk.k_scales = cache.k_scales + base;
        chunk.v_scales = cache.v_scales + base;
      }
      if (cache.pages != nullptr) {
        chunk.pages = cache.pages + b * (cache.capacity / cache.page_size);
        chunk.page_size = cache.page_size;
        chunk.page_stride = heads * cache.page_size;
      }
      chunk.begin = chunk_begin(range, c);
      chunk.end = chunk_begin(range, c + 1);
      chunk.query_len = query_len;
      chunk.group = group;
      chunk.q = float_q + (b * heads + h) * queries * dim;
      if (in_steps) {
        chunk.q_steps = q_steps + (b * heads + h) * queries * dim;
        chunk.q_units = q_units + (b * heads + h) * queries;
      }
      chunk.first_query = range.first_query;
      chunk.window = window;
      chunk.scale = static_cast<float>(scale);
      chunk.softcap = static_cast<float>(softcap);
      chunk.slopes = slope_of != nullptr ? slope_of + h * group : nullptr;
      chunk.biases = bias_of != nullptr ? bias_of + (b * bias_heads + h * group) * distances : nullptr;
      chunk.distances = distances;
      chunk.accumulators = accumulators + item * queries * dim;
      chunk.maxima = maxima + item * queries;
      chunk.weights = weights + item * queries;
      chunk.scratch = scores + part * score_floats;
      kernel(chunk);
    }
  });

  Tensor out = empty_like_with_sizes(q, {batch, query_len, num_heads * dim});
  void* to = out.mutable_data_ptr();
  const auto merge = avx2 ? attention_merge_avx2 : attention_merge_portable;
  const int64_t pairs = batch * heads;
  const int64_t mergers = std::min(pairs, part_count(accumulator_floats, kMergeFloatsPerPart));
  for_each_part(mergers, [&](int64_t part) {
    const int64_t end = part_begin(pairs, mergers, part + 1);
    for (int64_t pair = part_begin(pairs, mergers, part); pair < end; ++pair) {
      const int64_t b = pair / heads, h = pair % heads;
      const int64_t item = heads * ranges[b].first_part + h * ranges[b].parts;
      for (int64_t m = 0; m < queries; ++m) {
        const int64_t head = h * group + m % group, row = (b * query_len + m / group) * num_heads + head;
        float sink = kMinusInfinity;
        if (sink_of != nullptr) convert(dtype, at(sink_of, head, dtype), &sink, 1);
        float* const row_maxima = maxima + item * queries + m;
        const float* const row_weights = weights + item * queries + m;
        const int64_t row_parts = ranges[b].parts;
        if (lse_to != nullptr) lse_to[row] = log_sum_exp(row_maxima, row_weights, row_parts, queries, sink);
        merge(dtype, accumulators + (item * queries + m) * dim, row_maxima, row_weights, row_parts,
              queries * dim, queries, dim, sink, at(to, row * dim, dtype));
      }
    }
  });
  return out;
}

HF_FASTPATH_KERNEL(CPU, "decode_attention", decode_attention_cpu)

}  // namespace hf_fastpath
