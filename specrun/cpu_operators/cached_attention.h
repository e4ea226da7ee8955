// Attention of new tokens over a cache, causal: each sees the keys up to its own position.
#pragma once

#include <cstdint>

#include "threads.h"

namespace specrun {

struct CachedAttention {
    int64_t batch, tokens, q_heads, kv_heads;
    int64_t width;      // Of a head, a multiple of 16.
    int64_t rotated;    // Numbers of a head that are rotated, the first ones; 0: none.
    int64_t positions;  // Of the cache.
    int64_t window;     // Keys that a query sees at most, its own the last; 0: all up to its own.
    bool interleaved;   // Pairs to rotate stand side by side; else they are half of ``rotated`` apart.
    bool angles_by_row;  // The rows of the batch have angles of their own.
    int64_t angles;      // Positions that ``cos`` and ``sin`` have; 0: they have tokens.
    float scale;
    const float *q, *k, *v;    // [B, S, heads, width], not rotated
    const float *cos, *sin;    // [B or 1, S, rotated / 2], or [angles, rotated / 2]
    const int64_t* first;      // [B]: the position of a row's first token
    float *keys, *values;      // [B, kv_heads, positions, width]: tokens of this pass are written here first
    float* y;                  // [B, S, q_heads, width]

    int64_t group() const { return q_heads / kv_heads; }
};

constexpr int64_t kTokensOfPart = 16;  // A part is an item of work.

// Returns false where threads fail.
bool attend(CachedAttention attention, const Threads& threads);

}  // namespace specrun
