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

#include "packed_heads.h"

// Write a token's keys and values into the cache.
TARGET void write_token(void* item, size_t number) {
    const CachedAttention& all = *static_cast<const CachedAttention*>(item);
    const int64_t token = static_cast<int64_t>(number), row = token / all.tokens;
    const int64_t position = all.first[row] + token % all.tokens;
    float memory[kMostWidth];
    for (int64_t head = 0; head < all.kv_heads; ++head) {
        const int64_t number = token * all.kv_heads + head;
        const int64_t to = (row * all.kv_heads + head) * all.positions + position;
        const float *k = all.k + number * all.width, *v = all.v + number * all.value_width;
        uint8_t *key = all.keys + to * all.key_bytes(), *value = all.values + to * all.value_bytes();
        const size_t bytes = static_cast<size_t>(all.value_width) * sizeof(float);
        if (all.is_packed()) {
            rotate(all, k, row, token % all.tokens, 1.0f, memory);
            all.is_coded() ? pack_head<8>(memory, all.width, key) : pack_head<16>(memory, all.width, key);
            std::memcpy(memory, v, bytes);
            all.value_bits == 16  ? pack_head<16>(memory, all.width, value)
            : all.value_bits == 8 ? pack_head<8>(memory, all.width, value)
                                  : pack_head<4>(memory, all.width, value);
        } else {
            rotate(all, k, row, token % all.tokens, 1.0f, reinterpret_cast<float*>(key));
            std::memcpy(value, v, bytes);
        }
    }
}

// The highest of a query's scores, and the sum of e to the power of what each is below it.
struct Softmax {
    float highest, sum;
};

constexpr int kMostQueries = 2 * kLanes;  // At a time: two vectors of them read a key once.

// A query, and keys that it sees: ``keys`` of them from the position ``first`` on.
struct Query {
    const float* q;
    int64_t first, keys;
    float* weights;  // [keys, and up to 15 more]
    float softcap;   // 0: none.
    Softmax softmax;
    float* y;        // Of the splits so far: weights times values, not divided by their sum.
    float* answers;  // Where the answer of each split of the keys goes; null: to ``y``, one after the other.
};

// y [kQueries, width] += values times weights, of keys ``begin`` to ``end``; ``values`` are those of ``begin`` on.
// weights: of query n and a key, n * apart + key * kStep.
template <int kQueries, int kVectors, int kStep>
INLINE void mix_vectors(float* y, const float* weights, int64_t apart, const float* values, int64_t width,
                        int64_t begin, int64_t end) {
    Float sums[kQueries][kVectors];
    UNROLL for (int n = 0; n < kQueries; ++n) {
        UNROLL for (int v = 0; v < kVectors; ++v) load(sums[n][v], y + n * width + v * kLanes);
    }
    for (int64_t key = begin; key < end; ++key, values += width) {
        UNROLL for (int v = 0; v < kVectors; ++v) {
            Float value;
            load(value, values + v * kLanes);
            if (kQueries > 1) KEEP(value);  // Or each query would read it from memory.
            UNROLL for (int n = 0; n < kQueries; ++n) {
                sums[n][v] = multiply_add(value, weights[n * apart + key * kStep], sums[n][v]);
            }
        }
    }
    UNROLL for (int n = 0; n < kQueries; ++n) {
        UNROLL for (int v = 0; v < kVectors; ++v) store(y + n * width + v * kLanes, sums[n][v]);
    }
}

// The same for all numbers of a head.
template <int kQueries, int kStep>
INLINE void mix(float* y, const float* weights, int64_t apart, const float* values, int64_t width, int64_t begin,
                int64_t end) {
    int64_t lane = 0;
    for (; lane + 4 * kLanes <= width; lane += 4 * kLanes) {
        mix_vectors<kQueries, 4, kStep>(y + lane, weights, apart, values + lane, width, begin, end);
    }
    for (; lane < width; lane += kLanes) {
        mix_vectors<kQueries, 1, kStep>(y + lane, weights, apart, values + lane, width, begin, end);
    }
}

