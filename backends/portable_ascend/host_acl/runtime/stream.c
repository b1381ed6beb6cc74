/* Streams, events and host callbacks.
 *
 * Work is done inside the call that submits it. A stream is therefore idle whenever it is asked, an event is complete once it
 * is recorded, and its time is the moment when all earlier work of its stream had been done.
 */
#include <stdlib.h>

#include "host.h"

typedef struct {
    int32_t device;
    int32_t id;
    uint32_t priority;
    uint32_t overflow_switch;
} Stream;

typedef struct {
    bool timed;
    bool recorded;
    uint64_t time;    /* nanoseconds */
} Event;

static int32_t next_stream_id;

/* ---- streams ------------------------------------------------------------------------------------------------------------- */

HOST_PUBLIC aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flag) {
    int32_t device = host_current_device();
    if (device < 0) {
        return host_fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtCreateStream: no device has been set on this thread");
    }
    Stream *made = malloc(sizeof *made);
    *made = (Stream){.device = device, .priority = priority};
    made->id = __atomic_fetch_add(&next_stream_id, 1, __ATOMIC_SEQ_CST);
    *stream = made;
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtCreateStream(aclrtStream *stream) {
    return aclrtCreateStreamWithConfig(stream, 0, 0);
}

HOST_PUBLIC aclError aclrtDestroyStream(aclrtStream stream) {
    free(stream);
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtDestroyStreamForce(aclrtStream stream) {
    return aclrtDestroyStream(stream);
}

HOST_PUBLIC aclError aclrtStreamGetId(aclrtStream stream, int32_t *id) {
    *id = stream == NULL ? -1 : ((Stream *)stream)->id;
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
    *status = ACL_STREAM_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtSynchronizeStream(aclrtStream stream) {
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout) {
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtSynchronizeDevice(void) {
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout) {
    return ACL_SUCCESS;
}

/* What the stream does when one of its tasks fails; here a failure is the failing call's own return value. */
HOST_PUBLIC aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode) {
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtSetStreamAttribute(aclrtStream stream, aclrtStreamAttr attribute, aclrtStreamAttrValue *value) {
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtSetStreamOverflowSwitch(aclrtStream stream, uint32_t flag) {
    ((Stream *)stream)->overflow_switch = flag;
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtGetStreamOverflowSwitch(aclrtStream stream, uint32_t *flag) {
    *flag = ((Stream *)stream)->overflow_switch;
    return ACL_SUCCESS;
}

/* ---- events -------------------------------------------------------------------------------------------------------------- */

/* Times are kept for events that ask for them (ACL_EVENT_TIME_LINE, which torch_npu sets for enable_timing=True). */
HOST_PUBLIC aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag) {
    Event *created = calloc(1, sizeof(Event));
    if (created != NULL) {
        created->timed = (flag & ACL_EVENT_TIME_LINE) != 0;
    }
    *event = created;
    return created != NULL ? ACL_SUCCESS : ACL_ERROR_RT_MEMORY_ALLOCATION;
}

HOST_PUBLIC aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag) {
    return aclrtCreateEventExWithFlag(event, flag);
}

HOST_PUBLIC aclError aclrtCreateEvent(aclrtEvent *event) {
    return aclrtCreateEventExWithFlag(event, ACL_EVENT_TIME_LINE);
}

HOST_PUBLIC aclError aclrtDestroyEvent(aclrtEvent event) {
    free(event);
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    Event *recorded = event;
    recorded->time = host_now();
    recorded->recorded = true;
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) {
    ((Event *)event)->recorded = false;
    return ACL_SUCCESS;
}

/* An event that was never recorded counts as complete, as on the device. */
HOST_PUBLIC aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
    *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtSynchronizeEvent(aclrtEvent event) {
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
    const Event *first = start, *second = end;
    if (!first->recorded || !second->recorded) {
        return host_fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtEventElapsedTime: an event has not been recorded");
    }
    if (!first->timed || !second->timed) {
        return host_fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtEventElapsedTime: an event was made without enable_timing=True");
    }
    *milliseconds = (float)((double)(int64_t)(second->time - first->time) / 1e6);
    return ACL_SUCCESS;
}

/* Microseconds. */
HOST_PUBLIC aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *timestamp) {
    if (!((Event *)event)->recorded) {
        return host_fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtEventGetTimestamp: the event has not been recorded");
    }
    *timestamp = ((Event *)event)->time / 1000u;
    return ACL_SUCCESS;
}

/* ---- host functions in stream order ------------------------------------------------------------------------------------ */

HOST_PUBLIC aclError aclrtLaunchCallback(aclrtCallback function, void *data, aclrtCallbackBlockType block, aclrtStream stream) {
    function(data);
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void *data) {
    function(data);
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtSubscribeReport(uint64_t thread, aclrtStream stream) {
    return ACL_SUCCESS;
}

HOST_PUBLIC aclError aclrtUnSubscribeReport(uint64_t thread, aclrtStream stream) {
    return ACL_SUCCESS;
}

/* No callback is ever pending; the code is the one the device gives when it waited in vain. */
HOST_PUBLIC aclError aclrtProcessReport(int32_t timeout) {
    return host_fail(ACL_ERROR_RT_THREAD_SUBSCRIBE, "aclrtProcessReport: no callback is pending");
}
