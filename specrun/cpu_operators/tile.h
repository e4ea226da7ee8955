// The computation, in terms of a few vector operations: quantized_matmul.cpp includes it once for each instruction set,
// inside a namespace that defines TARGET, Int, Float, kLanes, the sizes of tiles and the operations.
//
// No include guard. Floats are added up in one order and by fused multiply-adds everywhere, and the other sums are of
// integers, so all instruction sets, tiles and numbers of rows give the same bits.

// The codes of one block of a row, and their scale and sum. Of infinite activations and NaN, products become NaN.
TARGET inline void round_block(const float* x, int64_t count, int8_t* codes, float* scale, int32_t* sum) {
    const Bits* bits = reinterpret_cast<const Bits*>(x);
    int32_t largest = kSmallest;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t size = bits[i] & 0x7fffffff;  // Ordered as floats are, with NaN above infinity.
        largest = size > largest ? size : largest;
    }
    const float amax = from_bits(largest), factor = 127.0f / amax;
    int32_t total = 0;
    for (int64_t i = 0; i < count; ++i) {
        // The sum has its last bit at 1, so it is rounded as rint does, and its last byte is the code.
        const float shifted = x[i] * factor + kShift;
        const int8_t code = static_cast<int8_t>(to_bits(shifted));
        codes[i] = code;
        total += code;
    }
    *scale = amax / 127.0f;
    *sum = total;
}

TARGET void round_row(const Product& product, int64_t row) {
    const Weight& weight = product.weight;
    const Rounded& rounded = product.rounded;
    const int64_t blocks = weight.blocks();
    const float* x = product.x + row * weight.inputs;
    int8_t* codes = rounded.codes + row * rounded.stride;
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = block * weight.block;
        const int64_t count = std::min(weight.block, weight.inputs - first);
        round_block(x + first, count, codes + first, &rounded.scales[row * blocks + block],
                    &rounded.sums[row * blocks + block]);
    }
    std::memset(codes + weight.inputs, 0, static_cast<size_t>(rounded.stride - weight.inputs));
}

// kRows rows from ``row`` on times kStrips strips of 16 columns from ``strip`` on.
template <int kBits, int kRows, int kStrips>
TARGET void multiply_tile(const Product& product, int64_t row, int64_t strip) {
    constexpr int kParts = static_cast<int>(kColumns) / kLanes, kVectors = kStrips * kParts;
    constexpr int kPartBytes = static_cast<int>(kLineBytes) / kParts;
    constexpr int kInputs = kBits == 4 ? 8 : 4;
    constexpr int32_t kOffset = kBits == 4 ? 8 : 128;
    const Weight& weight = product.weight;
    const Rounded& rounded = product.rounded;
    const int64_t blocks = weight.blocks(), lines = weight.lines(), block_lines = weight.block / kInputs;
    const int64_t scale_blocks = weight.one_scale ? 1 : blocks;
    const uint8_t* codes[kStrips];
    const float* scales[kStrips];
    const int8_t* zeros[kStrips];
    UNROLL for (int s = 0; s < kStrips; ++s) {
        codes[s] = weight.codes + (strip + s) * lines * kLineBytes;
        scales[s] = weight.scales + (strip + s) * scale_blocks * kColumns;
        zeros[s] = weight.zeros ? weight.zeros + (strip + s) * blocks * kColumns : nullptr;
    }
    const int8_t* inputs[kRows];
    UNROLL for (int r = 0; r < kRows; ++r) inputs[r] = rounded.codes + (row + r) * rounded.stride;
    Float totals[kRows][kVectors];
    UNROLL for (int r = 0; r < kRows; ++r) UNROLL for (int v = 0; v < kVectors; ++v) totals[r][v] = zero();

    // A weight that no cache keeps comes sooner if the next strips are asked for now. One that is there comes later.
    const bool is_far = kRows == 1 && weight.strips * lines * kLineBytes > kLargestNear;
    int64_t line = 0;
    for (int64_t block = 0; block < blocks; ++block) {
        Int sums[kRows][kVectors];
        UNROLL for (int r = 0; r < kRows; ++r) {
            const int32_t sum = rounded.sums[(row + r) * blocks + block];
            const Int start = spread(kUnsigned<kBits> ? -kOffset * sum : 0);
            UNROLL for (int v = 0; v < kVectors; ++v) sums[r][v] = start;
        }
        const int64_t end = std::min(line + block_lines, lines);
        for (; line < end; ++line) {
            UNROLL for (int s = 0; s < kStrips; ++s) UNROLL for (int p = 0; p < kParts; ++p) {
                const int v = s * kParts + p;
                const uint8_t* place = codes[s] + line * kLineBytes + p * kPartBytes;
                if (is_far && p == 0) __builtin_prefetch(place + kStrips * lines * kLineBytes, 0, 2);
                const Int packed = load(place);
                if constexpr (kBits == 4) {
                    const Int low = low_nibbles(packed), high = high_nibbles(packed);
                    UNROLL for (int r = 0; r < kRows; ++r) {
                        sums[r][v] = add_products<4>(sums[r][v], low, spread(inputs[r] + line * kInputs));
                    }
                    UNROLL for (int r = 0; r < kRows; ++r) {
                        sums[r][v] = add_products<4>(sums[r][v], high, spread(inputs[r] + line * kInputs + 4));
                    }
                } else {
                    UNROLL for (int r = 0; r < kRows; ++r) {
                        sums[r][v] = add_products<8>(sums[r][v], packed, spread(inputs[r] + line * kInputs));
                    }
                }
            }
        }
        const int64_t scale_block = weight.one_scale ? 0 : block;
        UNROLL for (int s = 0; s < kStrips; ++s) UNROLL for (int p = 0; p < kParts; ++p) {
            const int v = s * kParts + p;
            const Float scale = load(scales[s] + scale_block * kColumns + p * kLanes);
            UNROLL for (int r = 0; r < kRows; ++r) {
                const int64_t place = (row + r) * blocks + block;
                Float sum = to_float(sums[r][v]);
                if (weight.zeros) {
                    const Float zero_points = load_zeros(zeros[s] + block * kColumns + p * kLanes);
                    sum = multiply_add(zero_points, spread(static_cast<float>(-rounded.sums[place])), sum);
                }
                totals[r][v] = multiply_add(sum, times(scale, spread(rounded.scales[place])), totals[r][v]);
            }
        }
    }
    UNROLL for (int s = 0; s < kStrips; ++s) {
        const Output& output = output_of(product, strip + s);
        const int64_t first = (strip + s - output.first_strip) * kColumns;
        const int64_t columns = std::min(kColumns, output.columns - first);
        UNROLL for (int r = 0; r < kRows; ++r) {
            float* y = output.y + (row + r) * output.columns + first;
            float last[kColumns];
            float* place = columns == kColumns ? y : last;
            UNROLL for (int p = 0; p < kParts; ++p) store(place + p * kLanes, totals[r][s * kParts + p]);
            if (columns < kColumns) std::memcpy(y, last, static_cast<size_t>(columns) * sizeof(float));
        }
    }
}

