// PTX's arithmetic where C++'s differs: rounding modes, conversions that saturate, approximations.
//
// From the PTX ISA. Approximate instructions are computed exactly, so a GPU's last bits may differ.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

// Kernels are compiled quickly, with few other optimizations.
#define INLINE [[gnu::always_inline]] inline

namespace gpu {

using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using f16 = _Float16;
using f32 = float;
using f64 = double;

template <typename To, typename From>
INLINE To as(From bits) {
  if constexpr (sizeof(To) == sizeof(From)) return std::bit_cast<To>(bits);
  else return static_cast<To>(bits);  // An operand may be wider than the instruction: its low bits count.
}

template <typename Float>
INLINE Float flush(Float value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(Float(0), value) : value;
}

// The sum a + b of doubles, rounded to float towards `direction` (-1: down, 0: to zero).
INLINE f32 rounded_sum(f64 a, f64 b, int direction) {
  f64 sum = a + b, other = sum - a;
  f64 lost = (a - (sum - other)) + (b - other);  // Knuth's TwoSum: sum + lost is exact.
  f32 near = static_cast<f32>(sum);
  if (!std::isfinite(sum) || !std::isfinite(near)) return near;
  bool down = direction < 0 || sum > 0;
  f64 above = static_cast<f64>(near) - sum;  // Exact: both are near.
  if (down && (above > 0 || (above == 0 && lost < 0))) return std::nextafterf(near, -INFINITY);
  if (!down && (above < 0 || (above == 0 && lost > 0))) return std::nextafterf(near, INFINITY);
  return near;
}

INLINE f32 fma_down(f32 a, f32 b, f32 c) { return rounded_sum(static_cast<f64>(a) * b, c, -1); }
INLINE f32 add_to_zero(f32 a, f32 b) { return rounded_sum(a, b, 0); }

// bfloat16: the upper half of a float.
INLINE f32 widen_bf16(u16 bits) { return std::bit_cast<f32>(static_cast<u32>(bits) << 16); }
INLINE u16 round_to_bf16(f32 value) {
  u32 bits = std::bit_cast<u32>(value);
  if (std::isnan(value)) return 0x7fff;
  return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // To the nearest, a tie to even.
}

INLINE f32 saturate(f32 value) { return value > 0 ? (value < 1 ? value : 1.0f) : 0.0f; }  // NaN becomes 0.

template <typename Int, typename Float>
INLINE Int truncate(Float value) {
  using Limits = std::numeric_limits<Int>;
  if (std::isnan(value)) return 0;
  if (value <= static_cast<Float>(Limits::min())) return Limits::min();
  if (value >= std::ldexp(Float(1), Limits::digits)) return Limits::max();
  return static_cast<Int>(value);
}

// Not a number only where both are.
template <typename Float>
INLINE Float smaller(Float a, Float b) { return std::fmin(a, b); }
template <typename Float>
INLINE Float larger(Float a, Float b) { return std::fmax(a, b); }

INLINE f32 exp2_approx(f32 value) { return flush(static_cast<f32>(std::exp2(static_cast<f64>(flush(value))))); }

// A gross approximation: of the result's bits the upper 32.
INLINE f64 reciprocal_approx(f64 value) {
  return flush(std::bit_cast<f64>(std::bit_cast<u64>(1 / flush(value)) & 0xffffffff00000000ull));
}

INLINE u64 high_product(u64 a, u64 b) { return static_cast<u64>((static_cast<unsigned __int128>(a) * b) >> 64); }

template <typename Word>
INLINE Word insert_bits(Word field, Word into, u32 position, u32 length) {
  constexpr u32 bits = sizeof(Word) * 8;
  position &= 255, length &= 255;
  if (position >= bits || !length) return into;
  Word mask = (length >= bits ? ~Word(0) : (Word(1) << length) - 1) << position;
  return (into & ~mask) | (field << position & mask);
}

// Four of the eight bytes of two words; where a selector's highest bit is set, a byte is the sign of the one it names.
INLINE u32 permute_bytes(u32 low, u32 high, u32 selectors) {
  u64 both = static_cast<u64>(high) << 32 | low;
  u32 result = 0;
  for (int i = 0; i < 4; i++) {
    u32 selector = selectors >> 4 * i & 15, byte = static_cast<u32>(both >> (selector & 7) * 8) & 255;
    result |= (selector & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return result;
}

template <typename Word>
INLINE Word left(Word value, u32 count) {
  return count < sizeof(Word) * 8 ? value << count : 0;
}

// Of signed words the sign moves in.
template <typename Word>
INLINE Word right(Word value, u32 count) {
  return count < sizeof(Word) * 8 ? value >> count : value < 0 ? -1 : 0;
}

}  // namespace gpu
