// libcuda.so.1: the CUDA driver API, as far as this project and cuda-python use it.
//
// Every function checks what CUDA's documentation asks of its caller. A function that is missing here is one that
// cuda-python does not find, so that calling it is an error that names it.
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstring>
#include <utility>

#include "state.hpp"

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

void drain(Stream* stream, const Marker* until) {
  if (stream->running) {
    broken(NOT_PERMITTED, "streams wait for each other in a circle");
    return;
  }
  stream->running = true;
  while (!stream->waiting.empty() && !(until && until->reached)) {
    Operation next = std::move(stream->waiting.front());
    stream->waiting.pop_front();
    if (stream->device->broken) continue;
    world().call = next.what;
    next.run();
  }
  stream->running = false;
}

Result queue(Stream* stream, const char* what, std::function<void()> run) {
  if (stream->captured) stream->captured->nodes->push_back({what, std::move(run)});
  else stream->waiting.push_back({what, std::move(run)});
  return SUCCESS;
}

}  // namespace gpu

using namespace gpu;

namespace {

constexpr size_t TOTAL = 24ull << 30;
constexpr int MULTIPROCESSORS = 132;
constexpr size_t PAGE = 2 << 20;  // Of an allocation; an empty one lies between two.
constexpr size_t POISONED = 64 << 20;
constexpr unsigned char POISON = 0xc9;

// What every function has in common: it is counted, and fails inside a host function and on a device that is broken.
struct Call {
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

bool is_pinned(const void* memory, size_t size) {
  const Allocation* found = holds(reinterpret_cast<Address>(memory), size);
  return found && !found->device;
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

void drain_all(const Device* device) {
  for (Stream* stream : world().streams)
    if (stream->device == device) drain(stream);
}

void record(Event* event, Stream* stream) {
  auto marker = std::make_shared<Marker>(Marker{stream, false, {}});
  event->marker = marker;
  queue(stream, "cuEventRecord", [marker] {
    marker->reached = true;
    marker->when = std::chrono::steady_clock::now();
  });
}

bool reached(const std::shared_ptr<Marker>& marker) {
  if (!marker->reached && world().streams.count(marker->stream)) drain(marker->stream, marker.get());
  return marker->reached;
}

}  // namespace

extern "C" {

// ------------------------------------------------------------------------------------------------ the driver itself

int cuInit(unsigned) { return SUCCESS; }

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return SUCCESS;
}

int cuGetErrorString(int code, const char** text) {
  static thread_local std::string kept;
  kept = "simulated error " + std::to_string(code);
  if (!world().violations.empty()) kept += " (" + world().violations.back() + ")";
  *text = kept.c_str();
  return SUCCESS;
}

int cuGetErrorName(int, const char** text) {
  *text = "CUDA_ERROR";
  return SUCCESS;
}

static int nothing() { return NOT_FOUND; }


// NVRTC asks for tables of undocumented functions and calls them without looking: what it compiled may be cached there.
int cuGetExportTable(const void** table, const void*) {
  static const void* functions[64];
  functions[0] = reinterpret_cast<void*>(sizeof functions);
  for (int index = 1; index < 64; index++) functions[index] = reinterpret_cast<void*>(nothing);
  *table = functions;
  return SUCCESS;
}

// ----------------------------------------------------------------------------------------------------------- devices

int cuDeviceGetCount(int* count) {
  *count = static_cast<int>(world().devices.size());
  return SUCCESS;
}

int cuDeviceGet(int* device, int number) {
  BEGIN;
  REQUIRE(number >= 0 && number < static_cast<int>(world().devices.size()), INVALID_DEVICE, "no such GPU");
  *device = number;
  return SUCCESS;
}

int cuDeviceGetName(char* name, int size, int) {
  snprintf(name, size, "Simulated GPU");
  return SUCCESS;
}

int cuDeviceGetUuid_v2(char* uuid, int device) {
  memset(uuid, device + 1, 16);
  return SUCCESS;
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
  BEGIN;
  // As an H100's: compute capability 9.0, 132 multiprocessors, unified addressing, cooperative launches.
  static const std::map<int, int> known = {{1, 1024}, {10, 32}, {16, MULTIPROCESSORS}, {41, 1}, {75, 9}, {76, 0}, {95, 1}};
  auto found = known.find(attribute);
  *value = found == known.end() ? 0 : found->second;
  return SUCCESS;
}

int cuDeviceTotalMem_v2(size_t* bytes, int) {
  *bytes = TOTAL;
  return SUCCESS;
}

int cuDeviceCanAccessPeer(int* can, int device, int other) {
  BEGIN;
  *can = device != other;
  return SUCCESS;
}

// ---------------------------------------------------------------------------------------------------------- contexts
// A device's context is the device.

int cuDevicePrimaryCtxRetain(Device** context, int number) {
  BEGIN;
  REQUIRE(number >= 0 && number < static_cast<int>(world().devices.size()), INVALID_DEVICE, "no such GPU");
  *context = world().devices[number].get();
  return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }

int cuCtxGetCurrent(Device** context) {
  *context = world().current;
  return SUCCESS;
}

int cuCtxSetCurrent(Device* context) {
  world().current = context;
  world().calls["cuCtxSetCurrent"]++;
  return SUCCESS;
}

int cuCtxPushCurrent_v2(Device* context) {
  world().stack.push_back(world().current);
  world().current = context;
  return SUCCESS;
}

int cuCtxPopCurrent_v2(Device** context) {
  *context = world().current;
  REQUIRE(!world().stack.empty(), INVALID_CONTEXT, "more contexts popped than pushed");
  world().current = world().stack.back();
  world().stack.pop_back();
  return SUCCESS;
}

int cuCtxGetDevice(int* device) {
  NEEDS_CONTEXT;
  *device = world().current->number;
  return SUCCESS;
}

int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return SUCCESS;
}

int cuCtxEnablePeerAccess(Device* peer, unsigned) {
  BEGIN;
  NEEDS_CONTEXT;
  REQUIRE(peer != world().current, INVALID_DEVICE, "a GPU is no peer of itself");
  return world().current->peers.insert(peer->number).second ? SUCCESS : PEER_ACCESS_ALREADY_ENABLED;
}

int cuCtxSynchronize() {
  BEGIN;
  NEEDS_CONTEXT;
  NOT_IN_CAPTURE;
  drain_all(world().current);
  return world().current->broken;
}

// ------------------------------------------------------------------------------------------------------------ memory

int cuMemGetInfo_v2(size_t* free, size_t* total) {
  BEGIN;
  NEEDS_CONTEXT;
  *free = TOTAL - world().current->used;
  *total = TOTAL;
  return SUCCESS;
}

int cuMemAlloc_v2(Address* address, size_t size) {
  BEGIN;
  NEEDS_CONTEXT;
  NOT_IN_CAPTURE;
  REQUIRE(size, INVALID_VALUE, "no bytes");
  if (world().current->used + size > TOTAL) return OUT_OF_MEMORY;  // No rule is broken.
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
  });
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
  });
}

