/* A stand-in for the CUDA driver library, libcuda.so.1, on machines without a GPU.

It answers what host code asks before and around a launch, and executes nothing. What needs
thought (images, kernels, attributes, launches, tensor maps) it hands to the functions that
`standin_set_answers` was given; device memory is ordinary memory, at its own address. A driver
call that is not answered fails, and is reported by its name. Compiled against the toolkit's cuda.h, so
that every signature and structure is the driver's own.
*/

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_UNANSWERED 1024
#define MAX_CONTEXTS_PUSHED 64

/* Filled in by standin.py, which declares the same fields in the same order. */
struct answers {
    CUresult (*load_image)(const void *image, uintptr_t *module);
    CUresult (*find_kernel)(uintptr_t module, const char *name, uintptr_t *kernel);
    CUresult (*kernel_attribute)(uintptr_t kernel, int attribute, int *value);
    CUresult (*set_kernel_attribute)(uintptr_t kernel, int attribute, int value);
    CUresult (*parameter)(uintptr_t kernel, size_t index, size_t *offset, size_t *size);
    CUresult (*occupancy)(uintptr_t kernel, int threads, size_t shared_bytes, int *blocks);
    CUresult (*launch)(uintptr_t kernel, const CUlaunchConfig *config, void **parameters, void **extra);
    CUresult (*encode_tiled)(void *map, int type, uint32_t rank, uintptr_t address, const uint64_t *sizes,
                             const uint64_t *strides, const uint32_t *box, const uint32_t *steps,
                             int interleave, int swizzle, int promotion, int fill);
    CUresult (*device_attribute)(int attribute, int *value);
    CUresult (*allocate)(size_t size, uintptr_t *address);
    CUresult (*release)(uintptr_t address);
    void (*unanswered)(const char *what);
};

static struct answers answers;
static int driver_version;
static size_t memory_bytes;

EXPORT void standin_set_answers(const struct answers *given, int version, size_t total_memory)
{
    answers = *given;
    driver_version = version;
    memory_bytes = total_memory;
}

/* Calls that are not answered: each gets a function of its own, which knows the call's name. */

static char *unanswered_names[MAX_UNANSWERED];
static int unanswered_count;

static CUresult report_unanswered(int index)
{
    answers.unanswered(unanswered_names[index]);
    return CUDA_ERROR_NOT_SUPPORTED;
}

