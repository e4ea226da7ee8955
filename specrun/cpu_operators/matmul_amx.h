// Products of several rows with codes by AMX. One instruction multiplies up to 16 rows and 64 inputs with the codes of 16
// columns, a tile that looks as 16 lines in 8 bits do. Lines in 4 bits are unpacked into such tiles first.
//
// No include guard: matmul.cpp includes it once, in a namespace that has the vector operations of AVX-512. The sums are of
// integers, and floats are added up in the order of matmul_tile.h, so bits are the same.

constexpr int64_t kMostTileRows = 16, kMostRows = 2 * kMostTileRows, kMostTileInputs = 64;
// Panels that are multiplied at a time. More of them hide how long a product takes, but there are eight tiles: 0 to 3 for
// sums, the next ones for activations, and the others for codes.
constexpr int kPanelsOfOneTile = 4, kPanelsOfTwoTiles = 2;
// Of tiles that are unpacked from 4 bits: how many are kept, and how many tiles ahead one is unpacked.
constexpr int64_t kTurns = 4, kAhead = 2;

// The shapes of the tiles, as LDTILECFG reads them.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int64_t tile_rows, int64_t bytes) {
        rows[tile] = static_cast<uint8_t>(tile_rows);
        row_bytes[tile] = static_cast<uint16_t>(bytes);
    }
};

// Inputs of a tile; 0: the blocks are not made of tiles.
inline int64_t tile_inputs(const Weight& weight) {
    const int64_t inputs = std::min(kMostTileInputs, std::min(weight.block, weight.inputs));
    const int64_t block = std::min(weight.block, weight.inputs);
    const bool fits = inputs % weight.line_inputs() == 0 && weight.inputs % inputs == 0 && block % inputs == 0;
    return weight.bits != 32 && fits ? inputs : 0;
}

// Up to 32 rows from ``row`` on, in one or two tiles, times kPanels panels.
template <int kBits, int kPanels, bool kIsTwo>
struct Tiles {
    static constexpr int64_t kRows = kIsTwo ? kMostRows : kMostTileRows, kLineInputs = 32 / kBits;
    static constexpr bool kSigned = kBits == 4;  // Codes of tiles; else the middle is to be taken off.
    static constexpr int64_t kStepsAhead = kBits == 4 ? 4 : 1;
    typedef int32_t Sums[kPanels][kRows][kColumns];

    const Product& product;
    const int64_t row, rows, panel;
    const int64_t inputs = tile_inputs(product.weight), lines = inputs / kLineInputs;  // Of a tile.
    const int64_t steps = product.weight.inputs / inputs, block_steps = product.weight.block / inputs;
    const int64_t panel_bytes = product.weight.lines_of_panel() * kLineBytes;
    const int64_t blocks = product.weight.blocks();
    const uint8_t* const codes = static_cast<const uint8_t*>(product.weight.lines) + panel * panel_bytes;
    alignas(64) float totals[kPanels][kRows][kColumns];
    alignas(64) Sums sums[2];
    // Tiles that were unpacked from 4 bits. They take turns, so that a tile's stores have ended when it is loaded.
    alignas(64) uint8_t unpacked[kTurns][kMostTileInputs * kColumns];

    // Not by a list of values, which would clear the memory.
    Tiles(const Product& all, int64_t first_row, int64_t num_rows, int64_t first_panel)
        : product(all), row(first_row), rows(num_rows), panel(first_panel) {}

    TARGET void multiply() {
        for (int s = 0; s < kPanels; ++s) {
            for (int64_t r = 0; r < rows; ++r) store(totals[s][r], zero());
        }
        UNROLL for (int tile = 0; tile < kAhead; ++tile) unpack(tile / kPanels, tile % kPanels);
        // What a block's products are is read when those of the next one are under way.
        add_up_block(0);
        for (int64_t block = 1; block < blocks; ++block) {
            add_up_block(block);
            add_to_totals(block - 1);
        }
        add_to_totals(blocks - 1);
        for (int s = 0; s < kPanels; ++s) {
            for (int64_t r = 0; r < rows; ++r) {
                const Float total[1] = {load(totals[s][r])};
                write_out(product, row + r, panel + s, total);
            }
        }
    }

    // The codes of a panel and a step, [inputs / 4][16 columns][4].
    OPERATION const uint8_t* tile_of(int64_t step, int s) {
        if constexpr (kBits == 8) return codes + s * panel_bytes + step * lines * kLineBytes;
        return unpacked[(step * kPanels + s) % kTurns];
    }

