// Vectors of 16 floats in plain C++: of as many parts as the processor's vectors are narrower. on_every_processor.h
// includes it for each width kPart. Products are joined with sums by multiply_add alone (-ffp-contract=off), so that all
// widths compute the same bits.
//
// No include guard. A compiler's own vectors of 16 floats would do where the processor has such; elsewhere GCC 12 keeps
// them in memory, which takes up to eight times as long.

#undef INLINE
#define INLINE TARGET static inline __attribute__((always_inline))
#undef UNROLL
#define UNROLL _Pragma("GCC unroll 16")
#undef EACH
#undef KEEP
#define EACH UNROLL for (int i = 0; i < kParts; ++i)
// Keep a vector in registers.
#if defined(__x86_64__)
#define KEEP(vector) EACH __asm__("" : "+v"((vector).parts[i]))
#elif defined(__aarch64__)
#define KEEP(vector) EACH __asm__("" : "+w"((vector).parts[i]))
#else
#define KEEP(vector) (void)(vector)
#endif

constexpr int kLanes = 16, kParts = kLanes / kPart;
typedef float FloatPart __attribute__((vector_size(kPart * 4)));
typedef int32_t IntPart __attribute__((vector_size(kPart * 4)));

struct Int {
    IntPart parts[kParts];
};

struct Float {
    FloatPart parts[kParts];
    TARGET float operator[](int lane) const { return parts[lane / kPart][lane % kPart]; }
};

INLINE Float spread(float x) {
    Float y;
    EACH y.parts[i] = x - FloatPart{};  // A sum with 0 would be computed, because of -0.
    return y;
}

#define OPERATOR(op)                                        \
    INLINE Float operator op(const Float& a, const Float& b) { \
        Float y;                                            \
        EACH y.parts[i] = a.parts[i] op b.parts[i];         \
        return y;                                           \
    }                                                       \
    INLINE Float operator op(const Float& a, float b) {     \
        Float y;                                            \
        EACH y.parts[i] = a.parts[i] op b;                  \
        return y;                                           \
    }
OPERATOR(+)
OPERATOR(-)
OPERATOR(*)
OPERATOR(/)
#undef OPERATOR

INLINE void operator+=(Float& a, const Float& b) { a = a + b; }

// a * b + c, rounded once.
INLINE Float multiply_add(const Float& a, const Float& b, const Float& c) {
    Float y;
    EACH y.parts[i] = MULTIPLY_ADD(a.parts[i], b.parts[i], c.parts[i]);
    return y;
}
INLINE Float multiply_add(const Float& a, float b, const Float& c) { return multiply_add(a, spread(b), c); }

INLINE Int operator>(const Float& a, const Float& b) {
    Int y;
    EACH y.parts[i] = a.parts[i] > b.parts[i];
    return y;
}

INLINE Int operator>(const Int& a, int32_t b) {
    Int y;
    EACH y.parts[i] = a.parts[i] > b;
    return y;
}

// a where ``which`` is set, else b.
INLINE Float select(const Int& which, const Float& a, const Float& b) {
    Float y;
    EACH y.parts[i] = which.parts[i] ? a.parts[i] : b.parts[i];
    return y;
}

// Part by part: what is copied as a whole stays in memory.
template <typename Vector>
INLINE void load(Vector& vector, const void* numbers) {
    EACH std::memcpy(&vector.parts[i], static_cast<const char*>(numbers) + i * sizeof vector.parts[i],
                     sizeof vector.parts[i]);
}

INLINE void store(float* numbers, const Float& vector) {
    EACH std::memcpy(numbers + i * kPart, &vector.parts[i], sizeof vector.parts[i]);
}

// e to the power of x, x <= 0, within two units in the last place; at least e**-87. Cephes' polynomial.
INLINE Float exponential(Float x) {
    constexpr float kShift = 12582912.0f;  // 1.5 * 2**23: what is added to it is rounded to a whole number.
    const Float lowest = spread(-87.0f);
    x = select(lowest > x, lowest, x);  // NaN stays NaN.
    const Float shifted = multiply_add(x, 1.44269504f, spread(kShift)), power = shifted - kShift;
    const Float rest = multiply_add(power, 2.12194440e-4f, multiply_add(power, -0.693359375f, x));
    Float y = multiply_add(rest, 1.9875691500e-4f, spread(1.3981999507e-3f));
    y = multiply_add(y, rest, spread(8.3334519073e-3f));
    y = multiply_add(y, rest, spread(4.1665795894e-2f));
    y = multiply_add(y, rest, spread(1.6666665459e-1f));
    y = multiply_add(y, rest, spread(5.0000001201e-1f));
    y = multiply_add(y, rest * rest, rest) + 1.0f;
    EACH y.parts[i] = (FloatPart)((IntPart)y.parts[i] + ((IntPart)shifted.parts[i] << 23));
    return y;
}

// tanh(x), within two units in the last place; odd. Cephes' polynomial where the quotient would cancel, and for NaN.
INLINE Float hyperbolic_tangent(const Float& x) {
    Float size;
    EACH size.parts[i] = (FloatPart)((IntPart)x.parts[i] & INT32_MAX);
    const Float square = size * size, power = exponential(size * -2.0f);
    Float y = square * -5.70498872745e-3f + 2.06390887954e-2f;
    y = y * square + -5.37397155531e-2f;
    y = y * square + 1.33314422036e-1f;
    y = y * square + -3.33332819422e-1f;
    y = y * square * size + size;
    y = select(size > spread(0.625f), (spread(1.0f) - power) / (power + 1.0f), y);
    EACH y.parts[i] = (FloatPart)((IntPart)y.parts[i] | ((IntPart)x.parts[i] & INT32_MIN));
    return y;
}
