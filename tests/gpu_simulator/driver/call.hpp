// What every function of the driver has in common.
#pragma once

#include <string>

#include "state.hpp"

namespace gpu {

// A call is counted, and fails inside a host function and on a device that is broken.
struct Call {
  std::lock_guard<std::recursive_mutex> alone{world().gate};
  const char* outer = world().call;
  Result result = SUCCESS;
  explicit Call(const char* name) {
    world().call = name;
    world().calls[name]++;
    if (world().in_host_function) result = broken(NOT_PERMITTED, "a host function must not call CUDA");
    else if (world().current && world().current->broken) result = world().current->broken;
  }
  ~Call() { world().call = outer; }
};

#define BEGIN     \
  Call call(__func__); \
  if (call.result) return call.result
#define REQUIRE(condition, code, why) \
  do {                                \
    if (!(condition)) return broken(code, why); \
  } while (false)
#define NEEDS_CONTEXT REQUIRE(world().current, INVALID_CONTEXT, "no context is current")
#define NEEDS_STREAM(stream) REQUIRE(world().streams.count(stream), INVALID_HANDLE, "no such stream, or it was destroyed")
#define NOT_IN_CAPTURE \
  if (Result code = not_in_capture()) return code

// Captures are made in the mode thread_local: they forbid their thread what may wait, or what cannot be replayed.
Result not_in_capture();

// Is this memory there, when work of `stream` uses it?
bool there(Stream* stream, Address address, size_t size);

constexpr size_t TOTAL_MEMORY = 24ull << 30;
constexpr int MULTIPROCESSORS = 132;

}  // namespace gpu
