// Floats of 16 bits.
#pragma once

#include <cmath>
#include <cstddef>
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

// To the nearest one, of two equally near ones to the even one. |value| <= 65504, or NaN.
inline uint16_t to_float16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (value != value) return static_cast<uint16_t>(sign | 0x7e00u | (size >> 13 & 1023u));
    if (size < 0x38800000u) {  // Subnormal: what is added has its last digit where float16 has its own.
        const float shifted = from_bits(size) + 0.5f;
        uint32_t found;
        std::memcpy(&found, &shifted, sizeof found);
        return static_cast<uint16_t>(sign | (found - 0x3f000000u));
    }
    return static_cast<uint16_t>(sign | ((size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13));
}

template <class Floats>
inline Floats each_multiply_add(const Floats& a, const Floats& b, const Floats& c) {
    Floats y;
    for (size_t i = 0; i < sizeof y / sizeof(float); ++i) y[i] = std::fma(a[i], b[i], c[i]);
    return y;
}

template <class Halves, class Floats>
inline Halves each_to_float16(const Floats& floats) {
    Halves halves;
    for (size_t i = 0; i < sizeof halves / 2; ++i) halves[i] = to_float16(floats[i]);
    return halves;
}

template <class Floats, class Halves>
inline Floats each_from_float16(const Halves& halves) {
    Floats floats;
    for (size_t i = 0; i < sizeof halves / 2; ++i) floats[i] = from_float16(halves[i]);
    return floats;
}

// To the nearest one, of two equally near ones to the even one.
inline uint16_t to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace specrun
