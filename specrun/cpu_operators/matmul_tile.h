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
        const int64_t index = rounded.index(row, block);
        round_block(x + first, count, codes + first, &rounded.scales[index], &rounded.sums[index]);
        rounded.starts[index] = -weight.middle * rounded.sums[index];
        rounded.x_sums[index] = rounded.scales[index] * static_cast<float>(rounded.sums[index]);
    }
    std::memset(codes + weight.inputs, 0, static_cast<size_t>(rounded.stride - weight.inputs));
}

// The scales or minima of a block of a panel, from column ``lane`` on.
OPERATION Float load_values(const BlockValues& all, int64_t panel, int64_t block, int lane) {
    const int64_t index = all.value_index(panel, block) + lane;
    switch (all.stored) {
        case Stored::kFloat32: return load(static_cast<const float*>(all.values) + index);
        case Stored::kBfloat16: return load_bfloat16(static_cast<const uint16_t*>(all.values) + index);
        case Stored::kFloat16: return load_float16(static_cast<const uint16_t*>(all.values) + index);
        case Stored::kCodes: break;
    }
    const Float codes = load_int8(static_cast<const int8_t*>(all.values) + index);
    return times(codes, load(all.unit(panel, block) + lane));
}

// Numbers of columns of a row that a tile computes.
template <int kPanels>
constexpr int kVectors = kPanels * static_cast<int>(kColumns) / kLanes;

