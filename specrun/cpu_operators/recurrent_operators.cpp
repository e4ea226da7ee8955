// RecurrentAttention and CausalConvolution as ONNX Runtime sees them.
//
// RecurrentAttention: q and k [B, S, heads * K], v [B, S, heads * V], decay [B, S, heads or heads * K], past state
// [B, heads, K, V], past inputs [B, R, W], all float; write, state and keep indices [B] int64; beta [B, S, heads] float,
// which may be left out. Outputs: y [B, S, heads * V]; present state and inputs, which are best the memory of the past.
// Attribute: scale.
//
// CausalConvolution: x [B, S, C], weight [K, C], past [B, K - 1 + R, C], all float; write, state and keep indices.
// Outputs: y [B, S, C]; present, which is best the memory of the past.
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>

#include "operator.h"
#include "operators.h"
#include "recurrent.h"

namespace {

using ort::Status;
using ort::Tensor;

struct Kernel {
    const void* const* api;
    float scale;
};

constexpr size_t kIndices = 3;  // write, state, keep

bool read_progress(const Tensor* indices, int64_t batch, int64_t tokens, int64_t slots, specrun::Progress* progress) {
    const int64_t* numbers[kIndices];
    for (size_t i = 0; i < kIndices; ++i) {
        if (indices[i].elements != static_cast<size_t>(batch)) return false;
        numbers[i] = static_cast<const int64_t*>(indices[i].data);
    }
    *progress = {batch, tokens, slots, numbers[0], numbers[1], numbers[2]};
    return slots >= 0 && progress->is_right();
}

// An output that begins as the past, whose memory it may be.
Status* continue_past(const void* const* api, ort::KernelContext* context, size_t output, const Tensor& past,
                      float** present) {
    RETURN_IF_FAILED(ort::make_output(api, context, output, past, present));
    if (past.data != *present) std::memcpy(*present, past.data, past.elements * sizeof(float));
    return nullptr;
}

Status* create(const ort::CustomOp*, const void* const* api, const ort::KernelInfo* info, void** created) {
    auto kernel = std::unique_ptr<Kernel>(new (std::nothrow) Kernel{});
    if (!kernel) return ort::create_status(api, ort::kRuntimeException, "recurrent operators: no memory");
    kernel->api = api;
    kernel->scale = 1.0f;
    ort::ignore_failure(api, ort::float_attribute(api, info, "scale", &kernel->scale));
    *created = kernel.release();
    return nullptr;
}

enum Input : size_t { kQ, kK, kV, kDecay, kState, kInputs, kWrite, kBeta = kWrite + kIndices, kAttentionInputs };

constexpr ort::Type kAttentionTypes[kAttentionInputs] = {
    ort::Type::kFloat, ort::Type::kFloat, ort::Type::kFloat, ort::Type::kFloat, ort::Type::kFloat,
    ort::Type::kFloat, ort::Type::kInt64, ort::Type::kInt64, ort::Type::kInt64, ort::Type::kFloat};

bool are_right(const Tensor (&inputs)[kAttentionInputs], specrun::RecurrentAttention* all) {
    const Tensor &q = inputs[kQ], &k = inputs[kK], &v = inputs[kV], &decay = inputs[kDecay], &beta = inputs[kBeta];
    const Tensor &state = inputs[kState], &kept = inputs[kInputs];
    for (const Tensor* tensor : {&q, &k, &v, &decay, &kept}) {
        if (tensor->axes != 3) return false;
    }
    if (state.axes != 4 || !state.elements) return false;
    const int64_t batch = state.shape[0], tokens = k.shape[1];
    all->heads = state.shape[1], all->key_width = state.shape[2], all->value_width = state.shape[3];
    const auto is = [&](const Tensor& tensor, int64_t width) {
        return tensor.elements == static_cast<size_t>(batch * tokens * all->heads * width);
    };
    if (!is(q, all->key_width) || !is(k, all->key_width) || !is(v, all->value_width)) return false;
    all->decay_width = is(decay, 1) ? 1 : all->key_width;
    if (!is(decay, all->decay_width) || (beta.data && !is(beta, 1))) return false;
    all->beta = static_cast<const float*>(beta.data);
    if (kept.shape[0] != batch || kept.shape[2] != all->input_width()) return false;
    return read_progress(&inputs[kWrite], batch, tokens, kept.shape[1], &all->progress);
}

Status* attend(void* pointer, ort::KernelContext* context) {
    const Kernel& kernel = *static_cast<const Kernel*>(pointer);
    Tensor inputs[kAttentionInputs];
    RETURN_IF_FAILED(ort::read_all(kernel.api, context, kAttentionTypes, inputs));
    specrun::RecurrentAttention all{};
    if (!are_right(inputs, &all)) {
        return ort::fail(kernel.api, "RecurrentAttention: sizes that do not fit, or tokens that are not kept");
    }
    RETURN_IF_FAILED(ort::make_output(kernel.api, context, 0, inputs[kV], &all.y));
    RETURN_IF_FAILED(continue_past(kernel.api, context, 1, inputs[kState], &all.states));
    RETURN_IF_FAILED(continue_past(kernel.api, context, 2, inputs[kInputs], &all.inputs));
    const auto floats = [&](Input name) { return static_cast<const float*>(inputs[name].data); };
    all.q = floats(kQ), all.k = floats(kK), all.v = floats(kV), all.decay = floats(kDecay), all.scale = kernel.scale;
    ort::Pool pool{kernel.api, context};
    if (specrun::attend(all, pool.threads())) return nullptr;
    return ort::create_status(kernel.api, ort::kRuntimeException, "RecurrentAttention: no threads");
}

enum ConvolutionInput : size_t { kX, kWeight, kPast, kFirstIndex, kConvolutionInputs = kFirstIndex + kIndices };

constexpr ort::Type kConvolutionTypes[kConvolutionInputs] = {ort::Type::kFloat, ort::Type::kFloat, ort::Type::kFloat,
                                                             ort::Type::kInt64, ort::Type::kInt64, ort::Type::kInt64};

Status* convolve(void* pointer, ort::KernelContext* context) {
    const Kernel& kernel = *static_cast<const Kernel*>(pointer);
    Tensor inputs[kConvolutionInputs];
    RETURN_IF_FAILED(ort::read_all(kernel.api, context, kConvolutionTypes, inputs));
    const Tensor &x = inputs[kX], &weight = inputs[kWeight], &past = inputs[kPast];
    specrun::CausalConvolution all{};
    bool right = x.axes == 3 && weight.axes == 2 && past.axes == 3 && weight.shape[0] > 0;
    if (right) {
        all.channels = x.shape[2], all.kernel = weight.shape[0];
        right = weight.shape[1] == all.channels && past.shape[2] == all.channels && past.shape[0] == x.shape[0];
        right = right && read_progress(&inputs[kFirstIndex], x.shape[0], x.shape[1], past.shape[1] - all.kernel + 1,
                                       &all.progress);
    }
    if (!right) return ort::fail(kernel.api, "CausalConvolution: sizes that do not fit, or tokens that are not kept");
    RETURN_IF_FAILED(ort::make_output(kernel.api, context, 0, x, &all.y));
    RETURN_IF_FAILED(continue_past(kernel.api, context, 1, past, &all.inputs));
    all.x = static_cast<const float*>(x.data), all.weight = static_cast<const float*>(weight.data);
    ort::Pool pool{kernel.api, context};
    if (specrun::convolve(all, pool.threads())) return nullptr;
    return ort::create_status(kernel.api, ort::kRuntimeException, "CausalConvolution: no threads");
}

}  // namespace

