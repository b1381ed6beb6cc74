/* Host-side stand-in for CANN's runtime: what its parts share.
 *
 * The public entry points are declared by the vendor's own headers, which come in the torch_npu wheel (acl/acl.h), so the
 * compiler checks every signature here against the vendor's. Device memory is memory of this process, and each call does its
 * work before it returns: a stream is then always idle and its work done in the order of submission.
 */
#ifndef PORTABLE_HOST_ACL_H
#define PORTABLE_HOST_ACL_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"

#define HOST_MAX_DEVICES 64
#define HOST_PUBLIC __attribute__((visibility("default")))

/* What the stand-in claims to be; set once by host_acl_configure before torch_npu is loaded. */
typedef struct {
    char soc[64];
    int32_t devices;
    uint64_t hbm;          /* bytes of each device */
    int64_t cube_cores;    /* "AI core" count as ACL reports it */
    int64_t vector_cores;
    int64_t l2;            /* bytes */
} HostConfig;

/* One device: what is allocated on it, in bytes. */
typedef struct {
    int32_t index;
    uint64_t used;
    uint64_t peak;
} HostDevice;

extern HostConfig host_config;
extern HostDevice host_devices[HOST_MAX_DEVICES];

/* The device of this thread, -1 before aclrtSetDevice. */
int32_t host_current_device(void);
bool host_valid_device(int32_t device);

/* Record a message for aclGetRecentErrMsg (kept by thread) and pass the code on. */
aclError host_fail(aclError code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The answer of an entry point that this runtime does not have. */
aclError host_unsupported(const char *function);

/* Charge bytes to a device; false if they exceed its memory. */
bool host_charge(int32_t device, uint64_t bytes);
void host_release(int32_t device, uint64_t bytes);

/* Nanoseconds of the monotonic clock. */
uint64_t host_now(void);

#endif
