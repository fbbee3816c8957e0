// The runtime of CANN on the host: devices, memory, streams and events, errors, the overflow flag.
//
// Memory of a device is memory of the host, and what is launched on a stream has run when the launch
// returns, on the thread that launches: torch_npu's queue thread, or the caller.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define OK 0
#define NO_CONTEXT 107002
#define BAD_DEVICE 107001

// ---- errors ---------------------------------------------------------------------------------------

static __thread char message[8192];  // of this thread, as in CANN
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static int device_error = 0;  // once a kernel has failed on it, the device answers nothing else
static char device_message[4096];

void cann_say(const char* text) { snprintf(message, sizeof message, "%s", text); }
long cann_absent(const char* name) {
  snprintf(message, sizeof message, "the stand-in for CANN has no function %s: it goes into tests/npu/cann/runtime.c", name);
  fprintf(stderr, "%s\n", message);
  return 100001;
}
int cann_device_error(void) {
  if (device_error) cann_say(device_message);
  return device_error;
}
// A kernel of an operator fails while the device computes: the next who waits for the device is told.
void cann_break_device_with(int code, const char* text) {
  pthread_mutex_lock(&guard);
  snprintf(device_message, sizeof device_message, "%s", text);
  device_error = code;
  pthread_mutex_unlock(&guard);
}
void cann_break_device(int code, const char* name) {
  char text[1024];
  const char* what = code == 507015 ? "The aicore execution is abnormal"
                   : code == 507018 ? "The aicpu execution is abnormal"
                   : code == 507011 ? "Task execution failed" : "The device reports an error";
  snprintf(text, sizeof text,
           "EZ9999: Inner Error!\nEZ9999: %s, device_id=0, stream_id=2, task_id=7, error code = 0x800000, "
           "fault kernel_name=%s_0, errorCode=%d.\n        TraceBack (most recent call last):\n"
           "        rtStreamSynchronize execute failed, reason=[%s]", what, name, code, what);
  cann_break_device_with(code, text);
}
void cann_heal_device(void) { device_error = 0; message[0] = 0; }
const char* aclGetRecentErrMsg(void) { return message; }
int aclrtPeekAtLastError(int level) { return OK; }
int aclrtGetLastError(int level) { return OK; }
void aclAppLog(int level, const char* function, const char* file, uint32_t line, const char* text, ...) {}

// ---- devices --------------------------------------------------------------------------------------

static __thread int current = -1;  // none is set in a new thread

static int count(void) {
  const char* text = getenv("CANN_DEVICES");
  int n = text ? atoi(text) : 2;
  return n > 0 ? n : 1;
}
int aclInit(const char* config) { return OK; }
int aclFinalize(void) { return OK; }
const char* aclrtGetSocName(void) { return "Ascend910B2"; }
int aclrtGetDeviceCount(uint32_t* n) { *n = count(); return OK; }
int aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= count()) { cann_say("EE1001: The argument is invalid. Reason: no such device"); return BAD_DEVICE; }
  current = device;
  return OK;
}
int aclrtGetDevice(int32_t* device) {
  if (current < 0) { cann_say("EE9999: ctx is NULL! Set a device first"); return NO_CONTEXT; }
  *device = current;
  return OK;
}
int aclrtResetDevice(int32_t device) { return OK; }
int aclrtSetDeviceSatMode(int mode);
static char contexts[64];  // only their addresses count
int aclrtCreateContext(void** context, int32_t device) { *context = &contexts[device & 63]; current = device; return OK; }
int aclrtGetCurrentContext(void** context) {
  if (current < 0) return NO_CONTEXT;
  *context = &contexts[current & 63];
  return OK;
}
int aclrtSetCurrentContext(void* context) { current = (int)((char*)context - contexts); return OK; }
int aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) { *active = device == current; return OK; }
int aclrtDeviceCanAccessPeer(int32_t* can, int32_t device, int32_t peer) { *can = 1; return OK; }
int aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) { return OK; }
int aclGetDeviceCapability(uint32_t device, int what, int64_t* value) { *value = 1; return OK; }
int aclrtSetOpExecuteTimeOut(uint32_t seconds) { return OK; }
int aclrtSetOpWaitTimeout(uint32_t seconds) { return OK; }

// ---- memory ---------------------------------------------------------------------------------------

