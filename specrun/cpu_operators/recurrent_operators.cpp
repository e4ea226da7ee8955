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

#include "operator.h"
#include "operators.h"
#include "recurrent.h"

namespace {

using ort::Status;
using ort::Tensor;

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
Status* continue_past(ort::Call& call, size_t output, const Tensor& past, float** present) {
    RETURN_IF_FAILED(call.make_output(output, past, present));
    if (past.data != *present) std::memcpy(*present, past.data, past.elements * sizeof(float));
    return nullptr;
}

enum Input : size_t { kQ, kK, kV, kDecay, kState, kPastInputs, kWrite, kBeta = kWrite + kIndices, kAttentionInputs };

bool are_right(const Tensor (&inputs)[kAttentionInputs], specrun::RecurrentAttention* all) {
    const Tensor &q = inputs[kQ], &k = inputs[kK], &v = inputs[kV], &decay = inputs[kDecay], &beta = inputs[kBeta];
    const Tensor &state = inputs[kState], &kept = inputs[kPastInputs];
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

struct AttentionKernel {
    static constexpr const char* kName = "RecurrentAttention";
    static constexpr size_t kInputs = kAttentionInputs, kOutputs = 3;
    static ort::Type type_of(size_t index) {
        return index >= kWrite && index < kBeta ? ort::Type::kInt64 : ort::Type::kFloat;
    }
    static bool is_required(size_t index) { return index != kBeta; }

    float scale = 1.0f;

    Status* read(const ort::Attributes& attributes) {
        attributes.read_if_given("scale", &scale);
        return nullptr;
    }

    Status* run(ort::Call& call) const {
        Tensor inputs[kInputs];
        RETURN_IF_FAILED(call.read_all<AttentionKernel>(inputs));
        specrun::RecurrentAttention all{};
        if (!are_right(inputs, &all)) {
            return call.fail("RecurrentAttention: sizes that do not fit, or tokens that are not kept");
        }
        RETURN_IF_FAILED(call.make_output(0, inputs[kV], &all.y));
        RETURN_IF_FAILED(continue_past(call, 1, inputs[kState], &all.states));
        RETURN_IF_FAILED(continue_past(call, 2, inputs[kPastInputs], &all.inputs));
        const auto floats = [&](Input name) { return static_cast<const float*>(inputs[name].data); };
        all.q = floats(kQ), all.k = floats(kK), all.v = floats(kV), all.decay = floats(kDecay), all.scale = scale;
        return specrun::attend(all, call.threads()) ? nullptr : call.fail_to_run("RecurrentAttention: no threads");
    }
};

enum ConvolutionInput : size_t { kX, kWeight, kPast, kFirstIndex, kConvolutionInputs = kFirstIndex + kIndices };

struct ConvolutionKernel {
    static constexpr const char* kName = "CausalConvolution";
    static constexpr size_t kInputs = kConvolutionInputs, kOutputs = 2;
    static ort::Type type_of(size_t index) { return index >= kFirstIndex ? ort::Type::kInt64 : ort::Type::kFloat; }
    static bool is_required(size_t) { return true; }

    Status* read(const ort::Attributes&) { return nullptr; }

    Status* run(ort::Call& call) const {
        Tensor inputs[kInputs];
        RETURN_IF_FAILED(call.read_all<ConvolutionKernel>(inputs));
        const Tensor &x = inputs[kX], &weight = inputs[kWeight], &past = inputs[kPast];
        specrun::CausalConvolution all{};
        bool right = x.axes == 3 && weight.axes == 2 && past.axes == 3 && weight.shape[0] > 0;
        if (right) {
            all.channels = x.shape[2], all.kernel = weight.shape[0];
            right = weight.shape[1] == all.channels && past.shape[2] == all.channels && past.shape[0] == x.shape[0];
            right = right && read_progress(&inputs[kFirstIndex], x.shape[0], x.shape[1], past.shape[1] - all.kernel + 1,
                                           &all.progress);
        }
        if (!right) return call.fail("CausalConvolution: sizes that do not fit, or tokens that are not kept");
        RETURN_IF_FAILED(call.make_output(0, x, &all.y));
        RETURN_IF_FAILED(continue_past(call, 1, past, &all.inputs));
        all.x = static_cast<const float*>(x.data), all.weight = static_cast<const float*>(weight.data);
        return specrun::convolve(all, call.threads()) ? nullptr : call.fail_to_run("CausalConvolution: no threads");
    }
};

}  // namespace

ort::Operator recurrent_attention() { return ort::operator_of<AttentionKernel>(); }
ort::Operator causal_convolution() { return ort::operator_of<ConvolutionKernel>(); }
