// latent_attention on the CPU: threads, the softmax, and the portable kernel.
#include "latent_attention/latent_attention_cpu.h"

#include <cmath>
#include <type_traits>

#include "common/convert_cpu.h"
#include "common/cpu_glue.h"
#include "common/heads_cpu.h"
#include "latent_attention/latent_attention_glue.h"

namespace hf_fastpath {

void latent_scores_portable(const LatentBlock& block, const float* q, float* scores) {
  for (int64_t h = 0; h < block.heads; ++h) {
    for (int64_t j = 0; j < block.count; ++j) {
      double sum = 0.0;
      for (int64_t i = 0; i < block.width; ++i)
        sum += double(q[h * block.width + i]) * block.keys[j * block.width + i];
      scores[h * kLatentBlock + j] = static_cast<float>(sum);
    }
  }
}

void latent_add_portable(const LatentBlock& block, const float* weights, const float* shrink, float* sums) {
  for (int64_t h = 0; h < block.heads; ++h) {
    for (int64_t i = 0; i < block.rank; ++i) {
      float* to = sums + h * block.rank + i;
      double sum = double(shrink[h]) * *to;
      for (int64_t j = 0; j < block.count; ++j)
        sum += double(weights[h * kLatentBlock + j]) * block.keys[j * block.width + i];
      *to = static_cast<float>(sum);
    }
  }
}

namespace {

// The softmax of a head so far.
struct Running {
  float max;
  double total;
};

// A cache, and the positions of one sequence that are visible: [first, last).
template <class T>
struct Sequence {
  T* latents;    // [capacity, rank]
  T* rope_keys;  // [capacity, rope_dim]
  int64_t first, last;

