// EmbeddingLookup as ONNX Runtime sees it: embeddings of tokens, from the weight of a product. A model whose embedding
// and head are tied has the tensor once.
//
// ids [..] int64, lines float or uint8, scales float or uint16 -> y [.., K] float. The last two inputs are those of
// FloatMatMul or QuantizedMatMul (matmul.h), without zero points. A token of id -1 is unused: its embedding is NaN.
// Attributes: K, N of that one output; of codes bits, block_size and half_scales.
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>

#include "matmul.h"
#include "operator.h"
#include "operators.h"

namespace {

using ort::Status;
using ort::Tensor;
using ort::Type;

constexpr int64_t kUnused = -1;
constexpr int64_t kMost = 1 << 24;     // Products of all sizes stay within 64 bits.
constexpr int64_t kFewTokens = 8;      // Looked up sooner than another thread is told about it.

struct Kernel {
    const void* const* api;
    int64_t bits, block, half_scales, width, tokens;
};

struct Lookup {
    specrun::Weight weight;
    int64_t tokens;  // In the vocabulary.
    const int64_t* ids;
    float* y;
};

float scale_of(const specrun::Weight& weight, size_t place) {
    if (!weight.half_scales) return static_cast<const float*>(weight.scales)[place];
    const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(weight.scales)[place]) << 16;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return scale;
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
    const int64_t strip = id / specrun::kColumns, column = id % specrun::kColumns;
    if (weight.bits == 32) {
        const float* lines = static_cast<const float*>(weight.lines) + strip * inputs * specrun::kColumns + column;
        for (int64_t i = 0; i < inputs; ++i) y[i] = lines[i * specrun::kColumns];
        return;
    }
    const int64_t scales = weight.one_scale ? 1 : weight.blocks(), line_inputs = weight.line_inputs();
    const int32_t offset = weight.bits == 4 ? 8 : 128;
    // Of 4 inputs a line has a column's codes side by side; in 4 bits the next 4 are in the upper halves.
    const uint8_t* lines = static_cast<const uint8_t*>(weight.lines) +
                           strip * weight.lines_of_strip() * specrun::kLineBytes + 4 * column;
    for (int64_t i = 0; i < inputs; ++i) {
        const int64_t within = i % line_inputs, block = weight.one_scale ? 0 : i / weight.block;
        const uint8_t byte = lines[i / line_inputs * specrun::kLineBytes + within % 4];
        const int32_t code = weight.bits == 8 ? byte : within < 4 ? byte & 15 : byte >> 4;
        const size_t place = static_cast<size_t>((strip * scales + block) * specrun::kColumns + column);
        y[i] = static_cast<float>(code - offset) * scale_of(weight, place);
    }
}

// Types and sizes that agree with the attributes and with each other.
bool are_right(const Kernel& kernel, const Tensor (&inputs)[3], Lookup* lookup) {
    specrun::Weight& weight = lookup->weight;
    const Tensor &ids = inputs[0], &lines = inputs[1], &scales = inputs[2];
    weight.bits = kernel.bits, weight.block = kernel.block, weight.inputs = kernel.width;
    weight.strips = specrun::strips_of(kernel.tokens), weight.half_scales = kernel.half_scales != 0;
    weight.lines = lines.data, weight.scales = scales.data;
    const bool has_codes = kernel.bits != 32;
    const size_t strips = static_cast<size_t>(weight.strips);
    const size_t bytes = strips * static_cast<size_t>(weight.lines_of_strip() * specrun::kLineBytes);
    if (lines.type != (has_codes ? Type::kUint8 : Type::kFloat)) return false;
    if (lines.elements * (has_codes ? 1 : sizeof(float)) != bytes) return false;
    if (has_codes) {
        if (!scales.data || scales.type != (kernel.half_scales ? Type::kUint16 : Type::kFloat)) return false;
        const size_t each = strips * specrun::kColumns;
        weight.one_scale = scales.elements == each;
        if (!weight.one_scale && scales.elements != each * static_cast<size_t>(weight.blocks())) return false;
    }
    lookup->tokens = kernel.tokens, lookup->ids = static_cast<const int64_t*>(ids.data);
    for (size_t i = 0; i < ids.elements; ++i) {
        if (lookup->ids[i] < kUnused || lookup->ids[i] >= kernel.tokens) return false;
    }
    return ids.axes < ort::kMostAxes;
}

Status* compute(void* pointer, ort::KernelContext* context) {
    const Kernel& kernel = *static_cast<const Kernel*>(pointer);
    constexpr Type kTypes[] = {Type::kInt64, Type::kAny, Type::kAny};
    Tensor inputs[3];
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

Status* create(const ort::CustomOp*, const void* const* api, const ort::KernelInfo* info, void** made) {
    auto kernel = std::unique_ptr<Kernel>(new (std::nothrow) Kernel{});
    if (!kernel) return ort::create_status(api, ort::kRuntimeException, "EmbeddingLookup: no memory");
    kernel->api = api, kernel->bits = 32, kernel->block = 1;
    RETURN_IF_FAILED(ort::integer_attribute(api, info, "K", &kernel->width));
    size_t outputs = 1;
    RETURN_IF_FAILED(ort::integers_attribute(api, info, "N", &kernel->tokens, &outputs));
    ort::ignore_failure(api, ort::integer_attribute(api, info, "bits", &kernel->bits));
    ort::ignore_failure(api, ort::integer_attribute(api, info, "block_size", &kernel->block));
    ort::ignore_failure(api, ort::integer_attribute(api, info, "half_scales", &kernel->half_scales));
    const bool bits = kernel->bits == 32 || kernel->bits == 8 || kernel->bits == 4;
    if (!bits || kernel->width <= 0 || kernel->width > kMost || kernel->tokens <= 0 || kernel->tokens > kMost ||
        kernel->block <= 0 || kernel->block > kMost) {
        return ort::fail(api, "EmbeddingLookup: attributes out of range");
    }
    *made = kernel.release();
    return nullptr;
}

}  // namespace

ort::CustomOp embedding_lookup() {
    using ort::CustomOp;
    CustomOp op = ort::usual_op<Kernel>();
    op.name = [](const CustomOp*) { return "EmbeddingLookup"; };
    op.count_inputs = [](const CustomOp*) -> size_t { return 3; };
    op.count_outputs = [](const CustomOp*) -> size_t { return 1; };
    op.input_type = [](const CustomOp*, size_t i) { return i == 0 ? Type::kInt64 : Type::kAny; };
    op.input_presence = [](const CustomOp*, size_t i) {
        return i < 2 ? ort::Presence::kRequired : ort::Presence::kOptional;
    };
    op.output_presence = [](const CustomOp*, size_t) { return ort::Presence::kRequired; };
    op.create_kernel_or_fail = create;
    op.compute_or_fail = compute;
    return op;
}
