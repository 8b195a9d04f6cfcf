// When blocks begin, have their input and end, in a library built with HF_FASTPATH_TRACE; nothing otherwise.
// benchmarks/trace_step.py prints it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

namespace hf_fastpath {

enum class TracePoint {
  kBegin,   // the block runs
  kInput,   // the kernel in front is complete
  kReady,   // the input is in registers or shared memory
  kSums,    // products with this block's weights are done
  kMerged,  // and the sums of other warps and blocks have arrived
  kEnd,     // the outputs are written
  kCount
};

#ifdef HF_FASTPATH_TRACE

struct TraceRecord {
  uint64_t grid;  // of the launch
  uint32_t block, blocks, sm, threads;
  uint64_t times[int(TracePoint::kCount)];  // ns of one clock for the whole device; 0: not passed
};

constexpr unsigned kTraceRecords = 1 << 16;

// Each source file has a buffer of its own, as kernels are compiled by themselves.
struct TraceBuffer {
  unsigned count;
  TraceRecord records[kTraceRecords];
};
static __device__ TraceBuffer trace_buffer;

// Addresses of the buffers of all files.
std::vector<void* (*)()>& trace_buffers();
namespace {
[[maybe_unused]] const bool trace_registered = [] {
  trace_buffers().push_back([]() -> void* {
    void* at = nullptr;
    return cudaGetSymbolAddress(&at, trace_buffer) == cudaSuccess ? at : nullptr;
  });
  return true;
}();
}  // namespace

// Called by thread 0 with kBegin first.
__device__ __forceinline__ void trace(TracePoint point) {
  __shared__ unsigned index;
  if (threadIdx.x + threadIdx.y + threadIdx.z != 0) return;
  if (point == TracePoint::kBegin) {
    index = atomicAdd(&trace_buffer.count, 1) % kTraceRecords;
    TraceRecord& record = trace_buffer.records[index];
    asm volatile("mov.u64 %0, %%gridid;" : "=l"(record.grid));
    asm volatile("mov.u32 %0, %%smid;" : "=r"(record.sm));
    record.block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    record.blocks = gridDim.x * gridDim.y * gridDim.z;
    record.threads = blockDim.x;
    for (uint64_t& time : record.times) time = 0;
  }
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(trace_buffer.records[index].times[int(point)])::"memory");
}

#else

__device__ __forceinline__ void trace(TracePoint) {}

#endif

}  // namespace hf_fastpath
