/* The CUDA driver double: libcuda.so.1. It tells which GPUs a process may use, which is what isolation is about.
 * What allocates and computes is in cuda_work.c. */
#define _GNU_SOURCE 1
#include "cuda.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#define MIB 1048576.0

typedef struct {
    unsigned char bytes[16];
} CUuuid;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pid_t initialised; /* by this process: a child that was forked behind cuInit can do nothing */
static struct cuda_device candidates[SIM_MAX_GPUS * 8]; /* GPUs first, in order; then the MIG devices */
static bool candidate_is_mig[SIM_MAX_GPUS * 8];
static size_t candidate_count, whole_gpus;
static const struct cuda_device *devices[SIM_MAX_GPUS * 8];
static int device_count;

static const char *text(const struct sim_gpu *gpu, const char *key, const char *otherwise)
{
    const char *value = sim_gpu_value(gpu, key);

    return value ? value : otherwise;
}

static void add(const char *name, const char *uuid, const struct sim_gpu *gpu, double memory_mib, int sm_count, bool mig)
{
    struct cuda_device *device = &candidates[candidate_count];

    if (candidate_count == sizeof(candidates) / sizeof(*candidates))
        return;
    snprintf(device->name, sizeof(device->name), "%s", name);
    snprintf(device->uuid, sizeof(device->uuid), "%s", uuid);
    snprintf(device->compute_cap, sizeof(device->compute_cap), "%s", text(gpu, "compute_cap", "0.0"));
    snprintf(device->gpu_uuid, sizeof(device->gpu_uuid), "%s", text(gpu, "uuid", ""));
    device->memory_mib = memory_mib;
    device->share = memory_mib / strtod(text(gpu, "fb_memory_usage.total", "1"), NULL);
    device->sm_count = sm_count;
    device->mig = mig;
    candidate_is_mig[candidate_count++] = mig;
}

static void add_mig_devices(const struct sim_gpu *gpu)
{
    unsigned long count = strtoul(text(gpu, "mig_devices.#", "0"), NULL, 10);
    unsigned long profiles = strtoul(text(gpu, "mig_profiles.#", "0"), NULL, 10);

    for (unsigned long i = 0; i < count; i++) {
        char key[96], name[160];
        const char *uuid, *profile, *slices;
        double memory = 0.0;
        int sm_count = 0;

        if (!sim_mig_visible(gpu, (unsigned int)i))
            continue;
        snprintf(key, sizeof(key), "mig_devices.%lu.uuid", i);
        uuid = text(gpu, key, "");
        snprintf(key, sizeof(key), "mig_devices.%lu.profile", i);
        profile = text(gpu, key, "");
        for (unsigned long j = 0; j < profiles; j++) {
            snprintf(key, sizeof(key), "mig_profiles.%lu.name", j);
            if (strcmp(text(gpu, key, ""), profile))
                continue;
            snprintf(key, sizeof(key), "mig_profiles.%lu.fb_memory_usage.total", j);
            memory = strtod(text(gpu, key, "0"), NULL);
            snprintf(key, sizeof(key), "mig_profiles.%lu.device_attributes.shared.multiprocessor_count", j);
            sm_count = atoi(text(gpu, key, "0"));
        }
        snprintf(key, sizeof(key), "mig_devices.%lu.compute_slices", i);
        slices = text(gpu, key, "");
        snprintf(name, sizeof(name), "%s MIG %s%s%s", text(gpu, "product_name", ""), slices, *slices ? "c." : "", profile);
        add(name, uuid, gpu, memory, sm_count, true);
    }
}

/* Whether NVSwitches that lead to the GPU are not set up yet. */
static bool waits_for_fabric(const struct sim_gpu *gpu)
{
    const char *state = text(gpu, "fabric.state", "Completed");

    return !strcmp(state, "In Progress") || !strcmp(state, "Not Started");
}

