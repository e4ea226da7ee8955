// Attention of up to 32 queries at a time, one in each lane of one or two vectors. Keys and values are read once for all
// of them. Each query's numbers are computed in the same order as alone, so they are the same bits.

// Memory of 32 queries, whose heads have ``width`` numbers at most: unpacked heads, what becomes the answers, the queries,
// and weights of ``keys`` keys.
inline int64_t lanes_memory(int64_t keys, int64_t width) {
    return kMostQueries * (keys + 2 * width) + kKeysAtATime * width;
}

// The sum of 16 parts, in the order of ``sums_of``.
INLINE Float sum_of_parts(const Float (&x)[kLanes]) {
    Float quarters[4];
    UNROLL for (int i = 0; i < 4; ++i) quarters[i] = (x[i] + x[i + 8]) + (x[i + 4] + x[i + 12]);
    return (quarters[0] + quarters[2]) + (quarters[1] + quarters[3]);
}

// scores [kKeys, 16 kGroups] = keys [kKeys, width] times each query. queries: [width, 16 kGroups].
template <int kKeys, int kGroups>
INLINE void score_lanes(const float* queries, const float* keys, int64_t width, float* scores) {
    Float quarters[kKeys][kGroups][4];
    UNROLL for (int i = 0; i < 4; ++i) {
        UNROLL for (int half = 0; half < 2; ++half) {
            Float parts[kKeys][kGroups][2] = {};  // Of numbers i + 4 half and i + 4 half + 8 of each 16.
            for (int64_t number = i + 4 * half; number < width; number += kLanes) {
                UNROLL for (int part = 0; part < 2; ++part) {
                    const int64_t index = number + 8 * part;
                    Float q[kGroups];
                    UNROLL for (int g = 0; g < kGroups; ++g) load(q[g], queries + (index * kGroups + g) * kLanes);
                    UNROLL for (int n = 0; n < kKeys; ++n) {
                        const Float key = spread(keys[n * width + index]);
                        UNROLL for (int g = 0; g < kGroups; ++g) {
                            parts[n][g][part] = multiply_add(q[g], key, parts[n][g][part]);
                        }
                    }
                }
            }
            UNROLL for (int n = 0; n < kKeys; ++n) UNROLL for (int g = 0; g < kGroups; ++g) {
                const Float sum = parts[n][g][0] + parts[n][g][1];
                quarters[n][g][i] = half ? quarters[n][g][i] + sum : sum;
            }
        }
    }
    UNROLL for (int n = 0; n < kKeys; ++n) UNROLL for (int g = 0; g < kGroups; ++g) {
        const Float(&of)[4] = quarters[n][g];
        store(scores + (n * kGroups + g) * kLanes, (of[0] + of[2]) + (of[1] + of[3]));
    }
}

// Where the queries lie, number by number.
INLINE float* lanes_of(float* memory, int64_t widest) { return memory + (kKeysAtATime + kMostQueries) * widest; }

// by_lane: [width, 16 or 32]. Lanes without a query do the work of the last one.
TARGET void lay_out_lanes(const Query* queries, int count, int64_t width, float* by_lane) {
    const int lanes = count > kLanes ? kMostQueries : kLanes;
    for (int lane = 0; lane < lanes; ++lane) {
        const float* q = queries[std::min(lane, count - 1)].q;
        for (int64_t i = 0; i < width; ++i) by_lane[i * lanes + lane] = q[i];
    }
}

struct LanesSoftmax {
    Float highest, sum;
};

// Scores of up to 16 queries, one in each lane, become weights. apart: those of a key and of the next one.
// seen: how many keys each query sees, ``fewest`` or more.
TARGET LanesSoftmax weigh_lanes(float* weights, int64_t apart, const Int& seen, int64_t fewest, int64_t most) {
    const Float nothing = spread(-INFINITY);
    Float highest = nothing;
    for (int64_t key = 0; key < most; ++key) {
        Float score;
        load(score, weights + key * apart);
        if (key >= fewest) {
            score = select(seen > static_cast<int32_t>(key), score, nothing);
            store(weights + key * apart, score);
        }
        highest = select(score > highest, score, highest);
    }
    Float sums[kLanes] = {};
    for (int64_t key = 0; key < most; ++key) {
        Float weight;
        load(weight, weights + key * apart);
        weight = exponential(weight - highest);
        if (key >= fewest) weight = select(seen > static_cast<int32_t>(key), weight, Float{});
        store(weights + key * apart, weight);
        sums[key % kLanes] += weight;
    }
    return {highest, sum_of_parts(sums)};
}

// As ``answer``. Queries: up to 16 kGroups. widest: of keys and values.
template <int kGroups, class Keys, class Values>
TARGET void answer_lanes(Query* queries, int count, Keys keys, Values values, int64_t widest, float* memory, float* y) {
    const int64_t fewest = queries[0].keys, most = queries[count - 1].keys, width = keys.width;
    constexpr int kAll = kGroups * kLanes;
    float *unpacked = memory, *by_lane = lanes_of(memory, widest), *weights = by_lane + kAll * widest;
    int32_t numbers[kAll];  // Of keys of each lane.
    for (int lane = 0; lane < kAll; ++lane) {
        numbers[lane] = static_cast<int32_t>(queries[std::min(lane, count - 1)].keys);
    }
    int64_t key = 0;
    const int64_t step = std::min(Keys::kAtATime, most);
    for (int64_t begin = 0; begin < most; begin += step) {
        const int64_t end = std::min(begin + step, most);
        const float* floats = keys.floats(begin, end, unpacked);
        for (; key + 4 <= end; key += 4, floats += 4 * width) {
            score_lanes<4, kGroups>(by_lane, floats, width, weights + key * kAll);
        }
        for (; key < end; ++key, floats += width) {
            score_lanes<1, kGroups>(by_lane, floats, width, weights + key * kAll);
        }
    }
    if (queries[0].softcap != 0.0f) cap_scores(weights, most * kAll, queries[0].softcap);
    for (int first = 0; first < count; first += kLanes) {
        Int seen;
        load(seen, numbers + first);
        const LanesSoftmax found = weigh_lanes(weights + first, kAll, seen, fewest, most);
        for (int n = first; n < std::min(count, first + kLanes); ++n) {
            queries[n].softmax = {found.highest[n - first], found.sum[n - first]};
        }
    }
    const int64_t value_width = values.width;
    std::fill(y, y + count * value_width, 0.0f);
    for (int64_t begin = 0; begin < most; begin += kKeysAtATime) {
        const int64_t end = std::min(begin + kKeysAtATime, most);
        const float* floats = values.floats(begin, end, unpacked);
        mix_all<kAll>(queries, count, y, weights, 1, floats, value_width, begin, end);
    }
}
