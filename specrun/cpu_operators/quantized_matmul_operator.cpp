// QuantizedMatMul as ONNX Runtime sees it.
//
// x [.., K] float, codes uint8, scales float, zeros int8 (may be left out) -> y [.., N] float, perhaps
// several, whose columns lie side by side in the weight. Attributes: bits, K, N of each output, block_size.
#include <memory>
#include <new>

#include "operator.h"
#include "operators.h"
#include "quantized_matmul.h"

namespace {

using ort::Status;
using ort::Tensor;

constexpr size_t kInputs = 4;

struct Kernel {
    const void* const* api;
    int64_t bits, inputs, block, strips;
    int64_t columns[specrun::kMostOutputs];
    size_t num_outputs;
};

// Outputs have the shape of the first input, but for its last size.
Status* make_outputs(const Kernel& kernel, ort::KernelContext* context, const Tensor& x, specrun::Product* product) {
    Tensor y = x;
    if (x.axes < 1 || x.shape[x.axes - 1] != kernel.inputs) {
        return ort::fail(kernel.api, "QuantizedMatMul: the input has another width");
    }
    size_t outputs = 0;
    RETURN_IF_FAILED(ort::count_outputs(kernel.api, context, &outputs));
    if (outputs != kernel.num_outputs) return ort::fail(kernel.api, "QuantizedMatMul: N is not the size of every output");
    int64_t strip = 0;
    for (size_t i = 0; i < kernel.num_outputs; ++i) {
        y.shape[y.axes - 1] = kernel.columns[i];
        float* place = nullptr;
        RETURN_IF_FAILED(ort::make_output(kernel.api, context, i, y, &place));
        product->outputs[i] = {place, kernel.columns[i], strip};
        strip += specrun::strips_of(kernel.columns[i]);
    }
    product->num_outputs = static_cast<int>(kernel.num_outputs);
    return nullptr;
}

Status* compute(void* pointer, ort::KernelContext* context) {
    const Kernel& kernel = *static_cast<const Kernel*>(pointer);
    Tensor inputs[kInputs];
    RETURN_IF_FAILED(ort::read_all(kernel.api, context, inputs));
    const auto& [x, codes, scales, zeros] = inputs;
    specrun::Product product{};
    specrun::Weight& weight = product.weight;
    weight.codes = static_cast<const uint8_t*>(codes.data);
    weight.scales = static_cast<const float*>(scales.data);
    weight.zeros = static_cast<const int8_t*>(zeros.data);
    weight.bits = kernel.bits;
    weight.inputs = kernel.inputs;
    weight.strips = kernel.strips;
    weight.block = kernel.block;
    const size_t strips = static_cast<size_t>(weight.strips), blocks = static_cast<size_t>(weight.blocks());
    const size_t each = strips * specrun::kColumns;
    weight.one_scale = scales.elements == each;
    if (codes.elements != strips * static_cast<size_t>(weight.lines() * specrun::kLineBytes) ||
        (!weight.one_scale && scales.elements != each * blocks) || (zeros.data && zeros.elements != each * blocks)) {
        return ort::fail(kernel.api, "QuantizedMatMul: codes, scales or zeros have another size than the attributes say");
    }
    RETURN_IF_FAILED(make_outputs(kernel, context, x, &product));
    product.x = static_cast<const float*>(x.data);
    product.rows = static_cast<int64_t>(x.elements) / kernel.inputs;
    if (product.rows == 0) return nullptr;
    ort::Pool pool{kernel.api, context};
    if (!specrun::multiply(product, pool.threads())) {
        return ort::create_status(kernel.api, ort::kRuntimeException, "QuantizedMatMul: no memory or no threads");
    }
    return nullptr;
}

Status* create(const ort::CustomOp*, const void* const* api, const ort::KernelInfo* info, void** made) {
    auto kernel = std::unique_ptr<Kernel>(new (std::nothrow) Kernel{});
    if (!kernel) return ort::create_status(api, ort::kRuntimeException, "QuantizedMatMul: no memory");
    kernel->api = api;
    RETURN_IF_FAILED(ort::integer_attribute(api, info, "bits", &kernel->bits));
    RETURN_IF_FAILED(ort::integer_attribute(api, info, "K", &kernel->inputs));
    kernel->num_outputs = specrun::kMostOutputs;
    RETURN_IF_FAILED(ort::integers_attribute(api, info, "N", kernel->columns, &kernel->num_outputs));
    RETURN_IF_FAILED(ort::integer_attribute(api, info, "block_size", &kernel->block));
    constexpr int64_t kMost = 1 << 24;  // Products of all sizes stay within 64 bits.
    constexpr int64_t kLongestBlock = 1 << 16;  // Sums of products of 8-bit numbers stay within 32 bits.
    bool sizes = kernel->inputs > 0 && kernel->inputs <= kMost && kernel->num_outputs > 0;
    for (size_t i = 0; i < kernel->num_outputs; ++i) {
        sizes = sizes && kernel->columns[i] > 0 && kernel->columns[i] <= kMost;
        kernel->strips += specrun::strips_of(kernel->columns[i]);
    }
    const bool bits = kernel->bits == 4 || kernel->bits == 8;
    if (!sizes || !bits || kernel->block <= 0 || kernel->block > kLongestBlock ||
        kernel->block % (32 / kernel->bits) != 0) {
        return ort::fail(api, "QuantizedMatMul: attributes out of range");
    }
    *made = kernel.release();
    return nullptr;
}

}  // namespace

ort::CustomOp quantized_matmul() {
    using ort::CustomOp;
    CustomOp op = ort::usual_op<Kernel>();
    op.name = [](const CustomOp*) { return "QuantizedMatMul"; };
    op.count_inputs = [](const CustomOp*) -> size_t { return kInputs; };
    op.count_outputs = [](const CustomOp*) -> size_t { return 1; };
    op.input_type = [](const CustomOp*, size_t index) {
        constexpr ort::Type kTypes[] = {ort::Type::kFloat, ort::Type::kUint8, ort::Type::kFloat, ort::Type::kInt8};
        return kTypes[index];
    };
    op.input_presence = [](const CustomOp*, size_t index) {
        return index == 3 ? ort::Presence::kOptional : ort::Presence::kRequired;
    };
    op.output_presence = [](const CustomOp*, size_t) { return ort::Presence::kVariadic; };
    op.fewest_variadic_outputs = [](const CustomOp*) { return 1; };
    op.variadic_outputs_are_alike = [](const CustomOp*) { return 1; };
    op.create_kernel_or_fail = create;
    op.compute_or_fail = compute;
    return op;
}
