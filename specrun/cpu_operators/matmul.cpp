// Products of rows by weights in panels: the kernels of each instruction set, and which of them a processor runs.
#include "matmul.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstddef>
#include <cstring>
#include <memory>
#include <type_traits>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace specrun {
namespace {

typedef int32_t __attribute__((may_alias)) Bits;

constexpr int32_t kSmallest = (127 - 119) << 23;  // 2^-119: 127 divided by it is finite.
constexpr float kShift = 12582912.0f;              // 1.5 * 2^23
constexpr int64_t kFewPanels = 64;  // They are divided into smaller items, so that no thread waits long.

inline int32_t to_bits(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline const Output& output_of(const Product& product, int64_t panel) {
    const Output* output = product.outputs + product.num_outputs - 1;
    while (panel < output->first_panel) --output;
    return *output;
}

// Compute the activations of a row, where there is a prologue.
inline const float* row_of(const Product& product, int64_t row) {
    if (product.activations.prologue != Prologue::kNone) {
        make_row(product.activations, product.places[row] / product.repeats, product.prepared + row * product.weight.inputs);
    }
    return product.x(row);
}

inline size_t bytes_of(int64_t floats) { return static_cast<size_t>(floats) * sizeof(float); }

#define UNROLL _Pragma("GCC unroll 16")

// Plain C++: the definition of what the others compute. ``unfused`` is for processors without fused multiply-adds, on
// which the C library would take a hundred times as long; its bits are its own.
#define TARGET
#define OPERATION inline
#define MULTIPLY_ADD(a, b, c) std::fma(a, b, c)
namespace plain {
#include "matmul_plain.h"
#include "matmul_tile.h"
bool is_supported() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("fma");
#else
    return true;
#endif
}
}  // namespace plain
#undef MULTIPLY_ADD
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
namespace unfused {
#include "matmul_plain.h"
#include "matmul_tile.h"
bool is_supported() { return true; }
}  // namespace unfused
#undef MULTIPLY_ADD
#undef TARGET
#undef OPERATION

#if defined(__x86_64__)

namespace avx512_vnni {
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")))
#define OPERATION TARGET inline __attribute__((always_inline))
constexpr int kLanes = 16, kTileRows = 6, kPanelsOfFewRows = 4, kPanelsOfManyRows = 2;
constexpr int kFewRowsOfFloats = 6, kMoreRowsOfFloats = 9, kPanelsOfFloats = 4;
constexpr int kManyRowsOfFloats = 6, kPanelsOfManyFloats = 4;
template <int kBits>
constexpr bool kUnsigned = true;
using Int = __m512i;
using Float = __m512;
OPERATION Float zero() { return _mm512_setzero_ps(); }
OPERATION Int spread(int32_t value) { return _mm512_set1_epi32(value); }
OPERATION Float spread(float value) { return _mm512_set1_ps(value); }
OPERATION Int spread(const int8_t* four) { return _mm512_set1_epi32(*reinterpret_cast<const Bits*>(four)); }
OPERATION Int load(const uint8_t* codes) { return _mm512_loadu_si512(codes); }
OPERATION Float load(const float* values) { return _mm512_loadu_ps(values); }
OPERATION Float load_bfloat16(const uint16_t* upper) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(upper));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
OPERATION Float load_float16(const uint16_t* halves) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
}
OPERATION Float load_int8(const int8_t* numbers) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers))));
}
OPERATION void store(float* target, Float values) { _mm512_storeu_ps(target, values); }
OPERATION Int low_nibbles(Int packed) { return _mm512_and_si512(packed, _mm512_set1_epi8(15)); }
OPERATION Int high_nibbles(Int packed) { return low_nibbles(_mm512_srli_epi16(packed, 4)); }
template <int kBits>
OPERATION Int add_products(Int sums, Int codes, Int inputs) { return _mm512_dpbusd_epi32(sums, codes, inputs); }
OPERATION Float to_float(Int values) { return _mm512_cvtepi32_ps(values); }
OPERATION Float times(Float a, Float b) { return _mm512_mul_ps(a, b); }
OPERATION Float multiply_add(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
#include "matmul_tile.h"
#undef TARGET
bool is_supported() {
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
}  // namespace avx512_vnni

#if defined(__linux__) && (!defined(__clang__) && __GNUC__ >= 11 || defined(__clang__) && __clang_major__ >= 12)
#define HAS_AMX
namespace amx {
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,amx-tile,amx-int8")))
using namespace avx512_vnni;
#include "matmul_amx.h"
#undef TARGET
bool is_supported() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    constexpr unsigned kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;
    return avx512_vnni::is_supported() && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kAmxTile) &&
           (edx & kAmxInt8) && ask_for_tiles();
}
}  // namespace amx
#endif