int cuMemcpyAsync(Address to, Address from, size_t size, Stream* stream) {
  BEGIN;
  NEEDS_CONTEXT;
  NEEDS_STREAM(stream);
  REQUIRE(!size || (holds(to, size) && holds(from, size)), INVALID_VALUE, "memory that is not allocated");
  return queue(stream, __func__, [=] {
    if (size && there(stream, to, size) && there(stream, from, size))
      memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), size);
  });
}

int cuPointerGetAttribute(void* value, int attribute, Address pointer) {
  BEGIN;
  (void)value, (void)attribute, (void)pointer;
  return INVALID_VALUE;
}

// ------------------------------------------------------------------------------------------------ streams and events

int cuStreamCreateWithPriority(Stream** stream, unsigned, int) {
  BEGIN;
  NEEDS_CONTEXT;
  NOT_IN_CAPTURE;
  *stream = new Stream{world().current};
  world().streams.insert(*stream);
  return SUCCESS;
}

int cuStreamDestroy_v2(Stream* stream) {
  BEGIN;
  NEEDS_STREAM(stream);
  drain(stream);  // CUDA frees it when its work is done.
  world().streams.erase(stream);
  delete stream;
  return SUCCESS;
}

int cuStreamSynchronize(Stream* stream) {
  BEGIN;
  if (reinterpret_cast<uintptr_t>(stream) <= 2) {  // The default stream: nothing waits in it.
    NEEDS_CONTEXT;
    NOT_IN_CAPTURE;
    return SUCCESS;
  }
  NEEDS_STREAM(stream);
  NOT_IN_CAPTURE;
  drain(stream);
  return stream->device->broken;
}