    // Write such a tile, where codes have 4 bits. s: may be a panel of the next step.
    OPERATION void unpack(int64_t step, int s) {
        if constexpr (kBits == 8) return;
        step += s / kPanels, s %= kPanels;
        if (step >= steps) return;
        const uint8_t* from = codes + s * panel_bytes + step * lines * kLineBytes;
        uint8_t* to = unpacked[(step * kPanels + s) % kTurns];
        const Int middle = _mm512_set1_epi8(static_cast<char>(product.weight.middle));
        for (int64_t line = 0; line < lines; ++line, from += kLineBytes, to += 2 * kLineBytes) {
            const Int packed = load(from);
            _mm512_store_si512(to, _mm512_sub_epi8(low_nibbles(packed), middle));
            _mm512_store_si512(to + kLineBytes, _mm512_sub_epi8(high_nibbles(packed), middle));
        }
    }

    // Ask for the codes of a later step (see kLinesAhead): behind the last one, for those of the next panels.
    OPERATION void ask_for_codes(int64_t step) {
        step += kStepsAhead;
        const int64_t turned = step < steps ? 0 : 1;
        const uint8_t* next = codes + turned * kPanels * panel_bytes + (step - turned * steps) * lines * kLineBytes;
        for (int s = 0; s < kPanels; ++s, next += panel_bytes) {
            for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(next + line * kLineBytes);
        }
    }

    // A macro, because tiles are named by literals.
#define ADD_PRODUCT(sums, x, codes)        \
    if constexpr (kSigned) {               \
        _tile_dpbssd(sums, x, codes);      \
    } else {                               \
        _tile_dpbsud(sums, x, codes);      \
    }

    OPERATION void add_up_block(int64_t block) {
        const int64_t stride = product.rounded.stride, end = std::min(steps, (block + 1) * block_steps);
        const int8_t* x = product.rounded.codes + row * stride + block * block_steps * inputs;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t step = block * block_steps; step < end; ++step, x += inputs) {
            if (row == 0) ask_for_codes(step);
            _tile_loadd(4, x, stride);
            unpack(step, kAhead);
            if constexpr (kIsTwo) {
                _tile_loadd(5, x + kMostTileRows * stride, stride);
                _tile_loadd(6, tile_of(step, 0), kLineBytes);
                ADD_PRODUCT(0, 4, 6);
                ADD_PRODUCT(2, 5, 6);
                if constexpr (kPanels > 1) {
                    unpack(step, 1 + kAhead);
                    _tile_loadd(7, tile_of(step, 1), kLineBytes);
                    ADD_PRODUCT(1, 4, 7);
                    ADD_PRODUCT(3, 5, 7);
                }
            } else {
                _tile_loadd(5, tile_of(step, 0), kLineBytes);
                ADD_PRODUCT(0, 4, 5);
                if constexpr (kPanels > 1) {
                    unpack(step, 1 + kAhead);
                    _tile_loadd(6, tile_of(step, 1), kLineBytes);
                    ADD_PRODUCT(1, 4, 6);
                    unpack(step, 2 + kAhead);
                    _tile_loadd(7, tile_of(step, 2), kLineBytes);
                    ADD_PRODUCT(2, 4, 7);
                    unpack(step, 3 + kAhead);
                    _tile_loadd(5, tile_of(step, 3), kLineBytes);
                    ADD_PRODUCT(3, 4, 5);
                }
            }
        }
        Sums& tile_sums = sums[block % 2];
        _tile_stored(0, tile_sums[0], kLineBytes);
        if constexpr (kIsTwo) {
            _tile_stored(2, tile_sums[0][kMostTileRows], kLineBytes);
            if constexpr (kPanels > 1) {
                _tile_stored(1, tile_sums[1], kLineBytes);
                _tile_stored(3, tile_sums[1][kMostTileRows], kLineBytes);
            }
        } else if constexpr (kPanels > 1) {
            _tile_stored(1, tile_sums[1], kLineBytes);
            _tile_stored(2, tile_sums[2], kLineBytes);
            _tile_stored(3, tile_sums[3], kLineBytes);
        }
    }

