// Stream capture as CUDA's documentation describes it: what a capture forbids, and which error that returns.

#include <algorithm>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "state.h"

namespace virtual_gpu {

enum Mode { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };

struct Capture {
  uint64_t id;
  int mode;
  Stream* origin;
  std::thread::id thread;
  Graph* graph;
  bool is_broken = false;
  std::set<Stream*> streams;
  std::set<Stream*> unjoined;    // streams with work that the origin has not waited for
};

struct State {
  std::mutex lock;
  std::map<uint64_t, Capture*> captures;
  uint64_t last_id = 0;
};
static State& state() {
  static auto* value = new State;
  return *value;
}

std::atomic<int> captures{0};
static thread_local int thread_mode = GLOBAL;

using Guard = std::lock_guard<std::mutex>;

static int broken(Capture* capture, const char* what, int error) {
  if (capture) capture->is_broken = true;
  if (verbose()) fprintf(stderr, "virtual_gpu: capture broken by %s: %s\n", what, error_name(error));
  return error;
}

// ---- streams

bool is_legacy(void* stream) { return uintptr_t(stream) <= 2; }  // 0, 1: the legacy default stream; 2: the thread's

Stream* stream_of(void* handle) {
  static auto* legacy = new Stream{0, 0, 0, 0};
  return is_legacy(handle) ? legacy : (Stream*)handle;
}

Stream* new_stream(unsigned flags, int priority) {
  static std::atomic<uint64_t> last{0};
  return new Stream{++last, priority, flags, current_device()};
}

// ---- begin and end

int exchange_capture_mode(int mode) {
  std::swap(thread_mode, mode);
  return mode;
}

int begin_capture(void* handle, int mode) {
  Guard guard(state().lock);
  if (is_legacy(handle)) return CAPTURE_UNSUPPORTED;
  Stream* stream = stream_of(handle);
  if (stream->capture) return ILLEGAL_STATE;
  auto* capture = new Capture{++state().last_id, mode, stream, std::this_thread::get_id(), new_graph()};
  capture->streams.insert(stream);
  stream->capture = capture;
  state().captures[capture->id] = capture;
  captures++;
  return SUCCESS;
}

int end_capture(void* handle, Graph** graph) {
  Guard guard(state().lock);
  *graph = nullptr;
  Stream* stream = stream_of(handle);
  Capture* capture = stream->capture;
  if (!capture) return ILLEGAL_STATE;
  if (capture->origin != stream) return broken(capture, "ending it on another stream", CAPTURE_UNMATCHED);
  if (capture->mode != RELAXED && capture->thread != std::this_thread::get_id())
    return broken(capture, "ending it in another thread", CAPTURE_WRONG_THREAD);
  int error = capture->is_broken ? CAPTURE_INVALIDATED : capture->unjoined.empty() ? SUCCESS : CAPTURE_UNJOINED;
  if (error) broken(capture, "its end", error);
  else *graph = capture->graph;
  for (Stream* member : capture->streams) member->capture = nullptr;
  state().captures.erase(capture->id);
  captures--;
  delete capture;
  return error;
}

// A stream without cudaStreamNonBlocking waits for the legacy stream, and the reverse.
static Capture* capture_on_blocking_stream() {
  for (auto& [id, capture] : state().captures)
    for (Stream* stream : capture->streams)
      if (!(stream->flags & 1)) return capture;
  return nullptr;
}

int capture_status(void* handle, int* status, uint64_t* id, Graph** graph) {
  Guard guard(state().lock);
  *status = 0;
  if (is_legacy(handle)) return capture_on_blocking_stream() ? CAPTURE_IMPLICIT : SUCCESS;
  if (Capture* capture = stream_of(handle)->capture) {
    *status = capture->is_broken ? 2 : 1;
    if (id) *id = capture->id;
    if (graph) *graph = capture->graph;
  }
  return SUCCESS;
}

// ---- what a capture forbids

int check_unsafe(const char* call) {
  if (!captures || thread_mode == RELAXED) return SUCCESS;
  Guard guard(state().lock);
  auto thread = std::this_thread::get_id();
  int error = SUCCESS;
  for (auto& [id, capture] : state().captures) {
    bool is_own = capture->thread == thread;
    bool forbids = is_own ? capture->mode != RELAXED : thread_mode == GLOBAL && capture->mode == GLOBAL;
    if (forbids) error = broken(capture, call, CAPTURE_UNSUPPORTED);
  }
  return error;
}

int check_legacy(const char* call) {
  if (!captures) return SUCCESS;
  Guard guard(state().lock);
  Capture* capture = capture_on_blocking_stream();
  return capture ? broken(capture, call, CAPTURE_IMPLICIT) : SUCCESS;
}

int check_stream_sync(void* handle, const char* call) {
  if (!captures) return SUCCESS;
  if (is_legacy(handle)) return check_legacy(call);
  Guard guard(state().lock);
  Capture* capture = stream_of(handle)->capture;
  return capture ? broken(capture, call, CAPTURE_UNSUPPORTED) : SUCCESS;
}

int check_device_sync(const char* call) {
  if (!captures) return SUCCESS;
  Guard guard(state().lock);
  for (auto& [id, capture] : state().captures) broken(capture, call, CAPTURE_UNSUPPORTED);
  return CAPTURE_UNSUPPORTED;
}

// ---- events

static Capture* capture_of(Event* event) {
  auto known = state().captures.find(event->capture);
  return known == state().captures.end() ? nullptr : known->second;
}

int check_event(Event* event, const char* call) {
  if (!event->capture) return SUCCESS;
  Guard guard(state().lock);
  return broken(capture_of(event), call, CAPTURED_EVENT);
}

int record_event(Event* event, void* handle) {
  event->time = std::max(seconds(), stream_of(handle)->busy_until.load());
  event->is_recorded = true;
  event->capture = 0;
  event->stream = nullptr;
  if (!captures) return SUCCESS;
  if (is_legacy(handle)) return check_legacy("cudaEventRecord on the legacy stream");
  Guard guard(state().lock);
  Stream* stream = stream_of(handle);
  if (!stream->capture) return SUCCESS;
  if (stream->capture->is_broken) return CAPTURE_INVALIDATED;
  event->capture = stream->capture->id;
  event->stream = stream;
  return SUCCESS;
}

int wait_event(void* handle, Event* event) {
  occupy_until(handle, event->time);
  if (!captures) return event->capture ? CAPTURE_ISOLATION : SUCCESS;  // an event of a capture that has ended
  if (is_legacy(handle)) {
    if (!event->capture) return check_legacy("cudaStreamWaitEvent on the legacy stream");
    Guard guard(state().lock);
    return broken(capture_of(event), "the legacy stream waiting on a captured event", CAPTURE_IMPLICIT);
  }
  Guard guard(state().lock);
  Stream* stream = stream_of(handle);
  Capture* capture = stream->capture;
  if (capture && capture->is_broken) return CAPTURE_INVALIDATED;
  if (!event->capture) {
    if (!capture || !event->is_recorded) return SUCCESS;
    return broken(capture, "cudaStreamWaitEvent on an event of uncaptured work", CAPTURE_ISOLATION);
  }
  Capture* other = capture_of(event);
  if (!other) return capture ? broken(capture, "cudaStreamWaitEvent on an event of another capture", CAPTURE_MERGE) : CAPTURE_ISOLATION;
  if (other->is_broken) return CAPTURE_INVALIDATED;
  if (!capture) {
    stream->capture = other;
    other->streams.insert(stream);
    other->unjoined.insert(stream);
    return SUCCESS;
  }
  if (capture != other) {
    capture->is_broken = true;
    return broken(other, "cudaStreamWaitEvent across two captures", CAPTURE_MERGE);
  }
  other->unjoined.erase(event->stream);  // its later work makes the stream unjoined again
  return SUCCESS;
}

// ---- work

int use_stream(void* handle, Graph** graph, const char* what) {
  *graph = nullptr;
  if (!captures) return SUCCESS;
  if (is_legacy(handle)) return check_legacy(what);
  Guard guard(state().lock);
  Stream* stream = stream_of(handle);
  Capture* capture = stream->capture;
  if (!capture) return SUCCESS;
  if (capture->is_broken) return CAPTURE_INVALIDATED;
  if (stream != capture->origin) capture->unjoined.insert(stream);
  *graph = capture->graph;
  return SUCCESS;
}

void break_capture(void* handle, const char* what, int error) {
  Guard guard(state().lock);
  broken(stream_of(handle)->capture, what, error);
}

}  // namespace virtual_gpu
