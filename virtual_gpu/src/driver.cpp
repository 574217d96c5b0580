// The CUDA driver (libcuda), as PyTorch, Triton, Inductor's launcher and cuda-bindings call it.

#include <cuda.h>
#include <dlfcn.h>
#include <elf.h>

#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>

#include "state.h"
#include "versions.inc"  // VERSIONS: {"cuMemAlloc", "cuMemAlloc_v2"}, ...; generated from cuda.h

using namespace virtual_gpu;

namespace virtual_gpu {

void* driver_function(const char* name) {
  static Dl_info own;
  static bool known = dladdr((void*)&driver_function, &own);
  static void* library = known ? dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD) : nullptr;
  for (const auto& version : VERSIONS) {
    if (strcmp(version.plain, name)) continue;
    if (void* function = dlsym(library, version.versioned)) return function;
  }
  return dlsym(library, name);
}

}  // namespace virtual_gpu

#define CHECK(expression) \
  if (int error_ = (expression)) return CUresult(error_)

// A device's context is a number, since nothing reads what it points to.
static const uintptr_t CONTEXTS = 0x7600;
static CUcontext context_of(int device) { return CUcontext(CONTEXTS + device); }
static int device_of_context(CUcontext context) { return context ? int(uintptr_t(context) - CONTEXTS) : 0; }

// ---- start and errors

EXPORT CUresult cuInit(unsigned) { return device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }

