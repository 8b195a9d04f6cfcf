// Tiles of quantized K and V on their way to decode_attention_quants.cuh's tensor cores: rings in shared
// memory, the copies that fill them, the newest positions, and scales.
#pragma once

#include "common/async.cuh"
#include "common/kv_quants.cuh"
#include "decode_attention/decode_attention.h"
#include "decode_attention/split.cuh"

namespace hf_fastpath {
namespace {

constexpr int kQuantTile = 32;  // positions: four n sides of the first product, two k sides of the second

// Quants of V as half_pair takes them.
template <class Quant>
__device__ __forceinline__ uint32_t biased(uint32_t quants) {
  return std::is_same_v<Quant, int8_t> ? quants ^ 0x80808080u : quants;
}

// The lower or upper two of four such, as float16 pairs.
template <class Quant, bool kUpper>
__device__ __forceinline__ uint32_t half_pair(uint32_t quants) {
  if constexpr (std::is_same_v<Quant, int8_t>) {
    const uint32_t raised = spread_bytes<kUpper>(quants, 0x64646464u);  // 1024 + 128 + quant
    const __half2 pair = __hsub2(reinterpret_cast<const __half2&>(raised), __float2half2_rn(1152.f));
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    return float8_pair<kUpper>(quants);
  }
}

// A warp's ring of tiles, rows are positions as they lie in the cache: kRing times kQuantTile of K, then of
// V. Eight lanes that read together meet twice in a bank for K and four times for V, which costs less than
// any other order of the rows: bulk copies that are shorter, or land on no multiple of 128 bytes, are slower.
template <int kDims, int kRing>
struct QuantTiles {
  static constexpr int kTileBytes = kQuantTile * kDims, kBytes = kRing * 2 * kTileBytes;

  char* shared;
  uint32_t full;  // the warp's barriers, one a stage
  int row_bytes, lane, stored;
  uint64_t policy;
  uint32_t parity = 0;

  // stored: positions from it on do not come from the cache.
  __device__ __forceinline__ QuantTiles(const DecodeAttentionParams& p, char* warp_shared, uint64_t* barriers,
                                        int lane, int stored)
      : shared(warp_shared),
        full(shared_address(barriers)),
        row_bytes(p.head_dim),
        lane(lane),
        stored(stored) {
#if HF_FASTPATH_HOPPER
    policy = read_once_policy();
    if (lane < kRing) {
      barrier_init(full + 8 * lane, 1);
      barrier_init_done();
    }
    __syncwarp();
#endif
  }
  __device__ __forceinline__ char* k_tile(int stage) const { return shared + stage * 2 * kTileBytes; }
  __device__ __forceinline__ char* v_tile(int stage) const { return k_tile(stage) + kTileBytes; }

  // This lane's pieces of the tile: of 16 dims of K, of the position whose scores are its quad's in group t;
  __device__ __forceinline__ uint4 k(int stage, int t, int c) const {
    const int g = lane / 4, row = g / 2 * 8 + t * 2 + g % 2, at = (c * 4 + lane % 4) * 16;
    if (at >= row_bytes) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4*>(k_tile(stage) + row * row_bytes + at);
  }
  // of 16 or 8 dims of V, of one of the eight positions whose scores are this lane's.
  __device__ __forceinline__ void v(int stage, int i, int b, uint32_t (&words)[4]) const {
    const int row = lane % 4 * 8 + i, at = (b * 8 + lane / 4) * 16;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (at < row_bytes) v = *reinterpret_cast<const uint4*>(v_tile(stage) + row * row_bytes + at);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  }
  __device__ __forceinline__ void v(int stage, int i, int, uint32_t (&words)[2]) const {
    const int row = lane % 4 * 8 + i, at = lane / 4 * 8;
    uint2 v = make_uint2(0, 0);
    if (at < row_bytes) v = *reinterpret_cast<const uint2*>(v_tile(stage) + row * row_bytes + at);
    words[0] = v.x, words[1] = v.y;
  }

  // Asks for the tile of positions base and following; every lane comes here for every tile.
  __device__ __forceinline__ void fetch(const PlacedSplit<false>& s, int base, int stage) {
#if HF_FASTPATH_HOPPER
    if (base >= s.end || !is_elected()) return;
    const int count = min(kQuantTile, stored - base);
    const uint32_t barrier = full + 8 * stage;
    if (count <= 0) return barrier_arrive(barrier);  // all of it is new
    const uint32_t slot = s.slot(base - s.begin);
    const int before_wrap = min(count, int(s.capacity - slot)) * row_bytes;
    const int wrapped = count * row_bytes - before_wrap;  // from slot 0 on
    barrier_arrive_expect(barrier, 2 * count * row_bytes);
    const auto copy = [&](char* to, const char* from) {
      copy_to_shared(shared_address(to), from + uint64_t(slot) * row_bytes, before_wrap, barrier, policy);
      if (wrapped > 0) copy_to_shared(shared_address(to) + before_wrap, from, wrapped, barrier, policy);
    };
    copy(k_tile(stage), s.k);
    copy(v_tile(stage), s.v);
#else
    if (base < s.end) {
      const int pieces = row_bytes / 16;
      for (int i = lane; i < kQuantTile * pieces; i += kWarpSize) {
        const int row = i / pieces, at = i * 16;
        if (base + row >= stored) break;
        const uint64_t from = uint64_t(s.slot(base - s.begin + row)) * row_bytes + (at - row * row_bytes);
        copy_async(k_tile(stage) + at, s.k + from, true);
        copy_async(v_tile(stage) + at, s.v + from, true);
      }
    }
    commit_copies();
#endif
  }