// Whether the processor converts float16; older compilers do not know its name.
bool has_float16() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    constexpr unsigned kF16c = 1u << 29;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & kF16c);
}

#if !defined(__clang__) && __GNUC__ >= 11 || defined(__clang__) && __clang_major__ >= 12
#define HAS_AVX_VNNI
namespace avx_vnni {
#define TARGET __attribute__((target("avx2,fma,f16c,avxvnni")))
template <int kBits>
constexpr bool kUnsigned = true;
#include "matmul_eight_lanes.h"
template <int kBits>
OPERATION Int add_products(Int sums, Int codes, Int inputs) { return _mm256_dpbusd_avx_epi32(sums, codes, inputs); }
#include "matmul_tile.h"
#undef TARGET
bool is_supported() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    constexpr unsigned kAvxVnni = 1 << 4;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_float16() &&
           __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & kAvxVnni);
}
}  // namespace avx_vnni
#endif

namespace avx2 {
#define TARGET __attribute__((target("avx2,fma,f16c")))
// 8-bit codes are multiplied as signed numbers.
template <int kBits>
constexpr bool kUnsigned = kBits == 4;
#include "matmul_eight_lanes.h"
// Pairs are added up in 16 bits first. They hold two products of at most 15 and 127, or 128 and 127.
template <int kBits>
OPERATION Int add_products(Int sums, Int codes, Int inputs) {
    if constexpr (kBits == 8) {
        const Int numbers = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
        inputs = _mm256_sign_epi8(inputs, numbers);  // The sign of a number moves to its input.
        codes = _mm256_abs_epi8(numbers);
    }
    const Int pairs = _mm256_maddubs_epi16(codes, inputs);
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#include "matmul_tile.h"
#undef TARGET
bool is_supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_float16(); }
}  // namespace avx2

#endif

#define INSTRUCTION_SET(name, vectors) \
    {#name, vectors, name::is_supported, name::panels_at_once, name::round_row, name::multiply}

const InstructionSet kInstructionSets[] = {
#if defined(__x86_64__)
#if defined(HAS_AMX)
    INSTRUCTION_SET(amx, Vectors::kAvx512),
#endif
    INSTRUCTION_SET(avx512_vnni, Vectors::kAvx512),
#if defined(HAS_AVX_VNNI)
    INSTRUCTION_SET(avx_vnni, Vectors::kAvx2),
#endif
    INSTRUCTION_SET(avx2, Vectors::kAvx2),
#endif
    INSTRUCTION_SET(plain, Vectors::kPlain),
    INSTRUCTION_SET(unfused, Vectors::kUnfused),
};

const InstructionSet* choose(const char* name) {
    for (const InstructionSet& set : kInstructionSets) {
        if ((!name || std::strcmp(name, set.name) == 0) && set.is_supported()) return &set;
    }
    return nullptr;
}

const InstructionSet* chosen = choose(nullptr);

struct Work {
    const Product* product;
    int64_t panels;
};

void prepare_row(void* item, size_t number) {
    const Product& product = *static_cast<const Product*>(item);
    const int64_t row = static_cast<int64_t>(number);
    if (product.weight.bits == 32) {
        row_of(product, row);
    } else {
        chosen->round_row(product, row);
    }
}

void multiply_part(void* item, size_t number) {
    const Work& work = *static_cast<const Work*>(item);
    const Product& product = *work.product;
    const int64_t first = static_cast<int64_t>(number) * work.panels;
    chosen->multiply(product, first, work.panels);
    for (int i = 0; number == 0 && i < product.num_outputs; ++i) {
        const Output& output = product.outputs[i];
        for (int64_t row = 0; row < product.num_nans; ++row) output.y[product.nans[row] * output.columns] = NAN;
    }
}

// Divide ``rows`` rows from number ``first`` on into those that are computed and those that are NaN, as unused tokens are
// (specbuild/compilers/cpu/unused.py). Of the outputs of the latter, which are all NaN, the first one is written. Returns
// how many rows are computed; the others stand last in ``places``.
int64_t find_rows(const Product& product, int64_t first, int64_t rows, int64_t* places) {
    int64_t used = 0, left = rows;
    for (int64_t number = first; number < first + rows; ++number) {
        const int64_t row = product.chosen ? product.chosen[number] : number;
        const bool is_nan = std::isnan(product.activations.x[row / product.repeats * product.weight.inputs]);
        places[is_nan ? --left : used++] = row;
    }
    return used;
}

// Less work than this is done sooner than another thread is told about it.
constexpr int64_t kFewProducts = 1 << 18, kFewInputs = 1 << 15;
constexpr int64_t kFewestRows = 64, kRowBytes = 1 << 18;

}  // namespace

