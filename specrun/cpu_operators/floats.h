// Floats of 16 bits.
#pragma once

#include <cstdint>
#include <cstring>

namespace specrun {

inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float from_bfloat16(uint16_t upper) { return from_bits(static_cast<uint32_t>(upper) << 16); }

inline float from_float16(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31u, fraction = half & 1023u;
    if (exponent == 0) {  // Subnormal.
        const float size = static_cast<float>(fraction) * 0x1p-24f;
        return sign ? -size : size;
    }
    return from_bits(sign | (exponent == 31 ? 255u : exponent + 112u) << 23 | fraction << 13);
}

// To the nearest one, of two equally near ones to the even one.
inline uint16_t to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace specrun
