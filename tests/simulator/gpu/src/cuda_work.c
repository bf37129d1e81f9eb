/* The half of the CUDA double that allocates and computes. Device memory is memory of the process. The kernels of
 * gpu_benchmark/measuring.py are known by their names and do here what their PTX says, with the constants that stand in
 * it, or in machine code of that name; any other kernel ends in CUDA_ERROR_NOT_FOUND where it is asked for.
 *
 * Time is the GPU's own: each launch and copy takes what the profile's clocks, bus and multiprocessors say, less what
 * real cards (H100 and H200, 580.159.04) leave of it, whatever the machine under the double can do. A repeated launch that could
 * change nothing is not computed again. */
#define _GNU_SOURCE 1
#include "cuda.h"

#include <elf.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB 1048576.0
#define MAX_CONTEXTS 32
#define MAX_STACK 64
#define ERROR_SAMPLES 16
#define LAUNCH_SECONDS 5e-7 /* between launches that wait in a queue */

/* What real cards reach of what their attributes say. */
#define READS 0.950
#define WRITES 0.955
#define COPIES 0.897
#define BEFORE_AMPERE 0.73 /* of these, by published measurements: T4 reads at 69 %, P100 at 70 to 75 % */
#define FMAS 0.958
#define TENSORS 0.612
#define HOST_COPIES 0.871
#define PEERS 0.82

enum kind { FILL, CHECK, READ_SUM, FMA, TENSOR };
enum pattern { LINEAR, WALKING, RANDOM };

struct allocation {
    struct allocation *next;
    unsigned char *start;
    size_t size;
};

struct function {
    struct function *next;
    enum kind kind;
    enum pattern pattern;
    int parameters; /* 64 bit wide first, as many 32 bit wide behind */
    float factor, addend, starts[64];
    int chains, steps;
    bool bf16;
    int depth, products;
};

struct module {
    struct module *next;
    char *text;
    struct function *functions;
};

struct context {
    const struct cuda_device *device;
    int ordinal, broken;
    size_t used;
    double now; /* seconds of the GPU's own time */
    struct allocation *allocations, *pinned;
    struct module *modules;
    bool peers[MAX_CONTEXTS];
    uint64_t generation; /* of all memory: it goes up when something may have changed */
    struct {
        const void *what;
        uint64_t arguments[4], generation;
        uint32_t result;
    } last[8];
    unsigned int next_last;
};

struct event {
    struct context *context;
    bool recorded;
    double at;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct context *contexts[MAX_CONTEXTS];
static struct context *stack[MAX_STACK];
static size_t depth;

static const char *value(const struct context *context, const struct cuda_device *device, const char *key)
{
    const struct sim_profile *profile = sim_load();

    if (context)
        device = context->device;
    for (unsigned int i = 0; i < profile->gpu_count; i++) {
        const char *uuid = sim_gpu_value(&profile->gpus[i], "uuid");

        if (uuid && !strcmp(uuid, device->gpu_uuid))
            return sim_gpu_value(&profile->gpus[i], key);
    }
    return NULL;
}

static double number(const struct cuda_device *device, const char *key, double otherwise)
{
    const char *found = value(NULL, device, key);

    return found ? strtod(found, NULL) : otherwise;
}

/* Waits while the GPU hangs at this point, as a driver does that never gets an answer. */
static void hang(const struct cuda_device *device, const char *where)
{
    const char *at;

    while ((at = value(NULL, device, "cuda.hangs")) && !strcmp(at, where)) {
        pthread_mutex_unlock(&lock);
        usleep(20000);
        pthread_mutex_lock(&lock);
    }
}

static bool faulty(const struct context *context, const char *what)
{
    const char *found = value(context, NULL, "cuda.wrong");

    return found && !strcmp(found, what);
}

/* CUDA counts a bus without the part that goes with memory that is switched off (H200), and NVML the whole. */
static double bus_width(const struct cuda_device *device)
{
    return number(device, "cuda.memory_bus_width", number(device, "memory_bus_width", 0.0));
}


static double sm_clock(const struct cuda_device *device)
{
    return number(device, "max_clocks.sm_clock", 0.0) * 1e6 * number(device, "cuda.clock_speed", 1.0);
}

static double host_rate(const struct cuda_device *device)
{
    static const double lanes[] = {0.25, 0.25, 0.5, 0.985, 1.969, 3.938, 7.563};
    int generation = (int)number(device, "pci.pci_gpu_link_info.pcie_gen.max_link_gen", 1.0);

    if (generation < 1 || generation > 6)
        generation = 1;
    return lanes[generation] * 1e9 * number(device, "pci.pci_gpu_link_info.link_widths.current_link_width", 1.0) *
           HOST_COPIES;
}

static int capability(const struct cuda_device *device)
{
    int major = 0, minor = 0;

    (void)sscanf(device->compute_cap, "%d.%d", &major, &minor);
    return major * 10 + minor;
}

static double memory_rate(const struct cuda_device *device)
{
    double clock = number(device, "max_clocks.mem_clock", 0.0) * 1e6;

    return clock * 2.0 * bus_width(device) / 8.0 * device->share * (capability(device) < 80 ? BEFORE_AMPERE : 1.0) *
           number(device, "cuda.memory_speed", 1.0);
}

static struct context *current(int *error)
{
    struct context *context = depth ? stack[depth - 1] : NULL;

