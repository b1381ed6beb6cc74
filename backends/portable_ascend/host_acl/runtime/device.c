/* Start-up, devices, contexts, errors and device properties. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "host.h"

HostConfig host_config = {.soc = "", .devices = 0};
HostDevice host_devices[HOST_MAX_DEVICES];

static __thread int32_t current_device = -1;
static __thread char recent_error[512];
static __thread aclError last_error = ACL_SUCCESS;

/* ---- the stand-in's own entry points, called from Python -------------------------------------------------------------- */

/* Returns 0, or -1 if the figures make no device. */
HOST_PUBLIC int host_acl_configure(const char *soc, int32_t devices, uint64_t hbm, int64_t cube_cores, int64_t vector_cores,
                                   int64_t l2) {
    if (soc == NULL || strlen(soc) >= sizeof host_config.soc || devices < 0 || devices > HOST_MAX_DEVICES || hbm == 0) {
        return -1;
    }
    strcpy(host_config.soc, soc);
    host_config.devices = devices;
    host_config.hbm = hbm;
    host_config.cube_cores = cube_cores;
    host_config.vector_cores = vector_cores;
    host_config.l2 = l2;
    for (int32_t i = 0; i < HOST_MAX_DEVICES; i++) {
        host_devices[i] = (HostDevice){.index = i};
    }
    return 0;
}

/* Bytes allocated on a device by the vendor's allocator, as the "hardware" sees it. */
HOST_PUBLIC uint64_t host_acl_used(int32_t device) {
    return host_valid_device(device) ? __atomic_load_n(&host_devices[device].used, __ATOMIC_SEQ_CST) : 0;
}

/* ---- errors ------------------------------------------------------------------------------------------------------------ */

aclError host_fail(aclError code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(recent_error, sizeof recent_error, format, arguments);
    va_end(arguments);
    last_error = code;
    return code;
}

aclError host_unsupported(const char *function) {
    return host_fail(ACL_ERROR_API_NOT_SUPPORT, "%s is not part of the host ACL runtime (portable_ascend.host_acl)", function);
}

/* The message of the last failure on this thread; it stays until the next one. */
HOST_PUBLIC const char *aclGetRecentErrMsg() {
    return recent_error;
}

/* The last error of this thread, which is cleared. */
HOST_PUBLIC aclError aclrtGetLastError(aclrtLastErrLevel level) {
    aclError code = last_error;
    last_error = ACL_SUCCESS;
    return code;
}

HOST_PUBLIC aclError aclrtPeekAtLastError(aclrtLastErrLevel level) {
    return last_error;
}

/* The vendor's log: there is no slog daemon to take it. */
HOST_PUBLIC void aclAppLog(aclLogLevel level, const char *function, const char *file, uint32_t line, const char *format, ...) {
}

uint64_t host_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- start and end ----------------------------------------------------------------------------------------------------- */