#define EVERY_16(apply, n) \
    apply(n##0) apply(n##1) apply(n##2) apply(n##3) apply(n##4) apply(n##5) apply(n##6) apply(n##7) \
    apply(n##8) apply(n##9) apply(n##a) apply(n##b) apply(n##c) apply(n##d) apply(n##e) apply(n##f)
#define EVERY_256(apply, n) \
    EVERY_16(apply, n##0) EVERY_16(apply, n##1) EVERY_16(apply, n##2) EVERY_16(apply, n##3) \
    EVERY_16(apply, n##4) EVERY_16(apply, n##5) EVERY_16(apply, n##6) EVERY_16(apply, n##7) \
    EVERY_16(apply, n##8) EVERY_16(apply, n##9) EVERY_16(apply, n##a) EVERY_16(apply, n##b) \
    EVERY_16(apply, n##c) EVERY_16(apply, n##d) EVERY_16(apply, n##e) EVERY_16(apply, n##f)
#define EVERY_1024(apply) EVERY_256(apply, 0x0) EVERY_256(apply, 0x1) EVERY_256(apply, 0x2) EVERY_256(apply, 0x3)
#define DEFINE(n) static CUresult unanswered_##n(void) { return report_unanswered(n); }
#define LIST(n) unanswered_##n,

EVERY_1024(DEFINE)
static CUresult (*const unanswered_calls[MAX_UNANSWERED])(void) = {EVERY_1024(LIST)};

static void *unanswered_call(const char *name)
{
    for (int i = 0; i < unanswered_count; i++)
        if (!strcmp(unanswered_names[i], name))
            return (void *)unanswered_calls[i];
    if (unanswered_count == MAX_UNANSWERED)
        return NULL;
    unanswered_names[unanswered_count] = strdup(name);
    return (void *)unanswered_calls[unanswered_count++];
}

/* Errors, version, device */

EXPORT CUresult cuInit(unsigned int flags)
{
    return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuDriverGetVersion(int *version)
{
    *version = driver_version;
    return CUDA_SUCCESS;
}

static const char *error_name(CUresult error)
{
    switch (error) {
    case CUDA_SUCCESS: return "CUDA_SUCCESS";
    case CUDA_ERROR_INVALID_VALUE: return "CUDA_ERROR_INVALID_VALUE";
    case CUDA_ERROR_OUT_OF_MEMORY: return "CUDA_ERROR_OUT_OF_MEMORY";
    case CUDA_ERROR_INVALID_DEVICE: return "CUDA_ERROR_INVALID_DEVICE";
    case CUDA_ERROR_INVALID_IMAGE: return "CUDA_ERROR_INVALID_IMAGE";
    case CUDA_ERROR_NOT_FOUND: return "CUDA_ERROR_NOT_FOUND";
    case CUDA_ERROR_NOT_SUPPORTED: return "CUDA_ERROR_NOT_SUPPORTED";
    case CUDA_ERROR_UNKNOWN: return "CUDA_ERROR_UNKNOWN";
    default: return NULL;
    }
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **name)
{
    *name = error_name(error);
    return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text)
{
    return cuGetErrorName(error, text);
}

EXPORT CUresult cuDeviceGetCount(int *count)
{
    *count = 1;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    *device = 0;
    return ordinal ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetName(char *name, int size, CUdevice device)
{
    if (device || size < 1)
        return CUDA_ERROR_INVALID_VALUE;
    strncpy(name, "stand-in", size - 1);
    name[size - 1] = 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    memset(uuid, 0, sizeof *uuid);
    return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem(size_t *size, CUdevice device)
{
    *size = memory_bytes;
    return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    return device ? CUDA_ERROR_INVALID_DEVICE : answers.device_attribute(attribute, value);
}

/* Contexts: the primary context is the only one there is. */

static const char primary_context;
#define PRIMARY ((CUcontext)&primary_context)

static _Thread_local CUcontext contexts[MAX_CONTEXTS_PUSHED];
static _Thread_local int pushed;

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    *context = PRIMARY;
    return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
    *flags = 0;
    *active = 1;
    return device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context)
{
    *context = contexts[pushed];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context)
{
    contexts[pushed] = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent(CUcontext context)
{
    if (pushed + 1 == MAX_CONTEXTS_PUSHED)
        return CUDA_ERROR_INVALID_VALUE;
    contexts[++pushed] = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent(CUcontext *context)
{
    if (context)
        *context = contexts[pushed];
    contexts[pushed] = NULL;
    pushed -= pushed > 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device)
{
    *device = 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSynchronize(void)
{
    return CUDA_SUCCESS;
}

/* Images and kernels: a library is its module, a kernel is its function. */

EXPORT CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jit_options,
                                  void **jit_values, unsigned int jit_count, CUlibraryOption *options,
                                  void **values, unsigned int count)
{
    return answers.load_image(code, (uintptr_t *)library);
}

EXPORT CUresult cuLibraryUnload(CUlibrary library)
{
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLibraryGetModule(CUmodule *module, CUlibrary library)
{
    *module = (CUmodule)library;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    return answers.find_kernel((uintptr_t)library, name, (uintptr_t *)kernel);
}

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    return answers.load_image(image, (uintptr_t *)module);
}

EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count,
                                   CUjit_option *options, void **values)
{
    return answers.load_image(image, (uintptr_t *)module);
}

EXPORT CUresult cuModuleUnload(CUmodule module)
{
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    return answers.find_kernel((uintptr_t)module, name, (uintptr_t *)function);
}

EXPORT CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    *function = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel kernel, CUdevice device)
{
    return answers.kernel_attribute((uintptr_t)kernel, attribute, value);
}

EXPORT CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device)
{
    return answers.set_kernel_attribute((uintptr_t)kernel, attribute, value);
}

EXPORT CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t *offset, size_t *size)
{
    return answers.parameter((uintptr_t)kernel, index, offset, size);
}

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
    return answers.kernel_attribute((uintptr_t)function, attribute, value);
}

EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value)
{
    return answers.set_kernel_attribute((uintptr_t)function, attribute, value);
}

EXPORT CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size)
{
    return answers.parameter((uintptr_t)function, index, offset, size);
}

EXPORT CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config)
{
    return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads,
                                                            size_t shared_bytes)
{
    return answers.occupancy((uintptr_t)function, threads, shared_bytes, blocks);
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction function, int threads,
                                                                     size_t shared_bytes, unsigned int flags)
{
    return answers.occupancy((uintptr_t)function, threads, shared_bytes, blocks);
}

/* Launches */

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra)
{
    return answers.launch((uintptr_t)function, config, parameters, extra);
}

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                               unsigned int block_x, unsigned int block_y, unsigned int block_z,
                               unsigned int shared_bytes, CUstream stream, void **parameters, void **extra)
{
    CUlaunchConfig config = {grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, NULL, 0};
    return answers.launch((uintptr_t)function, &config, parameters, extra);
}

EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                       const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                       const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                       CUtensorMapFloatOOBfill fill)
{
    return answers.encode_tiled(map, type, rank, (uintptr_t)address, sizes, strides, box, steps, interleave, swizzle,
                                promotion, fill);
}

/* Streams and events: work is done when it is enqueued. */

static const char some_object;

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
    *stream = (CUstream)&some_object;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
    return cuStreamCreate(stream, flags);
}

EXPORT CUresult cuStreamDestroy(CUstream stream)
{
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamSynchronize(CUstream stream)
{
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamQuery(CUstream stream)
{
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status)
{
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
    *event = (CUevent)&some_object;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream)
{
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventQuery(CUevent event)
{
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventSynchronize(CUevent event)
{
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy(CUevent event)
{
    return CUDA_SUCCESS;
}

/* Device memory */

EXPORT CUresult cuMemGetInfo(size_t *available, size_t *total)
{
    *available = *total = memory_bytes;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAlloc(CUdeviceptr *address, size_t size)
{
    return answers.allocate(size, (uintptr_t *)address);
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *address, size_t size, CUstream stream)
{
    return answers.allocate(size, (uintptr_t *)address);
}

EXPORT CUresult cuMemFree(CUdeviceptr address)
{
    return answers.release(address);
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream)
{
    return answers.release(address);
}

static CUresult copy(uintptr_t to, uintptr_t from, size_t size)
{
    memmove((void *)to, (const void *)from, size);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    return copy(to, from, size);
}

EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    return copy(to, from, size);
}

EXPORT CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t size)
{
    return copy(to, (uintptr_t)from, size);
}

EXPORT CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t size, CUstream stream)
{
    return copy(to, (uintptr_t)from, size);
}

EXPORT CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t size)
{
    return copy((uintptr_t)to, from, size);
}

EXPORT CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t size, CUstream stream)
{
    return copy((uintptr_t)to, from, size);
}

EXPORT CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    return copy(to, from, size);
}

EXPORT CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream)
{
    return copy(to, from, size);
}

EXPORT CUresult cuMemsetD8(CUdeviceptr address, unsigned char value, size_t count)
{
    memset((void *)(uintptr_t)address, value, count);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t count, CUstream stream)
{
    return cuMemsetD8(address, value, count);
}

/* Finding functions by name */

EXPORT CUresult cuGetExportTable(const void **table, const CUuuid *id)
{
    char what[] = "cuGetExportTable(00000000000000000000000000000000)";
    for (int i = 0; i < 16; i++)
        sprintf(strchr(what, '(') + 1 + 2 * i, "%02x%c", (unsigned char)id->bytes[i], i < 15 ? '0' : ')');
    answers.unanswered(what);
    *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags,
                                 CUdriverProcAddressQueryResult *status);

