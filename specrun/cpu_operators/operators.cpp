// The operators as ONNX Runtime sees them: domain "specrun", found through RegisterCustomOps.
#include <memory>
#include <new>

#include "cached_attention_operator.h"
#include "ort_abi.h"
#include "quantized_matmul.h"

namespace {

using ort::Status;

Status* fail(const void* const* api, const char* message) {
    return ort::create_status(api, ort::kInvalidArgument, message);
}

#define RETURN_IF_FAILED(call) \
    if (Status* status = (call)) return status

// QuantizedMatMul: x [.., K] float, codes uint8, scales float, zeros int8 (may be left out) -> y [.., N] float, perhaps
// several, whose columns lie side by side in the weight. Attributes: bits, K, N of each output, block_size.
struct Kernel {
    const void* const* api;
    int64_t bits, inputs, block, strips;
    int64_t columns[specrun::kMostOutputs];
    size_t num_outputs;
};

struct TensorInfoGuard {
    const void* const* api;
    ort::TensorInfo* info = nullptr;
    ~TensorInfoGuard() {
        if (info) ort::release_tensor_info(api, info);
    }
};

struct Tensor {
    const void* data = nullptr;
    size_t elements = 0;
};

Status* read(const void* const* api, const ort::KernelContext* context, size_t index, Tensor* tensor) {
    const ort::Value* value = nullptr;
    RETURN_IF_FAILED(ort::input(api, context, index, &value));
    if (!value) return nullptr;
    TensorInfoGuard guard{api};
    void* data = nullptr;
    RETURN_IF_FAILED(ort::tensor_data(api, const_cast<ort::Value*>(value), &data));
    RETURN_IF_FAILED(ort::tensor_info(api, value, &guard.info));
    RETURN_IF_FAILED(ort::count_elements(api, guard.info, &tensor->elements));
    tensor->data = data;
    return nullptr;
}

// Outputs have the shape of the first input, but for its last size.
Status* make_outputs(const Kernel& kernel, ort::KernelContext* context, specrun::Product* product) {
    constexpr size_t kMostAxes = 8;
    const ort::Value* x = nullptr;
    RETURN_IF_FAILED(ort::input(kernel.api, context, 0, &x));
    TensorInfoGuard guard{kernel.api};
    size_t axes = 0;
    int64_t shape[kMostAxes];
    RETURN_IF_FAILED(ort::tensor_info(kernel.api, x, &guard.info));
    RETURN_IF_FAILED(ort::count_dimensions(kernel.api, guard.info, &axes));
    if (axes < 1 || axes > kMostAxes) return fail(kernel.api, "QuantizedMatMul: an input of 1 to 8 axes is expected");
    RETURN_IF_FAILED(ort::dimensions(kernel.api, guard.info, shape, axes));
    if (shape[axes - 1] != kernel.inputs) return fail(kernel.api, "QuantizedMatMul: the input has another width");
    size_t outputs = 0;
    RETURN_IF_FAILED(ort::count_outputs(kernel.api, context, &outputs));
    if (outputs != kernel.num_outputs) return fail(kernel.api, "QuantizedMatMul: N is not the size of every output");
    int64_t strip = 0;
    for (size_t i = 0; i < kernel.num_outputs; ++i) {
        shape[axes - 1] = kernel.columns[i];
        ort::Value* y = nullptr;
        void* place = nullptr;
        RETURN_IF_FAILED(ort::output(kernel.api, context, i, shape, axes, &y));
        RETURN_IF_FAILED(ort::tensor_data(kernel.api, y, &place));
        product->outputs[i] = {static_cast<float*>(place), kernel.columns[i], strip};
        strip += specrun::strips_of(kernel.columns[i]);
    }
    product->num_outputs = static_cast<int>(kernel.num_outputs);
    return nullptr;
}

struct Pool {
    const void* const* api;
    const ort::KernelContext* context;
};

bool run_on_threads(void* context, void (*work)(void*, size_t), size_t count, void* item) {
    const Pool& pool = *static_cast<const Pool*>(context);
    Status* status = ort::parallel_for(pool.api, pool.context, work, count, 0, item);
    if (status) ort::release_status(pool.api, status);
    return !status;
}

Status* compute(void* pointer, ort::KernelContext* context) {
    const Kernel& kernel = *static_cast<const Kernel*>(pointer);
    Tensor x, codes, scales, zeros;
    size_t inputs = 0;
    RETURN_IF_FAILED(ort::count_inputs(kernel.api, context, &inputs));
    RETURN_IF_FAILED(read(kernel.api, context, 0, &x));
    RETURN_IF_FAILED(read(kernel.api, context, 1, &codes));
    RETURN_IF_FAILED(read(kernel.api, context, 2, &scales));
    if (inputs > 3) RETURN_IF_FAILED(read(kernel.api, context, 3, &zeros));
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
        return fail(kernel.api, "QuantizedMatMul: codes, scales or zeros have another size than the attributes say");
    }
    RETURN_IF_FAILED(make_outputs(kernel, context, &product));
    product.x = static_cast<const float*>(x.data);
    product.rows = static_cast<int64_t>(x.elements) / kernel.inputs;
    if (product.rows == 0) return nullptr;
    Pool pool{kernel.api, context};
    if (!specrun::multiply(product, {run_on_threads, &pool})) {
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
        return fail(api, "QuantizedMatMul: attributes out of range");
    }
    *made = kernel.release();
    return nullptr;
}

ort::CustomOp quantized_matmul() {
    using ort::CustomOp;
    CustomOp op{};
    op.version = ort::kVersion;
    op.name = [](const CustomOp*) { return "QuantizedMatMul"; };
    op.provider = [](const CustomOp*) -> const char* { return nullptr; };  // The CPU.
    op.count_inputs = [](const CustomOp*) -> size_t { return 4; };
    op.count_outputs = [](const CustomOp*) -> size_t { return 1; };
    op.input_type = [](const CustomOp*, size_t index) {
        constexpr ort::Type kTypes[] = {ort::Type::kFloat, ort::Type::kUint8, ort::Type::kFloat, ort::Type::kInt8};
        return kTypes[index];
    };
    op.output_type = [](const CustomOp*, size_t) { return ort::Type::kFloat; };
    op.input_presence = [](const CustomOp*, size_t index) {
        return index == 3 ? ort::Presence::kOptional : ort::Presence::kRequired;
    };
    op.output_presence = [](const CustomOp*, size_t) { return ort::Presence::kVariadic; };
    op.fewest_variadic_outputs = [](const CustomOp*) { return 1; };
    op.variadic_outputs_are_alike = [](const CustomOp*) { return 1; };
    op.input_memory = [](const CustomOp*, size_t) { return 0; };
    op.create_kernel_or_fail = create;
    op.compute_or_fail = compute;
    op.destroy_kernel = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    op.first_version = [](const CustomOp*) { return 1; };
    op.last_version = [](const CustomOp*) { return 0x7fffffff; };
    return op;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) Status* RegisterCustomOps(
    ort::SessionOptions* options, const ort::ApiBase* base) {
    static const ort::CustomOp ops[] = {quantized_matmul(), cached_attention()};
    const void* const* api = base->get_api(ort::kVersion);
    ort::Domain* domain = nullptr;  // Lives as long as the process: sessions refer to it.
    RETURN_IF_FAILED(ort::create_domain(api, "specrun", &domain));
    for (const ort::CustomOp& op : ops) RETURN_IF_FAILED(ort::add_to_domain(api, domain, &op));
    return ort::add_domain(api, options, domain);
}

extern "C" __attribute__((visibility("default"))) int specrun_operators_version() { return 1; }
