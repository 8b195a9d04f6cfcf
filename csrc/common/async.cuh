// Hopper's asynchronous copies and the overlap of one kernel with the next (compute capability 9.0 and up).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/cuda_check.cuh"
#include "common/trace.cuh"

namespace hf_fastpath {

// Whether this compilation is for a device that has them; kernels that need them are empty elsewhere.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define HF_FASTPATH_HOPPER 1
#else
#define HF_FASTPATH_HOPPER 0
#endif

// Whether `fits` holds for the current device and for one that this library has code for, both as 900 for
// 9.0: a library made for older devices alone runs on newer ones through its PTX.
template <class Fits>
bool has_code(Fits fits) {
  constexpr int kArchs[] = {__CUDA_ARCH_LIST__};
  bool compiled = false;
  for (const int arch : kArchs) compiled = compiled || fits(arch);
  int device = 0, major = 0;
  HF_FASTPATH_CUDA_CHECK(cudaGetDevice(&device));
  HF_FASTPATH_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return compiled && fits(100 * major);
}

// Whether kernels that need them do something here.
inline bool has_hopper_code() {
  return has_code([](int arch) { return arch >= 900; });
}

constexpr int kMaxCluster = 8;  // blocks: the largest that every device with clusters takes

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Asks for 16 bytes of device memory, past L1, into shared memory, both aligned; zeros without `present`.
// Every device from sm_80 on. No cache policy: with one, and a size that is not constant, the H200 reports an
// illegal instruction.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool present) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(present ? 16 : 0)
               : "memory");
}
// Closes a group of this thread's copies.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all but the newest kGroups of this thread's groups.
template <int kGroups>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// __syncthreads() for the first `threads` threads of the block; `id` from 1 to 15.
__device__ __forceinline__ void sync_some(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at the same without waiting.
__device__ __forceinline__ void arrive_some(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Holds a warp up for a random time, at most 4 us, in a library built to find missing waits
// (tests/replays.py).
__device__ __forceinline__ void jitter() {
#ifdef HF_FASTPATH_JITTER
  const unsigned bits =
      static_cast<unsigned>(clock64()) * 2654435761u;  // the same in all lanes that come here together
  if (bits >> 30 == 0) __nanosleep(bits >> 8 & 4095);
#endif
}

#if !HF_FASTPATH_HOPPER

// Nothing overlaps, and there are no clusters.
__device__ __forceinline__ void allow_next_kernel() { trace(TracePoint::kBegin); }
__device__ __forceinline__ void wait_for_previous_kernel() {}
__device__ __forceinline__ void wait_and_allow_next_kernel() { trace(TracePoint::kBegin); }
__device__ __forceinline__ void drop_l1() {}
__device__ __forceinline__ void arrive_cluster() {}
__device__ __forceinline__ void wait_cluster() {}
__device__ __forceinline__ uint32_t cluster_address(const void*, int) { return 0; }
__device__ __forceinline__ void store_cluster(uint32_t, float) {}
__device__ __forceinline__ void store_cluster(uint32_t, uint64_t) {}

#else

// Lets the next kernel of the stream start now, if it was launched to overlap. It may do whatever does not
// depend on this kernel and then has to call wait_for_previous_kernel().
__device__ __forceinline__ void allow_next_kernel() {
  trace(TracePoint::kBegin);
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  jitter();
}

// Returns once the kernel before this one is complete and its writes are visible in L2. By induction so are
// those of all kernels before it. This SM's L1 may still hold older values: either load from L2, or drop_l1()
// first.
__device__ __forceinline__ void wait_for_previous_kernel() {
  jitter();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  trace(TracePoint::kInput);
  jitter();
}

// The two in the other order: the next kernel may read what the kernels before this one wrote without a wait.
__device__ __forceinline__ void wait_and_allow_next_kernel() {
  trace(TracePoint::kBegin);
  wait_for_previous_kernel();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Plain loads after it come from L2.
__device__ __forceinline__ void drop_l1() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to the copy engine; __syncthreads() still has to follow.
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  jitter();
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives and announces that copies of `bytes` bytes will arrive too.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits until the phase with this parity is over.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!done);
}

// `address`, known only once everything that `sums` comes of is: a copy that is asked for there, or by the
// thread that an arrival there lets go on, is behind the loads that went into the sums. An arrival alone is
// not: loads may still be on their way when it is seen (H200: 128 bytes of the next copy, one time in 10^5
// tiles while loads wait behind others). `zero`: 0, which the compiler does not know.
__device__ __forceinline__ uint32_t behind_reads(uint32_t address, uint32_t sums, uint32_t zero) {
  return address + (sums & zero);
}

// True in one lane of a warp whose lanes are all here, the same one every time. The compiler does not know
// that of other conditions, and asks for copies in a loop over lanes.
__device__ __forceinline__ bool is_elected() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(elected));
  return elected;
}

