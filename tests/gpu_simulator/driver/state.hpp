// The simulated GPUs: what exists on them, what waits in their streams, and which rules were broken.
//
// From the CUDA driver API's documentation. One thread at a time calls the driver; work runs on the thread that waits.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "kernel.hpp"

namespace gpu {

using Address = uint64_t;

// CUresult.
enum Result {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  PEER_ACCESS_UNSUPPORTED = 217,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  ILLEGAL_ADDRESS = 700,
  PEER_ACCESS_ALREADY_ENABLED = 704,
  LAUNCH_FAILED = 719,
  COOPERATIVE_LAUNCH_TOO_LARGE = 720,
  NOT_PERMITTED = 800,
  STREAM_CAPTURE_UNSUPPORTED = 900,
  STREAM_CAPTURE_INVALIDATED = 901,
  STREAM_CAPTURE_UNMATCHED = 903,
  STREAM_CAPTURE_ISOLATION = 905,
};

struct Device {
  int number;
  size_t used = 0;
  std::set<int> peers;      // Devices whose memory this one may touch.
  Result broken = SUCCESS;  // What an asynchronous error left: every later call returns it.
};

struct Allocation {
  Address first;
  size_t size;
  Device* device;  // nullptr: pinned memory of the host.
  bool alive = true;
};

// A point in a stream's work.
struct Marker {
  struct Stream* stream;
  bool reached = false;
  std::chrono::steady_clock::time_point when;
};

struct Operation {
  const char* what;
  std::function<void()> run;
  const void* host = nullptr;  // Of a copy, its end there; of a graph's launch, the graph.
  Address from = 0, to = 0;    // Of a copy by cuMemcpyAsync.
};

using Nodes = std::shared_ptr<std::vector<Operation>>;

struct UserObject {
  void* held;
  void (*destroy)(void*);
  unsigned references;
  void let_go(unsigned count) {
    references -= count;
    if (references) return;
    destroy(held);
    delete this;
  }
};

struct Graph {
  Nodes nodes;
  std::vector<std::shared_ptr<UserObject>> objects;
};

struct Stream {
  explicit Stream(Device* device) : device(device) {}
  Device* device;
  std::deque<Operation> waiting;
  bool running = false;
  Graph* captured = nullptr;  // What a capture that is on makes.
  bool invalidated = false;   // The capture broke a rule.
};

struct Event {
  Device* device;
  std::shared_ptr<Marker> marker;
  bool timed;
};

struct Module {
  void* library;
  std::map<std::string, const Kernel*> kernels;
};

struct World {
  std::vector<std::unique_ptr<Device>> devices;
  static inline thread_local Device* current = nullptr;
  static inline thread_local std::vector<Device*> stack;  // Contexts that were pushed aside.
  std::map<Address, Allocation> memory;  // Addresses are never used twice.
  std::set<Stream*> streams;
  std::set<Event*> events;
  std::set<Module*> modules;
  std::set<Graph*> graphs, executables;
  std::map<std::string, int> calls;
  std::vector<std::string> violations;
  static inline thread_local const char* call = "";  // The driver's function that is running.
  static inline thread_local bool in_host_function = false;
  std::recursive_mutex gate;  // Threads come one at a time.
  bool eager = false;      // Work runs as soon as it is queued.
  bool backwards = false;  // Threads and blocks run in reverse order.
  const char* (*load)(const char* ptx) = nullptr;  // The path of the library of a module's kernels; null: not simulated.
};

World& world();

// Remember that `call` broke a rule of CUDA.
Result broken(Result code, const std::string& why);

// The allocation that holds `size` bytes from `first` on; nullptr where there is none.
const Allocation* holds(Address first, size_t size);

// Run what waits in a stream, up to a marker or all of it.
void drain(Stream* stream, const Marker* until = nullptr);

// Run what waits in all streams of a device.
void drain_all(const Device* device);

// Queue work, or add it to the stream's capture.
Result queue(Stream* stream, const char* what, std::function<void()> run, const void* host = nullptr, Address from = 0,
             Address to = 0);

// A grid of blocks of threads. An error breaks the device.
struct Launch {
  const Kernel* kernel;
  Device* device;
  uint32_t grid[3], block[3];
  bool cooperative;
  std::vector<char> parameters;
};
void run(const Launch& launch);

}  // namespace gpu
