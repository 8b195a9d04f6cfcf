// Tiles of K and V on their way to decode_attention_mma.cuh's tensor cores: rings in shared memory, the
// copies that fill them, and the scales of quantized ones.
#pragma once

#include "common/async.cuh"
#include "common/kv_quants.cuh"
#include "decode_attention/decode_attention.h"
#include "decode_attention/split.cuh"

namespace hf_fastpath {
namespace {

constexpr int kElems = 8;       // of a piece: what a lane reads at once
constexpr int kHalfRows = 8;    // rows in each half of the scores, and of a B operand
constexpr int kTile = 16;       // positions: the k side of the second product
constexpr int kTileGroups = 2;  // of 8 positions, the n side of the first product

// Tiles of K and V a warp keeps: as many bytes of any type.
template <int kDims, class KV>
constexpr int kStages = (kDims > 64 ? 2 : 3) * 2 / int(sizeof(KV));
template <class KV>
constexpr int kPieceBytes = kElems * int(sizeof(KV));

// A warp's ring of tiles of K and V; rows are positions. T: q's type.
template <class T, class KV, int kDims>
struct WarpTiles {
  static constexpr int kTileBytes = kTile * kDims * int(sizeof(KV)),
                       kBytes = kStages<kDims, KV> * 2 * kTileBytes;
  char* shared;

  __device__ __forceinline__ char* k(int stage) const { return shared + stage * 2 * kTileBytes; }
  __device__ __forceinline__ char* v(int stage) const { return k(stage) + kTileBytes; }

  // A piece, in T.
  static __device__ __forceinline__ uint4 read_piece(const char* from) {
    if constexpr (kIsQuant<KV>) {
      return widen_quants<T, KV>(*reinterpret_cast<const uint2*>(from));
    } else {
      return *reinterpret_cast<const uint4*>(from);
    }
  }
};

// Tiles that come by asynchronous copies of 16 bytes by all lanes, with zeros where there are no positions or
// dims. Pieces of a row, if they are 16 bytes, are permuted so that eight lanes that read together meet in no
// bank: rows r and r + 1 of K (r even), four pieces each, and two pieces of rows r, r + 2, r + 4, r + 6 of V.
template <class T, class KV, int kDims>
struct CopiedTiles : WarpTiles<T, KV, kDims> {
  static constexpr int kRowBytes = kDims * int(sizeof(KV));
  int lane;

  __device__ __forceinline__ CopiedTiles(const DecodeAttentionParams&, char* warp_shared, uint64_t*, int lane)
      : WarpTiles<T, KV, kDims>{warp_shared}, lane(lane) {}
  __device__ __forceinline__ int k_at(int row, int piece) const {
    return row * kRowBytes + (kIsQuant<KV> ? piece : piece ^ row % 2 * 4) * kPieceBytes<KV>;
  }
  __device__ __forceinline__ int v_at(int row, int piece) const {
    return row * kRowBytes + (kIsQuant<KV> ? piece : piece ^ (row & 6)) * kPieceBytes<KV>;
  }

  template <class Placed>
  __device__ __forceinline__ void fetch(const DecodeAttentionParams& p, const Placed& s, int base,
                                        int stage) {
    constexpr int kCopies = kRowBytes / 16, kRowsAtOnce = kWarpSize / kCopies;  // copies of a row
    if (base < s.end) {
      const int copy = lane % kCopies, first = lane / kCopies, piece = copy * (16 / kPieceBytes<KV>);
      const uint32_t row_bytes = p.head_dim * int(sizeof(KV));
      const int rows = piece * kElems < p.head_dim ? s.end - base : 0;
      const char *from_k = s.k + copy * 16, *from_v = s.v + copy * 16;
#pragma unroll
      for (int j = 0; j < kTile / kRowsAtOnce; ++j) {
        // This row's offset is the sum, without a carry, of those of row `first` and of row `before`.
        const int before = j * kRowsAtOnce, row = before + first;
        const uint64_t at = uint64_t(s.slot(base - s.begin + row)) * row_bytes;
        copy_async(this->k(stage) + (k_at(first, piece) ^ k_at(before, 0)), from_k + at, row < rows);
        copy_async(this->v(stage) + (v_at(first, piece) ^ v_at(before, 0)), from_v + at, row < rows);
      }
    }
    commit_copies();
  }
  __device__ __forceinline__ void wait(const Split&, int, int) const {
    wait_for_copies<kStages<kDims, KV> - 1>();
    __syncwarp();  // every lane's copies
  }
  __device__ __forceinline__ uint4 read(const char* from, bool) const { return this->read_piece(from); }
  // This lane has read what it reads of a tile; `sums` comes of all of it.
  __device__ __forceinline__ void done(const DecodeAttentionParams&, uint32_t) const {}
};

#if HF_FASTPATH_HOPPER
// Tiles that come by bulk copies of one lane: rows lie as in the cache. Reads of K meet twice in a bank and
// reads of V four times (of quants, half as long, both four times), which costs less than copies of 16 bytes:
// with those, memory gives four fifths of its bandwidth.
template <class T, class KV, int kDims>
struct BulkTiles : WarpTiles<T, KV, kDims> {
  uint32_t full;  // the warp's barriers, one a stage
  int row_bytes, lane;
  uint64_t policy;
  uint32_t parity = 0;