int cuStreamQuery(Stream* stream) {
  BEGIN;
  NEEDS_STREAM(stream);
  NOT_IN_CAPTURE;
  return stream->waiting.empty() ? SUCCESS : NOT_READY;
}

int cuStreamGetCtx(Stream* stream, Device** context) {
  NEEDS_STREAM(stream);
  *context = stream->device;
  return SUCCESS;
}

int cuStreamGetCtx_v2(Stream* stream, Device** context, void** green) {
  NEEDS_STREAM(stream);
  *context = stream->device;
  *green = nullptr;
  return SUCCESS;
}

int cuStreamGetDevice(Stream* stream, int* device) {
  NEEDS_STREAM(stream);
  *device = stream->device->number;
  return SUCCESS;
}

int cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
  BEGIN;
  NEEDS_STREAM(stream);
  REQUIRE(world().events.count(event), INVALID_HANDLE, "no such event, or it was destroyed");
  if (!event->marker) return SUCCESS;  // Nothing was recorded.
  if (stream->captured) {
    stream->invalidated = true;
    return broken(STREAM_CAPTURE_ISOLATION, "a captured stream must not wait for what is outside of its capture");
  }
  return queue(stream, __func__, [marker = event->marker] { reached(marker); });
}

int cuEventCreate(Event** event, unsigned) {
  BEGIN;
  NEEDS_CONTEXT;
  *event = new Event{world().current, nullptr};
  world().events.insert(*event);
  return SUCCESS;
}

int cuEventDestroy_v2(Event* event) {
  BEGIN;
  REQUIRE(world().events.erase(event), INVALID_HANDLE, "no such event, or it was destroyed");
  delete event;
  return SUCCESS;
}

int cuEventRecord(Event* event, Stream* stream) {
  BEGIN;
  NEEDS_STREAM(stream);
  REQUIRE(world().events.count(event), INVALID_HANDLE, "no such event, or it was destroyed");
  REQUIRE(event->device == stream->device, INVALID_HANDLE, "the event belongs to another context than the stream");
  record(event, stream);
  return SUCCESS;
}

int cuEventSynchronize(Event* event) {
  BEGIN;
  NOT_IN_CAPTURE;
  if (event->marker) reached(event->marker);
  return event->device->broken;
}

int cuEventQuery(Event* event) {
  BEGIN;
  NOT_IN_CAPTURE;
  return !event->marker || event->marker->reached ? SUCCESS : NOT_READY;
}

int cuEventElapsedTime_v2(float* milliseconds, Event* first, Event* last) {
  BEGIN;
  REQUIRE(first->marker && last->marker, INVALID_HANDLE, "an event that was not recorded");
  if (!first->marker->reached || !last->marker->reached) return NOT_READY;
  *milliseconds = std::chrono::duration<float, std::milli>(last->marker->when - first->marker->when).count();
  return SUCCESS;
}

int cuLaunchHostFunc(Stream* stream, void (*function)(void*), void* data) {
  BEGIN;
  NEEDS_STREAM(stream);
  return queue(stream, __func__, [=] {
    world().in_host_function = true;
    function(data);
    world().in_host_function = false;
  });
}

// ----------------------------------------------------------------------------------------------------------- kernels

int cuLibraryLoadData(Module** module, const char* code, ...) {
  BEGIN;
  NOT_IN_CAPTURE;
  REQUIRE(world().load, INVALID_IMAGE, "nobody translates PTX");
  const char* path = world().load(code);
  void* library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
  REQUIRE(library, INVALID_IMAGE, path ? dlerror() : "PTX that is not simulated");
  *module = new Module{library, {}};
  auto** kernels = static_cast<const Kernel**>(dlsym(library, "gpu_kernels"));
  for (; *kernels; kernels++) (*module)->kernels[(*kernels)->name] = *kernels;
  world().modules.insert(*module);
  return SUCCESS;
}

