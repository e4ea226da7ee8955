// Products of float32 activations with packed weights. For weights in 8 or 4 bits, activations are rounded to 8 here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "activations.h"
#include "floats.h"
#include "processor.h"
#include "threads.h"

namespace specrun {

constexpr int64_t kColumns = 16;     // Of a line.
constexpr int kMostOutputs = 4;
constexpr int64_t kLineBytes = 64;   // kColumns columns of 1 input in float32, of 4 inputs in 8 bits, of 8 in 4 bits.

inline int64_t panels_of(int64_t columns) { return (columns + kColumns - 1) / kColumns; }

// How numbers are stored. Codes are int8, to be multiplied by a float32 that several blocks share.
enum class Stored { kFloat32, kBfloat16, kFloat16, kCodes };

inline int64_t bytes_of(Stored stored) { return stored == Stored::kFloat32 ? 4 : stored == Stored::kCodes ? 1 : 2; }

// A number for each block of each column: scales, or minima.
struct BlockValues {
    const void* values;    // [panels][blocks, or 1 for all of them][16]; null: there are none
    const float* units;    // Of codes: [panels][units][16]. Block b has unit b >> unit_shift.
    Stored stored;
    int64_t panel_values, block_values, panel_units;  // How far the next panel's or block's are.
    int unit_shift;

    int64_t value_index(int64_t panel, int64_t block) const { return panel * panel_values + block * block_values; }
    const float* unit(int64_t panel, int64_t block) const {
        return units + panel * panel_units + (block >> unit_shift) * kColumns;
    }
    void skip(int64_t panels) {
        if (values) values = static_cast<const char*>(values) + panels * panel_values * bytes_of(stored);
        if (units) units += panels * panel_units;
    }
};

// A weight [K, columns] as specbuild packs it, in panels of 16 columns. Codes are unsigned: a code stands for
// (code - middle - zero) * scale + minimum. Lines are full: there are columns and inputs that stand for nothing.
struct Weight {
    const void* lines;     // [panels][K / inputs of a line][64 bytes]: float32 numbers, or codes
    int64_t bits;          // 32, 8 or 4. The rest is of codes alone.
    int64_t inputs, panels;
    int64_t block;         // Inputs that share a scale, a multiple of those of a line.
    int32_t middle;        // 128 for 8 bits; 8 or 0 for 4
    BlockValues scales;    // Where all blocks share one, blocks are those of the activations only.
    BlockValues minima;    // Perhaps none.
    const int8_t* zeros;   // [panels][blocks][16], or null

    int64_t line_inputs() const { return 32 / bits; }
    int64_t lines_of_panel() const { return (inputs + line_inputs() - 1) / line_inputs(); }
    int64_t blocks() const { return (inputs + block - 1) / block; }
    Weight part(int64_t first_panel, int64_t num_panels) const {
        Weight weight = *this;
        weight.panels = num_panels;
        weight.lines = static_cast<const char*>(lines) + first_panel * lines_of_panel() * kLineBytes;
        weight.scales.skip(first_panel), weight.minima.skip(first_panel);
        if (zeros) weight.zeros += first_panel * blocks() * kColumns;
        return weight;
    }
};

// A part of the columns, which has its own tensor and begins with a panel.
struct Output {
    float* y;               // [rows][columns]
    const float* residual;  // [rows][columns]: added to the product; or null
    int64_t columns, first_panel;
};

// Activations in 8 bits: code * scale.
struct Rounded {
    int8_t* codes;   // [rows][stride], zero beyond K
    int64_t stride;  // Bytes from row to row. No power of two, or rows would meet in a few lines of the cache.
    int64_t rows;    // Those that there is memory for.
    float* scales;   // [blocks][rows], as the others
    int32_t* sums;   // Of the codes.
    int32_t* starts;  // What products of unsigned codes begin with: -middle * sum.
    float* x_sums;   // Of the activations: scale * sum.

    int64_t index(int64_t row, int64_t block) const { return block * rows + row; }
};

struct Product {
    Weight weight;
    Activations activations;
    int64_t rows;
    const int64_t* chosen;  // [rows]: the rows of the outputs that are computed; null: the first ones
    int64_t repeats;        // Rows of the outputs, one behind the other, that have the same activations
    Output outputs[kMostOutputs];
    int num_outputs;
    const int64_t* places;  // [rows]: where a row's outputs are. Rows of NaN are left out.
    const int64_t* nans;    // [num_nans]: where the outputs of those are
    int64_t num_nans;
    float* prepared;        // [rows][K]: the activations, where there is a prologue
    Rounded rounded;        // Of codes.

    // A row's activations, once the prologue has run.
    const float* x(int64_t row) const {
        return activations.prologue == Prologue::kNone ? activations.x + places[row] / repeats * weight.inputs
                                                       : prepared + row * weight.inputs;
    }
};

// The same computation in the instructions of one kind of processor. Bits of results do not depend on which one.
struct InstructionSet {
    const char* name;
    Vectors vectors;  // Vectors of the other operators.
    bool (*is_supported)();
    int64_t (*panels_at_once)(const Product&);
    void (*round_row)(const Product&, int64_t row);
    void (*multiply)(const Product&, int64_t first_panel, int64_t num_panels);
};

// y = activations times weight, plus residual; false where memory or threads fail.
bool multiply(Product product, const Threads& threads);

}  // namespace specrun

extern "C" {
// Compute with the instruction set of this name from now on, for tests; null: with the best one. Returns the name of
// what was chosen, or null where this processor has no such instructions.
__attribute__((visibility("default"))) const char* specrun_choose_instruction_set(const char* name);
}
