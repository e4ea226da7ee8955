// Attention in vectors: cached_attention.cpp has it compiled for each processor.
//
// A query's numbers are computed in an order of their own, which no other query, row, cache length or thread changes.
// So a token gets the same bits in every pass.

typedef float Eight __attribute__((vector_size(32)));
typedef float Four __attribute__((vector_size(16)));

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t Places __attribute__((vector_size(16)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Places){__VA_ARGS__})
#endif

// The sums of four vectors.
INLINE Four sums_of(const Float (&vectors)[4]) {
    Four folded[4];
    UNROLL for (int i = 0; i < 4; ++i) {
        Eight halves[2];
        std::memcpy(halves, &vectors[i], sizeof halves);
        const Eight half = halves[0] + halves[1];
        Four quarters[2];
        std::memcpy(quarters, &half, sizeof quarters);
        folded[i] = quarters[0] + quarters[1];
    }
    const Four ab = SHUFFLE(folded[0], folded[1], 0, 4, 1, 5) + SHUFFLE(folded[0], folded[1], 2, 6, 3, 7);
    const Four cd = SHUFFLE(folded[2], folded[3], 0, 4, 1, 5) + SHUFFLE(folded[2], folded[3], 2, 6, 3, 7);
    return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
}

// The head ``x`` with its first numbers rotated, times ``factor``.
INLINE void rotate(const CachedAttention& all, const float* x, int64_t row, int64_t token, float factor, float* y) {
    const int64_t half = all.rotated / 2, step = all.interleaved ? 2 : 1, apart = all.interleaved ? 1 : half;
    // Padding may stand behind the last position.
    const int64_t angles = half * (all.angles ? std::min(all.first[row] + token, all.angles - 1)
                                              : (all.angles_by_row ? row * all.tokens : 0) + token);
    for (int64_t i = 0; i < half; ++i) {
        const float cos = all.cos[angles + i], sin = all.sin[angles + i];
        const float a = x[i * step], b = x[i * step + apart];
        y[i * step] = (a * cos - b * sin) * factor;
        y[i * step + apart] = (b * cos + a * sin) * factor;
    }
    for (int64_t i = all.rotated; i < all.width; ++i) y[i] = x[i] * factor;
}

// Write a token's keys and values into the cache.
TARGET void write_token(void* item, size_t number) {
    const CachedAttention& all = *static_cast<const CachedAttention*>(item);
    const int64_t token = static_cast<int64_t>(number), row = token / all.tokens;
    const int64_t position = all.first[row] + token % all.tokens;
    for (int64_t head = 0; head < all.kv_heads; ++head) {
        const int64_t from = (token * all.kv_heads + head) * all.width;
        const int64_t to = ((row * all.kv_heads + head) * all.positions + position) * all.width;
        rotate(all, all.k + from, row, token % all.tokens, 1.0f, all.keys + to);
        std::memcpy(all.values + to, all.v + from, static_cast<size_t>(all.width) * sizeof(float));
    }
}

// A query, and the keys that it sees: ``keys`` of them from the position ``first`` on.
struct Query {
    const float* q;
    int64_t first, keys;
    float* weights;  // [keys, and up to 15 more]
    float* y;
};

#include "attention_lanes.h"

constexpr int64_t kNumbersAhead = kLinesAhead * kLanes;  // A line has as many numbers as a vector.

// weights = q times each key. Queries: of increasing numbers of keys.
template <int kQueries>
INLINE void score(const Query* queries, const float* keys, int64_t width) {
    const int64_t last = queries[kQueries - 1].keys - 1;
    for (int64_t key = 0; key <= last; key += 4) {
        const float* places[4];
        UNROLL for (int i = 0; i < 4; ++i) places[i] = keys + std::min(key + i, last) * width;
        Float sums[kQueries][4] = {};
        for (int64_t lane = 0; lane < width; lane += kLanes) {
            Float part[4];
            UNROLL for (int i = 0; i < 4; ++i) {
                __builtin_prefetch(places[i] + lane + kNumbersAhead, 0, kSecondCache);
                load(part[i], places[i] + lane);
            }
            UNROLL for (int n = 0; n < kQueries; ++n) {
                Float q;
                load(q, queries[n].q + lane);
                UNROLL for (int i = 0; i < 4; ++i) sums[n][i] += q * part[i];
            }
        }
        UNROLL for (int n = 0; n < kQueries; ++n) {
            const Four four = sums_of(sums[n]);
            std::memcpy(queries[n].weights + key, &four, sizeof four);
        }
    }
}

// Scores become weights. Returns what they are to be divided by.
TARGET float weigh(const Query& query) {
    const int64_t end = (query.keys + kLanes - 1) / kLanes * kLanes;
    float* weights = query.weights;
    std::fill(weights + query.keys, weights + end, -INFINITY);
    Float highest, sum = {};
    load(highest, weights);
    for (int64_t key = kLanes; key < end; key += kLanes) {
        Float score;
        load(score, weights + key);
        highest = select(score > highest, score, highest);
    }
    float most = highest[0];
    for (int lane = 1; lane < kLanes; ++lane) most = std::max(most, highest[lane]);
    for (int64_t key = 0; key < end; key += kLanes) {
        Float score;
        load(score, weights + key);
        score = exponential(score - most);
        store(weights + key, score);
        if (key + kLanes > query.keys) {
            std::fill(weights + query.keys, weights + end, 0.0f);
            load(score, weights + key);
        }
        sum += score;
    }
    const Float all[4] = {sum, sum, sum, sum};
    return sums_of(all)[0];
}

