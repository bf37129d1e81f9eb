/* The NVML double: libnvidia-ml.so.1. It answers from the node's profile and opens no device. */
#define _GNU_SOURCE 1
#include "nvml.h"
#include "mig.h"
#include "profile.h"

#include <ctype.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define MAX_HANDLES 512
#define MIB (1024.0 * 1024.0)
#define VALUE_SIZE 256
#define SHARED "device_attributes.shared."

/* A handle outlives changes of the profile: it remembers which GPU (or MIG device) it stands for, by UUID. */
struct nvmlDevice_st {
    char uuid[96];
    struct nvmlDevice_st *parent; /* set for a MIG device */
};

struct nvmlGpuInstance_st {
    nvmlDevice_t device;
    unsigned int id;
};

struct nvmlComputeInstance_st {
    nvmlGpuInstance_t instance;
    unsigned int id;
};

struct nvmlEventSet_st {
    nvmlDevice_t devices[SIM_MAX_GPUS];
    bool told[SIM_MAX_GPUS];
    unsigned int count;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned int initialised;
static const struct sim_profile *profile;

static struct nvmlDevice_st handles[MAX_HANDLES];
static struct nvmlGpuInstance_st gpu_instances[MAX_HANDLES];
static struct nvmlComputeInstance_st compute_instances[MAX_HANDLES];
static unsigned int handle_count, gpu_instance_count, compute_instance_count;

/* The GPUs this process saw when it initialised NVML, in the order of their indices. */
static nvmlDevice_t visible[SIM_MAX_GPUS];
static unsigned int visible_count;

/* What a device handle stands for in the state of this moment. */
struct target {
    const struct sim_gpu *gpu;
    int mig; /* number in mig_devices, or -1 */
};

/* -- state -------------------------------------------------------------------------------------------------------- */

static nvmlReturn_t enter(void)
{
    pthread_mutex_lock(&lock);
    if (!initialised)
        return NVML_ERROR_UNINITIALIZED;
    profile = sim_load();
    return NVML_SUCCESS;
}

static nvmlReturn_t leave(nvmlReturn_t result)
{
    pthread_mutex_unlock(&lock);
    return result;
}

static nvmlDevice_t handle_for(const char *uuid, nvmlDevice_t parent)
{
    for (unsigned int i = 0; i < handle_count; i++)
        if (!strcmp(handles[i].uuid, uuid))
            return &handles[i];
    if (handle_count == MAX_HANDLES)
        return NULL;
    snprintf(handles[handle_count].uuid, sizeof(handles[handle_count].uuid), "%s", uuid);
    handles[handle_count].parent = parent;
    return &handles[handle_count++];
}

static bool known(nvmlDevice_t device)
{
    return device >= handles && device < handles + handle_count;
}

static const struct sim_gpu *gpu_by_uuid(const char *uuid)
{
    for (unsigned int i = 0; i < profile->gpu_count; i++) {
        const char *have = sim_gpu_value(&profile->gpus[i], "uuid");

        if (have && !strcmp(have, uuid))
            return &profile->gpus[i];
    }
    return NULL;
}

static const char *gpu_text(const struct sim_gpu *gpu, const char *format, ...)
{
    char key[512];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(key, sizeof(key), format, arguments);
    va_end(arguments);
    return sim_gpu_value(gpu, key);
}

static unsigned int list_length(const struct sim_gpu *gpu, const char *key)
{
    const char *count = gpu_text(gpu, "%s.#", key);

    return count ? (unsigned int)strtoul(count, NULL, 10) : 0;
}

static unsigned int mig_count(const struct sim_gpu *gpu)
{
    return mig_is_enabled(gpu) ? list_length(gpu, "mig_devices") : 0;
}

/* MIG devices are numbered among those that are visible here. Returns the number in mig_devices, or -1. */
static int mig_at(const struct sim_gpu *gpu, unsigned int index)
{
    for (unsigned int i = 0; i < mig_count(gpu); i++)
        if (sim_mig_visible(gpu, i) && !index--)
            return (int)i;
    return -1;
}

/* Whether the GPU answers. A hanging one keeps the caller waiting, without the lock, until the profile changes. */
static nvmlReturn_t check_health(const char *uuid)
{
    for (unsigned int waited = 0;; waited++) {
        const struct sim_gpu *gpu = gpu_by_uuid(uuid);
        const char *state = gpu ? sim_gpu_value(gpu, "state") : "lost";
        const char *limit = gpu ? sim_gpu_value(gpu, "hang_seconds") : NULL;

        if (!state || !strcmp(state, "ok") || !strcmp(state, "reset"))
            return NVML_SUCCESS;
        if (!strcmp(state, "lost"))
            return NVML_ERROR_GPU_IS_LOST;
        if (strcmp(state, "hang") || (double)waited / 10.0 >= (limit ? strtod(limit, NULL) : 3600.0))
            return NVML_ERROR_UNKNOWN;
        pthread_mutex_unlock(&lock);
        usleep(100000);
        pthread_mutex_lock(&lock);
        profile = sim_load();
    }
}

static nvmlReturn_t resolve(nvmlDevice_t device, struct target *target)
{
    nvmlReturn_t result;

    target->mig = -1;
    if (!known(device))
        return NVML_ERROR_INVALID_ARGUMENT;
    result = check_health(device->parent ? device->parent->uuid : device->uuid);
    if (result)
        return result;
    target->gpu = gpu_by_uuid(device->parent ? device->parent->uuid : device->uuid);
    if (!device->parent)
        return NVML_SUCCESS;
    for (unsigned int i = 0; i < mig_count(target->gpu); i++) {
        const char *uuid = gpu_text(target->gpu, "mig_devices.%u.uuid", i);

        if (uuid && !strcmp(uuid, device->uuid) && sim_mig_visible(target->gpu, i))
            target->mig = (int)i;
    }
    return target->mig < 0 ? NVML_ERROR_NOT_FOUND : NVML_SUCCESS;
}

static nvmlReturn_t open_device(nvmlDevice_t device, struct target *target)
{
    nvmlReturn_t result = enter();

    return result ? result : resolve(device, target);
}

/* -- values ------------------------------------------------------------------------------------------------------- */

static unsigned int visible_index(const struct sim_gpu *gpu)
{
    const char *uuid = sim_gpu_value(gpu, "uuid");

    for (unsigned int i = 0; i < visible_count; i++)
        if (!strcmp(visible[i]->uuid, uuid))
            return i;
    return 0;
}

static double number(const char *text)
{
    return text ? strtod(text, NULL) : 0.0;
}

static bool parse_bus_id(const struct sim_gpu *gpu, unsigned int *domain, unsigned int *bus, unsigned int *slot)
{
    const char *text = sim_gpu_value(gpu, "pci.pci_bus_id");

    return text && sscanf(text, "%x:%x:%x", domain, bus, slot) == 3;
}

/* What follows from other values and stands nowhere in the profile, unless the profile says it all the same. */
static const char *derived(const struct sim_gpu *gpu, const char *key, char *buffer)
{
    unsigned int domain, bus, slot;
    double free_mib;

    /* A GPU in MIG mode reports no utilisation of its own. */
    if (!strncmp(key, "utilization.", 12) && mig_is_enabled(gpu))
        return NULL;
    if (!strcmp(key, "index"))
        snprintf(buffer, VALUE_SIZE, "%u", visible_index(gpu));
    else if (!strcmp(key, "fb_memory_usage.used") && sim_gpu_value(gpu, "fb_memory_usage.total")) {
        double used = number(sim_gpu_value(gpu, key));

        for (unsigned int i = 0; i < list_length(gpu, "processes"); i++)
            used += number(gpu_text(gpu, "processes.%u.used_memory", i));
        snprintf(buffer, VALUE_SIZE, "%.0f MiB", used);
    } else if (sim_gpu_value(gpu, key)) {
        return sim_gpu_value(gpu, key);
    } else if (!strcmp(key, "fb_memory_usage.free") && sim_gpu_value(gpu, "fb_memory_usage.total")) {
        char used[VALUE_SIZE];

        free_mib = number(sim_gpu_value(gpu, "fb_memory_usage.total")) -
                   number(sim_gpu_value(gpu, "fb_memory_usage.reserved")) -
                   number(derived(gpu, "fb_memory_usage.used", used));
        snprintf(buffer, VALUE_SIZE, "%.0f MiB", fmax(free_mib, 0.0));
    } else if (!strcmp(key, "bar1_memory_usage.free") && sim_gpu_value(gpu, "bar1_memory_usage.total")) {
        free_mib = number(sim_gpu_value(gpu, "bar1_memory_usage.total")) -
                   number(sim_gpu_value(gpu, "bar1_memory_usage.used"));
        snprintf(buffer, VALUE_SIZE, "%.0f MiB", free_mib);
    } else if (!strcmp(key, "pci.pci_bus") && parse_bus_id(gpu, &domain, &bus, &slot))
        snprintf(buffer, VALUE_SIZE, "%02X", bus);
    else if (!strcmp(key, "pci.pci_device") && parse_bus_id(gpu, &domain, &bus, &slot))
        snprintf(buffer, VALUE_SIZE, "%02X", slot);
    else if (!strcmp(key, "pci.pci_domain") && parse_bus_id(gpu, &domain, &bus, &slot))
        snprintf(buffer, VALUE_SIZE, "%04X", domain);
    else if (!strcmp(key, "board_id") && parse_bus_id(gpu, &domain, &bus, &slot))
        snprintf(buffer, VALUE_SIZE, "0x%x", domain << 16 | bus << 8 | slot);
    else if (!strcmp(key, "mig_mode.pending_mig"))
        return sim_gpu_value(gpu, "mig_mode.current_mig");
    else if (!strcmp(key, "ecc_mode.pending_ecc"))
        return sim_gpu_value(gpu, "ecc_mode.current_ecc");
    else if (!strcmp(key, "gsp_firmware_version") && sim_gpu_value(gpu, "gsp_mode.current") &&
             !strcmp(sim_gpu_value(gpu, "gsp_mode.current"), "Enabled"))
        return sim_library_version(profile);
    else
        return NULL;
    return buffer;
}

/* The number of the entry in mig_profiles that a MIG device was made from, or -1. */
static int mig_profile(const struct sim_gpu *gpu, int mig)
{
    const char *name = gpu_text(gpu, "mig_devices.%d.profile", mig);

    for (unsigned int i = 0; name && i < list_length(gpu, "mig_profiles"); i++) {
        const char *have = gpu_text(gpu, "mig_profiles.%u.name", i);

        if (have && !strcmp(have, name))
            return (int)i;
    }
    return -1;
}

/* A device that does not have all of its GPU instance has its own number of slices in its name. */
static const char *mig_name(const struct sim_gpu *gpu, int mig, char *buffer)
{
    const char *profile = gpu_text(gpu, "mig_devices.%d.profile", mig);
    const char *slices = gpu_text(gpu, "mig_devices.%d.compute_slices", mig);

    snprintf(buffer, VALUE_SIZE, "%s%s%s", slices ? slices : "", slices ? "c." : "", profile ? profile : "");
    return buffer;
}

/* The multiprocessors of so many slices of a GPU instance: those of the one-slice profile each, or all that it has. */
static unsigned int multiprocessors(const struct sim_gpu *gpu, unsigned int profile_number, unsigned int slices)
{
    struct mig_profile whole, one;

    if (mig_profile_at(gpu, profile_number, &whole) && slices < whole.slices)
        for (unsigned int i = 0; mig_profile_at(gpu, i, &one); i++)
            if (one.kind == 0)
                return slices *
                       (unsigned int)number(gpu_text(gpu, "mig_profiles.%u." SHARED "multiprocessor_count", i));
    return (unsigned int)number(gpu_text(gpu, "mig_profiles.%u." SHARED "multiprocessor_count", profile_number));
}

static const char *mig_value(const struct sim_gpu *gpu, int mig, const char *key, char *buffer)
{
    const char *value = gpu_text(gpu, "mig_devices.%d.%s", mig, key);
    const char *own_slices = gpu_text(gpu, "mig_devices.%d.compute_slices", mig);

    if (!strcmp(key, "profile"))
        return mig_name(gpu, mig, buffer);
    if (!strcmp(key, "compute_slices") && !own_slices)
        return gpu_text(gpu, "mig_profiles.%d.slices", mig_profile(gpu, mig));
    if (!strcmp(key, SHARED "multiprocessor_count") && own_slices) {
        snprintf(buffer, VALUE_SIZE, "%u",
                 multiprocessors(gpu, (unsigned int)mig_profile(gpu, mig), (unsigned int)number(own_slices)));
        return buffer;
    }
    if (!strcmp(key, "index")) {
        unsigned int index = 0;

        while (mig_at(gpu, index) >= 0 && mig_at(gpu, index) != mig)
            index++;
        snprintf(buffer, VALUE_SIZE, "%u", index);
        return buffer;
    }
    if (!strcmp(key, "product_name")) {
        char name[VALUE_SIZE];

        snprintf(buffer, VALUE_SIZE, "%s MIG %s", sim_gpu_value(gpu, "product_name"), mig_name(gpu, mig, name));
        return buffer;
    }
    if (!value)
        value = gpu_text(gpu, "mig_profiles.%d.%s", mig_profile(gpu, mig), key);
    if (!value && (!strcmp(key, "fb_memory_usage.free") || !strcmp(key, "bar1_memory_usage.free"))) {
        char section[64], scratch[VALUE_SIZE], part[96];
        double total, used;

        snprintf(section, sizeof(section), "%.*s", (int)strcspn(key, "."), key);
        snprintf(part, sizeof(part), "%s.total", section);
        total = number(mig_value(gpu, mig, part, scratch));
        snprintf(part, sizeof(part), "%s.used", section);
        used = number(mig_value(gpu, mig, part, scratch));
        snprintf(part, sizeof(part), "%s.reserved", section);
        snprintf(buffer, VALUE_SIZE, "%.0f MiB", total - used - number(mig_value(gpu, mig, part, scratch)));
        return buffer;
    }
    return value;
}

static const char *value_of(const struct target *target, const char *key, char *buffer)
{
    if (target->mig >= 0)
        return mig_value(target->gpu, target->mig, key, buffer);
    return derived(target->gpu, key, buffer);
}

/* A GPU that must be reset is still found and named; what the GPU itself would have to answer is an error. */
static nvmlReturn_t read_value(const struct target *target, const char *key, char *buffer, const char **value)
{
    static const char *const errors[] = {"performance_state", "fan_speed", "temperature.", "utilization.", "clocks.",
                                         "clocks_event_reasons.", "ecc_errors."};
    const char *state = sim_gpu_value(target->gpu, "state");

    *value = value_of(target, key, buffer);
    if (!*value || !state || strcmp(state, "reset"))
        return NVML_SUCCESS;
    for (size_t i = 0; i < sizeof(errors) / sizeof(*errors); i++)
        if (!strncmp(key, errors[i], strlen(errors[i])))
            return NVML_ERROR_RESET_REQUIRED;
    if (!strcmp(key, "gpu_recovery_action"))
        *value = "Reset";
    else if (!strncmp(key, "gpu_power_readings.", 19))
        *value = NULL;
    return NVML_SUCCESS;
}

static bool enabled(const char *value)
{
    static const char *const yes[] = {"Enabled", "enabled", "Yes", "yes", "true", "On", "on", "Active", "1"};

    for (size_t i = 0; i < sizeof(yes) / sizeof(*yes); i++)
        if (!strcmp(value, yes[i]))
            return true;
    return false;
}

static nvmlReturn_t copy_text(const char *value, char *out, unsigned int size)
{
    if (!out || !size)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!value)
        return NVML_ERROR_NOT_SUPPORTED;
    if (strlen(value) >= size)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(out, value);
    return NVML_SUCCESS;
}

