// AllReduce and AllGather: what the processes that compute one model together, its ranks, tell each other.
//
// AllReduce: x, float. Output: the sum of all ranks' x, added up in the order of the ranks, so that every rank has the
// same bits, and a token's bits depend on no other token.
// AllGather: x [1, ...], float. Output: [ranks, ...], all ranks' x in their order.
// Attributes of both: ranks; number, by which the process knows that all ranks are at the same node. The exchange itself
// is a message library's, which the process sets.
#include <memory>
#include <new>
#include <vector>

#include "operator.h"
#include "operators.h"

namespace {

using ort::Status;
using ort::Tensor;

// Gives every rank's ``bytes`` to all, in the order of the ranks. Returns 0, or anything else on failure.
using Exchange = int (*)(int64_t number, const void* part, void* all, int64_t bytes);
Exchange exchange = nullptr;
int64_t ranks_of_process = 0;  // ``exchange`` fills so many places.

constexpr ort::Type kTypes[1] = {ort::Type::kFloat};
constexpr int64_t kNumbersOfAnItem = 1 << 14;

struct Kernel {
    const void* const* api;
    int64_t ranks, number;
    std::vector<float> all;
};

struct Sum {
    const float* all;
    float* total;
    int64_t ranks, size;
};

void add_up(void* item, size_t number) {
    const Sum& sum = *static_cast<const Sum*>(item);
    const int64_t first = static_cast<int64_t>(number) * kNumbersOfAnItem;
    const int64_t last = first + kNumbersOfAnItem < sum.size ? first + kNumbersOfAnItem : sum.size;
    for (int64_t i = first; i < last; ++i) {
        float total = sum.all[i];
        for (int64_t rank = 1; rank < sum.ranks; ++rank) total += sum.all[rank * sum.size + i];
        sum.total[i] = total;
    }
}

// Of a graph for fewer ranks the others' numbers would not fit into its tensors.
Status* require_ranks(const Kernel& kernel) {
    if (kernel.ranks == ranks_of_process) return nullptr;
    return ort::fail(kernel.api, "collectives: the graph is for another number of ranks than this process's group has");
}

Status* create(const ort::CustomOp*, const void* const* api, const ort::KernelInfo* info, void** created) {
    auto kernel = std::unique_ptr<Kernel>(new (std::nothrow) Kernel{});
    if (!kernel) return ort::create_status(api, ort::kRuntimeException, "collectives: no memory");
    kernel->api = api;
    RETURN_IF_FAILED(ort::integer_attribute(api, info, "ranks", &kernel->ranks));
    RETURN_IF_FAILED(ort::integer_attribute(api, info, "number", &kernel->number));
    if (kernel->ranks < 1) return ort::fail(api, "collectives: ranks must be at least 1");
    if (exchange) RETURN_IF_FAILED(require_ranks(*kernel));
    *created = kernel.release();
    return nullptr;
}

Status* give(const Kernel& kernel, const Tensor& x, void* all) {
    if (!exchange) return ort::fail(kernel.api, "collectives: this process is no rank of a model");
    RETURN_IF_FAILED(require_ranks(kernel));
    if (!x.elements) return nullptr;
    if (exchange(kernel.number, x.data, all, static_cast<int64_t>(x.elements * sizeof(float))) == 0) return nullptr;
    return ort::create_status(kernel.api, ort::kRuntimeException, "collectives: the exchange failed");
}

Status* reduce(void* pointer, ort::KernelContext* context) {
    Kernel& kernel = *static_cast<Kernel*>(pointer);
    Tensor inputs[1];
    float* y = nullptr;
    RETURN_IF_FAILED(ort::read_all(kernel.api, context, kTypes, inputs));
    RETURN_IF_FAILED(ort::make_output(kernel.api, context, 0, inputs[0], &y));
    const size_t size = inputs[0].elements;
    try {
        if (kernel.all.size() < size * kernel.ranks) kernel.all.resize(size * kernel.ranks);
    } catch (const std::bad_alloc&) {
        return ort::create_status(kernel.api, ort::kRuntimeException, "AllReduce: no memory");
    }
    RETURN_IF_FAILED(give(kernel, inputs[0], kernel.all.data()));
    Sum sum{kernel.all.data(), y, kernel.ranks, static_cast<int64_t>(size)};
    const int64_t items = (sum.size + kNumbersOfAnItem - 1) / kNumbersOfAnItem;
    ort::Pool pool{kernel.api, context};
    if (specrun::run(pool.threads(), items < 2, add_up, items, &sum)) return nullptr;
    return ort::create_status(kernel.api, ort::kRuntimeException, "AllReduce: no threads");
}

Status* gather(void* pointer, ort::KernelContext* context) {
    const Kernel& kernel = *static_cast<const Kernel*>(pointer);
    Tensor inputs[1];
    float* y = nullptr;
    RETURN_IF_FAILED(ort::read_all(kernel.api, context, kTypes, inputs));
    Tensor all = inputs[0];
    if (!all.axes || all.shape[0] != 1) return ort::fail(kernel.api, "AllGather: the first axis must have one element");
    all.shape[0] = kernel.ranks;
    RETURN_IF_FAILED(ort::make_output(kernel.api, context, 0, all, &y));
    return give(kernel, inputs[0], y);
}

ort::CustomOp collective() {
    using ort::CustomOp;
    CustomOp op = ort::usual_op<Kernel>();
    op.count_inputs = [](const CustomOp*) -> size_t { return 1; };
    op.count_outputs = [](const CustomOp*) -> size_t { return 1; };
    op.input_type = [](const CustomOp*, size_t) { return ort::Type::kFloat; };
    op.input_presence = [](const CustomOp*, size_t) { return ort::Presence::kRequired; };
    op.output_presence = [](const CustomOp*, size_t) { return ort::Presence::kRequired; };
    op.create_kernel_or_fail = create;
    return op;
}

}  // namespace

ort::CustomOp all_reduce() {
    ort::CustomOp op = collective();
    op.name = [](const ort::CustomOp*) { return "AllReduce"; };
    op.compute_or_fail = reduce;
    return op;
}

ort::CustomOp all_gather() {
    ort::CustomOp op = collective();
    op.name = [](const ort::CustomOp*) { return "AllGather"; };
    op.compute_or_fail = gather;
    return op;
}

extern "C" __attribute__((visibility("default"))) void specrun_set_exchange(Exchange given, int64_t ranks) {
    exchange = given, ranks_of_process = ranks;
}