  // Waits for it. What follows the last position is zeros in V, which weights of zero are multiplied by.
  __device__ __forceinline__ void wait(const PlacedSplit<false>& s, int base, int stage) {
#if HF_FASTPATH_HOPPER
    barrier_wait(full + 8 * stage, parity);
    if (stage + 1 == kRing) parity ^= 1;
#else
    wait_for_copies<kRing - 1>();
    __syncwarp();  // every lane's copies
#endif
    if (base + kQuantTile <= s.end) return;
    for (int i = (s.end - base) * row_bytes + lane * 16; i < kQuantTile * row_bytes; i += kWarpSize * 16)
      *reinterpret_cast<uint4*>(v_tile(stage) + i) = make_uint4(0, 0, 0, 0);
    __syncwarp();  // zeros
  }
  // This lane has read what it reads of a tile; `sums` comes of all of it.
  __device__ __forceinline__ void done(const DecodeAttentionParams& p, uint32_t sums) {
#if HF_FASTPATH_HOPPER
    full = behind_reads(full, sums, p.zero);
#endif
  }
};

// Scales of a lane's eight positions of a tile; zero where there are none.
template <class Quant>
struct QuantScales {
  Scales from;
  bool aligned;        // eight positions that start at a multiple of eight are one load
  uint4 k, v;          // bfloat16
  float v_unit = 0.f;  // the warp's accumulators are multiples of it: a power of two, or 0 for none yet

  __device__ __forceinline__ QuantScales(const DecodeAttentionParams& p, const PlacedSplit<false>& s, int row,
                                         int kv_head)
      : from(find_scales(p, s, row, kv_head)) {
    const uint64_t places = reinterpret_cast<uint64_t>(from.k) | reinterpret_cast<uint64_t>(from.v);
    aligned = (places & 15) == 0 && ((s.first_slot | s.capacity) & 7) == 0;
  }

  // Asks for those of positions `first` and following, of those before `end`.
  __device__ __forceinline__ void fetch(const PlacedSplit<false>& s, int first, int end) {
    k = v = make_uint4(0, 0, 0, 0);
    if (first >= end) return;
    if (aligned && first + 8 <= end) {
      const uint32_t slot = s.slot(first - s.begin);
      k = __ldcg(reinterpret_cast<const uint4*>(from.k + slot));
      v = __ldcg(reinterpret_cast<const uint4*>(from.v + slot));
      return;
    }
    uint16_t of_k[8], of_v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const bool present = first + j < end;
      const uint32_t slot = present ? s.slot(first + j - s.begin) : 0;
      of_k[j] = present ? __ldcg(from.k + slot) : 0;
      of_v[j] = present ? __ldcg(from.v + slot) : 0;
    }
    const auto pack = [](const uint16_t (&bits)[8]) {
      return make_uint4(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16,
                        bits[6] | bits[7] << 16);
    };
    k = pack(of_k), v = pack(of_v);
  }

  // Sets that of one position, `place` of the eight.
  __device__ __forceinline__ void set(int place, uint32_t of_k, uint32_t of_v) {
    const uint32_t order = place % 2 ? 0x5410 : 0x3254;  // the upper half, or the lower
    const auto put = [&](uint4& bits, uint32_t scale) {
      const auto in = [&](uint32_t& word, int w) {
        if (place / 2 == w) word = __byte_perm(word, scale, order);
      };
      in(bits.x, 0), in(bits.y, 1), in(bits.z, 2), in(bits.w, 3);
    };
    put(k, of_k), put(v, of_v);
  }

  // Whether v_unit is below some lane's scales, by a power of two.
  __device__ __forceinline__ bool grows() const {
    return __any_sync(kAllLanes, largest() >= (v_unit > 0.f ? 2.f * v_unit : 0x1p-126f));
  }
  // Lets v_unit grow to the largest power of two in the tile's scales of V; what the accumulators are to be
  // multiplied by.
  __device__ __forceinline__ float grow() {
    float most = fmaxf(v_unit, largest());
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
    const float grown = __uint_as_float(__float_as_uint(most) & 0x7f800000u),
                shrink = v_unit * inverse(grown);
    v_unit = grown;
    return shrink;
  }
  // Those of K, and what a weight of V is multiplied by: less than 2.
  __device__ __forceinline__ void unpack(float (&of_k)[8], float (&of_v)[8]) const {
    const float factor = inverse(v_unit);
    const uint32_t k_words[4] = {k.x, k.y, k.z, k.w}, v_words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 pair = unpack2(k_words[w], __nv_bfloat16()), other = unpack2(v_words[w], __nv_bfloat16());
      of_k[2 * w] = pair.x, of_k[2 * w + 1] = pair.y;
      of_v[2 * w] = other.x * factor, of_v[2 * w + 1] = other.y * factor;
    }
  }
  // What the accumulators are multiplied by in the end.
  __device__ __forceinline__ float of_accumulators() const {
    return v_unit * (std::is_same_v<Quant, int8_t> ? 1.f : 1.f / kFloat8Unit);
  }