static nvmlReturn_t get_text(nvmlDevice_t device, const char *key, char *out, unsigned int size)
{
    char buffer[VALUE_SIZE];
    struct target target;
    const char *value;
    nvmlReturn_t result = open_device(device, &target);

    if (!result)
        result = read_value(&target, key, buffer, &value);
    if (!result)
        result = copy_text(value, out, size);
    return leave(result);
}

static nvmlReturn_t get_number(nvmlDevice_t device, const char *key, double scale, double *out)
{
    char buffer[VALUE_SIZE];
    struct target target;
    const char *value, *digits;
    nvmlReturn_t result = open_device(device, &target);

    if (!result)
        result = read_value(&target, key, buffer, &value);
    if (!result) {
        digits = value && (*value == 'P') ? value + 1 : value;
        if (!digits || !(isdigit((unsigned char)*digits) || *digits == '-'))
            result = NVML_ERROR_NOT_SUPPORTED;
        else
            *out = strtod(digits, NULL) * scale;
    }
    return leave(result);
}

static nvmlReturn_t get_scaled(nvmlDevice_t device, const char *key, double scale, unsigned int *out)
{
    double value = 0.0;
    nvmlReturn_t result;

    if (!out)
        return NVML_ERROR_INVALID_ARGUMENT;
    result = get_number(device, key, scale, &value);
    if (!result)
        *out = (unsigned int)(long long)llround(value);
    return result;
}

static nvmlReturn_t get_uint(nvmlDevice_t device, const char *key, unsigned int *out)
{
    return get_scaled(device, key, 1.0, out);
}

static nvmlReturn_t get_wide(nvmlDevice_t device, const char *key, double scale, unsigned long long *out)
{
    double value = 0.0;
    nvmlReturn_t result;

    if (!out)
        return NVML_ERROR_INVALID_ARGUMENT;
    result = get_number(device, key, scale, &value);
    if (!result)
        *out = (unsigned long long)llround(value);
    return result;
}

static nvmlReturn_t get_hex(nvmlDevice_t device, const char *key, unsigned int *out)
{
    char text[32];
    nvmlReturn_t result = get_text(device, key, text, sizeof(text));

    if (!result && out)
        *out = (unsigned int)strtoul(text, NULL, 16);
    return out ? result : NVML_ERROR_INVALID_ARGUMENT;
}

static nvmlReturn_t get_flag(nvmlDevice_t device, const char *key, unsigned int *out)
{
    char text[VALUE_SIZE];
    nvmlReturn_t result;

    if (!out)
        return NVML_ERROR_INVALID_ARGUMENT;
    result = get_text(device, key, text, sizeof(text));
    if (!result)
        *out = enabled(text);
    return result;
}

/* The position of a value in a list of names; 0 for one that is not in it. */
static nvmlReturn_t get_choice(nvmlDevice_t device, const char *key, const char *const *names, unsigned int *out)
{
    char text[VALUE_SIZE];
    nvmlReturn_t result;

    if (!out)
        return NVML_ERROR_INVALID_ARGUMENT;
    result = get_text(device, key, text, sizeof(text));
    if (!result) {
        *out = 0;
        for (unsigned int i = 0; names[i]; i++)
            if (*names[i] && !strcmp(names[i], text))
                *out = i;
    }
    return result;
}

#define TEXT_CALL(name, key) \
    API nvmlReturn_t name(nvmlDevice_t device, char *out, unsigned int size) { return get_text(device, key, out, size); }
#define UINT_CALL(name, key) \
    API nvmlReturn_t name(nvmlDevice_t device, unsigned int *out) { return get_uint(device, key, out); }
#define FLAG_CALL(name, key) \
    API nvmlReturn_t name(nvmlDevice_t device, unsigned int *out) { return get_flag(device, key, out); }
#define SCALED_CALL(name, key, scale) \
    API nvmlReturn_t name(nvmlDevice_t device, unsigned int *out) { return get_scaled(device, key, scale, out); }
/* Utilisation with the length of the sample period. */
#define SAMPLE_CALL(name, key)                                                              \
    API nvmlReturn_t name(nvmlDevice_t device, unsigned int *out, unsigned int *period)     \
    {                                                                                       \
        if (period)                                                                         \
            *period = 167000;                                                               \
        return get_uint(device, key, out);                                                  \
    }

/* -- library ------------------------------------------------------------------------------------------------------ */

API nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    nvmlReturn_t result = NVML_SUCCESS;

    (void)flags;
    pthread_mutex_lock(&lock);
    profile = sim_load();
    if (!initialised) {
        switch (sim_driver_state(profile)) {
        case SIM_DRIVER_UNLOADED:
            result = NVML_ERROR_DRIVER_NOT_LOADED;
            break;
        case SIM_DRIVER_MISMATCH:
            result = NVML_ERROR_LIB_RM_VERSION_MISMATCH;
            break;
        case SIM_DRIVER_BLOCKED:
            result = NVML_ERROR_OPERATING_SYSTEM;
            break;
        case SIM_DRIVER_DENIED:
            result = NVML_ERROR_UNKNOWN;
            break;
        case SIM_DRIVER_LOADED:
            visible_count = 0;
            for (unsigned int i = 0; i < profile->gpu_count; i++)
                if (sim_gpu_visible(profile, i))
                    visible[visible_count++] = handle_for(sim_gpu_value(&profile->gpus[i], "uuid"), NULL);
            break;
        }
    }
    if (!result)
        initialised++;
    return leave(result);
}

API nvmlReturn_t nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

API nvmlReturn_t nvmlInit(void)
{
    return nvmlInitWithFlags(0);
}

API nvmlReturn_t nvmlShutdown(void)
{
    nvmlReturn_t result = enter();

    if (!result)
        initialised--;
    return leave(result);
}

API const char *nvmlErrorString(nvmlReturn_t result)
{
    static const char *const texts[] = {
        "Success",
        "Uninitialized",
        "Invalid Argument",
        "Not Supported",
        "Insufficient Permissions",
        "Already Initialized",
        "Not Found",
        "Insufficient Size",
        "Insufficient External Power",
        "Driver Not Loaded",
        "Timeout",
        "Interrupt Request Issue",
        "NVML Shared Library Not Found",
        "Function Not Found",
        "Corrupted infoROM",
        "GPU is lost",
        "GPU requires reset",
        "GPU access blocked by the operating system",
        "Driver/library version mismatch",
        "In use by another client",
        "Insufficient Memory",
        "No data",
        "vGPU ECC not supported",
        "Insufficient Resources",
        "Invalid Frequency",
        "Argument version mismatch",
        "Requested functionality has been deprecated",
        "System is not in ready state",
        "No supported GPUs were found",
        "Resource not in correct state to perform requested operation",
        "Reset type is not supported for given device",
    };

    if (result >= 0 && (size_t)result < sizeof(texts) / sizeof(*texts))
        return texts[result];
    return "Unknown Error";
}

API nvmlReturn_t nvmlSystemGetDriverVersion(char *out, unsigned int size)
{
    nvmlReturn_t result = enter();

    return leave(result ? result : copy_text(sim_node_value(profile, "driver.version"), out, size));
}

API nvmlReturn_t nvmlSystemGetNVMLVersion(char *out, unsigned int size)
{
    char version[128];
    const char *cuda;
    nvmlReturn_t result = enter();

    if (!result) {
        cuda = sim_node_value(profile, "driver.cuda_version");
        snprintf(version, sizeof(version), "%.*s.%s", cuda ? (int)strcspn(cuda, ".") : 1, cuda ? cuda : "0",
                 sim_library_version(profile));
        result = copy_text(version, out, size);
    }
    return leave(result);
}

API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    unsigned int major = 0, minor = 0;
    const char *cuda;
    nvmlReturn_t result = enter();

    if (!result && !version)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result) {
        cuda = sim_node_value(profile, "driver.cuda_version");
        if (cuda && sscanf(cuda, "%u.%u", &major, &minor) == 2)
            *version = (int)(major * 1000 + minor * 10);
        else
            result = NVML_ERROR_NOT_SUPPORTED;
    }
    return leave(result);
}

API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    return nvmlSystemGetCudaDriverVersion(version);
}

API nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *out, unsigned int size)
{
    nvmlReturn_t result = enter();
    const char *name = NULL;

    for (unsigned int i = 0; !result && i < profile->gpu_count; i++)
        for (unsigned int j = 0; j < list_length(&profile->gpus[i], "processes"); j++)
            if ((unsigned int)number(gpu_text(&profile->gpus[i], "processes.%u.pid", j)) == pid)
                name = gpu_text(&profile->gpus[i], "processes.%u.process_name", j);
    if (!result)
        result = name ? copy_text(name, out, size) : NVML_ERROR_NOT_FOUND;
    return leave(result);
}

API nvmlReturn_t nvmlUnitGetCount(unsigned int *count)
{
    nvmlReturn_t result = enter();

    if (!result && count)
        *count = 0;
    return leave(result ? result : count ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT);
}

/* -- finding devices ---------------------------------------------------------------------------------------------- */

API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    nvmlReturn_t result = enter();

    if (!result && !count)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result)
        *count = visible_count;
    return leave(result);
}

API nvmlReturn_t nvmlDeviceGetCount(unsigned int *count)
{
    return nvmlDeviceGetCount_v2(count);
}

API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    nvmlReturn_t result = enter();

    if (!result && (!device || index >= visible_count))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result)
        result = check_health(visible[index]->uuid);
    if (!result)
        *device = visible[index];
    return leave(result);
}

API nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

static nvmlReturn_t visible_with(const char *key, const char *wanted, nvmlDevice_t *device)
{
    nvmlReturn_t result = enter();

    if (!result && (!device || !wanted))
        result = NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned int i = 0; !result && i < visible_count; i++) {
        const struct sim_gpu *gpu = gpu_by_uuid(visible[i]->uuid);
        const char *value = gpu ? sim_gpu_value(gpu, key) : NULL;

        if (value && !strcmp(value, wanted)) {
            result = check_health(visible[i]->uuid);
            if (!result)
                *device = visible[i];
            return leave(result);
        }
    }
    return leave(result ? result : NVML_ERROR_NOT_FOUND);
}

static nvmlReturn_t mig_by_uuid(const char *uuid, nvmlDevice_t *device)
{
    nvmlReturn_t result = enter();

    for (unsigned int i = 0; !result && i < visible_count; i++) {
        const struct sim_gpu *gpu = gpu_by_uuid(visible[i]->uuid);

        for (unsigned int j = 0; gpu && j < mig_count(gpu); j++) {
            const char *have = gpu_text(gpu, "mig_devices.%u.uuid", j);

            if (have && !strcmp(have, uuid) && sim_mig_visible(gpu, j)) {
                *device = handle_for(uuid, visible[i]);
                return leave(*device ? NVML_SUCCESS : NVML_ERROR_UNKNOWN);
            }
        }
    }
    return leave(result ? result : NVML_ERROR_NOT_FOUND);
}

API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    if (uuid && device && !strncmp(uuid, "MIG-", 4))
        return mig_by_uuid(uuid, device);
    return visible_with("uuid", uuid, device);
}

API nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
    return visible_with("serial", serial, device);
}

API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
    unsigned int domain, bus, slot, function = 0, have[3];
    nvmlReturn_t result = enter();

    if (!result && (!bus_id || !device))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result && sscanf(bus_id, "%x:%x:%x.%x", &domain, &bus, &slot, &function) < 3) {
        domain = 0;
        if (sscanf(bus_id, "%x:%x.%x", &bus, &slot, &function) < 2)
            result = NVML_ERROR_INVALID_ARGUMENT;
    }
    for (unsigned int i = 0; !result && i < visible_count; i++) {
        const struct sim_gpu *gpu = gpu_by_uuid(visible[i]->uuid);

        if (gpu && parse_bus_id(gpu, &have[0], &have[1], &have[2]) && have[0] == domain && have[1] == bus &&
            have[2] == slot && !function) {
            result = check_health(visible[i]->uuid);
            if (!result)
                *device = visible[i];
            return leave(result);
        }
    }
    return leave(result ? result : NVML_ERROR_NOT_FOUND);
}

API nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByPciBusId_v2(bus_id, device);
}

/* -- identity ----------------------------------------------------------------------------------------------------- */

TEXT_CALL(nvmlDeviceGetName, "product_name")
TEXT_CALL(nvmlDeviceGetUUID, "uuid")
TEXT_CALL(nvmlDeviceGetSerial, "serial")
TEXT_CALL(nvmlDeviceGetBoardPartNumber, "board_part_number")
TEXT_CALL(nvmlDeviceGetVbiosVersion, "vbios_version")
TEXT_CALL(nvmlDeviceGetInforomImageVersion, "inforom_version.img_version")
UINT_CALL(nvmlDeviceGetIndex, "index")
UINT_CALL(nvmlDeviceGetModuleId, "platformInfo.module_id")
UINT_CALL(nvmlDeviceGetNumGpuCores, "cores")
UINT_CALL(nvmlDeviceGetMemoryBusWidth, "memory_bus_width")
UINT_CALL(nvmlDeviceGetNumaNodeId, "gpu_numa_id")
FLAG_CALL(nvmlDeviceGetMultiGpuBoard, "multigpu_board")

/* NVML answers a minor number where nvidia-smi shows N/A: a profile may give the two apart. */
API nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
    nvmlReturn_t result = get_uint(device, "nvml.minor_number", minor);

    return result == NVML_ERROR_NOT_SUPPORTED ? get_uint(device, "minor_number", minor) : result;
}

API nvmlReturn_t nvmlDeviceGetBoardId(nvmlDevice_t device, unsigned int *id)
{
    return get_hex(device, "board_id", id);
}

API nvmlReturn_t nvmlDeviceGetGspFirmwareVersion(nvmlDevice_t device, char *version)
{
    return get_text(device, "gsp_firmware_version", version, 64);
}

API nvmlReturn_t nvmlDeviceGetGspFirmwareMode(nvmlDevice_t device, unsigned int *on, unsigned int *by_default)
{
    nvmlReturn_t result = get_flag(device, "gsp_mode.current", on);

    return result ? result : get_flag(device, "gsp_mode.default", by_default);
}

API nvmlReturn_t nvmlDeviceGetInforomVersion(nvmlDevice_t device, unsigned int object, char *out, unsigned int size)
{
    static const char *const keys[] = {"inforom_version.oem_object", "inforom_version.ecc_object",
                                       "inforom_version.pwr_object"};

    return object < 3 ? get_text(device, keys[object], out, size) : NVML_ERROR_INVALID_ARGUMENT;
}

API nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, unsigned int *brand)
{
    static const char *const names[] = {
        "Unknown", "Quadro", "Tesla", "NVS", "GRID", "GeForce", "Titan", "", "", "", "", "", "Quadro RTX",
        "NVIDIA RTX", "NVIDIA", "GeForce RTX", "Titan RTX", NULL};

    return get_choice(device, "product_brand", names, brand);
}

API nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, unsigned int *architecture)
{
    static const char *const names[] = {"",       "",      "Kepler",       "Maxwell", "Pascal", "Volta",
                                        "Turing", "Ampere", "Ada Lovelace", "Hopper",  "Blackwell", NULL};

    return get_choice(device, "product_architecture", names, architecture);
}

API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    char text[16];
    nvmlReturn_t result = get_text(device, "compute_cap", text, sizeof(text));

    if (!major || !minor)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!result && sscanf(text, "%d.%d", major, minor) != 2)
        result = NVML_ERROR_NOT_SUPPORTED;
    return result;
}

static nvmlReturn_t pci_numbers(nvmlDevice_t device, nvmlPciInfo_t *pci, char *bus_id)
{
    struct target target;
    unsigned int slot;
    nvmlReturn_t result;

    memset(pci, 0, sizeof(*pci));
    result = open_device(device, &target);
    if (!result && (target.mig >= 0 || !parse_bus_id(target.gpu, &pci->domain, &pci->bus, &slot)))
        result = target.mig >= 0 ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_SUPPORTED;
    leave(NVML_SUCCESS);
    if (result)
        return result;
    pci->device = slot;
    get_hex(device, "pci.pci_device_id", &pci->pciDeviceId);
    get_hex(device, "pci.pci_sub_system_id", &pci->pciSubSystemId);
    snprintf(pci->busIdLegacy, sizeof(pci->busIdLegacy), "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff,
             slot & 0xff);
    snprintf(bus_id, 32, "%08X:%02X:%02X.0", pci->domain, pci->bus, slot);
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    return pci ? pci_numbers(device, pci, pci->busId) : NVML_ERROR_INVALID_ARGUMENT;
}

API nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_v2_t *out)
{
    nvmlPciInfo_t pci;
    nvmlReturn_t result = out ? nvmlDeviceGetPciInfo_v3(device, &pci) : NVML_ERROR_INVALID_ARGUMENT;

    if (!result) {
        memset(out, 0, sizeof(*out));
        memcpy(out, &pci, offsetof(nvmlPciInfo_v2_t, reserved));
    }
    return result;
}

/* The first version ends its numbers before the subsystem; the field after it is reserved, so the second one fits. */
API nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_v2_t *out)
{
    nvmlReturn_t result = nvmlDeviceGetPciInfo_v2(device, out);

    if (!result)
        out->pciSubSystemId = 0;
    return result;
}

API nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_v1_t *out)
{
    nvmlPciInfo_t pci;
    nvmlReturn_t result;

    if (!out)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (out->version != NVML_STRUCT_VERSION(nvmlPciInfoExt_v1_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    result = nvmlDeviceGetPciInfo_v3(device, &pci);
    if (!result) {
        out->domain = pci.domain;
        out->bus = pci.bus;
        out->device = pci.device;
        out->pciDeviceId = pci.pciDeviceId;
        out->pciSubSystemId = pci.pciSubSystemId;
        get_hex(device, "pci.pci_base_class", &out->baseClass);
        get_hex(device, "pci.pci_sub_class", &out->subClass);
        memcpy(out->busId, pci.busId, sizeof(out->busId));
    }
    return result;
}

/* -- PCIe, clocks, power, temperature ----------------------------------------------------------------------------- */

UINT_CALL(nvmlDeviceGetMaxPcieLinkGeneration, "pci.pci_gpu_link_info.pcie_gen.max_link_gen")
UINT_CALL(nvmlDeviceGetCurrPcieLinkGeneration, "pci.pci_gpu_link_info.pcie_gen.current_link_gen")
UINT_CALL(nvmlDeviceGetGpuMaxPcieLinkGeneration, "pci.pci_gpu_link_info.pcie_gen.max_device_link_gen")
UINT_CALL(nvmlDeviceGetMaxPcieLinkWidth, "pci.pci_gpu_link_info.link_widths.max_link_width")
UINT_CALL(nvmlDeviceGetCurrPcieLinkWidth, "pci.pci_gpu_link_info.link_widths.current_link_width")
UINT_CALL(nvmlDeviceGetPcieReplayCounter, "pci.replay_counter")
UINT_CALL(nvmlDeviceGetFanSpeed, "fan_speed")
UINT_CALL(nvmlDeviceGetPerformanceState, "performance_state")
UINT_CALL(nvmlDeviceGetPowerState, "performance_state")
SCALED_CALL(nvmlDeviceGetPowerManagementLimit, "gpu_power_readings.requested_power_limit", 1000.0)
SCALED_CALL(nvmlDeviceGetPowerManagementDefaultLimit, "gpu_power_readings.default_power_limit", 1000.0)
SCALED_CALL(nvmlDeviceGetEnforcedPowerLimit, "gpu_power_readings.current_power_limit", 1000.0)
SCALED_CALL(nvmlDeviceGetPowerUsage, "gpu_power_readings.average_power_draw", 1000.0)

API nvmlReturn_t nvmlDeviceGetPowerManagementMode(nvmlDevice_t device, unsigned int *mode)
{
    unsigned int limit;
    nvmlReturn_t result = mode ? nvmlDeviceGetPowerManagementLimit(device, &limit) : NVML_ERROR_INVALID_ARGUMENT;

    if (!result)
        *mode = 1;
    return result;
}

API nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned int *low, unsigned int *high)
{
    nvmlReturn_t result = get_scaled(device, "gpu_power_readings.min_power_limit", 1000.0, low);

    return result ? result : get_scaled(device, "gpu_power_readings.max_power_limit", 1000.0, high);
}

API nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *millijoules)
{
    return get_wide(device, "total_energy_mj", 1.0, millijoules);
}

API nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, unsigned int counter, unsigned int *kib)
{
    return get_uint(device, counter ? "pci.rx_util" : "pci.tx_util", kib);
}

API nvmlReturn_t nvmlDeviceGetNumFans(nvmlDevice_t device, unsigned int *fans)
{
    unsigned int speed;
    nvmlReturn_t result = fans ? get_uint(device, "fan_speed", &speed) : NVML_ERROR_INVALID_ARGUMENT;

    if (!result || result == NVML_ERROR_NOT_SUPPORTED) {
        *fans = result ? 0 : 1;
        return NVML_SUCCESS;
    }
    return result;
}

API nvmlReturn_t nvmlDeviceGetFanSpeed_v2(nvmlDevice_t device, unsigned int fan, unsigned int *speed)
{
    return fan ? NVML_ERROR_INVALID_ARGUMENT : get_uint(device, "fan_speed", speed);
}

static nvmlReturn_t clock_of(nvmlDevice_t device, const char *section, unsigned int type, unsigned int *mhz)
{
    static const char *const names[] = {"graphics_clock", "sm_clock", "mem_clock", "video_clock"};
    char key[96];

    if (type >= 4)
        return NVML_ERROR_INVALID_ARGUMENT;
    snprintf(key, sizeof(key), "%s.%s", section, names[type]);
    return get_uint(device, key, mhz);
}

API nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned int type, unsigned int *mhz)
{
    return clock_of(device, "clocks", type, mhz);
}

API nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned int type, unsigned int *mhz)
{
    return clock_of(device, "max_clocks", type, mhz);
}

API nvmlReturn_t nvmlDeviceGetApplicationsClock(nvmlDevice_t device, unsigned int type, unsigned int *mhz)
{
    return clock_of(device, "applications_clocks", type, mhz);
}

API nvmlReturn_t nvmlDeviceGetDefaultApplicationsClock(nvmlDevice_t device, unsigned int type, unsigned int *mhz)
{
    return clock_of(device, "default_applications_clocks", type, mhz);
}

API nvmlReturn_t nvmlDeviceGetMaxCustomerBoostClock(nvmlDevice_t device, unsigned int type, unsigned int *mhz)
{
    return clock_of(device, "max_customer_boost_clocks", type, mhz);
}

API nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, unsigned int type, unsigned int id, unsigned int *mhz)
{
    static const char *const sections[] = {"clocks", "applications_clocks", "default_applications_clocks",
                                           "max_customer_boost_clocks"};

    return id < 4 ? clock_of(device, sections[id], type, mhz) : NVML_ERROR_INVALID_ARGUMENT;
}

API nvmlReturn_t nvmlDeviceGetSupportedMemoryClocks(nvmlDevice_t device, unsigned int *count, unsigned int *mhz)
{
    struct target target;
    unsigned int room, have = 0;
    nvmlReturn_t result = open_device(device, &target);

    if (!result && !count)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result) {
        room = *count;
        have = target.mig >= 0 ? 0 : list_length(target.gpu, "supported_clocks");
        *count = have;
        if (!have)
            result = NVML_ERROR_NOT_SUPPORTED;
        else if (!mhz || room < have)
            result = NVML_ERROR_INSUFFICIENT_SIZE;
        for (unsigned int i = 0; !result && i < have; i++)
            mhz[i] = (unsigned int)number(gpu_text(target.gpu, "supported_clocks.%u.memory", i));
    }
    return leave(result);
}

API nvmlReturn_t nvmlDeviceGetSupportedGraphicsClocks(nvmlDevice_t device, unsigned int memory, unsigned int *count,
                                                      unsigned int *mhz)
{
    struct target target;
    unsigned int room, high, low, step, have;
    nvmlReturn_t result = open_device(device, &target);

    if (!result && !count)
        result = NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned int i = 0; !result && target.mig < 0 && i < list_length(target.gpu, "supported_clocks"); i++) {
        if ((unsigned int)number(gpu_text(target.gpu, "supported_clocks.%u.memory", i)) != memory)
            continue;
        high = (unsigned int)number(gpu_text(target.gpu, "supported_clocks.%u.graphics_max", i));
        low = (unsigned int)number(gpu_text(target.gpu, "supported_clocks.%u.graphics_min", i));
        step = (unsigned int)number(gpu_text(target.gpu, "supported_clocks.%u.step", i));
        have = (high - low) / (step ? step : 1) + 1;
        room = *count;
        *count = have;
        if (!mhz || room < have)
            return leave(NVML_ERROR_INSUFFICIENT_SIZE);
        for (unsigned int j = 0; j < have; j++)
            mhz[j] = high - j * step;
        return leave(NVML_SUCCESS);
    }
    return leave(result ? result : NVML_ERROR_NOT_FOUND);
}

API nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned int sensor, unsigned int *celsius)
{
    return sensor ? NVML_ERROR_INVALID_ARGUMENT : get_uint(device, "temperature.gpu_temp", celsius);
}

API nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_v1_t *temperature)
{
    unsigned int celsius = 0;
    nvmlReturn_t result;

    if (!temperature || temperature->sensorType)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (temperature->version != NVML_STRUCT_VERSION(nvmlTemperature_v1_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    result = get_uint(device, "temperature.gpu_temp", &celsius);
    temperature->temperature = (int)celsius;
    return result;
}

API nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device, nvmlMarginTemperature_v1_t *margin)
{
    unsigned int celsius = 0;
    nvmlReturn_t result;

    if (!margin)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (margin->version != NVML_STRUCT_VERSION(nvmlMarginTemperature_v1_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    result = get_uint(device, "temperature.gpu_temp_tlimit", &celsius);
    margin->marginTemperature = (int)celsius;
    return result;
}

API nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, unsigned int type, unsigned int *celsius)
{
    static const char *const keys[] = {"temperature.gpu_temp_max_threshold", "temperature.gpu_temp_slow_threshold",
                                       "temperature.gpu_temp_max_mem_threshold",
                                       "temperature.gpu_temp_max_gpu_threshold"};

    return type < 4 ? get_uint(device, keys[type], celsius) : NVML_ERROR_NOT_SUPPORTED;
}

static const struct {
    const char *key;
    unsigned long long bit;
} event_reasons[] = {
    {"gpu_idle", 0x1},          {"applications_clocks_setting", 0x2}, {"sw_power_cap", 0x4},
    {"hw_slowdown", 0x8},       {"sync_boost", 0x10},                 {"sw_thermal_slowdown", 0x20},
    {"hw_thermal_slowdown", 0x40}, {"hw_power_brake_slowdown", 0x80},  {"display_clocks_setting", 0x100},
};

API nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    char key[96];
    unsigned int active;
    nvmlReturn_t result = NVML_SUCCESS;

    if (!reasons)
        return NVML_ERROR_INVALID_ARGUMENT;
    *reasons = 0;
    for (size_t i = 0; !result && i < sizeof(event_reasons) / sizeof(*event_reasons); i++) {
        snprintf(key, sizeof(key), "clocks_event_reasons.clocks_event_reason_%s", event_reasons[i].key);
        active = 0;
        result = get_flag(device, key, &active);
        if (active)
            *reasons |= event_reasons[i].bit;
    }
    return result;
}

API nvmlReturn_t nvmlDeviceGetSupportedClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    nvmlReturn_t result = nvmlDeviceGetCurrentClocksEventReasons(device, reasons);

    if (!result)
        *reasons = 0x1ff;
    return result;
}

API nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    return nvmlDeviceGetCurrentClocksEventReasons(device, reasons);
}

API nvmlReturn_t nvmlDeviceGetSupportedClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    return nvmlDeviceGetSupportedClocksEventReasons(device, reasons);
}

API nvmlReturn_t nvmlDeviceGetViolationStatus(nvmlDevice_t device, unsigned int policy, nvmlViolationTime_t *time)
{
    static const char *const keys[] = {"clocks_event_reasons_counters.clocks_event_reasons_counters_sw_power_cap",
                                       "clocks_event_reasons_counters.clocks_event_reasons_counters_sw_therm_slowdown",
                                       "clocks_event_reasons_counters.clocks_event_reasons_counters_sync_boost"};
    struct timespec now;

    if (!time)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (policy > 2)
        return NVML_ERROR_NOT_SUPPORTED;
    clock_gettime(CLOCK_REALTIME, &now);
    time->referenceTime = (unsigned long long)now.tv_sec * 1000000ull + (unsigned long long)now.tv_nsec / 1000ull;
    return get_wide(device, keys[policy], 1000.0, &time->violationTime);
}

/* -- memory, utilisation, modes ----------------------------------------------------------------------------------- */

API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    unsigned long long reserved = 0;
    nvmlReturn_t result;

    if (!memory)
        return NVML_ERROR_INVALID_ARGUMENT;
    result = get_wide(device, "fb_memory_usage.total", MIB, &memory->total);
    if (!result)
        result = get_wide(device, "fb_memory_usage.used", MIB, &memory->used);
    if (!result)
        result = get_wide(device, "fb_memory_usage.free", MIB, &memory->free);
    if (!result && get_wide(device, "fb_memory_usage.reserved", MIB, &reserved) == NVML_SUCCESS)
        memory->used += reserved; /* the first version counts what the driver keeps as used */
    return result;
}

API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    nvmlReturn_t result;

    if (!memory)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (memory->version != NVML_STRUCT_VERSION(nvmlMemory_v2_t, 2))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    memory->reserved = 0;
    result = get_wide(device, "fb_memory_usage.total", MIB, &memory->total);
    if (!result)
        result = get_wide(device, "fb_memory_usage.used", MIB, &memory->used);
    if (!result)
        result = get_wide(device, "fb_memory_usage.free", MIB, &memory->free);
    if (!result)
        (void)get_wide(device, "fb_memory_usage.reserved", MIB, &memory->reserved);
    return result;
}

API nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *memory)
{
    nvmlReturn_t result;

    if (!memory)
        return NVML_ERROR_INVALID_ARGUMENT;
    result = get_wide(device, "bar1_memory_usage.total", MIB, &memory->bar1Total);
    if (!result)
        result = get_wide(device, "bar1_memory_usage.used", MIB, &memory->bar1Used);
    return result ? result : get_wide(device, "bar1_memory_usage.free", MIB, &memory->bar1Free);
}

API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates)
{
    nvmlReturn_t result = rates ? get_uint(device, "utilization.gpu_util", &rates->gpu) : NVML_ERROR_INVALID_ARGUMENT;

    return result ? result : get_uint(device, "utilization.memory_util", &rates->memory);
}

SAMPLE_CALL(nvmlDeviceGetEncoderUtilization, "utilization.encoder_util")
SAMPLE_CALL(nvmlDeviceGetDecoderUtilization, "utilization.decoder_util")
SAMPLE_CALL(nvmlDeviceGetJpgUtilization, "utilization.jpeg_util")
SAMPLE_CALL(nvmlDeviceGetOfaUtilization, "utilization.ofa_util")

API nvmlReturn_t nvmlDeviceGetEncoderStats(nvmlDevice_t device, unsigned int *sessions, unsigned int *fps,
                                           unsigned int *latency)
{
    nvmlReturn_t result = get_uint(device, "encoder_stats.session_count", sessions);

    if (!result)
        result = get_uint(device, "encoder_stats.average_fps", fps);
    return result ? result : get_uint(device, "encoder_stats.average_latency", latency);
}

FLAG_CALL(nvmlDeviceGetPersistenceMode, "persistence_mode")
FLAG_CALL(nvmlDeviceGetDisplayMode, "display_attached")
FLAG_CALL(nvmlDeviceGetDisplayActive, "display_active")
FLAG_CALL(nvmlDeviceGetAccountingMode, "accounting_mode")
UINT_CALL(nvmlDeviceGetAccountingBufferSize, "accounting_mode_buffer_size")

