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
template <Stored kStored>
OPERATION Float load_values(const BlockValues& all, int64_t panel, int64_t block, int lane) {
    const int64_t index = all.value_index(panel, block) + lane;
    if constexpr (kStored == Stored::kFloat32) return load(static_cast<const float*>(all.values) + index);
    if constexpr (kStored == Stored::kBfloat16) return load_bfloat16(static_cast<const uint16_t*>(all.values) + index);
    if constexpr (kStored == Stored::kFloat16) return load_float16(static_cast<const uint16_t*>(all.values) + index);
    const Float codes = load_int8(static_cast<const int8_t*>(all.values) + index);
    return times(codes, load(all.unit(panel, block) + lane));
}

OPERATION Float load_values(const BlockValues& all, int64_t panel, int64_t block, int lane) {
    switch (all.stored) {
        case Stored::kFloat32: return load_values<Stored::kFloat32>(all, panel, block, lane);
        case Stored::kBfloat16: return load_values<Stored::kBfloat16>(all, panel, block, lane);
        case Stored::kFloat16: return load_values<Stored::kFloat16>(all, panel, block, lane);
        case Stored::kCodes: break;
    }
    return load_values<Stored::kCodes>(all, panel, block, lane);
}

// Numbers of columns of a row that a tile computes.
constexpr int kParts = static_cast<int>(kColumns) / kLanes;
template <int kPanels>
constexpr int kVectors = kPanels * kParts;

// Ask for the values of a block of a tile's panels.
template <int kPanels>
OPERATION void prefetch_values(const BlockValues& all, int64_t panel, int64_t block) {
    const int64_t bytes = bytes_of(all.stored);
    const char* values = static_cast<const char*>(all.values) + all.value_index(panel, block) * bytes;
    UNROLL for (int s = 0; s < kPanels; ++s) prefetch(values + s * all.panel_values * bytes);
}

