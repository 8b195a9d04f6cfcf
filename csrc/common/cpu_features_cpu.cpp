// The names of features and tunings, what this CPU has of them, and what HF_FASTPATH_CPU leaves. This file is
// free of torch.
//
// HF_FASTPATH_CPU is a list of words between commas:
//   name         kernels use no features but those that are named so, and what these need
//   -name        kernels do without this feature, and without all that need it
//   tune=name    kernels are tuned for this CPU, and not for the one that they run on
// `baseline` names no feature, and `amx` all features that begin so. A feature that is named and that the CPU
// lacks stays off. The order of words does not matter. Without a plain name, all features of the CPU are
// allowed.
#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "common/cpu_features.h"
#include "common/cpu_names.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hf_fastpath {
namespace {

// Row i is the feature of bit i; rows are behind those that they need.
struct Feature {
  const char* name;
  CpuFeatures features;  // its bit, and those of what it needs
};
constexpr Feature kFeatures[] = {
    {"f16c", kF16c},        {"avx2", kAvx2},        {"avx512", kAvx512},    {"vnni", kVnni},
    {"bf16_dot", kBf16Dot}, {"amx_int8", kAmxInt8}, {"amx_bf16", kAmxBf16}, {"amx_fp16", kAmxFp16},
    {"neon", kNeon},        {"dotprod", kDotprod},  {"i8mm", kI8mm},
};
constexpr int kFeatureCount = sizeof(kFeatures) / sizeof(kFeatures[0]);
constexpr CpuFeatures bit_of(int row) { return CpuFeatures{1} << row; }

constexpr CpuTuning kTunings[] = {
    {"generic", false, true, false, 2048},
    {"intel", false, false, false, 2048},
    {"zen4", true, true, true, 256},  // of all of AMD's CPUs; measured on Zen 4
};

// `features` but for those that need one that is not among them.
CpuFeatures whole(CpuFeatures features) {
  for (int row = 0; row < kFeatureCount; ++row) {
    const CpuFeatures all = kFeatures[row].features;
    if ((features & all) != all) features &= ~bit_of(row);
  }
  return features;
}

// ---- this CPU -----------------------------------------------------------------------------------------

#if defined(__x86_64__)

// A bit of what CPUID says in leaf 7; output 0 to 3: eax, ebx, ecx, edx.
bool cpuid_bit(unsigned subleaf, int output, int bit) {
  unsigned found[4] = {};
  __get_cpuid_count(7, subleaf, &found[0], &found[1], &found[2], &found[3]);
  return (found[output] >> bit & 1u) != 0;
}

// Linux lets a process use the data of tiles if the process asks.
bool may_use_tiles() {
#ifdef __linux__
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

CpuFeatures find_features() {
  CpuFeatures found = 0;
  const auto add = [&](CpuFeatures features, bool has) { found |= has ? features : 0; };
  __builtin_cpu_init();
  add(kF16c, __builtin_cpu_supports("f16c"));
  add(kAvx2,
      __builtin_cpu_supports("f16c") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
  if ((found & kAvx2) != kAvx2) return found;
  add(kAvx512, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"));
  if ((found & kAvx512) != kAvx512) return found;
  add(kVnni, __builtin_cpu_supports("avx512vnni"));
  add(kBf16Dot, __builtin_cpu_supports("avx512bf16"));
  constexpr int kTileBit = 24, kInt8Bit = 25, kBf16Bit = 22, kFloat16Bit = 23;  // of edx
  const bool tiles = cpuid_bit(0, 3, kTileBit) && may_use_tiles();
  add(kAmxInt8, tiles && cpuid_bit(0, 3, kInt8Bit));
  add(kAmxBf16, tiles && cpuid_bit(0, 3, kBf16Bit) && cpuid_bit(0, 3, kFloat16Bit));
  add(kAmxFp16, (found & kAmxBf16) == kAmxBf16 && cpuid_bit(1, 0, 21));
  return found;
}

const char* find_tuning() {
  __builtin_cpu_init();
  return __builtin_cpu_is("amd") ? "zen4" : __builtin_cpu_is("intel") ? "intel" : "generic";
}

#else

CpuFeatures find_features() {
  CpuFeatures found = 0;
#if defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kAsimd = 1ul << 1, kAsimdDp = 1ul << 20, kMatrixInt8 = 1ul << 13;  // HWCAP, HWCAP2
  const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  if ((first & kAsimd) == 0) return found;
  found |= kNeon;
  if ((first & kAsimdDp) != 0) found |= kDotprod;
  if ((second & kMatrixInt8) != 0) found |= kI8mm;
#endif
  return found;
}

const char* find_tuning() { return "generic"; }

#endif

}  // namespace

const CpuTuning* tuning_named(const std::string& name) {
  for (const CpuTuning& each : kTunings) {
    if (name == each.name) return &each;
  }
  return nullptr;
}

std::string feature_names(CpuFeatures features, bool all, const char* quote) {
  CpuFeatures left = features;
  for (int row = 0; row < kFeatureCount && !all; ++row) {
    if ((features & bit_of(row)) != 0) left &= ~(kFeatures[row].features & ~bit_of(row));
  }
  std::string text;
  for (int row = 0; row < kFeatureCount; ++row) {
    if ((left & bit_of(row)) == 0) continue;
    text += std::string(text.empty() ? "" : ", ") + quote + kFeatures[row].name + quote;
  }
  return text;
}

namespace {

// ---- what HF_FASTPATH_CPU leaves ------------------------------------------------------------------------

struct Choice {
  CpuFeatures found, used;
  const CpuTuning* tuning;
};

// The features that a word names, without what they need; none if the word is no name of features.
CpuFeatures named(const std::string& word) {
  CpuFeatures bits = 0;
  for (int row = 0; row < kFeatureCount; ++row) {
    const std::string name = kFeatures[row].name;
    if (word == name || (word == "amx" && name.rfind("amx_", 0) == 0)) bits |= bit_of(row);
  }
  return bits;
}

CpuFeatures with_needs(CpuFeatures features) {
  CpuFeatures all = 0;
  for (int row = 0; row < kFeatureCount; ++row) {
    if ((features & bit_of(row)) != 0) all |= kFeatures[row].features;
  }
  return all;
}

[[noreturn]] void refuse(const char* variable, const std::string& value, const std::string& word) {
  std::string text = std::string("hf_fastpath: ") + variable + "=" + value + " has the unknown word '" + word;
  text += "', expected, between commas, names of features: " + feature_names(~CpuFeatures{0}, true);
  text += ", amx (all of AMX) or baseline (none); such a name behind '-'; or tune= with one of";
  for (const CpuTuning& each : kTunings) text += std::string(" ") + each.name;
  throw std::runtime_error(text +
                           ". Kernels use the named features and what these need, or all but those "
                           "behind '-': correct the variable or unset it");
}

// A word in small letters, without space around it.
std::string plain(const std::string& word) {
  const size_t first = word.find_first_not_of(" \t"), last = word.find_last_not_of(" \t");
  std::string made = first == std::string::npos ? "" : word.substr(first, last - first + 1);
  for (char& c : made) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return made;
}

Choice choose() {
  Choice choice{find_features(), 0, tuning_named(find_tuning())};
  choice.used = choice.found;
  const char* variable = "HF_FASTPATH_CPU";
  const char* value = std::getenv(variable);
  if (value == nullptr || *value == '\0')
    value = std::getenv(variable = "HF_FASTPATH_CPU_ISA");  // its former name
  if (value == nullptr || *value == '\0') return choice;
  const std::string text(value);
  CpuFeatures allowed = 0, without = 0;
  bool only_allowed = false;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string word = plain(text.substr(begin, end - begin));
    begin = end + 1;
    if (word.rfind("tune=", 0) == 0) {
      choice.tuning = tuning_named(word.substr(5));
      if (choice.tuning == nullptr) refuse(variable, text, word);
    } else if (word.rfind('-', 0) == 0) {
      const CpuFeatures features = named(word.substr(1));
      if (features == 0) refuse(variable, text, word);
      without |= features;
    } else {
      const CpuFeatures features = named(word);
      if (features == 0 && word != "baseline") refuse(variable, text, word);
      allowed |= with_needs(features), only_allowed = true;
    }
  }
  if (only_allowed) choice.used &= allowed;
  choice.used = whole(choice.used & ~without);
  return choice;
}

const Choice& choice() {
  static const Choice value = choose();
  return value;
}

}  // namespace

CpuFeatures cpu_features() { return choice().used; }

bool cpu_has(CpuFeatures wanted) { return (choice().used & wanted) == wanted; }

const CpuTuning& cpu_tuning() { return *choice().tuning; }

}  // namespace hf_fastpath

// What was decided, as JSON, for hf_fastpath/native/cpu.py; or {"error": ...}. The text lies in memory of the
// calling thread.
extern "C" __attribute__((visibility("default"))) const char* hf_fastpath_cpu() {
  using namespace hf_fastpath;
  thread_local std::string text;
  try {
    const Choice& made = choice();
    text = "{\"found\": [" + feature_names(made.found, true, "\"") + "], \"used\": [" +
           feature_names(made.used, true, "\"") + "], \"known\": [" +
           feature_names(~CpuFeatures{0}, true, "\"") + "], \"tuning\": \"" + made.tuning->name + "\"}";
  } catch (const std::exception& error) {
    text = "{\"error\": \"";
    for (const char* c = error.what(); *c != '\0'; ++c) {
      const bool plain = *c >= ' ' && *c != '"' && *c != '\\';
      text += plain ? *c : '?';  // of a value that is no name
    }
    text += "\"}";
  }
  return text.c_str();
}
