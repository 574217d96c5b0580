// The CUDA runtime (libcudart), as PyTorch, bitsandbytes and Inductor call it.

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

#include "state.h"

namespace virtual_gpu {
void* driver_function(const char* name);
}
using namespace virtual_gpu;

static thread_local int last_error = SUCCESS;

// Remember an error for cudaGetLastError.
static cudaError_t result(int error) {
  if (error) {
    last_error = error;
    if (verbose()) fprintf(stderr, "virtual_gpu: returned %s\n", error_name(error));
  }
  return cudaError_t(error);
}

#define CHECK(expression) \
  if (int error_ = (expression)) return result(error_)

// ---- devices

EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return *count ? cudaSuccess : result(cudaErrorNoDevice);
}

EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int device) { return result(set_device(device)); }
EXPORT cudaError_t cudaInitDevice(int device, unsigned, unsigned) {
  return result(device < 0 || device >= device_count() ? INVALID_DEVICE : SUCCESS);
}
EXPORT cudaError_t cudaSetDeviceFlags(unsigned) { return cudaSuccess; }
EXPORT cudaError_t cudaGetDeviceFlags(unsigned* flags) {
  *flags = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceReset() { return cudaSuccess; }

EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

EXPORT cudaError_t cudaGetLastError() {
  int error = last_error;
  last_error = SUCCESS;
  return cudaError_t(error);
}
EXPORT cudaError_t cudaPeekAtLastError() { return cudaError_t(last_error); }
EXPORT const char* cudaGetErrorName(cudaError_t error) { return error_name(error); }
EXPORT const char* cudaGetErrorString(cudaError_t error) { return error_text(error); }

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= device_count()) return result(INVALID_DEVICE);
  const Card& c = card();
  cudaDeviceProp p;
  memset(&p, 0, sizeof p);
  strncpy(p.name, c.name, sizeof p.name - 1);
  write_uuid(device, p.uuid.bytes);
  p.totalGlobalMem = c.total;
  p.sharedMemPerBlock = 48 << 10;
  p.regsPerBlock = p.regsPerMultiprocessor = p.totalConstMem = 65536;
  p.warpSize = 32;
  p.memPitch = p.maxGridSize[0] = 2147483647;
  p.maxGridSize[1] = p.maxGridSize[2] = 65535;
  p.maxThreadsPerBlock = p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
  p.maxThreadsDim[2] = 64;
  p.major = c.major;
  p.minor = c.minor;
  p.textureAlignment = 512;
  p.texturePitchAlignment = 32;
  p.multiProcessorCount = c.multiprocessors;
  p.pciBusID = device + 1;
  p.asyncEngineCount = 2;
  p.memoryBusWidth = c.bus_bits;
  p.l2CacheSize = c.l2_mib << 20;
  p.persistingL2CacheMaxSize = p.l2CacheSize / 4 * 3;
  p.maxThreadsPerMultiProcessor = c.threads;
  p.maxBlocksPerMultiProcessor = c.blocks;
  p.sharedMemPerMultiprocessor = size_t(c.shared_kib) << 10;
  p.sharedMemPerBlockOptin = size_t(c.shared_kib - 1) << 10;
  p.reservedSharedMemPerBlock = 1024;
  p.canMapHostMemory = p.concurrentKernels = p.unifiedAddressing = p.streamPrioritiesSupported = 1;
  p.globalL1CacheSupported = p.localL1CacheSupported = p.managedMemory = p.concurrentManagedAccess = 1;
  p.computePreemptionSupported = p.cooperativeLaunch = p.hostRegisterSupported = p.memoryPoolsSupported = 1;
  p.clusterLaunch = c.major >= 9;
  *properties = p;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr which, int) {
  *value = attribute(which);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

static bool reach_each_other(int device, int peer) {
  int count = device_count();
  return device != peer && device >= 0 && peer >= 0 && device < count && peer < count && card().peer_access;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = reach_each_other(device, peer);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  return result(reach_each_other(current_device(), peer) ? SUCCESS : PEER_ACCESS_UNSUPPORTED);
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  if (lowest) *lowest = 0;
  if (highest) *highest = -5;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize() {
  CHECK(check_device_sync("cudaDeviceSynchronize"));
  count_sync("cudaDeviceSynchronize");
  wait_for_all_streams();
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetLimit(size_t* value, enum cudaLimit) {
  *value = 1024;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceSetLimit(enum cudaLimit, size_t) { return cudaSuccess; }

// ---- memory

EXPORT cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  CHECK(check_unsafe("cudaMalloc"));
  return result(allocate(pointer, bytes, current_device()));
}
EXPORT cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) {
  return result(allocate(pointer, bytes, current_device()));
}

static std::mutex managed_lock;
static std::set<void*> managed;

static bool forget_managed(void* pointer) {
  std::lock_guard<std::mutex> lock(managed_lock);
  return managed.erase(pointer) > 0;
}

EXPORT cudaError_t cudaFree(void* pointer) {
  CHECK(check_unsafe("cudaFree"));
  if (forget_managed(pointer)) return cudaFreeHost(pointer);
  return result(release(pointer));
}
EXPORT cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return result(release(pointer)); }

EXPORT cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  memory_info(current_device(), free_bytes, total_bytes);
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  CHECK(check_unsafe("cudaHostAlloc"));
  if (posix_memalign(pointer, 4096, bytes ? bytes : 1)) return result(OUT_OF_MEMORY);
  pin(*pointer, bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }

EXPORT cudaError_t cudaFreeHost(void* pointer) {
  CHECK(check_unsafe("cudaFreeHost"));
  unpin(pointer);
  free(pointer);
  return cudaSuccess;
}

// Managed memory is the host's here, and is not counted: its pages move to a GPU when they are used.
EXPORT cudaError_t cudaMallocManaged(void** pointer, size_t bytes, unsigned) {
  CHECK(cudaHostAlloc(pointer, bytes, 0));
  std::lock_guard<std::mutex> lock(managed_lock);
  managed.insert(*pointer);
  return cudaSuccess;
}
#if CUDART_VERSION >= 13000
EXPORT cudaError_t cudaMemPrefetchAsync(const void*, size_t, cudaMemLocation, unsigned, cudaStream_t) { return cudaSuccess; }
#else
EXPORT cudaError_t cudaMemPrefetchAsync(const void*, size_t, int, cudaStream_t) { return cudaSuccess; }
#endif

EXPORT cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  CHECK(check_unsafe("cudaHostRegister"));
  pin(pointer, bytes);
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void* pointer) {
  CHECK(check_unsafe("cudaHostUnregister"));
  unpin(pointer);
  return cudaSuccess;
}

