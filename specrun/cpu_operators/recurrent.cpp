// Recurrent layers: gated delta nets, state spaces and causal convolutions, token by token.
#include "recurrent.h"

#include <algorithm>
#include <cmath>
#include <vector>

#define KERNELS "recurrent_kernels.h"
#include "on_every_processor.h"

namespace specrun {

bool Progress::is_right() const {
    for (int64_t row = 0; row < batch; ++row) {
        const bool in_order = 0 <= state[row] && state[row] <= write[row] && state[row] <= keep[row];
        if (!in_order || keep[row] - write[row] > tokens || write[row] - state[row] > slots) return false;
    }
    return true;
}

namespace {

constexpr int64_t kFewNumbers = 1 << 15;  // Less work than this is done sooner than another thread is told about it.

}  // namespace

bool attend(RecurrentAttention all, const Threads& threads) {
    const int64_t items = all.progress.batch * all.heads;
    const bool alone = items * all.progress.tokens * all.key_width * all.value_width < kFewNumbers;
    return run(threads, alone, ON_THIS_PROCESSOR(attend_head), items, &all);
}

bool convolve(CausalConvolution all, const Threads& threads) {
    const int64_t items = all.progress.batch * ((all.channels + kChannelsOfPart - 1) / kChannelsOfPart);
    const bool alone = all.progress.batch * all.progress.tokens * all.channels * all.kernel < kFewNumbers;
    return run(threads, alone, ON_THIS_PROCESSOR(convolve_part), items, &all);
}

}  // namespace specrun
