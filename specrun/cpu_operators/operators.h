// All operators.
#pragma once

#include <iterator>

#include "operator.h"

ort::Operator all_gather();
ort::Operator all_reduce();
ort::Operator cached_attention();
ort::Operator causal_convolution();
ort::Operator embedding_lookup();
ort::Operator quantized_matmul();
ort::Operator float_matmul();
ort::Operator packed_cached_attention();
ort::Operator recurrent_attention();
ort::Operator rms_norm();

// Stages of any of them, one after the other; it is a stage of none.
ort::CustomOp fused_layers();

constexpr ort::Operator (*kOperators[])() = {
    quantized_matmul,    float_matmul,       rms_norm,   embedding_lookup, cached_attention, packed_cached_attention,
    recurrent_attention, causal_convolution, all_reduce, all_gather};
