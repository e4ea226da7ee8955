// What a kernel that was translated from PTX sees of the simulated GPU. Included by the driver and by every kernel.
#pragma once

#include <cstdint>

namespace gpu {

struct Thread;

// The bytes that one instruction found itself allowed to touch, so that it need not ask again.
struct Range {
  uint64_t first = 1, last = 0;
};

// In place of a lane: whether any lane's value is not 0.
constexpr int ANY_LANE = -1;

// What a thread asks of the GPU. `line` is the instruction's line in the PTX.
struct Services {
  void (*find)(Thread*, uint64_t address, unsigned size, Range*, int line);       // Fills the range, or fails.
  void* (*shared)(Thread*, uint64_t offset, unsigned size, bool writes, int line);  // Checks for races.
  void (*barrier)(Thread*, int line);
  uint32_t (*shuffle)(Thread*, uint32_t value, int lane, uint32_t mask, int line);  // That lane's value.
  // The lanes of a warp meet, and the last does `work` with what each of the 32 has brought.
  void (*together)(Thread*, void* brought, void (*work)(void* const*), int line);
  void (*yield)(Thread*);
  void (*fail)(Thread*, const char* what, int line);
};

struct Block {
  uint32_t ctaid[3], nctaid[3], ntid[3];
};

struct Thread {
  uint32_t tid[3];
  const Block* block;
  const Services* services;
};

// The memory of a global access. Addresses of device memory are addresses of this process.
[[gnu::always_inline]] inline void* global(Thread* thread, uint64_t address, unsigned size, Range& range, int line) {
  if (address < range.first || address + size > range.last || address % size)
    thread->services->find(thread, address, size, &range, line);
  return reinterpret_cast<void*>(address);
}

struct Kernel {
  const char* name;
  void (*run)(Thread*, const char* parameters);
  int num_parameters;
  const unsigned* sizes;    // Of the parameters, in bytes.
  const unsigned* offsets;  // Where each lies in `parameters`.
  unsigned max_threads;     // Of a block.
  unsigned shared_bytes;
  Range* ranges;  // One of each global access.
  int num_ranges;
};

}  // namespace gpu
