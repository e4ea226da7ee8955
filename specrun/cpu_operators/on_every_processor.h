// Compiles the file KERNELS for each width of vectors that processors have, in a namespace of its own. Whoever includes
// this defines KERNELS, and includes before it what the kernels need: they include nothing but each other. All their
// functions are marked TARGET or INLINE.
#include <cstdint>
#include <cstring>

#include "floats.h"
#include "processor.h"

// WIDEN makes int32 numbers of int8 ones: GCC 12 does it one by one where it is not told. TO_HALVES and FROM_HALVES are
// for kPart numbers in float16, to the nearest, of two equally near ones to the even one; AVX2 comes with F16C.
// MULTIPLY_ADD(a, b, c) is a * b + c, rounded once; ``unfused`` is for processors that cannot do that quickly.
#if defined(__x86_64__)
#include <immintrin.h>

namespace specrun::avx512 {
namespace {
#define TARGET __attribute__((target("avx512f")))
#define WIDEN(codes) _mm512_cvtepi8_epi32((__m128i)(codes))
#define TO_HALVES(floats) (HalfPart)_mm512_cvtps_ph((__m512)(floats), _MM_FROUND_TO_NEAREST_INT)
#define FROM_HALVES(halves) (FloatPart)_mm512_cvtph_ps((__m256i)(halves))
#define MULTIPLY_ADD(a, b, c) (FloatPart)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c))
constexpr int kPart = 16;
#include "vectors.h"
#include KERNELS
#undef TARGET
#undef WIDEN
#undef TO_HALVES
#undef FROM_HALVES
#undef MULTIPLY_ADD
}  // namespace
}  // namespace specrun::avx512

namespace specrun::avx2 {
namespace {
#define TARGET __attribute__((target("avx2,f16c,fma")))
#define WIDEN(codes) _mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)(codes)))
#define TO_HALVES(floats) (HalfPart)_mm256_cvtps_ph((__m256)(floats), _MM_FROUND_TO_NEAREST_INT)
#define FROM_HALVES(halves) (FloatPart)_mm256_cvtph_ps((__m128i)(halves))
#define MULTIPLY_ADD(a, b, c) (FloatPart)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c))
constexpr int kPart = 8;
#include "vectors.h"
#include KERNELS
#undef TARGET
#undef WIDEN
#undef TO_HALVES
#undef FROM_HALVES
#undef MULTIPLY_ADD
}  // namespace
}  // namespace specrun::avx2

#endif

#define TARGET
#define WIDEN(codes) __builtin_convertvector(codes, IntPart)
#define TO_HALVES(floats) each_to_float16<HalfPart>(floats)
#define FROM_HALVES(halves) each_from_float16<FloatPart>(halves)
namespace specrun::plain {
namespace {
#define MULTIPLY_ADD(a, b, c) each_multiply_add(a, b, c)
constexpr int kPart = 4;
#include "vectors.h"
#include KERNELS
#undef MULTIPLY_ADD
}  // namespace
}  // namespace specrun::plain

#if defined(__x86_64__)
namespace specrun::unfused {
namespace {
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
constexpr int kPart = 4;
#include "vectors.h"
#include KERNELS
#undef MULTIPLY_ADD
}  // namespace
}  // namespace specrun::unfused
#endif
#undef TARGET
#undef WIDEN
#undef TO_HALVES
#undef FROM_HALVES

#if defined(__x86_64__)
#define ON_THIS_PROCESSOR(kernel) \
    (vectors == Vectors::kAvx512  ? avx512::kernel \
     : vectors == Vectors::kAvx2  ? avx2::kernel   \
     : vectors == Vectors::kPlain ? plain::kernel  \
                                  : unfused::kernel)
#else
#define ON_THIS_PROCESSOR(kernel) plain::kernel
#endif