// kRows rows from ``row`` on times kPanels panels of 16 columns from ``panel`` on, with codes.
template <int kBits, int kRows, int kPanels>
OPERATION void add_up_codes(const Product& product, int64_t row, int64_t panel,
                            Float (&totals)[kRows][kVectors<kPanels>]) {
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
    const int64_t blocks_ahead = kLinesAhead / kPanels / block_lines;
    int64_t line = 0, ahead = kLinesAhead / kPanels * kLineBytes;
    for (int64_t block = 0; block < blocks; ++block) {
        if (prefetches) {
            const int64_t next = panel + (block + blocks_ahead < blocks ? 0 : kPanels - 1);
            prefetch_values<kPanels>(weight.scales, next, block + blocks_ahead);
            if (weight.minima.values) prefetch_values<kPanels>(weight.minima, next, block + blocks_ahead);
        }
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
                if (prefetches && p == 0) prefetch(values + ahead);
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

// The scales and minima of a tile's panels; and room for them as floats.
struct TileValues {
    BlockValues scales, minima;
    bool are_unpacked;
};
constexpr int64_t kUsualBlock = 32, kMostBlocks = 512;
struct UnpackedValues {
    alignas(64) float scales[kMostBlocks * kPanelsOfManyRows * kColumns];
    alignas(64) float minima[kMostBlocks * kPanelsOfManyRows * kColumns];
};

// Whether ``add_up_blocks`` can stand for ``add_up_codes``.
inline bool has_usual_blocks(const Weight& weight) {
    return weight.block == kUsualBlock && weight.inputs % kUsualBlock == 0 && !weight.zeros;
}

// Write the values of a tile's panels as floats: [blocks][kPanels][16]. Returns them; many rows use them.
template <int kPanels>
TARGET BlockValues unpack_values(const BlockValues& all, int64_t blocks, float* floats) {
    if (!all.values) return all;
    const float* const first = floats;
    for (int64_t block = 0; block < blocks; ++block) {
        UNROLL for (int v = 0; v < kVectors<kPanels>; ++v, floats += kLanes) {
            store(floats, load_values(all, v / kParts, block, v % kParts * kLanes));
        }
    }
    return {first, nullptr, Stored::kFloat32, kColumns, kPanels * kColumns, 0, 0};
}

// Add the values of a block times a row's factor, and times the row's sums where there are some.
template <bool kUnpacked, Stored kStored, int kRows, int kPanels, typename Sums>
OPERATION void add_values(const BlockValues& all, int64_t block, const float* factors, const Sums& sums,
                          Float (&totals)[kRows][kVectors<kPanels>]) {
    const float* unpacked = static_cast<const float*>(all.values) + block * kPanels * kColumns;
    UNROLL for (int v = 0; v < kVectors<kPanels>; ++v) {
        const Float values = kUnpacked ? load(unpacked + v * kLanes)
                                       : load_values<kStored>(all, v / kParts, block, v % kParts * kLanes);
        UNROLL for (int r = 0; r < kRows; ++r) {
            if constexpr (std::is_same_v<Sums, std::nullptr_t>) {
                totals[r][v] = multiply_add(values, spread(factors[r]), totals[r][v]);
            } else {
                totals[r][v] = multiply_add(to_float(sums[r][v]), times(values, spread(factors[r])), totals[r][v]);
            }
        }
    }
}

template <bool kUnpacked, int kRows, int kPanels, typename Sums>
OPERATION void add_values(const BlockValues& all, int64_t block, const float* factors, const Sums& sums,
                          Float (&totals)[kRows][kVectors<kPanels>]) {
    using S = Stored;
    switch (kUnpacked ? S::kFloat32 : all.stored) {
        case S::kFloat32: return add_values<kUnpacked, S::kFloat32, kRows, kPanels>(all, block, factors, sums, totals);
        case S::kBfloat16: return add_values<false, S::kBfloat16, kRows, kPanels>(all, block, factors, sums, totals);
        case S::kFloat16: return add_values<false, S::kFloat16, kRows, kPanels>(all, block, factors, sums, totals);
        case S::kCodes: return add_values<false, S::kCodes, kRows, kPanels>(all, block, factors, sums, totals);
    }
}

// As ``add_up_codes``, of blocks of 32 inputs: they are unrolled, and what a row and a block have lies side by side.
template <int kBits, int kRows, int kPanels, bool kUnpacked, bool kHasMinima>
OPERATION void add_up_blocks(const Product& product, int64_t row, int64_t panel, const TileValues& values,
                             Float (&totals)[kRows][kVectors<kPanels>]) {
    constexpr int kVector = kVectors<kPanels>, kPartBytes = static_cast<int>(kLineBytes) / kParts;
    constexpr int kInputs = 32 / kBits, kBlockLines = kUsualBlock / kInputs;
    // Products of few rows wait for memory; more rows wait for the processor, which takes up fewer requests at a time.
    constexpr int kLinesAtOnce = kRows <= 2 ? 2 : 4, kBlocksAhead = kLinesAhead / kPanels / kBlockLines;
    const Rounded& rounded = product.rounded;
    const int64_t blocks = product.weight.blocks(), panel_bytes = blocks * kBlockLines * kLineBytes;
    const uint8_t* codes = static_cast<const uint8_t*>(product.weight.lines) + panel * panel_bytes;
    const int8_t* inputs[kRows];
    UNROLL for (int r = 0; r < kRows; ++r) inputs[r] = rounded.codes + (row + r) * rounded.stride;
    const float *x_scales = rounded.scales + row, *x_sums = rounded.x_sums + row;
    const int32_t* starts = rounded.starts + row;
    const int64_t stride = rounded.rows;
    const bool prefetches = row == 0;  // For the tiles of other rows too.
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t skipped = block + kBlocksAhead < blocks ? 0 : kPanels - 1;  // Behind these panels are the next.
        const uint8_t* next = codes + kBlocksAhead * kBlockLines * kLineBytes + skipped * panel_bytes;
        if (!kUnpacked && prefetches) {
            prefetch_values<kPanels>(values.scales, skipped, block + kBlocksAhead);
            if constexpr (kHasMinima) prefetch_values<kPanels>(values.minima, skipped, block + kBlocksAhead);
        }
        Int sums[kRows][kVector];
        UNROLL for (int r = 0; r < kRows; ++r) {
            const Int start = spread(kUnsigned<kBits> ? starts[r] : 0);
            UNROLL for (int v = 0; v < kVector; ++v) sums[r][v] = start;
        }
        UNROLL for (int line = 0; line < kBlockLines; ++line) {
            if (prefetches && line % kLinesAtOnce == 0) {
                UNROLL for (int s = 0; s < kPanels; ++s) {
                    prefetch<kLinesAtOnce>(next + s * panel_bytes + line * kLineBytes);
                }
            }
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
        add_values<kUnpacked, kRows, kPanels>(values.scales, block, x_scales, sums, totals);
        if constexpr (kHasMinima) add_values<kUnpacked, kRows, kPanels>(values.minima, block, x_sums, nullptr, totals);
        codes += kBlockLines * kLineBytes;
        UNROLL for (int r = 0; r < kRows; ++r) inputs[r] += kUsualBlock;
        starts += stride, x_scales += stride, x_sums += stride;
    }
}

// The form of it for a weight's values.
template <int kBits, int kRows, int kPanels>
OPERATION void add_up_blocks(const Product& product, int64_t row, int64_t panel, const TileValues& values,
                             Float (&totals)[kRows][kVectors<kPanels>]) {
    const bool has_minima = values.minima.values != nullptr;
    if constexpr (kPanels <= kPanelsOfManyRows) {
        if (values.are_unpacked && has_minima) {
            return add_up_blocks<kBits, kRows, kPanels, true, true>(product, row, panel, values, totals);
        }
        if (values.are_unpacked) {
            return add_up_blocks<kBits, kRows, kPanels, true, false>(product, row, panel, values, totals);
        }
    }
    if (has_minima) return add_up_blocks<kBits, kRows, kPanels, false, true>(product, row, panel, values, totals);
    add_up_blocks<kBits, kRows, kPanels, false, false>(product, row, panel, values, totals);
}

// The same with numbers in float32.
template <int kRows, int kPanels, bool kPrefetches>
OPERATION void add_up_floats(const Product& product, int64_t row, int64_t panel,
                             Float (&totals)[kRows][kVectors<kPanels>]) {
    constexpr int64_t kAhead = kLinesAhead / kPanels;
    const int64_t inputs = product.weight.inputs, stride = inputs * kColumns;
    const float* line = static_cast<const float*>(product.weight.lines) + panel * stride;
    const float* x[kRows];
    UNROLL for (int r = 0; r < kRows; ++r) x[r] = product.x(row + r);
    int64_t i = 0, ahead = kAhead * kColumns;
    for (const int64_t end : {std::max<int64_t>(0, inputs - kAhead), inputs}) {
        for (; i < end; ++i, line += kColumns) {
            Float numbers[kVectors<kPanels>];
            UNROLL for (int s = 0; s < kPanels; ++s) {
                if constexpr (kPrefetches) prefetch(line + s * stride + ahead);
                UNROLL for (int p = 0; p < kParts; ++p) numbers[s * kParts + p] = load(line + s * stride + p * kLanes);
            }
            UNROLL for (int r = 0; r < kRows; ++r) {
                const Float factor = spread(x[r][i]);
                UNROLL for (int v = 0; v < kVectors<kPanels>; ++v) {
                    totals[r][v] = multiply_add(numbers[v], factor, totals[r][v]);
                }
            }
        }
        ahead += (kPanels - 1) * stride;  // From here on, lines of the next panels.
    }
}

// Write the totals of a row and a panel, with the residual added.
OPERATION void write_out(const Product& product, int64_t row, int64_t panel,
                         const Float (&totals)[kColumns / kLanes]) {
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
TARGET void multiply_tile(const Product& product, int64_t row, int64_t panel, const TileValues* values) {
    Float totals[kRows][kVectors<kPanels>];
    UNROLL for (int r = 0; r < kRows; ++r) UNROLL for (int v = 0; v < kVectors<kPanels>; ++v) totals[r][v] = zero();
    if constexpr (kBits == 32) {
        if (row == 0) {  // For the tiles of other rows too.
            add_up_floats<kRows, kPanels, true>(product, row, panel, totals);
        } else {
            add_up_floats<kRows, kPanels, false>(product, row, panel, totals);
        }
    } else if (values) {
        add_up_blocks<kBits, kRows, kPanels>(product, row, panel, *values, totals);
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
TARGET void multiply_rows(const Product& product, int64_t row, int64_t rows, int64_t panel, const TileValues* values) {
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
    const Weight& weight = product.weight;
    const bool is_usual = kBits != 32 && has_usual_blocks(weight);
    const bool unpacks = is_usual && product.rows > 2 * kRows && weight.blocks() <= kMostBlocks;
    UnpackedValues unpacked;
    for (; panel + kPanels <= end; panel += kPanels) {
        TileValues values{weight.scales, weight.minima, unpacks};
        values.scales.skip(panel), values.minima.skip(panel);
        if constexpr (kBits != 32 && kPanels <= kPanelsOfManyRows) {
            if (unpacks) {
                values.scales = unpack_values<kPanels>(values.scales, weight.blocks(), unpacked.scales);
                values.minima = unpack_values<kPanels>(values.minima, weight.blocks(), unpacked.minima);
            }
        }
        for (int64_t row = 0; row < product.rows;) {
            const int64_t left = product.rows - row, tiles = (left + kRows - 1) / kRows;
            const int64_t rows = (left + tiles - 1) / tiles;
            multiply_rows<kBits, kPanels, kRows>(product, row, rows, panel, is_usual ? &values : nullptr);
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

// What a tile adds up fits into the registers.
TARGET void multiply_floats(const Product& product, int64_t panel, int64_t end) {
    constexpr int kHalf = kPanelsOfFloats / 2;
    if (product.rows <= kFewRowsOfFloats) {
        panel = multiply_panels<32, kPanelsOfFloats, kFewRowsOfFloats>(product, panel, end);
    } else if (product.rows <= kMoreRowsOfFloats) {
        panel = multiply_panels<32, kHalf, kMoreRowsOfFloats>(product, panel, end);
    }
    panel = multiply_panels<32, kPanelsOfManyFloats, kManyRowsOfFloats>(product, panel, end);
    panel = multiply_panels<32, kHalf, kManyRowsOfFloats>(product, panel, end);
    multiply_panels<32, 1, kManyRowsOfFloats>(product, panel, end);
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
