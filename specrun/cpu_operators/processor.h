// What processors differ in: their vectors of floats, and how memory is asked for.
#pragma once

#include <cstdint>

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
// page. Lines go to the second cache: the first one of a Zen 4 waits for fewer lines at a time.
constexpr int64_t kLinesAhead = 128;
constexpr int kSecondCache = 2;  // For __builtin_prefetch.

}  // namespace specrun