/* A node without a device behind it fails them all, where other errors only hide the one GPU. */
static int gather(const struct sim_profile *profile)
{
    bool mig[SIM_MAX_GPUS] = {false};

    candidate_count = 0;
    for (unsigned int i = 0; i < profile->gpu_count; i++) {
        const struct sim_gpu *gpu = &profile->gpus[i];

        if (sim_gpu_error(profile, i) == ENXIO || sim_gpu_error(profile, i) == ENODEV)
            return CUDA_ERROR_INVALID_DEVICE;
        mig[i] = !strcmp(text(gpu, "mig_mode.current_mig", ""), "Enabled");
        if (!sim_gpu_visible(profile, i) || strcmp(text(gpu, "state", "ok"), "ok"))
            continue;
        if (waits_for_fabric(gpu))
            return CUDA_ERROR_SYSTEM_NOT_READY;
        add(text(gpu, "product_name", ""), text(gpu, "uuid", ""), gpu,
            strtod(text(gpu, "fb_memory_usage.total", "0"), NULL), atoi(text(gpu, "cuda.sm_count", "0")), false);
    }
    whole_gpus = candidate_count;
    for (unsigned int i = 0; i < profile->gpu_count; i++)
        if (mig[i] && sim_gpu_visible(profile, i))
            add_mig_devices(&profile->gpus[i]);
    return CUDA_SUCCESS;
}

/* The device that an item of CUDA_VISIBLE_DEVICES names, or -1. An index may have anything behind it; a UUID may be cut
 * off while it stays unique, and have blanks behind it, but none before. */
static int named_device(const char *item, bool by_index)
{
    size_t length = strcspn(item, " \t");
    int found = -1;

    if (by_index) {
        char *end;
        long index = strtol(item, &end, 10);

        return end != item && index >= 0 && (size_t)index < whole_gpus ? (int)index : -1;
    }
    if (strncmp(item, "GPU-", 4) && strncmp(item, "MIG-", 4))
        return -1;
    for (size_t i = 0; i < candidate_count; i++)
        if (!strncasecmp(candidates[i].uuid, item, length)) {
            if (found >= 0)
                return -1;
            found = (int)i;
        }
    return found;
}

/* CUDA_VISIBLE_DEVICES as CUDA reads it: indices or UUIDs, whatever comes first, up to the first item that names nothing.
 * A process sees one MIG device at most, and where MIG devices exist it gets the first unless told. */