  __device__ __forceinline__ BulkTiles(const DecodeAttentionParams& p, char* warp_shared, uint64_t* barriers,
                                       int lane)
      : WarpTiles<T, KV, kDims>{warp_shared},
        full(shared_address(barriers)),
        row_bytes(p.head_dim * int(sizeof(KV))),
        lane(lane),
        policy(read_once_policy()) {
    if (lane < kStages<kDims, KV>) {
      barrier_init(full + 8 * lane, 1);
      barrier_init_done();
    }
    __syncwarp();
  }
  __device__ __forceinline__ int k_at(int row, int piece) const {
    return row * row_bytes + piece * kPieceBytes<KV>;
  }
  __device__ __forceinline__ int v_at(int row, int piece) const { return k_at(row, piece); }

  // Asks for the tile of positions base and following; every lane comes here for every tile.
  template <class Placed>
  __device__ __forceinline__ void fetch(const DecodeAttentionParams&, const Placed& s, int base, int stage) {
    const int count = min(kTile, s.end - base);
    if (count <= 0 || !is_elected()) return;
    const uint32_t slot = s.slot(base - s.begin);
    // The rest lies elsewhere: from slot 0 on where a ring wraps, or in the next page.
    const int together = min(count, s.adjacent(slot)), before = together * row_bytes;
    const int rest = count * row_bytes - before;
    const uint32_t barrier = full + 8 * stage;
    barrier_arrive_expect(barrier, 2 * count * row_bytes);
    uint32_t next = 0;
    if constexpr (Placed::kIsPaged) next = rest > 0 ? s.slot(base - s.begin + together) : 0;
    const auto copy = [&](char* to, const char* from) {
      copy_to_shared(shared_address(to), from + uint64_t(slot) * row_bytes, before, barrier, policy);
      if (rest > 0) {
        copy_to_shared(shared_address(to) + before, from + uint64_t(next) * row_bytes, rest, barrier, policy);
      }
    };
    copy(this->k(stage), s.k);
    copy(this->v(stage), s.v);
  }
  // Waits for it. What follows the last position is zeros in V, which weights of zero are multiplied by.
  __device__ __forceinline__ void wait(const Split& s, int base, int stage) {
    barrier_wait(full + 8 * stage, parity);
    if (stage + 1 == kStages<kDims, KV>) parity ^= 1;
    if (base + kTile <= s.end) return;
    for (int i = (s.end - base) * row_bytes + lane * 16; i < kTile * row_bytes; i += kWarpSize * 16)
      *reinterpret_cast<uint4*>(this->v(stage) + i) = make_uint4(0, 0, 0, 0);
    __syncwarp();  // zeros
  }
  __device__ __forceinline__ void done(const DecodeAttentionParams& p, uint32_t sums) {
    full = behind_reads(full, sums, p.zero);
  }
  __device__ __forceinline__ uint4 read(const char* from, bool present) const {
    return present ? this->read_piece(from) : make_uint4(0, 0, 0, 0);
  }
};

// Short heads are for short caches first, where the copies of lanes start earlier.
template <class T, class KV, int kDims>
using Tiles = std::conditional_t<(kDims > 64), BulkTiles<T, KV, kDims>, CopiedTiles<T, KV, kDims>>;
#else
template <class T, class KV, int kDims>
using Tiles = CopiedTiles<T, KV, kDims>;
#endif

// Scales of a quantized tile: of a lane's positions base + 8 t + 2 q and the next; zero where there are none.
template <class T, class KV>
struct TileScales {
  Scales from;
  uint16_t k[kTileGroups][2], v[kTileGroups][2];
  float v_unit = 0.f;  // the warp's sums are multiples of it: a power of two, or 0 for none yet

  template <class Placed>
  __device__ __forceinline__ void fetch(const Placed& s, int first) {
#pragma unroll
    for (int t = 0; t < kTileGroups; ++t)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int position = first + t * 8 + i;
        const bool present = position < s.end;
        const uint32_t slot = present ? s.slot(position - s.begin) : 0;
        k[t][i] = present ? __ldcg(from.k + slot) : 0;
        v[t][i] = present ? __ldcg(from.v + slot) : 0;
      }
  }
  __device__ __forceinline__ float of_score(int t, int i) const {
    return bfloat16_bits_to_float(k[t][i]) * (1.f / kWidenedUnit<T, KV>);
  }
  // Lets v_unit grow to the largest power of two in the tile's scales of V; what the sums are to be
  // multiplied by then.
  __device__ __forceinline__ float grow() {
    float most = v_unit;
#pragma unroll
    for (int t = 0; t < kTileGroups; ++t)
#pragma unroll
      for (int i = 0; i < 2; ++i) most = fmaxf(most, bfloat16_bits_to_float(v[t][i]));  // not NaN
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
    const float grown = __uint_as_float(__float_as_uint(most) & 0x7f800000u),
                shrink = v_unit * inverse(grown);
    v_unit = grown;
    return shrink;
  }
  // What a weight of V is multiplied by: less than 2.
  __device__ __forceinline__ float of_weight(int t, int i) const {
    return bfloat16_bits_to_float(v[t][i]) * inverse(v_unit);
  }
  // What the sums are multiplied by in the end.
  __device__ __forceinline__ float of_sums() const { return v_unit * (1.f / kWidenedUnit<T, KV>); }

 private:
  // Of a power of two below 2^127; 0 of 0.
  static __device__ __forceinline__ float inverse(float power) {
    return power > 0.f ? __uint_as_float(0x7f000000u - __float_as_uint(power)) : 0.f;
  }
};

}  // namespace
}  // namespace hf_fastpath
