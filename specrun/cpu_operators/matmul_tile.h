// The computation, in terms of a few vector operations: matmul.cpp includes it once for each instruction set, inside a
// namespace that defines TARGET, OPERATION, Int, Float, kLanes, the sizes of tiles and the operations.
//
// No include guard. Floats are added up in one order and by fused multiply-adds everywhere, and the other sums are of
// integers, so all instruction sets, tiles and numbers of rows give the same bits.

// The codes of one block of a row, and their scale and sum. Of infinite activations and NaN, products become NaN. Zeros
// have the scale 0: the smallest one times a weight's would be subnormal, and Intel's processors are slow with these.
TARGET inline void round_block(const float* x, int64_t count, int8_t* codes, float* scale, int32_t* sum) {
    const Bits* bits = reinterpret_cast<const Bits*>(x);
    int32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t size = bits[i] & 0x7fffffff;  // Ordered as floats are, with NaN above infinity.
        largest = size > largest ? size : largest;
    }
    const float amax = from_bits(static_cast<uint32_t>(std::max(largest, kSmallest))), factor = 127.0f / amax;
    int32_t total = 0;
    for (int64_t i = 0; i < count; ++i) {
        // The sum has its last bit at 1, so it is rounded as rint does, and its last byte is the code.
        const float shifted = x[i] * factor + kShift;
        const int8_t code = static_cast<int8_t>(to_bits(shifted));
        codes[i] = code;
        total += code;
    }
    *scale = largest == 0 ? 0.0f : amax / 127.0f;
    *sum = total;
}

TARGET void round_row(const Product& product, int64_t row) {
    const Weight& weight = product.weight;
    const Rounded& rounded = product.rounded;
    const int64_t blocks = weight.blocks();
    const float* x = row_of(product, row);
    int8_t* codes = rounded.codes + row * rounded.stride;
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = block * weight.block;
        const int64_t count = std::min(weight.block, weight.inputs - first);
        round_block(x + first, count, codes + first, &rounded.scales[row * blocks + block],
                    &rounded.sums[row * blocks + block]);
    }
    std::memset(codes + weight.inputs, 0, static_cast<size_t>(rounded.stride - weight.inputs));
}

// The scales or minima of a block of a strip, from column ``lane`` on.
OPERATION Float load_values(const BlockValues& all, int64_t strip, int64_t block, int lane) {
    const int64_t place = all.place(strip, block) + lane;
    switch (all.stored) {
        case Stored::kFloat32: return load(static_cast<const float*>(all.values) + place);
        case Stored::kBfloat16: return load_bfloat16(static_cast<const uint16_t*>(all.values) + place);
        case Stored::kFloat16: return load_float16(static_cast<const uint16_t*>(all.values) + place);
        case Stored::kCodes: break;
    }
    const Float codes = load_int8(static_cast<const int8_t*>(all.values) + place);
    return times(codes, load(all.unit(strip, block) + lane));
}

// Numbers of columns of a row that a tile computes.
template <int kStrips>
constexpr int kVectors = kStrips * static_cast<int>(kColumns) / kLanes;

