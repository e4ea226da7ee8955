// EmbeddingLookup as ONNX Runtime sees it: embeddings of tokens, from the weight of a product. A model whose embedding
// and head are tied has the tensor once.
//
// ids [..] int64, lines, scales, units, minima, minimum units -> y [.., K] float. The weight is that of FloatMatMul or
// QuantizedMatMul (weight_tensors.h), without zero points. A token of id -1 is unused: its embedding is NaN.
// Attributes: K, N of that one output; of codes bits, block_size and middle.
#include <algorithm>
#include <cmath>
#include <limits>

#include "matmul.h"
#include "operator.h"
#include "operators.h"
#include "weight_tensors.h"

namespace {

using ort::Status;
using ort::Tensor;
using ort::Type;

constexpr int64_t kUnused = -1;
constexpr int64_t kMost = 1 << 24;     // Products of all sizes stay within 64 bits.
constexpr int64_t kFewTokens = 8;      // Looked up sooner than another thread is told about it.

struct Sizes {
    int64_t bits = 32, block = 1, middle = 0, width = 0, tokens = 0;
};

struct Lookup {
    specrun::Weight weight;
    int64_t tokens;  // In the vocabulary.
    const int64_t* ids;
    float* y;
};

float value_of(const specrun::BlockValues& all, int64_t panel, int64_t block, int64_t column) {
    const int64_t index = all.value_index(panel, block) + column;
    switch (all.stored) {
        case specrun::Stored::kFloat32: return static_cast<const float*>(all.values)[index];
        case specrun::Stored::kBfloat16: return specrun::from_bfloat16(static_cast<const uint16_t*>(all.values)[index]);
        case specrun::Stored::kFloat16: return specrun::from_float16(static_cast<const uint16_t*>(all.values)[index]);
        case specrun::Stored::kCodes: break;
    }
    return static_cast<float>(static_cast<const int8_t*>(all.values)[index]) * all.unit(panel, block)[column];
}

void look_up(void* item, size_t number) {
    const Lookup& lookup = *static_cast<const Lookup*>(item);
    const specrun::Weight& weight = lookup.weight;
    const int64_t id = lookup.ids[number], inputs = weight.inputs;
    float* y = lookup.y + static_cast<int64_t>(number) * inputs;
    if (id == kUnused) {
        for (int64_t i = 0; i < inputs; ++i) y[i] = std::numeric_limits<float>::quiet_NaN();
        return;
    }
    const int64_t panel = id / specrun::kColumns, column = id % specrun::kColumns;
    if (weight.bits == 32) {
        const float* lines = static_cast<const float*>(weight.lines) + panel * inputs * specrun::kColumns + column;
        for (int64_t i = 0; i < inputs; ++i) y[i] = lines[i * specrun::kColumns];
        return;
    }
    const int64_t line_inputs = weight.line_inputs();
    // Of 4 inputs a line has a column's codes side by side; in 4 bits the next 4 are in the upper halves.
    const uint8_t* lines = static_cast<const uint8_t*>(weight.lines) +
                           panel * weight.lines_of_panel() * specrun::kLineBytes + 4 * column;
    for (int64_t block = 0, i = 0; i < inputs; ++block) {
        const float scale = value_of(weight.scales, panel, block, column);
        const float minimum = weight.minima.values ? value_of(weight.minima, panel, block, column) : 0.0f;
        for (const int64_t end = std::min(i + weight.block, inputs); i < end; ++i) {
            const int64_t within = i % line_inputs;
            const uint8_t byte = lines[i / line_inputs * specrun::kLineBytes + within % 4];
            const int32_t code = weight.bits == 8 ? byte : within < 4 ? byte & 15 : byte >> 4;
            y[i] = static_cast<float>(code - weight.middle) * scale + minimum;
        }
    }
}

// Types and sizes that agree with the attributes and with each other.
bool are_right(const Sizes& sizes, const Tensor (&inputs)[6], Lookup* lookup) {
    specrun::Weight& weight = lookup->weight;
    const Tensor& ids = inputs[0];
    weight.bits = sizes.bits, weight.block = sizes.block, weight.inputs = sizes.width;
    weight.panels = specrun::panels_of(sizes.tokens), weight.middle = static_cast<int32_t>(sizes.middle);
    if (!specrun::read_weight({inputs[1], inputs[2], inputs[3], inputs[4], inputs[5], {}}, &weight)) return false;
    lookup->tokens = sizes.tokens, lookup->ids = static_cast<const int64_t*>(ids.data);
    for (size_t i = 0; i < ids.elements; ++i) {
        if (lookup->ids[i] < kUnused || lookup->ids[i] >= sizes.tokens) return false;
    }
    return ids.axes < ort::kMostAxes;
}

struct Kernel {
    static constexpr const char* kName = "EmbeddingLookup";
    static constexpr size_t kInputs = 6, kOutputs = 1;
    static Type type_of(size_t index) {
        return index == 0 ? Type::kInt64 : index == 3 || index == 5 ? Type::kFloat : Type::kAny;
    }
    static bool is_required(size_t index) { return index < 2; }

    Sizes sizes;

    Status* read(const ort::Attributes& attributes) {
        RETURN_IF_FAILED(attributes.read("K", &sizes.width));
        size_t outputs = 1;
        RETURN_IF_FAILED(attributes.read("N", &sizes.tokens, &outputs));
        attributes.read_if_given("bits", &sizes.bits);
        attributes.read_if_given("block_size", &sizes.block);
        sizes.middle = specrun::usual_middle(sizes.bits);
        attributes.read_if_given("middle", &sizes.middle);
        const bool has_bits = sizes.bits == 32 || sizes.bits == 8 || sizes.bits == 4;
        const auto is_usual = [](int64_t size) { return size > 0 && size <= kMost; };
        if (!has_bits || !specrun::is_middle(sizes.middle, sizes.bits) || !is_usual(sizes.width) ||
            !is_usual(sizes.tokens) || !is_usual(sizes.block)) {
            return attributes.fail("EmbeddingLookup: attributes out of range");
        }
        return nullptr;
    }

    Status* run(ort::Call& call) const {
        Tensor inputs[kInputs];
        RETURN_IF_FAILED(call.read_all<Kernel>(inputs));
        Lookup lookup{};
        if (!are_right(sizes, inputs, &lookup)) {
            return call.fail("EmbeddingLookup: a tensor of another size or type, or an id beyond the vocabulary");
        }
        Tensor y = inputs[0];
        y.shape[y.axes++] = sizes.width;
        RETURN_IF_FAILED(call.make_output(0, y, &lookup.y));
        const int64_t count = static_cast<int64_t>(inputs[0].elements);
        const bool done = specrun::run(call.threads(), count <= kFewTokens, look_up, count, &lookup);
        return done ? nullptr : call.fail_to_run("EmbeddingLookup: no threads");
    }
};

}  // namespace

ort::Operator embedding_lookup() { return ort::operator_of<Kernel>(); }