EXPORT cudaError_t cudaHostGetDevicePointer(void** device_pointer, void* pointer, unsigned) {
  *device_pointer = pointer;
  return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* attributes, const void* pointer) {
  memset(attributes, 0, sizeof *attributes);
  attributes->device = device_of(pointer);
  if (attributes->device >= 0) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = (void*)pointer;
  } else if (is_pinned(pointer)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->device = current_device();
    attributes->devicePointer = attributes->hostPointer = (void*)pointer;
  } else {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->hostPointer = (void*)pointer;
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, enum cudaMemcpyKind) {
  return result(copy(target, source, bytes, true, nullptr));
}
EXPORT cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, enum cudaMemcpyKind, cudaStream_t stream) {
  return result(copy(target, source, bytes, false, stream));
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t bytes, cudaStream_t stream) {
  return result(copy(target, source, bytes, false, stream));
}
EXPORT cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, enum cudaMemcpyKind) { return cudaSuccess; }

EXPORT cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t stream) {
  static Kernel* kernel = kernel_named("[memset]", MEMSET);
  return result(launch(kernel, stream));
}
EXPORT cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  CHECK(check_unsafe("cudaMemset"));
  return cudaMemsetAsync(pointer, value, bytes, nullptr);
}

static void* symbol_memory() {
  void* pointer;
  allocate(&pointer, MiB, current_device());
  return pointer;
}
EXPORT cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
  static void* memory = symbol_memory();
  *pointer = memory;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetSymbolSize(size_t* bytes, const void*) {
  *bytes = MiB;
  return cudaSuccess;
}

