// q4_0_gemv on the CPU: checks, x in steps, threads, and the portable kernel.
#include "q4_0_gemv/q4_0_gemv_cpu.h"

#include <cmath>

#include "common/convert_cpu.h"
#include "common/cpu_glue.h"
#include "common/cpu_math.h"

namespace hf_fastpath {
namespace {

// Steps of x in groups, the largest of 15 bits. False where one is not finite.
bool in_steps(const float* x, int64_t groups, int16_t* steps, float* sizes) {
  constexpr int kBits = 15, kLeast = -100;  // smaller ones are far beyond 16-bit floats
  for (int64_t group = 0; group < groups; ++group, x += kQ40Group, steps += kQ40Group) {
    float largest = 0;
    bool is_finite = true;
    for (int64_t i = 0; i < kQ40Group; ++i) {
      is_finite &= std::isfinite(x[i]);
      largest = std::max(largest, std::fabs(x[i]));
    }
    if (!is_finite) return false;
    int exponent = 0;
    std::frexp(largest, &exponent);
    const bool is_tiny = largest == 0 || exponent < kLeast;
    sizes[group] = is_tiny ? 0.0f : std::ldexp(1.0f, exponent - kBits);
    const float inverse = is_tiny ? 0.0f : std::ldexp(1.0f, kBits - exponent);
    for (int64_t i = 0; i < kQ40Group; ++i) {
      const float step = std::min(std::nearbyint(x[i] * inverse), 32767.0f);
      steps[i] = static_cast<int16_t>(step);
    }
  }
  return true;
}

Tensor q4_0_gemv(const Tensor& raw, const Tensor& raw_quants, const std::optional<Tensor>& raw_scales) {
  constexpr const char* kOp = "q4_0_gemv";
  const DType dtype = dtype_of(raw, kOp);
  const int64_t columns = raw.dim() > 0 ? raw.size(raw.dim() - 1) : 0;
  STD_TORCH_CHECK(columns > 0 && columns % kQ40Group == 0 && raw.numel() == columns,
                  "hf_fastpath::q4_0_gemv: x is not one row of a multiple of 32 features");
  const Tensor x = hf_fastpath::contiguous(raw), quants = hf_fastpath::contiguous(raw_quants);
  const int64_t groups = columns / kQ40Group;
  const int64_t width = groups * (raw_scales.has_value() ? kQ40QuantBytes : kQ40BlockBytes);
  STD_TORCH_CHECK(quants.dim() == 2 && quants.size(1) == width && quants.scalar_type() == ScalarType::Byte,
                  "hf_fastpath::q4_0_gemv: quants are not uint8 [out_features, ", width, "]");
  std::optional<Tensor> scales;
  if (raw_scales.has_value()) {
    scales = hf_fastpath::contiguous(*raw_scales);
    STD_TORCH_CHECK(scales->dim() == 2 && scales->size(0) == quants.size(0) && scales->size(1) == groups &&
                        scales->scalar_type() == ScalarType::Half,
                    "hf_fastpath::q4_0_gemv: scales are not float16 [out_features, ", groups, "]");
  }
  Tensor out = empty_like_with_sizes(x, sizes_with_last(x, quants.size(0)));
  Q40Args args{};
  args.dtype = dtype, args.groups = groups, args.out_features = quants.size(0);
  args.quants = static_cast<const uint8_t*>(quants.const_data_ptr());
  args.scales = scales ? static_cast<const uint8_t*>(scales->const_data_ptr()) : nullptr;
  args.out = out.mutable_data_ptr();
  float* const given = scratch(columns + columns / 2 + round_up(groups, 16));
  args.x = given;
  const auto convert = use_avx2() ? convert_to_float_avx2 : convert_to_float_portable;
  convert(dtype, x.const_data_ptr(), given, columns);
  if (use_avx2() && dtype != DType::kFloat32) {
    int16_t* steps = reinterpret_cast<int16_t*>(given + columns);
    float* sizes = given + columns + columns / 2;
    if (in_steps(given, groups, steps, sizes)) args.steps = steps, args.sizes = sizes;
  }
  const auto kernel = use_avx2() ? q4_0_gemv_avx2 : q4_0_gemv_portable;
  const int64_t output_bytes = groups * kQ40BlockBytes;
  const int64_t parts =
      std::min(part_count(args.out_features * output_bytes, kBytesPerPart), args.out_features);
  share_out(args.out_features, parts, 1, least_piece(output_bytes),
            [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  return out;
}

HF_FASTPATH_KERNEL(CPU, "q4_0_gemv", q4_0_gemv)

}  // namespace

void q4_0_gemv_portable(const Q40Args& args, int64_t begin, int64_t end) {
  with_storage(args.dtype, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for (int64_t row = begin; row < end; ++row) {
      float total[8] = {};
      for (int64_t group = 0; group < args.groups; ++group) {
        const uint8_t* quants = args.quants_of(row, group);
        const float* x = args.x + group * kQ40Group;
        uint16_t bits;
        std::memcpy(&bits, args.scale_of(row, group), sizeof bits);
        float sum[8] = {};
        for (int64_t i = 0; i < kQ40QuantBytes; ++i) {
          sum[i % 8] += static_cast<float>((quants[i] & 15) - kQ40Zero) * x[i];
          sum[i % 8] += static_cast<float>((quants[i] >> 4) - kQ40Zero) * x[i + kQ40QuantBytes];
        }
        for (int lane = 0; lane < 8; ++lane) total[lane] += sum[lane] * to_float(Half{bits});
      }
      const float low = (total[0] + total[4]) + (total[2] + total[6]);
      from_float(low + ((total[1] + total[5]) + (total[3] + total[7])), static_cast<T*>(args.out) + row);
    }
  });
}

}  // namespace hf_fastpath
