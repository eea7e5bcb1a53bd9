// Vectors of float32 for the instruction set that the including file is compiled for: AVX-512, AVX2, or plain
// C++. Everything has internal linkage, so that the linker cannot mix up two builds of it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(LORAMUX_AVX512) || defined(LORAMUX_AVX2)
#include <immintrin.h>
#else
#include "half.h"
#endif

namespace loramux {
namespace {

struct F16 {
  uint16_t bits;
};

struct BF16 {
  uint16_t bits;
};

// For each instruction set:
//   load, store      kLanes values from and to memory, as float32; a store rounds to nearest even
//   unpack           kLanes words of two 16-bit values each to their low and their high values; the pointer
//                    only tells the type
//   load_quads       quads of four words, `step` bytes apart
//   transpose_quads  word i of quad q of vector k goes to word k of quad q of vector i
#if defined(LORAMUX_AVX512)

using V = __m512;
constexpr int kLanes = 16;
constexpr int kAccumulators = 16;  // leaves half of the registers to operands

inline V zero() {
  return _mm512_setzero_ps();
}
inline V broadcast(float value) {
  return _mm512_set1_ps(value);
}
inline V fma(V a, V b, V c) {
  return _mm512_fmadd_ps(a, b, c);
}
inline float sum(V v) {
  return _mm512_reduce_add_ps(v);
}

inline V load(const float* p) {
  return _mm512_loadu_ps(p);
}
inline V load(const F16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
inline V load(const BF16* p) {
  const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}

inline void store(float* p, V v) {
  _mm512_storeu_ps(p, v);
}
inline void store(F16* p, V v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
#if defined(LORAMUX_AVX512_BF16)
inline void store(BF16* p, V v) {
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(v));
}
#else
inline void store(BF16* p, V v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet_nan = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __m512i result = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), quiet_nan);
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(result, 16)));
}
#endif

inline void unpack(V words, const F16*, V& low, V& high) {
  const __m512i bits = _mm512_castps_si512(words);
  low = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits));
  high = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
}
inline void unpack(V words, const BF16*, V& low, V& high) {
  const __m512i bits = _mm512_castps_si512(words);
  low = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  high = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(0xffff0000)));
}

inline V load_quads(const char* p, int64_t step) {
  V v = _mm512_castps128_ps512(_mm_loadu_ps((const float*)p));
  v = _mm512_insertf32x4(v, _mm_loadu_ps((const float*)(p + step)), 1);
  v = _mm512_insertf32x4(v, _mm_loadu_ps((const float*)(p + 2 * step)), 2);
  return _mm512_insertf32x4(v, _mm_loadu_ps((const float*)(p + 3 * step)), 3);
}
inline void store_quads(float* p, int64_t step, V v) {
  _mm_storeu_ps(p, _mm512_castps512_ps128(v));
  _mm_storeu_ps(p + step, _mm512_extractf32x4_ps(v, 1));
  _mm_storeu_ps(p + 2 * step, _mm512_extractf32x4_ps(v, 2));
  _mm_storeu_ps(p + 3 * step, _mm512_extractf32x4_ps(v, 3));
}
inline void transpose_quads(V (&v)[4]) {
  const V a = _mm512_unpacklo_ps(v[0], v[2]), b = _mm512_unpackhi_ps(v[0], v[2]);
  const V c = _mm512_unpacklo_ps(v[1], v[3]), d = _mm512_unpackhi_ps(v[1], v[3]);
  v[0] = _mm512_unpacklo_ps(a, c), v[1] = _mm512_unpackhi_ps(a, c);
  v[2] = _mm512_unpacklo_ps(b, d), v[3] = _mm512_unpackhi_ps(b, d);
}

#elif defined(LORAMUX_AVX2)

using V = __m256;
constexpr int kLanes = 8;
constexpr int kAccumulators = 8;

