// Attention of new tokens over a cache, causal: each sees the keys up to its own position.
#pragma once

#include <cstdint>

#include "threads.h"

namespace specrun {

constexpr int64_t kBlock = 32;       // Numbers of a head in codes that share a scale.
constexpr int64_t kMostWidth = 1024;  // Of a packed head.

// Bytes of a head in float16, or in codes of 8 or 4 bits: the codes, and a bfloat16 scale for each block.
constexpr int64_t packed_bytes(int64_t width, int64_t bits) {
    return width * bits / 8 + (bits == 16 ? 0 : width / kBlock * 2);
}

struct CachedAttention {
    int64_t batch, tokens, q_heads, kv_heads;
    int64_t width;      // Of a query and a key.
    int64_t value_width;
    int64_t rotated;    // Numbers of a head that are rotated, the first ones; 0: none.
    int64_t positions;  // Of the cache.
    int64_t window;     // Keys that a query sees at most, its own the last; 0: all up to its own.
    int64_t chunk;      // A query sees keys of its own chunk of so many positions; 0: of all.
    int64_t first_key;  // Keys before it are seen by the queries before it alone.
    bool interleaved;   // Pairs to rotate stand side by side; else they are half of ``rotated`` apart.
    bool angles_by_row;  // The rows of the batch have angles of their own.
    int64_t angles;      // Positions that ``cos`` and ``sin`` have; 0: they have tokens.
    float scale;
    float softcap;             // Scores become softcap * tanh(score / softcap); 0: they stay.
    const float* sinks;        // [q_heads]: a score more for every query, whose weight is dropped; null: none.
    const float *q, *k, *v;    // [B, S, heads, width], not rotated; k and v are null where the cache has them already
    const float *cos, *sin;    // [B or 1, S, rotated / 2], or [angles, rotated / 2]
    const int64_t* first;      // [B]: the position of a row's first token
    int64_t value_bits;        // Of a number: 32 or 16: keys and values are floats. 8 or 4: codes, keys of 8
    uint8_t *keys, *values;    // [B, kv_heads, positions, bytes of one]: tokens of this pass are written here first
    float* y;                  // [B, S, q_heads, value_width]
    // Where threads divide a query's keys: [B, S, q_heads, splits, 2 + value_width], each split's Softmax and answer.
    float* answers;
    int64_t splits;

    int64_t group() const { return q_heads / kv_heads; }
    bool is_packed() const { return value_bits != 32; }
    bool is_coded() const { return value_bits < 16; }
    int64_t key_bytes() const { return is_packed() ? packed_bytes(width, is_coded() ? 8 : 16) : width * 4; }
    int64_t value_bytes() const { return is_packed() ? packed_bytes(width, value_bits) : value_width * 4; }
    int64_t first_seen(int64_t position) const {
        if (window) return position < window ? 0 : position + 1 - window;
        if (chunk) return position / chunk * chunk;
        return position < first_key ? 0 : first_key;
    }
};

constexpr int64_t kTokensOfPart = 16;  // A part is an item of work.
// Keys whose weights are summed up by themselves: of a query, those from its first one on, then the next ones.
constexpr int64_t kKeysOfSplit = 256;
constexpr int64_t splits_of(int64_t keys) { return (keys + kKeysOfSplit - 1) / kKeysOfSplit; }

// Returns false where threads fail.
bool attend(CachedAttention attention, const Threads& threads);

}  // namespace specrun
