// Kernels, launches and synchronizations, all of which are only counted.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "state.h"

namespace virtual_gpu {

// Nothing static here is ever destroyed: PyTorch's exit handlers still call CUDA.
template <class T>
static T& forever() {
  static auto* value = new T;
  return *value;
}

static std::mutex& lock() { return forever<std::mutex>(); }

struct Registry {
  std::deque<Kernel> kernels;
  std::map<std::pair<Kind, std::string>, Kernel*> by_name;
  std::unordered_map<const void*, Kernel*> by_host_function;
  std::set<const void*> handles;
};
static Registry& registry() { return forever<Registry>(); }

struct Calls {
  std::map<std::string, uint64_t> syncs, unknown;
};
static Calls& calls() { return forever<Calls>(); }

static const char* const KIND_NAMES[KINDS] = {"torch", "triton", "library", "memset"};

static std::atomic<uint64_t> all_launches{0}, all_syncs{0}, graph_launches{0}, in_graphs{0}, outside_capture{0};
static std::atomic<bool> finite{getenv("VIRTUAL_GPU_NOT_FINITE") == nullptr};
static thread_local const Kernel* last = nullptr;

bool is_finite() { return finite; }
const Kernel* last_kernel() { return last; }
void set_last_kernel(const Kernel* kernel) { last = kernel; }

// ---- kernels

// VIRTUAL_GPU_KERNEL_NS has nanoseconds of all kernels, or of those of a kind or with a part of a name.
static double seconds_by_table(const Kernel& kernel) {
  const char* table = getenv("VIRTUAL_GPU_KERNEL_NS");
  if (!table) return 0;
  std::stringstream rows(table);
  for (std::string row; std::getline(rows, row, ',');) {
    size_t end = row.find('=');
    std::string part = end == std::string::npos ? "" : row.substr(0, end);
    if (part != KIND_NAMES[kernel.kind] && kernel.name.find(part) == std::string::npos) continue;
    return 1e-9 * atof(row.c_str() + (end == std::string::npos ? 0 : end + 1));
  }
  return 0;
}

// Seconds of a kernel on the GPU. It is known from its first launch on: a fork may have another table than its parent.
static double seconds_of(Kernel* kernel) {
  if (kernel->seconds < 0) kernel->seconds = seconds_by_table(*kernel);
  return kernel->seconds;
}

// A wheel of PyTorch contains code for some architectures. The nearest one below the card's runs.
static int architecture_for(Kind kind) {
  int own = card().major * 10 + card().minor;
  if (kind != TORCH) return own;
  int best = 75;
  for (int built : {80, 86, 90, 100, 120})
    if (built <= own) best = built;
  return best;
}

static Kernel* find_or_add(const char* name, Kind kind) {
  Kernel*& kernel = registry().by_name[{kind, name}];
  if (kernel) return kernel;
  kernel = &registry().kernels.emplace_back();
  kernel->name = name;
  kernel->kind = kind;
  kernel->architecture = architecture_for(kind);
  // `x.isfinite().all()` ends with a reduction by "and", `isfinite(scalar)` with a product of booleans.
  kernel->is_true = strstr(name, "and_kernel_cuda") || strstr(name, "MulFunctorIbE");
  registry().handles.insert(kernel);
  return kernel;
}

Kernel* kernel_named(const char* name, Kind kind) {
  std::lock_guard<std::mutex> guard(lock());
  return find_or_add(name, kind);
}

void register_kernel(const void* host_function, const char* name, int thread_limit) {
  std::lock_guard<std::mutex> guard(lock());
  Kernel* kernel = find_or_add(name, TORCH);
  if (thread_limit > 0 && thread_limit < kernel->max_threads) kernel->max_threads = thread_limit;
  registry().by_host_function[host_function] = kernel;
}

Kernel* kernel_of(const void* function) {
  struct Slot {
    const void* function;
    Kernel* kernel;
  };
  static thread_local Slot cache[1024];  // a launch must cost the host no more than a real driver's
  Slot& slot = cache[(uintptr_t(function) >> 4) & 1023];
  if (slot.function == function && slot.kernel) return slot.kernel;
  std::lock_guard<std::mutex> guard(lock());
  auto known = registry().by_host_function.find(function);
  if (known != registry().by_host_function.end()) {
    slot = {function, known->second};
  } else if (registry().handles.count(function)) {
    slot = {function, (Kernel*)function};
  } else {
    char name[64];
    snprintf(name, sizeof name, "unregistered@%p", function);
    slot = {function, find_or_add(name, TORCH)};
  }
  return slot.kernel;
}

int occupancy(const Kernel* kernel, int threads, size_t dynamic_shared) {
  if (threads <= 0) return 0;
  int warps = (threads + 31) / 32;
  int blocks = card().threads / 32 / warps;
  size_t shared = dynamic_shared + kernel->shared + 1024;
  blocks = std::min(blocks, int((size_t(card().shared_kib) << 10) / shared));
  if (kernel->registers > 0) blocks = std::min(blocks, 65536 / ((kernel->registers + 7) / 8 * 8 * warps * 32));
  return std::max(0, std::min(blocks, card().blocks));
}

// ---- the GPU's clock: kernels of a stream run one after the other, from when they are launched

static std::atomic<double> all_busy_until{0};

void occupy_until(void* stream, double time) {
  auto& busy_until = stream_of(stream)->busy_until;
  busy_until = std::max(busy_until.load(), time);
  all_busy_until = std::max(all_busy_until.load(), time);
}

static void occupy(void* stream, double of_kernel) {
  if (of_kernel) occupy_until(stream, std::max(seconds(), stream_of(stream)->busy_until.load()) + of_kernel);
}

void wait_until(double time) {
  double left = time - seconds();
  if (left > 0) std::this_thread::sleep_for(std::chrono::duration<double>(left));
}

void wait_for_stream(void* stream) { wait_until(stream_of(stream)->busy_until); }

void wait_for_all_streams() { wait_until(all_busy_until); }

// ---- graphs

struct Graph {
  std::map<Kernel*, uint64_t> launches;
  uint64_t nodes = 0;
  std::vector<std::pair<void (*)(void*), void*>> host_functions;
  size_t instance_bytes = 0;
  int device = 0;
};

Graph* new_graph() {
  auto* graph = new Graph;
  graph->device = current_device();
  return graph;
}

uint64_t graph_nodes(const Graph* graph) { return graph->nodes; }

static void add_node(Graph* graph, Kernel* kernel) {
  std::lock_guard<std::mutex> guard(lock());
  graph->launches[kernel]++;
  graph->nodes++;
}

void add_copy(Graph* graph, const char* name) { add_node(graph, kernel_named(name, LIBRARY)); }

void add_host_function(Graph* graph, void (*function)(void*), void* argument) {
  std::lock_guard<std::mutex> guard(lock());
  graph->host_functions.push_back({function, argument});
  graph->nodes++;
}

// Old drivers hold 64 KiB of device memory for each node of an instantiated graph; VIRTUAL_GPU_GRAPH_NODE sets the bytes.
int instantiate(Graph* graph) {
  static const size_t node_bytes = getenv("VIRTUAL_GPU_GRAPH_NODE") ? atol(getenv("VIRTUAL_GPU_GRAPH_NODE")) : 0;
  size_t bytes = node_bytes * graph->nodes;
  if (bytes && take_physical(graph->device, bytes)) return OUT_OF_MEMORY;
  graph->instance_bytes = bytes;
  return SUCCESS;
}

void release_instance(Graph* graph) {
  if (graph->instance_bytes) give_physical(graph->device, graph->instance_bytes);
  graph->instance_bytes = 0;
}

int launch_graph(Graph* graph, void* stream) {
  if (captures.load()) {
    int status;
    if (int error = capture_status(stream, &status, nullptr, nullptr)) return error;
  }
  graph_launches++;
  double of_kernels = 0;
  for (auto& [kernel, count] : graph->launches) {
    of_kernels += double(count) * seconds_of(kernel);
    kernel->count += count;
    all_launches += count;
    in_graphs += count;
  }
  occupy(stream, of_kernels);
  for (auto& [function, argument] : graph->host_functions) function(argument);
  return SUCCESS;
}

// ---- launches

// Stand in for the driver's time per launch, which is next to nothing here.
static void spend_launch_time() {
  static const long nanoseconds = getenv("VIRTUAL_GPU_LAUNCH_NS") ? atol(getenv("VIRTUAL_GPU_LAUNCH_NS")) : 0;
  if (!nanoseconds) return;
  double end = seconds() + 1e-9 * double(nanoseconds);
  while (seconds() < end) {
  }
}

int launch(Kernel* kernel, void* stream) {
  // CUDA refuses a kernel on a stream of another device than the current one.
  if (!is_legacy(stream) && stream_of(stream)->device != current_device()) return INVALID_HANDLE;
  last = kernel;
  if (captures.load(std::memory_order_relaxed)) {
    Graph* graph = nullptr;
    if (int error = use_stream(stream, &graph, kernel->name.c_str())) return error;
    if (graph) {
      add_node(graph, kernel);
      return SUCCESS;
    }
    outside_capture++;
    if (verbose()) fprintf(stderr, "virtual_gpu: launched outside the capture: %s\n", kernel->name.c_str());
  }
  kernel->count.fetch_add(1, std::memory_order_relaxed);
  all_launches.fetch_add(1, std::memory_order_relaxed);
  occupy(stream, seconds_of(kernel));
  spend_launch_time();
  return SUCCESS;
}

int library_call(const char* name, void* stream) {
  struct Slot {
    const char* name;  // a constant, so its address identifies it
    Kernel* kernel;
  };
  static thread_local Slot cache[256];
  Slot& slot = cache[(uintptr_t(name) >> 3) & 255];
  if (slot.name != name) slot = {name, kernel_named(name, LIBRARY)};
  return launch(slot.kernel, stream);
}

void count_sync(const char* call) {
  all_syncs++;
  std::lock_guard<std::mutex> guard(lock());
  calls().syncs[call]++;
}

// ---- calls that are not implemented

static bool starts_with(const char* name, const char* prefix) { return !strncmp(name, prefix, strlen(prefix)); }

static bool contains_any(const char* name, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    if (strstr(name, part)) return true;
  return false;
}

// CUDA's numbers for "not supported", which PyTorch turns into an exception.
static int not_supported(const char* name) {
  if (starts_with(name, "cublas")) return 15;
  if (starts_with(name, "cudnn")) return 3000;
  if (starts_with(name, "cufft")) return 16;
  if (starts_with(name, "cusparse")) return 10;
  if (starts_with(name, "cusolver")) return 9;
  return NOT_SUPPORTED;
}

static int report_unknown(const char* name) {
  std::lock_guard<std::mutex> guard(lock());
  if (!calls().unknown[name]++) fprintf(stderr, "virtual_gpu: %s is not implemented; it returned \"not supported\"\n", name);
  return not_supported(name);
}

// Every function that NVIDIA's libraries export and that has no implementation here ends up in this one; see build.py.
//
// What cuBLAS and cuDNN compute is one launch. Their setters write into the handles that libraries.cpp allocates. A call
// that would return something, or anything else, is unknown. `handle` is the call's first argument.
EXPORT int virtual_gpu_unimplemented(const char* name, void** handle) {
  bool is_blas = starts_with(name, "cublas") && !starts_with(name, "cublasLt");
  bool is_cudnn = starts_with(name, "cudnn");
  if (contains_any(name, {"Set", "Destroy"})) return 0;
  if ((is_blas || is_cudnn) && !contains_any(name, {"Get", "Create", "Init", "Find", "Restore", "Query"})) {
    void* stream = handle ? handle[is_blas ? 2 : 0] : nullptr;  // where libraries.cpp stores it
    return library_call(name, stream) ? 13 : 0;
  }
  return report_unknown(name);
}

// ---- counters

static std::string escaped(const std::string& text) {
  std::string result;
  for (char character : text) {
    if (character == '"' || character == '\\') result += '\\';
    result += character;
  }
  return result;
}

static std::string json_of(const std::map<std::string, uint64_t>& counts) {
  std::string json = "{";
  for (auto& [name, count] : counts) json += (json.size() > 1 ? ", \"" : "\"") + escaped(name) + "\": " + std::to_string(count);
  return json + "}";
}

EXPORT uint64_t virtual_gpu_launches() { return all_launches; }
EXPORT uint64_t virtual_gpu_syncs() { return all_syncs; }

EXPORT void virtual_gpu_set_finite(int value) { finite = value; }

EXPORT void virtual_gpu_reset() {
  reset_memory_counters();
  std::lock_guard<std::mutex> guard(lock());
  for (Kernel& kernel : registry().kernels) kernel.count = 0;
  calls() = {};
  all_launches = all_syncs = graph_launches = in_graphs = outside_capture = 0;
}

EXPORT const char* virtual_gpu_json() {
  std::string& json = forever<std::string>();
  std::string memory = memory_counters();
  std::lock_guard<std::mutex> guard(lock());
  std::map<std::string, uint64_t> kinds, kernels;
  for (const char* kind : KIND_NAMES) kinds[kind] = 0;
  for (Kernel& kernel : registry().kernels) {
    if (!kernel.count) continue;
    kinds[KIND_NAMES[kernel.kind]] += kernel.count;
    kernels[kernel.name] += kernel.count;
  }
  json = "{\"launches\": " + std::to_string(all_launches) + ", \"launches_by_kind\": " + json_of(kinds);
  json += ", \"syncs\": " + std::to_string(all_syncs) + ", \"syncs_by_call\": " + json_of(calls().syncs);
  json += ", \"graph_launches\": " + std::to_string(graph_launches);
  json += ", \"launches_in_graphs\": " + std::to_string(in_graphs);
  json += ", \"launches_outside_capture\": " + std::to_string(outside_capture) + ", " + memory;
  json += ", \"unknown_calls\": " + json_of(calls().unknown) + ", \"kernels\": " + json_of(kernels) + "}";
  return json.c_str();
}

// Write the counters of a process that has used a GPU.
static struct AtExit {
  ~AtExit() {
    const char* file = getenv("VIRTUAL_GPU_JSON");
    if (!file || !all_launches) return;
    if (FILE* out = fopen(file, "w")) {
      fputs(virtual_gpu_json(), out);
      fclose(out);
    }
  }
} at_exit;

}  // namespace virtual_gpu
