// CachedAttention for ONNX Runtime.
#pragma once

#include "ort_abi.h"

ort::CustomOp cached_attention();
