// What the operators share: reading attributes and a call's tensors, errors, threads. An operator is a Kernel: it reads its
// attributes once, and runs in many calls. A call is of ONNX Runtime's node, or of a stage of FusedLayers.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <string>

#include "ort_abi.h"
#include "threads.h"

namespace ort {

#define RETURN_IF_FAILED(call) \
    if (ort::Status* status = (call)) return status

inline Status* fail(const void* const* api, const char* message) {
    return create_status(api, kInvalidArgument, message);
}

// Of an attribute that may be left out.
inline void ignore_failure(const void* const* api, Status* status) {
    if (status) release_status(api, status);
}

struct TensorInfoGuard {
    const void* const* api;
    TensorInfo* info = nullptr;
    ~TensorInfoGuard() {
        if (info) release_tensor_info(api, info);
    }
};

constexpr size_t kMostAxes = 8;

struct Tensor {
    void* data = nullptr;  // Null where an optional input is left out.
    Type type = Type::kAny;
    size_t elements = 0, axes = 0;
    int64_t shape[kMostAxes] = {};
};

inline Status* describe(const void* const* api, const Value* value, Tensor* tensor) {
    TensorInfoGuard guard{api};
    RETURN_IF_FAILED(tensor_data(api, const_cast<Value*>(value), &tensor->data));
    RETURN_IF_FAILED(tensor_info(api, value, &guard.info));
    RETURN_IF_FAILED(element_type(api, guard.info, &tensor->type));
    RETURN_IF_FAILED(count_elements(api, guard.info, &tensor->elements));
    RETURN_IF_FAILED(count_dimensions(api, guard.info, &tensor->axes));
    if (tensor->axes > kMostAxes) return fail(api, "a tensor of more than 8 axes");
    return dimensions(api, guard.info, tensor->shape, tensor->axes);
}

// The attributes of a node; or of a stage, whose names in the node begin with its number.
struct Attributes {
    const void* const* api;
    const KernelInfo* info;
    std::string prefix;

    Status* read(const char* name, int64_t* value) const {
        return integer_attribute(api, info, (prefix + name).c_str(), value);
    }
    Status* read(const char* name, float* value) const {
        return float_attribute(api, info, (prefix + name).c_str(), value);
    }
    Status* read(const char* name, int64_t* values, size_t* count) const {
        return integers_attribute(api, info, (prefix + name).c_str(), values, count);
    }
    // The value stays where the attribute is left out.
    template <typename Number>
    void read_if_given(const char* name, Number* value) const {
        ignore_failure(api, read(name, value));
    }
    Status* fail(const char* message) const { return ort::fail(api, message); }
};

// One call of an operator.
class Call {
 public:
    explicit Call(const void* const* table) : api(table) {}

    // Describe an input; nothing changes where it is left out.
    virtual Status* read(size_t index, Tensor* tensor) = 0;
    virtual Status* make_output(size_t index, const Tensor& like, Type type, void** data) = 0;
    virtual Status* count_outputs(size_t* count) = 0;
    virtual specrun::Threads threads() = 0;

    // All inputs that are given, which have the operator's types. Who says kAny looks at the type himself.
    template <typename Kernel>
    Status* read_all(Tensor (&tensors)[Kernel::kInputs]) {
        for (size_t index = 0; index < Kernel::kInputs; ++index) {
            RETURN_IF_FAILED(read(index, &tensors[index]));
            const Type type = tensors[index].type, expected = Kernel::type_of(index);
            if (type != Type::kAny && expected != Type::kAny && type != expected) {
                return fail("a tensor has another element type than the operator takes");
            }
            if (type == Type::kAny && Kernel::is_required(index)) return fail("an input is missing");
        }
        return nullptr;
    }
    Status* make_output(size_t index, const Tensor& like, float** data) {
        void* address = nullptr;
        RETURN_IF_FAILED(make_output(index, like, Type::kFloat, &address));
        *data = static_cast<float*>(address);
        return nullptr;
    }
    Status* fail(const char* message) const { return ort::fail(api, message); }
    Status* fail_to_run(const char* message) const { return create_status(api, kRuntimeException, message); }

 protected:
    ~Call() = default;
    const void* const* const api;
};

// The session's own threads.
struct Pool {
    const void* const* api;
    const KernelContext* context;