  Sequence(const LatentAttentionParams& p, int64_t row) {
    const int64_t capacity = p.kv_table != nullptr ? p.kv_table[2] : p.capacity;
    latents = static_cast<T*>(p.kv_table != nullptr ? reinterpret_cast<void*>(p.kv_table[0]) : p.latents) +
              row * capacity * p.rank;
    rope_keys =
        static_cast<T*>(p.kv_table != nullptr ? reinterpret_cast<void*>(p.kv_table[1]) : p.rope_keys) +
        row * capacity * p.rope_dim;
    first = p.starts != nullptr ? std::max<int64_t>(p.starts[row], 0) : 0;
    last = std::min<int64_t>(p.seq_lens[row], capacity);
  }
};

// Element e of a rotary part, rotated if there are angles.
template <class T>
float rotated_at(const LatentAttentionParams& p, int64_t row, const T* x, int64_t e) {
  if (p.cos.data == nullptr) return to_float(x[e]);
  const Turn turn(p.rotation, static_cast<int>(e), static_cast<int>(p.rope_dim));
  return to_float(x[turn.own]) * to_float(head_of<T>(p.cos, row, 0)[e]) +
         turn.sign * to_float(x[turn.other]) * to_float(head_of<T>(p.sin, row, 0)[e]);
}

template <class T>
void append(const LatentAttentionParams& p, int64_t row) {
  const Sequence<T> sequence(p, row);
  if (sequence.last <= 0) return;
  const T* latent = head_of<T>(p.new_latent, row, 0);
  std::copy(latent, latent + p.rank, sequence.latents + (sequence.last - 1) * p.rank);
  T* key = sequence.rope_keys + (sequence.last - 1) * p.rope_dim;
  for (int64_t e = 0; e < p.rope_dim; ++e)
    from_float(rotated_at(p, row, head_of<T>(p.new_rope, row, 0), e), key + e);
}

// Heads [begin, end) of one sequence.
template <class T>
void run_heads(const LatentAttentionParams& p, int64_t row, int64_t begin, int64_t end) {
  const bool avx2 = use_avx2();
  const auto convert = avx2 ? convert_to_float_avx2 : convert_to_float_portable;
  const auto scores_of = avx2 ? latent_scores_avx2 : latent_scores_portable;
  const auto add = avx2 ? latent_add_avx2 : latent_add_portable;
  const int64_t width = p.rank + p.rope_dim, heads = end - begin;
  float* queries = scratch<0>(heads * width);
  float* sums = scratch<1>(heads * p.rank);
  float* keys = scratch<2>(kLatentBlock * width);
  float* weights = scratch<4>(heads * (kLatentBlock + 1));
  float* shrink = weights + heads * kLatentBlock;
  Running* running = reinterpret_cast<Running*>(scratch<3>(heads * sizeof(Running) / sizeof(float)));
  for (int64_t h = 0; h < heads; ++h) {
    convert(p.dtype, head_of<T>(p.q_latent, row, begin + h), queries + h * width, p.rank);
    const T* rope = head_of<T>(p.q_rope, row, begin + h);
    for (int64_t e = 0; e < p.rope_dim; ++e) queries[h * width + p.rank + e] = rotated_at(p, row, rope, e);
    running[h] = {-INFINITY, 0.0};
  }
  std::fill(sums, sums + heads * p.rank, 0.0f);

  const Sequence<T> sequence(p, row);
  const int64_t first = sequence.first, last = sequence.last;
  for (int64_t position = first; position < last; position += kLatentBlock) {
    const LatentBlock block{keys, std::min(kLatentBlock, last - position), p.rank, width, heads};
    for (int64_t j = 0; j < block.count; ++j) {
      const int64_t slot = position + j;
      convert(p.dtype, sequence.latents + slot * p.rank, keys + j * width, p.rank);
      convert(p.dtype, sequence.rope_keys + slot * p.rope_dim, keys + j * width + p.rank, p.rope_dim);
    }
    scores_of(block, queries, weights);
    for (int64_t h = 0; h < heads; ++h) {
      float* const of_head = weights + h * kLatentBlock;
      float max = running[h].max;
      for (int64_t j = 0; j < block.count; ++j) max = std::max(max, of_head[j] *= p.scale);
      const float base = max == -INFINITY ? 0.0f : max;
      shrink[h] = std::exp(running[h].max - base);
      double total = 0.0;
      for (int64_t j = 0; j < block.count; ++j) total += of_head[j] = std::exp(of_head[j] - base);
      running[h] = {max, running[h].total * shrink[h] + total};
    }
    add(block, weights, shrink, sums);
  }
  T* out = static_cast<T*>(p.out) + (row * p.heads + begin) * p.rank;
  for (int64_t h = 0; h < heads; ++h) {
    const double inverse = first < last ? 1.0 / running[h].total : 0.0;
    for (int64_t i = 0; i < p.rank; ++i)
      from_float(static_cast<float>(sums[h * p.rank + i] * inverse), out + h * p.rank + i);
  }
}

}  // namespace

Tensor latent_attention_cpu(const Tensor& q_latent, const Tensor& q_rope, const Tensor& latents,
                            const Tensor& rope_keys, const Tensor& seq_lens,
                            const std::optional<Tensor>& starts, double scale,
                            const std::optional<Tensor>& kv_table, int64_t layer,
                            const std::optional<Tensor>& new_latent, const std::optional<Tensor>& new_rope,
                            const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                            int64_t rotation, bool programmatic_launch) {
  const LatentAttentionCall call(q_latent, q_rope, latents, rope_keys, seq_lens, starts, scale, kv_table,
                                 layer, new_latent, new_rope, cos, sin, rotation, programmatic_launch);
  const LatentAttentionParams& p = call.params;
  for (int64_t row = 0; row < p.batch && p.new_latent.data != nullptr; ++row)
    with_storage(p.dtype, [&](auto* tag) { append<std::remove_pointer_t<decltype(tag)>>(p, row); });
  int64_t positions = 0;
  for (int64_t row = 0; row < p.batch; ++row) positions += std::max(p.seq_lens[row], 0);
  const int64_t units = p.batch * p.heads;
  const int64_t work = positions * p.heads * (2 * p.rank + p.rope_dim);
  const int64_t parts = std::min(units, part_count(work, kWorkPerPart));
  for_each_part(parts, [&](int64_t part) {
    const int64_t end = part_begin(units, parts, part + 1);
    for (int64_t unit = part_begin(units, parts, part); unit < end;) {
      const int64_t row = unit / p.heads, head = unit % p.heads;
      const int64_t count = std::min(end - unit, p.heads - head);
      with_storage(p.dtype, [&](auto* tag) {
        run_heads<std::remove_pointer_t<decltype(tag)>>(p, row, head, head + count);
      });
      unit += count;
    }
  });
  return call.out;
}

HF_FASTPATH_KERNEL(CPU, "latent_attention", latent_attention_cpu)

}  // namespace hf_fastpath
