// The operators, in the domain "specrun": what ONNX Runtime looks for in the library.
#include "operators.h"

#include "operator.h"

extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(
    ort::SessionOptions* options, const ort::ApiBase* base) {
    static const ort::CustomOp ops[] = {
        quantized_matmul(),    float_matmul(),       embedding_lookup(), cached_attention(), packed_cached_attention(),
        recurrent_attention(), causal_convolution(), all_reduce(),       all_gather()};
    const void* const* api = base->get_api(ort::kVersion);
    ort::Domain* domain = nullptr;  // Lives as long as the process: sessions refer to it.
    RETURN_IF_FAILED(ort::create_domain(api, "specrun", &domain));
    for (const ort::CustomOp& op : ops) RETURN_IF_FAILED(ort::add_to_domain(api, domain, &op));
    return ort::add_domain(api, options, domain);
}

extern "C" __attribute__((visibility("default"))) int specrun_operators_version() { return 11; }
