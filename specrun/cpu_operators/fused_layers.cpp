// FusedLayers: many operators in one node. ONNX Runtime spends microseconds between two nodes, most of them in waiting for
// its own data, which the weights of a pass have displaced from the caches. Stages have what they need side by side.
//
// Inputs and outputs: any number, of any types. Outputs are those of stages.
// Attributes: stages, the operators' names with spaces between them, in the order in which they run; arguments, for each
// stage the number of its inputs, these, the number of its outputs, and these. A value is a number: first come the
// inputs, then the outputs, then slots, which hold what only stages read; -1 is an input that is left out. "7.K" is the
// attribute K of stage 7.
#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

#include "operators.h"

namespace {

using ort::Status;
using ort::Tensor;

constexpr int64_t kLeftOut = -1, kMostSlots = 1 << 16;

struct Stage {
    ort::StageKind kind;
    std::unique_ptr<void, void (*)(void*)> kernel;
    std::vector<size_t> inputs;  // kNone: left out
    std::vector<size_t> outputs;

    static constexpr size_t kNone = ~size_t{0};
};

// Memory of a value that only stages read. It grows, and what was in it is lost then.
struct Slot {
    std::unique_ptr<void, void (*)(void*)> memory{nullptr, std::free};
    size_t size = 0;

    void* hold(size_t bytes) {
        if (bytes > size || !memory) {
            const size_t lines = (bytes / 64 + 1) * 64;  // Whole ones of the cache.
            memory.reset(std::aligned_alloc(64, lines));
            size = memory ? lines : 0;
        }
        return memory.get();
    }
};

struct Layers {
    const void* const* api;
    size_t num_inputs = 0, num_outputs = 0;
    std::vector<Stage> stages;
    std::vector<Tensor> values;     // Inputs, outputs, slots.
    std::vector<size_t> variables;  // Inputs that are no constants.
    std::vector<Slot> slots;
    std::mutex in_use;              // Sessions may run in several threads.

    size_t first_slot() const { return num_inputs + num_outputs; }
};

class StageCall final : public ort::Call {
 public:
    StageCall(Layers* layers, const Stage& stage, ort::KernelContext* context, specrun::Threads threads)
        : Call(layers->api), layers_(layers), stage_(stage), context_(context), threads_(threads) {}

    Status* read(size_t index, Tensor* tensor) override {
        if (index >= stage_.inputs.size() || stage_.inputs[index] == Stage::kNone) return nullptr;
        *tensor = layers_->values[stage_.inputs[index]];
        return tensor->type == ort::Type::kAny ? fail("FusedLayers: a stage reads what none has written") : nullptr;
    }
    Status* make_output(size_t index, const Tensor& like, ort::Type type, void** data) override {
        if (index >= stage_.outputs.size()) return fail("FusedLayers: a stage has too few outputs");
        const size_t value = stage_.outputs[index];
        Tensor made = like;
        made.type = type, made.elements = 1;
        for (size_t axis = 0; axis < like.axes; ++axis) made.elements *= static_cast<size_t>(like.shape[axis]);
        if (value < layers_->first_slot()) {
            ort::Value* output = nullptr;
            RETURN_IF_FAILED(ort::output(api, context_, value - layers_->num_inputs, like.shape, like.axes, &output));
            RETURN_IF_FAILED(ort::tensor_data(api, output, &made.data));
        } else {
            const size_t bytes = made.elements * (type == ort::Type::kUint8 ? 1 : sizeof(float));
            made.data = layers_->slots[value - layers_->first_slot()].hold(bytes);
            if (!made.data) return fail_to_run("FusedLayers: no memory");
        }
        layers_->values[value] = made;
        *data = made.data;
        return nullptr;
    }
    Status* count_outputs(size_t* count) override {
        *count = stage_.outputs.size();
        return nullptr;
    }
    specrun::Threads threads() override { return threads_; }

