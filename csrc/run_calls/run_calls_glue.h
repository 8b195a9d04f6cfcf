// run_calls: a list of calls of this library's ops, made one after the other without Python; the same on
// every device. hf_fastpath/decode/run/native_calls.py makes such lists. This header is torch-facing.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/callable_ops.h"

namespace hf_fastpath {

// A lock for threads that hardly ever meet. A child of a fork takes it over from threads that it does not
// have.
class CallLock {
 public:
  void lock() {
    const pid_t here = getpid();
    pid_t holder = 0;
    // acquire: what the last holder wrote is seen
    while (!holder_.compare_exchange_weak(holder, here, std::memory_order_acquire)) {
      if (holder != here)
        continue;  // free, or held in front of a fork: the next turn takes it from this holder
      sched_yield();
      holder = 0;
    }
  }
  void unlock() { holder_.store(0, std::memory_order_release); }

 private:
  std::atomic<pid_t> holder_{0};
};

// The numbers that describe a list of calls, read one after the other.
class CallCode {
 public:
  CallCode(const int64_t* numbers, int64_t size, const double* reals, int64_t num_reals)
      : numbers_(numbers), end_(numbers + size), reals_(reals), num_reals_(num_reals) {}

  int64_t next() {
    STD_TORCH_CHECK(numbers_ != end_, "hf_fastpath::run_calls: the description of the calls ends too early");
    return *numbers_++;
  }

  // A number below `limit`.
  size_t next_below(size_t limit, const char* what) {
    const int64_t number = next();
    STD_TORCH_CHECK(number >= 0 && static_cast<size_t>(number) < limit, "hf_fastpath::run_calls: ", what,
                    " is ", number, ", expected 0 to ", static_cast<int64_t>(limit) - 1);
    return static_cast<size_t>(number);
  }

  double next_real() { return reals_[next_below(static_cast<size_t>(num_reals_), "the place of a float")]; }

  bool is_at_end() const { return numbers_ == end_; }

 private:
  const int64_t *numbers_, *end_;
  const double* reals_;
  const int64_t num_reals_;
};

// A list of calls, and the registers that they read and write. One thread at a time runs a list.
//
// The description, in numbers: of the registers how many there are, which ones are held from run to run,
// which ones are given to each run, and which ones are its results; then the calls. Of a call: its op, the
// register of its result, its arguments, and the registers that no later call reads.
class CallList {
 public:
  CallList(const std::vector<std::string>& names, CallCode& code) {
    values_.resize(static_cast<size_t>(code.next()));
    contents_.resize(values_.size(), Content::kNothing);
    held_ = registers(code);
    given_ = registers(code);
    results_ = registers(code);
    for (const size_t each : held_) contents_[each] = Content::kTensor;
    for (const size_t each : given_) contents_[each] = Content::kTensor;
    std::vector<const CallableOp*> ops;
    for (const std::string& name : names) {
      const auto found = callable_ops().find(name);
      STD_TORCH_CHECK(found != callable_ops().end(), "hf_fastpath::run_calls: there is no op ", name);
      ops.push_back(&found->second);
    }
    const int64_t count = code.next();
    for (int64_t i = 0; i < count; ++i) add(ops, names, code);
    STD_TORCH_CHECK(code.is_at_end(), "hf_fastpath::run_calls: there is something behind the last call");
    for (const size_t each : results_) check_content(each, Content::kTensor, "the results");
    for (const size_t each : held_) check_content(each, Content::kTensor, "what is held");
  }

  size_t size() const { return calls_.size(); }

  // Puts tensors into the registers that are held from run to run.
  void hold(const std::vector<Tensor>& tensors) {
    const std::lock_guard<CallLock> locked(lock_);
    STD_TORCH_CHECK(tensors.size() == held_.size(), "hf_fastpath::hold_in_calls: ", tensors.size(),
                    " tensors, expected ", held_.size());
    for (size_t i = 0; i < held_.size(); ++i) values_[held_[i]].tensor = tensors[i];
    is_held_ = true;
  }

