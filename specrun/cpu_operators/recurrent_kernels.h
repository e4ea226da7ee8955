// Recurrent layers in vectors: recurrent.cpp has them compiled for each processor.
//
// A head reads token after token, and a column of its state is computed in an order that nothing else changes. So a
// token gets the same bits in every pass, whether it is new or read again.

// A token's numbers for one head.
struct Token {
    const float *q, *k, *v, *decay;  // q is null where no output is wanted.
    float beta;
    float* y;
};

// Columns ``first .. first + kVectors * 16`` of a state [key_width, value_width] read a token. factors: of decay.
template <int kVectors>
INLINE void read_columns(const RecurrentAttention& all, const Token& token, const float* factors, float* state,
                         int64_t first) {
    Float added[kVectors], sums[kVectors];
    UNROLL for (int n = 0; n < kVectors; ++n) load(added[n], token.v + first + n * kLanes);
    const int64_t step = all.decay_width > 1 ? 1 : 0;
    float* columns = state + first;
    if (all.beta) {
        Float seen[kVectors] = {};
        for (int64_t i = 0; i < all.key_width; ++i) {
            float* column = columns + i * all.value_width;
            UNROLL for (int n = 0; n < kVectors; ++n) {
                Float old;
                load(old, column + n * kLanes);
                seen[n] += old * factors[i * step] * token.k[i];
            }
        }
        UNROLL for (int n = 0; n < kVectors; ++n) added[n] = (added[n] - seen[n]) * token.beta;
    }
    UNROLL for (int n = 0; n < kVectors; ++n) sums[n] = Float{};
    for (int64_t i = 0; i < all.key_width; ++i) {
        float* column = columns + i * all.value_width;
        const float query = token.q ? token.q[i] * all.scale : 0.0f;
        UNROLL for (int n = 0; n < kVectors; ++n) {
            Float now;
            load(now, column + n * kLanes);
            now = now * factors[i * step] + added[n] * token.k[i];
            store(column + n * kLanes, now);
            sums[n] += now * query;
        }
    }
    if (!token.q) return;
    UNROLL for (int n = 0; n < kVectors; ++n) store(token.y + first + n * kLanes, sums[n]);
}

// The same of one column.
INLINE void read_column(const RecurrentAttention& all, const Token& token, const float* factors, float* state,
                        int64_t column) {
    const int64_t step = all.decay_width > 1 ? 1 : 0;
    float added = token.v[column], seen = 0.0f, sum = 0.0f;
    for (int64_t i = 0; all.beta && i < all.key_width; ++i) {
        seen += state[i * all.value_width + column] * factors[i * step] * token.k[i];
    }
    if (all.beta) added = (added - seen) * token.beta;
    for (int64_t i = 0; i < all.key_width; ++i) {
        float& now = state[i * all.value_width + column];
        now = now * factors[i * step] + added * token.k[i];
        if (token.q) sum += now * (token.q[i] * all.scale);
    }
    if (token.q) token.y[column] = sum;
}

INLINE void read_token(const RecurrentAttention& all, const Token& token, float* factors, float* state) {
    for (int64_t i = 0; i < all.decay_width; ++i) factors[i] = std::exp(token.decay[i]);
    int64_t column = 0;
    for (; column + 4 * kLanes <= all.value_width; column += 4 * kLanes) {
        read_columns<4>(all, token, factors, state, column);
    }
    for (; column + kLanes <= all.value_width; column += kLanes) read_columns<1>(all, token, factors, state, column);
    for (; column < all.value_width; ++column) read_column(all, token, factors, state, column);
}

// Where a head's numbers stand among the kept inputs of a token.
struct Places {
    int64_t k, v, decay, beta;
};

INLINE Places places_of(const RecurrentAttention& all, int64_t head) {
    const int64_t values = all.heads * all.key_width, decays = values + all.heads * all.value_width;
    return {head * all.key_width, values + head * all.value_width, decays + head * all.decay_width,
            decays + all.heads * all.decay_width + head};
}

