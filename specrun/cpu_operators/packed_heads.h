// Keys and values in float16 or in codes of 8 or 4 bits, in terms of the vectors of vectors.h.
//
// Of codes: a head's numbers are mixed by a Hadamard matrix, so that none is much louder than the others, and each
// block of 32 gets a scale of its own. Queries are mixed as keys are, and answers are mixed back: the matrix is its own
// inverse. (arXiv 2404.00456, QuaRot.) In memory: codes, then scales. Codes of 4 bits stand for code - 8; a byte has
// number i of a block in its lower half and number i + 16 in its upper one.

typedef int8_t CodePart __attribute__((vector_size(kPart)));
constexpr int kHalf = kBlock / 2;
constexpr int64_t kKeysAtATime = 16;  // They stay in the first cache.

// Numbers that are mixed with each other: as many as the largest power of 2 in ``width``.
INLINE int64_t span_of(int64_t width) { return width & -width; }

// x +- its neighbours ``apart`` lanes away.
INLINE FloatPart butterfly(const FloatPart& x, int apart) {
    FloatPart swapped, signs;
#if defined(__clang__)
    for (int i = 0; i < kPart; ++i) swapped[i] = x[i ^ apart];
#else
    IntPart places;
    for (int i = 0; i < kPart; ++i) places[i] = i ^ apart;
    swapped = __builtin_shuffle(x, places);
#endif
    for (int i = 0; i < kPart; ++i) signs[i] = i & apart ? -1.0f : 1.0f;
    return swapped + x * signs;
}

// Multiply a head by the Hadamard matrix, in place.
TARGET inline void mix_numbers(float* x, int64_t width) {
    const int64_t span = span_of(width);
    const float factor = 1.0f / std::sqrt(static_cast<float>(span));
    for (int64_t index = 0; index < width; index += kPart) {
        FloatPart part;
        std::memcpy(&part, x + index, sizeof part);
        part *= factor;
        UNROLL for (int apart = 1; apart < kPart; apart *= 2) part = butterfly(part, apart);
        std::memcpy(x + index, &part, sizeof part);
    }
    for (int64_t apart = kPart; apart < span; apart *= 2) {
        for (int64_t index = 0; index < width; index += kPart) {
            if (index & apart) continue;
            FloatPart a, b;
            std::memcpy(&a, x + index, sizeof a);
            std::memcpy(&b, x + index + apart, sizeof b);
            const FloatPart sum = a + b, difference = a - b;
            std::memcpy(x + index, &sum, sizeof sum);
            std::memcpy(x + index + apart, &difference, sizeof difference);
        }
    }
}

typedef uint16_t HalfPart __attribute__((vector_size(kPart * 2)));

// Write the head ``x`` to ``y`` in float16. Numbers that it cannot hold become its largest ones; NaN stays.
TARGET inline void pack_halves(const float* x, int64_t width, uint8_t* y) {
    constexpr float kLargest = 65504.0f;
    for (int64_t index = 0; index < width; index += kPart) {
        FloatPart part;
        std::memcpy(&part, x + index, sizeof part);
        part = part > kLargest ? FloatPart{} + kLargest : part;
        part = part < -kLargest ? FloatPart{} - kLargest : part;
        const HalfPart halves = TO_HALVES(part);
        std::memcpy(y + index * 2, &halves, sizeof halves);
    }
}

TARGET inline void unpack_halves(const uint8_t* heads, int64_t numbers, float* y) {
    for (int64_t index = 0; index < numbers; index += kPart) {
        HalfPart halves;
        std::memcpy(&halves, heads + index * 2, sizeof halves);
        const FloatPart part = FROM_HALVES(halves);
        std::memcpy(y + index, &part, sizeof part);
    }
}

