// Compiles the file KERNELS for each width of vectors that processors have, in a namespace of its own. Whoever includes
// this defines KERNELS, and includes before it what the kernels need: they include nothing but each other. All their
// functions are marked TARGET or INLINE.
#include <cstdint>
#include <cstring>

#include "processor.h"

#if defined(__x86_64__)

namespace specrun::avx512 {
namespace {
#define TARGET __attribute__((target("avx512f")))
constexpr int kPart = 16;
#include "vectors.h"
#include KERNELS
#undef TARGET
}  // namespace
}  // namespace specrun::avx512

namespace specrun::avx2 {
namespace {
#define TARGET __attribute__((target("avx2")))
constexpr int kPart = 8;
#include "vectors.h"
#include KERNELS
#undef TARGET
}  // namespace
}  // namespace specrun::avx2

#endif

namespace specrun::plain {
namespace {
#define TARGET
constexpr int kPart = 4;
#include "vectors.h"
#include KERNELS
#undef TARGET
}  // namespace
}  // namespace specrun::plain

#if defined(__x86_64__)
#define ON_THIS_PROCESSOR(kernel) \
    (vectors == Vectors::kAvx512 ? avx512::kernel : vectors == Vectors::kAvx2 ? avx2::kernel : plain::kernel)
#else
#define ON_THIS_PROCESSOR(kernel) plain::kernel
#endif