// Of two queries, the second of which may see keys that the first one does not; ``values`` are those of ``begin`` on.
template <int kStep>
INLINE void mix_two(const Query* queries, float* y, const float* weights, int64_t apart, const float* values,
                    int64_t width, int64_t begin, int64_t end) {
    const int64_t common = std::min(end, queries[0].keys), last = std::min(end, queries[1].keys);
    if (common > begin) mix<2, kStep>(y, weights, apart, values, width, begin, common);
    const int64_t rest = std::max(begin, common);
    if (last > rest) mix<1, kStep>(y + width, weights + apart, 0, values + (rest - begin) * width, width, rest, last);
}

// Of ``count`` queries; weights: of query n and a key, n * apart + key * kStep. Where registers suffice, four at a time.
template <int kStep>
INLINE void mix_all(const Query* queries, int count, float* y, const float* weights, int64_t apart, const float* values,
                    int64_t width, int64_t begin, int64_t end) {
    int n = 0;
    for (; kPart == kLanes && n + 4 <= count; n += 4) {
        const int64_t common = std::min(end, queries[n].keys), rest = std::max(begin, common);
        if (common > begin) mix<4, kStep>(y + n * width, weights + n * apart, apart, values, width, begin, common);
        const float* others = values + (rest - begin) * width;
        for (int two = n; two < n + 4 && rest < end; two += 2) {
            mix_two<kStep>(queries + two, y + two * width, weights + two * apart, apart, others, width, rest, end);
        }
    }
    for (; n + 2 <= count; n += 2) {
        mix_two<kStep>(queries + n, y + n * width, weights + n * apart, apart, values, width, begin, end);
    }
    if (n < count) mix<1, kStep>(y + n * width, weights + n * apart, 0, values, width, begin, end);
}

// Scores [count, a multiple of 16] become softcap * tanh(score / softcap).
TARGET inline void cap_scores(float* scores, int64_t count, float softcap) {
    const Float limit = spread(softcap);
    for (int64_t i = 0; i < count; i += kLanes) {
        Float score;
        load(score, scores + i);
        store(scores + i, hyperbolic_tangent(score / limit) * limit);
    }
}

#include "attention_lanes.h"

// weights = q times each key of ``begin`` to ``end``; ``keys`` are those of ``begin`` on.
template <int kQueries>
INLINE void score(const Query* queries, const float* keys, int64_t width, int64_t begin, int64_t end) {
    for (int64_t key = begin; key < end; key += 4) {
        const float* places[4];
        UNROLL for (int i = 0; i < 4; ++i) places[i] = keys + (std::min(key + i, end - 1) - begin) * width;
        Float sums[kQueries][4] = {};
        for (int64_t lane = 0; lane < width; lane += kLanes) {
            Float part[4];
            UNROLL for (int i = 0; i < 4; ++i) load(part[i], places[i] + lane);
            UNROLL for (int n = 0; n < kQueries; ++n) {
                Float q;
                load(q, queries[n].q + lane);
                UNROLL for (int i = 0; i < 4; ++i) sums[n][i] = multiply_add(q, part[i], sums[n][i]);
            }
        }
        UNROLL for (int n = 0; n < kQueries; ++n) {
            const Four four = sums_of(sums[n]);
            std::memcpy(queries[n].weights + key, &four, sizeof four);
        }
    }
}

// Scores become weights.
TARGET Softmax weigh(const Query& query) {
    const int64_t end = (query.keys + kLanes - 1) / kLanes * kLanes;
    float* weights = query.weights;
    if (query.softcap != 0.0f) cap_scores(weights, end, query.softcap);
    std::fill(weights + query.keys, weights + end, -INFINITY);
    Float highest, sum = {};
    load(highest, weights);
    for (int64_t key = kLanes; key < end; key += kLanes) {
        Float score;
        load(score, weights + key);
        highest = select(score > highest, score, highest);
    }
    float most = -INFINITY;
    for (int lane = 0; lane < kLanes; ++lane) most = std::max(most, highest[lane]);
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
    return {most, sums_of(all)[0]};
}