int cuLibraryUnload(Module* module) {
  BEGIN;
  REQUIRE(world().modules.erase(module), INVALID_HANDLE, "no such library, or it was unloaded");
  delete module;  // Its code stays, for work that waits.
  return SUCCESS;
}

int cuLibraryGetKernel(const Kernel** kernel, Module* module, const char* name) {
  BEGIN;
  auto found = module->kernels.find(name);
  REQUIRE(found != module->kernels.end(), NOT_FOUND, std::string("no kernel ") + name);
  *kernel = found->second;
  return SUCCESS;
}

int cuKernelGetLibrary(Module** module, const Kernel* kernel) {
  for (Module* one : world().modules)
    for (auto& [name, other] : one->kernels)
      if (other == kernel) {
        *module = one;
        return SUCCESS;
      }
  return broken(INVALID_HANDLE, "a kernel of no library");
}

int cuKernelGetAttribute(int* value, int, const Kernel* kernel, int) {
  *value = static_cast<int>(kernel->max_threads);
  return SUCCESS;
}

int cuKernelGetParamInfo(const Kernel* kernel, size_t index, size_t* offset, size_t* size) {
  if (index >= static_cast<size_t>(kernel->num_parameters)) return INVALID_VALUE;
  *offset = kernel->offsets[index];
  if (size) *size = kernel->sizes[index];
  return SUCCESS;
}

// As if every kernel used as many registers as 1024 threads may have.
static uint32_t resident_blocks(uint32_t threads) { return 65536 / (64 * threads); }

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const Kernel*, int threads, size_t) {
  BEGIN;
  *count = static_cast<int>(resident_blocks(threads));
  return SUCCESS;
}

static int launch(const Kernel* kernel, const uint32_t* grid, const uint32_t* block, bool cooperative, Stream* stream,
                  void** arguments) {
  NEEDS_CONTEXT;
  NEEDS_STREAM(stream);
  REQUIRE(stream->device == world().current, INVALID_HANDLE, "the stream belongs to another context than the current one");
  uint32_t threads = block[0] * block[1] * block[2];
  REQUIRE(threads && threads <= kernel->max_threads, INVALID_VALUE, std::string(kernel->name) + ": threads of a block");
  REQUIRE(grid[0] && grid[1] && grid[2] && grid[1] < 65536 && grid[2] < 65536, INVALID_VALUE, std::string(kernel->name) + ": a grid's size");
  REQUIRE(!cooperative || grid[0] * grid[1] * grid[2] <= MULTIPROCESSORS * resident_blocks(threads), COOPERATIVE_LAUNCH_TOO_LARGE, "more blocks than run together");
  Launch it{kernel, stream->device, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, cooperative, {}};
  if (int last = kernel->num_parameters - 1; last >= 0) it.parameters.resize(kernel->offsets[last] + kernel->sizes[last]);
  for (int index = 0; index < kernel->num_parameters; index++)
    memcpy(it.parameters.data() + kernel->offsets[index], arguments[index], kernel->sizes[index]);
  return queue(stream, "cuLaunchKernelEx", [it = std::move(it)] { run(it); });
}

struct LaunchConfig {
  uint32_t grid[3], block[3], shared_bytes;
  Stream* stream;
  struct { int id; char pad[4]; char value[64]; } * attributes;
  uint32_t num_attributes;
};

int cuLaunchKernelEx(const LaunchConfig* config, const Kernel* kernel, void** arguments, void**) {
  BEGIN;
  bool cooperative = false;
  for (uint32_t number = 0; number < config->num_attributes; number++) {
    REQUIRE(config->attributes[number].id == 2, INVALID_VALUE, "a launch attribute that is not simulated");
    cooperative = config->attributes[number].value[0];
  }
  return launch(kernel, config->grid, config->block, cooperative, config->stream, arguments);
}

int cuLaunchKernel(const Kernel* kernel, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz,
                   uint32_t, Stream* stream, void** arguments, void**) {
  BEGIN;
  uint32_t grid[] = {gx, gy, gz}, block[] = {bx, by, bz};
  return launch(kernel, grid, block, false, stream, arguments);
}

// ------------------------------------------------------------------------------------------------------------ graphs

