// Which vectors of floats this processor has.
#pragma once

namespace specrun {

enum class Vectors { kPlain, kAvx2, kAvx512 };

// The widest of this processor.
inline Vectors widest_vectors() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return Vectors::kAvx512;
    if (__builtin_cpu_supports("avx2")) return Vectors::kAvx2;
#endif
    return Vectors::kPlain;
}

// Those that are used; tests choose others.
inline Vectors vectors = widest_vectors();

}  // namespace specrun
