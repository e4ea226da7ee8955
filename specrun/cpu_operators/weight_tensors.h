// The tensors of a packed weight, as the operators' inputs give them, checked against each other.
#pragma once

#include "matmul.h"
#include "operator.h"

namespace specrun {

struct WeightTensors {
    ort::Tensor lines;                // uint8, or float
    ort::Tensor scales;               // Of codes alone, as the rest is: float, uint16 (bfloat16), float16, or int8
    ort::Tensor units;                // float: what scales in int8 are multiplied by
    ort::Tensor minima, minimum_units;  // As scales and units; or left out
    ort::Tensor zeros;                // int8; or left out
};

// False where types or sizes contradict each other. most: blocks that may have numbers of their own.
inline bool read_values(const ort::Tensor& values, const ort::Tensor& units, int64_t panels, int64_t most,
                        BlockValues* result) {
    using ort::Type;
    const size_t each = static_cast<size_t>(panels * kColumns);
    switch (values.type) {
        case Type::kFloat: result->stored = Stored::kFloat32; break;
        case Type::kUint16: result->stored = Stored::kBfloat16; break;
        case Type::kFloat16: result->stored = Stored::kFloat16; break;
        case Type::kInt8: result->stored = Stored::kCodes; break;
        default: return false;
    }
    const int64_t blocks = values.elements == each ? 1 : most;
    if (values.elements != each * static_cast<size_t>(blocks)) return false;
    result->values = values.data;
    result->panel_values = blocks * kColumns, result->block_values = blocks == 1 ? 0 : kColumns;
    if ((result->stored == Stored::kCodes) != (units.data != nullptr)) return false;
    if (!units.data) return true;
    const int64_t num_units = static_cast<int64_t>(units.elements / each);
    if (units.type != Type::kFloat || num_units == 0 || units.elements % each != 0) return false;
    while ((blocks - 1) >> result->unit_shift >= num_units) ++result->unit_shift;
    result->units = static_cast<const float*>(units.data), result->panel_units = num_units * kColumns;
    return (blocks - 1) >> result->unit_shift == num_units - 1;
}

// Set what tensors say of a weight whose sizes are set. False where types or sizes contradict each other.
inline bool read_weight(const WeightTensors& tensors, Weight* weight) {
    using ort::Type;
    const bool has_codes = weight->bits != 32;
    const size_t bytes = static_cast<size_t>(weight->panels * weight->lines_of_panel() * kLineBytes);
    if (tensors.lines.type != (has_codes ? Type::kUint8 : Type::kFloat)) return false;
    if (tensors.lines.elements * (has_codes ? 1 : sizeof(float)) != bytes) return false;
    weight->lines = tensors.lines.data;
    if (!has_codes) return true;
    const int64_t blocks = weight->blocks();
    if (!read_values(tensors.scales, tensors.units, weight->panels, blocks, &weight->scales)) return false;
    if (tensors.minima.data &&
        !read_values(tensors.minima, tensors.minimum_units, weight->panels, blocks, &weight->minima)) {
        return false;
    }
    weight->zeros = static_cast<const int8_t*>(tensors.zeros.data);
    const size_t zeros = static_cast<size_t>(weight->panels * blocks * kColumns);
    return !weight->zeros || (tensors.zeros.type == Type::kInt8 && tensors.zeros.elements == zeros);
}

// The code that stands for zero where the attribute ``middle`` says nothing; and which ones it may say.
inline int64_t usual_middle(int64_t bits) { return bits == 4 ? 8 : 128; }
inline bool is_middle(int64_t middle, int64_t bits) {
    return bits == 32 || middle == usual_middle(bits) || (bits == 4 && middle == 0);
}

}  // namespace specrun
