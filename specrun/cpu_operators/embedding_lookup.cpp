// EmbeddingLookup as ONNX Runtime sees it: embeddings of tokens, from the weight of a product. A model whose embedding
// and head are tied has the tensor once.
//
// ids [..] int64, lines, scales, units, minima, minimum units -> y [.., K] float. The weight is that of FloatMatMul or
// QuantizedMatMul (weight_tensors.h), without zero points. A token of id -1 is unused: its embedding is NaN.
// Attributes: K, N of that one output; of codes bits, block_size and middle.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <new>

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

struct Kernel {
    const void* const* api;
    int64_t bits, block, middle, width, tokens;
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
bool are_right(const Kernel& kernel, const Tensor (&inputs)[6], Lookup* lookup) {
    specrun::Weight& weight = lookup->weight;
    const Tensor& ids = inputs[0];
    weight.bits = kernel.bits, weight.block = kernel.block, weight.inputs = kernel.width;
    weight.panels = specrun::panels_of(kernel.tokens), weight.middle = static_cast<int32_t>(kernel.middle);
    if (!specrun::read_weight({inputs[1], inputs[2], inputs[3], inputs[4], inputs[5], {}}, &weight)) return false;
    lookup->tokens = kernel.tokens, lookup->ids = static_cast<const int64_t*>(ids.data);
    for (size_t i = 0; i < ids.elements; ++i) {
        if (lookup->ids[i] < kUnused || lookup->ids[i] >= kernel.tokens) return false;
    }
    return ids.axes < ort::kMostAxes;
}

Status* compute(void* pointer, ort::KernelContext* context) {
    const Kernel& kernel = *static_cast<const Kernel*>(pointer);
    constexpr Type kTypes[] = {Type::kInt64, Type::kAny, Type::kAny, Type::kFloat, Type::kAny, Type::kFloat};
    Tensor inputs[6];
    RETURN_IF_FAILED(ort::read_all(kernel.api, context, kTypes, inputs));
    Lookup lookup{};
    if (!are_right(kernel, inputs, &lookup)) {
        return ort::fail(kernel.api, "EmbeddingLookup: a tensor of another size or type, or an id beyond the vocabulary");
    }
    Tensor y = inputs[0];
    y.shape[y.axes++] = kernel.width;
    RETURN_IF_FAILED(ort::make_output(kernel.api, context, 0, y, &lookup.y));
    ort::Pool pool{kernel.api, context};
    const int64_t count = static_cast<int64_t>(inputs[0].elements);
    if (specrun::run(pool.threads(), count <= kFewTokens, look_up, count, &lookup)) return nullptr;
    return ort::create_status(kernel.api, ort::kRuntimeException, "EmbeddingLookup: no threads");
}

Status* create(const ort::CustomOp*, const void* const* api, const ort::KernelInfo* info, void** created) {
    auto kernel = std::unique_ptr<Kernel>(new (std::nothrow) Kernel{});
    if (!kernel) return ort::create_status(api, ort::kRuntimeException, "EmbeddingLookup: no memory");
    kernel->api = api, kernel->bits = 32, kernel->block = 1;
    RETURN_IF_FAILED(ort::integer_attribute(api, info, "K", &kernel->width));
    size_t outputs = 1;
    RETURN_IF_FAILED(ort::integers_attribute(api, info, "N", &kernel->tokens, &outputs));
    ort::ignore_failure(api, ort::integer_attribute(api, info, "bits", &kernel->bits));
    ort::ignore_failure(api, ort::integer_attribute(api, info, "block_size", &kernel->block));
    kernel->middle = specrun::usual_middle(kernel->bits);
    ort::ignore_failure(api, ort::integer_attribute(api, info, "middle", &kernel->middle));
    const bool bits = kernel->bits == 32 || kernel->bits == 8 || kernel->bits == 4;
    if (!bits || !specrun::is_middle(kernel->middle, kernel->bits) || kernel->width <= 0 || kernel->width > kMost || kernel->tokens <= 0 || kernel->tokens > kMost ||
        kernel->block <= 0 || kernel->block > kMost) {
        return ort::fail(api, "EmbeddingLookup: attributes out of range");
    }
    *created = kernel.release();
    return nullptr;
}

}  // namespace

ort::CustomOp embedding_lookup() {
    using ort::CustomOp;
    CustomOp op = ort::usual_op<Kernel>();
    op.name = [](const CustomOp*) { return "EmbeddingLookup"; };
    op.count_inputs = [](const CustomOp*) -> size_t { return 6; };
    op.count_outputs = [](const CustomOp*) -> size_t { return 1; };
    op.input_type = [](const CustomOp*, size_t i) { return i == 0 ? Type::kInt64 : i == 3 || i == 5 ? Type::kFloat : Type::kAny; };
    op.input_presence = [](const CustomOp*, size_t i) {
        return i < 2 ? ort::Presence::kRequired : ort::Presence::kOptional;
    };
    op.output_presence = [](const CustomOp*, size_t) { return ort::Presence::kRequired; };
    op.create_kernel_or_fail = create;
    op.compute_or_fail = compute;
    return op;
}
