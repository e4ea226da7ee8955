// Captures of streams, and graphs.
#include <utility>

#include "call.hpp"

using namespace gpu;

extern "C" {

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

int cuGraphGetNodes(Graph* graph, const Operation** nodes, size_t* count) {
  BEGIN;
  REQUIRE(world().graphs.count(graph) || world().executables.count(graph), INVALID_HANDLE, "no such graph, or it was destroyed");
  if (nodes) {
    REQUIRE(*count <= graph->nodes->size(), INVALID_VALUE, "the graph has fewer nodes");
    for (size_t number = 0; number < *count; number++) nodes[number] = &(*graph->nodes)[number];
  }
  *count = graph->nodes->size();
  return SUCCESS;
}

int cuGraphNodeGetType(const Operation* node, int* type) {
  constexpr int KERNEL = 0, MEMCPY = 1, HOST = 3, GRAPH = 4;
  const std::string what = node->what;
  *type = what.starts_with("cuMemcpy") ? MEMCPY : what == "cuLaunchHostFunc" ? HOST : what == "cuGraphLaunch" ? GRAPH : KERNEL;
  return SUCCESS;
}

int cuGraphChildGraphNodeGetGraph(const Operation* node, Graph** graph) {
  *graph = static_cast<Graph*>(const_cast<void*>(node->host));
  return SUCCESS;
}

// CUDA_MEMCPY3D.
struct CopyEnd {
  size_t x, y, z, level;
  int type;
  const void* host;
  Address device;
  void *array, *reserved;
  size_t pitch, height;
};

int cuGraphMemcpyNodeGetParams(const Operation* node, CopyEnd ends[2]) {
  constexpr int HOST = 1, DEVICE = 2, UNIFIED = 4;
  const std::string what = node->what;
  ends[0].type = what.starts_with("cuMemcpyHtoD") ? HOST : DEVICE;
  ends[1].type = what.starts_with("cuMemcpyDtoH") ? HOST : DEVICE;
  ends[0].host = ends[1].host = node->host;
  if (what == "cuMemcpyAsync") {  // The driver looks at the addresses when it copies.
    ends[0].type = ends[1].type = UNIFIED;
    ends[0].device = node->from;
    ends[1].device = node->to;
  }
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
    stream->waiting.insert(stream->waiting.begin(), nodes->begin(), nodes->end());
  }, executable);
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

}  // extern "C"
