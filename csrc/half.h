// float16 and bfloat16 on the host: scalars to and from float, rounding to nearest even. Free of branches, so
// that loops over them vectorise, and right whether or not the processor flushes denormals.
#pragma once

#include <cstdint>
#include <cstring>

namespace loramux {

inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Compilers keep a branch for ?: around float arithmetic.
inline uint32_t select_bits(bool condition, uint32_t a, uint32_t b) {
  return b ^ ((a ^ b) & (0u - static_cast<uint32_t>(condition)));
}

inline float bf16_to_float(uint16_t half) {
  return bits_float(static_cast<uint32_t>(half) << 16);
}

inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  return static_cast<uint16_t>(select_bits(nan, bits | 0x400000, rounded) >> 16);
}

inline float f16_to_float(uint16_t half) {
  const uint32_t magnitude = half & 0x7fff;
  const uint32_t rebias = 112u << 23;
  const uint32_t normal = (magnitude << 13) + select_bits(magnitude >= 0x7c00, 2 * rebias, rebias);
  // A subnormal counts units of 2^-24.
  const uint32_t subnormal = float_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  return bits_float((half & 0x8000u) << 16 | select_bits(magnitude < 0x400, subnormal, normal));
}

inline uint16_t float_to_f16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Below 2^-14 one unit is 2^-24, the last place of 0.5f: the addition rounds as the result must be rounded.
  const uint32_t subnormal = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
  const uint32_t finite = select_bits(magnitude < 0x38800000, subnormal, normal);
  const uint32_t special = select_bits(magnitude > 0x7f800000, 0x7e00, 0x7c00);
  // 65520 and above round to infinity.
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | select_bits(magnitude >= 0x477ff000, special, finite));
}

}  // namespace loramux