 private:
    Layers* layers_;
    const Stage& stage_;
    ort::KernelContext* context_;
    specrun::Threads threads_;
};

Status* wrong(const void* const* api) { return ort::fail(api, "FusedLayers: attributes out of range"); }

// Make a stage of the kind that ``name`` is. arguments: where those of the stage begin; then where they end.
Status* make_stage(const ort::Attributes& attributes, const std::string& name, size_t num_inputs, const int64_t** arguments,
                   const int64_t* end, std::vector<Stage>* stages) {
    const auto values = [&](int64_t least, int64_t most, std::vector<size_t>* result) {
        if (*arguments == end || **arguments < 0 || **arguments >= end - *arguments) return false;
        const int64_t* const last = *arguments + **arguments;
        while (*arguments != last) {
            const int64_t value = *++*arguments;
            if (value < least || value >= most) return false;
            result->push_back(value == kLeftOut ? Stage::kNone : static_cast<size_t>(value));
        }
        ++*arguments;
        return true;
    };
    for (const auto& make : kOperators) {
        const ort::StageKind kind = make().stage;
        if (name != kind.name) continue;
        Stage stage{kind, {nullptr, kind.destroy}, {}, {}};
        const int64_t most = static_cast<int64_t>(num_inputs) + kMostSlots;
        if (!values(kLeftOut, most, &stage.inputs) || stage.inputs.size() > kind.inputs) return wrong(attributes.api);
        if (!values(static_cast<int64_t>(num_inputs), most, &stage.outputs)) return wrong(attributes.api);
        // An output that grows must not take away the memory of another argument.
        for (auto output = stage.outputs.begin(); output != stage.outputs.end(); ++output) {
            const bool twice = std::find(output + 1, stage.outputs.end(), *output) != stage.outputs.end();
            if (twice || std::find(stage.inputs.begin(), stage.inputs.end(), *output) != stage.inputs.end()) {
                return wrong(attributes.api);
            }
        }
        void* kernel = nullptr;
        RETURN_IF_FAILED(kind.create({attributes.api, attributes.info, std::to_string(stages->size()) + "."}, &kernel));
        stage.kernel.reset(kernel);
        stages->push_back(std::move(stage));
        return nullptr;
    }
    return ort::fail(attributes.api, "FusedLayers: a stage of an unknown operator");
}

// Constants are described once; the others in each call.
Status* find_variables(const ort::KernelInfo* info, Layers* layers) {
    for (size_t index = 0; index < layers->num_inputs; ++index) {
        int is_constant = 0;
        const ort::Value* value = nullptr;
        RETURN_IF_FAILED(ort::constant_input(layers->api, info, index, &is_constant, &value));
        if (is_constant && value) {
            RETURN_IF_FAILED(ort::describe(layers->api, value, &layers->values[index]));
        } else {
            layers->variables.push_back(index);
        }
    }
    return nullptr;
}

Status* read(const ort::Attributes& attributes, Layers* layers) {
    const void* const* api = attributes.api;
    RETURN_IF_FAILED(ort::count_inputs_of_node(api, attributes.info, &layers->num_inputs));
    RETURN_IF_FAILED(ort::count_outputs_of_node(api, attributes.info, &layers->num_outputs));
    size_t size = 0, count = 0;
    RETURN_IF_FAILED(ort::string_attribute(api, attributes.info, "stages", nullptr, &size));
    std::string names(size, '\0');
    RETURN_IF_FAILED(ort::string_attribute(api, attributes.info, "stages", names.data(), &size));
    names.resize(size ? size - 1 : 0);  // Without the 0 at the end.
    RETURN_IF_FAILED(attributes.read("arguments", nullptr, &count));
    std::vector<int64_t> arguments(count);
    RETURN_IF_FAILED(attributes.read("arguments", arguments.data(), &count));
    const int64_t *next = arguments.data(), *const end = next + count;
    for (size_t begin = 0; begin < names.size();) {
        const size_t space = std::min(names.find(' ', begin), names.size());
        const std::string name = names.substr(begin, space - begin);
        RETURN_IF_FAILED(make_stage(attributes, name, layers->num_inputs, &next, end, &layers->stages));
        begin = space + 1;
    }
    // What a stage reads was written before, in the same call; every output is written once.
    std::vector<int> written(layers->num_inputs, 1);
    const auto times = [&](size_t value) -> int& {
        if (value >= written.size()) written.resize(value + 1);
        return written[value];
    };
    times(layers->first_slot() - 1);
    for (const Stage& stage : layers->stages) {
        for (const size_t value : stage.inputs) {
            if (value != Stage::kNone && !times(value)) return wrong(api);
        }
        for (const size_t value : stage.outputs) ++times(value);
    }
    const auto outputs = written.begin() + static_cast<std::ptrdiff_t>(layers->num_inputs);
    const auto end_of_outputs = outputs + static_cast<std::ptrdiff_t>(layers->num_outputs);
    if (next != end || std::count(outputs, end_of_outputs, 1) != end_of_outputs - outputs) return wrong(api);
    const size_t num_values = written.size();
    layers->values.resize(num_values);
    layers->slots.resize(num_values - layers->first_slot());
    return find_variables(attributes.info, layers);
}

Status* create(const ort::CustomOp*, const void* const* api, const ort::KernelInfo* info, void** created) {
    try {
        auto layers = std::make_unique<Layers>();
        layers->api = api;
        RETURN_IF_FAILED(read({api, info, {}}, layers.get()));
        *created = layers.release();
        return nullptr;
    } catch (const std::bad_alloc&) {
        return ort::create_status(api, ort::kRuntimeException, "FusedLayers: no memory");
    }
}

Status* compute(void* pointer, ort::KernelContext* context) {
    Layers& layers = *static_cast<Layers*>(pointer);
    const std::lock_guard<std::mutex> lock(layers.in_use);
    for (const size_t index : layers.variables) {
        const ort::Value* value = nullptr;
        layers.values[index] = {};
        RETURN_IF_FAILED(ort::input(layers.api, context, index, &value));
        if (value) RETURN_IF_FAILED(ort::describe(layers.api, value, &layers.values[index]));
    }
    ort::Pool pool{layers.api, context};
    for (const Stage& stage : layers.stages) {
        StageCall call(&layers, stage, context, pool.threads());
        RETURN_IF_FAILED(stage.kind.run(stage.kernel.get(), call));
    }
    return nullptr;
}

}  // namespace

ort::CustomOp fused_layers() {
    using ort::CustomOp;
    CustomOp op{};
    op.version = ort::kVersion;
    op.name = [](const CustomOp*) { return "FusedLayers"; };
    op.provider = [](const CustomOp*) -> const char* { return nullptr; };
    op.count_inputs = op.count_outputs = [](const CustomOp*) -> size_t { return 1; };
    op.input_type = op.output_type = [](const CustomOp*, size_t) { return ort::Type::kAny; };
    op.input_presence = op.output_presence = [](const CustomOp*, size_t) { return ort::Presence::kVariadic; };
    op.input_memory = [](const CustomOp*, size_t) { return 0; };
    op.fewest_variadic_inputs = op.fewest_variadic_outputs = [](const CustomOp*) { return 1; };
    op.variadic_inputs_are_alike = op.variadic_outputs_are_alike = [](const CustomOp*) { return 0; };
    op.create_kernel_or_fail = create;
    op.compute_or_fail = compute;
    op.destroy_kernel = [](void* layers) { delete static_cast<Layers*>(layers); };
    op.first_version = [](const CustomOp*) { return 1; };
    op.last_version = [](const CustomOp*) { return 0x7fffffff; };
    return op;
}
