// NVIDIA's management library, as far as PyTorch and nvidia-ml-py ask for the number of GPUs and their memory.

#include <cuda.h>

#include <cstdio>
#include <cstring>

#include "state.h"

using namespace virtual_gpu;

enum { NVML_SUCCESS = 0, NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3 };

struct Memory {
  unsigned long long total, free, used;
};

// A handle is the device's number + 1, so that it is not null.
static void* handle_of(unsigned device) { return (void*)uintptr_t(device + 1); }
static int device_of_handle(void* handle) { return int(uintptr_t(handle)) - 1; }

EXPORT int nvmlInit() { return NVML_SUCCESS; }
EXPORT int nvmlInit_v2() { return NVML_SUCCESS; }
EXPORT int nvmlInitWithFlags(unsigned) { return NVML_SUCCESS; }
EXPORT int nvmlShutdown() { return NVML_SUCCESS; }
EXPORT const char* nvmlErrorString(int) { return "not supported by the virtual GPU"; }

EXPORT int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = unsigned(device_count());
  return NVML_SUCCESS;
}
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = CUDA_VERSION;
  return NVML_SUCCESS;
}
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  if (int(index) >= device_count()) return NVML_INVALID_ARGUMENT;
  *handle = handle_of(index);
  return NVML_SUCCESS;
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** handle) {
  unsigned domain, number;
  if (sscanf(bus, "%x:%x", &domain, &number) != 2 || !number) return NVML_INVALID_ARGUMENT;
  return nvmlDeviceGetHandleByIndex_v2(number - 1, handle);
}
EXPORT int nvmlDeviceGetName(void*, char* name, unsigned length) {
  snprintf(name, length, "%s", card().name);
  return NVML_SUCCESS;
}
EXPORT int nvmlDeviceGetMemoryInfo(void* handle, Memory* memory) {
  size_t free_bytes, total_bytes;
  memory_info(device_of_handle(handle), &free_bytes, &total_bytes);
  *memory = {total_bytes, free_bytes, total_bytes - free_bytes};
  return NVML_SUCCESS;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return NVML_SUCCESS;
}
EXPORT int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return NVML_NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return NVML_NOT_SUPPORTED; }
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return NVML_NOT_SUPPORTED; }
