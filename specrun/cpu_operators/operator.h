// What the operators share: reading a call's tensors, errors, threads.
#pragma once

#include <cstddef>

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

// All inputs that are given, which have these types. Who says kAny looks at the type himself.
template <size_t kInputs>
Status* read_all(const void* const* api, const KernelContext* context, const Type (&types)[kInputs],
                 Tensor (&tensors)[kInputs]) {
    size_t given = 0;
    RETURN_IF_FAILED(count_inputs(api, context, &given));
    for (size_t index = 0; index < given && index < kInputs; ++index) {
        const Value* value = nullptr;
        RETURN_IF_FAILED(input(api, context, index, &value));
        if (!value) continue;
        RETURN_IF_FAILED(describe(api, value, &tensors[index]));
        if (types[index] != Type::kAny && types[index] != tensors[index].type) {
            return fail(api, "a tensor has another element type than the operator takes");
        }
    }
    return nullptr;
}

template <typename Number>
Status* make_output(const void* const* api, KernelContext* context, size_t index, const Tensor& like, Number** data) {
    Value* value = nullptr;
    void* address = nullptr;
    RETURN_IF_FAILED(output(api, context, index, like.shape, like.axes, &value));
    RETURN_IF_FAILED(tensor_data(api, value, &address));
    *data = static_cast<Number*>(address);
    return nullptr;
}

// What is the same for all operators, whose kernels are of this type. Their outputs are floats.
template <typename Kernel>
CustomOp usual_op() {
    CustomOp op{};
    op.version = kVersion;
    op.provider = [](const CustomOp*) -> const char* { return nullptr; };  // The CPU.
    op.output_type = [](const CustomOp*, size_t) { return Type::kFloat; };
    op.input_memory = [](const CustomOp*, size_t) { return 0; };
    op.destroy_kernel = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    op.first_version = [](const CustomOp*) { return 1; };
    op.last_version = [](const CustomOp*) { return 0x7fffffff; };
    return op;
}

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

}  // namespace ort
