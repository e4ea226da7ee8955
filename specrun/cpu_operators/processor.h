// What processors differ in: their vectors of floats, and how memory is asked for.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace specrun {

enum class Vectors { kUnfused, kPlain, kAvx2, kAvx512 };

// The widest of this processor.
inline Vectors widest_vectors() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return Vectors::kAvx512;
    if (!__builtin_cpu_supports("fma")) return Vectors::kUnfused;
    if (__builtin_cpu_supports("avx2")) return Vectors::kAvx2;
#endif
    return Vectors::kPlain;
}

// Those that are used; tests choose others.
inline Vectors vectors = widest_vectors();

// Weights and keys are asked for so many lines before they are used: processors do not read ahead beyond the end of a
// page.
constexpr int64_t kLinesAhead = 128;

inline bool is_zen5() {
#if defined(__x86_64__)
    unsigned version = 0, vendor = 0, unused = 0;
    __get_cpuid(0, &unused, &vendor, &unused, &unused);
    __get_cpuid(1, &version, &unused, &unused, &unused);
    constexpr unsigned kAuth = 0x68747541;  // The vendor's name begins so.
    return vendor == kAuth && ((version >> 8) & 15) + ((version >> 20) & 255) == 26;
#else
    return false;
#endif
}

// Whether prefetches are non-temporal: lines that a pass reads once go past the larger caches, which keep what else is
// in them. On other processors lines go to the second cache: the first one of a Zen 4 waits for fewer at a time.
inline const bool is_non_temporal = is_zen5();

// Ask for lines that follow each other.
template <int kLines = 1>
inline __attribute__((always_inline)) void prefetch(const void* first) {
    constexpr int kNonTemporal = 0, kSecondCache = 2, kBytes = 64;
    const char* line = static_cast<const char*>(first);
    if (is_non_temporal) {
#pragma GCC unroll 8
        for (int i = 0; i < kLines; ++i) __builtin_prefetch(line + i * kBytes, 0, kNonTemporal);
    } else {
#pragma GCC unroll 8
        for (int i = 0; i < kLines; ++i) __builtin_prefetch(line + i * kBytes, 0, kSecondCache);
    }
}

}  // namespace specrun