// Memory pools: cudaMallocAsync allocates like cudaMalloc, so a pool holds what the device holds.
EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  *pool = cudaMemPool_t(uintptr_t(0x1000 + device));
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* pool, int device) { return cudaDeviceGetDefaultMemPool(pool, device); }
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr, void* value) {
  size_t free_bytes, total_bytes;
  memory_info(int(uintptr_t(pool) - 0x1000), &free_bytes, &total_bytes);
  *(uint64_t*)value = total_bytes - free_bytes - context_bytes();
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, enum cudaMemPoolAttr, void*) { return cudaSuccess; }
EXPORT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const struct cudaMemAccessDesc*, size_t) { return cudaSuccess; }
EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetGraphMemAttribute(int, enum cudaGraphMemAttributeType, void* value) {
  *(uint64_t*)value = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceSetGraphMemAttribute(int, enum cudaGraphMemAttributeType, void*) { return cudaSuccess; }

// ---- streams

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  *stream = cudaStream_t(new_stream(flags, priority));
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (!is_legacy(stream) && !stream_of(stream)->capture) delete stream_of(stream);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
  CHECK(check_stream_sync(stream, "cudaStreamQuery"));
  return result(stream_of(stream)->busy_until > seconds() ? NOT_READY : SUCCESS);
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  CHECK(check_stream_sync(stream, "cudaStreamSynchronize"));
  count_sync("cudaStreamSynchronize");
  wait_for_stream(stream);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return result(wait_event(stream, (Event*)event));
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  *flags = stream_of(stream)->flags;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = stream_of(stream)->id;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  *device = is_legacy(stream) ? current_device() : stream_of(stream)->device;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* argument, unsigned) {
  CHECK(check_stream_sync(stream, "cudaStreamAddCallback"));
  callback(stream, cudaSuccess, argument);
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  Graph* graph = nullptr;
  CHECK(use_stream(stream, &graph, "a host function"));
  if (graph) {
    add_host_function(graph, function, argument);
  } else {
    function(argument);
  }
  return cudaSuccess;
}

// ---- events

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = cudaEvent_t(new Event);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete (Event*)event;
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return result(record_event((Event*)event, stream));
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  if (!(flags & cudaEventRecordExternal)) return cudaEventRecord(event, stream);
  ((Event*)event)->time = seconds();
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
  CHECK(check_event((Event*)event, "cudaEventQuery"));
  CHECK(check_unsafe("cudaEventQuery"));
  return result(((Event*)event)->time > seconds() ? NOT_READY : SUCCESS);
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  CHECK(check_event((Event*)event, "cudaEventSynchronize"));
  CHECK(check_unsafe("cudaEventSynchronize"));
  count_sync("cudaEventSynchronize");
  wait_until(((Event*)event)->time);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  CHECK(check_event((Event*)start, "cudaEventElapsedTime"));
  CHECK(check_event((Event*)end, "cudaEventElapsedTime"));
  float elapsed = float((((Event*)end)->time - ((Event*)start)->time) * 1e3);
  *milliseconds = elapsed < 1e-3f ? 1e-3f : elapsed;  // autotuning divides by it
  return cudaSuccess;
}

// ---- kernels

EXPORT void** __cudaRegisterFatBinary(void*) { return (void**)malloc(16); }
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT char __cudaInitModule(void**) { return 1; }
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
EXPORT void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int limit, void*, void*, void*, void*, int*) {
  register_kernel(host, name, limit);
}

// A launch with <<<...>>> pushes its configuration, and the kernel's host function pops it.
struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
static thread_local Configuration configurations[8];
static thread_local int pushed = 0;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  if (pushed < 8) configurations[pushed++] = {grid, block, shared, stream};
  return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (!pushed) return cudaErrorMissingConfiguration;
  const Configuration& last = configurations[--pushed];
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *(cudaStream_t*)stream = last.stream;
  return cudaSuccess;
}

static cudaError_t launch_shape(Kernel* kernel, dim3 grid, dim3 block, cudaStream_t stream) {
  bool is_empty = !grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z;
  if (is_empty || uint64_t(block.x) * block.y * block.z > 1024 || grid.y > 65535 || grid.z > 65535) {
    if (verbose()) {
      fprintf(stderr, "virtual_gpu: invalid launch of %s: grid %u x %u x %u, block %u x %u x %u\n", kernel->name.c_str(), grid.x,
              grid.y, grid.z, block.x, block.y, block.z);
    }
    return result(INVALID_CONFIGURATION);
  }
  return result(launch(kernel, stream));
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = cudaKernel_t(kernel_of(function));
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetKernel(cudaKernel_t* kernel, const void* function) { return __cudaGetKernel(kernel, function); }
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  return launch_shape((Kernel*)kernel, grid, block, stream);
}
EXPORT cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  return launch_shape((Kernel*)kernel, grid, block, stream);
}
EXPORT cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  return launch_shape(kernel_of(function), grid, block, stream);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  return launch_shape(kernel_of(function), grid, block, stream);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
  return launch_shape(kernel_of(function), config->gridDim, config->blockDim, config->stream);
}

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* attributes, const void* function) {
  const Kernel* kernel = kernel_of(function);
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = kernel->max_threads;
  attributes->numRegs = kernel->registers;
  attributes->sharedSizeBytes = kernel->shared;
  attributes->localSizeBytes = kernel->local;
  attributes->ptxVersion = attributes->binaryVersion = kernel->architecture;
  attributes->maxDynamicSharedSizeBytes = 48 << 10;
  return cudaSuccess;
}

