// CachedAttention and PackedCachedAttention as ONNX Runtime sees them. The latter's cache has bytes (packed_heads.h).
//
// Inputs: q [B, S, Hq, D], k [B, S, Hkv, D] and v [B, S, Hkv, Dv], in any division into axes; past keys and values
// [B, Hkv, P, D or Dv], all float, or packed [B, Hkv, P, bytes of a head] uint8; write_indices [B] int64. These may be
// left out: k and v, where the past ones have them already (q has its first two axes then); cos and sin float, of tokens
// [B or 1, S, R / 2], or of positions [positions, R / 2]; sinks [Hq] float, scores that join the softmax and whose weights
// are dropped.
// Outputs: y [B, S, Hq, Dv], or as q is divided; where there are k and v, present keys and values, which are best the
// memory of the past ones.
// Attributes: rotated (R), interleaved, window (0: none), scale; if they are there, chunk (0: none), first_key (keys before
// it are seen by the queries before it alone), as_queries (1: y as q is divided) and softcap (scores become softcap * tanh(score / softcap)); and value_bits, where the cache is packed: 16,
// or 8 or 4 beside keys in 8.
#include <algorithm>
#include <cstring>

#include "cached_attention.h"
#include "operator.h"
#include "operators.h"

namespace {

using ort::Status;
using ort::Tensor;

struct Settings {
    int64_t rotated = 0, interleaved = 0, window = 0, chunk = 0, first_key = 0, as_queries = 0, value_bits = 32;
    float scale = 0, softcap = 0;
};

enum Input : size_t { kQ, kK, kV, kPastKeys, kPastValues, kWriteIndices, kCos, kSin, kSinks, kAllInputs };
enum Output : size_t { kY, kKeys, kValues, kAllOutputs };

// Sizes that agree with each other, and positions within the cache.
bool are_right(const Settings& settings, const Tensor (&inputs)[kAllInputs], specrun::CachedAttention* all) {
    const Tensor &q = inputs[kQ], &k = inputs[kK], &past = inputs[kPastKeys], &indices = inputs[kWriteIndices];
    const auto is = [](const Tensor& tensor, int64_t elements) {
        return tensor.elements == static_cast<size_t>(elements);
    };
    const Tensor &v = inputs[kV], &past_values = inputs[kPastValues];
    if (past.axes != 4 || past_values.axes != 4 || past.shape[3] <= 0 || past_values.shape[3] <= 0) return false;
    if (!std::equal(past_values.shape, past_values.shape + 3, past.shape)) return false;
    all->batch = past.shape[0], all->kv_heads = past.shape[1], all->positions = past.shape[2];
    all->value_bits = settings.value_bits, all->width = past.shape[3], all->value_width = past_values.shape[3];
    if (all->is_packed()) {
        using specrun::kBlock;
        all->width = all->value_width = past.shape[3] / specrun::packed_bytes(kBlock, all->is_coded() ? 8 : 16) * kBlock;
        if (all->key_bytes() != past.shape[3] || all->width > specrun::kMostWidth) return false;
        if (all->value_bytes() != past_values.shape[3]) return false;
    }
    if (settings.rotated > all->width || (settings.as_queries && all->value_width != all->width)) return false;
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
    const int64_t half = settings.rotated / 2, angles = all->tokens * half;
    all->angles = cos.axes == 2 ? cos.shape[0] : 0;
    if (settings.rotated && (all->angles ? cos.shape[1] != half : !is(cos, angles) && !is(cos, all->batch * angles))) {
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
struct Kernel {
    static constexpr const char* kName = kPacked ? "PackedCachedAttention" : "CachedAttention";
    static constexpr size_t kInputs = kAllInputs, kOutputs = kAllOutputs;
    static ort::Type type_of(size_t index) {
        if (index == kWriteIndices) return ort::Type::kInt64;
        return kPacked && (index == kPastKeys || index == kPastValues) ? ort::Type::kUint8 : ort::Type::kFloat;
    }
    static bool is_required(size_t index) {
        return index == kQ || index == kPastKeys || index == kPastValues || index == kWriteIndices;
    }

    Settings settings;

    Status* read(const ort::Attributes& attributes) {
        RETURN_IF_FAILED(attributes.read("rotated", &settings.rotated));
        RETURN_IF_FAILED(attributes.read("interleaved", &settings.interleaved));
        RETURN_IF_FAILED(attributes.read("window", &settings.window));
        RETURN_IF_FAILED(attributes.read("scale", &settings.scale));
        attributes.read_if_given("chunk", &settings.chunk);
        attributes.read_if_given("first_key", &settings.first_key);
        attributes.read_if_given("as_queries", &settings.as_queries);
        attributes.read_if_given("softcap", &settings.softcap);
        if (kPacked) RETURN_IF_FAILED(attributes.read("value_bits", &settings.value_bits));
        const int64_t bits = settings.value_bits;
        const bool has_bits = !kPacked || bits == 16 || bits == 8 || bits == 4;
        const bool is_odd = settings.rotated < 0 || settings.rotated % 2 || settings.window < 0 || settings.chunk < 0;
        const int limits = (settings.window != 0) + (settings.chunk != 0) + (settings.first_key != 0);
        if (!has_bits || is_odd || settings.first_key < 0 || limits > 1 || !(settings.softcap >= 0)) {
            return attributes.fail("CachedAttention: attributes out of range");
        }
        return nullptr;
    }

    Status* run(ort::Call& call) const {
        Tensor inputs[kInputs];
        RETURN_IF_FAILED(call.read_all<Kernel>(inputs));
        specrun::CachedAttention all{};
        if (!are_right(settings, inputs, &all)) {
            return call.fail("CachedAttention: sizes that do not fit, or positions beyond the cache");
        }
        const Tensor heads{nullptr, ort::Type::kFloat, 0, 4, {all.batch, all.tokens, all.q_heads, all.value_width}};
        RETURN_IF_FAILED(call.make_output(kY, settings.as_queries ? inputs[kQ] : heads, &all.y));
        all.keys = static_cast<uint8_t*>(inputs[kPastKeys].data);
        all.values = static_cast<uint8_t*>(inputs[kPastValues].data);
        if (inputs[kK].data) {
            RETURN_IF_FAILED(continue_past(call, kKeys, inputs[kPastKeys], &all.keys));
            RETURN_IF_FAILED(continue_past(call, kValues, inputs[kPastValues], &all.values));
        }
        const auto floats = [&](Input name) { return static_cast<const float*>(inputs[name].data); };
        all.q = floats(kQ), all.k = floats(kK), all.v = floats(kV), all.cos = floats(kCos), all.sin = floats(kSin);
        all.first = static_cast<const int64_t*>(inputs[kWriteIndices].data);
        all.rotated = settings.rotated, all.interleaved = settings.interleaved;
        all.window = settings.window, all.chunk = settings.chunk, all.first_key = settings.first_key;
        all.scale = settings.scale, all.softcap = settings.softcap;
        return specrun::attend(all, call.threads()) ? nullptr : call.fail_to_run("CachedAttention: no threads");
    }

    // An output that begins as the past, whose memory it may be.
    static Status* continue_past(ort::Call& call, size_t output, const Tensor& past, uint8_t** present) {
        void* data = nullptr;
        RETURN_IF_FAILED(call.make_output(output, past, type_of(kPastKeys), &data));
        if (past.data != data) std::memcpy(data, past.data, past.elements * (kPacked ? 1 : sizeof(float)));
        *present = static_cast<uint8_t*>(data);
        return nullptr;
    }
};

template <bool kPacked>
ort::Operator operator_of() {
    ort::CustomOp node = ort::node_of<Kernel<kPacked>>();
    node.output_type = [](const ort::CustomOp*, size_t index) {
        return kPacked && index != kY ? ort::Type::kUint8 : ort::Type::kFloat;
    };
    node.output_presence = [](const ort::CustomOp*, size_t index) {
        return index == kY ? ort::Presence::kRequired : ort::Presence::kOptional;
    };
    return {node, ort::stage_kind<Kernel<kPacked>>()};
}

}  // namespace

ort::Operator cached_attention() { return operator_of<false>(); }
ort::Operator packed_cached_attention() { return operator_of<true>(); }