static const char *const compute_modes[] = {"Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process", NULL};

API nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, unsigned int *mode)
{
    return get_choice(device, "compute_mode", compute_modes, mode);
}

API nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t device, unsigned int *mode)
{
    static const char *const names[] = {"None", "Pass-Through", "VGPU", "Host VGPU", "Host VSGA", NULL};

    return get_choice(device, "gpu_virtualization_mode.virtualization_mode", names, mode);
}

API nvmlReturn_t nvmlDeviceGetDriverModel_v2(nvmlDevice_t device, unsigned int *now, unsigned int *pending)
{
    static const char *const names[] = {"WDDM", "TCC", "MCDM", NULL};
    nvmlReturn_t result = get_choice(device, "driver_model.current_dm", names, now);

    return result ? result : get_choice(device, "driver_model.pending_dm", names, pending);
}

API nvmlReturn_t nvmlDeviceGetDriverModel(nvmlDevice_t device, unsigned int *now, unsigned int *pending)
{
    return nvmlDeviceGetDriverModel_v2(device, now, pending);
}

API nvmlReturn_t nvmlDeviceGetAddressingMode(nvmlDevice_t device, nvmlDeviceAddressingMode_v1_t *mode)
{
    static const char *const names[] = {"None", "HMM", "ATS", NULL};

    if (!mode)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (mode->version != NVML_STRUCT_VERSION(nvmlDeviceAddressingMode_v1_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    return get_choice(device, "addressing_mode", names, &mode->value);
}

API nvmlReturn_t nvmlDeviceGetC2cModeInfoV(nvmlDevice_t device, nvmlC2cModeInfo_v1_t *info)
{
    return info ? get_flag(device, "c2c_mode", &info->isC2cEnabled) : NVML_ERROR_INVALID_ARGUMENT;
}

API nvmlReturn_t nvmlDeviceGetGpuOperationMode(nvmlDevice_t device, unsigned int *now, unsigned int *pending)
{
    nvmlReturn_t result = get_uint(device, "gpu_operation_mode.current_gom", now);

    return result ? result : get_uint(device, "gpu_operation_mode.pending_gom", pending);
}

static nvmlReturn_t change(nvmlDevice_t device, const char *key, const char *value)
{
    struct target target;
    nvmlReturn_t result = open_device(device, &target);

    if (!result && (target.mig >= 0 || !sim_gpu_value(target.gpu, key) || sim_is_wsl(profile)))
        result = NVML_ERROR_NOT_SUPPORTED;
    if (!result && geteuid() != 0)
        result = NVML_ERROR_NO_PERMISSION;
    if (!result && sim_set_state(device->uuid, key, value))
        result = NVML_ERROR_NO_PERMISSION;
    return leave(result);
}

API nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, unsigned int mode)
{
    return mode > 1 ? NVML_ERROR_INVALID_ARGUMENT : change(device, "persistence_mode", mode ? "Enabled" : "Disabled");
}

API nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, unsigned int mode)
{
    return mode > 3 ? NVML_ERROR_INVALID_ARGUMENT : change(device, "compute_mode", compute_modes[mode]);
}

API nvmlReturn_t nvmlDeviceSetPowerManagementLimit(nvmlDevice_t device, unsigned int milliwatts)
{
    char text[32];
    unsigned int low = 0, high = 0;
    nvmlReturn_t result = nvmlDeviceGetPowerManagementLimitConstraints(device, &low, &high);

    if (result)
        return result;
    if (milliwatts < low || milliwatts > high)
        return NVML_ERROR_INVALID_ARGUMENT;
    snprintf(text, sizeof(text), "%.2f W", milliwatts / 1000.0);
    result = change(device, "gpu_power_readings.requested_power_limit", text);
    return result ? result : change(device, "gpu_power_readings.current_power_limit", text);
}

/* -- ECC, retired pages, remapped rows ---------------------------------------------------------------------------- */

API nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned int *now, unsigned int *pending)
{
    nvmlReturn_t result = get_flag(device, "ecc_mode.current_ecc", now);

    return result ? result : get_flag(device, "ecc_mode.pending_ecc", pending);
}

API nvmlReturn_t nvmlDeviceGetDefaultEccMode(nvmlDevice_t device, unsigned int *mode)
{
    nvmlReturn_t result = get_flag(device, "ecc_mode.current_ecc", mode);

    if (!result)
        *mode = 1;
    return result;
}

static nvmlReturn_t ecc_count(nvmlDevice_t device, bool uncorrected, bool aggregate, bool sram, unsigned long long *out)
{
    const char *section = aggregate ? "aggregate" : "volatile";
    char key[96];
    unsigned long long secded = 0;
    nvmlReturn_t result;

    if (!sram || !uncorrected) {
        snprintf(key, sizeof(key), "ecc_errors.%s.%s_%s", section, sram ? "sram" : "dram",
                 uncorrected ? "uncorrectable" : "correctable");
        return get_wide(device, key, 1.0, out);
    }
    snprintf(key, sizeof(key), "ecc_errors.%s.sram_uncorrectable_parity", section);
    result = get_wide(device, key, 1.0, out);
    snprintf(key, sizeof(key), "ecc_errors.%s.sram_uncorrectable_secded", section);
    if (!result && !get_wide(device, key, 1.0, &secded))
        *out += secded;
    return result;
}

API nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, unsigned int error, unsigned int counter,
                                                 unsigned int location, unsigned long long *count)
{
    unsigned int ecc;
    nvmlReturn_t result;

    if (!count || error > 1 || counter > 1 || location > 7)
        return NVML_ERROR_INVALID_ARGUMENT;
    result = get_flag(device, "ecc_mode.current_ecc", &ecc);
    if (result)
        return result;
    if (location != 2 && location != 7)
        return NVML_ERROR_NOT_SUPPORTED;
    return ecc_count(device, error == 1, counter == 1, location == 7, count);
}

API nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned int error, unsigned int counter,
                                             unsigned long long *count)
{
    unsigned long long sram = 0;
    nvmlReturn_t result;

    if (!count || error > 1 || counter > 1)
        return NVML_ERROR_INVALID_ARGUMENT;
    result = ecc_count(device, error == 1, counter == 1, false, count);
    if (!result && !ecc_count(device, error == 1, counter == 1, true, &sram))
        *count += sram;
    return result;
}

API nvmlReturn_t nvmlDeviceGetDetailedEccErrors(nvmlDevice_t device, unsigned int error, unsigned int counter,
                                                nvmlEccErrorCounts_t *counts)
{
    if (!counts || error > 1 || counter > 1)
        return NVML_ERROR_INVALID_ARGUMENT;
    memset(counts, 0, sizeof(*counts));
    return ecc_count(device, error == 1, counter == 1, false, &counts->deviceMemory);
}

API nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, unsigned int cause, unsigned int *count,
                                           unsigned long long *addresses)
{
    unsigned int have = 0;
    nvmlReturn_t result;

    (void)addresses;
    if (!count || cause > 1)
        return NVML_ERROR_INVALID_ARGUMENT;
    result = get_uint(device,
                      cause ? "retired_pages.double_bit_retirement.retired_count"
                            : "retired_pages.multiple_single_bit_retirement.retired_count",
                      &have);
    if (!result)
        *count = have;
    return result;
}

API nvmlReturn_t nvmlDeviceGetRetiredPages_v2(nvmlDevice_t device, unsigned int cause, unsigned int *count,
                                              unsigned long long *addresses, unsigned long long *times)
{
    (void)times;
    return nvmlDeviceGetRetiredPages(device, cause, count, addresses);
}

FLAG_CALL(nvmlDeviceGetRetiredPagesPendingStatus, "retired_pages.pending_retirement")

API nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected,
                                           unsigned int *pending, unsigned int *failed)
{
    nvmlReturn_t result = get_uint(device, "remapped_rows.remapped_row_corr", corrected);

    if (!result)
        result = get_uint(device, "remapped_rows.remapped_row_unc", uncorrected);
    if (!result)
        result = get_flag(device, "remapped_rows.remapped_row_pending", pending);
    return result ? result : get_flag(device, "remapped_rows.remapped_row_failure", failed);
}

API nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device, nvmlRowRemapperHistogramValues_t *values)
{
#define HISTOGRAM "remapped_rows.row_remapper_histogram.row_remapper_histogram_"
    nvmlReturn_t result =
        values ? get_uint(device, HISTOGRAM "max", &values->max) : NVML_ERROR_INVALID_ARGUMENT;

    if (!result)
        result = get_uint(device, HISTOGRAM "high", &values->high);
    if (!result)
        result = get_uint(device, HISTOGRAM "partial", &values->partial);
    if (!result)
        result = get_uint(device, HISTOGRAM "low", &values->low);
    return result ? result : get_uint(device, HISTOGRAM "none", &values->none);
#undef HISTOGRAM
}

/* -- topology, NVLink, fabric ------------------------------------------------------------------------------------- */

API nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned int words, unsigned long *mask)
{
    char text[VALUE_SIZE], *at = text, *end;
    unsigned long first, last;
    nvmlReturn_t result;

    if (!mask || !words)
        return NVML_ERROR_INVALID_ARGUMENT;
    result = get_text(device, "cpu_affinity", text, sizeof(text));
    if (result)
        return result;
    memset(mask, 0, words * sizeof(*mask));
    while (*at) {
        first = last = strtoul(at, &end, 10);
        if (*end == '-')
            last = strtoul(end + 1, &end, 10);
        for (unsigned long cpu = first; cpu <= last && cpu < words * 64ul; cpu++)
            mask[cpu / 64] |= 1ul << (cpu % 64);
        at = *end == ',' ? end + 1 : end + strlen(end);
    }
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t device, unsigned int words, unsigned long *mask,
                                                     unsigned int scope)
{
    return scope > 1 ? NVML_ERROR_INVALID_ARGUMENT : nvmlDeviceGetCpuAffinity(device, words, mask);
}

API nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int words, unsigned long *mask,
                                             unsigned int scope)
{
    unsigned int node = 0;
    nvmlReturn_t result;

    if (!mask || !words || scope > 1)
        return NVML_ERROR_INVALID_ARGUMENT;
    result = get_uint(device, "numa_node", &node);
    if (!result) {
        memset(mask, 0, words * sizeof(*mask));
        if (node < words * 64u)
            mask[node / 64] = 1ul << (node % 64);
    }
    return result;
}

API nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t one, nvmlDevice_t other, unsigned int *level)
{
    static const char *const names[] = {"", "PIX", "PXB", "PHB", "NODE", "SYS", NULL};
    unsigned int here = 0, there = 0;
    nvmlReturn_t result;

    if (!level)
        return NVML_ERROR_INVALID_ARGUMENT;
    result = get_uint(one, "numa_node", &here);
    if (!result)
        result = get_uint(other, "numa_node", &there);
    if (result)
        return result;
    *level = here == there ? 40 : 50;
    if (one == other)
        *level = 0;
    else if (here == there && !get_choice(one, "topology", names, &here) && here)
        *level = here * 10;
    return NVML_SUCCESS;
}

static nvmlReturn_t link_check(nvmlDevice_t device, unsigned int link)
{
    unsigned int links = 0;
    nvmlReturn_t result = get_uint(device, "nvlink.links", &links);

    if (!result && link >= links)
        result = NVML_ERROR_INVALID_ARGUMENT;
    return result;
}

API nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, unsigned int *active)
{
    char key[64];
    nvmlReturn_t result = active ? link_check(device, link) : NVML_ERROR_INVALID_ARGUMENT;

    if (result)
        return result;
    snprintf(key, sizeof(key), "nvlink.inactive.%u", link);
    *active = get_flag(device, key, &(unsigned int){0}) != NVML_SUCCESS;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned int link, unsigned int *version)
{
    nvmlReturn_t result = link_check(device, link);

    return result ? result : get_uint(device, "nvlink.version", version);
}

API nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned int link, unsigned int capability,
                                               unsigned int *value)
{
    nvmlReturn_t result = value && capability < 6 ? link_check(device, link) : NVML_ERROR_INVALID_ARGUMENT;

    if (!result)
        *value = 1;
    return result;
}

API nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link, unsigned int *type)
{
    nvmlReturn_t result = type ? link_check(device, link) : NVML_ERROR_INVALID_ARGUMENT;

    if (!result)
        *type = 2; /* a switch */
    return result;
}

/* What two real H200 answer whose NVSwitches are not on their machine's bus. */
API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci)
{
    nvmlReturn_t result = pci ? link_check(device, link) : NVML_ERROR_INVALID_ARGUMENT;

    if (result)
        return result;
    memset(pci, 0, sizeof(*pci));
    pci->domain = pci->pciDeviceId = 0xffffffff;
    pci->bus = pci->device = 0xff;
    strcpy(pci->busIdLegacy, "FFFFFFF:FF:FF.0");
    strcpy(pci->busId, "FFFFFFFF:FF:FF.0");
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned int link, unsigned int counter,
                                                 unsigned long long *value)
{
    static const char *const counted[] = {"replay", "recovery", "crc"}; /* the flits' CRC; the data's and ECC's count 0 */
    nvmlReturn_t result = value && counter < 5 ? link_check(device, link) : NVML_ERROR_INVALID_ARGUMENT;
    unsigned int errors = 0;
    char key[64];

    if (result)
        return result;
    if (counter < sizeof(counted) / sizeof(*counted)) {
        snprintf(key, sizeof(key), "nvlink.%s_errors.%u", counted[counter], link);
        get_uint(device, key, &errors);
    }
    *value = errors;
    return NVML_SUCCESS;
}

/* The registration of the GPU with the NVSwitch fabric, as the fabric manager left it. */
static nvmlReturn_t fabric(nvmlDevice_t device, nvmlGpuFabricInfo_v3_t *info)
{
    static const char *const states[] = {"N/A", "Not Started", "In Progress", "Completed", NULL};
    char text[VALUE_SIZE];
    unsigned int state = 0, byte;
    const char *at = text;
    struct target target;
    nvmlReturn_t result = open_device(device, &target);

    leave(NVML_SUCCESS);
    if (result)
        return result;
    memset(info->clusterUuid, 0, sizeof(info->clusterUuid));
    info->status = NVML_SUCCESS;
    info->cliqueId = 0;
    info->healthMask = 0;
    info->healthSummary = 0;
    if (get_choice(device, "fabric.state", states, &state) != NVML_SUCCESS)
        state = 0;
    info->state = (unsigned char)state;
    if (!state)
        return NVML_SUCCESS;
    (void)get_uint(device, "fabric.cliqueId", &info->cliqueId);
    if (!get_text(device, "fabric.status", text, sizeof(text)) && strcmp(text, "Success"))
        info->status = NVML_ERROR_UNKNOWN;
    if (!get_text(device, "fabric.clusterUuid", text, sizeof(text)))
        for (unsigned int i = 0; i < 16 && sscanf(at, "%2x", &byte) == 1; i++) {
            info->clusterUuid[i] = (unsigned char)byte;
            at += 2;
            at += *at == '-';
        }
    if (!get_text(device, "fabric.health.summary", text, sizeof(text)))
        info->healthSummary = !strcmp(text, "Healthy") ? 1 : !strcmp(text, "Unhealthy") ? 2 : 3;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *info)
{
    nvmlGpuFabricInfo_v3_t full = {0};
    nvmlReturn_t result = info ? fabric(device, &full) : NVML_ERROR_INVALID_ARGUMENT;

    if (!result) {
        memcpy(info->clusterUuid, full.clusterUuid, sizeof(info->clusterUuid));
        info->status = full.status;
        info->cliqueId = full.cliqueId;
        info->state = full.state;
    }
    return result;
}

API nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfo_v2_t *info)
{
    nvmlGpuFabricInfo_v3_t full = {0};
    nvmlReturn_t result;

    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (info->version == NVML_STRUCT_VERSION(nvmlGpuFabricInfo_v3_t, 3))
        return fabric(device, (nvmlGpuFabricInfo_v3_t *)info);
    if (info->version != NVML_STRUCT_VERSION(nvmlGpuFabricInfo_v2_t, 2))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    result = fabric(device, &full);
    full.version = info->version;
    if (!result)
        memcpy(info, &full, sizeof(*info));
    return result;
}

/* -- processes ---------------------------------------------------------------------------------------------------- */

/* Types are those of nvidia-smi: C, G, C+G and M+C. A GPU in MIG mode lists its processes on the MIG devices. */
static nvmlReturn_t processes(nvmlDevice_t device, const char *letter, size_t stride, unsigned int *count, void *out)
{
    struct target target;
    unsigned int room, have = 0;
    nvmlReturn_t result = open_device(device, &target);

    if (!result && !count)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result)
        return leave(result);
    room = *count;
    for (unsigned int i = 0; i < list_length(target.gpu, "processes"); i++) {
        const char *type = gpu_text(target.gpu, "processes.%u.type", i);
        const char *gi = gpu_text(target.gpu, "processes.%u.gpu_instance_id", i);
        const char *ci = gpu_text(target.gpu, "processes.%u.compute_instance_id", i);
        nvmlProcessInfo_t process;

        if (!strstr(type ? type : "C", letter))
            continue;
        process.gpuInstanceId = gi ? (unsigned int)number(gi) : 0xffffffffu;
        process.computeInstanceId = ci ? (unsigned int)number(ci) : 0xffffffffu;
        if (target.mig >= 0 &&
            (!gi || process.gpuInstanceId !=
                        (unsigned int)number(gpu_text(target.gpu, "mig_devices.%d.gpu_instance_id", target.mig))))
            continue;
        process.pid = (unsigned int)number(gpu_text(target.gpu, "processes.%u.pid", i));
        process.usedGpuMemory =
            (unsigned long long)(number(gpu_text(target.gpu, "processes.%u.used_memory", i)) * MIB);
        if (out && have < room)
            memcpy((char *)out + have * stride, &process, stride);
        have++;
    }
    *count = have;
    return leave(have > room || (have && !out) ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS);
}

#define PROCESS_CALLS(name, letter)                                                                             \
    API nvmlReturn_t name(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v1_t *out)                  \
    {                                                                                                           \
        return processes(device, letter, sizeof(*out), count, out);                                             \
    }                                                                                                           \
    API nvmlReturn_t name##_v2(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *out)                \
    {                                                                                                           \
        return processes(device, letter, sizeof(*out), count, out);                                             \
    }                                                                                                           \
    API nvmlReturn_t name##_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *out)                \
    {                                                                                                           \
        return processes(device, letter, sizeof(*out), count, out);                                             \
    }

PROCESS_CALLS(nvmlDeviceGetComputeRunningProcesses, "C")
PROCESS_CALLS(nvmlDeviceGetGraphicsRunningProcesses, "G")
PROCESS_CALLS(nvmlDeviceGetMPSComputeRunningProcesses, "M")

/* -- MIG ---------------------------------------------------------------------------------------------------------- */

API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *now, unsigned int *pending)
{
    nvmlReturn_t result = get_flag(device, "mig_mode.current_mig", now);

    return result ? result : get_flag(device, "mig_mode.pending_mig", pending);
}

API nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig)
{
    nvmlReturn_t result = enter();

    if (!result && (!known(device) || !is_mig))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result)
        *is_mig = device->parent != NULL;
    return leave(result);
}

API nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    struct target target;
    nvmlReturn_t result = open_device(device, &target);

    if (!result && !count)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result)
        *count = sim_gpu_value(target.gpu, "mig_mode.current_mig")
                     ? (unsigned int)number(sim_gpu_value(target.gpu, "max_mig_devices"))
                     : 0;
    return leave(result);
}

API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig)
{
    struct target target;
    nvmlReturn_t result = open_device(device, &target);

    if (!result && (!mig || target.mig >= 0))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result && mig_at(target.gpu, index) < 0)
        result = NVML_ERROR_NOT_FOUND;
    if (!result) {
        const char *uuid = gpu_text(target.gpu, "mig_devices.%d.uuid", mig_at(target.gpu, index));

        *mig = uuid ? handle_for(uuid, device) : NULL;
        result = *mig ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
    }
    return leave(result);
}

API nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *device)
{
    nvmlReturn_t result = enter();

    if (!result && (!known(mig) || !mig->parent || !device))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result)
        *device = mig->parent;
    return leave(result);
}

static nvmlReturn_t mig_only(nvmlDevice_t device, const char *key, unsigned int *out)
{
    nvmlReturn_t result = enter();

    if (!result && (!known(device) || !device->parent))
        result = known(device) ? NVML_ERROR_NOT_SUPPORTED : NVML_ERROR_INVALID_ARGUMENT;
    leave(NVML_SUCCESS);
    return result ? result : get_uint(device, key, out);
}

API nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
    return mig_only(device, "gpu_instance_id", id);
}

API nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
    return mig_only(device, "compute_instance_id", id);
}

API nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    unsigned int slices = 0, own = 0;
    nvmlReturn_t result = attributes ? mig_only(device, "slices", &slices) : NVML_ERROR_INVALID_ARGUMENT;

    if (!result)
        result = mig_only(device, "compute_slices", &own);

    if (result)
        return result;
    memset(attributes, 0, sizeof(*attributes));
    attributes->gpuInstanceSliceCount = slices;
    attributes->computeInstanceSliceCount = own;
    (void)get_uint(device, SHARED "multiprocessor_count", &attributes->multiprocessorCount);
    (void)get_uint(device, SHARED "copy_engine_count", &attributes->sharedCopyEngineCount);
    (void)get_uint(device, SHARED "decoder_count", &attributes->sharedDecoderCount);
    (void)get_uint(device, SHARED "encoder_count", &attributes->sharedEncoderCount);
    (void)get_uint(device, SHARED "jpg_count", &attributes->sharedJpegCount);
    (void)get_uint(device, SHARED "ofa_count", &attributes->sharedOfaCount);
    return get_wide(device, "fb_memory_usage.total", 1.0, &attributes->memorySizeMB);
}

API nvmlReturn_t nvmlDeviceGetAttributes(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    return nvmlDeviceGetAttributes_v2(device, attributes);
}

static nvmlGpuInstance_t instance_for(nvmlDevice_t device, unsigned int id)
{
    for (unsigned int i = 0; i < gpu_instance_count; i++)
        if (gpu_instances[i].device == device && gpu_instances[i].id == id)
            return &gpu_instances[i];
    if (gpu_instance_count == MAX_HANDLES)
        return NULL;
    gpu_instances[gpu_instance_count] = (struct nvmlGpuInstance_st){.device = device, .id = id};
    return &gpu_instances[gpu_instance_count++];
}

/* A GPU instance as it is now, or NULL. */
static bool find_instance(const struct sim_gpu *gpu, unsigned int id, struct mig_gpu_instance *instance)
{
    const struct mig_gpu_instance *found;
    struct mig_layout layout;

    mig_layout_of(gpu, &layout);
    found = mig_find(&layout, id);
    if (!found || !sim_gpu_instance_visible(gpu, id))
        return false;
    *instance = *found;
    return true;
}

API nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *instance)
{
    struct mig_gpu_instance found;
    struct target target;
    nvmlReturn_t result = open_device(device, &target);

    if (!result && !instance)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result && !find_instance(target.gpu, id, &found))
        result = NVML_ERROR_NOT_FOUND;
    if (!result) {
        *instance = instance_for(device, id);
        result = *instance ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
    }
    return leave(result);
}

static nvmlReturn_t open_instance(nvmlGpuInstance_t instance, struct target *target, struct mig_gpu_instance *found)
{
    nvmlReturn_t result = enter();

    if (!result && !(instance >= gpu_instances && instance < gpu_instances + gpu_instance_count))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result)
        result = resolve(instance->device, target);
    if (!result && !find_instance(target->gpu, instance->id, found))
        result = NVML_ERROR_NOT_FOUND;
    return result;
}