// Join the queries' answers so far and those of further keys, ``parts``. answers: [count, stride], of the parts.
TARGET void join(Query* queries, const Query* parts, int count, const float* answers, int64_t width, int64_t stride) {
    float before[kLanes] = {}, now[kLanes] = {};
    for (int n = 0; n < count; ++n) before[n] = queries[n].softmax.highest, now[n] = parts[n].softmax.highest;
    Float highest, further;
    load(highest, before), load(further, now);
    const Float most = select(further > highest, further, highest);
    store(before, exponential(highest - most)), store(now, exponential(further - most));
    for (int n = 0; n < count; ++n, answers += stride) {
        if (parts[n].keys <= 0) continue;
        Query& query = queries[n];
        query.softmax = {most[n], query.softmax.sum * before[n] + parts[n].softmax.sum * now[n]};
        for (int64_t i = 0; i < width; ++i) query.y[i] = query.y[i] * before[n] + answers[i] * now[n];
    }
}

// Write each query's softmax, and its answer to y [count, width of a value].
// Queries: whose keys begin at the same position; of increasing numbers of keys, of which those of the last are some.
// memory: for kKeysAtATime heads.
template <class Keys, class Values>
TARGET void answer(Query* queries, int count, Keys keys, Values values, float* memory, float* y) {
    const int64_t most = queries[count - 1].keys, step = std::min(Keys::kAtATime, most);
    const int64_t width = keys.width, value_width = values.width;
    for (int64_t begin = 0; begin < most; begin += step) {
        const int64_t end = std::min(begin + step, most);
        const float* floats = keys.floats(begin, end, memory);
        int n = 0;
        for (; n + 2 <= count; n += 2) score<2>(queries + n, floats, width, begin, std::min(end, queries[n + 1].keys));
        if (n < count) score<1>(queries + n, floats, width, begin, std::min(end, queries[n].keys));
    }
    for (int n = 0; n < count; ++n) {
        if (queries[n].keys) queries[n].softmax = weigh(queries[n]);
    }
    std::fill(y, y + count * value_width, 0.0f);
    const int64_t apart = count > 1 ? queries[1].weights - queries[0].weights : 0;
    for (int64_t begin = 0; begin < most; begin += step) {
        const int64_t end = std::min(begin + step, most);
        const float* floats = values.floats(begin, end, memory);
        mix_all<1>(queries, count, y, queries[0].weights, apart, floats, value_width, begin, end);
    }
}

// With fewer queries, lanes without one cost more than it saves to read keys once. (Measured with AVX-512 and AVX2, on
// one processor.)
constexpr int kManyQueries = kPart == kLanes ? 6 : 14;

// Queries of any number up to 32, whose keys begin at the same position; of increasing numbers of keys.
template <class Keys, class Values>
TARGET void answer_all(Query* queries, int count, Keys keys, Values values, int64_t widest, float* memory) {
    float* y = memory + kKeysAtATime * widest;
    if (count > kLanes) {
        answer_lanes<2>(queries, count, keys, values, widest, memory, y);
    } else if (count >= kManyQueries) {
        answer_lanes<1>(queries, count, keys, values, widest, memory, y);
    } else {
        answer(queries, count, keys, values, memory, y);
    }
}

INLINE int64_t whole_lanes(int64_t width) { return (width + kLanes - 1) / kLanes * kLanes; }