// y += the values of keys ``begin`` to ``end``, times their weights.
template <int kQueries, int kVectors>
INLINE void add_values(Float (&y)[kQueries][kVectors], const Query* queries, const float* values, int64_t width,
                       int64_t begin, int64_t end) {
    for (int64_t key = begin; key < end; ++key) {
        UNROLL for (int v = 0; v < kVectors; ++v) {
            Float value;
            const float* place = values + key * width + v * kLanes;
            __builtin_prefetch(place + kNumbersAhead, 0, kSecondCache);
            load(value, place);
            UNROLL for (int n = 0; n < kQueries; ++n) y[n][v] += value * queries[n].weights[key];
        }
    }
}

// Numbers of the output from ``lane`` on, of all queries.
template <int kQueries, int kVectors>
INLINE void mix(const Query* queries, const float* divisors, const float* values, int64_t width, int64_t lane) {
    Float y[kQueries][kVectors] = {};
    add_values<kQueries, kVectors>(y, queries, values + lane, width, 0, queries[0].keys);
    UNROLL for (int n = 0; n < kQueries; ++n) {
        Float one[1][kVectors];
        std::memcpy(one, y[n], sizeof one);
        add_values<1, kVectors>(one, queries + n, values + lane, width, queries[0].keys, queries[n].keys);
        UNROLL for (int v = 0; v < kVectors; ++v) {
            const Float divided = one[0][v] / divisors[n];
            store(queries[n].y + lane + v * kLanes, divided);
        }
    }
}

// Queries: whose keys begin at the same position.
template <int kQueries>
TARGET void answer(const Query* queries, const float* keys, const float* values, int64_t width) {
    keys += queries[0].first * width;
    values += queries[0].first * width;
    score<kQueries>(queries, keys, width);
    float divisors[kQueries];
    for (int n = 0; n < kQueries; ++n) divisors[n] = weigh(queries[n]);
    int64_t lane = 0;
    for (; lane + 4 * kLanes <= width; lane += 4 * kLanes) mix<kQueries, 4>(queries, divisors, values, width, lane);
    for (; lane < width; lane += kLanes) mix<kQueries, 1>(queries, divisors, values, width, lane);
}

// With fewer queries, lanes without one cost more than it saves to read keys once. (Measured with AVX-512 and AVX2, on
// one processor.)
constexpr int kManyQueries = kPart == kLanes ? 6 : 14;

// Queries of any number up to 16, whose keys begin at the same position; of increasing numbers of keys.
TARGET void answer_all(const Query* queries, int count, const float* keys, const float* values, int64_t width,
                       float* memory) {
    if (count >= kManyQueries) {
        answer_lanes(queries, count, keys, values, width, memory);
        return;
    }
    int n = 0;
    for (; n + 2 <= count; n += 2) answer<2>(queries + n, keys, values, width);
    if (n < count) answer<1>(queries + n, keys, values, width);
}

// The queries of up to kTokensOfPart tokens of a row that read the same keys.
TARGET void attend_part(void* item, size_t number) {
    const CachedAttention& all = *static_cast<const CachedAttention*>(item);
    const int64_t parts = (all.tokens + kTokensOfPart - 1) / kTokensOfPart;
    const int64_t part = static_cast<int64_t>(number) % parts, head = static_cast<int64_t>(number) / parts;
    const int64_t row = head / all.kv_heads, kv_head = head % all.kv_heads;
    const int64_t first = part * kTokensOfPart, end = std::min(first + kTokensOfPart, all.tokens);
    const float* keys = all.keys + head * all.positions * all.width;
    const float* values = all.values + head * all.positions * all.width;
    const int64_t most = (all.first[row] + end + kLanes - 1) / kLanes * kLanes;
    thread_local std::vector<float> memory;
    memory.resize(static_cast<size_t>(kLanes * all.width + lanes_memory(most, all.width)));
    float* of_queries = memory.data() + kLanes * all.width;
    Query queries[kLanes];
    int count = 0;
    for (int64_t token = first; token < end; ++token) {
        const int64_t begin = (row * all.tokens + token) * all.q_heads * all.width;
        if (std::isnan(all.q[begin])) {  // An unused token: see matmul.cpp.
            if (kv_head == 0) all.y[begin] = NAN;
            continue;
        }
        const int64_t seen = all.first[row] + token + 1;
        const int64_t from = all.window ? std::max(seen - all.window, int64_t{0}) : 0;
        if (count && queries[0].first != from) {
            answer_all(queries, count, keys, values, all.width, of_queries);
            count = 0;
        }
        for (int64_t q_head = kv_head * all.group(); q_head < (kv_head + 1) * all.group(); ++q_head) {
            const int64_t place = begin + q_head * all.width;
            float* own = memory.data() + count * all.width;
            rotate(all, all.q + place, row, token, all.scale, own);
            queries[count] = {own, from, seen - from, of_queries + count * most, all.y + place};
            if (++count < kLanes) continue;
            answer_all(queries, count, keys, values, all.width, of_queries);
            count = 0;
        }
    }
    if (count) answer_all(queries, count, keys, values, all.width, of_queries);
}