int cuStreamBeginCapture_v2(Stream* stream, int mode) {
  BEGIN;
  NEEDS_STREAM(stream);
  REQUIRE(mode == 1, INVALID_VALUE, "only the mode thread_local is simulated");
  REQUIRE(!stream->captured, INVALID_VALUE, "the stream is being captured already");
  stream->captured = new Graph{std::make_shared<std::vector<Operation>>(), {}};
  world().graphs.insert(stream->captured);
  stream->invalidated = false;
  return SUCCESS;
}

int cuStreamEndCapture(Stream* stream, Graph** graph) {
  BEGIN;
  NEEDS_STREAM(stream);
  *graph = nullptr;
  REQUIRE(stream->captured, STREAM_CAPTURE_UNMATCHED, "the stream is not being captured");
  Graph* made = std::exchange(stream->captured, nullptr);
  if (stream->invalidated) {
    world().graphs.erase(made);
    delete made;
    return STREAM_CAPTURE_INVALIDATED;
  }
  *graph = made;
  return SUCCESS;
}

int cuStreamIsCapturing(Stream* stream, int* status) {
  NEEDS_STREAM(stream);
  *status = !stream->captured ? 0 : stream->invalidated ? 2 : 1;
  return SUCCESS;
}

int cuStreamGetCaptureInfo_v3(Stream* stream, int* status, uint64_t* id, Graph** graph, void***, void***, size_t* count) {
  if (int code = cuStreamIsCapturing(stream, status)) return code;
  if (id) *id = reinterpret_cast<uint64_t>(stream);
  if (graph) *graph = stream->captured;
  if (count) *count = 0;
  return SUCCESS;
}

int cuStreamGetCaptureInfo_v2(Stream* stream, int* status, uint64_t* id, Graph** graph, void*** dependencies, size_t* count) {
  return cuStreamGetCaptureInfo_v3(stream, status, id, graph, dependencies, nullptr, count);
}

// Only how many there are.
int cuGraphGetNodes(Graph* graph, void** nodes, size_t* count) {
  BEGIN;
  REQUIRE(world().graphs.count(graph), INVALID_HANDLE, "no such graph, or it was destroyed");
  REQUIRE(!nodes, INVALID_VALUE, "a graph's nodes are not simulated, but for their number");
  *count = graph->nodes->size();
  return SUCCESS;
}

struct InstantiateParams {
  uint64_t flags;
  Stream* upload;
  void* error_node;
  int result;
};

int cuGraphInstantiateWithParams(Graph** executable, Graph* graph, InstantiateParams* params) {
  BEGIN;
  NOT_IN_CAPTURE;
  REQUIRE(world().graphs.count(graph), INVALID_HANDLE, "no such graph, or it was destroyed");
  params->result = 0;
  *executable = new Graph{graph->nodes, graph->objects};
  world().executables.insert(*executable);
  return SUCCESS;
}

int cuGraphLaunch(Graph* executable, Stream* stream) {
  BEGIN;
  NEEDS_CONTEXT;
  NEEDS_STREAM(stream);
  REQUIRE(world().executables.count(executable), INVALID_HANDLE, "no such executable graph, or it was destroyed");
  return queue(stream, __func__, [stream, nodes = executable->nodes] {
    for (const Operation& node : *nodes) {
      if (stream->device->broken) return;
      world().call = node.what;
      node.run();
    }
  });
}

// What a graph's work needs lives as long as the graph and what was instantiated from it.

int cuUserObjectCreate(UserObject** object, void* held, void (*destroy)(void*), unsigned references, unsigned) {
  BEGIN;
  *object = new UserObject{held, destroy, references};
  return SUCCESS;
}

int cuUserObjectRetain(UserObject* object, unsigned count) {
  BEGIN;
  object->references += count;
  return SUCCESS;
}

int cuUserObjectRelease(UserObject* object, unsigned count) {
  BEGIN;
  object->let_go(count);
  return SUCCESS;
}