EXPORT cudaError_t cudaFuncSetAttribute(const void*, enum cudaFuncAttribute which, int value) {
  bool too_large = value > attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return result(which == cudaFuncAttributeMaxDynamicSharedMemorySize && too_large ? INVALID_VALUE : SUCCESS);
}
EXPORT cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, enum cudaFuncAttribute which, int value, int) {
  return cudaFuncSetAttribute(nullptr, which, value);
}
EXPORT cudaError_t cudaFuncSetCacheConfig(const void*, enum cudaFuncCache) { return cudaSuccess; }

EXPORT cudaError_t cudaGetFuncBySymbol(cudaFunction_t* kernel, const void* function) {
  *kernel = cudaFunction_t(kernel_of(function));
  return cudaSuccess;
}

#if CUDART_VERSION >= 12080
EXPORT cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void*, enum cudaJitOption*, void**, unsigned,
                                       enum cudaLibraryOption*, void**, unsigned) {
  *library = cudaLibrary_t(malloc(16));
  return cudaSuccess;
}
EXPORT cudaError_t cudaLibraryUnload(cudaLibrary_t library) {
  free((void*)library);
  return cudaSuccess;
}
EXPORT cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t, const char* name) {
  *kernel = cudaKernel_t(kernel_named(name, TORCH));
  return cudaSuccess;
}
#endif

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function, int threads,
                                                                          size_t shared, unsigned) {
  *blocks = occupancy(kernel_of(function), threads, shared);
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}
EXPORT cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t*) {
  *clusters = card().multiprocessors;
  return cudaSuccess;
}

EXPORT cudaError_t cudaProfilerStart() { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop() { return cudaSuccess; }

// PyTorch takes the driver's functions from here. CUDA 12 knows only the first form.
static cudaError_t find_driver_function(const char* name, void** function, enum cudaDriverEntryPointQueryResult* status) {
  *function = driver_function(name);
  if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long,
                                           enum cudaDriverEntryPointQueryResult* status) {
  return find_driver_function(name, function, status);
}
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                    enum cudaDriverEntryPointQueryResult* status) {
  return find_driver_function(name, function, status);
}

// ---- CUDA graphs: the launches of a graph are counted at each replay

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) {
  *mode = cudaStreamCaptureMode(exchange_capture_mode(*mode));
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  return result(begin_capture(stream, mode));
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return result(end_capture(stream, (Graph**)graph));
}

static cudaError_t capture_info(cudaStream_t stream, enum cudaStreamCaptureStatus* status, unsigned long long* id,
                                cudaGraph_t* graph) {
  int number;
  uint64_t capture_id = 0;
  Graph* captured = nullptr;
  CHECK(capture_status(stream, &number, &capture_id, &captured));
  *status = cudaStreamCaptureStatus(number);
  if (id) *id = capture_id;
  if (graph) *graph = cudaGraph_t(captured);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status) {
  return capture_info(stream, status, nullptr, nullptr);
}

#if CUDART_VERSION >= 13000
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus* status, unsigned long long* id,
                                            cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                            const cudaGraphEdgeData** edges, size_t* count) {
  if (edges) *edges = nullptr;
#else
EXPORT cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus* status, unsigned long long* id,
                                               cudaGraph_t* graph, const cudaGraphNode_t** dependencies, size_t* count) {
#endif
  if (dependencies) *dependencies = nullptr;
  if (count) *count = 0;
  return capture_info(stream, status, id, graph);
}

#if CUDART_VERSION >= 13000
EXPORT cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t, unsigned) {
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* count) {
#else
EXPORT cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, size_t, unsigned) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, size_t* count) {
#endif
  *count = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* instance, cudaGraph_t graph, unsigned long long) {
  CHECK(check_unsafe("cudaGraphInstantiate"));
  if (!graph) return result(INVALID_VALUE);
  *instance = cudaGraphExec_t(graph);
  return result(instantiate((Graph*)graph));
}
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t* instance, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(instance, graph, flags);
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t instance, cudaStream_t stream) {
  return result(launch_graph((Graph*)instance, stream));
}
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t instance) {
  release_instance((Graph*)instance);
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = graph_nodes((Graph*)graph);
  return cudaSuccess;
}
EXPORT cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) { return cudaSuccess; }
EXPORT cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void*, cudaHostFn_t, unsigned, unsigned) {
  *object = cudaUserObject_t(malloc(16));
  return cudaSuccess;
}
EXPORT cudaError_t cudaUserObjectRelease(cudaUserObject_t, unsigned) { return cudaSuccess; }