// L2 policy for data that is read once.
__device__ __forceinline__ uint64_t read_once_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Starts a copy of `bytes` bytes (a multiple of 16, both ends 16-byte aligned) into shared memory, which
// arrives at `barrier`.
__device__ __forceinline__ void copy_to_shared(uint32_t to, const void* from, uint32_t bytes,
                                               uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], "
      "%4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Brings `bytes` bytes (a multiple of 16, 16-byte aligned) into L2.
__device__ __forceinline__ void prefetch_bulk(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// The same for the tile of a tensor map of three dimensions that starts at (x, y, z); `to` is aligned to 128
// bytes.
__device__ __forceinline__ void copy_tile_to_shared(uint32_t to, const CUtensorMap* map, int x, int y, int z,
                                                    uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
      "%4}], [%5];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// The same, with an L2 policy.
__device__ __forceinline__ void copy_tile_to_shared(uint32_t to, const CUtensorMap* map, int x, int y, int z,
                                                    uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
      : "memory");
}

// Brings such a tile into L2.
__device__ __forceinline__ void prefetch_tile(const CUtensorMap* map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(x),
               "r"(y), "r"(z)
               : "memory");
}

// __syncthreads() for all blocks of the cluster, in two halves; shared memory written before is visible
// after.
__device__ __forceinline__ void arrive_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Address, for store_cluster, of what lies at `p` in the shared memory of another block of the cluster.
__device__ __forceinline__ uint32_t cluster_address(const void* p, int rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
  return address;
}

__device__ __forceinline__ uint32_t cluster_address(uint32_t shared, int rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}

__device__ __forceinline__ void store_cluster(uint32_t address, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
__device__ __forceinline__ void store_cluster(uint32_t address, uint64_t value) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(value) : "memory");
}

// The same as a message: its 4 bytes arrive at a barrier of that block, which has to expect them.
__device__ __forceinline__ void send_to_cluster(uint32_t address, float value, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
               "r"(__float_as_uint(value)), "r"(barrier)
               : "memory");
}

#endif  // HF_FASTPATH_HOPPER

// Launches a kernel in clusters of `cluster` blocks along x. With `programmatic_launch` it may start before
// the kernel in front of it on the stream is complete.
template <class... Params, class... Args>
cudaError_t launch_clusters(void (*kernel)(Params...), dim3 grid, dim3 block, size_t smem_bytes,
                            cudaStream_t stream, bool programmatic_launch, int cluster, const Args&... args) {
  cudaLaunchAttribute attributes[2] = {};
  int count = 0;
  if (programmatic_launch && has_hopper_code()) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    // An SM does not mix settings: blocks of a kernel with another one would wait until the SM is empty.
    HF_FASTPATH_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                                cudaSharedmemCarveoutMaxShared));
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = cluster;
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, Params(args)...);
}

template <class... Params, class... Args>
cudaError_t launch_programmatic(void (*kernel)(Params...), dim3 grid, dim3 block, size_t smem_bytes,
                                cudaStream_t stream, bool programmatic_launch, const Args&... args) {
  return launch_clusters(kernel, grid, block, smem_bytes, stream, programmatic_launch, 1, args...);
}

}  // namespace hf_fastpath
