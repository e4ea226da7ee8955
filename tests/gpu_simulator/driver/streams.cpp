// Streams, and events in them.
#include "call.hpp"

using namespace gpu;

namespace {

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

int cuStreamCreateWithPriority(Stream** stream, unsigned, int) {
  BEGIN;
  NEEDS_CONTEXT;
  NOT_IN_CAPTURE;
  *stream = new Stream(world().current);
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
  NEEDS_CONTEXT;
  if (reinterpret_cast<uintptr_t>(stream) <= 2) {  // The default stream: nothing waits in it.
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

int cuEventCreate(Event** event, unsigned flags) {
  BEGIN;
  NEEDS_CONTEXT;
  constexpr unsigned DISABLE_TIMING = 2;
  *event = new Event{world().current, nullptr, !(flags & DISABLE_TIMING)};
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
  REQUIRE(first->timed && last->timed, INVALID_HANDLE, "an event that takes no times");
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

}  // extern "C"
