/* A stand-in for the runtime library that CuTe DSL's compiled host code calls.

CuTe DSL calls these functions by name, each a thin wrapper of the CUDA runtime's function of that
name, from the library that the variable CUTE_DSL_LIBS names. The CUDA runtime inside NVIDIA's own
library only runs on NVIDIA's own driver; this one goes straight to the stand-in driver.
Compiled against cuda.h, which declares the driver's counterparts of the runtime's structures: the launch
attributes have the same layout in both.
*/

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cuda.h>

#define EXPORT __attribute__((visibility("default")))

/* cudaLaunchConfig_t */
struct launch_config {
    unsigned int grid[3];
    unsigned int block[3];
    size_t shared_bytes;
    CUstream stream;
    CUlaunchAttribute *attributes;
    unsigned int attribute_count;
};

EXPORT int _cudaGetDeviceCount(int *count)
{
    return cuDeviceGetCount(count);
}

EXPORT int _cudaGetDevice(int *device)
{
    return cuCtxGetDevice(device);
}

EXPORT int _cudaSetDevice(int device)
{
    CUdevice found;
    return cuDeviceGet(&found, device);
}

EXPORT int _cudaDeviceGetAttribute(int *value, int attribute, int device)
{
    return cuDeviceGetAttribute(value, attribute, device);
}

EXPORT int _cudaLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jit_options, void **jit_values,
                                unsigned int jit_count, CUlibraryOption *options, void **values, unsigned int count)
{
    return cuLibraryLoadData(library, code, jit_options, jit_values, jit_count, options, values, count);
}

EXPORT int _cudaLibraryUnload(CUlibrary library)
{
    return cuLibraryUnload(library);
}

EXPORT int _cudaLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    return cuLibraryGetKernel(kernel, library, name);
}

EXPORT int _cudaFuncSetAttribute(CUfunction function, int attribute, int value)
{
    return cuFuncSetAttribute(function, attribute, value);
}

EXPORT int _cudaKernelSetAttributeForDevice(CUkernel kernel, int attribute, int value, int device)
{
    return cuKernelSetAttribute(attribute, value, kernel, device);
}

EXPORT int _cudaLaunchKernelEx(const struct launch_config *config, CUfunction function, void **parameters)
{
    CUlaunchConfig given = {
        config->grid[0], config->grid[1], config->grid[2], config->block[0], config->block[1], config->block[2],
        config->shared_bytes, config->stream, config->attributes, config->attribute_count,
    };
    return cuLaunchKernelEx(&given, function, parameters, NULL);
}

EXPORT int _cuDeviceGet(CUdevice *device, int ordinal)
{
    return cuDeviceGet(device, ordinal);
}

EXPORT int _cuKernelGetAttribute(int *value, int attribute, CUkernel kernel, CUdevice device)
{
    return cuKernelGetAttribute(value, attribute, kernel, device);
}

EXPORT int _cuTensorMapEncodeTiled(CUtensorMap *map, int type, cuuint32_t rank, void *address, const cuuint64_t *sizes,
                                   const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps,
                                   int interleave, int swizzle, int promotion, int fill)
{
    return cuTensorMapEncodeTiled(map, type, rank, address, sizes, strides, box, steps, interleave, swizzle, promotion,
                                  fill);
}

EXPORT void cuda_dialect_assert_success(int error)
{
    if (error) {
        fprintf(stderr, "compiled host code: error %d of the stand-in for the CUDA driver\n", error);
        abort();
    }
}
