/* Device memory, pinned host memory, copies, and the virtual-memory calls behind "expandable segments". */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "host.h"

/* A piece of address space: an allocation, or a reservation with what is mapped into it. */
typedef struct Region {
    struct Region *next;
    char *start;
    size_t size;
    int32_t device;    /* -1: pinned host memory or a bare reservation */
} Region;

static Region *regions;
static pthread_mutex_t regions_lock = PTHREAD_MUTEX_INITIALIZER;

bool host_charge(int32_t device, uint64_t bytes) {
    HostDevice *owner = &host_devices[device];
    uint64_t used = __atomic_add_fetch(&owner->used, bytes, __ATOMIC_SEQ_CST);
    if (used > host_config.hbm) {
        __atomic_sub_fetch(&owner->used, bytes, __ATOMIC_SEQ_CST);
        return false;
    }
    return true;
}

void host_release(int32_t device, uint64_t bytes) {
    __atomic_sub_fetch(&host_devices[device].used, bytes, __ATOMIC_SEQ_CST);
}

static void remember(char *start, size_t size, int32_t device) {
    Region *region = malloc(sizeof *region);
    pthread_mutex_lock(&regions_lock);
    *region = (Region){.next = regions, .start = start, .size = size, .device = device};
    regions = region;
    pthread_mutex_unlock(&regions_lock);
}

/* Take the region that starts at an address out of the list; the caller frees it. NULL if there is none. */
static Region *forget(const void *start) {
    pthread_mutex_lock(&regions_lock);
    Region **link = &regions;
    while (*link != NULL && (*link)->start != start) {
        link = &(*link)->next;
    }
    Region *found = *link;
    if (found != NULL) {
        *link = found->next;
    }
    pthread_mutex_unlock(&regions_lock);
    return found;
}

static size_t whole_pages(size_t size) {
    size_t page = 4096;
    return (size + page - 1) / page * page;
}

/* Address space whose pages the system gives only when they are touched, so that a device may claim more than the host has. */
static char *map_pages(size_t size, int protection) {
    void *start = mmap(NULL, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return start == MAP_FAILED ? NULL : start;
}

static aclError out_of_memory(int32_t device, size_t size) {
    return host_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "%zu bytes do not fit on device %d: %llu of %llu bytes are in use", size,
                     device, (unsigned long long)host_devices[device].used, (unsigned long long)host_config.hbm);
}

/* ---- device memory ----------------------------------------------------------------------------------------------------- */

