// Ops as functions over values whose types are known when a list of calls is made, and not when it runs: what
// lists of calls are made of (run_calls/). This header is torch-facing.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/torch_glue.h"

namespace hf_fastpath {

// What an argument of an op is. hf_fastpath/decode/run/native_calls.py has the same numbers.
enum class ArgumentKind : int64_t {
  kTensor,
  kOptionalTensor,
  kTensors,
  kInt,
  kOptionalInt,
  kBool,
  kFloat,
  kInts,
  kFloats,
};

// An argument of a call, or the result of one; which member counts is what the op says.
struct CallValue {
  std::optional<Tensor> tensor;
  std::vector<Tensor> tensors;
  std::optional<int64_t> integer;
  double real = 0.0;
  std::vector<int64_t> integers;
  std::vector<double> reals;

  // Lets go of tensors.
  void clear() {
    tensor.reset();
    tensors.clear();
  }
};

template <class T>
struct CallArgument;

#define HF_FASTPATH_CALL_ARGUMENT(type, number, member)                   \
  template <>                                                             \
  struct CallArgument<type> {                                             \
    static constexpr ArgumentKind kind = ArgumentKind::number;            \
    static decltype(auto) of(const CallValue& value) { return (member); } \
  };

HF_FASTPATH_CALL_ARGUMENT(Tensor, kTensor, *value.tensor)
HF_FASTPATH_CALL_ARGUMENT(std::optional<Tensor>, kOptionalTensor, value.tensor)
HF_FASTPATH_CALL_ARGUMENT(std::vector<Tensor>, kTensors, value.tensors)
HF_FASTPATH_CALL_ARGUMENT(int64_t, kInt, *value.integer)
HF_FASTPATH_CALL_ARGUMENT(std::optional<int64_t>, kOptionalInt, value.integer)
HF_FASTPATH_CALL_ARGUMENT(bool, kBool, *value.integer != 0)
HF_FASTPATH_CALL_ARGUMENT(double, kFloat, value.real)
HF_FASTPATH_CALL_ARGUMENT(std::vector<int64_t>, kInts, value.integers)
HF_FASTPATH_CALL_ARGUMENT(std::vector<double>, kFloats, value.reals)

#undef HF_FASTPATH_CALL_ARGUMENT

// An op of a list of calls.
struct CallableOp {
  std::vector<ArgumentKind> arguments;
  bool gives_list;  // of tensors; else a tensor, or nothing
  void (*call)(const CallValue* const* arguments, CallValue& out);
};

template <auto function>
struct Callable;

template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct Callable<function> {
  static void call(const CallValue* const* arguments, CallValue& out) {
    call(arguments, out, std::index_sequence_for<Arguments...>());
  }

  template <size_t... places>
  static void call(const CallValue* const* arguments, CallValue& out, std::index_sequence<places...>) {
    if constexpr (std::is_void_v<Result>) {
      function(CallArgument<std::decay_t<Arguments>>::of(*arguments[places])...);
    } else if constexpr (std::is_same_v<Result, Tensor>) {
      out.tensor = function(CallArgument<std::decay_t<Arguments>>::of(*arguments[places])...);
    } else {
      out.tensors = function(CallArgument<std::decay_t<Arguments>>::of(*arguments[places])...);
    }
  }

  static CallableOp op() {
    return {{CallArgument<std::decay_t<Arguments>>::kind...},
            std::is_same_v<Result, std::vector<Tensor>>,
            &Callable::call};
  }
};

// The ops of this library by their names; ops of PyTorch's have "aten::" in front. Written while the library
// is loaded, and read ever after.
inline std::map<std::string, CallableOp>& callable_ops() {
  static std::map<std::string, CallableOp> ops;
  return ops;
}

template <auto function>
bool add_callable(const char* name) {
  return callable_ops().emplace(name, Callable<function>::op()).second;
}

// Makes a function the kernel of an op on a device (CPU or CUDA), for the dispatcher and for lists of calls.
#define HF_FASTPATH_KERNEL(device, name, function)    \
  STABLE_TORCH_LIBRARY_IMPL(hf_fastpath, device, m) { \
    m.impl(name, TORCH_BOX(&function));               \
    hf_fastpath::add_callable<&function>(name);       \
  }

}  // namespace hf_fastpath