#define ANSWERED(f) {#f, (void *)f},
static const struct {
    const char *name;
    void *function;
} answered_calls[] = {
    /* clang-format off */
    ANSWERED(cuInit) ANSWERED(cuDriverGetVersion) ANSWERED(cuGetErrorName) ANSWERED(cuGetErrorString)
    ANSWERED(cuGetProcAddress) ANSWERED(cuGetExportTable)
    ANSWERED(cuDeviceGetCount) ANSWERED(cuDeviceGet) ANSWERED(cuDeviceGetName) ANSWERED(cuDeviceGetUuid)
    ANSWERED(cuDeviceTotalMem) ANSWERED(cuDeviceGetAttribute)
    ANSWERED(cuDevicePrimaryCtxRetain) ANSWERED(cuDevicePrimaryCtxRelease) ANSWERED(cuDevicePrimaryCtxGetState)
    ANSWERED(cuCtxGetCurrent) ANSWERED(cuCtxSetCurrent) ANSWERED(cuCtxPushCurrent) ANSWERED(cuCtxPopCurrent)
    ANSWERED(cuCtxGetDevice) ANSWERED(cuCtxSynchronize)
    ANSWERED(cuLibraryLoadData) ANSWERED(cuLibraryUnload) ANSWERED(cuLibraryGetModule) ANSWERED(cuLibraryGetKernel)
    ANSWERED(cuModuleLoadData) ANSWERED(cuModuleLoadDataEx) ANSWERED(cuModuleUnload) ANSWERED(cuModuleGetFunction)
    ANSWERED(cuKernelGetFunction) ANSWERED(cuKernelGetAttribute) ANSWERED(cuKernelSetAttribute)
    ANSWERED(cuKernelGetParamInfo)
    ANSWERED(cuFuncGetAttribute) ANSWERED(cuFuncSetAttribute) ANSWERED(cuFuncGetParamInfo)
    ANSWERED(cuFuncSetCacheConfig)
    ANSWERED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
    ANSWERED(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)
    ANSWERED(cuLaunchKernel) ANSWERED(cuLaunchKernelEx) ANSWERED(cuTensorMapEncodeTiled)
    ANSWERED(cuStreamCreate) ANSWERED(cuStreamCreateWithPriority) ANSWERED(cuStreamDestroy)
    ANSWERED(cuStreamSynchronize) ANSWERED(cuStreamQuery) ANSWERED(cuStreamIsCapturing) ANSWERED(cuStreamWaitEvent)
    ANSWERED(cuEventCreate) ANSWERED(cuEventRecord) ANSWERED(cuEventQuery) ANSWERED(cuEventSynchronize)
    ANSWERED(cuEventDestroy)
    ANSWERED(cuMemGetInfo) ANSWERED(cuMemAlloc) ANSWERED(cuMemAllocAsync) ANSWERED(cuMemFree) ANSWERED(cuMemFreeAsync)
    ANSWERED(cuMemcpy) ANSWERED(cuMemcpyAsync) ANSWERED(cuMemcpyHtoD) ANSWERED(cuMemcpyHtoDAsync)
    ANSWERED(cuMemcpyDtoH) ANSWERED(cuMemcpyDtoHAsync) ANSWERED(cuMemcpyDtoD) ANSWERED(cuMemcpyDtoDAsync)
    ANSWERED(cuMemsetD8) ANSWERED(cuMemsetD8Async)
    /* clang-format on */
};

EXPORT CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags,
                                 CUdriverProcAddressQueryResult *status)
{
    *function = NULL;
    for (size_t i = 0; i < sizeof answered_calls / sizeof *answered_calls; i++)
        if (!strcmp(answered_calls[i].name, symbol))
            *function = answered_calls[i].function;
    if (!*function)
        *function = unanswered_call(symbol);
    if (status)
        *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