  // Empties all registers.
  void release() {
    const std::lock_guard<CallLock> locked(lock_);
    for (CallValue& each : values_) each.clear();
    left_.clear();
    is_held_ = false;
  }

  // Puts tensors into the registers that are given to each run.
  void give(const std::vector<Tensor>& given) {
    const std::lock_guard<CallLock> locked(lock_);
    put(given);
  }

  // Makes the calls; `given` is empty if give() had the tensors, which nobody else may hold then. `times`
  // gets nanoseconds at the begin and behind each call.
  std::vector<Tensor> run(const std::vector<Tensor>& given, int64_t* times) {
    const std::lock_guard<CallLock> locked(lock_);
    STD_TORCH_CHECK(is_held_, "hf_fastpath::run_calls: nothing is held, expected hold_in_calls() before");
    const Emptied emptied{*this};
    if (!given.empty()) put(given);
    for (const size_t each : given_)
      STD_TORCH_CHECK(values_[each].tensor.has_value(),
                      "hf_fastpath::run_calls: 0 tensors are given, expected ", given_.size());
    if (times != nullptr) *times++ = now();
    try {
      make(times);
    } catch (...) {
      left_ = made_results();
      throw;
    }
    return made_results();
  }

  // Returns the results of calls in front of the one that has failed, once.
  std::vector<Tensor> left() {
    const std::lock_guard<CallLock> locked(lock_);
    return std::move(left_);
  }

 private:
  // What a register holds at some call, as far as the description says.
  enum class Content { kNothing, kTensor, kList };

  // An argument that is a list of tensors in registers.
  struct Gathered {
    CallValue* value;
    std::vector<const CallValue*> from;
    void fill() {
      value->tensors.clear();
      for (const CallValue* each : from) value->tensors.push_back(*each->tensor);
    }
  };

  struct Call {
    void (*run)(const CallValue* const* arguments, CallValue& out);
    std::vector<const CallValue*> arguments;
    size_t out;
    std::vector<Gathered> gathered;
    std::vector<CallValue*> done;
  };

  // Empties what a run has filled, also if a call has failed.
  struct Emptied {
    CallList& list;
    ~Emptied() {
      for (const size_t each : list.given_) list.values_[each].clear();
      for (const Call& call : list.calls_) {
        list.values_[call.out].clear();
        for (const Gathered& each : call.gathered) each.value->tensors.clear();
      }
    }
  };

  void make(int64_t* times) {
    for (Call& call : calls_) {
      for (Gathered& list : call.gathered) list.fill();
      call.run(call.arguments.data(), values_[call.out]);
      for (Gathered& list : call.gathered) list.value->tensors.clear();
      for (CallValue* each : call.done) each->clear();
      if (times != nullptr) *times++ = now();
    }
  }

  // Results stay in their registers until the end of a run, and are in the order of the calls.
  std::vector<Tensor> made_results() const {
    std::vector<Tensor> results;
    results.reserve(results_.size());
    for (const size_t each : results_) {
      if (!values_[each].tensor) break;
      results.push_back(*values_[each].tensor);
    }
    return results;
  }

  void put(const std::vector<Tensor>& given) {
    STD_TORCH_CHECK(given.size() == given_.size(), "hf_fastpath::run_calls: ", given.size(),
                    " tensors are given, expected ", given_.size());
    for (size_t i = 0; i < given_.size(); ++i) values_[given_[i]].tensor = given[i];
  }

  static int64_t now() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
  }

  size_t next_register(CallCode& code) { return code.next_below(values_.size(), "a register"); }

  std::vector<size_t> registers(CallCode& code) {
    std::vector<size_t> found(static_cast<size_t>(code.next()));
    for (size_t& each : found) each = next_register(code);
    return found;
  }

  void check_content(size_t place, Content content, const std::string& who) const {
    STD_TORCH_CHECK(contents_[place] == content, "hf_fastpath::run_calls: register ", place, ", which ", who,
                    " read, does not hold ", content == Content::kTensor ? "a tensor" : "a list", " there");
  }

  CallValue* constant() {
    constants_.push_back(std::make_unique<CallValue>());
    return constants_.back().get();
  }

