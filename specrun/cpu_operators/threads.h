// The caller's threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace specrun {

// Calls work(item, 0 .. count - 1), perhaps on several threads. Returns false on failure.
struct Threads {
    bool (*run)(void* context, void (*work)(void* item, size_t number), size_t count, void* item);
    void* context;
};

// The same; ``alone``: on this thread, where telling another one would take longer than the work.
inline bool run(const Threads& threads, bool alone, void (*work)(void*, size_t), int64_t count, void* item) {
    if (!alone) return threads.run(threads.context, work, static_cast<size_t>(count), item);
    for (int64_t number = 0; number < count; ++number) work(item, static_cast<size_t>(number));
    return true;
}

}  // namespace specrun
