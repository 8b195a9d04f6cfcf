// Tiles of K and V on their way to decode_attention_mma.cuh's tensor cores: rings in shared memory, and the
// copies that fill them.
#pragma once

#include "common/async.cuh"
#include "common/numeric.cuh"
#include "decode_attention/decode_attention.h"
#include "decode_attention/split.cuh"

namespace hf_fastpath {
namespace {

constexpr int kElems = 8;       // of a piece: what a lane reads at once
constexpr int kHalfRows = 8;    // rows in each half of the scores, and of a B operand
constexpr int kTile = 16;       // positions: the k side of the second product
constexpr int kTileGroups = 2;  // of 8 positions, the n side of the first product

constexpr int kPieceBytes = 16;

// Tiles of K and V a warp keeps.
template <int kDims>
constexpr int kStages = kDims > 64 ? 2 : 3;

// A warp's ring of tiles of K and V; rows are positions.
template <class T, int kDims>
struct WarpTiles {
  static constexpr int kTileBytes = kTile * kDims * int(sizeof(T)), kBytes = kStages<kDims> * 2 * kTileBytes;
  char* shared;

  __device__ __forceinline__ char* k(int stage) const { return shared + stage * 2 * kTileBytes; }
  __device__ __forceinline__ char* v(int stage) const { return k(stage) + kTileBytes; }
};

// Tiles that come by asynchronous copies of 16 bytes by all lanes, with zeros where there are no positions or
// dims. Pieces of a row are permuted so that eight lanes that read together meet in no
// bank: rows r and r + 1 of K (r even), four pieces each, and two pieces of rows r, r + 2, r + 4, r + 6 of V.
template <class T, int kDims>
struct CopiedTiles : WarpTiles<T, kDims> {
  static constexpr int kRowBytes = kDims * int(sizeof(T));
  int lane;

  __device__ __forceinline__ CopiedTiles(const DecodeAttentionParams&, char* warp_shared, uint64_t*, int lane)
      : WarpTiles<T, kDims>{warp_shared}, lane(lane) {}
  __device__ __forceinline__ int k_at(int row, int piece) const {
    return row * kRowBytes + (piece ^ row % 2 * 4) * kPieceBytes;
  }
  __device__ __forceinline__ int v_at(int row, int piece) const {
    return row * kRowBytes + (piece ^ (row & 6)) * kPieceBytes;
  }

