// Device memory as bookkeeping in a reserved address range that is never touched.

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "state.h"

namespace virtual_gpu {

static const size_t PAGE = 2 * MiB;           // the driver's granularity
static const size_t SPACE = 1024 * GiB;       // addresses of each device

static size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// Free address ranges, first fit.
class Addresses {
 public:
  void add(uint64_t base, size_t bytes) {
    auto next = holes_.lower_bound(base);
    if (next != holes_.end() && next->first == base + bytes) {
      bytes += next->second;
      next = holes_.erase(next);
    }
    if (next != holes_.begin()) {
      auto previous = std::prev(next);
      if (previous->first + previous->second == base) {
        previous->second += bytes;
        return;
      }
    }
    holes_[base] = bytes;
  }

  uint64_t take(size_t bytes, size_t alignment) {
    for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
      uint64_t begin = hole->first, end = hole->first + hole->second;
      uint64_t base = round_up(begin, alignment);
      if (base + bytes > end) continue;
      holes_.erase(hole);
      if (base > begin) holes_[begin] = base - begin;
      if (base + bytes < end) holes_[base + bytes] = end - base - bytes;
      return base;
    }
    return 0;
  }

 private:
  std::map<uint64_t, size_t> holes_;
};

struct Allocation {
  size_t bytes;
  uint64_t page;     // of a small allocation, which shares it with others; else 0
};

struct Page {
  size_t used;       // bytes handed out; freed ones are not reused before the page is empty
  int allocations;
};

struct Device {
  Addresses addresses;
  std::map<uint64_t, Allocation> allocations;
  std::map<uint64_t, size_t> reserved;         // ranges of the driver's virtual memory calls
  std::map<uint64_t, Page> pages;
  uint64_t open_page = 0;                      // which takes the next small allocation
  size_t physical = 0, peak = 0;
};

struct Memory {
  uint64_t base = 0;
  Device devices[MAX_DEVICES];
  std::map<uint64_t, size_t> pinned;
  uint64_t mallocs = 0, frees = 0, out_of_memory = 0;
};

static std::mutex& lock() {
  static auto* mutex = new std::mutex;  // never destroyed: PyTorch frees memory in its own exit handlers
  return *mutex;
}

static Memory* reserve_space() {
  size_t bytes = SPACE * MAX_DEVICES + PAGE;
  void* space = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) {
    perror("virtual_gpu: the address space of the GPUs cannot be reserved");
    _exit(2);
  }
  auto* memory = new Memory;
  memory->base = round_up(uint64_t(space), PAGE);
  for (int i = 0; i < MAX_DEVICES; i++) memory->devices[i].addresses.add(memory->base + i * SPACE, SPACE);
  return memory;
}

static Memory& memory() {
  static Memory* reserved = reserve_space();
  return *reserved;
}

int device_of(const void* pointer) {
  uint64_t offset = uint64_t(pointer) - memory().base;
  return offset < SPACE * MAX_DEVICES ? int(offset / SPACE) : -1;
}

static bool take(Device& device, size_t bytes) {
  if (device.physical + bytes + context_bytes() > card().total) {
    memory().out_of_memory++;
    return false;
  }
  device.physical += bytes;
  if (device.physical > device.peak) device.peak = device.physical;
  return true;
}

int take_physical(int device, size_t bytes) {
  std::lock_guard<std::mutex> guard(lock());
  return take(memory().devices[device], bytes) ? SUCCESS : OUT_OF_MEMORY;
}

void give_physical(int device, size_t bytes) {
  std::lock_guard<std::mutex> guard(lock());
  memory().devices[device].physical -= bytes;
}

// Up to 1 MiB, the driver packs allocations into pages of 2 MiB.
static uint64_t allocate_small(Device& device, size_t bytes) {
  size_t rounded = round_up(bytes, 512);
  if (!device.open_page || device.pages[device.open_page].used + rounded > PAGE) {
    if (!take(device, PAGE)) return 0;
    device.open_page = device.addresses.take(PAGE, PAGE);
    device.pages[device.open_page] = {0, 0};
  }
  Page& page = device.pages[device.open_page];
  uint64_t address = device.open_page + page.used;
  page.used += rounded;
  page.allocations++;
  device.allocations[address] = {bytes, device.open_page};
  return address;
}

