// Vectors of 16 floats in plain C++. A function marked ON_EVERY_PROCESSOR is compiled for several instruction sets, and
// the processor takes the widest that it has. Products are not joined with sums (-ffp-contract=off), so that all of
// them compute the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__) && (!defined(__clang__) || __clang_major__ >= 14)
#define ON_EVERY_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ON_EVERY_PROCESSOR
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace specrun {

constexpr int kLanes = 16;
typedef float Float __attribute__((vector_size(64)));
typedef int32_t Int __attribute__((vector_size(64)));

template <typename Vector>
INLINE void load(Vector& vector, const void* place) {
    std::memcpy(&vector, place, sizeof vector);
}

// e to the power of x, x <= 0, within two units in the last place; at least e**-87. Cephes' polynomial.
INLINE Float exponential(Float x) {
    constexpr float kShift = 12582912.0f;  // 1.5 * 2**23: what is added to it is rounded to a whole number.
    const Float lowest = Float{} - 87.0f;
    x = x < lowest ? lowest : x;  // NaN stays NaN.
    const Float shifted = x * 1.44269504f + kShift, power = shifted - kShift;
    const Float rest = x - power * 0.693359375f - power * -2.12194440e-4f;
    Float y = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * rest + 8.3334519073e-3f;
    y = y * rest + 4.1665795894e-2f;
    y = y * rest + 1.6666665459e-1f;
    y = y * rest + 5.0000001201e-1f;
    y = y * (rest * rest) + rest + 1.0f;
    return (Float)((Int)y + ((Int)shifted << 23));
}

}  // namespace specrun