HOST_PUBLIC aclError aclrtMalloc(void **pointer, size_t size, aclrtMemMallocPolicy policy) {
    int32_t device = host_current_device();
    if (device < 0) {
        return host_fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtMalloc: no device has been set on this thread");
    }
    if (size == 0 || pointer == NULL) {
        return host_fail(ACL_ERROR_INVALID_PARAM, "aclrtMalloc: %zu bytes were asked for", size);
    }
    size_t whole = whole_pages(size);
    if (!host_charge(device, whole)) {
        return out_of_memory(device, size);
    }
    char *start = map_pages(whole, PROT_READ | PROT_WRITE);
    if (start == NULL) {
        host_release(device, whole);
        return host_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host has no address space for %zu bytes of device memory", size);
    }
    remember(start, whole, device);
    *pointer = start;
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtMallocAlign32(void **pointer, size_t size, aclrtMemMallocPolicy policy) {
    return aclrtMalloc(pointer, size, policy);
}

HOST_PUBLIC aclError aclrtFree(void *pointer) {
    Region *region = forget(pointer);
    if (region == NULL) {
        return host_fail(ACL_ERROR_INVALID_PARAM, "aclrtFree: %p is not an allocation", pointer);
    }
    munmap(region->start, region->size);
    if (region->device >= 0) {
        host_release(region->device, region->size);
    }
    free(region);
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtGetMemInfo(aclrtMemAttr kind, size_t *free_bytes, size_t *total) {
    int32_t device = host_current_device();
    if (device < 0) {
        return host_fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtGetMemInfo: no device has been set on this thread");
    }
    *total = host_config.hbm;
    *free_bytes = host_config.hbm - host_devices[device].used;
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtPointerGetAttributes(const void *pointer, aclrtPtrAttributes *attributes) {
    memset(attributes, 0, sizeof *attributes);
    attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
    pthread_mutex_lock(&regions_lock);
    for (Region *region = regions; region != NULL; region = region->next) {
        if ((const char *)pointer >= region->start && (const char *)pointer < region->start + region->size) {
            attributes->location.type = region->device < 0 ? ACL_MEM_LOCATION_TYPE_HOST : ACL_MEM_LOCATION_TYPE_DEVICE;
            attributes->location.id = region->device < 0 ? 0 : (uint32_t)region->device;
            attributes->pageSize = 4096;
            break;
        }
    }
    pthread_mutex_unlock(&regions_lock);
    return ACL_SUCCESS;
}

/* ---- pinned host memory: not charged to any device --------------------------------------------------------------------- */

HOST_PUBLIC aclError aclrtMallocHost(void **pointer, size_t size) {
    size_t whole = whole_pages(size ? size : 1);
    char *start = map_pages(whole, PROT_READ | PROT_WRITE);
    if (start == NULL) {
        return host_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host has no room for %zu bytes of pinned memory", size);
    }
    remember(start, whole, -1);
    *pointer = start;
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtMallocHostWithCfg(void **pointer, uint64_t size, aclrtMallocConfig *config) {
    return aclrtMallocHost(pointer, (size_t)size);
}

HOST_PUBLIC aclError aclrtFreeHost(void *pointer) {
    return aclrtFree(pointer);
}

HOST_PUBLIC aclError aclrtHostRegister(void *pointer, uint64_t size, aclrtHostRegisterType type, void **device_pointer) {
    *device_pointer = pointer;
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtHostRegisterV2(void *pointer, uint64_t size, uint32_t flag) {
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtHostUnregister(void *pointer) {
    return ACL_SUCCESS;
}

/* ---- copies -------------------------------------------------------------------------------------------------------------- */

HOST_PUBLIC aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t count, aclrtMemcpyKind kind) {
    if (count == 0) {
        return ACL_SUCCESS;
    }
    if (to == NULL || from == NULL || count > room) {
        return host_fail(ACL_ERROR_INVALID_PARAM, "aclrtMemcpy: %zu bytes into room for %zu", count, room);
    }
    memmove(to, from, count);
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t count, aclrtMemcpyKind kind,
                                      aclrtStream stream) {
    return aclrtMemcpy(to, room, from, count, kind);
}

HOST_PUBLIC aclError aclrtMemcpyAsyncWithCondition(void *to, size_t room, const void *from, size_t count, aclrtMemcpyKind kind,
                                                   aclrtStream stream) {
    return aclrtMemcpyAsync(to, room, from, count, kind, stream);
}

HOST_PUBLIC aclError aclrtMemset(void *to, size_t room, int32_t value, size_t count) {
    if (count > room || (to == NULL && count != 0)) {
        return host_fail(ACL_ERROR_INVALID_PARAM, "aclrtMemset: %zu bytes into room for %zu", count, room);
    }
    if (count != 0) {
        memset(to, value, count);
    }
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t count, aclrtStream stream) {
    return aclrtMemset(to, room, value, count);
}

/* ---- virtual memory: an address range is reserved, and physical pieces are mapped into it ----------------------------- */

typedef struct {
    int32_t device;
    size_t size;
} Physical;

HOST_PUBLIC aclError aclrtReserveMemAddress(void **address, size_t size, size_t alignment, void *expected, uint64_t flags) {
    char *start = map_pages(size, PROT_NONE);
    if (start == NULL) {
        return host_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "the host has no address space of %zu bytes to reserve", size);
    }
    remember(start, size, -1);
    *address = start;
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtReleaseMemAddress(void *address) {
    return aclrtFree(address);
}

HOST_PUBLIC aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size, const aclrtPhysicalMemProp *properties,
                                         uint64_t flags) {
    int32_t device = (int32_t)properties->location.id;
    if (!host_valid_device(device)) {
        return host_fail(ACL_ERROR_RT_INVALID_DEVICEID, "aclrtMallocPhysical: device %d does not exist", device);
    }
    if (!host_charge(device, size)) {
        return out_of_memory(device, size);
    }
    Physical *piece = malloc(sizeof *piece);
    *piece = (Physical){.device = device, .size = size};
    *handle = piece;
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    Physical *piece = handle;
    host_release(piece->device, piece->size);
    free(piece);
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtMapMem(void *address, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags) {
    if (mprotect(address, size, PROT_READ | PROT_WRITE) != 0) {
        return host_fail(ACL_ERROR_INVALID_PARAM, "aclrtMapMem: %p is not inside a reservation", address);
    }
    remember(address, size, ((Physical *)handle)->device);
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtUnmapMem(void *address) {
    Region *region = forget(address);
    if (region == NULL) {
        return host_fail(ACL_ERROR_INVALID_PARAM, "aclrtUnmapMem: nothing is mapped at %p", address);
    }
    /* Gives the pages back and keeps the range reserved. */
    mmap(region->start, region->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    free(region);
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle handle, aclrtMemHandleType type, uint64_t flags,
                                                     uint64_t *shareable) {
    return host_unsupported("aclrtMemExportToShareableHandle");
}

HOST_PUBLIC aclError aclrtMemImportFromShareableHandle(uint64_t shareable, int32_t device, aclrtDrvMemHandle *handle) {
    return host_unsupported("aclrtMemImportFromShareableHandle");
}

HOST_PUBLIC aclError aclrtMemSetPidToShareableHandle(uint64_t shareable, int32_t *pid, size_t count) {
    return host_unsupported("aclrtMemSetPidToShareableHandle");
}
