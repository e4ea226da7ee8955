// QuantizedMatMul and FloatMatMul as ONNX Runtime sees them.
//
// QuantizedMatMul: x [.., K] float, codes, scales, zeros, other float, residual float, units, minima, minimum units,
//                  experts [..] int64
// FloatMatMul:     x [.., K] float, weight float, other float, residual float, experts [..] int64
// -> y [.., N] float, perhaps several, whose columns lie side by side in the weight. The last inputs may be left out.
// Attributes: K, N of each output; bits, block_size and middle of codes (see weight_tensors.h for all of theirs); made,
// the Prologue (see activations.h), and its epsilon; experts, the number of weights, one behind the other, of which a row
// of y has the one that the input ``experts`` says (0: there is one for all). There may be several rows of y for each of
// x. Engines of before do not have the last four. A residual has y's shape, and there is one output then.
#include <algorithm>
#include <iterator>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "matmul.h"
#include "operator.h"
#include "operators.h"
#include "weight_tensors.h"

namespace {

using ort::Status;
using ort::Tensor;
using ort::Type;

constexpr Type kQuantizedInputs[] = {Type::kFloat, Type::kUint8, Type::kAny, Type::kInt8, Type::kFloat,
                                     Type::kFloat, Type::kFloat, Type::kAny, Type::kFloat, Type::kInt64};
constexpr Type kFloatInputs[] = {Type::kFloat, Type::kFloat, Type::kFloat, Type::kFloat, Type::kInt64};
constexpr size_t kNeededOfQuantized = 3, kNeededOfFloat = 2;

struct Kernel {
    const void* const* api;
    int64_t bits, inputs, block, middle, panels, prologue, experts;
    float epsilon;
    int64_t columns[specrun::kMostOutputs];
    size_t num_outputs;
};

struct Inputs {
    Tensor x, other, residual, experts;
    specrun::WeightTensors weight;
};

template <bool kHasCodes>
Status* read(const Kernel& kernel, ort::KernelContext* context, Inputs* inputs) {
    if constexpr (kHasCodes) {
        Tensor all[std::size(kQuantizedInputs)];
        RETURN_IF_FAILED(ort::read_all(kernel.api, context, kQuantizedInputs, all));
        *inputs = {all[0], all[4], all[5], all[9], {all[1], all[2], all[6], all[7], all[8], all[3]}};
    } else {
        Tensor all[std::size(kFloatInputs)];
        RETURN_IF_FAILED(ort::read_all(kernel.api, context, kFloatInputs, all));
        *inputs = {all[0], all[2], all[3], all[4], {}};
        inputs->weight.lines = all[1];
    }
    return nullptr;
}

// Types and sizes that agree with the attributes and with each other.
bool are_right(const Kernel& kernel, const Inputs& inputs, specrun::Product* product) {
    specrun::Weight& weight = product->weight;
    weight.bits = kernel.bits, weight.inputs = kernel.inputs;
    weight.panels = kernel.panels * std::max(kernel.experts, int64_t{1});
    weight.block = kernel.block, weight.middle = static_cast<int32_t>(kernel.middle);
    const Tensor &x = inputs.x, &other = inputs.other, &residual = inputs.residual;
    const size_t width = static_cast<size_t>(kernel.inputs);
    if (x.axes < 1 || x.shape[x.axes - 1] != kernel.inputs) return false;
    if (!specrun::read_weight(inputs.weight, &weight)) return false;
    product->rows = static_cast<int64_t>(x.elements / width), product->repeats = 1;
    if (!kernel.experts != !inputs.experts.axes || inputs.experts.axes >= ort::kMostAxes) return false;
    if (kernel.experts) {
        const int64_t rows = static_cast<int64_t>(inputs.experts.elements);
        if (product->rows ? rows % product->rows : rows) return false;
        if (rows) product->repeats = rows / product->rows;
        product->rows = rows;
    }
    const auto prologue = static_cast<specrun::Prologue>(kernel.prologue);
    product->activations = {prologue, static_cast<const float*>(x.data), static_cast<const float*>(other.data),
                            kernel.inputs, kernel.epsilon};
    if ((prologue == specrun::Prologue::kNone) != !other.data) return false;
    if (other.data && other.elements != (prologue == specrun::Prologue::kNormalized ? width : x.elements)) return false;
    if (!residual.data) return true;
    const size_t outputs = static_cast<size_t>(product->rows) * static_cast<size_t>(kernel.columns[0]);
    return kernel.num_outputs == 1 && residual.elements == outputs;
}

// Outputs have the shape of the first input, but for its last size; or that of ``experts``, and a last size.
Status* make_outputs(const Kernel& kernel, ort::KernelContext* context, const Inputs& inputs,
                     specrun::Product* product) {
    Tensor y = kernel.experts ? inputs.experts : inputs.x;
    y.axes += kernel.experts ? 1 : 0;
    size_t outputs = 0;
    RETURN_IF_FAILED(ort::count_outputs(kernel.api, context, &outputs));
    if (outputs != kernel.num_outputs) {
        return ort::fail(kernel.api, "QuantizedMatMul, FloatMatMul: N is not the size of every output");
    }
    int64_t panel = 0;
    for (size_t i = 0; i < kernel.num_outputs; ++i) {
        y.shape[y.axes - 1] = kernel.columns[i];
        float* values = nullptr;
        RETURN_IF_FAILED(ort::make_output(kernel.api, context, i, y, &values));
        product->outputs[i] = {values, static_cast<const float*>(inputs.residual.data), kernel.columns[i], panel};
        panel += specrun::panels_of(kernel.columns[i]);
    }
    product->num_outputs = static_cast<int>(kernel.num_outputs);
    return nullptr;
}

// Multiply the rows of each expert by its weight; false where an expert is not there, or memory or threads fail.
bool multiply_by_experts(const specrun::Product& product, const int64_t* experts, int64_t num_experts,
                         const specrun::Threads& threads) {
    thread_local std::vector<int64_t> ends, order;  // Where the rows of each expert end; their numbers, by expert.
    ends.assign(static_cast<size_t>(num_experts) + 1, 0), order.resize(static_cast<size_t>(product.rows));
    for (int64_t row = 0; row < product.rows; ++row) {
        if (experts[row] < 0 || experts[row] >= num_experts) return false;
        ++ends[static_cast<size_t>(experts[row]) + 1];
    }
    std::partial_sum(ends.begin(), ends.end(), ends.begin());
    for (int64_t row = 0; row < product.rows; ++row) {
        order[static_cast<size_t>(ends[static_cast<size_t>(experts[row])]++)] = row;
    }
    specrun::Product part = product;
    const int64_t panels = product.weight.panels / num_experts;
    for (int64_t expert = 0, begin = 0; expert < num_experts; ++expert) {
        part.rows = ends[static_cast<size_t>(expert)] - begin, part.chosen = order.data() + begin;
        begin += part.rows;
        part.weight = product.weight.part(expert * panels, panels);
        if (part.rows && !specrun::multiply(part, threads)) return false;
    }
    return true;
}

template <bool kHasCodes>
Status* compute(void* pointer, ort::KernelContext* context) {
    const Kernel& kernel = *static_cast<const Kernel*>(pointer);
    Inputs inputs;
    RETURN_IF_FAILED(read<kHasCodes>(kernel, context, &inputs));
    specrun::Product product{};
    if (!are_right(kernel, inputs, &product)) {
        return ort::fail(kernel.api, "QuantizedMatMul, FloatMatMul: a tensor has another size or type than the attributes say");
    }
    RETURN_IF_FAILED(make_outputs(kernel, context, inputs, &product));
    if (product.rows == 0) return nullptr;
    ort::Pool pool{kernel.api, context};
    const auto* experts = static_cast<const int64_t*>(inputs.experts.data);
    if (!(experts ? multiply_by_experts(product, experts, kernel.experts, pool.threads())
                  : specrun::multiply(product, pool.threads()))) {
        return ort::create_status(kernel.api, ort::kRuntimeException,
                                  "QuantizedMatMul, FloatMatMul: no such expert, no memory or no threads");
    }
    return nullptr;
}

template <bool kHasCodes>
Status* create(const ort::CustomOp*, const void* const* api, const ort::KernelInfo* info, void** result) {
    auto kernel = std::unique_ptr<Kernel>(new (std::nothrow) Kernel{});
    if (!kernel) return ort::create_status(api, ort::kRuntimeException, "QuantizedMatMul, FloatMatMul: no memory");
    kernel->api = api;
    kernel->bits = 32, kernel->block = 1;
    if constexpr (kHasCodes) {
        RETURN_IF_FAILED(ort::integer_attribute(api, info, "bits", &kernel->bits));
        RETURN_IF_FAILED(ort::integer_attribute(api, info, "block_size", &kernel->block));
        if (kernel->bits != 4 && kernel->bits != 8) return ort::fail(api, "QuantizedMatMul: codes of another size");
        kernel->middle = specrun::usual_middle(kernel->bits);
        ort::ignore_failure(api, ort::integer_attribute(api, info, "middle", &kernel->middle));
    }
    RETURN_IF_FAILED(ort::integer_attribute(api, info, "K", &kernel->inputs));
    kernel->num_outputs = specrun::kMostOutputs;
    RETURN_IF_FAILED(ort::integers_attribute(api, info, "N", kernel->columns, &kernel->num_outputs));
    ort::ignore_failure(api, ort::integer_attribute(api, info, "made", &kernel->prologue));
    ort::ignore_failure(api, ort::float_attribute(api, info, "epsilon", &kernel->epsilon));
    ort::ignore_failure(api, ort::integer_attribute(api, info, "experts", &kernel->experts));
    constexpr int64_t kMost = 1 << 24;  // Products of all sizes stay within 64 bits.
    constexpr int64_t kLongestBlock = 1 << 16;  // Sums of products of 8-bit numbers stay within 32 bits.
    constexpr int64_t kMostExperts = 1 << 10;
    bool sizes = kernel->inputs > 0 && kernel->inputs <= kMost && kernel->num_outputs > 0;
    sizes = sizes && kernel->experts >= 0 && kernel->experts <= kMostExperts;
    for (size_t i = 0; i < kernel->num_outputs && sizes; ++i) {
        sizes = kernel->columns[i] > 0 && kernel->columns[i] <= kMost;
        if (sizes) kernel->panels += specrun::panels_of(kernel->columns[i]);
    }
    const bool is_known = kernel->prologue >= 0 && kernel->prologue <= static_cast<int64_t>(specrun::Prologue::kLast);
    if (!sizes || !is_known || !specrun::is_middle(kernel->middle, kernel->bits) || kernel->block <= 0 ||
        kernel->block > kLongestBlock || kernel->block % (32 / kernel->bits) != 0) {
        return ort::fail(api, "QuantizedMatMul, FloatMatMul: attributes out of range");
    }
    *result = kernel.release();
    return nullptr;
}

template <bool kHasCodes>
ort::CustomOp operator_of() {
    using ort::CustomOp;
    CustomOp op = ort::usual_op<Kernel>();
    op.name = [](const CustomOp*) { return kHasCodes ? "QuantizedMatMul" : "FloatMatMul"; };
    op.count_inputs = [](const CustomOp*) { return kHasCodes ? std::size(kQuantizedInputs) : std::size(kFloatInputs); };
    op.count_outputs = [](const CustomOp*) -> size_t { return 1; };
    op.input_type = [](const CustomOp*, size_t i) { return kHasCodes ? kQuantizedInputs[i] : kFloatInputs[i]; };
    op.input_presence = [](const CustomOp*, size_t index) {
        return index < (kHasCodes ? kNeededOfQuantized : kNeededOfFloat) ? ort::Presence::kRequired
                                                                         : ort::Presence::kOptional;
    };
    op.output_presence = [](const CustomOp*, size_t) { return ort::Presence::kVariadic; };
    op.fewest_variadic_outputs = [](const CustomOp*) { return 1; };
    op.variadic_outputs_are_alike = [](const CustomOp*) { return 1; };
    op.create_kernel_or_fail = create<kHasCodes>;
    op.compute_or_fail = compute<kHasCodes>;
    return op;
}

}  // namespace

ort::CustomOp quantized_matmul() { return operator_of<true>(); }
ort::CustomOp float_matmul() { return operator_of<false>(); }