    *error = !cuda_initialised() ? CUDA_ERROR_NOT_INITIALIZED
             : !context ? CUDA_ERROR_INVALID_CONTEXT : context->broken;
    return *error ? NULL : context;
}

static bool known(const struct context *context)
{
    for (int i = 0; i < MAX_CONTEXTS; i++)
        if (context && contexts[i] == context)
            return true;
    return false;
}

static int slot(const struct context *context)
{
    for (int i = 0; i < MAX_CONTEXTS; i++)
        if (contexts[i] == context)
            return i;
    return 0;
}

static bool within(const struct allocation *list, uint64_t address, uint64_t size)
{
    for (; list; list = list->next) {
        uint64_t start = (uint64_t)(uintptr_t)list->start;

        if (address >= start && size <= list->size && address - start <= list->size - size)
            return true;
    }
    return false;
}

/* -- devices and contexts -- */

API int cuDeviceGetAttribute(int *out, int attribute, int ordinal)
{
    int error;
    const struct cuda_device *device;
    unsigned int domain = 0, bus = 0, slot_of = 0;
    const char *found;

    pthread_mutex_lock(&lock);
    device = device_at(ordinal, &error);
    if (device && !out)
        error = CUDA_ERROR_INVALID_VALUE;
    if (!error) {
        found = value(NULL, device, "pci.pci_bus_id");
        if (found)
            (void)sscanf(found, "%x:%x:%x", &domain, &bus, &slot_of);
        switch (attribute) {
        case 13: *out = (int)(number(device, "max_clocks.sm_clock", 0.0) * 1000.0); break;
        case 16: *out = device->sm_count; break;
        case 18: *out = 0; break;
        case 32: found = value(NULL, device, "ecc_mode.current_ecc"); *out = found && !strcmp(found, "Enabled"); break;
        case 33: *out = (int)bus; break;
        case 34: *out = (int)slot_of; break;
        case 36: *out = (int)(number(device, "max_clocks.mem_clock", 0.0) * 1000.0); break;
        case 37: *out = (int)bus_width(device); break;
        case 38: *out = (int)number(device, "cuda.l2_cache", 0.0); break;
        case 50: *out = (int)domain; break;
        case 75: *out = capability(device) / 10; break;
        case 76: *out = capability(device) % 10; break;
        default: error = CUDA_ERROR_INVALID_VALUE;
        }
    }
    pthread_mutex_unlock(&lock);
    return error;
}

/* Whether the GPU lets one more process in. */
static int admitted(const struct cuda_device *device)
{
    const char *mode = value(NULL, device, "compute_mode");

    if (mode && !strcmp(mode, "Prohibited"))
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    if (mode && !strcmp(mode, "Exclusive_Process") && number(device, "processes.#", 0.0) > 0)
        return CUDA_ERROR_DEVICE_UNAVAILABLE;
    return (int)number(device, "cuda.context_error", 0.0);
}

API int cuCtxCreate_v2(struct context **out, unsigned int flags, int ordinal)
{
    int error, free_slot = -1;
    const struct cuda_device *device;

    pthread_mutex_lock(&lock);
    device = device_at(ordinal, &error);
    if (device && (!out || flags > 0xff))
        error = CUDA_ERROR_INVALID_VALUE;
    if (!error) {
        hang(device, "context");
        error = admitted(device);
    }
    for (int i = 0; i < MAX_CONTEXTS; i++)
        if (!contexts[i])
            free_slot = i;
    if (!error && (free_slot < 0 || depth == MAX_STACK))
        error = CUDA_ERROR_OUT_OF_MEMORY;
    if (!error) {
        *out = calloc(1, sizeof(**out));
        (*out)->device = device;
        (*out)->ordinal = ordinal;
        (*out)->used = (size_t)(500 * MIB * device->share);
        contexts[free_slot] = stack[depth++] = *out;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

static void free_all(struct allocation *list)
{
    while (list) {
        struct allocation *next = list->next;

        free(list->start);
        free(list);
        list = next;
    }
}

API int cuCtxDestroy_v2(struct context *context)
{
    int error = CUDA_SUCCESS;
    size_t kept = 0;

    pthread_mutex_lock(&lock);
    if (!cuda_initialised())
        error = CUDA_ERROR_NOT_INITIALIZED;
    else if (!known(context))
        error = CUDA_ERROR_INVALID_CONTEXT;
    if (!error) {
        contexts[slot(context)] = NULL;
        for (size_t i = 0; i < depth; i++)
            if (stack[i] != context)
                stack[kept++] = stack[i];
        depth = kept;
        free_all(context->allocations);
        free_all(context->pinned);
        while (context->modules) {
            struct module *module = context->modules;

            context->modules = module->next;
            while (module->functions) {
                struct function *function = module->functions;

                module->functions = function->next;
                free(function);
            }
            free(module->text);
            free(module);
        }
        free(context);
    }
    pthread_mutex_unlock(&lock);
    return error;
}

API int cuCtxPushCurrent_v2(struct context *context)
{
    int error = CUDA_SUCCESS;

    pthread_mutex_lock(&lock);
    if (!cuda_initialised())
        error = CUDA_ERROR_NOT_INITIALIZED;
    else if (!known(context) || depth == MAX_STACK)
        error = CUDA_ERROR_INVALID_CONTEXT;
    else
        stack[depth++] = context;
    pthread_mutex_unlock(&lock);
    return error;
}

API int cuCtxPopCurrent_v2(struct context **out)
{
    int error = CUDA_SUCCESS;

    pthread_mutex_lock(&lock);
    if (!cuda_initialised() || !depth)
        error = cuda_initialised() ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_NOT_INITIALIZED;
    else {
        depth--;
        if (out)
            *out = stack[depth];
    }
    pthread_mutex_unlock(&lock);
    return error;
}

/* -- memory -- */

static size_t room(const struct context *context)
{
    double used = number(context->device, "fb_memory_usage.used", 0.0) * context->device->share;
    double all, held = 0.0;

    /* What other processes hold; a MIG device has only its own. */
    for (unsigned int i = 0; held >= 0.0 && context->device->share == 1.0; i++) {
        char key[64];

        snprintf(key, sizeof(key), "processes.%u.used_memory", i);
        held = number(context->device, key, -1.0);
        used += held > 0.0 ? held : 0.0;
    }
    all = (context->device->memory_mib - used) * MIB;
    for (int i = 0; i < MAX_CONTEXTS; i++)
        if (contexts[i] && contexts[i]->device == context->device)
            all -= (double)contexts[i]->used;
    return all > 0 ? (size_t)all : 0;
}

API int cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    int error;
    struct context *context;

    pthread_mutex_lock(&lock);
    context = current(&error);
    if (context && (!free_bytes || !total))
        error = CUDA_ERROR_INVALID_VALUE;
    if (!error) {
        *free_bytes = room(context);
        *total = (size_t)(context->device->memory_mib * MIB);
    }
    pthread_mutex_unlock(&lock);
    return error;
}

static void *keep(struct allocation **list, size_t size)
{
    struct allocation *made = calloc(1, sizeof(*made));

    /* What was there before is not cleared: a program that counts on it is wrong. */
    if (!made || posix_memalign((void **)&made->start, 4096, size)) {
        free(made);
        return NULL;
    }
    made->size = size;
    made->next = *list;
    *list = made;
    return made->start;
}

static size_t drop(struct allocation **list, uint64_t address)
{
    for (; *list; list = &(*list)->next)
        if ((uint64_t)(uintptr_t)(*list)->start == address) {
            struct allocation *found = *list;
            size_t size = found->size;

            *list = found->next;
            free(found->start);
            free(found);
            return size;
        }
    return 0;
}

API int cuMemAlloc_v2(uint64_t *out, size_t size)
{
    int error;
    struct context *context;
    void *start;

    pthread_mutex_lock(&lock);
    context = current(&error);
    if (context && (!out || !size))
        error = CUDA_ERROR_INVALID_VALUE;
    if (!error && size > room(context))
        error = CUDA_ERROR_OUT_OF_MEMORY;
    if (!error) {
        start = keep(&context->allocations, size);
        if (start) {
            *out = (uint64_t)(uintptr_t)start;
            context->used += size;
            context->generation++;
        } else {
            error = CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    pthread_mutex_unlock(&lock);
    return error;
}

API int cuMemFree_v2(uint64_t address)
{
    int error;
    struct context *context;
    size_t size;

    pthread_mutex_lock(&lock);
    context = current(&error);
    if (!error) {
        size = drop(&context->allocations, address);
        context->used -= size;
        context->generation++;
        error = size ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

API int cuMemHostAlloc(void **out, size_t size, unsigned int flags)
{
    int error;
    struct context *context;

    pthread_mutex_lock(&lock);
    context = current(&error);
    if (context && (!out || !size || flags > 7))
        error = CUDA_ERROR_INVALID_VALUE;
    if (!error) {
        *out = keep(&context->pinned, size);
        error = *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

API int cuMemFreeHost(void *address)
{
    int error;
    struct context *context;

    pthread_mutex_lock(&lock);
    context = current(&error);
    if (!error && !drop(&context->pinned, (uint64_t)(uintptr_t)address))
        error = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&lock);
    return error;
}

/* Whether the same was done last, and nothing since that could make another result of it. */
static bool again(struct context *context, const void *what, const uint64_t arguments[4], uint32_t *result)
{
    for (size_t i = 0; i < sizeof(context->last) / sizeof(*context->last); i++)
        if (context->last[i].what == what && context->last[i].generation == context->generation &&
            !memcmp(context->last[i].arguments, arguments, sizeof(context->last[i].arguments))) {
            if (result)
                *result = context->last[i].result;
            return true;
        }
    return false;
}

static void remember(struct context *context, const void *what, const uint64_t arguments[4], uint32_t result)
{
    unsigned int at = context->next_last++ % (sizeof(context->last) / sizeof(*context->last));

    context->last[at].what = what;
    context->last[at].generation = context->generation;
    context->last[at].result = result;
    memcpy(context->last[at].arguments, arguments, sizeof(context->last[at].arguments));
}

static int copy(struct context *context, void *to, const void *from, size_t size, double rate)
{
    uint64_t arguments[4] = {(uint64_t)(uintptr_t)to, (uint64_t)(uintptr_t)from, size, 0};

    hang(context->device, "copy");
    if (!again(context, (const void *)copy, arguments, NULL)) {
        memcpy(to, from, size);
        context->generation++;
        if (faulty(context, "copies") && size >= MIB)
            ((unsigned char *)to)[size / 2] += 1;
        remember(context, (const void *)copy, arguments, 0);
    }
    context->now += LAUNCH_SECONDS + (double)size / rate;
    return CUDA_SUCCESS;
}

API int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size)
{
    int error;
    struct context *context;

    pthread_mutex_lock(&lock);
    context = current(&error);
    if (!error && (!to || !within(context->allocations, from, size)))
        error = CUDA_ERROR_INVALID_VALUE;
    if (!error) {
        hang(context->device, "copy");
        memcpy(to, (void *)(uintptr_t)from, size);
        context->now += LAUNCH_SECONDS + (double)size / host_rate(context->device);
    }
    pthread_mutex_unlock(&lock);
    return error;
}

/* Memory that is not pinned goes at a fraction of the speed. */
static double to_host(const struct context *context, const void *host, size_t size)
{
    return host_rate(context->device) * (within(context->pinned, (uint64_t)(uintptr_t)host, size) ? 1.0 : 0.2);
}

API int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, struct context *stream)
{
    int error;
    struct context *context;

    pthread_mutex_lock(&lock);
    context = current(&error);
    if (!error && (!to || !within(context->allocations, from, size)))
        error = CUDA_ERROR_INVALID_VALUE;
    if (!error && stream && stream != context)
        error = CUDA_ERROR_INVALID_HANDLE;
    if (!error)
        error = copy(context, to, (void *)(uintptr_t)from, size, to_host(context, to, size));
    pthread_mutex_unlock(&lock);
    return error;
}

API int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, struct context *stream)
{
    int error;
    struct context *context;

    pthread_mutex_lock(&lock);
    context = current(&error);
    if (!error && (!from || !within(context->allocations, to, size)))
        error = CUDA_ERROR_INVALID_VALUE;
    if (!error && stream && stream != context)
        error = CUDA_ERROR_INVALID_HANDLE;
    if (!error)
        error = copy(context, (void *)(uintptr_t)to, from, size, to_host(context, from, size));
    pthread_mutex_unlock(&lock);
    return error;
}

API int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, struct context *stream)
{
    int error;
    struct context *context;

    pthread_mutex_lock(&lock);
    context = current(&error);
    if (!error && (!within(context->allocations, to, size) || !within(context->allocations, from, size)))
        error = CUDA_ERROR_INVALID_VALUE;
    if (!error && stream && stream != context)
        error = CUDA_ERROR_INVALID_HANDLE;
    if (!error)
        error = copy(context, (void *)(uintptr_t)to, (void *)(uintptr_t)from, size,
                     memory_rate(context->device) * COPIES / 2.0);
    pthread_mutex_unlock(&lock);
    return error;
}

API int cuMemsetD32Async(uint64_t to, unsigned int word, size_t count, struct context *stream)
{
    int error;
    struct context *context;

    pthread_mutex_lock(&lock);
    context = current(&error);
    if (!error && (to % 4 || !within(context->allocations, to, count * 4)))
        error = CUDA_ERROR_INVALID_VALUE;
    if (!error && stream && stream != context)
        error = CUDA_ERROR_INVALID_HANDLE;
    if (!error) {
        for (size_t i = 0; i < count; i++)
            ((uint32_t *)(uintptr_t)to)[i] = word;
        context->generation++;
        context->now += LAUNCH_SECONDS + (double)count * 4 / (memory_rate(context->device) * WRITES);
    }
    pthread_mutex_unlock(&lock);
    return error;
}

/* -- streams and events; a stream is its context, for nothing here runs beside anything -- */

API int cuStreamCreate(struct context **out, unsigned int flags)
{
    int error;
    struct context *context;

    pthread_mutex_lock(&lock);
    context = current(&error);
    if (context && (!out || flags > 1))
        error = CUDA_ERROR_INVALID_VALUE;
    if (!error)
        *out = context;
    pthread_mutex_unlock(&lock);
    return error;
}

API int cuStreamSynchronize(struct context *stream)
{
    int error;
    struct context *context;

    pthread_mutex_lock(&lock);
    context = current(&error);
    if (context && stream && stream != context)
        error = CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_unlock(&lock);
    return error;
}

API int cuEventCreate(struct event **out, unsigned int flags)
{
    int error;
    struct context *context;

    pthread_mutex_lock(&lock);
    context = current(&error);
    if (context && (!out || flags > 7))
        error = CUDA_ERROR_INVALID_VALUE;
    if (!error) {
        *out = calloc(1, sizeof(**out));
        (*out)->context = context;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

API int cuEventRecord(struct event *event, struct context *stream)
{
    int error;
    struct context *context;

    pthread_mutex_lock(&lock);
    context = current(&error);
    if (!error && (!event || event->context != context || (stream && stream != context)))
        error = CUDA_ERROR_INVALID_HANDLE;
    if (!error) {
        event->at = context->now;
        event->recorded = true;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

API int cuEventSynchronize(struct event *event)
{
    int error;
    struct context *context;

    pthread_mutex_lock(&lock);
    context = current(&error);
    if (!error && (!event || event->context != context))
        error = CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_unlock(&lock);
    return error;
}

API int cuEventElapsedTime(float *milliseconds, const struct event *begin, const struct event *end)
{
    if (!milliseconds || !begin || !end || !begin->recorded || !end->recorded)
        return CUDA_ERROR_INVALID_HANDLE;
    *milliseconds = (float)((end->at - begin->at) * 1000.0);
    return CUDA_SUCCESS;
}

/* -- modules: PTX -- */

static int count_of(const char *text, const char *end, const char *needle)
{
    int found = 0;

    for (const char *at = text; (at = strstr(at, needle)) && at < end; at++)
        found++;
    return found;
}

static bool float_behind(const char *text, const char *end, const char *needle, float *out)
{
    const char *at = strstr(text, needle);
    uint32_t bits;

    if (!at || at >= end || sscanf(at + strlen(needle), "%8x", &bits) != 1)
        return false;
    memcpy(out, &bits, sizeof(*out));
    return true;
}

static bool read_fma(struct function *made, const char *text, const char *end)
{
    const char *at;
    int passes;

    if (!float_behind(text, end, "mov.f32 %m, 0f", &made->factor) ||
        !float_behind(text, end, "mov.f32 %n, 0f", &made->addend))
        return false;
    for (made->chains = 0; made->chains < 64; made->chains++) {
        char needle[32];

        snprintf(needle, sizeof(needle), "mov.f32 %%x%d, 0f", made->chains);
        if (!float_behind(text, end, needle, &made->starts[made->chains]))
            break;
    }
    at = strstr(text, "mov.u32 %i, ");
    if (!at || at >= end || sscanf(at + 12, "%d", &passes) != 1)
        return false;
    made->steps = passes * count_of(text, end, "fma.rn.f32 %x0,");
    return made->chains && made->steps;
}

static bool read_mma(struct function *made, const char *text, const char *end)
{
    const char *at = strstr(text, "mma.sync.aligned.m16n8k");

    if (!at || at >= end || sscanf(at + 23, "%d", &made->depth) != 1)
        return false;
    made->products = count_of(text, end, "mma.sync.aligned.m16n8k");
    return made->depth == 8 || made->depth == 16;
}

static bool read_entry(struct function *made, const char *name, const char *text, const char *end)
{
    static const struct {
        const char *name;
        enum kind kind;
        enum pattern pattern;
        int parameters;
    } entries[] = {
        {"fill_linear", FILL, LINEAR, 3},     {"write_linear", FILL, LINEAR, 3}, {"fill_walking", FILL, WALKING, 3},
        {"fill_random", FILL, RANDOM, 3},     {"check_linear", CHECK, LINEAR, 3}, {"check_walking", CHECK, WALKING, 3},
        {"check_random", CHECK, RANDOM, 3},   {"read_sum", READ_SUM, LINEAR, 3}, {"fp32_fma", FMA, LINEAR, 1},
        {"tensor_f16", TENSOR, LINEAR, 2},    {"tensor_bf16", TENSOR, LINEAR, 2},
    };

    for (size_t i = 0; i < sizeof(entries) / sizeof(*entries); i++) {
        if (strcmp(entries[i].name, name))
            continue;
        made->kind = entries[i].kind;
        made->pattern = entries[i].pattern;
        made->parameters = entries[i].parameters;
        made->bf16 = !strcmp(name, "tensor_bf16");
        return made->kind == FMA ? read_fma(made, text, end) : made->kind != TENSOR || read_mma(made, text, end);
    }
    return false;
}

/* Whether an image is PTX that the GPU's driver compiles; PTX of a newer architecture is not. */
static bool compiles(const struct context *context, const char *text)
{
    int target = 0;
    const char *at = strstr(text, ".target sm_");

    return !strncmp(text, ".version ", 9) && at && sscanf(at + 11, "%d", &target) == 1 &&
           target <= capability(context->device);
}

/* The kernels of machine code (a cubin), in the words in which PTX has them; NULL where it is for other GPUs. */
static char *entries_of(const struct context *context, const char *image)
{
    const Elf64_Ehdr *header = (const void *)image;
    const Elf64_Shdr *sections = (const void *)(image + header->e_shoff);
    const char *names = image + sections[header->e_shstrndx].sh_offset;
    /* Since ABI 8, of CUDA 13, the architecture is a byte further. */
    int architecture = header->e_flags >> (header->e_ident[EI_ABIVERSION] >= 8 ? 8 : 0) & 0xff;
    int here = capability(context->device);
    char *text;
    size_t size;
    FILE *out;

    if (header->e_machine != EM_CUDA || architecture / 10 != here / 10 || architecture > here)
        return NULL;
    out = open_memstream(&text, &size);
    for (int i = 0; i < header->e_shnum; i++)
        if (!strncmp(names + sections[i].sh_name, ".text.", 6))
            fprintf(out, ".visible .entry %s()\n", names + sections[i].sh_name + 6);
    fclose(out);
    return text;
}

API int cuModuleLoadDataEx(struct module **out, const char *image, unsigned int count, int *options, void **values)
{
    int error;
    struct context *context;
    char *text = NULL;

    pthread_mutex_lock(&lock);
    context = current(&error);
    if (context && (!out || !image || (count && (!options || !values))))
        error = CUDA_ERROR_INVALID_VALUE;
    if (!error && !strncmp(image, ELFMAG, SELFMAG)) {
        text = entries_of(context, image);
        error = text ? CUDA_SUCCESS : CUDA_ERROR_NO_BINARY_FOR_GPU;
    } else if (!error) {
        hang(context->device, "compile");
        if (compiles(context, image)) {
            text = strdup(image);
        } else {
            error = CUDA_ERROR_INVALID_PTX;
            for (unsigned int i = 0; i < count; i++)
                if (options[i] == 5)
                    snprintf(values[i], 80, "ptxas fatal   : SM version specified by .target is higher than default");
        }
    }
    if (!error) {
        *out = calloc(1, sizeof(**out));
        (*out)->text = text;
        (*out)->next = context->modules;
        context->modules = *out;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

API int cuModuleLoadData(struct module **out, const char *image)
{
    return cuModuleLoadDataEx(out, image, 0, NULL, NULL);
}

API int cuModuleGetFunction(struct function **out, struct module *module, const char *name)
{
    int error;
    struct context *context;
    char entry[96];
    const char *at = NULL, *end;
    struct function *made;

    pthread_mutex_lock(&lock);
    context = current(&error);
    if (context && (!out || !module || !name))
        error = CUDA_ERROR_INVALID_VALUE;
    if (!error) {
        snprintf(entry, sizeof(entry), ".visible .entry %s(", name);
        at = strstr(module->text, entry);
        error = at ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
    }
    if (!error) {
        end = strstr(at + 1, ".visible .entry ");
        if (!end)
            end = at + strlen(at);
        made = calloc(1, sizeof(*made));
        if (read_entry(made, name, at, end)) {
            made->next = module->functions;
            module->functions = *out = made;
        } else {
            free(made);
            error = CUDA_ERROR_NOT_FOUND;
        }
    }
    pthread_mutex_unlock(&lock);
    return error;
}

/* -- kernels -- */

static uint32_t word_of(enum pattern pattern, uint64_t index, uint32_t seed)
{
    uint32_t x = (uint32_t)(index >> 32) * 0x61C88647u + (uint32_t)index;

    switch (pattern) {
    case LINEAR:
        return x + seed;
    case WALKING:
        return (1u << ((x + seed) & 31)) ^ ((int32_t)seed < 0 ? 0xFFFFFFFFu : 0u);
    case RANDOM:
    default:
        x = x * 0x9E3779B1u + seed;
        x ^= x >> 15;
        x *= 0x85EBCA77u;
        return x ^ x >> 13;
    }
}

static int fill(struct context *context, const struct function *function, const uint64_t wide[3], uint32_t seed)
{
    uint32_t *words = (uint32_t *)(uintptr_t)wide[0];
    uint64_t count = wide[1] * 4, arguments[4] = {wide[0], wide[1], seed, function->pattern};

    if (!within(context->allocations, wide[0], wide[1] * 16))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    context->now += (double)wide[1] * 16 / (memory_rate(context->device) * WRITES);
    if (again(context, (const void *)fill, arguments, NULL))
        return CUDA_SUCCESS;
    for (uint64_t i = 0; i < count; i++)
        words[i] = word_of(function->pattern, i, seed);
    /* One line of one burst that stays low, as broken memory has it. */
    if (faulty(context, "memory") && count > 1000)
        for (uint64_t i = count / 3; i < count / 3 + 64; i++)
            words[i] &= ~0x00400000u;
    context->generation++;
    remember(context, (const void *)fill, arguments, 0);
    return CUDA_SUCCESS;
}

static int check(struct context *context, const struct function *function, const uint64_t wide[3], uint32_t seed)
{
    const uint32_t *words = (const uint32_t *)(uintptr_t)wide[0];
    unsigned char *out = (unsigned char *)(uintptr_t)wide[2];
    uint32_t errors, found;

    if (!within(context->allocations, wide[0], wide[1] * 16) ||
        !within(context->allocations, wide[2], 16 + 16 * ERROR_SAMPLES))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    context->now += (double)wide[1] * 16 / (memory_rate(context->device) * READS);
    for (uint64_t i = 0; i < wide[1] * 4; i++) {
        uint32_t expected = word_of(function->pattern, i, seed);

        found = words[i];
        if (found == expected)
            continue;
        memcpy(&errors, out, 4);
        if (errors < ERROR_SAMPLES) {
            memcpy(out + 16 + 16 * errors, &i, 8);
            memcpy(out + 24 + 16 * errors, &expected, 4);
            memcpy(out + 28 + 16 * errors, &found, 4);
        }
        errors++;
        memcpy(out, &errors, 4);
    }
    return CUDA_SUCCESS;
}

static int read_sum(struct context *context, const uint64_t wide[3])
{
    const uint32_t *words = (const uint32_t *)(uintptr_t)wide[0];
    uint64_t arguments[4] = {wide[0], wide[1], 0, 0};
    uint32_t sum = 0;

    if (!within(context->allocations, wide[0], wide[1] * 16) || !within(context->allocations, wide[2], 4))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    context->now += (double)wide[1] * 16 / (memory_rate(context->device) * READS);
    if (!again(context, (const void *)read_sum, arguments, &sum)) {
        for (uint64_t i = 0; i < wide[1] * 4; i++)
            sum += words[i];
        remember(context, (const void *)read_sum, arguments, sum);
    }
    *(uint32_t *)(uintptr_t)wide[2] += sum;
    return CUDA_SUCCESS;
}

/* What thread 0 saw of its clocks. */
static void clocks(struct context *context, unsigned char *out, double seconds)
{
    uint64_t cycles = (uint64_t)(seconds * sm_clock(context->device)), nanoseconds = (uint64_t)(seconds * 1e9);

    memcpy(out + 8, &cycles, 8);
    memcpy(out + 16, &nanoseconds, 8);
    context->now += seconds;
}

static double fp32_units(const struct cuda_device *device)
{
    int of = capability(device);

    return of == 60 || (of >= 70 && of <= 80) ? 64.0 : 128.0;
}

static int fma_of(struct context *context, const struct function *function, uint64_t threads, uint64_t out,
                  const uint32_t *narrow)
{
    uint32_t total = 0, bits;
    double work = 2.0 * (double)threads * function->chains * function->steps * narrow[0];

    if (!within(context->allocations, out, 24))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    for (int chain = 0; chain < function->chains; chain++) {
        float x = function->starts[chain];

        for (int i = 0; i < function->steps; i++)
            x = fmaf(x, function->factor, function->addend);
        memcpy(&bits, &x, sizeof(bits));
        total += bits;
    }
    total *= narrow[0];
    if (total != narrow[1])
        *(uint32_t *)(uintptr_t)out += (uint32_t)threads;
    else if (faulty(context, "arithmetic")) /* one thread of them all */
        *(uint32_t *)(uintptr_t)out += 1;
    clocks(context, (unsigned char *)(uintptr_t)out,
           work / (context->device->sm_count * fp32_units(context->device) * 2.0 * sm_clock(context->device) * FMAS));
    return CUDA_SUCCESS;
}

static float half(uint16_t bits, bool bf16)
{
    uint32_t wide = (uint32_t)bits << 16;
    float out;
    int exponent = bits >> 10 & 31;

    if (!bf16) {
        out = exponent ? ldexpf((float)(1024 + (bits & 1023)), exponent - 25) : ldexpf((float)(bits & 1023), -24);
        return bits & 0x8000 ? -out : out;
    }
    memcpy(&out, &wide, sizeof(out));
    return out;
}

/* Puts the lanes' fragments together as the PTX manual says, multiplies, and compares with what the lanes expect. */
static uint32_t wrong_lanes(const struct function *function, const unsigned char *data, uint32_t rounds)
{
    const int k = function->depth, words = k + 32;
    float a[2][16][16], b[4][16][8], expected;
    uint32_t wrong = 0;
    uint16_t bits;

    for (int lane = 0; lane < 32; lane++) {
        const unsigned char *mine = data + lane * words * 4;

        for (int i = 0; i < k; i++) {
            int in = i % (k / 2);

            memcpy(&bits, mine + i * 2, 2);
            a[i / (k / 2)][lane / 4 + (in % 4 >= 2 ? 8 : 0)][lane % 4 * 2 + in % 2 + (in >= 4 ? 8 : 0)] =
                half(bits, function->bf16);
            in = i % (k / 4);
            memcpy(&bits, mine + k * 2 + i * 2, 2);
            b[i / (k / 4)][lane % 4 * 2 + in % 2 + (in >= 2 ? 8 : 0)][lane / 4] = half(bits, function->bf16);
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        bool good = true;

        for (int i = 0; i < 32; i++) {
            int which = i / 4, row = lane / 4 + (i % 4 >= 2 ? 8 : 0), column = lane % 4 * 2 + i % 2;
            float sum = 0.0f;

            for (int j = 0; j < k; j++)
                sum += a[which % 2][row][j] * b[which / 2][j][column];
            memcpy(&expected, data + (lane * words + k + i) * 4, 4);
            good &= sum * (float)rounds == expected * (float)rounds;
        }
        wrong += !good;
    }
    return wrong;
}

static int tensor(struct context *context, const struct function *function, uint64_t threads, const uint64_t wide[3],
                  uint32_t rounds)
{
    int of = capability(context->device);
    double a_clock = of >= 90 && of < 100 ? 4096.0 : of == 80 ? 2048.0 : of == 75 ? 1024.0 : 512.0;
    double work = 2.0 * 16 * 8 * function->depth * function->products * rounds * (double)(threads / 32);
    uint64_t arguments[4] = {wide[1], rounds, 0, 0};
    uint32_t wrong;

    if (!within(context->allocations, wide[0], 24) ||
        !within(context->allocations, wide[1], (uint64_t)(function->depth + 32) * 128))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (!again(context, function, arguments, &wrong)) {
        wrong = wrong_lanes(function, (const unsigned char *)(uintptr_t)wide[1], rounds);
        remember(context, function, arguments, wrong);
    }
    *(uint32_t *)(uintptr_t)wide[0] += wrong * (uint32_t)(threads / 32) + (faulty(context, "tensor") ? 1 : 0);
    clocks(context, (unsigned char *)(uintptr_t)wide[0],
           work / (context->device->sm_count * a_clock * sm_clock(context->device) * TENSORS));
    return CUDA_SUCCESS;
}

static int launch(struct context *context, const struct function *function, uint64_t threads, void **parameters)
{
    uint64_t wide[3] = {0};
    uint32_t narrow[2] = {0};

    for (int i = 0; i < function->parameters; i++)
        memcpy(&wide[i], parameters[i], 8);
    for (int i = 0; i < (function->kind == FMA ? 2 : 1); i++)
        memcpy(&narrow[i], parameters[function->parameters + i], 4);
    context->now += LAUNCH_SECONDS;
    switch (function->kind) {
    case FILL:
        return fill(context, function, wide, narrow[0]);
    case CHECK:
        return check(context, function, wide, narrow[0]);
    case READ_SUM:
        return read_sum(context, wide);
    case FMA:
        return fma_of(context, function, threads, wide[0], narrow);
    case TENSOR:
    default:
        return tensor(context, function, threads, wide, narrow[0]);
    }
}

/* A kernel that goes wrong takes its context with it, and is told of by whatever is called next. */
API int cuLaunchKernel(struct function *function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
                       unsigned int by, unsigned int bz, unsigned int shared, struct context *stream, void **parameters,
                       void **extra)
{
    int error;
    struct context *context;
    bool ours = false;

    pthread_mutex_lock(&lock);
    context = current(&error);
    if (context && (!gx || !gy || !gz || !bx || !by || !bz || bx * by * bz > 1024 || shared > 49152 || !parameters || extra))
        error = CUDA_ERROR_INVALID_VALUE;
    if (!error) {
        for (struct module *module = context->modules; module; module = module->next)
            for (struct function *each = module->functions; each; each = each->next)
                ours |= each == function;
        if (!ours || (stream && stream != context))
            error = CUDA_ERROR_INVALID_HANDLE;
    }
    if (!error) {
        hang(context->device, "launch");
        context->broken = launch(context, function, (uint64_t)gx * gy * gz * bx * by * bz, parameters);
    }
    pthread_mutex_unlock(&lock);
    return error;
}

/* -- between GPUs -- */

static bool reachable(const struct cuda_device *one, const struct cuda_device *other)
{
    return one != other && !one->mig && !other->mig;
}

API int cuDeviceCanAccessPeer(int *out, int ordinal, int peer)
{
    int error;
    const struct cuda_device *one, *other;

    pthread_mutex_lock(&lock);
    one = device_at(ordinal, &error);
    other = error ? NULL : device_at(peer, &error);
    if (!error && !out)
        error = CUDA_ERROR_INVALID_VALUE;
    if (!error)
        *out = reachable(one, other);
    pthread_mutex_unlock(&lock);
    return error;
}

API int cuDeviceGetP2PAttribute(int *out, int attribute, int ordinal, int peer)
{
    int error;
    const struct cuda_device *one, *other;

    pthread_mutex_lock(&lock);
    one = device_at(ordinal, &error);
    other = error ? NULL : device_at(peer, &error);
    if (!error && (!out || attribute < 1 || attribute > 4))
        error = CUDA_ERROR_INVALID_VALUE;
    if (!error && one == other)
        error = CUDA_ERROR_INVALID_DEVICE;
    if (!error)
        *out = reachable(one, other) && (attribute == 2 || number(one, "nvlink.links", 0.0) > 0);
    pthread_mutex_unlock(&lock);
    return error;
}

API int cuCtxEnablePeerAccess(struct context *peer, unsigned int flags)
{
    int error;
    struct context *context;

    pthread_mutex_lock(&lock);
    context = current(&error);
    if (context && flags)
        error = CUDA_ERROR_INVALID_VALUE;
    if (!error && (!known(peer) || peer == context))
        error = CUDA_ERROR_INVALID_CONTEXT;
    if (!error && !reachable(context->device, peer->device))
        error = CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    if (!error && context->peers[slot(peer)])
        error = CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    if (!error)
        context->peers[slot(peer)] = true;
    pthread_mutex_unlock(&lock);
    return error;
}

API int cuCtxDisablePeerAccess(struct context *peer)
{
    int error;
    struct context *context;

    pthread_mutex_lock(&lock);
    context = current(&error);
    if (!error && !known(peer))
        error = CUDA_ERROR_INVALID_CONTEXT;
    if (!error && !context->peers[slot(peer)])
        error = CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    if (!error)
        context->peers[slot(peer)] = false;
    pthread_mutex_unlock(&lock);
    return error;
}

API int cuMemcpyPeerAsync(uint64_t to, struct context *to_context, uint64_t from, struct context *from_context,
                          size_t size, struct context *stream)
{
    int error;
    struct context *context;
    double rate;

    pthread_mutex_lock(&lock);
    context = current(&error);
    if (!error && (!known(to_context) || !known(from_context)))
        error = CUDA_ERROR_INVALID_CONTEXT;
    if (!error && (!within(to_context->allocations, to, size) || !within(from_context->allocations, from, size)))
        error = CUDA_ERROR_INVALID_VALUE;
    if (!error && stream && stream != context)
        error = CUDA_ERROR_INVALID_HANDLE;
    if (!error) {
        rate = host_rate(context->device) * 0.67;
        if (from_context->peers[slot(to_context)]) {
            double links = number(context->device, "nvlink.links", 0.0);

            rate = links > 0 ? links * number(context->device, "nvlink.speed_mbps", 0.0) * 1e6 * PEERS
                             : host_rate(context->device) * 0.9;
        }
        to_context->generation++;
        error = copy(context, (void *)(uintptr_t)to, (void *)(uintptr_t)from, size, rate);
    }
    pthread_mutex_unlock(&lock);
    return error;
}
