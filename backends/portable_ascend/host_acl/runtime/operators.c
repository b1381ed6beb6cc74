/* Operator descriptions, and the refusal of every route by which a kernel would be launched.
 *
 * Operators are computed above this layer, by kernels registered with PyTorch's dispatcher (host_acl/kernels.py). A launch that
 * arrives here is one that those do not cover; it fails with the operator's name, and never returns without a result.
 */
#include <stdlib.h>
#include <string.h>

#include "host.h"

#define MAX_DIMS 16

struct aclTensorDesc {
    aclDataType type;
    aclFormat format;
    int count;
    int64_t dims[MAX_DIMS];
    char name[64];
};

struct aclDataBuffer {
    void *data;
    size_t size;
};

struct aclopAttr {
    int count;    /* attributes are accepted; only a kernel would read them */
};

/* ---- tensor descriptions ----------------------------------------------------------------------------------------------- */

static void set_dims(aclTensorDesc *desc, int count, const int64_t *dims) {
    desc->count = count < 0 ? 0 : count > MAX_DIMS ? MAX_DIMS : count;
    if (desc->count > 0) {
        memcpy(desc->dims, dims, (size_t)desc->count * sizeof *dims);
    }
}

HOST_PUBLIC aclTensorDesc *aclCreateTensorDesc(aclDataType type, int count, const int64_t *dims, aclFormat format) {
    aclTensorDesc *desc = calloc(1, sizeof *desc);
    desc->type = type;
    desc->format = format;
    set_dims(desc, count, dims);
    return desc;
}

HOST_PUBLIC void aclDestroyTensorDesc(const aclTensorDesc *desc) {
    free((void *)desc);
}

HOST_PUBLIC aclDataType aclGetTensorDescType(const aclTensorDesc *desc) {
    return desc->type;
}

HOST_PUBLIC aclFormat aclGetTensorDescFormat(const aclTensorDesc *desc) {
    return desc->format;
}

HOST_PUBLIC size_t aclGetTensorDescNumDims(const aclTensorDesc *desc) {
    return (size_t)desc->count;
}

HOST_PUBLIC aclError aclGetTensorDescDimV2(const aclTensorDesc *desc, size_t index, int64_t *size) {
    if (index >= (size_t)desc->count) {
        return host_fail(ACL_ERROR_INVALID_PARAM, "dimension %zu of a tensor with %d dimensions", index, desc->count);
    }
    *size = desc->dims[index];
    return ACL_SUCCESS;
}

HOST_PUBLIC void aclSetTensorDescName(aclTensorDesc *desc, const char *name) {
    strncpy(desc->name, name, sizeof desc->name - 1);
}

HOST_PUBLIC aclError aclSetTensorFormat(aclTensorDesc *desc, aclFormat format) {
    desc->format = format;
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclSetTensorShape(aclTensorDesc *desc, int count, const int64_t *dims) {
    set_dims(desc, count, dims);
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclSetTensorPlaceMent(aclTensorDesc *desc, aclMemType type) {
    return ACL_SUCCESS;
}

HOST_PUBLIC aclDataBuffer *aclCreateDataBuffer(void *data, size_t size) {
    aclDataBuffer *buffer = malloc(sizeof *buffer);
    *buffer = (aclDataBuffer){.data = data, .size = size};
    return buffer;
}

HOST_PUBLIC aclError aclDestroyDataBuffer(const aclDataBuffer *buffer) {
    free((void *)buffer);
    return ACL_SUCCESS;
}

/* ---- attributes ---------------------------------------------------------------------------------------------------------- */

HOST_PUBLIC aclopAttr *aclopCreateAttr() {
    return calloc(1, sizeof(aclopAttr));
}

HOST_PUBLIC void aclopDestroyAttr(const aclopAttr *attributes) {
    free((void *)attributes);
}

#define SETTER(suffix, ...)                                                                    \
    HOST_PUBLIC aclError aclopSetAttr##suffix(aclopAttr *attributes, const char *name, __VA_ARGS__) { \
        (void)name;                                                                            \
        attributes->count++;                                                                   \
        return ACL_SUCCESS;                                                                    \
    }

SETTER(Bool, uint8_t value)
SETTER(DataType, aclDataType value)
SETTER(Float, float value)
SETTER(Int, int64_t value)
SETTER(String, const char *value)
SETTER(ListBool, int count, const uint8_t *values)
SETTER(ListFloat, int count, const float *values)
SETTER(ListInt, int count, const int64_t *values)
SETTER(ListListInt, int count, const int *lengths, const int64_t *const values[])

/* ---- launches: refused ------------------------------------------------------------------------------------------------- */

static aclError refuse(const char *operator) {
    return host_fail(ACL_ERROR_API_NOT_SUPPORT,
                     "the operator %s has no kernel in the host ACL runtime, and no host kernel took it before", operator);
}

HOST_PUBLIC aclError aclopCompileAndExecute(const char *operator, int input_count, const aclTensorDesc *const input_descs[],
                                            const aclDataBuffer *const inputs[], int output_count,
                                            const aclTensorDesc *const output_descs[], aclDataBuffer *const outputs[],
                                            const aclopAttr *attributes, aclopEngineType engine, aclopCompileType compile,
                                            const char *path, aclrtStream stream) {
    return refuse(operator);
}

HOST_PUBLIC aclError aclopCompileAndExecuteV2(const char *operator, int input_count, aclTensorDesc *input_descs[],
                                              aclDataBuffer *inputs[], int output_count, aclTensorDesc *output_descs[],
                                              aclDataBuffer *outputs[], aclopAttr *attributes, aclopEngineType engine,
                                              aclopCompileType compile, const char *path, aclrtStream stream) {
    return refuse(operator);
}

HOST_PUBLIC aclError aclSetCompileopt(aclCompileOpt option, const char *value) {
    return ACL_SUCCESS;
}

HOST_PUBLIC size_t aclGetCompileoptSize(aclCompileOpt option) {
    return 1;
}

HOST_PUBLIC aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t length) {
    if (length > 0) {
        value[0] = '\0';
    }
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtBinaryLoadFromData(const void *data, size_t length, const aclrtBinaryLoadOptions *options,
                                             aclrtBinHandle *handle) {
    return host_unsupported("aclrtBinaryLoadFromData");
}

HOST_PUBLIC aclError aclrtBinaryGetFunction(const aclrtBinHandle handle, const char *name, aclrtFuncHandle *function) {
    return refuse(name);
}

HOST_PUBLIC aclError aclrtGetFunctionAddr(aclrtFuncHandle function, void **cube, void **vector) {
    return host_unsupported("aclrtGetFunctionAddr");
}

/* Dumps of operator inputs for the vendor's debugger: there is nothing to dump. */
HOST_PUBLIC aclError aclmdlInitDump() {
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclmdlSetDump(const char *path) {
    return host_unsupported("aclmdlSetDump");
}

HOST_PUBLIC aclError aclmdlFinalizeDump() {
    return ACL_SUCCESS;
}