static unsigned int profile_number(const struct sim_gpu *gpu, int mig_profile_number, const char *key)
{
    return (unsigned int)number(gpu_text(gpu, "mig_profiles.%d.%s", mig_profile_number, key));
}

API nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info)
{
    struct mig_gpu_instance found;
    struct mig_profile made_from;
    struct target target;
    nvmlReturn_t result = open_instance(instance, &target, &found);

    if (!result && !info)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result && mig_profile_at(target.gpu, found.profile, &made_from)) {
        memset(info, 0, sizeof(*info));
        info->device = instance->device;
        info->id = instance->id;
        info->profileId = made_from.id;
        info->placement.start = found.start;
        info->placement.size = made_from.size;
    }
    return leave(result);
}

#define GPU_INSTANCE_PROFILE_COUNT 17

static nvmlReturn_t find_mig_profile(nvmlDevice_t device, unsigned int wanted, struct target *target, int *found)
{
    nvmlReturn_t result = open_device(device, target);

    *found = -1;
    if (!result && wanted >= GPU_INSTANCE_PROFILE_COUNT)
        result = NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned int i = 0; !result && i < list_length(target->gpu, "mig_profiles"); i++)
        if (profile_number(target->gpu, (int)i, "gi_profile") == wanted)
            *found = (int)i;
    if (!result && *found < 0)
        result = NVML_ERROR_NOT_SUPPORTED;
    return result;
}

static nvmlReturn_t find_profile_id(nvmlDevice_t device, unsigned int id, struct target *target,
                                    struct mig_profile *profile, unsigned int *number)
{
    nvmlReturn_t result = open_device(device, target);

    if (!result && (target->mig >= 0 || !mig_profile_count(target->gpu)))
        result = NVML_ERROR_NOT_SUPPORTED;
    for (*number = 0; !result && *number < mig_profile_count(target->gpu); (*number)++)
        if (mig_profile_at(target->gpu, *number, profile) && profile->id == id)
            return NVML_SUCCESS;
    return result ? result : NVML_ERROR_INVALID_ARGUMENT;
}

API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned int wanted,
                                                     nvmlGpuInstanceProfileInfo_t *info)
{
    struct target target;
    int found;
    nvmlReturn_t result = find_mig_profile(device, wanted, &target, &found);

    if (!result && !info)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result) {
        memset(info, 0, sizeof(*info));
        info->id = profile_number(target.gpu, found, "gi_profile_id");
        info->sliceCount = profile_number(target.gpu, found, "slices");
        info->instanceCount = profile_number(target.gpu, found, "instances");
        info->multiprocessorCount = profile_number(target.gpu, found, SHARED "multiprocessor_count");
        info->copyEngineCount = profile_number(target.gpu, found, SHARED "copy_engine_count");
        info->decoderCount = profile_number(target.gpu, found, SHARED "decoder_count");
        info->encoderCount = profile_number(target.gpu, found, SHARED "encoder_count");
        info->jpegCount = profile_number(target.gpu, found, SHARED "jpg_count");
        info->ofaCount = profile_number(target.gpu, found, SHARED "ofa_count");
        info->memorySizeMB = profile_number(target.gpu, found, "fb_memory_usage.total");
    }
    return leave(result);
}

API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned int wanted,
                                                      nvmlGpuInstanceProfileInfo_v2_t *info)
{
    nvmlGpuInstanceProfileInfo_v3_t *third = (nvmlGpuInstanceProfileInfo_v3_t *)info;
    nvmlGpuInstanceProfileInfo_t plain;
    char name[96] = "";
    struct target target;
    int found;
    nvmlReturn_t result;

    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    result = find_mig_profile(device, wanted, &target, &found);
    if (!result)
        snprintf(name, sizeof(name), "MIG %s", gpu_text(target.gpu, "mig_profiles.%d.name", found));
    leave(NVML_SUCCESS);
    if (!result)
        result = nvmlDeviceGetGpuInstanceProfileInfo(device, wanted, &plain);
    if (result)
        return result;
    if (info->version == NVML_STRUCT_VERSION(nvmlGpuInstanceProfileInfo_v2_t, 2)) {
        info->id = plain.id;
        info->isP2pSupported = plain.isP2pSupported;
        info->sliceCount = plain.sliceCount;
        info->instanceCount = plain.instanceCount;
        info->multiprocessorCount = plain.multiprocessorCount;
        info->copyEngineCount = plain.copyEngineCount;
        info->decoderCount = plain.decoderCount;
        info->encoderCount = plain.encoderCount;
        info->jpegCount = plain.jpegCount;
        info->ofaCount = plain.ofaCount;
        info->memorySizeMB = plain.memorySizeMB;
        memcpy(info->name, name, sizeof(name));
        return NVML_SUCCESS;
    }
    if (info->version != NVML_STRUCT_VERSION(nvmlGpuInstanceProfileInfo_v3_t, 3))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    third->id = plain.id;
    third->sliceCount = plain.sliceCount;
    third->instanceCount = plain.instanceCount;
    third->multiprocessorCount = plain.multiprocessorCount;
    third->copyEngineCount = plain.copyEngineCount;
    third->decoderCount = plain.decoderCount;
    third->encoderCount = plain.encoderCount;
    third->jpegCount = plain.jpegCount;
    third->ofaCount = plain.ofaCount;
    third->memorySizeMB = plain.memorySizeMB;
    memcpy(third->name, name, sizeof(name));
    third->capabilities = 0;
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *instances,
                                           unsigned int *count)
{
    struct mig_profile profile;
    struct mig_layout layout;
    struct target target;
    unsigned int made_from;
    nvmlReturn_t result = find_profile_id(device, id, &target, &profile, &made_from);

    if (!result && (!instances || !count))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result && !mig_is_enabled(target.gpu))
        result = NVML_ERROR_NOT_SUPPORTED;
    if (!result) {
        *count = 0;
        mig_layout_of(target.gpu, &layout);
        for (unsigned int i = 0; i < layout.gpu_count; i++)
            if (layout.gpu[i].profile == made_from && sim_gpu_instance_visible(target.gpu, layout.gpu[i].id))
                instances[(*count)++] = instance_for(device, layout.gpu[i].id);
    }
    return leave(result);
}

API nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device, unsigned int id, unsigned int *count)
{
    struct mig_profile profile;
    struct mig_layout layout;
    struct target target;
    unsigned int number;
    nvmlReturn_t result = find_profile_id(device, id, &target, &profile, &number);

    if (!result && !count)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result) {
        mig_layout_of(target.gpu, &layout);
        *count = mig_room(target.gpu, &layout, number);
    }
    return leave(result);
}

API nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t device, unsigned int id,
                                                               nvmlInstancePlacement_t *placements, unsigned int *count)
{
    struct mig_profile profile;
    struct target target;
    unsigned int number;
    nvmlReturn_t result = find_profile_id(device, id, &target, &profile, &number);

    if (!result && !count)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result && placements && *count < profile.start_count)
        result = NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned int i = 0; !result && placements && i < profile.start_count; i++)
        placements[i] = (nvmlInstancePlacement_t){.start = profile.starts[i], .size = profile.size};
    if (!result)
        *count = profile.start_count;
    return leave(result);
}

API nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements(nvmlDevice_t device, unsigned int id,
                                                            nvmlInstancePlacement_t *placements, unsigned int *count)
{
    return nvmlDeviceGetGpuInstancePossiblePlacements_v2(device, id, placements, count);
}

static nvmlReturn_t compute_instance(nvmlGpuInstance_t instance, unsigned int id, nvmlComputeInstance_t *out)
{
    for (unsigned int i = 0; i < compute_instance_count; i++)
        if (compute_instances[i].instance == instance && compute_instances[i].id == id) {
            *out = &compute_instances[i];
            return NVML_SUCCESS;
        }
    if (compute_instance_count == MAX_HANDLES)
        return NVML_ERROR_UNKNOWN;
    compute_instances[compute_instance_count] = (struct nvmlComputeInstance_st){.instance = instance, .id = id};
    *out = &compute_instances[compute_instance_count++];
    return NVML_SUCCESS;
}

static bool find_compute(const struct sim_gpu *gpu, unsigned int gpu_instance, unsigned int id,
                         struct mig_compute_instance *compute)
{
    struct mig_layout layout;

    mig_layout_of(gpu, &layout);
    for (unsigned int i = 0; i < layout.compute_count; i++)
        if (layout.compute[i].gpu_instance == gpu_instance && layout.compute[i].id == id) {
            *compute = layout.compute[i];
            return true;
        }
    return false;
}

API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t instance, unsigned int id,
                                                       nvmlComputeInstance_t *out)
{
    struct mig_compute_instance compute;
    struct mig_gpu_instance found;
    struct target target;
    nvmlReturn_t result = open_instance(instance, &target, &found);

    if (!result && !out)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result && !find_compute(target.gpu, instance->id, id, &compute))
        result = NVML_ERROR_NOT_FOUND;
    if (!result)
        result = compute_instance(instance, id, out);
    return leave(result);
}

API nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t instance, unsigned int profile_id,
                                                    nvmlComputeInstance_t *out, unsigned int *count)
{
    struct mig_gpu_instance found;
    struct mig_profile profile;
    struct mig_layout layout;
    struct target target;
    nvmlReturn_t result = open_instance(instance, &target, &found);

    if (!result && (!out || !count))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result)
        return leave(result);
    *count = 0;
    mig_layout_of(target.gpu, &layout);
    mig_profile_at(target.gpu, found.profile, &profile);
    for (unsigned int i = 0; !result && i < layout.compute_count; i++)
        if (layout.compute[i].gpu_instance == instance->id &&
            mig_compute_id(&profile, layout.compute[i].slices) == profile_id)
            result = compute_instance(instance, layout.compute[i].id, &out[(*count)++]);
    return leave(result);
}

API nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t compute, nvmlComputeInstanceInfo_t *info)
{
    struct mig_compute_instance own;
    struct mig_gpu_instance found;
    struct mig_profile profile;
    struct target target;
    nvmlReturn_t result;

    if (!info || !(compute >= compute_instances && compute < compute_instances + compute_instance_count))
        return NVML_ERROR_INVALID_ARGUMENT;
    result = open_instance(compute->instance, &target, &found);
    if (!result && !find_compute(target.gpu, found.id, compute->id, &own))
        result = NVML_ERROR_NOT_FOUND;
    if (!result && mig_profile_at(target.gpu, found.profile, &profile)) {
        memset(info, 0, sizeof(*info));
        info->device = compute->instance->device;
        info->gpuInstance = compute->instance;
        info->id = compute->id;
        info->profileId = mig_compute_id(&profile, own.slices);
        info->placement.start = own.start;
        info->placement.size = own.slices;
    }
    return leave(result);
}

API nvmlReturn_t nvmlComputeInstanceGetInfo(nvmlComputeInstance_t compute, nvmlComputeInstanceInfo_t *info)
{
    return nvmlComputeInstanceGetInfo_v2(compute, info);
}

/* The slices of the compute instances that a GPU instance can have by this profile ID; 0 where there are none. */
static unsigned int compute_part(const struct mig_profile *profile, unsigned int id)
{
    for (unsigned int part = 1; part <= profile->slices; part++)
        if (mig_compute_size(profile, part) && mig_compute_id(profile, part) == id)
            return part;
    return 0;
}

API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlGpuInstance_t instance, unsigned int wanted,
                                                              unsigned int engine,
                                                              nvmlComputeInstanceProfileInfo_t *info)
{
    struct mig_gpu_instance found;
    struct mig_profile profile;
    struct target target;
    unsigned int part = 0;
    nvmlReturn_t result = open_instance(instance, &target, &found);

    if (!result && (!info || engine))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result && (!mig_profile_at(target.gpu, found.profile, &profile) || !(part = compute_part(&profile, wanted))))
        result = NVML_ERROR_NOT_SUPPORTED;
    if (!result) {
        int made_from = (int)found.profile;

        memset(info, 0, sizeof(*info));
        info->id = wanted;
        info->sliceCount = part;
        info->instanceCount = mig_compute_total(&profile, part);
        info->multiprocessorCount = multiprocessors(target.gpu, found.profile, part);
        info->sharedCopyEngineCount = profile_number(target.gpu, made_from, SHARED "copy_engine_count");
        info->sharedDecoderCount = profile_number(target.gpu, made_from, SHARED "decoder_count");
        info->sharedEncoderCount = profile_number(target.gpu, made_from, SHARED "encoder_count");
        info->sharedJpegCount = profile_number(target.gpu, made_from, SHARED "jpg_count");
        info->sharedOfaCount = profile_number(target.gpu, made_from, SHARED "ofa_count");
    }
    return leave(result);
}