ort::CustomOp recurrent_attention() {
    using ort::CustomOp;
    CustomOp op = ort::usual_op<Kernel>();
    op.name = [](const CustomOp*) { return "RecurrentAttention"; };
    op.count_inputs = [](const CustomOp*) -> size_t { return kAttentionInputs; };
    op.count_outputs = [](const CustomOp*) -> size_t { return 3; };
    op.input_type = [](const CustomOp*, size_t index) { return kAttentionTypes[index]; };
    op.input_presence = [](const CustomOp*, size_t index) {
        return index == kBeta ? ort::Presence::kOptional : ort::Presence::kRequired;
    };
    op.output_presence = [](const CustomOp*, size_t) { return ort::Presence::kRequired; };
    op.create_kernel_or_fail = create;
    op.compute_or_fail = attend;
    return op;
}

ort::CustomOp causal_convolution() {
    using ort::CustomOp;
    CustomOp op = ort::usual_op<Kernel>();
    op.name = [](const CustomOp*) { return "CausalConvolution"; };
    op.count_inputs = [](const CustomOp*) -> size_t { return kConvolutionInputs; };
    op.count_outputs = [](const CustomOp*) -> size_t { return 2; };
    op.input_type = [](const CustomOp*, size_t index) { return kConvolutionTypes[index]; };
    op.input_presence = [](const CustomOp*, size_t) { return ort::Presence::kRequired; };
    op.output_presence = [](const CustomOp*, size_t) { return ort::Presence::kRequired; };
    op.create_kernel_or_fail = create;
    op.compute_or_fail = convolve;
    return op;
}