    specrun::Threads threads() {
        return {[](void* pool, void (*work)(void*, size_t), size_t count, void* item) {
                    const Pool& threads = *static_cast<const Pool*>(pool);
                    Status* status = parallel_for(threads.api, threads.context, work, count, 0, item);
                    if (status) release_status(threads.api, status);
                    return !status;
                },
                this};
    }
};

// A node's own call.
class NodeCall final : public Call {
 public:
    NodeCall(const void* const* table, KernelContext* context) : Call(table), context_(context), pool_{table, context} {}

    Status* read(size_t index, Tensor* tensor) override {
        const Value* value = nullptr;
        if (!given_) RETURN_IF_FAILED(count_inputs(api, context_, &given_));
        if (index >= given_) return nullptr;
        RETURN_IF_FAILED(input(api, context_, index, &value));
        return value ? describe(api, value, tensor) : nullptr;
    }
    Status* make_output(size_t index, const Tensor& like, Type, void** data) override {
        Value* value = nullptr;
        RETURN_IF_FAILED(output(api, context_, index, like.shape, like.axes, &value));
        return tensor_data(api, value, data);
    }
    Status* count_outputs(size_t* count) override { return ort::count_outputs(api, context_, count); }
    specrun::Threads threads() override { return pool_.threads(); }

 private:
    KernelContext* context_;
    Pool pool_;
    size_t given_ = 0;
};

// What FusedLayers knows of an operator.
struct StageKind {
    const char* name;
    size_t inputs;
    Status* (*create)(const Attributes&, void** kernel);
    Status* (*run)(void* kernel, Call&);
    void (*destroy)(void* kernel);
};

// Both of its faces.
struct Operator {
    CustomOp node;
    StageKind stage;
};

template <typename Kernel>
Status* create(const Attributes& attributes, void** created) {
    try {
        auto kernel = std::make_unique<Kernel>();
        RETURN_IF_FAILED(kernel->read(attributes));
        *created = kernel.release();
        return nullptr;
    } catch (const std::bad_alloc&) {
        return create_status(attributes.api, kRuntimeException, "no memory");
    }
}

template <typename Kernel>
StageKind stage_kind() {
    return {Kernel::kName, Kernel::kInputs, create<Kernel>,
            [](void* kernel, Call& call) { return static_cast<Kernel*>(kernel)->run(call); },
            [](void* kernel) { delete static_cast<Kernel*>(kernel); }};
}

// An operator as ONNX Runtime sees it, on the CPU. Its outputs are required and floats, if nothing else is set.
template <typename Kernel>
CustomOp node_of() {
    struct Node {
        const void* const* api;
        std::unique_ptr<Kernel> kernel;
    };
    CustomOp op{};
    op.version = kVersion;
    op.name = [](const CustomOp*) { return Kernel::kName; };
    op.provider = [](const CustomOp*) -> const char* { return nullptr; };
    op.count_inputs = [](const CustomOp*) -> size_t { return Kernel::kInputs; };
    op.count_outputs = [](const CustomOp*) -> size_t { return Kernel::kOutputs; };
    op.input_type = [](const CustomOp*, size_t index) { return Kernel::type_of(index); };
    op.output_type = [](const CustomOp*, size_t) { return Type::kFloat; };
    op.input_presence = [](const CustomOp*, size_t index) {
        return Kernel::is_required(index) ? Presence::kRequired : Presence::kOptional;
    };
    op.output_presence = [](const CustomOp*, size_t) { return Presence::kRequired; };
    op.input_memory = [](const CustomOp*, size_t) { return 0; };
    op.create_kernel_or_fail = [](const CustomOp*, const void* const* api, const KernelInfo* info,
                                  void** created) -> Status* {
        void* kernel = nullptr;
        RETURN_IF_FAILED(create<Kernel>({api, info, {}}, &kernel));
        *created = new (std::nothrow) Node{api, std::unique_ptr<Kernel>(static_cast<Kernel*>(kernel))};
        return *created ? nullptr : create_status(api, kRuntimeException, "no memory");
    };
    op.compute_or_fail = [](void* pointer, KernelContext* context) {
        const Node& node = *static_cast<const Node*>(pointer);
        NodeCall call(node.api, context);
        return node.kernel->run(call);
    };
    op.destroy_kernel = [](void* node) { delete static_cast<Node*>(node); };
    op.first_version = [](const CustomOp*) { return 1; };
    op.last_version = [](const CustomOp*) { return 0x7fffffff; };
    return op;
}

template <typename Kernel>
Operator operator_of() {
    return {node_of<Kernel>(), stage_kind<Kernel>()};
}

}  // namespace ort