// kRows rows from ``row`` on times kStrips strips of 16 columns from ``strip`` on, with codes.
template <int kBits, int kRows, int kStrips>
OPERATION void add_up_codes(const Product& product, int64_t row, int64_t strip,
                            Float (&totals)[kRows][kVectors<kStrips>]) {
    constexpr int kParts = static_cast<int>(kColumns) / kLanes;
    constexpr int kPartBytes = static_cast<int>(kLineBytes) / kParts;
    constexpr int kInputs = 32 / kBits;
    const Weight& weight = product.weight;
    const Rounded& rounded = product.rounded;
    const int64_t blocks = weight.blocks(), lines = weight.lines_of_strip(), block_lines = weight.block / kInputs;
    const uint8_t* codes[kStrips];
    const int8_t* zeros[kStrips];
    UNROLL for (int s = 0; s < kStrips; ++s) {
        codes[s] = static_cast<const uint8_t*>(weight.lines) + (strip + s) * lines * kLineBytes;
        zeros[s] = weight.zeros ? weight.zeros + (strip + s) * blocks * kColumns : nullptr;
    }
    const int8_t* inputs[kRows];
    UNROLL for (int r = 0; r < kRows; ++r) inputs[r] = rounded.codes + (row + r) * rounded.stride;
    const bool asks = row == 0;  // For the tiles of other rows too.
    int64_t line = 0, ahead = kLinesAhead / kStrips * kLineBytes;
    for (int64_t block = 0; block < blocks; ++block) {
        Int sums[kRows][kVectors<kStrips>];
        UNROLL for (int r = 0; r < kRows; ++r) {
            const int32_t sum = rounded.sums[(row + r) * blocks + block];
            const Int start = spread(kUnsigned<kBits> ? -weight.middle * sum : 0);
            UNROLL for (int v = 0; v < kVectors<kStrips>; ++v) sums[r][v] = start;
        }
        const int64_t end = std::min(line + block_lines, lines);
        for (; line < end; ++line) {
            // From here on, lines of the next strips.
            if (line + kLinesAhead / kStrips == lines) ahead += (kStrips - 1) * lines * kLineBytes;
            UNROLL for (int s = 0; s < kStrips; ++s) UNROLL for (int p = 0; p < kParts; ++p) {
                const int v = s * kParts + p;
                const uint8_t* place = codes[s] + line * kLineBytes + p * kPartBytes;
                if (asks && p == 0) __builtin_prefetch(place + ahead, 0, kSecondCache);
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
        float x_sums[kRows];
        UNROLL for (int r = 0; r < kRows; ++r) x_sums[r] = rounded.sum((row + r) * blocks + block);
        UNROLL for (int s = 0; s < kStrips; ++s) UNROLL for (int p = 0; p < kParts; ++p) {
            const int v = s * kParts + p;
            const Float scale = load_values(weight.scales, strip + s, block, p * kLanes);
            UNROLL for (int r = 0; r < kRows; ++r) {
                const int64_t place = (row + r) * blocks + block;
                Float sum = to_float(sums[r][v]);
                if (weight.zeros) {
                    const Float zero_points = load_int8(zeros[s] + block * kColumns + p * kLanes);
                    sum = multiply_add(zero_points, spread(static_cast<float>(-rounded.sums[place])), sum);
                }
                totals[r][v] = multiply_add(sum, times(scale, spread(rounded.scales[place])), totals[r][v]);
            }
            if (!weight.minima.values) continue;
            const Float minimum = load_values(weight.minima, strip + s, block, p * kLanes);
            UNROLL for (int r = 0; r < kRows; ++r) {
                totals[r][v] = multiply_add(minimum, spread(x_sums[r]), totals[r][v]);
            }
        }
    }
}

// The same with numbers in float32.
template <int kRows, int kStrips>
OPERATION void add_up_floats(const Product& product, int64_t row, int64_t strip,
                             Float (&totals)[kRows][kVectors<kStrips>]) {
    constexpr int kParts = static_cast<int>(kColumns) / kLanes;
    const int64_t inputs = product.weight.inputs;
    const float* lines = static_cast<const float*>(product.weight.lines) + strip * inputs * kColumns;
    const float* x[kRows];
    UNROLL for (int r = 0; r < kRows; ++r) x[r] = product.x(row + r);
    const bool asks = row == 0;
    int64_t ahead = kLinesAhead / kStrips * kColumns;
    for (int64_t i = 0; i < inputs; ++i) {
        if (i + kLinesAhead / kStrips == inputs) ahead += (kStrips - 1) * inputs * kColumns;
        Float numbers[kVectors<kStrips>];
        UNROLL for (int s = 0; s < kStrips; ++s) UNROLL for (int p = 0; p < kParts; ++p) {
            const float* place = lines + (s * inputs + i) * kColumns + p * kLanes;
            if (asks && p == 0) __builtin_prefetch(place + ahead, 0, kSecondCache);
            numbers[s * kParts + p] = load(place);
        }
        UNROLL for (int r = 0; r < kRows; ++r) {
            const Float one = spread(x[r][i]);
            UNROLL for (int v = 0; v < kVectors<kStrips>; ++v) {
                totals[r][v] = multiply_add(numbers[v], one, totals[r][v]);
            }
        }
    }
}

// Write the totals of a row and a strip, with the residual added.
OPERATION void write_out(const Product& product, int64_t row, int64_t strip,
                         const Float (&totals)[kColumns / kLanes]) {
    constexpr int kParts = static_cast<int>(kColumns) / kLanes;
    const Output& output = output_of(product, strip);
    const int64_t first = (strip - output.first_strip) * kColumns;
    const int64_t columns = std::min(kColumns, output.columns - first);
    const int64_t place = product.places[row] * output.columns + first;
    const bool is_full = columns == kColumns;
    float last[kColumns], last_residual[kColumns];
    float* y = is_full ? output.y + place : last;
    const float* residual = output.residual ? output.residual + place : nullptr;
    if (residual && !is_full) {
        std::memcpy(last_residual, residual, bytes_of(columns));
        residual = last_residual;
    }
    UNROLL for (int p = 0; p < kParts; ++p) {
        Float total = totals[p];
        if (residual) total = multiply_add(total, spread(1.0f), load(residual + p * kLanes));
        store(y + p * kLanes, total);
    }
    if (!is_full) std::memcpy(output.y + place, last, bytes_of(columns));
}

template <int kBits, int kRows, int kStrips>
TARGET void multiply_tile(const Product& product, int64_t row, int64_t strip) {
    constexpr int kParts = static_cast<int>(kColumns) / kLanes;
    Float totals[kRows][kVectors<kStrips>];
    UNROLL for (int r = 0; r < kRows; ++r) UNROLL for (int v = 0; v < kVectors<kStrips>; ++v) totals[r][v] = zero();
    if constexpr (kBits == 32) {
        add_up_floats<kRows, kStrips>(product, row, strip, totals);
    } else {
        add_up_codes<kBits, kRows, kStrips>(product, row, strip, totals);
    }
    UNROLL for (int s = 0; s < kStrips; ++s) UNROLL for (int r = 0; r < kRows; ++r) {
        Float row_totals[kParts];
        UNROLL for (int p = 0; p < kParts; ++p) row_totals[p] = totals[r][s * kParts + p];
        write_out(product, row + r, strip + s, row_totals);
    }
}

// A tile of ``rows`` rows, at most kRows.
template <int kBits, int kStrips, int kRows>
TARGET void multiply_rows(const Product& product, int64_t row, int64_t rows, int64_t strip) {
    if (rows == kRows) {
        multiply_tile<kBits, kRows, kStrips>(product, row, strip);
    } else if constexpr (kRows > 1) {
        multiply_rows<kBits, kStrips, kRows - 1>(product, row, rows, strip);
    }
}

// All strips up to ``end`` that come in groups of kStrips, times all rows; a group stays in the nearest caches
// meanwhile. Tiles have about equally many rows, kRows at most. Returns the first strip that is left.
template <int kBits, int kStrips, int kRows>
TARGET int64_t multiply_strips(const Product& product, int64_t strip, int64_t end) {
    for (; strip + kStrips <= end; strip += kStrips) {
        for (int64_t row = 0; row < product.rows;) {
            const int64_t left = product.rows - row, tiles = (left + kRows - 1) / kRows;
            const int64_t rows = (left + tiles - 1) / tiles;
            multiply_rows<kBits, kStrips, kRows>(product, row, rows, strip);
            row += rows;
        }
    }
    return strip;
}

TARGET void multiply_codes(const Product& product, int64_t strip, int64_t end) {
    const bool is_few = product.rows <= 2;
    if (product.weight.bits == 4) {
        if (is_few) strip = multiply_strips<4, kStripsOfFewRows, 2>(product, strip, end);
        strip = multiply_strips<4, kStripsOfManyRows, kTileRows>(product, strip, end);
        multiply_strips<4, 1, kTileRows>(product, strip, end);
    } else {
        if (is_few) strip = multiply_strips<8, kStripsOfFewRows, 2>(product, strip, end);
        strip = multiply_strips<8, kStripsOfManyRows, kTileRows>(product, strip, end);
        multiply_strips<8, 1, kTileRows>(product, strip, end);
    }
}

// More rows have tiles of fewer strips, so that fewer tiles read a weight.
TARGET void multiply_floats(const Product& product, int64_t strip, int64_t end) {
    if (product.rows <= kFewRowsOfFloats) {
        strip = multiply_strips<32, kStripsOfFloats, kFewRowsOfFloats>(product, strip, end);
    }
    strip = multiply_strips<32, kStripsOfFloats / 2, kTileRowsOfFloats>(product, strip, end);
    multiply_strips<32, 1, kTileRowsOfFloats>(product, strip, end);
}

// Strips of an item of work.
int64_t strips_at_once(const Product& product) {
    if (product.weight.bits == 32) return product.weight.strips < kFewStrips ? kStripsOfFloats / 2 : kStripsOfFloats;
    return product.rows <= 2 ? kStripsOfFewRows : kStripsOfManyRows;
}

TARGET void multiply(const Product& product, int64_t first_strip, int64_t num_strips) {
    const int64_t end = std::min(first_strip + num_strips, product.weight.strips);
    if (product.weight.bits == 32) {
        multiply_floats(product, first_strip, end);
    } else {
        multiply_codes(product, first_strip, end);
    }
}
