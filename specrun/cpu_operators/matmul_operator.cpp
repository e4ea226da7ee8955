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
constexpr const char* kOutOfMeans = "QuantizedMatMul, FloatMatMul: no such expert, no memory or no threads";
constexpr const char* kWrongTensor = "QuantizedMatMul, FloatMatMul: a tensor has another size or type than the attributes say";
constexpr const char* kWrongOutputs = "QuantizedMatMul, FloatMatMul: N is not the size of every output";

struct Sizes {
    int64_t bits = 32, inputs = 0, block = 1, middle = 0, panels = 0, prologue = 0, experts = 0;
    float epsilon = 0;
    int64_t columns[specrun::kMostOutputs] = {};
    size_t num_outputs = specrun::kMostOutputs;
};

struct Inputs {
    Tensor x, other, residual, experts;
    specrun::WeightTensors weight;
};

// Types and sizes that agree with the attributes and with each other.
bool are_right(const Sizes& sizes, const Inputs& inputs, specrun::Product* product) {
    specrun::Weight& weight = product->weight;
    weight.bits = sizes.bits, weight.inputs = sizes.inputs;
    weight.panels = sizes.panels * std::max(sizes.experts, int64_t{1});
    weight.block = sizes.block, weight.middle = static_cast<int32_t>(sizes.middle);
    const Tensor &x = inputs.x, &other = inputs.other, &residual = inputs.residual;
    const size_t width = static_cast<size_t>(sizes.inputs);
    if (x.axes < 1 || x.shape[x.axes - 1] != sizes.inputs) return false;
    if (!specrun::read_weight(inputs.weight, &weight)) return false;
    product->rows = static_cast<int64_t>(x.elements / width), product->repeats = 1;
    if (!sizes.experts != !inputs.experts.axes || inputs.experts.axes >= ort::kMostAxes) return false;
    if (sizes.experts) {
        const int64_t rows = static_cast<int64_t>(inputs.experts.elements);
        if (product->rows ? rows % product->rows : rows) return false;
        if (rows) product->repeats = rows / product->rows;
        product->rows = rows;
    }
    const auto prologue = static_cast<specrun::Prologue>(sizes.prologue);
    product->activations = {prologue, static_cast<const float*>(x.data), static_cast<const float*>(other.data),
                            sizes.inputs, sizes.epsilon};
    if ((prologue == specrun::Prologue::kNone) != !other.data) return false;
    if (other.data && other.elements != (prologue == specrun::Prologue::kNormalized ? width : x.elements)) return false;
    if (!residual.data) return true;
    const size_t outputs = static_cast<size_t>(product->rows) * static_cast<size_t>(sizes.columns[0]);
    return sizes.num_outputs == 1 && residual.elements == outputs;
}

