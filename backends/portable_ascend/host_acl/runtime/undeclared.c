/* Entry points that torch_npu links against but whose declarations are not in the headers of its wheel.
 *
 * rt*: launching of device binaries. Msprof*: the hooks of the system profiler. atb: the transformer library, in C++, named
 * by its mangled symbols. All but the profiler's hooks refuse.
 */
#include "host.h"

HOST_PUBLIC int32_t rtDevBinaryRegister(const void *binary, void **handle) {
    return host_unsupported("rtDevBinaryRegister");
}

HOST_PUBLIC int32_t rtFunctionRegister(void *binary, const void *stub, const char *name, const void *information, uint32_t mode) {
    return host_unsupported("rtFunctionRegister");
}

HOST_PUBLIC int32_t rtKernelLaunch(const void *stub, uint32_t blocks, void *arguments, uint32_t size, void *l2, void *stream) {
    return host_unsupported("rtKernelLaunch");
}

HOST_PUBLIC int32_t rtGetC2cCtrlAddr(uint64_t *address, uint32_t *length) {
    return host_unsupported("rtGetC2cCtrlAddr");
}

/* ---- profiler: nothing listens ------------------------------------------------------------------------------------------- */

HOST_PUBLIC uint64_t MsprofSysCycleTime(void) {
    return host_now();
}

/* FNV-1a: the profiler's own hash is not published, and only equality matters. */
HOST_PUBLIC uint64_t MsprofGetHashId(const char *text, size_t length) {
    uint64_t hash = 14695981039346656037u;
    for (size_t i = 0; i < length; i++) {
        hash = (hash ^ (unsigned char)text[i]) * 1099511628211u;
    }
    return hash;
}

#define LISTENER(name)                                 \
    HOST_PUBLIC int32_t name(uint64_t a, uint64_t b) { \
        return 0;                                      \
    }

LISTENER(MsprofRegisterCallback)
LISTENER(MsprofReportAdditionalInfo)
LISTENER(MsprofReportApi)
LISTENER(MsprofReportCompactInfo)

/* ---- transformer library ------------------------------------------------------------------------------------------------- */

#define ATB(local, symbol)                              \
    HOST_PUBLIC int32_t local(void) __asm__(symbol);    \
    int32_t local(void) {                               \
        return host_unsupported("atb (" symbol ")");    \
    }

ATB(atb_create_context, "_ZN3atb13CreateContextEPPNS_7ContextE")
ATB(atb_destroy_context, "_ZN3atb14DestroyContextEPNS_7ContextE")
ATB(atb_linear, "_ZN3atb15CreateOperationINS_5infer11LinearParamEEEiRKT_PPNS_9OperationE")
ATB(atb_elewise, "_ZN3atb15CreateOperationINS_5infer12ElewiseParamEEEiRKT_PPNS_9OperationE")
ATB(atb_rms_norm, "_ZN3atb15CreateOperationINS_5infer12RmsNormParamEEEiRKT_PPNS_9OperationE")
ATB(atb_group_topk, "_ZN3atb15CreateOperationINS_5infer14GroupTopkParamEEEiRKT_PPNS_9OperationE")
ATB(atb_self_attention, "_ZN3atb15CreateOperationINS_5infer18SelfAttentionParamEEEiRKT_PPNS_9OperationE")
ATB(atb_paged_attention, "_ZN3atb15CreateOperationINS_5infer19PagedAttentionParamEEEiRKT_PPNS_9OperationE")
ATB(atb_reshape_and_cache, "_ZN3atb15CreateOperationINS_5infer20ReshapeAndCacheParamEEEiRKT_PPNS_9OperationE")
ATB(atb_rope, "_ZN3atb15CreateOperationINS_5infer9RopeParamEEEiRKT_PPNS_9OperationE")
ATB(atb_destroy_operation, "_ZN3atb16DestroyOperationEPNS_9OperationE")
ATB(atb_tensor_size, "_ZN3atb5Utils13GetTensorSizeERKNS_6TensorE")
