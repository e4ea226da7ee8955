// Vectors of 8 floats, which AVX-VNNI and AVX2 share. Included inside the namespace of each, behind its TARGET.
constexpr int kLanes = 8, kTileRows = 4, kPanelsOfFewRows = 2, kPanelsOfManyRows = 1;
constexpr int kFewRowsOfFloats = 2, kMoreRowsOfFloats = 5, kPanelsOfFloats = 2;
constexpr int kManyRowsOfFloats = 5, kPanelsOfManyFloats = 1;
using Int = __m256i;
using Float = __m256;
OPERATION Float zero() { return _mm256_setzero_ps(); }
OPERATION Int spread(int32_t value) { return _mm256_set1_epi32(value); }
OPERATION Float spread(float value) { return _mm256_set1_ps(value); }
OPERATION Int spread(const int8_t* four) { return _mm256_set1_epi32(*reinterpret_cast<const Bits*>(four)); }
OPERATION Int load(const uint8_t* codes) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)); }
OPERATION Float load(const float* values) { return _mm256_loadu_ps(values); }
OPERATION Float load_bfloat16(const uint16_t* upper) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(upper));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
OPERATION Float load_float16(const uint16_t* halves) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
}
OPERATION Float load_int8(const int8_t* numbers) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(numbers))));
}
OPERATION void store(float* target, Float values) { _mm256_storeu_ps(target, values); }
OPERATION Int low_nibbles(Int packed) { return _mm256_and_si256(packed, _mm256_set1_epi8(15)); }
OPERATION Int high_nibbles(Int packed) { return low_nibbles(_mm256_srli_epi16(packed, 4)); }
OPERATION Float to_float(Int values) { return _mm256_cvtepi32_ps(values); }
OPERATION Float times(Float a, Float b) { return _mm256_mul_ps(a, b); }
OPERATION Float multiply_add(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