inline V zero() {
  return _mm256_setzero_ps();
}
inline V broadcast(float value) {
  return _mm256_set1_ps(value);
}
inline V fma(V a, V b, V c) {
  return _mm256_fmadd_ps(a, b, c);
}
inline float sum(V v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline V load(const float* p) {
  return _mm256_loadu_ps(p);
}
inline V load(const F16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
inline V load(const BF16* p) {
  const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
}

inline void store(float* p, V v) {
  _mm256_storeu_ps(p, v);
}
inline void store(F16* p, V v) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(BF16* p, V v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet_nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i result = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet_nan, is_nan), 16);
  const __m128i low = _mm256_castsi256_si128(result), high = _mm256_extracti128_si256(result, 1);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi32(low, high));
}

inline void unpack(V words, const F16*, V& low, V& high) {
  const __m256i bits = _mm256_castps_si256(words);
  const __m256i lows = _mm256_and_si256(bits, _mm256_set1_epi32(0xffff));
  const __m256i highs = _mm256_srli_epi32(bits, 16);
  const auto narrow = [](__m256i v) {
    return _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  };
  low = _mm256_cvtph_ps(narrow(lows));
  high = _mm256_cvtph_ps(narrow(highs));
}
inline void unpack(V words, const BF16*, V& low, V& high) {
  const __m256i bits = _mm256_castps_si256(words);
  low = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  high = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(0xffff0000)));
}

inline V load_quads(const char* p, int64_t step) {
  const __m128 low = _mm_loadu_ps((const float*)p), high = _mm_loadu_ps((const float*)(p + step));
  return _mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1);
}
inline void transpose_quads(V (&v)[4]) {
  const V a = _mm256_unpacklo_ps(v[0], v[2]), b = _mm256_unpackhi_ps(v[0], v[2]);
  const V c = _mm256_unpacklo_ps(v[1], v[3]), d = _mm256_unpackhi_ps(v[1], v[3]);
  v[0] = _mm256_unpacklo_ps(a, c), v[1] = _mm256_unpackhi_ps(a, c);
  v[2] = _mm256_unpacklo_ps(b, d), v[3] = _mm256_unpackhi_ps(b, d);
}

#else

constexpr int kLanes = 4;
constexpr int kAccumulators = 8;
using V = float __attribute__((vector_size(16)));
using Bits = uint32_t __attribute__((vector_size(16)));

inline V broadcast(float value) {
  return V{value, value, value, value};
}
inline V zero() {
  return broadcast(0.f);
}
inline V fma(V a, V b, V c) {
#ifdef __FP_FAST_FMAF
  for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}
inline float sum(V v) {
  return (v[0] + v[2]) + (v[1] + v[3]);
}

inline V load(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline V load(const F16* p) {
  return V{f16_to_float(p[0].bits), f16_to_float(p[1].bits), f16_to_float(p[2].bits),
           f16_to_float(p[3].bits)};
}
inline V load(const BF16* p) {
  return V{bf16_to_float(p[0].bits), bf16_to_float(p[1].bits), bf16_to_float(p[2].bits),
           bf16_to_float(p[3].bits)};
}

inline void store(float* p, V v) {
  std::memcpy(p, &v, sizeof v);
}
inline void store(F16* p, V v) {
  for (int i = 0; i < kLanes; ++i) p[i].bits = float_to_f16(v[i]);
}
inline void store(BF16* p, V v) {
  for (int i = 0; i < kLanes; ++i) p[i].bits = float_to_bf16(v[i]);
}

inline void unpack(V words, const F16*, V& low, V& high) {
  const Bits bits = (Bits)words;
  for (int i = 0; i < kLanes; ++i) low[i] = f16_to_float(static_cast<uint16_t>(bits[i]));
  for (int i = 0; i < kLanes; ++i) high[i] = f16_to_float(static_cast<uint16_t>(bits[i] >> 16));
}
inline void unpack(V words, const BF16*, V& low, V& high) {
  const Bits bits = (Bits)words;
  low = (V)(bits << 16);
  high = (V)(bits & 0xffff0000);
}

inline V load_quads(const char* p, int64_t) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void transpose_quads(V (&v)[4]) {
  const V rows[4] = {v[0], v[1], v[2], v[3]};
  for (int i = 0; i < 4; ++i) {
    for (int k = 0; k < 4; ++k) v[i][k] = rows[k][i];
  }
}

#endif

}  // namespace
}  // namespace loramux
