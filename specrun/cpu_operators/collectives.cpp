// AllReduce and AllGather: what the processes that compute one model together, its ranks, tell each other.
//
// AllReduce: x, float. Output: the sum of all ranks' x, added up in the order of the ranks, so that every rank has the
// same bits, and a token's bits depend on no other token.
// AllGather: x [1, ...], float. Output: [ranks, ...], all ranks' x in their order.
// Attributes of both: ranks; number, by which the process knows that all ranks are at the same node. The exchange itself
// is a message library's, which the process sets.
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

constexpr int64_t kNumbersOfAnItem = 1 << 14;

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

constexpr const char* kOtherRanks = "collectives: the graph is for another number of ranks than this process's group has";

struct Collective {
    static constexpr size_t kInputs = 1, kOutputs = 1;
    static ort::Type type_of(size_t) { return ort::Type::kFloat; }
    static bool is_required(size_t) { return true; }

    int64_t ranks = 0, number = 0;

    Status* read(const ort::Attributes& attributes) {
        RETURN_IF_FAILED(attributes.read("ranks", &ranks));
        RETURN_IF_FAILED(attributes.read("number", &number));
        if (ranks < 1) return attributes.fail("collectives: ranks must be at least 1");
        return exchange && ranks != ranks_of_process ? attributes.fail(kOtherRanks) : nullptr;
    }

    Status* give(ort::Call& call, const Tensor& x, void* all) const {
        if (!exchange) return call.fail("collectives: this process is no rank of a model");
        // Of a graph for fewer ranks the others' numbers would not fit into its tensors.
        if (ranks != ranks_of_process) return call.fail(kOtherRanks);
        if (!x.elements) return nullptr;
        if (exchange(number, x.data, all, static_cast<int64_t>(x.elements * sizeof(float))) == 0) return nullptr;
        return call.fail_to_run("collectives: the exchange failed");
    }
};

struct AllReduce : Collective {
    static constexpr const char* kName = "AllReduce";

    std::vector<float> all;

    Status* run(ort::Call& call) {
        Tensor inputs[1];
        float* y = nullptr;
        RETURN_IF_FAILED(call.read_all<AllReduce>(inputs));
        RETURN_IF_FAILED(call.make_output(0, inputs[0], &y));
        const size_t size = inputs[0].elements;
        try {
            if (all.size() < size * ranks) all.resize(size * ranks);
        } catch (const std::bad_alloc&) {
            return call.fail_to_run("AllReduce: no memory");
        }
        RETURN_IF_FAILED(give(call, inputs[0], all.data()));
        Sum sum{all.data(), y, ranks, static_cast<int64_t>(size)};
        const int64_t items = (sum.size + kNumbersOfAnItem - 1) / kNumbersOfAnItem;
        const bool done = specrun::run(call.threads(), items < 2, add_up, items, &sum);
        return done ? nullptr : call.fail_to_run("AllReduce: no threads");
    }
};

struct AllGather : Collective {
    static constexpr const char* kName = "AllGather";

    Status* run(ort::Call& call) const {
        Tensor inputs[1];
        float* y = nullptr;
        RETURN_IF_FAILED(call.read_all<AllGather>(inputs));
        Tensor all = inputs[0];
        if (!all.axes || all.shape[0] != 1) return call.fail("AllGather: the first axis must have one element");
        all.shape[0] = ranks;
        RETURN_IF_FAILED(call.make_output(0, all, &y));
        return give(call, inputs[0], y);
    }
};

}  // namespace

ort::Operator all_reduce() { return ort::operator_of<AllReduce>(); }
ort::Operator all_gather() { return ort::operator_of<AllGather>(); }

extern "C" __attribute__((visibility("default"))) void specrun_set_exchange(Exchange given, int64_t ranks) {
    exchange = given, ranks_of_process = ranks;
}
