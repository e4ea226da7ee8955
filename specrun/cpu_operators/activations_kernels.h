// Activations in vectors: activations.cpp has them compiled for each processor.

// The next 16 numbers or fewer; what is missing is 0.
INLINE Float next(const float* values, int64_t left) {
    Float vector;
    if (left >= kLanes) {
        load(vector, values);
    } else {
        float lanes[kLanes] = {};
        std::memcpy(lanes, values, static_cast<size_t>(left) * sizeof(float));
        load(vector, lanes);
    }
    return vector;
}

INLINE void write(float* values, int64_t left, Float vector) {
    if (left >= kLanes) {
        store(values, vector);
    } else {
        float lanes[kLanes];
        store(lanes, vector);
        std::memcpy(values, lanes, static_cast<size_t>(left) * sizeof(float));
    }
}

// 1 / (1 + e**-x), by powers of numbers that are not above 0.
INLINE Float sigmoid(Float x) {
    const Float zero = {}, power = exponential(select(zero > x, x, zero - x));
    return select(zero > x, power, spread(1.0f)) / (power + 1.0f);
}

INLINE float sum(Float vector) {
    float lanes[kLanes];
    store(lanes, vector);
    for (int half = kLanes / 2; half; half /= 2) {
        for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    return lanes[0];
}

TARGET void make_row(const Activations& all, int64_t row, float* y) {
    const int64_t size = all.size;
    const float* x = all.x + row * size;
    if (all.prologue == Prologue::kNormalized) {
        Float squares[4] = {};
        for (int64_t i = 0; i < size; i += 4 * kLanes) {
            for (int part = 0; part < 4 && i + part * kLanes < size; ++part) {
                const Float vector = next(x + i + part * kLanes, size - i - part * kLanes);
                squares[part] += vector * vector;
            }
        }
        const float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / static_cast<float>(size);
        const float factor = 1.0f / std::sqrt(mean + all.epsilon);
        for (int64_t i = 0; i < size; i += kLanes) {
            write(y + i, size - i, next(x + i, size - i) * factor * next(all.other + i, size - i));
        }
        return;
    }
    const float* other = all.other + row * size;
    for (int64_t i = 0; i < size; i += kLanes) {
        const Float gate = next(x + i, size - i);
        const bool is_silu = all.prologue == Prologue::kSiluGated;
        const Float inner = is_silu ? gate : (gate + gate * 0.044715f * gate * gate) * 1.59576912f;
        write(y + i, size - i, gate * sigmoid(inner) * next(other + i, size - i));
    }
}
