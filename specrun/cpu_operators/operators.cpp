// The operators, in the domain "specrun": what ONNX Runtime looks for in the library.
#include "operators.h"

namespace {

struct Nodes {
    ort::CustomOp all[std::size(kOperators) + 1];
    Nodes() {
        ort::CustomOp* node = all;
        for (const auto& make : kOperators) *node++ = make().node;
        *node = fused_layers();
    }
};

}  // namespace

extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(
    ort::SessionOptions* options, const ort::ApiBase* base) {
    static const Nodes nodes;
    const void* const* api = base->get_api(ort::kVersion);
    ort::Domain* domain = nullptr;  // Lives as long as the process: sessions refer to it.
    RETURN_IF_FAILED(ort::create_domain(api, "specrun", &domain));
    for (const ort::CustomOp& node : nodes.all) RETURN_IF_FAILED(ort::add_to_domain(api, domain, &node));
    return ort::add_domain(api, options, domain);
}

extern "C" __attribute__((visibility("default"))) int specrun_operators_version() { return 14; }