int cuGraphRetainUserObject(Graph* graph, UserObject* object, unsigned count, unsigned flags) {
  BEGIN;
  REQUIRE(world().graphs.count(graph), INVALID_HANDLE, "no such graph, or it was destroyed");
  constexpr unsigned MOVE = 1;  // The caller's references become the graph's.
  if (!(flags & MOVE)) object->references += count;
  graph->objects.push_back(std::shared_ptr<UserObject>(object, [count](UserObject* it) { it->let_go(count); }));
  return SUCCESS;
}

int cuGraphReleaseUserObject(Graph* graph, UserObject* object, unsigned) {
  BEGIN;
  REQUIRE(world().graphs.count(graph), INVALID_HANDLE, "no such graph, or it was destroyed");
  std::erase_if(graph->objects, [=](auto& held) { return held.get() == object; });
  return SUCCESS;
}

int cuGraphUpload(Graph*, Stream*) { return SUCCESS; }

int cuGraphDestroy(Graph* graph) {
  BEGIN;
  REQUIRE(world().graphs.erase(graph), INVALID_HANDLE, "no such graph, or it was destroyed");
  delete graph;
  return SUCCESS;
}

int cuGraphExecDestroy(Graph* executable) {
  BEGIN;
  REQUIRE(world().executables.erase(executable), INVALID_HANDLE, "no such executable graph, or it was destroyed");
  delete executable;
  return SUCCESS;
}

// --------------------------------------------------------------------------------------------- finding the functions

// A name without its version means its newest version.
int cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* status) {
  static void* self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  *function = nullptr;
  for (const char* version : {"_v3", "_v2", ""})
    if (!*function) *function = dlsym(self, (std::string(name) + version).c_str());
  if (status) *status = *function ? 0 : 1;
  return *function ? SUCCESS : NOT_FOUND;
}

int cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}

// ----------------------------------------------------------------------------------------- what tests ask of the world

void gpu_open(int devices, const char* (*load)(const char* ptx)) {
  for (int number = 0; number < devices; number++) world().devices.push_back(std::make_unique<Device>(Device{number, 0, {}, SUCCESS}));
  world().load = load;
}

void gpu_run_backwards(int yes) { world().backwards = yes; }

// Calls of a function since the beginning.
int gpu_calls(const char* name) { return world().calls[name]; }

// The rule that was broken as number `index`; nullptr behind the last.
const char* gpu_violation(int index) {
  auto& all = world().violations;
  return index < static_cast<int>(all.size()) ? all[index].c_str() : nullptr;
}

// Forget what was broken, let broken devices work again, and end peer access.
void gpu_forgive() {
  world().violations.clear();
  for (auto& device : world().devices) device->broken = SUCCESS, device->peers.clear();
}

void gpu_violate(const char* call, const char* why) {
  world().call = call;
  broken(NOT_PERMITTED, why);
}

// The bytes from an address to the end of its allocation; 0: of none, or of another device.
uint64_t gpu_room(uint64_t address, int device) {
  const Allocation* found = holds(address, 0);
  if (!found || (device >= 0 && (!found->device || found->device->number != device))) return 0;
  return found->first + found->size - address;
}

// Queue what an engine does: a function of the host's, which may not call CUDA either.
void gpu_queue_engine(Stream* stream, void (*function)(void*)) {
  queue(stream, "enqueueV3", [=] {
    world().calls["enqueueV3"]++;
    world().in_host_function = true;
    function(nullptr);
    world().in_host_function = false;
  });
}

int gpu_current_device() { return world().current ? world().current->number : -1; }
int gpu_is_captured(Stream* stream) { return world().streams.count(stream) && stream->captured; }
int gpu_stream_device(Stream* stream) { return world().streams.count(stream) ? stream->device->number : -1; }

// What is alive: allocations, pinned allocations, streams, events, graphs, executable graphs.
void gpu_alive(int* counts) {
  memset(counts, 0, 6 * sizeof(int));
  for (auto& [first, allocation] : world().memory)
    if (allocation.alive) counts[allocation.device ? 0 : 1]++;
  counts[2] = static_cast<int>(world().streams.size());
  counts[3] = static_cast<int>(world().events.size());
  counts[4] = static_cast<int>(world().graphs.size());
  counts[5] = static_cast<int>(world().executables.size());
}

int gpu_graph_nodes(Graph* graph) { return static_cast<int>(graph->nodes->size()); }

}  // extern "C"
