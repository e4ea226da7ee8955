// libcuda.so.1: the CUDA driver API, as far as this project and cuda-python use it.
//
// Every function checks what CUDA's documentation asks of its caller. A function that is missing here is one that
// cuda-python does not find, so that calling it is an error that names it.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "call.hpp"

using namespace gpu;

extern "C" {

// The driver itself.

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

// Devices.

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
  *bytes = TOTAL_MEMORY;
  return SUCCESS;
}

int cuDeviceCanAccessPeer(int* can, int device, int other) {
  BEGIN;
  *can = device != other;
  return SUCCESS;
}

// Contexts: a device's is the device.

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
  std::lock_guard<std::recursive_mutex> alone{world().gate};
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

// Finding the functions: a name without its version means its newest version.

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

}  // extern "C"