int allocate(void** pointer, size_t bytes, int index) {
  *pointer = nullptr;
  if (!bytes) return SUCCESS;
  std::lock_guard<std::mutex> guard(lock());
  Device& device = memory().devices[index];
  uint64_t address = 0;
  if (bytes <= MiB) {
    address = allocate_small(device, bytes);
  } else if (take(device, round_up(bytes, PAGE))) {
    address = device.addresses.take(round_up(bytes, PAGE), PAGE);
    device.allocations[address] = {bytes, 0};
  }
  if (!address) return OUT_OF_MEMORY;
  memory().mallocs++;
  *pointer = (void*)address;
  return SUCCESS;
}

int release(void* pointer) {
  if (!pointer) return SUCCESS;
  int index = device_of(pointer);
  if (index < 0) return INVALID_VALUE;
  std::lock_guard<std::mutex> guard(lock());
  Device& device = memory().devices[index];
  auto allocation = device.allocations.find(uint64_t(pointer));
  if (allocation == device.allocations.end()) return INVALID_VALUE;
  memory().frees++;
  if (uint64_t page = allocation->second.page) {
    if (!--device.pages[page].allocations) {
      device.addresses.add(page, PAGE);
      device.physical -= PAGE;
      device.pages.erase(page);
      if (device.open_page == page) device.open_page = 0;
    }
  } else {
    size_t bytes = round_up(allocation->second.bytes, PAGE);
    device.addresses.add(uint64_t(pointer), bytes);
    device.physical -= bytes;
  }
  device.allocations.erase(allocation);
  return SUCCESS;
}

int reserve_addresses(uint64_t* address, size_t bytes, size_t alignment, int index) {
  std::lock_guard<std::mutex> guard(lock());
  Device& device = memory().devices[index];
  bytes = round_up(bytes, PAGE);
  *address = device.addresses.take(bytes, alignment < PAGE ? PAGE : alignment);
  if (!*address) return OUT_OF_MEMORY;
  device.reserved[*address] = bytes;
  return SUCCESS;
}

void release_addresses(uint64_t address) {
  int index = device_of((void*)address);
  if (index < 0) return;
  std::lock_guard<std::mutex> guard(lock());
  Device& device = memory().devices[index];
  auto range = device.reserved.find(address);
  if (range == device.reserved.end()) return;
  device.addresses.add(address, range->second);
  device.reserved.erase(range);
}

void memory_info(int index, size_t* free_bytes, size_t* total_bytes) {
  std::lock_guard<std::mutex> guard(lock());
  size_t used = memory().devices[index].physical + context_bytes(), total = card().total;
  if (free_bytes) *free_bytes = used > total ? 0 : total - used;
  if (total_bytes) *total_bytes = total;
}

bool range_of(const void* pointer, uint64_t* base, size_t* bytes) {
  int index = device_of(pointer);
  if (index < 0) return false;
  std::lock_guard<std::mutex> guard(lock());
  Device& device = memory().devices[index];
  uint64_t address = uint64_t(pointer);
  auto within = [&](uint64_t begin, size_t length) {
    if (address >= begin + length) return false;
    if (base) *base = begin;
    if (bytes) *bytes = length;
    return true;
  };
  auto allocation = device.allocations.upper_bound(address);
  if (allocation != device.allocations.begin()) {
    --allocation;
    if (within(allocation->first, allocation->second.bytes)) return true;
  }
  auto range = device.reserved.upper_bound(address);
  if (range == device.reserved.begin()) return false;
  --range;
  return within(range->first, range->second);
}

void pin(const void* pointer, size_t bytes) {
  std::lock_guard<std::mutex> guard(lock());
  memory().pinned[uint64_t(pointer)] = bytes;
}

void unpin(const void* pointer) {
  std::lock_guard<std::mutex> guard(lock());
  memory().pinned.erase(uint64_t(pointer));
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> guard(lock());
  auto range = memory().pinned.upper_bound(uint64_t(pointer));
  if (range == memory().pinned.begin()) return false;
  --range;
  return uint64_t(pointer) < range->first + range->second;
}

// ---- copies

struct Transfers {
  std::atomic<uint64_t> bytes{0}, number{0};
};
static Transfers to_device, to_host, within_device;

static void count(Transfers& transfers, size_t bytes) {
  transfers.bytes += bytes;
  transfers.number++;
}