HOST_PUBLIC aclError aclInit(const char *config_path) {
    if (host_config.soc[0] == '\0') {
        return host_fail(ACL_ERROR_UNINITIALIZE, "host_acl_configure was not called: switch the runtime on with "
                                                 "portable_ascend.host_acl.enable()");
    }
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclFinalize() {
    return ACL_SUCCESS;
}

/* ---- devices and contexts ---------------------------------------------------------------------------------------------- */

bool host_valid_device(int32_t device) {
    return device >= 0 && device < host_config.devices;
}

int32_t host_current_device(void) {
    return current_device;
}

static aclError check_device(int32_t device) {
    if (host_valid_device(device)) {
        return ACL_SUCCESS;
    }
    return host_fail(ACL_ERROR_RT_INVALID_DEVICEID, "device %d does not exist: the host ACL runtime has %d", device,
                     host_config.devices);
}

/* Make a device (its primary context) current on this thread. */
HOST_PUBLIC aclError aclrtSetDevice(int32_t device) {
    aclError code = check_device(device);
    if (code == ACL_SUCCESS) {
        current_device = device;
    }
    return code;
}

HOST_PUBLIC aclError aclrtGetDevice(int32_t *device) {
    if (current_device < 0) {
        return host_fail(ACL_ERROR_RT_CONTEXT_NULL, "no device has been set on this thread");
    }
    *device = current_device;
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtResetDevice(int32_t device) {
    return check_device(device);
}

HOST_PUBLIC aclError aclrtResetDeviceForce(int32_t device) {
    return check_device(device);
}

HOST_PUBLIC aclError aclrtGetDeviceCount(uint32_t *count) {
    *count = (uint32_t)host_config.devices;
    return ACL_SUCCESS;
}

/* Each device has one context, its primary one. */
HOST_PUBLIC aclError aclrtGetCurrentContext(aclrtContext *context) {
    if (current_device < 0) {
        return host_fail(ACL_ERROR_RT_CONTEXT_NULL, "no device has been set on this thread");
    }
    *context = &host_devices[current_device];
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtSetCurrentContext(aclrtContext context) {
    HostDevice *device = context;
    if (device < host_devices || device >= host_devices + host_config.devices) {
        return host_fail(ACL_ERROR_INVALID_PARAM, "not a context of the host ACL runtime");
    }
    current_device = device->index;
    return ACL_SUCCESS;
}

/* torch_npu asks before it creates a context on a device by accident. */
HOST_PUBLIC aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    aclError code = check_device(device);
    if (code == ACL_SUCCESS) {
        if (flags != NULL) {
            *flags = 0;
        }
        *active = device == current_device;
    }
    return code;
}

HOST_PUBLIC aclError aclrtGetLogicDevIdByUserDevId(const int32_t user_device, int32_t *const logic_device) {
    *logic_device = user_device;
    return check_device(user_device);
}

/* All devices lie in one address space. */
HOST_PUBLIC aclError aclrtDeviceCanAccessPeer(int32_t *answer, int32_t device, int32_t peer) {
    *answer = host_valid_device(device) && host_valid_device(peer) && device != peer;
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) {
    return check_device(peer);
}

/* Process number outside of any container, which names the peers of shared memory. */
HOST_PUBLIC aclError aclrtDeviceGetBareTgid(int32_t *pid) {
    *pid = (int32_t)getpid();
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtDeviceTaskAbort(int32_t device, uint32_t timeout) {
    return check_device(device);
}

/* ---- properties -------------------------------------------------------------------------------------------------------- */

HOST_PUBLIC const char *aclrtGetSocName() {
    return host_config.soc;
}

HOST_PUBLIC aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo what, int64_t *value) {
    aclError code = check_device((int32_t)device);
    if (code != ACL_SUCCESS) {
        return code;
    }
    switch (what) {
    case ACL_DEVICE_INFO_AI_CORE_NUM:
        *value = host_config.cube_cores;
        return ACL_SUCCESS;
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM:
        *value = host_config.vector_cores;
        return ACL_SUCCESS;
    case ACL_DEVICE_INFO_L2_SIZE:
        *value = host_config.l2;
        return ACL_SUCCESS;
    default:
        return host_fail(ACL_ERROR_INVALID_PARAM, "device capability %d is unknown", (int)what);
    }
}

HOST_PUBLIC aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr what, int64_t *value) {
    aclError code = check_device((int32_t)device);
    if (code != ACL_SUCCESS) {
        return code;
    }
    switch (what) {
    case ACL_DEV_ATTR_AICORE_CORE_NUM:
    case ACL_DEV_ATTR_CUBE_CORE_NUM:
        *value = host_config.cube_cores;
        return ACL_SUCCESS;
    case ACL_DEV_ATTR_VECTOR_CORE_NUM:
        *value = host_config.vector_cores;
        return ACL_SUCCESS;
    case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE:
        *value = (int64_t)host_config.hbm;
        return ACL_SUCCESS;
    case ACL_DEV_ATTR_L2_CACHE_SIZE:
        *value = host_config.l2;
        return ACL_SUCCESS;
    case ACL_DEV_ATTR_PHY_CHIP_ID:
        *value = (int64_t)device;
        return ACL_SUCCESS;
    default:
        return host_fail(ACL_ERROR_API_NOT_SUPPORT, "device attribute %d is not known to the host ACL runtime", (int)what);
    }
}

/* Sixteen bytes that differ by machine process and device: enough to tell devices apart. */
HOST_PUBLIC aclError aclrtDeviceGetUuid(int32_t device, aclrtUuid *uuid) {
    aclError code = check_device(device);
    if (code == ACL_SUCCESS) {
        memset(uuid, 0, sizeof *uuid);
        snprintf(uuid->bytes, sizeof uuid->bytes, "host-npu-%d", device);
    }
    return code;
}

/* No unit is ever busy when asked: work is done inside the call that brings it. */
HOST_PUBLIC aclError aclrtGetDeviceUtilizationRate(int32_t device, aclrtUtilizationInfo *info) {
    aclError code = check_device(device);
    if (code == ACL_SUCCESS) {
        aclrtUtilizationExtendInfo *extended = info->utilizationExtend;
        *info = (aclrtUtilizationInfo){.utilizationExtend = extended};
        info->memoryUtilization = (int32_t)(host_acl_used(device) * 100u / host_config.hbm);
    }
    return code;
}

/* inf and nan are computed as IEEE 754 says, and bfloat16 exists except on the first series (910A and its kin). */
HOST_PUBLIC aclError aclGetCannAttribute(aclCannAttr attribute, int32_t *value) {
    bool first_series = strncmp(host_config.soc, "Ascend910A", 10) == 0 || strncmp(host_config.soc, "Ascend910P", 10) == 0 ||
                        strcmp(host_config.soc, "Ascend910B") == 0;
    *value = attribute == ACL_CANN_ATTR_JIT_COMPILE ? 0 : !first_series;
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclGetCannAttributeList(const aclCannAttr **list, size_t *count) {
    static const aclCannAttr known[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16, ACL_CANN_ATTR_JIT_COMPILE};
    *list = known;
    *count = sizeof known / sizeof known[0];
    return ACL_SUCCESS;
}

/* ---- settings: remembered, so that what was set is what is read ---------------------------------------------------------- */

static int64_t system_options[8];

HOST_PUBLIC aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    if ((unsigned)option >= sizeof system_options / sizeof system_options[0]) {
        return host_fail(ACL_ERROR_INVALID_PARAM, "system option %d is unknown", (int)option);
    }
    system_options[option] = value;
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
    if ((unsigned)option >= sizeof system_options / sizeof system_options[0]) {
        return host_fail(ACL_ERROR_INVALID_PARAM, "system option %d is unknown", (int)option);
    }
    *value = system_options[option];
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    return aclrtSetSysParamOpt(option, value);
}

HOST_PUBLIC aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
    return aclrtGetSysParamOpt(option, value);
}

static aclrtFloatOverflowMode overflow_mode = ACL_RT_OVERFLOW_MODE_INFNAN;

HOST_PUBLIC aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
    if (mode != ACL_RT_OVERFLOW_MODE_INFNAN) {
        return host_fail(ACL_ERROR_API_NOT_SUPPORT, "saturation mode is not emulated: the host computes inf and nan");
    }
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtGetDeviceSatMode(aclrtFloatOverflowMode *mode) {
    *mode = overflow_mode;
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtSetOpWaitTimeout(uint32_t timeout) {
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtSetOpExecuteTimeOut(uint32_t timeout) {
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t *actual) {
    *actual = timeout;
    return ACL_SUCCESS;
}

/* ---- version ------------------------------------------------------------------------------------------------------------- */

/* The CANN release whose interface is claimed: torch_npu asks to choose between newer and older operators. */
HOST_PUBLIC aclError aclsysGetVersionStr(char *package, char *version) {
    strcpy(version, "9.1.0");
    return ACL_SUCCESS;
}
