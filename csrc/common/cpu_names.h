// Names of features and tunings, for texts: free of torch.
#pragma once

#include <string>

#include "common/cpu_features.h"

namespace hf_fastpath {

// Names of features between commas, each within `quote`; not `all`: without those that another one needs.
std::string feature_names(CpuFeatures features, bool all, const char* quote = "");

// The tuning of a name, or null.
const CpuTuning* tuning_named(const std::string& name);

}  // namespace hf_fastpath