static int take(void** place, size_t size) { return posix_memalign(place, 512, size ? size : 512) ? 207001 : OK; }
int aclrtMalloc(void** place, size_t size, int policy) { return take(place, size); }
int aclrtMallocAlign32(void** place, size_t size, int policy) { return take(place, size); }
int aclrtMallocHost(void** place, size_t size) { return take(place, size); }
int aclrtFree(void* place) { free(place); return OK; }
int aclrtFreeHost(void* place) { free(place); return OK; }
int aclrtMemcpy(void* to, size_t room, const void* from, size_t size, int kind) {
  if (cann_device_error()) return device_error;
  memcpy(to, from, size);
  return OK;
}
int aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t size, int kind, void* stream) {
  if (cann_device_error()) return device_error;
  memcpy(to, from, size);
  return OK;
}
int aclrtMemset(void* to, size_t room, int32_t value, size_t size) { memset(to, value, size); return OK; }
int aclrtMemsetAsync(void* to, size_t room, int32_t value, size_t size, void* stream) { memset(to, value, size); return OK; }
int aclrtGetMemInfo(int kind, size_t* available, size_t* total) { *available = 1ul << 33; *total = 1ul << 34; return OK; }

// ---- streams and events ---------------------------------------------------------------------------

typedef struct { struct timespec at; } Event;
static int next_stream = 0;
typedef struct { int id; } Stream;
static int new_stream(void** stream) {
  Stream* made = malloc(sizeof *made);
  pthread_mutex_lock(&guard);
  made->id = ++next_stream;
  pthread_mutex_unlock(&guard);
  *stream = made;
  return OK;
}
int aclrtCreateStream(void** stream) { return new_stream(stream); }
int aclrtCreateStreamWithConfig(void** stream, uint32_t priority, uint32_t flag) { return new_stream(stream); }
int aclrtDestroyStream(void* stream) { free(stream); return OK; }
int aclrtDestroyStreamForce(void* stream) { free(stream); return OK; }
int aclrtStreamGetId(void* stream, int32_t* id) { *id = stream ? ((Stream*)stream)->id : 0; return OK; }
int aclrtSetStreamFailureMode(void* stream, uint64_t mode) { return OK; }
int aclrtStreamWaitEvent(void* stream, void* event) { return OK; }
int aclrtStreamQuery(void* stream, int* status) { *status = 1; return cann_device_error(); }
int aclrtSynchronizeStream(void* stream) { return cann_device_error(); }
int aclrtSynchronizeStreamWithTimeout(void* stream, int32_t ms) { return cann_device_error(); }
int aclrtSynchronizeDevice(void) { return cann_device_error(); }
int aclrtSynchronizeDeviceWithTimeout(int32_t ms) { return cann_device_error(); }
static int new_event(void** event) { *event = calloc(1, sizeof(Event)); return OK; }
int aclrtCreateEvent(void** event) { return new_event(event); }
int aclrtCreateEventWithFlag(void** event, uint32_t flag) { return new_event(event); }
int aclrtCreateEventExWithFlag(void** event, uint32_t flag) { return new_event(event); }
int aclrtDestroyEvent(void* event) { free(event); return OK; }
int aclrtRecordEvent(void* event, void* stream) { clock_gettime(CLOCK_MONOTONIC, &((Event*)event)->at); return OK; }
int aclrtResetEvent(void* event, void* stream) { return OK; }
int aclrtSynchronizeEvent(void* event) { return cann_device_error(); }
int aclrtQueryEventStatus(void* event, int* status) { *status = 1; return OK; }
int aclrtQueryEventWaitStatus(void* event, int* status) { *status = 1; return OK; }
int aclrtEventElapsedTime(float* ms, void* start, void* end) {
  Event *a = start, *b = end;
  *ms = (b->at.tv_sec - a->at.tv_sec) * 1e3f + (b->at.tv_nsec - a->at.tv_nsec) * 1e-6f;
  return OK;
}

// ---- overflow -------------------------------------------------------------------------------------

static int saturates = 0, overflowed = 0;  // mode 0: values saturate and the flag goes up
int aclrtSetDeviceSatMode(int mode) { saturates = mode == 0; return OK; }
int aclrtGetDeviceSatMode(int* mode) { *mode = !saturates; return OK; }
int cann_saturates(void) { return saturates; }
void cann_raise_overflow(void) { overflowed = 1; }
int aclrtGetOverflowStatus(void* out, size_t size, void* stream) {
  memset(out, 0, size);
  *(uint64_t*)out = overflowed;
  return OK;
}
int aclrtResetOverflowStatus(void* stream) { overflowed = 0; return OK; }
int aclrtSetStreamOverflowSwitch(void* stream, uint32_t on) { return OK; }
int aclrtGetStreamOverflowSwitch(void* stream, uint32_t* on) { *on = saturates; return OK; }

// ---- dump -----------------------------------------------------------------------------------------