// Write the head ``x`` to ``y``. Its numbers are mixed in place. A block with NaN becomes NaN.
template <int kBits>
TARGET void pack_head(float* x, int64_t width, uint8_t* y) {
    if constexpr (kBits == 16) return pack_halves(x, width, y);
    constexpr float kShift = 12582912.0f;  // 1.5 * 2**23: what is added to it is rounded to a whole number.
    mix_numbers(x, width);
    uint8_t* scales = y + width * kBits / 8;
    constexpr float kLimit = kBits == 8 ? 127.0f : 7.0f, kLowest = kBits == 8 ? -127.0f : -8.0f;
    for (int64_t first = 0; first < width; first += kBlock) {
        int32_t numbers[kBlock], largest = 0, is_positive = 0;
        std::memcpy(numbers, x + first, sizeof numbers);
        for (int i = 0; i < kBlock; ++i) largest = std::max(largest, numbers[i] & 0x7fffffff);  // Ordered as floats are.
        for (int i = 0; i < kBlock; ++i) is_positive |= numbers[i] == largest;
        const float loudest = from_bits(static_cast<uint32_t>(largest));
        // Of 4 bits the loudest number gets the code -8, so that all codes are used.
        const uint16_t scale = to_bfloat16(kBits == 8 ? loudest / 127.0f : loudest / (is_positive ? -8.0f : 8.0f));
        std::memcpy(scales + first / kBlock * 2, &scale, sizeof scale);
        const float step = from_bfloat16(scale), inverse = step != 0.0f ? 1.0f / step : 0.0f;
        for (int i = 0; i < kBlock; ++i) {
            float number = x[first + i] * inverse;
            number = number < kLimit ? number : kLimit;  // Of NaN too: its scale says so.
            number = (number > kLowest ? number : kLowest) + kShift;
            std::memcpy(&numbers[i], &number, sizeof number);
        }
        uint8_t* codes = y + first * kBits / 8;
        if (kBits == 8) {
            for (int i = 0; i < kBlock; ++i) codes[i] = static_cast<uint8_t>(numbers[i]);
        } else {
            for (int i = 0; i < kHalf; ++i) {
                codes[i] = static_cast<uint8_t>(((numbers[i] + 8) & 15) | ((numbers[i + kHalf] + 8) & 15) << 4);
            }
        }
    }
}

INLINE CodePart load_codes(const uint8_t* bytes) {
    CodePart codes;
    std::memcpy(&codes, bytes, sizeof codes);
    return codes;
}

// kPart numbers from codes.
INLINE void store_codes(float* y, CodePart codes, float scale) {
    const FloatPart numbers = __builtin_convertvector((IntPart)WIDEN(codes), FloatPart) * scale;
    std::memcpy(y, &numbers, sizeof numbers);
}

// Ask for the lines that are kLinesAhead of those from ``begin`` to ``end``.
INLINE void prefetch_heads(const void* begin, const void* end) {
    const char* line = static_cast<const char*>(begin);
    for (; line < end; line += 64) prefetch(line + kLinesAhead * 64);
}

// Heads become floats; of codes, still mixed.
template <int kBits>
TARGET void unpack_heads(const uint8_t* heads, int64_t count, int64_t width, float* y) {
    const int64_t bytes = packed_bytes(width, kBits), code_bytes = width * kBits / 8;
    prefetch_heads(heads, heads + count * bytes);
    if constexpr (kBits == 16) return unpack_halves(heads, count * width, y);
    for (int64_t head = 0; head < count; ++head, heads += bytes) {
        for (int64_t block = 0; block < width / kBlock; ++block, y += kBlock) {
            uint16_t stored;
            std::memcpy(&stored, heads + code_bytes + block * 2, sizeof stored);
            const float scale = from_bfloat16(stored);
            const uint8_t* codes = heads + block * kBlock * kBits / 8;
            if constexpr (kBits == 8) {
                UNROLL for (int i = 0; i < kBlock; i += kPart) {
                    store_codes(y + i, load_codes(codes + i), scale);
                }
            } else {
                UNROLL for (int i = 0; i < kHalf; i += kPart) {
                    const CodePart packed = load_codes(codes + i);
                    store_codes(y + i, (packed & 15) - 8, scale);
                    store_codes(y + i + kHalf, (packed >> 4 & 15) - 8, scale);
                }
            }
        }
    }
}

// The heads of a row's keys or values, from a position on. ``floats`` has those of begin to end, each of ``width`` numbers,
// a multiple of 16; memory: for kAtATime of them.
struct FloatHeads {
    const float* heads;
    int64_t width;
    bool prefetches;

    static constexpr int64_t kAtATime = kKeysAtATime;
    TARGET const float* floats(int64_t begin, int64_t end, float*) const {
        if (prefetches) prefetch_heads(heads + begin * width, heads + end * width);
        return heads + begin * width;
    }
};

// Heads of any width. Zeros behind them change no sum.
struct OddHeads {
    const float* heads;
    int64_t own_width, width;

    static constexpr int64_t kAtATime = kKeysAtATime;
    TARGET const float* floats(int64_t begin, int64_t end, float* memory) const {
        prefetch_heads(heads + begin * own_width, heads + end * own_width);
        for (int64_t head = begin; head < end; ++head) {
            float* values = memory + (head - begin) * width;
            std::memcpy(values, heads + head * own_width, static_cast<size_t>(own_width) * sizeof(float));
            std::fill(values + own_width, values + width, 0.0f);
        }
        return memory;
    }
};

template <int kBits>
struct PackedHeads {
    const uint8_t* heads;
    int64_t width;

    static constexpr int64_t kAtATime = kKeysAtATime;
    TARGET const float* floats(int64_t begin, int64_t end, float* memory) const {
        unpack_heads<kBits>(heads + begin * packed_bytes(width, kBits), end - begin, width, memory);
        return memory;
    }
};
