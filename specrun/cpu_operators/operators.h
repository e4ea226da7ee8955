// What each operator is, for ONNX Runtime.
#pragma once

#include "ort_abi.h"

ort::CustomOp all_gather();
ort::CustomOp all_reduce();
ort::CustomOp cached_attention();
ort::CustomOp causal_convolution();
ort::CustomOp embedding_lookup();
ort::CustomOp quantized_matmul();
ort::CustomOp float_matmul();
ort::CustomOp packed_cached_attention();
ort::CustomOp recurrent_attention();