  void add(const std::vector<const CallableOp*>& ops, const std::vector<std::string>& names, CallCode& code) {
    const size_t number = code.next_below(ops.size(), "an op");
    const CallableOp& op = *ops[number];
    Call call{op.call, {}, next_register(code), {}, {}};
    const int64_t count = code.next();
    STD_TORCH_CHECK(static_cast<size_t>(count) == op.arguments.size(), "hf_fastpath::", names[number],
                    ": a call in a list has ", count, " arguments, expected ", op.arguments.size());
    for (const ArgumentKind kind : op.arguments)
      call.arguments.push_back(argument(kind, names[number], code, call.gathered));
    contents_[call.out] = op.gives_list ? Content::kList : Content::kTensor;
    for (const size_t each : registers(code)) {
      contents_[each] = Content::kNothing;
      call.done.push_back(&values_[each]);
    }
    calls_.push_back(std::move(call));
  }

  // A number says what the argument is, and others follow; -1 is no argument.
  const CallValue* argument(ArgumentKind kind, const std::string& op, CallCode& code,
                            std::vector<Gathered>& gathered) {
    using Kind = ArgumentKind;
    const int64_t given = code.next();
    if (given == -1) {
      STD_TORCH_CHECK(kind == Kind::kOptionalTensor || kind == Kind::kOptionalInt, "hf_fastpath::", op,
                      ": a call in a list lacks an argument");
      return constant();
    }
    STD_TORCH_CHECK(given == static_cast<int64_t>(kind), "hf_fastpath::", op,
                    ": an argument of a call in a list is of kind ", given, ", expected ",
                    static_cast<int64_t>(kind));
    if (kind == Kind::kTensor || kind == Kind::kOptionalTensor) return tensor(op, Content::kTensor, code);
    CallValue* value = constant();
    switch (kind) {
      case Kind::kTensors: {
        const int64_t count = code.next();
        if (count < 0) return tensor(op, Content::kList, code);
        Gathered list{value, {}};
        for (int64_t i = 0; i < count; ++i) list.from.push_back(tensor(op, Content::kTensor, code));
        gathered.push_back(std::move(list));
        break;
      }
      case Kind::kFloat:
        value->real = code.next_real();
        break;
      case Kind::kInts:
        value->integers.resize(static_cast<size_t>(code.next()));
        for (int64_t& each : value->integers) each = code.next();
        break;
      case Kind::kFloats:
        value->reals.resize(static_cast<size_t>(code.next()));
        for (double& each : value->reals) each = code.next_real();
        break;
      default:
        value->integer = code.next();
    }
    return value;
  }

  const CallValue* tensor(const std::string& op, Content content, CallCode& code) {
    const size_t place = next_register(code);
    check_content(place, content, "calls of " + op);
    return &values_[place];
  }

  std::vector<CallValue> values_;
  std::vector<Content> contents_;  // while the description is read
  std::vector<std::unique_ptr<CallValue>> constants_;
  std::vector<size_t> held_, given_, results_;
  std::vector<Tensor> left_;
  std::vector<Call> calls_;
  bool is_held_ = false;
  CallLock lock_;
};

// The lists of this library by their numbers.
class CallLists {
 public:
  int64_t add(std::shared_ptr<CallList> list) {
    const std::lock_guard<CallLock> locked(lock_);
    lists_.emplace(++last_, std::move(list));
    return last_;
  }

  // Removes a list if it is there.
  void remove(int64_t number) {
    const std::shared_ptr<CallList> list = find(number);  // its tensors are let go of behind the lock
    const std::lock_guard<CallLock> locked(lock_);
    lists_.erase(number);
  }

  // Returns a list, or nothing.
  std::shared_ptr<CallList> find(int64_t number) {
    const std::lock_guard<CallLock> locked(lock_);
    const auto found = lists_.find(number);
    return found == lists_.end() ? nullptr : found->second;
  }

  std::shared_ptr<CallList> of(int64_t number) {
    const std::shared_ptr<CallList> list = find(number);
    STD_TORCH_CHECK(list != nullptr, "hf_fastpath::run_calls: there is no list of calls ", number);
    return list;
  }