// All tokens of one head of a row.
TARGET void attend_head(void* item, size_t number) {
    const RecurrentAttention& all = *static_cast<const RecurrentAttention*>(item);
    const Progress& progress = all.progress;
    const int64_t row = static_cast<int64_t>(number) / all.heads, head = static_cast<int64_t>(number) % all.heads;
    const int64_t size = all.key_width * all.value_width, width = all.input_width();
    const int64_t write = progress.write[row], first = progress.state[row], keep = progress.keep[row];
    const Places places = places_of(all, head);
    float* inputs = all.inputs + row * progress.slots * width;
    thread_local std::vector<float> memory;
    memory.resize(static_cast<size_t>(size + all.decay_width));
    float *kept = all.states + static_cast<int64_t>(number) * size, *state = kept;
    const auto new_token = [&](int64_t position) {
        const int64_t index = (row * progress.tokens + position - write) * all.heads + head;
        return Token{all.q + index * all.key_width,      all.k + index * all.key_width,
                     all.v + index * all.value_width,    all.decay + index * all.decay_width,
                     all.beta ? all.beta[index] : 0.0f, all.y + index * all.value_width};
    };
    for (int64_t position = first; position < write + progress.tokens; ++position) {
        if (position == keep) {  // What follows may be rejected.
            state = memory.data() + all.decay_width;
            std::memcpy(state, kept, static_cast<size_t>(size) * sizeof(float));
        }
        if (position >= write) {
            read_token(all, new_token(position), memory.data(), state);
            continue;
        }
        const float* old = inputs + (position - first) * width;
        const Token token{nullptr, old + places.k, old + places.v, old + places.decay, all.beta ? old[places.beta] : 0.0f,
                          nullptr};
        read_token(all, token, memory.data(), state);
    }
    const auto copy = [](float* to, const float* from, int64_t count) {
        std::memmove(to, from, static_cast<size_t>(count) * sizeof(float));
    };
    const int64_t end = std::min(write + progress.tokens, keep + progress.slots);
    for (int64_t position = keep; position < end; ++position) {  // From the first on, as they move to the front.
        float* to = inputs + (position - keep) * width;
        const float* old = inputs + (position - first) * width;
        const bool is_old = position < write;
        if (is_old && to == old) continue;
        const Token token = is_old ? Token{nullptr, old + places.k, old + places.v, old + places.decay, 0.0f, nullptr}
                                   : new_token(position);
        copy(to + places.k, token.k, all.key_width);
        copy(to + places.v, token.v, all.value_width);
        copy(to + places.decay, token.decay, all.decay_width);
        if (all.beta) to[places.beta] = is_old ? old[places.beta] : token.beta;
    }
}

// All tokens of some channels of a row.
TARGET void convolve_part(void* item, size_t number) {
    const CausalConvolution& all = *static_cast<const CausalConvolution*>(item);
    const Progress& progress = all.progress;
    const int64_t parts = (all.channels + kChannelsOfPart - 1) / kChannelsOfPart;
    const int64_t row = static_cast<int64_t>(number) / parts, first = static_cast<int64_t>(number) % parts * kChannelsOfPart;
    const int64_t end = std::min(first + kChannelsOfPart, all.channels), history = all.kernel - 1;
    const int64_t write = progress.write[row], start = progress.state[row] - history;
    float* inputs = all.inputs + row * (history + progress.slots) * all.channels;
    const auto input_of = [&](int64_t position) {
        return position < write ? inputs + (position - start) * all.channels
                                : all.x + (row * progress.tokens + position - write) * all.channels;
    };
    for (int64_t token = 0; token < progress.tokens; ++token) {
        float* y = all.y + (row * progress.tokens + token) * all.channels;
        for (int64_t tap = 0; tap < all.kernel; ++tap) {
            const float *x = input_of(write + token - history + tap), *weight = all.weight + tap * all.channels;
            if (!tap) {
                for (int64_t i = first; i < end; ++i) y[i] = x[i] * weight[i];
            } else {
                for (int64_t i = first; i < end; ++i) y[i] += x[i] * weight[i];
            }
        }
    }
    const int64_t kept = progress.keep[row] - history;
    const int64_t last = std::min(write + progress.tokens, kept + history + progress.slots);
    for (int64_t position = kept; position < last; ++position) {
        float* to = inputs + (position - kept) * all.channels;
        const float* from = input_of(position);
        if (to != from) std::memmove(to + first, from + first, static_cast<size_t>(end - first) * sizeof(float));
    }
}
