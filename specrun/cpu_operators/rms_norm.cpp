// RMSNorm: norms that no product takes in: of heads, and of what is added to the residual stream.
//
// x float, in any division into axes; weight [W] float, where each W numbers of x are normalized by themselves; residual
// float, of x's shape, which may be left out -> y, of x's shape: x / sqrt(mean(x * x) + epsilon) * weight + residual.
// Attribute: epsilon.
#include "activations.h"
#include "operators.h"

namespace {

using ort::Status;
using ort::Tensor;

constexpr size_t kFewNumbers = 1 << 14;  // Normalized sooner than another thread is told about it.

struct Norm {
    specrun::Activations activations;
    const float* residual;
    float* y;
};

void normalize(void* item, size_t number) {
    const Norm& norm = *static_cast<const Norm*>(item);
    const int64_t size = norm.activations.size, row = static_cast<int64_t>(number);
    float* y = norm.y + row * size;
    specrun::make_row(norm.activations, row, y);
    if (!norm.residual) return;
    const float* residual = norm.residual + row * size;
    for (int64_t i = 0; i < size; ++i) y[i] += residual[i];
}

struct Kernel {
    static constexpr const char* kName = "RMSNorm";
    static constexpr size_t kInputs = 3, kOutputs = 1;
    static ort::Type type_of(size_t) { return ort::Type::kFloat; }
    static bool is_required(size_t index) { return index < 2; }

    float epsilon = 0.0f;

    Status* read(const ort::Attributes& attributes) { return attributes.read("epsilon", &epsilon); }

    Status* run(ort::Call& call) const {
        Tensor inputs[kInputs];
        RETURN_IF_FAILED(call.read_all<Kernel>(inputs));
        const Tensor &x = inputs[0], &weight = inputs[1], &residual = inputs[2];
        const size_t size = weight.elements;
        if (!size || x.elements % size || (residual.data && residual.elements != x.elements)) {
            return call.fail("RMSNorm: sizes that do not fit");
        }
        float* y = nullptr;
        RETURN_IF_FAILED(call.make_output(0, x, &y));
        Norm norm{{specrun::Prologue::kNormalized, static_cast<const float*>(x.data),
                   static_cast<const float*>(weight.data), static_cast<int64_t>(size), epsilon},
                  static_cast<const float*>(residual.data), y};
        const int64_t rows = static_cast<int64_t>(x.elements / size);
        const bool done = specrun::run(call.threads(), x.elements < kFewNumbers, normalize, rows, &norm);
        return done ? nullptr : call.fail_to_run("RMSNorm: no threads");
    }
};

}  // namespace

ort::Operator rms_norm() { return ort::operator_of<Kernel>(); }
