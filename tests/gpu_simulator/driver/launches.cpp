// Modules of kernels, and launches.
#include <dlfcn.h>

#include <cstring>

#include "call.hpp"

using namespace gpu;

extern "C" {

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

}  // extern "C"
