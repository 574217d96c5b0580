// The cards: their properties, which come from the environment, and each thread's current device.

#include <cuda.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "state.h"

namespace virtual_gpu {

// A card's cudaMemGetInfo reports slightly less than its nominal memory.
static const Card CARDS[] = {
    // key, name, capability, multiprocessors, L2, bus, threads, blocks, shared, total, peer access
    {"3060", "NVIDIA GeForce RTX 3060", 8, 6, 28, 3, 192, 1536, 16, 100, 12 * GiB - 256 * MiB, false},
    {"3080", "NVIDIA GeForce RTX 3080", 8, 6, 68, 5, 320, 1536, 16, 100, 10 * GiB - 256 * MiB, false},
    {"3090", "NVIDIA GeForce RTX 3090", 8, 6, 82, 6, 384, 1536, 16, 100, 24 * GiB - 360 * MiB, false},
    {"4060", "NVIDIA GeForce RTX 4060", 8, 9, 24, 24, 128, 1536, 24, 100, 8 * GiB - 256 * MiB, false},
    {"4060ti", "NVIDIA GeForce RTX 4060 Ti", 8, 9, 34, 32, 128, 1536, 24, 100, 16 * GiB - 256 * MiB, false},
    {"4070", "NVIDIA GeForce RTX 4070", 8, 9, 46, 36, 192, 1536, 24, 100, 12 * GiB - 256 * MiB, false},
    {"4080", "NVIDIA GeForce RTX 4080", 8, 9, 76, 64, 256, 1536, 24, 100, 16 * GiB - 256 * MiB, false},
    {"4090", "NVIDIA GeForce RTX 4090", 8, 9, 128, 72, 384, 1536, 24, 100, 24 * GiB - 360 * MiB, false},
    {"a100", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 40, 5120, 2048, 32, 164, 80 * GiB - 800 * MiB, true},
    {"h100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 50, 5120, 2048, 32, 228, 80 * GiB - 800 * MiB, true},
};

[[noreturn]] static void fail(const char* message, const char* value) {
  fprintf(stderr, "virtual_gpu: %s: %s\n", message, value);
  _exit(2);
}

// "24GiB", "24564MiB", "16GB" or a number of bytes
static size_t bytes_from(const char* text) {
  char* unit;
  double value = strtod(text, &unit);
  if (unit == text || value <= 0) fail("not a size in bytes, MiB, GiB, MB or GB", text);
  if (!*unit) return size_t(value);
  if (!strcasecmp(unit, "gib")) return size_t(value * GiB);
  if (!strcasecmp(unit, "mib")) return size_t(value * MiB);
  if (!strcasecmp(unit, "gb")) return size_t(value * 1e9);
  if (!strcasecmp(unit, "mb")) return size_t(value * 1e6);
  fail("not a size in bytes, MiB, GiB, MB or GB", text);
}

static Card configured_card() {
  const char* key = getenv("VIRTUAL_GPU");
  if (!key || !*key) key = "4090";
  for (Card card : CARDS) {
    if (strcasecmp(card.key, key)) continue;
    if (const char* memory = getenv("VIRTUAL_GPU_MEMORY")) card.total = bytes_from(memory);
    if (const char* capability = getenv("VIRTUAL_GPU_CAPABILITY")) {
      if (sscanf(capability, "%d.%d", &card.major, &card.minor) != 2) fail("not a compute capability such as 8.6", capability);
    }
    return card;
  }
  for (const Card& card : CARDS) fprintf(stderr, "virtual_gpu: known card: %s\n", card.key);
  fail("unknown card", key);
}

const Card& card() {
  static const Card configured = configured_card();
  return configured;
}

size_t context_bytes() {
  static const size_t bytes = getenv("VIRTUAL_GPU_CONTEXT") ? bytes_from(getenv("VIRTUAL_GPU_CONTEXT")) : 420 * MiB;
  return bytes;
}

static int configured_count() {
  const char* text = getenv("VIRTUAL_GPU_COUNT");
  int installed = text ? atoi(text) : 1;
  if (installed < 0 || installed > MAX_DEVICES) fail("not a number of GPUs up to 16", text);
  // The cards are equal, so only the number of valid entries of CUDA_VISIBLE_DEVICES matters.
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) return installed;
  int count = 0;
  for (const char* at = visible; *at;) {
    char* end;
    long index = strtol(at, &end, 10);
    if (end == at || index < 0 || index >= installed) break;
    count++;
    at = *end == ',' ? end + 1 : end;
  }
  return count;
}

int device_count() {
  static const int count = configured_count();
  return count;
}

static thread_local int device_of_thread = 0;

int current_device() { return device_of_thread; }

int set_device(int device) {
  if (device < 0 || device >= device_count()) return INVALID_DEVICE;
  device_of_thread = device;
  return SUCCESS;
}

void write_uuid(int device, char* uuid) {
  memcpy(uuid, "virtual-gpu-----", 16);
  uuid[15] = char(device);
}

bool verbose() {
  static const bool value = getenv("VIRTUAL_GPU_VERBOSE") != nullptr;
  return value;
}

double seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

int attribute(int which) {
  const Card& c = card();
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
      return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
      return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH:
      return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
      return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
      return 48 << 10;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR:
      return 65536;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
      return 32;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
      return 2520000;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE:
      return 10501000;
    case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT:
      return 512;
    case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
      return 1;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      return c.multiprocessors;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
      return 2;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
      return c.l2_mib << 20;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH:
      return c.bus_bits;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
      return c.threads;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
      return c.blocks;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return c.major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      return c.minor;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
      return c.shared_kib << 10;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      return (c.shared_kib - 1) << 10;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK:
      return 1024;
    case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED:
      return c.major >= 9;
    default:
      return 0;
  }
}

struct ErrorText {
  int error;
  const char* name;
  const char* text;
};
// The texts are CUDA's: PyTorch and the extension recognize an error by its text.
static const ErrorText ERRORS[] = {
    {SUCCESS, "cudaSuccess", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {INVALID_CONFIGURATION, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {PEER_ACCESS_UNSUPPORTED, "cudaErrorPeerAccessUnsupported", "peer access is not supported between these two devices"},
    {INVALID_HANDLE, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {ILLEGAL_STATE, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {NOT_READY, "cudaErrorNotReady", "device not ready"},
    {NOT_SUPPORTED, "cudaErrorNotSupported", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {CAPTURE_MERGE, "cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"},
    {CAPTURE_UNMATCHED, "cudaErrorStreamCaptureUnmatched", "capture was not ended in the same stream as it began"},
    {CAPTURE_UNJOINED, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {CAPTURE_ISOLATION, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
    {CAPTURE_IMPLICIT, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {CAPTURED_EVENT, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"},
    {CAPTURE_WRONG_THREAD, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
};

const char* error_name(int error) {
  for (const ErrorText& known : ERRORS)
    if (known.error == error) return known.name;
  return "cudaErrorUnknown";
}

const char* error_text(int error) {
  for (const ErrorText& known : ERRORS)
    if (known.error == error) return known.text;
  return "unknown error";
}

}  // namespace virtual_gpu
