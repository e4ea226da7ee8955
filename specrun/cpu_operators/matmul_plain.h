// Vectors in plain C++, for processors whose own the others do not have. matmul.cpp includes it for each MULTIPLY_ADD.
// No include guard.

constexpr int kLanes = 16, kTileRows = 2, kPanelsOfFewRows = 1, kPanelsOfManyRows = 1;
constexpr int kFewRowsOfFloats = 2, kMoreRowsOfFloats = 4, kPanelsOfFloats = 2;
constexpr int kManyRowsOfFloats = 4, kPanelsOfManyFloats = 1;
template <int kBits>
constexpr bool kUnsigned = true;
struct Int {
    int32_t lanes[16];
};
struct Codes {
    uint8_t bytes[64];
};
struct Float {
    float lanes[16];
};
#define EACH(expression)                                  \
    Result result;                                        \
    for (int i = 0; i < 16; ++i) result.lanes[i] = (expression); \
    return result
inline Float zero() { return {}; }
inline Int spread(int32_t value) {
    using Result = Int;
    EACH(value);
}
inline Float spread(float value) {
    using Result = Float;
    EACH(value);
}
inline Int spread(const int8_t* four) {
    int32_t value;
    std::memcpy(&value, four, sizeof value);
    return spread(value);
}
inline Int load(const uint8_t* codes) {
    Int result;
    std::memcpy(&result, codes, sizeof result);
    return result;
}
inline Float load(const float* values) {
    Float result;
    std::memcpy(&result, values, sizeof result);
    return result;
}
inline Float load_bfloat16(const uint16_t* upper) {
    using Result = Float;
    EACH(from_bfloat16(upper[i]));
}
inline Float load_float16(const uint16_t* halves) {
    using Result = Float;
    EACH(from_float16(halves[i]));
}
inline Float load_int8(const int8_t* numbers) {
    using Result = Float;
    EACH(static_cast<float>(numbers[i]));
}
inline void store(float* target, const Float& values) { std::memcpy(target, &values, sizeof values); }
inline Int low_nibbles(const Int& packed) {
    using Result = Int;
    EACH(packed.lanes[i] & 0x0f0f0f0f);
}
inline Int high_nibbles(const Int& packed) {
    using Result = Int;
    EACH((packed.lanes[i] >> 4) & 0x0f0f0f0f);
}
template <int kBits>
inline Int add_products(const Int& sums, const Int& codes, const Int& inputs) {
    Int result = sums;
#if defined(__SSE2__)
    const __m128i low = _mm_set1_epi16(255);
    for (int i = 0; i < 16; i += 4) {
        __m128i ours, theirs, sum;
        std::memcpy(&ours, codes.lanes + i, sizeof ours);
        std::memcpy(&theirs, inputs.lanes + i, sizeof theirs);
        std::memcpy(&sum, sums.lanes + i, sizeof sum);
        const __m128i even = _mm_srai_epi16(_mm_slli_epi16(theirs, 8), 8), odd = _mm_srai_epi16(theirs, 8);
        sum = _mm_add_epi32(sum, _mm_madd_epi16(_mm_and_si128(ours, low), even));
        sum = _mm_add_epi32(sum, _mm_madd_epi16(_mm_srli_epi16(ours, 8), odd));
        std::memcpy(result.lanes + i, &sum, sizeof sum);
    }
#else
    for (int i = 0; i < 16; ++i) {
        uint8_t ours[4];
        int8_t theirs[4];
        std::memcpy(ours, &codes.lanes[i], 4);
        std::memcpy(theirs, &inputs.lanes[i], 4);
        for (int j = 0; j < 4; ++j) result.lanes[i] += ours[j] * theirs[j];
    }
#endif
    return result;
}
inline Float to_float(const Int& values) {
    using Result = Float;
    EACH(static_cast<float>(values.lanes[i]));
}
inline Float times(const Float& a, const Float& b) {
    using Result = Float;
    EACH(a.lanes[i] * b.lanes[i]);
}
inline Float multiply_add(const Float& a, const Float& b, const Float& c) {
    using Result = Float;
    EACH(MULTIPLY_ADD(a.lanes[i], b.lanes[i], c.lanes[i]));
}
#undef EACH
