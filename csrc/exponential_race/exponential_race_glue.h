// Checked arguments of exponential_race, for any device. This header is torch-facing.
#pragma once

#include "common/torch_glue.h"
#include "exponential_race/exponential_race.h"

namespace hf_fastpath {

// Holds what the arguments point to.
struct ExponentialRaceCall {
  ExponentialRaceParams params{};
  Tensor logits, noise, settings, out;

  ExponentialRaceCall(const Tensor& given, const Tensor& given_noise, const Tensor& given_settings,
                      bool programmatic_launch)
      : logits(given),
        noise(hf_fastpath::contiguous(given_noise)),
        settings(hf_fastpath::contiguous(given_settings)),
        out(empty_like_with_sizes(noise, sizes_of(noise))) {
    STD_TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0 && logits.size(1) < int64_t(1) << 31,
                    "hf_fastpath::exponential_race: logits has to be [rows, vocab_size]");
    STD_TORCH_CHECK(noise.scalar_type() == ScalarType::Float && sizes_of(noise) == sizes_of(logits),
                    "hf_fastpath::exponential_race: noise has to be float32 of the shape of logits");
    STD_TORCH_CHECK(
        settings.scalar_type() == ScalarType::Double && settings.dim() == 1 && settings.size(0) == 4,
        "hf_fastpath::exponential_race: settings has to be float64 with four elements");
    if (logits.stride(1) != 1) logits = torch::stable::contiguous(logits);
    params.dtype = dtype_of(logits, "exponential_race");
    params.logits = logits.data_ptr();
    params.noise = static_cast<const float*>(noise.data_ptr());
    params.settings = static_cast<const double*>(settings.data_ptr());
    params.out = static_cast<float*>(out.data_ptr());
    params.rows = logits.size(0);
    params.vocab_size = logits.size(1);
    params.stride = logits.stride(0);
    params.programmatic_launch = programmatic_launch;
  }
};

}  // namespace hf_fastpath
