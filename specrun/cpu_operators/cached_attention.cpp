// Attention over a cache: rotation, writing, and the division among threads.
#include "cached_attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "floats.h"

#define KERNELS "attention_kernels.h"
#include "on_every_processor.h"

namespace specrun {
namespace {

constexpr int64_t kFewNumbers = 1 << 15;  // Less work than this is done sooner than another thread is told about it.
constexpr int64_t kManyItems = 64;        // So many are divided among threads as they are.

}  // namespace

bool attend(CachedAttention all, const Threads& threads) {
    const int64_t tokens = all.batch * all.tokens;
    const bool is_little = tokens * all.kv_heads * all.width < kFewNumbers;
    if (all.k && !run(threads, is_little, ON_THIS_PROCESSOR(write_token), tokens, &all)) return false;
    int64_t longest = 0;
    for (int64_t row = 0; row < all.batch; ++row) longest = std::max(longest, all.first[row] + all.tokens);
    const bool alone = tokens * all.q_heads * all.width * longest < kFewNumbers;
    const int64_t parts = (all.tokens + kTokensOfPart - 1) / kTokensOfPart, items = all.batch * all.kv_heads * parts;
    if (alone || items >= kManyItems || longest <= kKeysOfSplit) {
        return run(threads, alone, ON_THIS_PROCESSOR(attend_part), items, &all);
    }
    thread_local std::vector<float> answers;
    all.splits = splits_of(longest);
    answers.resize(static_cast<size_t>(tokens * all.q_heads * all.splits * (2 + all.value_width)));
    all.answers = answers.data();
    const bool joins_alone = tokens * all.q_heads * all.splits * all.value_width < kFewNumbers;
    return run(threads, false, ON_THIS_PROCESSOR(attend_part), items * all.splits, &all) &&
           run(threads, joins_alone, ON_THIS_PROCESSOR(join_splits), tokens * all.q_heads, &all);
}

}  // namespace specrun
