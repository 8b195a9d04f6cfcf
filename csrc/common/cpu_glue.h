// What the CPU glue files share: features of the CPU, threads, scratch memory.
// This header is torch-facing, and *_cpu.cpp alone include it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>

#include "common/callable_ops.h"
#include "common/cpu_features.h"
#include "common/rows_glue.h"
#include "common/torch_glue.h"

namespace hf_fastpath {

// Whether kernels that need these features may run here. The compiler sees which ones no CPU of its
// architecture has, and leaves out what would call their kernels.
inline bool may_run(CpuFeatures needs) { return is_possible(needs) && cpu_has(needs); }

inline bool use_avx2() { return may_run(kAvx2); }
inline bool use_avx512() { return may_run(kAvx512); }
inline bool use_avx512_vnni() { return may_run(kVnni); }

// Whether pairs of bfloat16 are multiplied in less time than they are widened.
inline bool use_bf16_products() { return may_run(kBf16Dot) && cpu_tuning().prefers_bf16_dot; }

// Number of parts a call of `work` units is worth: one a thread of ATen's pool, but none below
// `work_per_part`, since waking a thread costs a few microseconds.
inline int64_t part_count(int64_t work, int64_t work_per_part) {
  if (work < 2 * work_per_part) return 1;  // before asking ATen: most decode steps end here for the small ops
  return std::min<int64_t>(torch::stable::get_num_threads(), work / work_per_part);
}

// Bytes of memory traffic that justify another thread: about 10 us of one core's bandwidth.
constexpr int64_t kBytesPerPart = 96 * 1024;
// Multiplications that do.
constexpr int64_t kWorkPerPart = 1 << 20;

// Tells ThreadSanitizer, which does not see into OpenMP, that parallel_for starts and ends with all threads.
class ForkAndJoin {
 public:
#ifdef __SANITIZE_THREAD__
  ForkAndJoin() { started_.store(1, std::memory_order_release); }
  void begin() { started_.load(std::memory_order_acquire); }
  void end() { ended_.fetch_add(1, std::memory_order_acq_rel); }
  void join() { ended_.load(std::memory_order_acquire); }

 private:
  std::atomic<int> started_{0}, ended_{0};
#else
  void begin() {}
  void end() {}
  void join() {}
#endif
};

// Runs body(part) for every part in [0, parts), one part a thread; the same part goes to the same thread from
// call to call.
template <class Body>
void for_each_part(int64_t parts, const Body& body) {
  if (parts <= 1) {
    if (parts == 1) body(int64_t{0});  // no parts, nothing to do: an empty tensor
    return;
  }
  ForkAndJoin threads;
  torch::stable::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    threads.begin();
    for (int64_t part = begin; part < end; ++part) body(part);
    threads.end();
  });
  threads.join();
}

// First unit of `part` when `total` units are divided over `parts`, in multiples of `granule`.
inline int64_t part_begin(int64_t total, int64_t parts, int64_t part, int64_t granule = 1) {
  const int64_t blocks = (total + granule - 1) / granule;
  return std::min(total, blocks * part / parts * granule);
}

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Runs body(begin, end) on even shares of [0, total), on as many threads as `bytes` of memory traffic are
// worth.
template <class Body>
void for_each_range(int64_t total, int64_t bytes, const Body& body) {
  const int64_t parts = std::min(total, part_count(bytes, kBytesPerPart));
  for_each_part(
      parts, [&](int64_t part) { body(part_begin(total, parts, part), part_begin(total, parts, part + 1)); });
}

// Runs body(begin, end) until it has had all of [0, total), on `parts` threads. Each takes the next piece
// when it is done with one, a quarter of an even share of what is left but at least `least` units, in
// multiples of `granule`: threads of one machine differ in speed from call to call, and the slowest would
// hold up all.
template <class Body>
void share_out(int64_t total, int64_t parts, int64_t granule, int64_t least, const Body& body) {
  if (parts <= 1) {
    if (total > 0) body(int64_t{0}, total);
    return;
  }
  std::atomic<int64_t> next{0};
  for_each_part(parts, [&](int64_t) {
    // Relaxed: pieces are independent, and the end of parallel_for orders what they write.
    int64_t begin = next.load(std::memory_order_relaxed);
    while (begin < total) {
      const int64_t piece = std::max(least, (total - begin) / (4 * parts));
      const int64_t end = std::min(total, begin + round_up(piece, granule));
      if (!next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
      body(begin, end);
      begin = next.load(std::memory_order_relaxed);
    }
  });
}

// Least units of `bytes` each that share_out() hands out: a smaller piece ends before its streams have
// started.
inline int64_t least_piece(int64_t bytes) {
  return std::max<int64_t>(1, kBytesPerPart / std::max<int64_t>(1, bytes));
}

// Uninitialized, 64-byte aligned memory that the calling thread keeps between calls; a second call in the
// same op, for the same kUse, invalidates the first.
template <int kUse = 0>
float* scratch(int64_t floats) {
  struct Buffer {
    float* data = nullptr;
    int64_t size = 0;
    ~Buffer() { std::free(data); }
  };
  thread_local Buffer buffer;
  if (buffer.size < floats) {
    std::free(buffer.data);
    buffer.size = round_up(floats, 1024);
    buffer.data = static_cast<float*>(std::aligned_alloc(64, buffer.size * sizeof(float)));
    if (buffer.data == nullptr) {
      buffer.size = 0;
      throw std::bad_alloc();
    }
  }
  return buffer.data;
}

inline const char* at(const void* base, int64_t offset, DType dtype) {
  return static_cast<const char*>(base) + offset * element_size(dtype);
}

inline char* at(void* base, int64_t offset, DType dtype) {
  return static_cast<char*>(base) + offset * element_size(dtype);
}

// The data of an optional tensor, null when it is absent. `holder` keeps a contiguous copy alive if one is
// made.
inline const void* optional_data(const std::optional<Tensor>& tensor, std::optional<Tensor>& holder) {
  if (!tensor.has_value()) return nullptr;
  holder = hf_fastpath::contiguous(*tensor);
  return holder->const_data_ptr();
}

inline void check_vector(const std::optional<Tensor>& tensor, int64_t length, DType dtype, const char* op,
                         const char* name) {
  if (!tensor.has_value()) return;
  STD_TORCH_CHECK(tensor->dim() == 1 && tensor->size(0) == length, "hf_fastpath::", op, ": ", name,
                  " has to have one dimension of ", length, " elements");
  STD_TORCH_CHECK(dtype_of(*tensor, op) == dtype, "hf_fastpath::", op, ": ", name,
                  " differs in dtype: cast it");
}

}  // namespace hf_fastpath