// All rows times kStrips strips, which stay in the nearest caches meanwhile. Tiles have about equally many rows.
template <int kBits, int kStrips>
TARGET void multiply_strips(const Product& product, int64_t strip) {
    for (int64_t row = 0; row < product.rows;) {
        const int64_t left = product.rows - row, tiles = (left + kTileRows - 1) / kTileRows;
        const int64_t rows = (left + tiles - 1) / tiles;
        switch (rows) {
            case 1: multiply_tile<kBits, 1, kStrips>(product, row, strip); break;
            case 2: multiply_tile<kBits, 2, kStrips>(product, row, strip); break;
            case 3: multiply_tile<kBits, 3, kStrips>(product, row, strip); break;
            case 4: multiply_tile<kBits, 4, kStrips>(product, row, strip); break;
            case 5: multiply_tile<kBits, kTileRows < 5 ? 1 : 5, kStrips>(product, row, strip); break;
            case 6: multiply_tile<kBits, kTileRows < 6 ? 1 : 6, kStrips>(product, row, strip); break;
        }
        row += rows;
    }
}

int64_t strips_at_once(const Product& product) { return product.rows <= 2 ? kStripsOfFewRows : kStripsOfManyRows; }

template <int kBits>
TARGET void multiply_bits(const Product& product, int64_t strip, int64_t end) {
    if (product.rows <= 2) {
        for (; strip + kStripsOfFewRows <= end; strip += kStripsOfFewRows) {
            if (product.rows == 1) multiply_tile<kBits, 1, kStripsOfFewRows>(product, 0, strip);
            if (product.rows == 2) multiply_tile<kBits, 2, kStripsOfFewRows>(product, 0, strip);
        }
    }
    for (; strip + kStripsOfManyRows <= end; strip += kStripsOfManyRows) {
        multiply_strips<kBits, kStripsOfManyRows>(product, strip);
    }
    for (; strip < end; ++strip) multiply_strips<kBits, 1>(product, strip);
}

TARGET void multiply(const Product& product, int64_t first_strip, int64_t num_strips) {
    const int64_t end = std::min(first_strip + num_strips, product.weight.strips);
    if (product.weight.bits == 4) {
        multiply_bits<4>(product, first_strip, end);
    } else {
        multiply_bits<8>(product, first_strip, end);
    }
}