#undef ADD_PRODUCT

    OPERATION void add_to_totals(int64_t block) {
        const Weight& weight = product.weight;
        const int64_t index = product.rounded.index(row, block);
        const int32_t* x_sums = product.rounded.sums + index;
        const float* x_scales = product.rounded.scales + index;
        Float scales[kPanels], zero_points[kPanels], minima[kPanels];
        UNROLL for (int s = 0; s < kPanels; ++s) {
            scales[s] = load_values(weight.scales, panel + s, block, 0);
            minima[s] = weight.minima.values ? load_values(weight.minima, panel + s, block, 0) : zero();
            const int8_t* zeros = weight.zeros + ((panel + s) * blocks + block) * kColumns;
            zero_points[s] = weight.zeros ? load_int8(zeros) : zero();
        }
        for (int64_t r = 0; r < rows; ++r) {
            const Float x_scale = spread(x_scales[r]);
            const int32_t x_sum = x_sums[r];
            UNROLL for (int s = 0; s < kPanels; ++s) {
                Int integers = _mm512_load_si512(sums[block % 2][s][r]);
                if constexpr (!kSigned) integers = _mm512_add_epi32(integers, spread(-weight.middle * x_sum));
                Float sum = to_float(integers);
                if (weight.zeros) sum = multiply_add(zero_points[s], spread(static_cast<float>(-x_sum)), sum);
                Float total = multiply_add(sum, times(scales[s], x_scale), load(totals[s][r]));
                if (weight.minima.values) {
                    const float of_x = product.rounded.x_sums[index + r];
                    total = multiply_add(minima[s], spread(of_x), total);
                }
                store(totals[s][r], total);
            }
        }
    }
};

// All panels up to ``end`` that come in groups of kPanels, times up to 32 rows from ``row`` on. Returns the first that is
// left.
template <int kBits, int kPanels, bool kIsTwo>
TARGET int64_t multiply_groups(const Product& product, int64_t row, int64_t rows, int64_t panel, int64_t end) {
    for (; panel + kPanels <= end; panel += kPanels) {
        Tiles<kBits, kPanels, kIsTwo> tiles(product, row, rows, panel);
        tiles.multiply();
    }
    return panel;
}

template <int kBits>
TARGET void multiply_tiles(const Product& product, int64_t first, int64_t end) {
    const int64_t inputs = tile_inputs(product.weight);
    for (int64_t row = 0; row < product.rows; row += kMostRows) {
        const int64_t rows = std::min(kMostRows, product.rows - row);
        const int64_t upper = std::min(kMostTileRows, rows), lower = rows - upper;
        const bool is_two = lower > 0;
        TileShapes shapes;
        for (int tile = 0; tile < 4; ++tile) shapes.set(tile, is_two && tile >= 2 ? lower : upper, kLineBytes);
        for (int tile = 4; tile < 8; ++tile) shapes.set(tile, inputs / 4, kLineBytes);
        shapes.set(4, upper, inputs);
        if (is_two) shapes.set(5, lower, inputs);
        _tile_loadconfig(&shapes);
        if (is_two) {
            const int64_t left = multiply_groups<kBits, kPanelsOfTwoTiles, true>(product, row, rows, first, end);
            multiply_groups<kBits, 1, true>(product, row, rows, left, end);
        } else {
            const int64_t left = multiply_groups<kBits, kPanelsOfOneTile, false>(product, row, rows, first, end);
            multiply_groups<kBits, 1, false>(product, row, rows, left, end);
        }
    }
    _tile_release();  // Otherwise the system keeps the tiles of threads that do something else.
}

// Whether tiles are faster. To unpack 4 bits takes longer than they save where rows are few.
inline bool has_tiles(const Product& product) {
    const int64_t fewest = product.weight.bits == 8 ? 3 : 7;
    return product.rows >= fewest && tile_inputs(product.weight) > 0;
}

int64_t panels_at_once(const Product& product) {
    return has_tiles(product) ? kPanelsOfOneTile : avx512_vnni::panels_at_once(product);
}

TARGET void multiply(const Product& product, int64_t first_panel, int64_t num_panels) {
    const int64_t end = std::min(first_panel + num_panels, product.weight.panels);
    if (!has_tiles(product)) {
        avx512_vnni::multiply(product, first_panel, num_panels);
    } else if (product.weight.bits == 4) {
        multiply_tiles<4>(product, first_panel, end);
    } else {
        multiply_tiles<8>(product, first_panel, end);
    }
}

// Linux gives the tiles to processes that ask for them.
inline bool ask_for_tiles() {
    constexpr long kAskForFeature = 0x1023, kTiles = 18;
    return syscall(SYS_arch_prctl, kAskForFeature, kTiles) == 0;
}