EXPORT CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetProcAddress(const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* status) {
  *function = driver_function(name);
  if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetExportTable(const void** table, const CUuuid*) {
  *table = nullptr;
  return CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = error_text(error);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : error_name(error);
  return CUDA_SUCCESS;
}

#if CUDA_VERSION >= 12090
EXPORT CUresult cuLogsRegisterCallback(CUlogsCallback, void*, CUlogsCallbackHandle* handle) {  // there are no logs
  if (handle) *handle = nullptr;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle) { return CUDA_SUCCESS; }
#endif

// ---- devices and contexts

EXPORT CUresult cuDeviceGetCount(int* count) {
  *count = device_count();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (ordinal < 0 || ordinal >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetName(char* name, int length, CUdevice) {
  snprintf(name, length, "%s", card().name);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  write_uuid(device, uuid->bytes);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceTotalMem(size_t* bytes, CUdevice) {
  *bytes = card().total;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
  *value = attribute(which);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceComputeCapability(int* major, int* minor, CUdevice) {
  *major = card().major;
  *minor = card().minor;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = context_of(device);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = context_of(current_device());
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetCurrent(CUcontext context) { return CUresult(set_device(device_of_context(context))); }
EXPORT CUresult cuCtxPushCurrent(CUcontext context) { return cuCtxSetCurrent(context); }
EXPORT CUresult cuCtxPopCurrent(CUcontext* context) { return context ? cuCtxGetCurrent(context) : CUDA_SUCCESS; }
EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  *device = current_device();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSynchronize() {
  CHECK(check_device_sync("cuCtxSynchronize"));
  count_sync("cuCtxSynchronize");
  wait_for_all_streams();
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetLimit(size_t* value, CUlimit) {
  *value = 0;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }

EXPORT CUresult cuStreamSynchronize(CUstream stream) {
  CHECK(check_stream_sync(stream, "cuStreamSynchronize"));
  count_sync("cuStreamSynchronize");
  wait_for_stream(stream);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuStreamWriteValue32(CUstream, CUdeviceptr, cuuint32_t, unsigned) { return CUDA_SUCCESS; }

static CUresult memset_on(CUstream stream) {
  static Kernel* kernel = kernel_named("[memset]", MEMSET);
  return CUresult(launch(kernel, stream));
}
EXPORT CUresult cuMemsetD32Async(CUdeviceptr, unsigned, size_t, CUstream stream) { return memset_on(stream); }
EXPORT CUresult cuMemsetD8Async(CUdeviceptr, unsigned char, size_t, CUstream stream) { return memset_on(stream); }

// ---- modules: ptxas has written a real cubin, which states the registers and memory of its kernels; it never runs

struct Module {
  std::unordered_map<std::string, int> registers, frame, shared;
};

// Attributes of the .nv.info section, as `readelf` and cuobjdump show them: a format byte (4: sized), the attribute's number,
// the length, and then pairs of a symbol's index and a value.
enum : unsigned char { SIZED = 4, FRAME_SIZE = 0x11, REGISTER_COUNT = 0x2f };

static void read_cubin(Module* module, const unsigned char* image) {
  if (memcmp(image, ELFMAG, SELFMAG)) return;
  auto* header = (const Elf64_Ehdr*)image;
  auto* sections = (const Elf64_Shdr*)(image + header->e_shoff);
  if (header->e_shentsize != sizeof(Elf64_Shdr) || !header->e_shstrndx) return;
  const char* names = (const char*)image + sections[header->e_shstrndx].sh_offset;
  const Elf64_Shdr *symbol_table = nullptr, *info = nullptr;
  for (int i = 0; i < header->e_shnum; i++) {
    const char* name = names + sections[i].sh_name;
    if (sections[i].sh_type == SHT_SYMTAB) symbol_table = &sections[i];
    if (!strcmp(name, ".nv.info")) info = &sections[i];
    if (!strncmp(name, ".nv.shared.", 11)) module->shared[name + 11] = int(sections[i].sh_size);
  }
  if (!symbol_table || !info) return;
  const char* strings = (const char*)image + sections[symbol_table->sh_link].sh_offset;
  auto* symbols = (const Elf64_Sym*)(image + symbol_table->sh_offset);
  const unsigned char *at = image + info->sh_offset, *end = at + info->sh_size;
  while (at + 4 <= end) {
    int format = at[0], which = at[1], length = at[2] | at[3] << 8;
    at += 4;
    if (format != SIZED) continue;
    if (length == 8 && (which == REGISTER_COUNT || which == FRAME_SIZE)) {
      uint32_t index, value;
      memcpy(&index, at, 4);
      memcpy(&value, at + 4, 4);
      auto& values = which == REGISTER_COUNT ? module->registers : module->frame;
      if (index < symbol_table->sh_size / sizeof(Elf64_Sym)) values[strings + symbols[index].st_name] = int(value);
    }
    at += length;
  }
}

EXPORT CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  CHECK(check_unsafe("cuModuleLoadData"));
  auto* loaded = new Module;
  read_cubin(loaded, (const unsigned char*)image);
  *module = CUmodule(loaded);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(module, image);
}
EXPORT CUresult cuModuleLoad(CUmodule* module, const char* path) {
  FILE* file = fopen(path, "rb");
  if (!file) return CUDA_ERROR_FILE_NOT_FOUND;
  std::string image;
  char block[65536];
  while (size_t bytes = fread(block, 1, sizeof block, file)) image.append(block, bytes);
  fclose(file);
  return cuModuleLoadData(module, image.data());
}
EXPORT CUresult cuModuleUnload(CUmodule module) {
  delete (Module*)module;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  Kernel* kernel = kernel_named(name, TRITON);
  auto read = [name](const std::unordered_map<std::string, int>& values, int& target) {
    auto value = values.find(name);
    if (value != values.end()) target = value->second;
  };
  read(((Module*)module)->registers, kernel->registers);
  read(((Module*)module)->frame, kernel->local);
  read(((Module*)module)->shared, kernel->shared);
  *function = CUfunction(kernel);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetGlobal(CUdeviceptr* pointer, size_t* bytes, CUmodule, const char*) {
  void* memory;
  CHECK(allocate(&memory, 4096, current_device()));
  if (pointer) *pointer = CUdeviceptr(memory);
  if (bytes) *bytes = 4096;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuLibraryLoadData(CUlibrary* library, const void* image, CUjit_option*, void**, unsigned, CUlibraryOption*, void**,
                                  unsigned) {
  return cuModuleLoadData((CUmodule*)library, image);
}
EXPORT CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
  return cuModuleGetFunction((CUfunction*)kernel, (CUmodule)library, name);
}
EXPORT CUresult cuLibraryUnload(CUlibrary library) { return cuModuleUnload((CUmodule)library); }
EXPORT CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  *function = (CUfunction)kernel;
  return CUDA_SUCCESS;
}

// ---- kernels

EXPORT CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction function) {
  const Kernel* kernel = kernel_of(function);
  switch (which) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = kernel->max_threads;
      break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
      *value = kernel->shared;
      break;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
      *value = kernel->local;
      break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      *value = kernel->registers;
      break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
      *value = kernel->architecture;
      break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      *value = 48 << 10;
      break;
    default:
      *value = 0;
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute which, int value) {
  bool too_large = value > attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  return which == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && too_large ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                               CUstream stream, void**, void**) {
  return CUresult(launch((Kernel*)function, stream));
}
EXPORT CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                          CUstream stream, void**) {
  return CUresult(launch((Kernel*)function, stream));
}
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**, void**) {
  return CUresult(launch((Kernel*)function, config->hStream));
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function, int threads, size_t shared) {
  *blocks = occupancy((Kernel*)function, threads, shared);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  *clusters = card().multiprocessors;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                       const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                       CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  memset(map, 0, sizeof *map);
  return CUDA_SUCCESS;
}

// ---- memory

EXPORT CUresult cuMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  memory_info(current_device(), free_bytes, total_bytes);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAlloc(CUdeviceptr* pointer, size_t bytes) {
  CHECK(check_unsafe("cuMemAlloc"));
  return CUresult(allocate((void**)pointer, bytes, current_device()));
}
EXPORT CUresult cuMemFree(CUdeviceptr pointer) {
  CHECK(check_unsafe("cuMemFree"));
  return CUresult(release((void*)pointer));
}
EXPORT CUresult cuMemcpyHtoD(CUdeviceptr target, const void* source, size_t bytes) {
  return CUresult(copy((void*)target, source, bytes, true, nullptr));
}
EXPORT CUresult cuMemcpyDtoH(void* target, CUdeviceptr source, size_t bytes) {
  return CUresult(copy(target, (void*)source, bytes, true, nullptr));
}
EXPORT CUresult cuMemcpyHtoDAsync(CUdeviceptr target, const void* source, size_t bytes, CUstream stream) {
  return CUresult(copy((void*)target, source, bytes, false, stream));
}
EXPORT CUresult cuMemcpyDtoHAsync(void* target, CUdeviceptr source, size_t bytes, CUstream stream) {
  return CUresult(copy(target, (void*)source, bytes, false, stream));
}

EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute which, CUdeviceptr address) {
  auto* pointer = (void*)address;
  int device = device_of(pointer);
  bool is_known = device >= 0 || is_pinned(pointer);
  uint64_t base = 0;
  size_t bytes = 0;
  switch (which) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      if (!is_known) return CUDA_ERROR_INVALID_VALUE;
      *(CUdeviceptr*)value = address;
      break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      if (!is_known) return CUDA_ERROR_INVALID_VALUE;
      *(unsigned*)value = device >= 0 ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
      break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *(int*)value = device >= 0 ? device : current_device();
      break;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *(CUcontext*)value = context_of(device >= 0 ? device : current_device());
      break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      range_of(pointer, &base, nullptr);
      *(uint64_t*)value = base;
      break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      range_of(pointer, nullptr, &bytes);
      *(size_t*)value = bytes;
      break;
    default:
      *(int*)value = 0;
  }
  return CUDA_SUCCESS;
}
EXPORT CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* which, void** values, CUdeviceptr pointer) {
  for (unsigned i = 0; i < count; i++) cuPointerGetAttribute(values[i], which[i], pointer);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr pointer) {
  uint64_t start;
  size_t length;
  if (!range_of((void*)pointer, &start, &length)) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = start;
  if (bytes) *bytes = length;
  return CUDA_SUCCESS;
}

// ---- virtual memory, for the allocator's expandable segments: physical blocks are mapped into reserved addresses

struct Physical {
  size_t bytes;
  int device;
  int references;
};

struct Mappings {
  std::mutex lock;
  std::unordered_map<uint64_t, Physical*> by_address;
};
static Mappings& mappings() {
  static auto* value = new Mappings;
  return *value;
}

static void drop(Physical* block) {
  if (--block->references) return;
  give_physical(block->device, block->bytes);
  delete block;
}

EXPORT CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = 2 * MiB;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t bytes, size_t alignment, CUdeviceptr, unsigned long long) {
  uint64_t address;
  CHECK(reserve_addresses(&address, bytes, alignment, current_device()));
  *pointer = address;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr pointer, size_t) {
  release_addresses(pointer);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties,
                            unsigned long long) {
  int device = properties ? properties->location.id : current_device();
  CHECK(take_physical(device, bytes));
  *handle = CUmemGenericAllocationHandle(new Physical{bytes, device, 1});
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> guard(mappings().lock);
  drop((Physical*)handle);
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemMap(CUdeviceptr pointer, size_t, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
  std::lock_guard<std::mutex> guard(mappings().lock);
  auto* block = (Physical*)handle;
  block->references++;
  mappings().by_address[pointer] = block;
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {  // the range may contain several mappings
  std::lock_guard<std::mutex> guard(mappings().lock);
  auto& by_address = mappings().by_address;
  for (uint64_t address = pointer; address < pointer + bytes;) {
    auto mapping = by_address.find(address);
    if (mapping == by_address.end()) {
      address += 2 * MiB;
      continue;
    }
    address += mapping->second->bytes;
    drop(mapping->second);
    by_address.erase(mapping);
  }
  return CUDA_SUCCESS;
}
EXPORT CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }

// CUPTI 13.2 calls itself until the stack overflows, where a driver lacks what it asks for.
EXPORT int cuptiGetVersion(uint32_t*) { return 15; }  // CUPTI_ERROR_NOT_INITIALIZED