// Outputs have the shape of the first input, but for its last size; or that of ``experts``, and a last size.
Status* make_outputs(const Sizes& sizes, ort::Call& call, const Inputs& inputs, specrun::Product* product) {
    Tensor y = sizes.experts ? inputs.experts : inputs.x;
    y.axes += sizes.experts ? 1 : 0;
    size_t outputs = 0;
    RETURN_IF_FAILED(call.count_outputs(&outputs));
    if (outputs != sizes.num_outputs) return call.fail(kWrongOutputs);
    int64_t panel = 0;
    for (size_t i = 0; i < sizes.num_outputs; ++i) {
        y.shape[y.axes - 1] = sizes.columns[i];
        float* values = nullptr;
        RETURN_IF_FAILED(call.make_output(i, y, &values));
        product->outputs[i] = {values, static_cast<const float*>(inputs.residual.data), sizes.columns[i], panel};
        panel += specrun::panels_of(sizes.columns[i]);
    }
    product->num_outputs = static_cast<int>(sizes.num_outputs);
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
struct Kernel {
    static constexpr const char* kName = kHasCodes ? "QuantizedMatMul" : "FloatMatMul";
    static constexpr size_t kInputs = kHasCodes ? std::size(kQuantizedInputs) : std::size(kFloatInputs), kOutputs = 1;
    static Type type_of(size_t index) { return kHasCodes ? kQuantizedInputs[index] : kFloatInputs[index]; }
    static bool is_required(size_t index) { return index < (kHasCodes ? 3 : 2); }

    Sizes sizes;

    Status* read(const ort::Attributes& attributes) {
        if constexpr (kHasCodes) {
            RETURN_IF_FAILED(attributes.read("bits", &sizes.bits));
            RETURN_IF_FAILED(attributes.read("block_size", &sizes.block));
            if (sizes.bits != 4 && sizes.bits != 8) return attributes.fail("QuantizedMatMul: codes of another size");
            sizes.middle = specrun::usual_middle(sizes.bits);
            attributes.read_if_given("middle", &sizes.middle);
        }
        RETURN_IF_FAILED(attributes.read("K", &sizes.inputs));
        RETURN_IF_FAILED(attributes.read("N", sizes.columns, &sizes.num_outputs));
        attributes.read_if_given("made", &sizes.prologue);
        attributes.read_if_given("epsilon", &sizes.epsilon);
        attributes.read_if_given("experts", &sizes.experts);
        constexpr int64_t kMost = 1 << 24;  // Products of all sizes stay within 64 bits.
        constexpr int64_t kLongestBlock = 1 << 16;  // Sums of products of 8-bit numbers stay within 32 bits.
        constexpr int64_t kMostExperts = 1 << 10;
        bool right = sizes.inputs > 0 && sizes.inputs <= kMost && sizes.num_outputs > 0;
        right = right && sizes.experts >= 0 && sizes.experts <= kMostExperts;
        for (size_t i = 0; i < sizes.num_outputs && right; ++i) {
            right = sizes.columns[i] > 0 && sizes.columns[i] <= kMost;
            if (right) sizes.panels += specrun::panels_of(sizes.columns[i]);
        }
        const bool is_known = sizes.prologue >= 0 && sizes.prologue <= static_cast<int64_t>(specrun::Prologue::kLast);
        if (!right || !is_known || !specrun::is_middle(sizes.middle, sizes.bits) || sizes.block <= 0 ||
            sizes.block > kLongestBlock || sizes.block % (32 / sizes.bits) != 0) {
            return attributes.fail("QuantizedMatMul, FloatMatMul: attributes out of range");
        }
        return nullptr;
    }

    Status* run(ort::Call& call) const {
        Tensor all[kInputs];
        RETURN_IF_FAILED(call.read_all<Kernel>(all));
        Inputs inputs;
        if constexpr (kHasCodes) {
            inputs = {all[0], all[4], all[5], all[9], {all[1], all[2], all[6], all[7], all[8], all[3]}};
        } else {
            inputs = {all[0], all[2], all[3], all[4], {all[1], {}, {}, {}, {}, {}}};
        }
        specrun::Product product{};
        if (!are_right(sizes, inputs, &product)) return call.fail(kWrongTensor);
        RETURN_IF_FAILED(make_outputs(sizes, call, inputs, &product));
        if (product.rows == 0) return nullptr;
        const auto* experts = static_cast<const int64_t*>(inputs.experts.data);
        const bool done = experts ? multiply_by_experts(product, experts, sizes.experts, call.threads())
                                  : specrun::multiply(product, call.threads());
        return done ? nullptr : call.fail_to_run(kOutOfMeans);
    }
};

template <bool kHasCodes>
ort::Operator operator_of() {
    ort::CustomOp node = ort::node_of<Kernel<kHasCodes>>();
    node.output_presence = [](const ort::CustomOp*, size_t) { return ort::Presence::kVariadic; };
    node.fewest_variadic_outputs = [](const ort::CustomOp*) { return 1; };
    node.variadic_outputs_are_alike = [](const ort::CustomOp*) { return 1; };
    return {node, ort::stage_kind<Kernel<kHasCodes>>()};
}

}  // namespace

ort::Operator quantized_matmul() { return operator_of<true>(); }
ort::Operator float_matmul() { return operator_of<false>(); }