bool multiply(Product product, const Threads& threads) {
    const Weight& weight = product.weight;
    Rounded& rounded = product.rounded;
    const bool has_prologue = product.activations.prologue != Prologue::kNone, has_codes = weight.bits != 32;
    const int64_t all_rows = product.rows, inputs = weight.inputs, blocks = has_codes ? weight.blocks() : 0;
    rounded.stride = has_codes ? (inputs + 63) / 64 * 64 + 64 : 0;
    // So many rows at a time stay in the L2 cache, together with the weights that they are multiplied by.
    const int64_t row_bytes = has_codes ? rounded.stride : 4 * inputs;
    const int64_t rows = std::min(all_rows, std::max(kFewestRows, kRowBytes / row_bytes));
    const int64_t scales = (rows * blocks + 15) / 16 * 16, prepared = has_prologue ? (rows * inputs + 15) / 16 * 16 : 0;
    const int64_t places = (rows + 7) / 8 * 8;
    const size_t needed = static_cast<size_t>(places) * sizeof(int64_t) + bytes_of(prepared + 4 * scales) +
                          static_cast<size_t>(rows * rounded.stride);
    // Kept from call to call: the system would clear so much memory each time.
    thread_local std::unique_ptr<void, void (*)(void*)> memory(nullptr, std::free);
    thread_local size_t size = 0;
    if (needed > size) {
        const size_t lines = (needed + 63) / 64 * 64;  // Whole ones of the cache.
        memory.reset(std::aligned_alloc(64, lines));
        size = memory ? lines : 0;
        if (!memory) return false;
    }
    int64_t* const own_places = static_cast<int64_t*>(memory.get());
    product.prepared = reinterpret_cast<float*>(own_places + places);
    rounded.scales = product.prepared + prepared;
    rounded.sums = reinterpret_cast<int32_t*>(rounded.scales + scales);
    rounded.starts = rounded.sums + scales;
    rounded.x_sums = reinterpret_cast<float*>(rounded.starts + scales);
    rounded.codes = reinterpret_cast<int8_t*>(rounded.x_sums + scales);
    rounded.rows = rows;
    for (int64_t done = 0; done < all_rows; done += rows) {
        const int64_t now = std::min(rows, all_rows - done);
        product.rows = find_rows(product, done, now, own_places);
        product.places = own_places, product.nans = own_places + product.rows, product.num_nans = now - product.rows;
        const bool is_little = product.rows * inputs < kFewInputs;
        if ((has_prologue || has_codes) && !run(threads, is_little, prepare_row, product.rows, &product)) return false;
        Work work{&product, chosen->panels_at_once(product)};
        const int64_t parts = (weight.panels + work.panels - 1) / work.panels;
        const bool alone = product.rows * inputs * weight.panels * kColumns < kFewProducts;
        if (!run(threads, alone, multiply_part, parts, &work)) return false;
    }
    return true;
}

}  // namespace specrun

const char* specrun_choose_instruction_set(const char* name) {
    const specrun::InstructionSet* set = specrun::choose(name);
    if (!set) return nullptr;
    specrun::chosen = set;
    specrun::vectors = name ? set->vectors : specrun::widest_vectors();
    return set->name;
}