  template <class Placed>
  __device__ __forceinline__ void fetch(const DecodeAttentionParams& p, const Placed& s, int base,
                                        int stage) {
    constexpr int kCopies = kRowBytes / 16, kRowsAtOnce = kWarpSize / kCopies;  // copies of a row
    if (base < s.end) {
      const int copy = lane % kCopies, first = lane / kCopies, piece = copy;
      const uint32_t row_bytes = p.head_dim * int(sizeof(T));
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
  // The same for a tile with positions that the kernel in front appends.
  template <class Placed>
  __device__ __forceinline__ void fetch_newest(const DecodeAttentionParams& p, const Placed& s, int base,
                                               int stage) {
    // Older ones of long heads come into L2 meanwhile.
    const int row_bytes = p.head_dim * int(sizeof(T)), row = lane % kTile;
    if (kDims > 128 && base + row < s.seq_len - p.query_len && base + row < s.end) {
      const char* from = (lane < kTile ? s.k : s.v) + uint64_t(s.slot(base - s.begin + row)) * row_bytes;
      for (int i = 0; i < row_bytes; i += 128) prefetch_l2(from + i);
    }
    wait_for_previous_kernel();
    fetch(p, s, base, stage);
  }
  __device__ __forceinline__ void wait(const Split&, int, int) const {
    wait_for_copies<kStages<kDims> - 1>();
    __syncwarp();  // every lane's copies
  }
  __device__ __forceinline__ uint4 read(const char* from, bool) const {
    return *reinterpret_cast<const uint4*>(from);
  }
  // This lane has read what it reads of a tile; `sums` comes of all of it.
  __device__ __forceinline__ void done(const DecodeAttentionParams&, uint32_t) const {}
};

#if HF_FASTPATH_HOPPER
// Tiles that come by bulk copies of one lane: rows lie as in the cache. Reads of K meet twice in a bank and
// reads of V four times, which costs less than copies of 16 bytes:
// with those, memory gives four fifths of its bandwidth.
template <class T, int kDims>
struct BulkTiles : WarpTiles<T, kDims> {
  uint32_t full;  // the warp's barriers, one a stage
  int row_bytes, lane;
  uint64_t policy;
  uint32_t parity = 0;

  __device__ __forceinline__ BulkTiles(const DecodeAttentionParams& p, char* warp_shared, uint64_t* barriers,
                                       int lane)
      : WarpTiles<T, kDims>{warp_shared},
        full(shared_address(barriers)),
        row_bytes(p.head_dim * int(sizeof(T))),
        lane(lane),
        policy(read_once_policy()) {
    if (lane < kStages<kDims>) {
      barrier_init(full + 8 * lane, 1);
      barrier_init_done();
    }
    __syncwarp();
  }
  __device__ __forceinline__ int k_at(int row, int piece) const {
    return row * row_bytes + piece * kPieceBytes;
  }
  __device__ __forceinline__ int v_at(int row, int piece) const { return k_at(row, piece); }

  // Asks for the tile of positions base and following; every lane comes here for every tile.
  template <class Placed>
  __device__ __forceinline__ void fetch(const DecodeAttentionParams&, const Placed& s, int base, int stage) {
    const int count = min(kTile, s.end - base);
    if (count <= 0 || !is_elected()) return;
    announce(count, stage);
    copy(s, base, 0, count, stage);
  }
  // The same for a tile with positions that the kernel in front appends: older ones come meanwhile.
  template <class Placed>
  __device__ __forceinline__ void fetch_newest(const DecodeAttentionParams& p, const Placed& s, int base,
                                               int stage) {
    const int count = min(kTile, s.end - base), old = min(s.seq_len - p.query_len - base, count);
    const bool elected = is_elected();
    if (elected && count > 0) {
      announce(count, stage);
      if (old > 0) copy(s, base, 0, old, stage);
    }
    wait_for_previous_kernel();
    if (elected && count > 0) copy(s, base, max(old, 0), count, stage);
  }
  // Waits for it. What follows the last position is zeros in V, which weights of zero are multiplied by.
  __device__ __forceinline__ void wait(const Split& s, int base, int stage) {
    barrier_wait(full + 8 * stage, parity);
    if (stage + 1 == kStages<kDims>) parity ^= 1;
    if (base + kTile <= s.end) return;
    for (int i = (s.end - base) * row_bytes + lane * 16; i < kTile * row_bytes; i += kWarpSize * 16)
      *reinterpret_cast<uint4*>(this->v(stage) + i) = make_uint4(0, 0, 0, 0);
    __syncwarp();  // zeros
  }
  __device__ __forceinline__ void done(const DecodeAttentionParams& p, uint32_t sums) {
    full = behind_reads(full, sums, p.zero);
  }
  __device__ __forceinline__ uint4 read(const char* from, bool present) const {
    return present ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
  }

 private:
  // `count` rows of K and of V will arrive.
  __device__ __forceinline__ void announce(int count, int stage) const {
    barrier_arrive_expect(full + 8 * stage, 2 * count * row_bytes);
  }
  // Rows [first, end) of a tile.
  template <class Placed>
  __device__ __forceinline__ void copy(const Placed& s, int base, int first, int end, int stage) const {
    const uint32_t slot = s.slot(base - s.begin + first);
    // The rest lies elsewhere: from slot 0 on where a ring wraps, or in the next page.
    const int together = min(end - first, s.adjacent(slot)), before = together * row_bytes;
    const int rest = (end - first) * row_bytes - before;
    uint32_t next = 0;
    if constexpr (Placed::kIsPaged) next = rest > 0 ? s.slot(base - s.begin + first + together) : 0;
    const uint32_t barrier = full + 8 * stage;
    const auto of = [&](char* tile, const char* from) {
      const uint32_t to = shared_address(tile) + first * row_bytes;
      copy_to_shared(to, from + uint64_t(slot) * row_bytes, before, barrier, policy);
      if (rest > 0) copy_to_shared(to + before, from + uint64_t(next) * row_bytes, rest, barrier, policy);
    };
    of(this->k(stage), s.k);
    of(this->v(stage), s.v);
  }
};

// Short heads are for short caches first, where the copies of lanes start earlier. Rows of long heads meet in
// too many banks as bulk copies leave them, but in pages one copy looks up one page.
template <int kDims, bool kPaged>
constexpr bool kIsBulk = kDims == 128 || (kDims > 128 && kPaged);
template <class T, int kDims, bool kPaged>
using Tiles = std::conditional_t<kIsBulk<kDims, kPaged>, BulkTiles<T, kDims>, CopiedTiles<T, kDims>>;
#else
template <class T, int kDims, bool>
using Tiles = CopiedTiles<T, kDims>;
#endif

}  // namespace
}  // namespace hf_fastpath