// The same. keys, values: the row's from its first position on.
TARGET void answer_heads(const CachedAttention& all, Query* queries, int count, const uint8_t* keys,
                         const uint8_t* values, int64_t widest, float* memory) {
    keys += queries[0].first * all.key_bytes(), values += queries[0].first * all.value_bytes();
    if (!all.is_packed()) {
        const auto *k = reinterpret_cast<const float*>(keys), *v = reinterpret_cast<const float*>(values);
        const int64_t width = all.width, value_width = all.value_width;
        if (width % kLanes == 0 && value_width % kLanes == 0) {
            const bool prefetches = all.tokens <= kTokensOfPart;  // Else most are in a cache, from another part.
            const FloatHeads of_keys{k, width, prefetches}, of_values{v, value_width, prefetches};
            answer_all(queries, count, of_keys, of_values, widest, memory);
        } else {
            const OddHeads odd_keys{k, width, whole_lanes(width)}, odd_values{v, value_width, whole_lanes(value_width)};
            answer_all(queries, count, odd_keys, odd_values, widest, memory);
        }
        return;
    }
    const int64_t width = all.width;
    const PackedHeads<8> of_keys{keys, width};
    if (all.value_bits == 16) {
        answer_all(queries, count, PackedHeads<16>{keys, width}, PackedHeads<16>{values, width}, widest, memory);
    } else if (all.value_bits == 8) {
        answer_all(queries, count, of_keys, PackedHeads<8>{values, width}, widest, memory);
    } else {
        answer_all(queries, count, of_keys, PackedHeads<4>{values, width}, widest, memory);
    }
}

// The answers of a split of the queries' keys.
TARGET void answer_split(const CachedAttention& all, Query* queries, int count, int64_t split, const uint8_t* keys,
                         const uint8_t* values, int64_t widest, float* memory) {
    const int64_t skipped = split * kKeysOfSplit;
    Query parts[kMostQueries];
    for (int n = 0; n < count; ++n) {
        parts[n] = queries[n];
        parts[n].first += skipped;
        parts[n].keys = std::clamp<int64_t>(queries[n].keys - skipped, 0, kKeysOfSplit);
    }
    answer_heads(all, parts, count, keys, values, widest, memory);
    const int64_t width = all.value_width, stride = all.is_packed() ? all.width : whole_lanes(width);
    const float* answers = memory + kKeysAtATime * widest;
    for (int n = 0; n < count && !all.answers; n += kLanes) {
        join(queries + n, parts + n, std::min(count - n, kLanes), answers + n * stride, width, stride);
    }
    if (!all.answers) return;
    for (int n = 0; n < count; ++n, answers += stride) {
        float* answer = queries[n].answers + split * (2 + width);
        std::memcpy(answer, &parts[n].softmax, sizeof parts[n].softmax);
        std::memcpy(answer + 2, answers, static_cast<size_t>(width) * sizeof(float));
    }
}

// Before any key: a sink is a score without a value.
INLINE Softmax begin_answer(const CachedAttention& all, int64_t q_head, float* y) {
    std::fill(y, y + all.value_width, 0.0f);
    return all.sinks ? Softmax{all.sinks[q_head], 1.0f} : Softmax{-INFINITY, 0.0f};
}

// y / sum, and what is mixed is mixed back.
INLINE void end_answer(const CachedAttention& all, const Softmax& softmax, float* y) {
    for (int64_t i = 0; i < all.value_width; ++i) y[i] /= softmax.sum;
    if (all.is_coded()) mix_numbers(y, all.width);
}

INLINE float* answers_of(const CachedAttention& all, int64_t query) {
    return all.answers + query * all.splits * (2 + all.value_width);
}

// The answers of all keys, or of ``own_split`` where threads divide them.
TARGET void answer_keys(const CachedAttention& all, Query* queries, int count, int64_t own_split, const uint8_t* keys,
                        const uint8_t* values, int64_t widest, float* memory) {
    if (count > kLanes && count < kLanes + kManyQueries) {
        answer_keys(all, queries, kLanes, own_split, keys, values, widest, memory);
        queries += kLanes, count -= kLanes;
    }
    const int64_t splits = splits_of(queries[count - 1].keys);
    if (count >= kManyQueries) lay_out_lanes(queries, count, whole_lanes(all.width), lanes_of(memory, widest));
    if (all.answers) {
        if (own_split < splits) answer_split(all, queries, count, own_split, keys, values, widest, memory);
        return;
    }
    for (int64_t split = 0; split < splits; ++split) {
        answer_split(all, queries, count, split, keys, values, widest, memory);
    }
    for (int n = 0; n < count; ++n) end_answer(all, queries[n].softmax, queries[n].y);
}

