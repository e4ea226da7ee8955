// CachedAttention and PackedCachedAttention as ONNX Runtime sees them. The latter's cache has codes (packed_heads.h).
//
// Inputs: q [B, S, Hq, D], k [B, S, Hkv, D] and v [B, S, Hkv, Dv], in any division into axes; past keys and values
// [B, Hkv, P, D or Dv], all float, or packed [B, Hkv, P, bytes of a head] uint8; write_indices [B] int64. These may be
// left out: k and v, where the past ones have them already (q has its first two axes then); cos and sin float, of tokens
// [B or 1, S, R / 2], or of positions [positions, R / 2]; sinks [Hq] float, scores that join the softmax and whose weights
// are dropped.
// Outputs: y [B, S, Hq, Dv], or as q is divided; where there are k and v, present keys and values, which are best the
// memory of the past ones.
// Attributes: rotated (R), interleaved, window (0: none), scale; if they are there, chunk (0: none), as_queries (1: y as q
// is divided) and softcap (scores become softcap * tanh(score / softcap)); and value_bits (8 or 4), where the cache is
// packed: keys have 8.
#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>
#include <utility>

#include "cached_attention.h"
#include "operator.h"
#include "operators.h"

namespace {

using ort::Status;
using ort::Tensor;

struct Kernel {
    const void* const* api;
    int64_t rotated, interleaved, window, chunk, as_queries, value_bits;
    float scale, softcap;
};

enum Input : size_t { kQ, kK, kV, kPastKeys, kPastValues, kWriteIndices, kCos, kSin, kSinks, kInputs };
enum Output : size_t { kY, kKeys, kValues, kOutputs };

// The type of an input. kPacked: of PackedCachedAttention.
template <bool kPacked>
ort::Type type_of(size_t input) {
    if (input == kWriteIndices) return ort::Type::kInt64;
    return kPacked && (input == kPastKeys || input == kPastValues) ? ort::Type::kUint8 : ort::Type::kFloat;
}

template <bool kPacked>
Status* create(const ort::CustomOp*, const void* const* api, const ort::KernelInfo* info, void** created) {
    auto kernel = std::unique_ptr<Kernel>(new (std::nothrow) Kernel{});
    if (!kernel) return ort::create_status(api, ort::kRuntimeException, "CachedAttention: no memory");
    kernel->api = api;
    RETURN_IF_FAILED(ort::integer_attribute(api, info, "rotated", &kernel->rotated));
    RETURN_IF_FAILED(ort::integer_attribute(api, info, "interleaved", &kernel->interleaved));
    RETURN_IF_FAILED(ort::integer_attribute(api, info, "window", &kernel->window));
    RETURN_IF_FAILED(ort::float_attribute(api, info, "scale", &kernel->scale));
    ort::ignore_failure(api, ort::integer_attribute(api, info, "chunk", &kernel->chunk));
    ort::ignore_failure(api, ort::integer_attribute(api, info, "as_queries", &kernel->as_queries));
    ort::ignore_failure(api, ort::float_attribute(api, info, "softcap", &kernel->softcap));
    kernel->value_bits = 32;
    if (kPacked) RETURN_IF_FAILED(ort::integer_attribute(api, info, "value_bits", &kernel->value_bits));
    const bool has_bits = !kPacked || kernel->value_bits == 8 || kernel->value_bits == 4;
    const bool is_odd = kernel->rotated < 0 || kernel->rotated % 2 || kernel->window < 0 || kernel->chunk < 0;
    if (!has_bits || is_odd || (kernel->window && kernel->chunk) || !(kernel->softcap >= 0)) {
        return ort::fail(api, "CachedAttention: attributes out of range");
    }
    *created = kernel.release();
    return nullptr;
}

// Sizes that agree with each other, and positions within the cache.
bool are_right(const Kernel& kernel, const Tensor (&inputs)[kInputs], specrun::CachedAttention* all) {
    const Tensor &q = inputs[kQ], &k = inputs[kK], &past = inputs[kPastKeys], &indices = inputs[kWriteIndices];
    const auto is = [](const Tensor& tensor, int64_t elements) {
        return tensor.elements == static_cast<size_t>(elements);
    };
    const Tensor &v = inputs[kV], &past_values = inputs[kPastValues];
    if (past.axes != 4 || past_values.axes != 4 || past.shape[3] <= 0 || past_values.shape[3] <= 0) return false;
    if (!std::equal(past_values.shape, past_values.shape + 3, past.shape)) return false;
    all->batch = past.shape[0], all->kv_heads = past.shape[1], all->positions = past.shape[2];
    all->value_bits = kernel.value_bits, all->width = past.shape[3], all->value_width = past_values.shape[3];
    if (all->is_packed()) {
        using specrun::kBlock;
        all->width = all->value_width = past.shape[3] / specrun::packed_bytes(kBlock, 8) * kBlock;
        if (all->key_bytes() != past.shape[3] || all->width > specrun::kMostWidth) return false;
        if (all->value_bytes() != past_values.shape[3]) return false;
    }
    if (kernel.rotated > all->width || (kernel.as_queries && all->value_width != all->width)) return false;
    const int64_t each = all->batch * all->kv_heads * all->width, queries = static_cast<int64_t>(q.elements);
    if (!each || !k.data != !v.data || (k.data && k.elements % each)) return false;
    all->tokens = k.data ? static_cast<int64_t>(k.elements) / each : q.axes >= 3 && q.shape[0] == all->batch ? q.shape[1] : 0;
    if (!all->tokens || !queries || queries % each || queries / each % all->tokens) return false;
    all->q_heads = queries / each / all->tokens * all->kv_heads;
    const Tensor& sinks = inputs[kSinks];
    if (sinks.elements && !is(sinks, all->q_heads)) return false;
    all->sinks = sinks.elements ? static_cast<const float*>(sinks.data) : nullptr;
    if (!is(indices, all->batch)) return false;
    if (v.data && !is(v, static_cast<int64_t>(k.elements) / all->width * all->value_width)) return false;
    const Tensor& cos = inputs[kCos];
    const int64_t half = kernel.rotated / 2, angles = all->tokens * half;
    all->angles = cos.axes == 2 ? cos.shape[0] : 0;
    if (kernel.rotated && (all->angles ? cos.shape[1] != half : !is(cos, angles) && !is(cos, all->batch * angles))) {
        return false;
    }
    if (cos.elements != inputs[kSin].elements) return false;
    all->angles_by_row = all->batch > 1 && is(cos, all->batch * angles);
    const int64_t* first = static_cast<const int64_t*>(indices.data);
    for (int64_t row = 0; row < all->batch; ++row) {
        if (first[row] < 0 || first[row] > all->positions - all->tokens) return false;
    }
    return true;
}

template <bool kPacked>
Status* compute(void* pointer, ort::KernelContext* context) {
    const Kernel& kernel = *static_cast<const Kernel*>(pointer);
    Tensor inputs[kInputs];
    ort::Type types[kInputs];
    for (size_t index = 0; index < kInputs; ++index) types[index] = type_of<kPacked>(index);
    RETURN_IF_FAILED(ort::read_all(kernel.api, context, types, inputs));
    specrun::CachedAttention all{};
    if (!are_right(kernel, inputs, &all)) {
        return ort::fail(kernel.api, "CachedAttention: sizes that do not fit, or positions beyond the cache");
    }
    const Tensor heads{nullptr, ort::Type::kFloat, 0, 4, {all.batch, all.tokens, all.q_heads, all.value_width}};
    RETURN_IF_FAILED(ort::make_output(kernel.api, context, kY, kernel.as_queries ? inputs[kQ] : heads, &all.y));
    all.keys = static_cast<uint8_t*>(inputs[kPastKeys].data), all.values = static_cast<uint8_t*>(inputs[kPastValues].data);
    if (inputs[kK].data) {
        RETURN_IF_FAILED(ort::make_output(kernel.api, context, kKeys, inputs[kPastKeys], &all.keys));
        RETURN_IF_FAILED(ort::make_output(kernel.api, context, kValues, inputs[kPastValues], &all.values));
        for (const auto& [past, present] : {std::pair{kPastKeys, all.keys}, std::pair{kPastValues, all.values}}) {
            const Tensor& from = inputs[past];
            if (from.data != present) std::memcpy(present, from.data, from.elements * (kPacked ? 1 : sizeof(float)));
        }
    }
    const auto floats = [&](Input name) { return static_cast<const float*>(inputs[name].data); };
    all.q = floats(kQ), all.k = floats(kK), all.v = floats(kV), all.cos = floats(kCos), all.sin = floats(kSin);
    all.first = static_cast<const int64_t*>(inputs[kWriteIndices].data);
    all.rotated = kernel.rotated, all.interleaved = kernel.interleaved;
    all.window = kernel.window, all.chunk = kernel.chunk, all.scale = kernel.scale, all.softcap = kernel.softcap;
    ort::Pool pool{kernel.api, context};
    if (!specrun::attend(all, pool.threads())) {
        return ort::create_status(kernel.api, ort::kRuntimeException, "CachedAttention: no threads");
    }
    return nullptr;
}

template <bool kPacked>
ort::CustomOp operator_of() {
    using ort::CustomOp;
    CustomOp op = ort::usual_op<Kernel>();
    op.name = [](const CustomOp*) { return kPacked ? "PackedCachedAttention" : "CachedAttention"; };
    op.count_inputs = [](const CustomOp*) -> size_t { return kInputs; };
    op.count_outputs = [](const CustomOp*) -> size_t { return kOutputs; };
    op.input_type = [](const CustomOp*, size_t index) { return type_of<kPacked>(index); };
    op.output_type = [](const CustomOp*, size_t index) {
        return kPacked && index != kY ? ort::Type::kUint8 : ort::Type::kFloat;
    };
    op.input_presence = [](const CustomOp*, size_t index) {
        const bool may_be_left_out = index >= kCos || index == kK || index == kV;
        return may_be_left_out ? ort::Presence::kOptional : ort::Presence::kRequired;
    };
    op.output_presence = [](const CustomOp*, size_t index) {
        return index == kY ? ort::Presence::kRequired : ort::Presence::kOptional;
    };
    op.create_kernel_or_fail = create<kPacked>;
    op.compute_or_fail = compute<kPacked>;
    return op;
}

}  // namespace

ort::CustomOp cached_attention() { return operator_of<false>(); }
ort::CustomOp packed_cached_attention() { return operator_of<true>(); }