 private:
  __device__ __forceinline__ float largest() const {  // not NaN
    float most = 0.f;
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 pair = unpack2(words[w], __nv_bfloat16());
      most = fmaxf(most, fmaxf(pair.x, pair.y));
    }
    return most;
  }
  // Returns 1 / power, for a power of two below 2^127, and 0 for 0.
  static __device__ __forceinline__ float inverse(float power) {
    return power > 0.f ? __uint_as_float(0x7f000000u - __float_as_uint(power)) : 0.f;
  }
};

// K and V of one new position, a lane's fours of them.
template <int kDims>
struct NewPosition {
  static constexpr int kQuads = (kDims + 127) / 128;
  float4 values[2][kQuads];

  // `step`: of the query_len new ones.
  __device__ __forceinline__ void load(const DecodeAttentionParams& p, int batch_row, int kv_head, int step,
                                       int lane) {
    const uint64_t row = uint64_t(uint32_t(batch_row * p.num_kv_heads + kv_head)) * p.query_len + step;
#pragma unroll
    for (int is_v = 0; is_v < 2; ++is_v)
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const int quad = lane + i * kWarpSize;
        const float* from = (is_v ? p.new_v : p.new_k) + row * uint32_t(p.head_dim) + quad * 4;
        values[is_v][i] = quad * 4 < p.head_dim ? __ldcg(reinterpret_cast<const float4*>(from))
                                                : make_float4(0.f, 0.f, 0.f, 0.f);
      }
  }
};

// Quantizes those of a tile's positions that are new, into the tile, and with `appends` into the cache.
// `first`: the first of them all.
template <class Quant, int kDims, int kRing>
__device__ __forceinline__ void append_new(const DecodeAttentionParams& p, const PlacedSplit<false>& s,
                                           const QuantTiles<kDims, kRing>& tiles, QuantScales<Quant>& scales,
                                           NewPosition<kDims>& first, int stage, int base, int batch_row,
                                           int kv_head, bool appends) {
  constexpr float kMost = std::is_same_v<Quant, int8_t> ? kLargestInt8 : kLargestFloat8;
  const int newest = s.seq_len - p.query_len, lane = tiles.lane;
#pragma unroll 1
  for (int position = max(base, newest); position < min(base + kQuantTile, s.end); ++position) {
    if (position > newest) first.load(p, batch_row, kv_head, position - newest, lane);
    const uint32_t slot = s.slot(position - s.begin);
    uint32_t of[2];
#pragma unroll
    for (int is_v = 0; is_v < 2; ++is_v) {
      const auto& values = first.values[is_v];
      uint32_t largest = 0;  // magnitudes compare as their bits do, and NaN is the largest
      const auto see = [&](float value) { largest = max(largest, __float_as_uint(value) & 0x7fffffffu); };
#pragma unroll
      for (const float4& four : values) see(four.x), see(four.y), see(four.z), see(four.w);
      of[is_v] = quant_scale(__reduce_max_sync(kAllLanes, largest), kMost);
      const Divisor scale(bfloat16_bits_to_float(of[is_v]));
      char* const tile = (is_v ? tiles.v_tile(stage) : tiles.k_tile(stage)) + (position - base) * p.head_dim;
      char* const cache = const_cast<char*>(is_v ? s.v : s.k) + uint64_t(slot) * uint32_t(p.head_dim);
#pragma unroll
      for (int i = 0; i < first.kQuads; ++i) {
        const int quad = lane + i * kWarpSize;
        if (quad * 4 >= p.head_dim) continue;
        const uint32_t quants =
            quantize<Quant>(values[i].x, scale) | quantize<Quant>(values[i].y, scale) << 8 |
            quantize<Quant>(values[i].z, scale) << 16 | uint32_t(quantize<Quant>(values[i].w, scale)) << 24;
        reinterpret_cast<uint32_t*>(tile)[quad] = quants;
        if (appends) reinterpret_cast<uint32_t*>(cache)[quad] = quants;
      }
      if (appends && lane == 0) const_cast<uint16_t*>(is_v ? scales.from.v : scales.from.k)[slot] = of[is_v];
    }
    if (lane % 4 == (position - base) / 8) scales.set((position - base) % 8, of[0], of[1]);
  }
  __syncwarp();  // the tile's new rows
}

}  // namespace
}  // namespace hf_fastpath
