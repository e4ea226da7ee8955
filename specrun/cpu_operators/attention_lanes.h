// Attention of up to 16 queries at a time, one in each lane of a vector. Keys and values are read once for all of them.
// Each query's numbers are computed in the same order as alone, so they are the same bits.

// Memory of 16 queries, whose heads have ``width`` numbers at most: unpacked heads, what becomes the answers, the queries, and weights of
// ``keys`` keys.
inline int64_t lanes_memory(int64_t keys, int64_t width) {
    return kLanes * (keys + 2 * width) + kKeysAtATime * width;
}

// The sum of 16 parts, in the order of ``sums_of``.
INLINE Float sum_of_parts(const Float (&x)[kLanes]) {
    Float quarters[4];
    UNROLL for (int i = 0; i < 4; ++i) quarters[i] = (x[i] + x[i + 8]) + (x[i + 4] + x[i + 12]);
    return (quarters[0] + quarters[2]) + (quarters[1] + quarters[3]);
}

// scores [kKeys, 16] = keys [kKeys, width] times each query. queries: [width, 16].
template <int kKeys>
INLINE void score_lanes(const float* queries, const float* keys, int64_t width, float* scores) {
    Float quarters[kKeys][4];
    UNROLL for (int i = 0; i < 4; ++i) {
        Float parts[kKeys][4] = {};  // Of numbers i, i + 4, i + 8 and i + 12 of each 16.
        for (int64_t number = i; number < width; number += kLanes) {
            UNROLL for (int part = 0; part < 4; ++part) {
                const int64_t index = number + 4 * part;
                Float q;
                load(q, queries + index * kLanes);
                UNROLL for (int n = 0; n < kKeys; ++n) {
                    parts[n][part] = multiply_add(q, keys[n * width + index], parts[n][part]);
                }
            }
        }
        UNROLL for (int n = 0; n < kKeys; ++n) {
            quarters[n][i] = (parts[n][0] + parts[n][2]) + (parts[n][1] + parts[n][3]);
        }
    }
    UNROLL for (int n = 0; n < kKeys; ++n) {
        store(scores + n * kLanes, (quarters[n][0] + quarters[n][2]) + (quarters[n][1] + quarters[n][3]));
    }
}

// Where the queries lie, number by number.
INLINE float* lanes_of(float* memory, int64_t widest) { return memory + (kKeysAtATime + kLanes) * widest; }

// by_lane: [width, 16]. Lanes without a query do the work of the last one.
TARGET void lay_out_lanes(const Query* queries, int count, int64_t width, float* by_lane) {
    for (int lane = 0; lane < kLanes; ++lane) {
        const float* q = queries[std::min(lane, count - 1)].q;
        for (int64_t i = 0; i < width; ++i) by_lane[i * kLanes + lane] = q[i];
    }
}

// As ``answer``. Queries: 1 to 16. widest: of keys and values.
template <class Keys, class Values>
TARGET void answer_lanes(Query* queries, int count, Keys keys, Values values, int64_t widest, float* memory, float* y) {
    const int64_t fewest = queries[0].keys, most = queries[count - 1].keys, width = keys.width;
    float *unpacked = memory, *by_lane = lanes_of(memory, widest), *weights = by_lane + kLanes * widest;
    int32_t numbers[kLanes];  // Of keys of each lane.
    for (int lane = 0; lane < kLanes; ++lane) {
        numbers[lane] = static_cast<int32_t>(queries[std::min(lane, count - 1)].keys);
    }
    Int seen;
    load(seen, numbers);
    const Float nothing = spread(-INFINITY);
    Float highest = nothing;
    int64_t key = 0;
    const int64_t step = std::min(Keys::kAtATime, most);
    for (int64_t begin = 0; begin < most; begin += step) {
        const int64_t end = std::min(begin + step, most);
        const float* floats = keys.floats(begin, end, unpacked);
        for (; key + 4 <= end; key += 4, floats += 4 * width) {
            score_lanes<4>(by_lane, floats, width, weights + key * kLanes);
        }
        for (; key < end; ++key, floats += width) score_lanes<1>(by_lane, floats, width, weights + key * kLanes);
    }
    if (queries[0].softcap != 0.0f) cap_scores(weights, most * kLanes, queries[0].softcap);
    for (key = 0; key < most; ++key) {
        Float score;
        load(score, weights + key * kLanes);
        if (key >= fewest) {
            score = select(seen > static_cast<int32_t>(key), score, nothing);
            store(weights + key * kLanes, score);
        }
        highest = select(score > highest, score, highest);
    }
    Float sums[kLanes] = {};
    for (key = 0; key < most; ++key) {
        Float weight;
        load(weight, weights + key * kLanes);
        weight = exponential(weight - highest);
        if (key >= fewest) weight = select(seen > static_cast<int32_t>(key), weight, Float{});
        store(weights + key * kLanes, weight);
        sums[key % kLanes] += weight;
    }
    const Float sum = sum_of_parts(sums);
    for (int n = 0; n < count; ++n) queries[n].softmax = {highest[n], sum[n]};
    const int64_t value_width = values.width;
    std::fill(y, y + count * value_width, 0.0f);
    for (int64_t begin = 0; begin < most; begin += kKeysAtATime) {
        const int64_t end = std::min(begin + kKeysAtATime, most);
        const float* floats = values.floats(begin, end, unpacked);
        int n = 0;
        for (; n + 2 <= count; n += 2) {
            mix_two<kLanes>(queries + n, y + n * value_width, weights + n, 1, floats, value_width, begin, end);
        }
        if (n < count) mix<1, kLanes>(y + n * value_width, weights + n, 0, floats, value_width, begin, end);
    }
}
