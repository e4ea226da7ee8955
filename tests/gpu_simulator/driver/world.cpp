// What exists, what waits, what was broken; see state.hpp.
#include <cstring>
#include <utility>

#include "call.hpp"

namespace gpu {

World& world() {
  static World it;
  return it;
}

Result broken(Result code, const std::string& why) {
  world().violations.push_back(std::string(world().call) + ": " + why);
  return code;
}

const Allocation* holds(Address first, size_t size) {
  auto& memory = world().memory;
  auto next = memory.upper_bound(first);
  if (next == memory.begin()) return nullptr;
  const Allocation& found = std::prev(next)->second;
  return found.alive && first + size <= found.first + found.size ? &found : nullptr;
}

// Run the next piece of a stream's work; false where nothing waits.
static bool advance(Stream* stream) {
  if (stream->waiting.empty()) return false;
  Operation next = std::move(stream->waiting.front());
  stream->waiting.pop_front();
  if (stream->device->broken) return true;
  world().call = next.what;
  next.run();
  return true;
}

void drain(Stream* stream, const Marker* until) {
  if (stream->running) {
    broken(NOT_PERMITTED, "streams wait for each other in a circle");
    return;
  }
  stream->running = true;
  while (!(until && until->reached) && advance(stream)) {}
  stream->running = false;
}

void drain_all(const Device* device) {
  for (Stream* stream : world().streams)
    if (stream->device == device) drain(stream);
}

Result queue(Stream* stream, const char* what, std::function<void()> run, const void* host, Address from, Address to) {
  Operation made{what, std::move(run), host, from, to};
  if (stream->captured) stream->captured->nodes->push_back(std::move(made));
  else stream->waiting.push_back(std::move(made));
  if (world().eager && !stream->captured && !stream->running) drain(stream);
  return SUCCESS;
}

// Captures are made in the mode thread_local: they forbid their thread what may wait, or what cannot be replayed.
Result not_in_capture() {
  bool captures = false;
  for (Stream* stream : world().streams)
    if (stream->captured) captures = stream->invalidated = true;
  return captures ? broken(STREAM_CAPTURE_UNSUPPORTED, "not allowed while a stream is captured") : SUCCESS;
}

// Is this memory there, when work of `stream` uses it?
bool there(Stream* stream, Address address, size_t size) {
  if (holds(address, size)) return true;
  stream->device->broken =
      broken(ILLEGAL_ADDRESS, std::to_string(size) + " bytes of memory that is not allocated, or not any more");
  return false;
}

}  // namespace gpu

using namespace gpu;

extern "C" {

// What tests ask.

void gpu_open(int devices, const char* (*load)(const char* ptx)) {
  for (int number = 0; number < devices; number++) world().devices.push_back(std::make_unique<Device>(Device{number, 0, {}, SUCCESS}));
  world().load = load;
}

void gpu_run_eagerly(int yes) { world().eager = yes; }

void gpu_run_backwards(int yes) { world().backwards = yes; }

// Calls of a function since the beginning.
int gpu_calls(const char* name) { std::lock_guard<std::recursive_mutex> alone{world().gate}; return world().calls[name]; }

// The rule that was broken as number `index`; nullptr behind the last.
const char* gpu_violation(int index) {
  std::lock_guard<std::recursive_mutex> alone{world().gate};
  auto& all = world().violations;
  return index < static_cast<int>(all.size()) ? all[index].c_str() : nullptr;
}

// Forget what was broken, let broken devices work again, and end peer access.
void gpu_forgive() {
  std::lock_guard<std::recursive_mutex> alone{world().gate};
  world().violations.clear();
  for (auto& device : world().devices) device->broken = SUCCESS, device->peers.clear();
}

void gpu_violate(const char* call, const char* why) {
  std::lock_guard<std::recursive_mutex> alone{world().gate};
  world().call = call;
  broken(NOT_PERMITTED, why);
}

// The bytes from an address to the end of its allocation; 0: of none, or of another device.
uint64_t gpu_room(uint64_t address, int device) {
  std::lock_guard<std::recursive_mutex> alone{world().gate};
  const Allocation* found = holds(address, 0);
  if (!found || (device >= 0 && (!found->device || found->device->number != device))) return 0;
  return found->first + found->size - address;
}

// Queue what an engine does: a function of the host's, which may not call CUDA either.
void gpu_queue_engine(Stream* stream, void (*function)(void*)) {
  std::lock_guard<std::recursive_mutex> alone{world().gate};
  queue(stream, "enqueueV3", [=] {
    world().calls["enqueueV3"]++;
    bool outer = std::exchange(world().in_host_function, true);
    function(nullptr);
    world().in_host_function = outer;
  });
}

// Run the next piece of a stream's work, while another stream waits for it; 0 where none can run.
int gpu_advance(Stream* stream) {
  std::lock_guard<std::recursive_mutex> alone{world().gate};
  if (!world().streams.count(stream) || stream->running) return 0;
  stream->running = true;
  bool ran = advance(stream);
  stream->running = false;
  return ran;
}

int gpu_current_device() { return world().current ? world().current->number : -1; }
int gpu_is_captured(Stream* stream) { std::lock_guard<std::recursive_mutex> alone{world().gate}; return world().streams.count(stream) && stream->captured; }
int gpu_stream_device(Stream* stream) { std::lock_guard<std::recursive_mutex> alone{world().gate}; return world().streams.count(stream) ? stream->device->number : -1; }

// What is alive: allocations, pinned allocations, streams, events, graphs, executable graphs.
void gpu_alive(int* counts) {
  std::lock_guard<std::recursive_mutex> alone{world().gate};
  memset(counts, 0, 6 * sizeof(int));
  for (auto& [first, allocation] : world().memory)
    if (allocation.alive) counts[allocation.device ? 0 : 1]++;
  counts[2] = static_cast<int>(world().streams.size());
  counts[3] = static_cast<int>(world().events.size());
  counts[4] = static_cast<int>(world().graphs.size());
  counts[5] = static_cast<int>(world().executables.size());
}

}  // extern "C"