int (*cann_set_dump)(const char* path) = 0;  // dump.cpp
int aclmdlInitDump(void) { return OK; }
int aclmdlSetDump(const char* path) { return cann_set_dump ? cann_set_dump(path) : OK; }
int aclmdlFinalizeDump(void) { return cann_set_dump ? cann_set_dump(0) : OK; }

// ---- what is asked for and has nothing to do ------------------------------------------------------

size_t aclGetCompileoptSize(int option) { return 16; }
int aclGetCompileopt(int option, char* value, size_t size) { snprintf(value, size, "disable"); return OK; }
int aclSetCompileopt(int option, const char* value) { return OK; }
int aclopSetCompileFlag(int flag) { return OK; }
int aclrtSubscribeReport(uint64_t thread, void* stream) { return OK; }
int aclrtUnSubscribeReport(uint64_t thread, void* stream) { return OK; }
int aclrtProcessReport(int32_t ms) { struct timespec t = {0, 1000000}; nanosleep(&t, 0); return 107019; }
static int64_t options[64];  // deterministic results, and others that mean nothing here
int aclrtGetSysParamOpt(int option, int64_t* value) { *value = options[option & 63]; return OK; }
int aclrtSetSysParamOpt(int option, int64_t value) { options[option & 63] = value; return OK; }
int aclrtCtxGetSysParamOpt(int option, int64_t* value) { return aclrtGetSysParamOpt(option, value); }
int aclrtCtxSetSysParamOpt(int option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
uint64_t MsprofSysCycleTime(void) { return 0; }
uint64_t MsprofGetHashId(const char* text, size_t size) { return 0; }
int32_t MsprofRegisterCallback(uint32_t module, void* handle) { return OK; }
int32_t MsprofReportApi(uint32_t aging, const void* api) { return OK; }
int32_t MsprofReportCompactInfo(uint32_t aging, const void* data, uint32_t size) { return OK; }
int32_t MsprofReportAdditionalInfo(uint32_t aging, const void* data, uint32_t size) { return OK; }

// ---- operators of the older interface (aclop) -----------------------------------------------------

// Those of the overflow flag are there. Of others, what torch_npu prepares is let go, and the launch
// fails with the name.
typedef struct { void* data; size_t size; } Buffer;
static char description[64];
void* aclCreateTensorDesc(int type, int n, const int64_t* dims, int format) { return description; }
void aclDestroyTensorDesc(const void* d) {}
void* aclCreateDataBuffer(void* data, size_t size) {
  Buffer* made = malloc(sizeof *made);
  *made = (Buffer){data, size};
  return made;
}
int aclDestroyDataBuffer(const void* b) { free((void*)b); return OK; }
void aclSetTensorDescName(void* d, const char* name) {}
int aclSetTensorFormat(void* d, int format) { return OK; }
int aclSetTensorShape(void* d, int n, const int64_t* dims) { return OK; }
int aclSetTensorPlaceMent(void* d, int place) { return OK; }
void* aclopCreateAttr(void) { return description; }
void aclopDestroyAttr(const void* a) {}
int aclopSetAttrBool(void* a, const char* name, uint8_t value) { return OK; }
int aclopSetAttrInt(void* a, const char* name, int64_t value) { return OK; }
int aclopSetAttrFloat(void* a, const char* name, float value) { return OK; }
int aclopSetAttrString(void* a, const char* name, const char* value) { return OK; }
int aclopSetAttrDataType(void* a, const char* name, int value) { return OK; }
int aclopSetAttrListBool(void* a, const char* name, int n, const uint8_t* v) { return OK; }
int aclopSetAttrListInt(void* a, const char* name, int n, const int64_t* v) { return OK; }
int aclopSetAttrListFloat(void* a, const char* name, int n, const float* v) { return OK; }
int aclopSetAttrListListInt(void* a, const char* name, int n, const int* each, const int64_t* const v[]) { return OK; }
int aclopCompileAndExecute(const char* name, int n_in, const void* const in_types[], const void* const in[], int n_out,
                           const void* const out_types[], void* const out[], const void* attributes, int engine, int flag,
                           const char* path, void* stream) {
  if (!strcmp(name, "NPUGetFloatStatus") || !strcmp(name, "NPUGetFloatStatusV2")) {
    Buffer* result = n_out ? out[0] : 0;
    if (result && result->data) {
      memset(result->data, 0, result->size);
      *(float*)result->data = overflowed;  // 1, of which an int32 is not zero either
    }
    return OK;
  }
  if (!strcmp(name, "NPUClearFloatStatus") || !strcmp(name, "NPUClearFloatStatusV2")) { overflowed = 0; return OK; }
  char text[256];
  snprintf(text, sizeof text, "the stand-in for CANN has no operator %s of the older interface (aclop)", name);
  cann_say(text);
  return 500002;
}
