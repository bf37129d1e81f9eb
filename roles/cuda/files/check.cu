// Copyright (c) 2026, gpufarm contributors
// GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
// SPDX-License-Identifier: GPL-3.0-or-later
//
// What a toolkit is for: a program that is compiled here and runs on the GPU that is here. By the driver's API alone, which
// needs nothing to link with.
//
//     nvcc -x c++ -o check check.cu       the program
//     ./check                             tells the architecture of the first GPU, such as sm_90
//     nvcc -arch=sm_90 -cubin check.cu    the kernel, as machine code of that architecture
//     ./check check.cubin                 has the GPU fill numbers, and reads them
//
// Ends with 1 where that fails, and with 3 where others have the GPU or its memory for themselves.
#ifdef __CUDACC__

extern "C" __global__ void fill_linear(uint4 *vectors, unsigned long long count, void *, unsigned int seed)
{
    for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        unsigned int first = static_cast<unsigned int>(4 * i) + seed;

        vectors[i] = make_uint4(first, first + 1, first + 2, first + 3);
    }
}

#else

#include <cstdio>
#include <cstdlib>
#include <cuda.h>
#include <dlfcn.h>
#include <fstream>
#include <iterator>
#include <vector>

static void *driver;

// The forms of the calls by name, because cuda.h gives each the newest one, which an older driver may lack.
template <typename... Types> static void call(const char *name, Types... arguments)
{
    auto function = reinterpret_cast<CUresult (*)(Types...)>(dlsym(driver, name));
    int error = function ? function(arguments...) : -1;

    if (!error)
        return;
    auto name_of = reinterpret_cast<CUresult (*)(int, const char **)>(dlsym(driver, "cuGetErrorName"));
    const char *told = "unknown";
    if (function && name_of)
        name_of(error, &told);
    std::fprintf(stderr, "%s: %s\n", name, function ? told : "the driver's library does not have it");
    std::exit(error == CUDA_ERROR_DEVICE_UNAVAILABLE || error == CUDA_ERROR_OUT_OF_MEMORY ? 3 : 1);
}

int main(int count, char **arguments)
{
    constexpr unsigned long long vectors = 4096;
    int device, major, minor;
    CUcontext context;
    CUmodule module;
    CUfunction kernel;
    CUdeviceptr memory;

    for (const char *path : {"libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"})
        if (!driver)
            driver = dlopen(path, RTLD_NOW);
    if (!driver) {
        std::fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    call("cuInit", 0U);
    call("cuDeviceGet", &device, 0);
    call("cuDeviceGetAttribute", &major, static_cast<int>(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR), device);
    call("cuDeviceGetAttribute", &minor, static_cast<int>(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR), device);
    if (count < 2) {
        std::printf("sm_%d%d\n", major, minor);
        return 0;
    }

    std::ifstream file(arguments[1], std::ios::binary);
    std::vector<char> code((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    std::vector<unsigned int> found(4 * vectors);
    unsigned long long given = vectors;
    unsigned int seed = 0x5A7E0000;
    void *parameters[] = {&memory, &given, &memory, &seed};

    code.push_back(0);
    call("cuCtxCreate_v2", &context, 0U, device);
    call("cuModuleLoadData", &module, static_cast<const void *>(code.data()));
    call("cuModuleGetFunction", &kernel, module, "fill_linear");
    call("cuMemAlloc_v2", &memory, found.size() * sizeof(found[0]));
    call("cuLaunchKernel", kernel, 16U, 1U, 1U, 128U, 1U, 1U, 0U, static_cast<CUstream>(nullptr),
         static_cast<void **>(parameters), static_cast<void **>(nullptr));
    call("cuMemcpyDtoH_v2", static_cast<void *>(found.data()), memory, found.size() * sizeof(found[0]));
    call("cuCtxDestroy_v2", context);
    for (size_t i = 0; i < found.size(); i++)
        if (found[i] != static_cast<unsigned int>(i) + seed) {
            std::fprintf(stderr, "number %zu is %u and not %u\n", i, found[i], static_cast<unsigned int>(i) + seed);
            return 1;
        }
    return 0;
}

#endif