static int select_devices(void)
{
    const char *variable = getenv("CUDA_VISIBLE_DEVICES");
    char list[4096], *rest = list, *item;
    bool by_index;

    device_count = 0;
    if (!variable) {
        if (candidate_count > whole_gpus)
            devices[device_count++] = &candidates[whole_gpus];
        else
            for (size_t i = 0; i < whole_gpus; i++)
                devices[device_count++] = &candidates[i];
        return device_count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
    }
    snprintf(list, sizeof(list), "%s", variable);
    by_index = strncmp(list, "GPU-", 4) && strncmp(list, "MIG-", 4);
    while ((item = strsep(&rest, ","))) {
        int found = named_device(item, by_index);

        if (found < 0)
            break;
        if (candidate_is_mig[found]) {
            devices[0] = &candidates[found];
            device_count = 1;
            break;
        }
        for (int i = 0; i < device_count; i++)
            if (devices[i] == &candidates[found]) {
                device_count = 0;
                return CUDA_ERROR_INVALID_DEVICE;
            }
        devices[device_count++] = &candidates[found];
    }
    return device_count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

/* Beside an NVSwitch nothing starts before Fabric Manager has let every GPU in. */
static int fabric_state(const struct sim_profile *profile)
{
    for (unsigned int i = 0; i < profile->gpu_count; i++) {
        const char *state = sim_gpu_value(&profile->gpus[i], "fabric.state");

        if (state && strcmp(state, "Completed"))
            return CUDA_ERROR_SYSTEM_NOT_READY;
    }
    return CUDA_SUCCESS;
}

API int cuInit(unsigned int flags)
{
    const struct sim_profile *profile;
    int result = CUDA_SUCCESS;

    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (initialised && initialised != getpid())
        result = CUDA_ERROR_NOT_INITIALIZED;
    else if (!initialised) {
        profile = sim_load();
        switch (sim_driver_state(profile)) {
        case SIM_DRIVER_LOADED:
            result = gather(profile);
            if (!result)
                result = fabric_state(profile);
            if (!result)
                result = select_devices();
            break;
        case SIM_DRIVER_UNLOADED:
        case SIM_DRIVER_DENIED:
            result = CUDA_ERROR_NO_DEVICE;
            break;
        case SIM_DRIVER_MISMATCH:
            result = CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
            break;
        case SIM_DRIVER_BLOCKED:
            result = sim_is_wsl(profile) ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_ERROR_NO_DEVICE;
            break;
        }
        initialised = result == CUDA_SUCCESS ? getpid() : 0;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

bool cuda_initialised(void)
{
    return initialised == getpid();
}

const struct cuda_device *device_at(int ordinal, int *error)
{
    *error = !cuda_initialised() ? CUDA_ERROR_NOT_INITIALIZED
             : ordinal < 0 || ordinal >= device_count ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
    return *error ? NULL : devices[ordinal];
}

API int cuDriverGetVersion(int *version)
{
    unsigned int major = 0, minor = 0;
    const char *cuda;

    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    cuda = sim_node_value(sim_load(), "driver.cuda_version");
    if (cuda)
        (void)sscanf(cuda, "%u.%u", &major, &minor);
    pthread_mutex_unlock(&lock);
    *version = (int)(major * 1000 + minor * 10);
    return CUDA_SUCCESS;
}

API int cuDeviceGetCount(int *count)
{
    if (!cuda_initialised())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = device_count;
    return CUDA_SUCCESS;
}

API int cuDeviceGet(int *device, int ordinal)
{
    int error;

    if (device_at(ordinal, &error))
        *device = ordinal;
    return error;
}

API int cuDeviceGetName(char *name, int length, int device)
{
    int error;
    const struct cuda_device *found = device_at(device, &error);

    if (found && name && length > 0)
        snprintf(name, (size_t)length, "%s", found->name);
    return error;
}

API int cuDeviceGetUuid(CUuuid *uuid, int device)
{
    int error;
    const struct cuda_device *found = device_at(device, &error);
    const char *at = found ? found->uuid + 4 : "";
    unsigned int byte;

    if (!found || !uuid)
        return error ? error : CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < 16 && sscanf(at, "%2x", &byte) == 1; i++) {
        uuid->bytes[i] = (unsigned char)byte;
        at += 2;
        at += *at == '-';
    }
    return CUDA_SUCCESS;
}

API int cuDeviceGetUuid_v2(CUuuid *uuid, int device)
{
    return cuDeviceGetUuid(uuid, device);
}

API int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    int error;
    const struct cuda_device *found = device_at(device, &error);

    if (found && bytes)
        *bytes = (size_t)(found->memory_mib * MIB);
    return error;
}

API int cuDeviceComputeCapability(int *major, int *minor, int device)
{
    int error;
    const struct cuda_device *found = device_at(device, &error);

    if (found && sscanf(found->compute_cap, "%d.%d", major, minor) != 2)
        error = CUDA_ERROR_INVALID_VALUE;
    return error;
}

static const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {CUDA_ERROR_SYSTEM_NOT_READY, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    {CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
     "system has unsupported display driver / cuda driver combination"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
     "peer access is not supported between these two devices"},
    {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {CUDA_ERROR_INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
     "peer access is already enabled"},
    {CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static int error_text(int code, bool name, const char **out)
{
    for (size_t i = 0; out && i < sizeof(errors) / sizeof(*errors); i++)
        if (errors[i].code == code) {
            *out = name ? errors[i].name : errors[i].text;
            return CUDA_SUCCESS;
        }
    if (out)
        *out = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

API int cuGetErrorString(int code, const char **out)
{
    return error_text(code, false, out);
}

API int cuGetErrorName(int code, const char **out)
{
    return error_text(code, true, out);
}
