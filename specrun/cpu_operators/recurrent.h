// Recurrent layers of new tokens: linear attention with a state, and causal convolutions.
//
// A row's state is behind ``state`` tokens. Tokens up to ``write`` are read again, from inputs that the row has kept, then
// the new ones. The state that is left is behind ``keep`` tokens, and the inputs of those behind it are kept.
#pragma once

#include <cstdint>

#include "threads.h"

namespace specrun {

struct Progress {
    int64_t batch, tokens;
    int64_t slots;  // Tokens of a row whose inputs can be kept.
    const int64_t *write, *state, *keep;  // [B]

    // Whether every row's numbers are possible.
    bool is_right() const;
};

struct RecurrentAttention {
    Progress progress;
    int64_t heads, key_width, value_width;
    int64_t decay_width;  // Numbers of a head: 1, or one for each of its keys'.
    float scale;
    const float *q, *k, *v, *decay;  // [B, S, heads * width]
    const float* beta;               // [B, S, heads]; null: what is added does not depend on the state
    float* states;                   // [B, heads, key_width, value_width]
    float* inputs;                   // [B, slots, input_width]: k, v, decay, beta of the kept tokens
    float* y;                        // [B, S, heads * value_width]

    int64_t input_width() const { return heads * (key_width + value_width + decay_width + (beta ? 1 : 0)); }
};

struct CausalConvolution {
    Progress progress;
    int64_t channels, kernel;
    const float* x;       // [B, S, channels]
    const float* weight;  // [kernel, channels]
    float* inputs;        // [B, kernel - 1 + slots, channels]: from kernel - 1 tokens before ``state`` on
    float* y;             // [B, S, channels]
};

constexpr int64_t kChannelsOfPart = 256;  // A part is an item of work.

// Both return false where threads fail.
bool attend(RecurrentAttention attention, const Threads& threads);
bool convolve(CausalConvolution convolution, const Threads& threads);

}  // namespace specrun
