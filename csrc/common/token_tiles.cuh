// A walk over the tokens of a prompt whose state stays in registers. The inputs go through shared memory, a
// tile of tokens at a time: half of a block's warps read a tile, and compute what a token has one of, while
// the other half walks the tile before it.
#pragma once

#include "common/async.cuh"
#include "common/heads.cuh"
#include "common/warp.cuh"

namespace hf_fastpath {

constexpr int kWalkColumns = 32;   // of a state, in a block
constexpr int kLanesOfColumn = 4;  // that share the rows of a column
constexpr int kWalkers = kWalkColumns * kLanesOfColumn;
constexpr int kReaderWarps = 4;
constexpr int kReaders = kReaderWarps * kWarpSize;
static_assert(kWalkColumns == kWarpSize, "a lane reads what a column has one of");

// Row i of those that lane `part` of a column keeps: four in a row, so that the lanes of a column read 64
// bytes of shared memory together.
__device__ __forceinline__ int row_of_lane(int i, int part) {
  return (i / 4 * kLanesOfColumn + part) * 4 + i % 4;
}

// The sum over the lanes of a column, in each of them.
__device__ __forceinline__ float sum_of_column(float x) {
#pragma unroll
  for (int offset = 1; offset < kLanesOfColumn; offset *= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}

__device__ __forceinline__ float sum_of(const float4& x) { return (x.x + x.y) + (x.z + x.w); }

// One of the block's barriers for all of its warps, which come to it in different places of the code.
__device__ __forceinline__ void sync_roles() { sync_some(1, kWalkers + kReaders); }

// Readers: calls read(tile, i) for each of `count` tiles.
template <class Tile, class Read>
__device__ __forceinline__ void read_tiles(Tile (&tiles)[2], int count, Read read) {
  read(tiles[0], 0);
  for (int i = 0; i < count; ++i) {
    sync_roles();  // tile i is read, and the one before it walked
    if (i + 1 < count) read(tiles[(i + 1) % 2], i + 1);
  }
}

// Walkers: calls walk(tile, i) for each.
template <class Tile, class Walk>
__device__ __forceinline__ void walk_tiles(const Tile (&tiles)[2], int count, Walk walk) {
  for (int i = 0; i < count; ++i) {
    sync_roles();  // as in read_tiles()
    walk(tiles[i % 2], i);
  }
}

}  // namespace hf_fastpath