// Large blocks give their pages back to the system, which reads them as zeros. A run of zeros then costs no host memory.
// VIRTUAL_GPU_HOST_PAGES=1 fills the pages, so that host memory can be measured.
static void write_zeros(void* target, size_t bytes) {
  static const bool fills = getenv("VIRTUAL_GPU_HOST_PAGES") != nullptr;
  char *begin = (char*)target, *end = begin + bytes;
  char *first = (char*)round_up(uint64_t(begin), 4096), *last = (char*)(uint64_t(end) & ~uint64_t(4095));
  if (fills || bytes < MiB || madvise(first, last - first, MADV_DONTNEED)) {
    memset(target, 0, bytes);
    return;
  }
  memset(begin, 0, first - begin);
  memset(last, 0, end - last);
}

// Nothing is computed, so what a copy would bring does not exist.
//
// Numbers are 0, or NaN while `is_finite` is off: all ones is NaN in every floating-point format. A single byte is a
// boolean: false, but true where it answers `isfinite().all()`.
static void write_result(void* target, size_t bytes) {
  if (bytes == 1) {
    const Kernel* kernel = last_kernel();
    *(char*)target = is_finite() && kernel && kernel->is_true;
  } else if (is_finite()) {
    write_zeros(target, bytes);
  } else {
    memset(target, 0xff, bytes);
  }
}

int copy(void* target, const void* source, size_t bytes, bool waits, void* stream) {
  bool on_device = device_of(target) >= 0, from_device = device_of(source) >= 0;
  const char* name = !on_device ? "[copy to host]" : from_device ? "[copy within device]" : "[copy to device]";
  if (captures.load(std::memory_order_relaxed)) {
    if (waits) {
      if (int error = check_legacy("cudaMemcpy")) return error;
      if (int error = check_unsafe("cudaMemcpy")) return error;
    } else {
      Graph* graph = nullptr;
      if (int error = use_stream(stream, &graph, name)) return error;
      if (graph && on_device != from_device && !is_pinned(on_device ? source : target)) {
        break_capture(stream, "a copy from or to pageable memory", CAPTURE_UNSUPPORTED);
        return CAPTURE_UNSUPPORTED;
      }
      if (graph) {
        add_copy(graph, name);
        return SUCCESS;
      }
    }
  }
  if (waits) {
    count_sync("cudaMemcpy");
    wait_for_all_streams();
  }
  if (on_device && from_device) {
    count(within_device, bytes);
    const Kernel* producer = last_kernel();
    library_call(name, stream);
    if (bytes == 1) set_last_kernel(producer);  // the copied boolean has the same value
  } else if (on_device) {
    count(to_device, bytes);
  } else if (from_device) {
    count(to_host, bytes);
    write_result(target, bytes);
  } else {
    memmove(target, source, bytes);
  }
  return SUCCESS;
}

// ---- counters

void reset_memory_counters() {
  std::lock_guard<std::mutex> guard(lock());
  Memory& all = memory();
  all.mallocs = all.frees = all.out_of_memory = 0;
  for (Device& device : all.devices) device.peak = device.physical;
  for (Transfers* transfers : {&to_device, &to_host, &within_device}) transfers->bytes = transfers->number = 0;
}

std::string memory_counters() {
  std::lock_guard<std::mutex> guard(lock());
  Memory& all = memory();
  std::string json;
  auto add = [&](const char* name, uint64_t value) { json += "\"" + std::string(name) + "\": " + std::to_string(value) + ", "; };
  add("mallocs", all.mallocs);
  add("frees", all.frees);
  add("out_of_memory", all.out_of_memory);
  add("copies_to_device", to_device.number);
  add("bytes_to_device", to_device.bytes);
  add("copies_to_host", to_host.number);
  add("bytes_to_host", to_host.bytes);
  add("copies_within_device", within_device.number);
  add("bytes_within_device", within_device.bytes);
  json += "\"devices\": [";
  for (int i = 0; i < device_count(); i++) {
    std::string bytes = std::to_string(all.devices[i].physical), peak = std::to_string(all.devices[i].peak);
    json += std::string(i ? ", " : "") + "{\"bytes\": " + bytes + ", \"peak_bytes\": " + peak + "}";
  }
  return json + "]";
}

}  // namespace virtual_gpu