// kRows rows from ``row`` on times kPanels panels of 16 columns from ``panel`` on, with codes.
template <int kBits, int kRows, int kPanels>
OPERATION void add_up_codes(const Product& product, int64_t row, int64_t panel,
                            Float (&totals)[kRows][kVectors<kPanels>]) {
    constexpr int kParts = static_cast<int>(kColumns) / kLanes;
    constexpr int kPartBytes = static_cast<int>(kLineBytes) / kParts;
    constexpr int kInputs = 32 / kBits;
    const Weight& weight = product.weight;
    const Rounded& rounded = product.rounded;
    const int64_t blocks = weight.blocks(), lines = weight.lines_of_panel(), block_lines = weight.block / kInputs;
    const uint8_t* codes[kPanels];
    const int8_t* zeros[kPanels];
    UNROLL for (int s = 0; s < kPanels; ++s) {
        codes[s] = static_cast<const uint8_t*>(weight.lines) + (panel + s) * lines * kLineBytes;
        zeros[s] = weight.zeros ? weight.zeros + (panel + s) * blocks * kColumns : nullptr;
    }
    const int8_t* inputs[kRows];
    UNROLL for (int r = 0; r < kRows; ++r) inputs[r] = rounded.codes + (row + r) * rounded.stride;
    const bool prefetches = row == 0;  // For the tiles of other rows too.
    int64_t line = 0, ahead = kLinesAhead / kPanels * kLineBytes;
    for (int64_t block = 0; block < blocks; ++block) {
        Int sums[kRows][kVectors<kPanels>];
        UNROLL for (int r = 0; r < kRows; ++r) {
            const Int start = spread(kUnsigned<kBits> ? rounded.starts[rounded.index(row + r, block)] : 0);
            UNROLL for (int v = 0; v < kVectors<kPanels>; ++v) sums[r][v] = start;
        }
        const int64_t end = std::min(line + block_lines, lines);
        for (; line < end; ++line) {
            // From here on, lines of the next panels.
            if (line + kLinesAhead / kPanels == lines) ahead += (kPanels - 1) * lines * kLineBytes;
            UNROLL for (int s = 0; s < kPanels; ++s) UNROLL for (int p = 0; p < kParts; ++p) {
                const int v = s * kParts + p;
                const uint8_t* values = codes[s] + line * kLineBytes + p * kPartBytes;
                if (prefetches && p == 0) __builtin_prefetch(values + ahead, 0, kSecondCache);
                const Int packed = load(values);
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
        UNROLL for (int s = 0; s < kPanels; ++s) UNROLL for (int p = 0; p < kParts; ++p) {
            const int v = s * kParts + p;
            const Float scale = load_values(weight.scales, panel + s, block, p * kLanes);
            UNROLL for (int r = 0; r < kRows; ++r) {
                const int64_t index = rounded.index(row + r, block);
                Float sum = to_float(sums[r][v]);
                if (weight.zeros) {
                    const Float zero_points = load_int8(zeros[s] + block * kColumns + p * kLanes);
                    sum = multiply_add(zero_points, spread(static_cast<float>(-rounded.sums[index])), sum);
                }
                totals[r][v] = multiply_add(sum, times(scale, spread(rounded.scales[index])), totals[r][v]);
            }
            if (!weight.minima.values) continue;
            const Float minimum = load_values(weight.minima, panel + s, block, p * kLanes);
            UNROLL for (int r = 0; r < kRows; ++r) {
                const float x_sum = rounded.x_sums[rounded.index(row + r, block)];
                totals[r][v] = multiply_add(minimum, spread(x_sum), totals[r][v]);
            }
        }
    }
}

// The scales and minima of the panels of a tile as floats, [blocks][16 * panels]: many rows use them.
constexpr int64_t kUsualBlock = 32, kMostBlocks = 512;
struct PanelValues {
    alignas(64) float scales[kMostBlocks * kPanelsOfManyRows * kColumns];
    alignas(64) float minima[kMostBlocks * kPanelsOfManyRows * kColumns];
};

// Whether ``add_up_blocks`` can stand for ``add_up_codes``.
inline bool has_usual_blocks(const Weight& weight) {
    return weight.block == kUsualBlock && weight.inputs % kUsualBlock == 0 && !weight.zeros &&
           weight.blocks() <= kMostBlocks;
}

template <int kPanels>
TARGET void read_values(const Weight& weight, int64_t panel, PanelValues* values) {
    constexpr int kParts = static_cast<int>(kColumns) / kLanes;
    int64_t index = 0;
    for (int64_t block = 0; block < weight.blocks(); ++block) {
        for (int s = 0; s < kPanels; ++s) {
            for (int p = 0; p < kParts; ++p, index += kLanes) {
                store(values->scales + index, load_values(weight.scales, panel + s, block, p * kLanes));
                if (!weight.minima.values) continue;
                store(values->minima + index, load_values(weight.minima, panel + s, block, p * kLanes));
            }
        }
    }
}

// As ``add_up_codes``, of blocks of 32 inputs: they are unrolled, and what a row and a block have lies side by side.
template <int kBits, int kRows, int kPanels, bool kHasMinima>
OPERATION void add_up_blocks(const Product& product, int64_t row, int64_t panel, const PanelValues& values,
                             Float (&totals)[kRows][kVectors<kPanels>]) {
    constexpr int kParts = static_cast<int>(kColumns) / kLanes, kVector = kVectors<kPanels>;
    constexpr int kPartBytes = static_cast<int>(kLineBytes) / kParts;
    constexpr int kInputs = 32 / kBits, kBlockLines = kUsualBlock / kInputs;
    const Rounded& rounded = product.rounded;
    const int64_t blocks = product.weight.blocks(), panel_bytes = blocks * kBlockLines * kLineBytes;
    const uint8_t* codes = static_cast<const uint8_t*>(product.weight.lines) + panel * panel_bytes;
    const int8_t* inputs[kRows];
    UNROLL for (int r = 0; r < kRows; ++r) inputs[r] = rounded.codes + (row + r) * rounded.stride;
    const float *x_scales = rounded.scales + row, *x_sums = rounded.x_sums + row;
    const float *scales = values.scales, *minima = values.minima;
    const int32_t* starts = rounded.starts + row;
    const int64_t stride = rounded.rows, ahead = kLinesAhead / kPanels * kLineBytes;
    const bool prefetches = row == 0;  // For the tiles of other rows too.
    for (int64_t block = 0; block < blocks; ++block) {
        if (prefetches) {
            for (int s = 0; s < kPanels; ++s) {
                // From some line on, lines of the next panels.
                const bool is_next = block * kBlockLines + kLinesAhead / kPanels >= blocks * kBlockLines;
                const uint8_t* line = codes + s * panel_bytes + ahead + (is_next ? (kPanels - 1) * panel_bytes : 0);
                UNROLL for (int i = 0; i < kBlockLines; ++i) __builtin_prefetch(line + i * kLineBytes, 0, kSecondCache);
            }
        }
        Int sums[kRows][kVector];
        UNROLL for (int r = 0; r < kRows; ++r) {
            const Int start = spread(kUnsigned<kBits> ? starts[r] : 0);
            UNROLL for (int v = 0; v < kVector; ++v) sums[r][v] = start;
        }
        UNROLL for (int line = 0; line < kBlockLines; ++line) {
            UNROLL for (int v = 0; v < kVector; ++v) {
                const Int packed = load(codes + v / kParts * panel_bytes + line * kLineBytes + v % kParts * kPartBytes);
                if constexpr (kBits == 4) {
                    const Int low = low_nibbles(packed), high = high_nibbles(packed);
                    UNROLL for (int r = 0; r < kRows; ++r) {
                        sums[r][v] = add_products<4>(sums[r][v], low, spread(inputs[r] + line * kInputs));
                        sums[r][v] = add_products<4>(sums[r][v], high, spread(inputs[r] + line * kInputs + 4));
                    }
                } else {
                    UNROLL for (int r = 0; r < kRows; ++r) {
                        sums[r][v] = add_products<8>(sums[r][v], packed, spread(inputs[r] + line * kInputs));
                    }
                }
            }
        }
        UNROLL for (int v = 0; v < kVector; ++v) {
            const Float scale = load(scales + v * kLanes);
            UNROLL for (int r = 0; r < kRows; ++r) {
                totals[r][v] = multiply_add(to_float(sums[r][v]), times(scale, spread(x_scales[r])), totals[r][v]);
            }
            if constexpr (!kHasMinima) continue;
            const Float minimum = load(minima + v * kLanes);
            UNROLL for (int r = 0; r < kRows; ++r) {
                totals[r][v] = multiply_add(minimum, spread(x_sums[r]), totals[r][v]);
            }
        }
        codes += kBlockLines * kLineBytes;
        UNROLL for (int r = 0; r < kRows; ++r) inputs[r] += kUsualBlock;
        scales += kVector * kLanes, minima += kVector * kLanes;
        starts += stride, x_scales += stride, x_sums += stride;
    }
}

// The same with numbers in float32.
template <int kRows, int kPanels>
OPERATION void add_up_floats(const Product& product, int64_t row, int64_t panel,
                             Float (&totals)[kRows][kVectors<kPanels>]) {
    constexpr int kParts = static_cast<int>(kColumns) / kLanes;
    const int64_t inputs = product.weight.inputs;
    const float* lines = static_cast<const float*>(product.weight.lines) + panel * inputs * kColumns;
    const float* x[kRows];
    UNROLL for (int r = 0; r < kRows; ++r) x[r] = product.x(row + r);
    const bool prefetches = row == 0;
    int64_t ahead = kLinesAhead / kPanels * kColumns;
    for (int64_t i = 0; i < inputs; ++i) {
        if (i + kLinesAhead / kPanels == inputs) ahead += (kPanels - 1) * inputs * kColumns;
        Float numbers[kVectors<kPanels>];
        UNROLL for (int s = 0; s < kPanels; ++s) UNROLL for (int p = 0; p < kParts; ++p) {
            const float* values = lines + (s * inputs + i) * kColumns + p * kLanes;
            if (prefetches && p == 0) __builtin_prefetch(values + ahead, 0, kSecondCache);
            numbers[s * kParts + p] = load(values);
        }
        UNROLL for (int r = 0; r < kRows; ++r) {
            const Float factor = spread(x[r][i]);
            UNROLL for (int v = 0; v < kVectors<kPanels>; ++v) {
                totals[r][v] = multiply_add(numbers[v], factor, totals[r][v]);
            }
        }
    }
}

// Write the totals of a row and a panel, with the residual added.
OPERATION void write_out(const Product& product, int64_t row, int64_t panel,
                         const Float (&totals)[kColumns / kLanes]) {
    constexpr int kParts = static_cast<int>(kColumns) / kLanes;
    const Output& output = output_of(product, panel);
    const int64_t first = (panel - output.first_panel) * kColumns;
    const int64_t columns = std::min(kColumns, output.columns - first);
    const int64_t index = product.places[row] * output.columns + first;
    const bool is_full = columns == kColumns;
    float last[kColumns], last_residual[kColumns];
    float* y = is_full ? output.y + index : last;
    const float* residual = output.residual ? output.residual + index : nullptr;
    if (residual && !is_full) {
        std::memcpy(last_residual, residual, bytes_of(columns));
        residual = last_residual;
    }
    UNROLL for (int p = 0; p < kParts; ++p) {
        Float total = totals[p];
        if (residual) total = multiply_add(total, spread(1.0f), load(residual + p * kLanes));
        store(y + p * kLanes, total);
    }
    if (!is_full) std::memcpy(output.y + index, last, bytes_of(columns));
}

template <int kBits, int kRows, int kPanels>
TARGET void multiply_tile(const Product& product, int64_t row, int64_t panel, const PanelValues* values) {
    constexpr int kParts = static_cast<int>(kColumns) / kLanes;
    Float totals[kRows][kVectors<kPanels>];
    UNROLL for (int r = 0; r < kRows; ++r) UNROLL for (int v = 0; v < kVectors<kPanels>; ++v) totals[r][v] = zero();
    if constexpr (kBits == 32) {
        add_up_floats<kRows, kPanels>(product, row, panel, totals);
    } else if (values && product.weight.minima.values) {
        add_up_blocks<kBits, kRows, kPanels, true>(product, row, panel, *values, totals);
    } else if (values) {
        add_up_blocks<kBits, kRows, kPanels, false>(product, row, panel, *values, totals);
    } else {
        add_up_codes<kBits, kRows, kPanels>(product, row, panel, totals);
    }
    UNROLL for (int s = 0; s < kPanels; ++s) UNROLL for (int r = 0; r < kRows; ++r) {
        Float row_totals[kParts];
        UNROLL for (int p = 0; p < kParts; ++p) row_totals[p] = totals[r][s * kParts + p];
        write_out(product, row + r, panel + s, row_totals);
    }
}

// A tile of ``rows`` rows, at most kRows.
template <int kBits, int kPanels, int kRows>
TARGET void multiply_rows(const Product& product, int64_t row, int64_t rows, int64_t panel, const PanelValues* values) {
    if (rows == kRows) {
        multiply_tile<kBits, kRows, kPanels>(product, row, panel, values);
    } else if constexpr (kRows > 1) {
        multiply_rows<kBits, kPanels, kRows - 1>(product, row, rows, panel, values);
    }
}

// All panels up to ``end`` that come in groups of kPanels, times all rows; a group stays in the nearest caches
// meanwhile. Tiles have about equally many rows, kRows at most. Returns the first panel that is left.
template <int kBits, int kPanels, int kRows>
TARGET int64_t multiply_panels(const Product& product, int64_t panel, int64_t end) {
    PanelValues values;
    const bool prepares = kBits != 32 && product.rows > 2 * kRows && has_usual_blocks(product.weight);
    for (; panel + kPanels <= end; panel += kPanels) {
        if constexpr (kBits != 32 && kPanels <= kPanelsOfManyRows) {
            if (prepares) read_values<kPanels>(product.weight, panel, &values);
        }
        for (int64_t row = 0; row < product.rows;) {
            const int64_t left = product.rows - row, tiles = (left + kRows - 1) / kRows;
            const int64_t rows = (left + tiles - 1) / tiles;
            multiply_rows<kBits, kPanels, kRows>(product, row, rows, panel, prepares ? &values : nullptr);
            row += rows;
        }
    }
    return panel;
}

TARGET void multiply_codes(const Product& product, int64_t panel, int64_t end) {
    const bool is_few = product.rows <= 2;
    if (product.weight.bits == 4) {
        if (is_few) panel = multiply_panels<4, kPanelsOfFewRows, 2>(product, panel, end);
        panel = multiply_panels<4, kPanelsOfManyRows, kTileRows>(product, panel, end);
        multiply_panels<4, 1, kTileRows>(product, panel, end);
    } else {
        if (is_few) panel = multiply_panels<8, kPanelsOfFewRows, 2>(product, panel, end);
        panel = multiply_panels<8, kPanelsOfManyRows, kTileRows>(product, panel, end);
        multiply_panels<8, 1, kTileRows>(product, panel, end);
    }
}

// More rows have tiles of fewer panels, so that fewer tiles read a weight.
TARGET void multiply_floats(const Product& product, int64_t panel, int64_t end) {
    if (product.rows <= kFewRowsOfFloats) {
        panel = multiply_panels<32, kPanelsOfFloats, kFewRowsOfFloats>(product, panel, end);
    }
    panel = multiply_panels<32, kPanelsOfFloats / 2, kTileRowsOfFloats>(product, panel, end);
    multiply_panels<32, 1, kTileRowsOfFloats>(product, panel, end);
}

// Panels of an item of work.
int64_t panels_at_once(const Product& product) {
    if (product.weight.bits == 32) return product.weight.panels < kFewPanels ? kPanelsOfFloats / 2 : kPanelsOfFloats;
    return product.rows <= 2 ? kPanelsOfFewRows : kPanelsOfManyRows;
}

TARGET void multiply(const Product& product, int64_t first_panel, int64_t num_panels) {
    const int64_t end = std::min(first_panel + num_panels, product.weight.panels);
    if (product.weight.bits == 32) {
        multiply_floats(product, first_panel, end);
    } else {
        multiply_codes(product, first_panel, end);
    }
}