struct alignas(64) Line {
    float numbers[kLanes];
};

// An unused token: see matmul.cpp.
INLINE bool is_unused(const CachedAttention& all, int64_t token) {
    return std::isnan(all.q[token * all.q_heads * all.width]);
}

// The queries of up to kTokensOfPart tokens of a row that read the same keys; of all keys, or of one split of them.
TARGET void attend_part(void* item, size_t number) {
    const CachedAttention& all = *static_cast<const CachedAttention*>(item);
    const int64_t parts = (all.tokens + kTokensOfPart - 1) / kTokensOfPart;
    const int64_t splits = std::max<int64_t>(all.splits, 1), index = static_cast<int64_t>(number) / splits;
    const int64_t own_split = static_cast<int64_t>(number) % splits, part = index % parts, head = index / parts;
    const int64_t row = head / all.kv_heads, kv_head = head % all.kv_heads;
    const int64_t first = part * kTokensOfPart, end = std::min(first + kTokensOfPart, all.tokens);
    const int64_t base = head * all.positions, width = whole_lanes(all.width);
    const int64_t widest = std::max(width, whole_lanes(all.value_width));
    const uint8_t *keys = all.keys + base * all.key_bytes(), *values = all.values + base * all.value_bytes();
    const int64_t most = std::min(whole_lanes(all.first[row] + end), kKeysOfSplit);
    thread_local std::vector<Line> lines;  // Aligned: a vector that crosses lines of the cache takes twice as long.
    lines.resize(static_cast<size_t>(kMostQueries * width + lanes_memory(most, widest)) / kLanes);
    float *rotated = lines.data()->numbers, *memory = rotated + kMostQueries * width;
    float* weights = memory + (kKeysAtATime + kMostQueries) * widest;
    Query queries[kMostQueries];
    int count = 0;
    const auto answer_them = [&] {
        if (count) answer_keys(all, queries, count, own_split, keys, values, widest, memory);
        count = 0;
    };
    for (int64_t token = first; token < end; ++token) {
        const int64_t first_head = (row * all.tokens + token) * all.q_heads;
        if (is_unused(all, row * all.tokens + token)) {
            if (kv_head == 0) all.y[first_head * all.value_width] = NAN;
            continue;
        }
        const int64_t position = all.first[row] + token, from = all.first_seen(position);
        if (count && queries[0].first != from) answer_them();
        for (int64_t q_head = kv_head * all.group(); q_head < (kv_head + 1) * all.group(); ++q_head) {
            float* query = rotated + count * width;
            rotate(all, all.q + (first_head + q_head) * all.width, row, token, all.scale, query);
            std::fill(query + all.width, query + width, 0.0f);
            if (all.is_coded()) mix_numbers(query, width);
            float* y = all.y + (first_head + q_head) * all.value_width;
            float* answers = all.answers ? answers_of(all, first_head + q_head) : nullptr;
            const Softmax softmax = all.answers ? Softmax{} : begin_answer(all, q_head, y);
            queries[count] = {query,   from, position + 1 - from, weights + count * most,
                              all.softcap, softmax, y, answers};
            if (++count == kMostQueries) answer_them();
        }
    }
    answer_them();
}

// Join the answers of a query's splits.
TARGET void join_splits(void* item, size_t number) {
    const CachedAttention& all = *static_cast<const CachedAttention*>(item);
    const int64_t query = static_cast<int64_t>(number), token = query / all.q_heads;
    if (is_unused(all, token)) return;
    const int64_t position = all.first[token / all.tokens] + token % all.tokens, width = all.value_width;
    float* y = all.y + query * width;
    Query whole{}, part{};
    whole.softmax = begin_answer(all, query % all.q_heads, y), whole.y = y, part.keys = 1;
    const float* answer = answers_of(all, query);
    for (int64_t left = splits_of(position + 1 - all.first_seen(position)); left > 0; --left, answer += 2 + width) {
        part.softmax = {answer[0], answer[1]};
        join(&whole, &part, 1, answer + 2, width, 0);
    }
    end_answer(all, whole.softmax, y);
}