  static CallLists& all() {
    static CallLists* lists = new CallLists;  // never destroyed: Python may let go of lists at its very end
    return *lists;
  }

 private:
  CallLock lock_;
  std::unordered_map<int64_t, std::shared_ptr<CallList>> lists_;
  int64_t last_ = 0;
};

// See hf_fastpath/decode/run/native_calls.py. `on` says which library's lists are meant.
inline std::vector<Tensor> run_calls(const Tensor& /*on*/, const std::vector<Tensor>& given, int64_t calls,
                                     const std::optional<Tensor>& times) {
  const std::shared_ptr<CallList> list = CallLists::all().of(calls);
  if (!times) return list->run(given, nullptr);
  STD_TORCH_CHECK(times->scalar_type() == ScalarType::Long && times->is_cpu() && times->is_contiguous() &&
                      times->numel() == static_cast<int64_t>(list->size()) + 1,
                  "hf_fastpath::run_calls: times has to be contiguous int64 [calls + 1] in host memory");
  return list->run(given, static_cast<int64_t*>(times->mutable_data_ptr()));
}

inline void give_to_calls(const Tensor& /*on*/, const std::vector<Tensor>& given, int64_t calls) {
  CallLists::all().of(calls)->give(given);
}

inline std::vector<Tensor> left_by_calls(const Tensor& /*on*/, int64_t calls) {
  return CallLists::all().of(calls)->left();
}

inline void hold_in_calls(const Tensor& /*on*/, const std::vector<Tensor>& tensors, int64_t calls) {
  CallLists::all().of(calls)->hold(tensors);
}

// Makes a list of calls; returns its number, or 0 and why there is none.
inline int64_t make_calls(const char* names, const int64_t* code, int64_t size, const double* reals,
                          int64_t num_reals, char* error, int64_t error_size) {
  try {
    std::vector<std::string> ops;
    std::istringstream lines(names);
    for (std::string line; std::getline(lines, line);) ops.push_back(line);
    CallCode numbers(code, size, reals, num_reals);
    return CallLists::all().add(std::make_shared<CallList>(ops, numbers));
  } catch (const std::exception& why) {
    if (error_size > 0) std::strncpy(error, why.what(), static_cast<size_t>(error_size) - 1);
    return 0;
  }
}

}  // namespace hf_fastpath

#define HF_FASTPATH_EXPORT extern "C" __attribute__((visibility("default")))

// What Python calls by ctypes: the ops take tensors, and these take none.
#define HF_FASTPATH_CALL_LISTS(device)                                                                    \
  namespace hf_fastpath {                                                                                 \
  STABLE_TORCH_LIBRARY_IMPL(hf_fastpath, device, m) {                                                     \
    m.impl("run_calls", TORCH_BOX(&run_calls));                                                           \
    m.impl("give_to_calls", TORCH_BOX(&give_to_calls));                                                   \
    m.impl("left_by_calls", TORCH_BOX(&left_by_calls));                                                   \
    m.impl("hold_in_calls", TORCH_BOX(&hold_in_calls));                                                   \
  }                                                                                                       \
  }                                                                                                       \
  HF_FASTPATH_EXPORT int64_t hf_fastpath_make_calls(const char* names, const int64_t* code, int64_t size, \
                                                    const double* reals, int64_t num_reals, char* error,  \
                                                    int64_t error_size) {                                 \
    return hf_fastpath::make_calls(names, code, size, reals, num_reals, error, error_size);               \
  }                                                                                                       \
  HF_FASTPATH_EXPORT void hf_fastpath_release_calls(int64_t calls) {                                      \
    if (const auto list = hf_fastpath::CallLists::all().find(calls)) list->release();                     \
  }                                                                                                       \
  HF_FASTPATH_EXPORT void hf_fastpath_drop_calls(int64_t calls) {                                         \
    hf_fastpath::CallLists::all().remove(calls);                                                          \
  }                                                                                                       \
  HF_FASTPATH_EXPORT bool hf_fastpath_is_callable(const char* name) {                                     \
    return hf_fastpath::callable_ops().count(name) != 0;                                                  \
  }
