// Memory of GPUs, pinned memory of the host, and copies.
#include <sys/mman.h>

#include <cstring>

#include "call.hpp"

using namespace gpu;

namespace {

constexpr size_t PAGE = 2 << 20;  // Of an allocation; an empty one lies between two.
constexpr size_t POISONED = 64 << 20;
constexpr unsigned char POISON = 0xc9;

bool is_pinned(const void* memory, size_t size) {
  const Allocation* found = holds(reinterpret_cast<Address>(memory), size);
  return found && !found->device;
}

// Memory of the host that CUDA does not know; addresses of what it once allocated are never used again.
bool is_pageable(Address address) {
  auto next = world().memory.upper_bound(address);
  return next == world().memory.begin() || address >= std::prev(next)->second.first + std::prev(next)->second.size;
}

void* allocate(size_t size, Device* device) {
  size_t room = (size + PAGE - 1) / PAGE * PAGE;
  auto* first = static_cast<char*>(
      mmap(nullptr, room + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (first == MAP_FAILED) return nullptr;
  mprotect(first + room, PAGE, PROT_NONE);
  if (size <= POISONED) memset(first, POISON, size);  // What was not written is not zero.
  auto address = reinterpret_cast<Address>(first);
  world().memory[address] = {address, size, device};
  if (device) device->used += size;
  return first;
}

// Frees what begins at an address, which is not used again.
Result release(Address first, bool pinned) {
  auto found = world().memory.find(first);
  REQUIRE(found != world().memory.end() && found->second.alive, INVALID_VALUE, "nothing allocated begins here, or not any more");
  Allocation& it = found->second;
  REQUIRE(!it.device == pinned, INVALID_VALUE, "memory of the other kind");
  it.alive = false;
  if (it.device) it.device->used -= it.size;
  mmap(reinterpret_cast<void*>(first), (it.size + PAGE - 1) / PAGE * PAGE, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return SUCCESS;
}

}  // namespace

extern "C" {

int cuMemGetInfo_v2(size_t* free, size_t* total) {
  BEGIN;
  NEEDS_CONTEXT;
  *free = TOTAL_MEMORY - world().current->used;
  *total = TOTAL_MEMORY;
  return SUCCESS;
}

int cuMemAlloc_v2(Address* address, size_t size) {
  BEGIN;
  NEEDS_CONTEXT;
  NOT_IN_CAPTURE;
  REQUIRE(size, INVALID_VALUE, "no bytes");
  if (world().current->used + size > TOTAL_MEMORY) return OUT_OF_MEMORY;  // No rule is broken.
  *address = reinterpret_cast<Address>(allocate(size, world().current));
  return *address ? SUCCESS : OUT_OF_MEMORY;
}

int cuMemFree_v2(Address address) {
  BEGIN;
  NEEDS_CONTEXT;
  NOT_IN_CAPTURE;
  auto found = world().memory.find(address);
  if (found != world().memory.end() && found->second.device) drain_all(found->second.device);  // As CUDA does.
  return release(address, false);
}

int cuMemAllocHost_v2(void** memory, size_t size) {
  BEGIN;
  NEEDS_CONTEXT;
  NOT_IN_CAPTURE;
  *memory = allocate(size, nullptr);
  return *memory ? SUCCESS : OUT_OF_MEMORY;
}

int cuMemFreeHost(void* memory) {
  BEGIN;
  NOT_IN_CAPTURE;
  return release(reinterpret_cast<Address>(memory), true);
}

int cuMemsetD8Async(Address to, unsigned char value, size_t size, Stream* stream) {
  BEGIN;
  NEEDS_CONTEXT;
  NEEDS_STREAM(stream);
  REQUIRE(!size || holds(to, size), INVALID_VALUE, "memory that is not allocated");
  return queue(stream, __func__, [=] {
    if (!size || there(stream, to, size)) memset(reinterpret_cast<void*>(to), value, size);
  });
}

int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t size, Stream* stream) {
  BEGIN;
  NEEDS_CONTEXT;
  NEEDS_STREAM(stream);
  REQUIRE(!size || holds(to, size), INVALID_VALUE, "memory that is not allocated");
  // Of pageable memory CUDA keeps a copy; pinned memory is read when the work runs.
  auto kept = std::make_shared<std::vector<char>>();
  if (!is_pinned(from, size)) kept->assign(static_cast<const char*>(from), static_cast<const char*>(from) + size);
  return queue(stream, __func__, [=] {
    if (kept->size() < size && !there(stream, reinterpret_cast<Address>(from), size)) return;
    if (!size || there(stream, to, size)) memcpy(reinterpret_cast<void*>(to), kept->size() < size ? from : kept->data(), size);
  }, from);
}

int cuMemcpyDtoHAsync_v2(void* to, Address from, size_t size, Stream* stream) {
  BEGIN;
  NEEDS_CONTEXT;
  NEEDS_STREAM(stream);
  REQUIRE(!size || holds(from, size), INVALID_VALUE, "memory that is not allocated");
  REQUIRE(!size || is_pinned(to, size), INVALID_VALUE, "to memory that is not pinned: CUDA would wait for the copy");
  return queue(stream, __func__, [=] {
    if (size && there(stream, from, size) && there(stream, reinterpret_cast<Address>(to), size))
      memcpy(to, reinterpret_cast<void*>(from), size);
  }, to);
}

int cuMemcpyAsync(Address to, Address from, size_t size, Stream* stream) {
  BEGIN;
  NEEDS_CONTEXT;
  NEEDS_STREAM(stream);
  REQUIRE(!size || ((holds(to, size) || is_pageable(to)) && (holds(from, size) || is_pageable(from))), INVALID_VALUE,
          "memory that is not allocated");
  return queue(stream, __func__, [=] {
    if (size && (is_pageable(to) || there(stream, to, size)) && (is_pageable(from) || there(stream, from, size)))
      memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), size);
  }, nullptr, from, to);
}

int cuPointerGetAttribute(void* value, int attribute, Address address) {
  BEGIN;
  constexpr int MEMORY_TYPE = 2, HOST = 1, DEVICE = 2;
  REQUIRE(attribute == MEMORY_TYPE, INVALID_VALUE, "only an address's type of memory is simulated");
  const Allocation* found = holds(address, 0);
  if (!found) return INVALID_VALUE;  // No rule is broken: that is how pageable memory is told.
  *static_cast<unsigned*>(value) = found->device ? DEVICE : HOST;
  return SUCCESS;
}

}  // extern "C"
