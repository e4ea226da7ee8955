// The prologue of a product: activations are computed from x where they are needed, by no operator of their own.
#pragma once

#include <cstdint>

namespace specrun {

enum class Prologue : int64_t {
    kNone = 0,         // x
    kNormalized = 1,   // x / sqrt(mean(x * x) + epsilon) * other
    kSiluGated = 2,    // silu(x) * other
    kGeluGated = 3,    // gelu(x) * other, with the tanh that approximates it
    kLast = kGeluGated,
};

struct Activations {
    Prologue prologue;
    const float* x;      // [rows][size]
    const float* other;  // [size] where normalized, [rows][size] where gated
    int64_t size;
    float epsilon;
};

// Write a row to y. Its bits depend on that row alone.
void make_row(const Activations& activations, int64_t row, float* y);

}  // namespace specrun
