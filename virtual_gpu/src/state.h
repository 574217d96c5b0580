// The state of the virtual GPUs, which the implementations of NVIDIA's libraries share.
//
// Functions that stand for a CUDA call return 0, or the error of that call as a number: the runtime and the driver
// use the same numbers for the same errors.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace virtual_gpu {

constexpr size_t MiB = size_t(1) << 20;
constexpr size_t GiB = size_t(1) << 30;
constexpr int MAX_DEVICES = 16;

// The error numbers of CUDA that this library returns.
enum Error {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INVALID_CONFIGURATION = 9,
  INVALID_DEVICE = 101,
  PEER_ACCESS_UNSUPPORTED = 217,
  INVALID_HANDLE = 400,
  ILLEGAL_STATE = 401,
  NOT_READY = 600,
  NOT_SUPPORTED = 801,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_INVALIDATED = 901,
  CAPTURE_MERGE = 902,
  CAPTURE_UNMATCHED = 903,
  CAPTURE_UNJOINED = 904,
  CAPTURE_ISOLATION = 905,
  CAPTURE_IMPLICIT = 906,
  CAPTURED_EVENT = 907,
  CAPTURE_WRONG_THREAD = 908,
};
const char* error_name(int error);
const char* error_text(int error);

// ---- cards.cpp: what the GPUs are

struct Card {
  const char* key;
  const char* name;
  int major, minor;             // compute capability
  int multiprocessors, l2_mib, bus_bits;
  int threads, blocks;          // per multiprocessor
  int shared_kib;               // shared memory of a multiprocessor
  size_t total;                 // bytes that cudaMemGetInfo reports as total
  bool peer_access;             // whether cards of this kind read each other's memory
};
const Card& card();
size_t context_bytes();         // bytes in use before the first allocation: the CUDA context and loaded kernels
int device_count();
int current_device();           // of this thread
int set_device(int device);
int attribute(int which);       // the numbers of CUdevice_attribute, which are those of cudaDeviceAttr
void write_uuid(int device, char* uuid);  // 16 bytes
bool verbose();
double seconds();               // of a monotonic clock

// ---- launches.cpp: what runs

enum Kind { TORCH, TRITON, LIBRARY, MEMSET, KINDS };

struct Kernel {
  std::string name;
  Kind kind = TORCH;
  std::atomic<uint64_t> count{0};
  int registers = 32, local = 0, shared = 0, max_threads = 1024, architecture = 0;
  bool is_true = false;         // whether its result, a single boolean, reads back as true
  double seconds = -1;          // on the GPU; below 0 before its first launch
};
Kernel* kernel_named(const char* name, Kind kind);
void register_kernel(const void* host_function, const char* name, int thread_limit);
Kernel* kernel_of(const void* host_function_or_handle);
int launch(Kernel* kernel, void* stream);
int library_call(const char* name, void* stream);  // an execution of cuBLAS or cuDNN, counted as one launch
int occupancy(const Kernel* kernel, int threads, size_t dynamic_shared);
void count_sync(const char* call);
const Kernel* last_kernel();    // that this thread has launched
void set_last_kernel(const Kernel* kernel);
void occupy_until(void* stream, double time);  // a time of seconds()
void wait_until(double time);
void wait_for_stream(void* stream);
void wait_for_all_streams();
bool is_finite();               // whether copies to the host contain finite numbers

struct Graph;
Graph* new_graph();
uint64_t graph_nodes(const Graph* graph);
void add_host_function(Graph* graph, void (*function)(void*), void* argument);
void add_copy(Graph* graph, const char* name);
int instantiate(Graph* graph);
void release_instance(Graph* graph);
int launch_graph(Graph* graph, void* stream);

// ---- memory.cpp

int allocate(void** pointer, size_t bytes, int device);
int release(void* pointer);
int take_physical(int device, size_t bytes);
void give_physical(int device, size_t bytes);
int reserve_addresses(uint64_t* address, size_t bytes, size_t alignment, int device);
void release_addresses(uint64_t address);
void memory_info(int device, size_t* free_bytes, size_t* total_bytes);
int device_of(const void* pointer);  // -1 for host memory
bool range_of(const void* pointer, uint64_t* base, size_t* bytes);
void pin(const void* pointer, size_t bytes);
void unpin(const void* pointer);
bool is_pinned(const void* pointer);
int copy(void* target, const void* source, size_t bytes, bool waits, void* stream);
void reset_memory_counters();
std::string memory_counters();       // members of a JSON object

// ---- capture.cpp: stream capture

struct Capture;
struct Stream {
  uint64_t id;
  int priority;
  unsigned flags;
  int device;
  Capture* capture = nullptr;
  std::atomic<double> busy_until{0};  // when its kernels will have ended
};
struct Event {
  std::atomic<double> time{0};       // when the work before it has ended
  uint64_t capture = 0;              // the capture in which it was last recorded, or 0
  bool is_recorded = false;
  Stream* stream = nullptr;
};
Stream* new_stream(unsigned flags, int priority);
Stream* stream_of(void* handle);
bool is_legacy(void* stream);
extern std::atomic<int> captures;    // under way; with 0, none of the checks below has anything to do
int begin_capture(void* stream, int mode);
int end_capture(void* stream, Graph** graph);
int capture_status(void* stream, int* status, uint64_t* id, Graph** graph);
int exchange_capture_mode(int mode);
int check_unsafe(const char* call);  // a call that a capture forbids: cudaMalloc, cudaEventQuery, loading a module ...
int check_stream_sync(void* stream, const char* call);
int check_device_sync(const char* call);
int check_legacy(const char* call);
int check_event(Event* event, const char* call);
int record_event(Event* event, void* stream);
int wait_event(void* stream, Event* event);
int use_stream(void* stream, Graph** graph, const char* what);  // *graph: where the work is recorded, or nullptr
void break_capture(void* stream, const char* what, int error);

}  // namespace virtual_gpu