API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceRemainingCapacity(nvmlGpuInstance_t instance, unsigned int wanted,
                                                                    unsigned int *count)
{
    struct mig_gpu_instance found;
    struct mig_profile profile;
    struct mig_layout layout;
    struct target target;
    unsigned int part = 0;
    nvmlReturn_t result = open_instance(instance, &target, &found);

    if (!result && !count)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result && (!mig_profile_at(target.gpu, found.profile, &profile) || !(part = compute_part(&profile, wanted))))
        result = NVML_ERROR_NOT_SUPPORTED;
    if (!result) {
        mig_layout_of(target.gpu, &layout);
        *count = mig_compute_room(&layout, &found, &profile, part);
    }
    return leave(result);
}

/* -- changing MIG ------------------------------------------------------------------------------------------------- */

/* For a change of a whole GPU that answers. */
static nvmlReturn_t open_for_change(nvmlDevice_t device)
{
    struct target target;
    nvmlReturn_t result = open_device(device, &target);

    if (!result && target.mig >= 0)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result && (!sim_gpu_value(target.gpu, "mig_mode.current_mig") || sim_is_wsl(profile)))
        result = NVML_ERROR_NOT_SUPPORTED;
    return result;
}

API nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned int mode, nvmlReturn_t *activation)
{
    bool pending = false;
    nvmlReturn_t result = open_for_change(device);

    if (!result && (mode > 1 || !activation))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result)
        result = (nvmlReturn_t)mig_set_mode(device->uuid, mode, &pending);
    if (!result)
        *activation = pending ? NVML_ERROR_IN_USE : NVML_SUCCESS;
    return leave(result);
}

static nvmlReturn_t create_gpu_instance(nvmlDevice_t device, unsigned int id, int start, nvmlGpuInstance_t *instance)
{
    unsigned int made = 0;
    nvmlReturn_t result = open_for_change(device);

    if (!result && !instance)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result)
        result = (nvmlReturn_t)mig_create_gpu_instance(device->uuid, id, start, &made);
    if (!result)
        *instance = instance_for(device, made);
    return leave(result);
}

API nvmlReturn_t nvmlDeviceCreateGpuInstance(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *instance)
{
    return create_gpu_instance(device, id, MIG_ANYWHERE, instance);
}

API nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(nvmlDevice_t device, unsigned int id,
                                                          const nvmlInstancePlacement_t *placement,
                                                          nvmlGpuInstance_t *instance)
{
    return placement ? create_gpu_instance(device, id, (int)placement->start, instance) : NVML_ERROR_INVALID_ARGUMENT;
}

API nvmlReturn_t nvmlGpuInstanceDestroy(nvmlGpuInstance_t instance)
{
    struct mig_gpu_instance found;
    struct target target;
    nvmlReturn_t result = open_instance(instance, &target, &found);

    if (!result)
        result = (nvmlReturn_t)mig_destroy_gpu_instance(instance->device->uuid, instance->id);
    return leave(result);
}

API nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(nvmlGpuInstance_t instance, unsigned int id,
                                                      nvmlComputeInstance_t *compute)
{
    struct mig_gpu_instance found;
    struct target target;
    unsigned int made = 0;
    nvmlReturn_t result = open_instance(instance, &target, &found);

    if (!result && !compute)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result)
        result = (nvmlReturn_t)mig_create_compute_instance(instance->device->uuid, instance->id, id, &made);
    if (!result)
        result = compute_instance(instance, made, compute);
    return leave(result);
}

API nvmlReturn_t nvmlComputeInstanceDestroy(nvmlComputeInstance_t compute)
{
    struct mig_gpu_instance found;
    struct target target;
    nvmlReturn_t result;

    if (!(compute >= compute_instances && compute < compute_instances + compute_instance_count))
        return NVML_ERROR_INVALID_ARGUMENT;
    result = open_instance(compute->instance, &target, &found);
    if (!result)
        result = (nvmlReturn_t)mig_destroy_compute_instance(compute->instance->device->uuid, found.id, compute->id);
    return leave(result);
}

/* The real nvidia-smi resets by ways that are not public. */
API nvmlReturn_t gpufarmSimReset(nvmlDevice_t device)
{
    nvmlReturn_t result = enter();

    if (!result && !known(device))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result)
        result = (nvmlReturn_t)mig_reset(device->uuid);
    return leave(result);
}

/* -- field values ------------------------------------------------------------------------------------------------- */

static const struct {
    unsigned int id;
    const char *key;
    char kind; /* n: number, f: yes or no */
    double scale;
} fields[] = {
    {1, "ecc_mode.current_ecc", 'f', 1},
    {2, "ecc_mode.pending_ecc", 'f', 1},
    {29, "retired_pages.multiple_single_bit_retirement.retired_count", 'n', 1},
    {30, "retired_pages.double_bit_retirement.retired_count", 'n', 1},
    {31, "retired_pages.pending_retirement", 'f', 1},
    {82, "temperature.memory_temp", 'n', 1},
    {83, "total_energy_mj", 'n', 1},
    {90, "nvlink.speed_mbps", 'n', 1},
    {91, "nvlink.links", 'n', 1},
    {94, "pci.replay_counter", 'n', 1},
    {95, "pci.replay_rollover_counter", 'n', 1},
    {142, "remapped_rows.remapped_row_corr", 'n', 1},
    {143, "remapped_rows.remapped_row_unc", 'n', 1},
    {144, "remapped_rows.remapped_row_pending", 'f', 1},
    {145, "remapped_rows.remapped_row_failure", 'f', 1},
    {185, "gpu_power_readings.average_power_draw", 'n', 1000},
    {186, "gpu_power_readings.instant_power_draw", 'n', 1000},
    {187, "gpu_power_readings.min_power_limit", 'n', 1000},
    {188, "gpu_power_readings.max_power_limit", 'n', 1000},
    {189, "gpu_power_readings.default_power_limit", 'n', 1000},
    {190, "gpu_power_readings.current_power_limit", 'n', 1000},
    {191, "total_energy_mj", 'n', 1},
    {192, "gpu_power_readings.requested_power_limit", 'n', 1000},
    {193, "temperature.gpu_temp_max_tlimit_threshold", 'n', 1},
    {194, "temperature.gpu_temp_slow_tlimit_threshold", 'n', 1},
    {195, "temperature.gpu_temp_max_mem_tlimit_threshold", 'n', 1},
    {196, "temperature.gpu_temp_max_gpu_tlimit_threshold", 'n', 1},
};

API nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    struct target target;
    struct timespec now;
    nvmlReturn_t result = open_device(device, &target);

    leave(NVML_SUCCESS);
    if (result || !values || count < 0)
        return result ? result : NVML_ERROR_INVALID_ARGUMENT;
    clock_gettime(CLOCK_REALTIME, &now);
    for (int i = 0; i < count; i++) {
        double value = 0.0;
        unsigned int flag = 0;

        values[i].timestamp = (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000;
        values[i].latencyUsec = 0;
        values[i].nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
        for (size_t j = 0; j < sizeof(fields) / sizeof(*fields); j++) {
            if (fields[j].id != values[i].fieldId)
                continue;
            if (fields[j].kind == 'f') {
                values[i].nvmlReturn = get_flag(device, fields[j].key, &flag);
                value = flag;
            } else {
                values[i].nvmlReturn = get_number(device, fields[j].key, fields[j].scale, &value);
            }
            values[i].value.ullVal = 0;
            values[i].valueType = value < 0 ? 5 : 1;
            if (value < 0)
                values[i].value.siVal = (int)value;
            else
                values[i].value.uiVal = (unsigned int)llround(value);
        }
    }
    return NVML_SUCCESS;
}

/* -- events ------------------------------------------------------------------------------------------------------- */

#define EVENT_XID 0x8ull

API nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    nvmlReturn_t result = enter();

    if (!result && !set)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result) {
        *set = calloc(1, sizeof(**set));
        result = *set ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
    }
    return leave(result);
}

API nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    free(set);
    return NVML_SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    struct target target;
    nvmlReturn_t result = open_device(device, &target);

    if (!result && !types)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result && (target.mig >= 0 || sim_is_wsl(profile)))
        result = NVML_ERROR_NOT_SUPPORTED;
    if (!result)
        *types = EVENT_XID;
    return leave(result);
}

API nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    struct target target;
    nvmlReturn_t result = open_device(device, &target);

    if (!result && (!set || set->count == SIM_MAX_GPUS))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (!result && (target.mig >= 0 || sim_is_wsl(profile) || (types & EVENT_XID) == 0))
        result = NVML_ERROR_NOT_SUPPORTED;
    if (!result) {
        set->devices[set->count] = device;
        set->told[set->count++] = false;
    }
    return leave(result);
}

/* The one event there is: Xid 79, once for each registered GPU that has fallen off the bus. */
API nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
    for (unsigned int waited = 0;; waited += 50) {
        nvmlReturn_t result = enter();

        if (!result && (!set || !data))
            result = NVML_ERROR_INVALID_ARGUMENT;
        for (unsigned int i = 0; !result && i < set->count; i++) {
            const struct sim_gpu *gpu = gpu_by_uuid(set->devices[i]->uuid);
            const char *state = gpu ? sim_gpu_value(gpu, "state") : "lost";

            if (!state || strcmp(state, "lost")) {
                set->told[i] = false;
            } else if (!set->told[i]) {
                set->told[i] = true;
                memset(data, 0, sizeof(*data));
                data->device = set->devices[i];
                data->eventType = EVENT_XID;
                data->eventData = 79;
                data->gpuInstanceId = data->computeInstanceId = 0xffffffffu;
                return leave(NVML_SUCCESS);
            }
        }
        leave(NVML_SUCCESS);
        if (result)
            return result;
        if (waited >= timeout_ms)
            return NVML_ERROR_TIMEOUT;
        usleep(50000);
    }
}

API nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
    return nvmlEventSetWait_v2(set, data, timeout_ms);
}

/* -- the private entry -------------------------------------------------------------------------------------------- */

/* Keys of a GPU that answers no more: "visible.<index>.<key>" with no device. The real nvidia-smi knows the PCI
 * address of a lost GPU too. Works before nvmlInit as well, as the real one must name the library's version then. */
API nvmlReturn_t gpufarmSimQuery(nvmlDevice_t device, const char *key, char *value, unsigned int size)
{
    char buffer[VALUE_SIZE];
    struct target target;
    const char *text;
    unsigned int index;
    int used = 0;
    nvmlReturn_t result;

    if (!key)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (device) {
        result = open_device(device, &target);
        /* A section that the profile calls N/A as a whole is told from one that it does not know. */
        if (!result && target.mig < 0 && (text = sim_map_get(&target.gpu->values, key)) && !strcmp(text, "N/A"))
            result = copy_text(text, value, size);
        else if (!result && !(result = read_value(&target, key, buffer, &text)))
            result = copy_text(text, value, size);
        return leave(result);
    }
    pthread_mutex_lock(&lock);
    profile = sim_load();
    if (sscanf(key, "visible.%u.%n", &index, &used) == 1 && used) {
        const struct sim_gpu *gpu = index < visible_count ? gpu_by_uuid(visible[index]->uuid) : NULL;

        return leave(gpu ? copy_text(sim_gpu_value(gpu, key + used), value, size) : NVML_ERROR_NOT_FOUND);
    }
    if (!strcmp(key, "driver.library_version"))
        return leave(copy_text(sim_library_version(profile), value, size));
    return leave(copy_text(sim_node_value(profile, key), value, size));
}
