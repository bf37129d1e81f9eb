/* The nvidia-smi double. It reaches GPUs only through libnvidia-ml.so.1, so that a failure comes the way it comes on a
 * real host, and has what no public call returns from the library's one private entry. */
#define _GNU_SOURCE 1
#include "smi.h"
#include "smi_gpus.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

#define EXIT_NOT_SIMULATED 3
#define SEE_HELP "Please run 'nvidia-smi -h' for help."
#define EXIT_NO_LIBRARY 12

struct calls nvml;
struct gpu gpus[MAX_GPUS];
unsigned int gpu_count;
static unsigned int attached;

/* -- values ------------------------------------------------------------------------------------------------------- */

const char *ask(nvmlDevice_t device, char *buffer, const char *format, ...)
{
    char key[512];
    va_list arguments;
    nvmlReturn_t result;

    va_start(arguments, format);
    vsnprintf(key, sizeof(key), format, arguments);
    va_end(arguments);
    result = nvml.query(device, key, buffer, VALUE);
    if (result)
        snprintf(buffer, VALUE, "%s", result == NVML_ERROR_RESET_REQUIRED ? nvml.error(result) : "N/A");
    return buffer;
}

bool known(const char *value)
{
    return strcmp(value, "N/A") != 0;
}

/* Whether an error stands where the value was. */
static bool failed(const char *value)
{
    return !strcmp(value, nvml.error(NVML_ERROR_RESET_REQUIRED));
}

unsigned int list_length(nvmlDevice_t device, const char *key)
{
    char buffer[VALUE];

    return (unsigned int)strtoul(ask(device, buffer, "%s.#", key), NULL, 10);
}

/* What nvidia-smi says of an error; one of them is worded otherwise than in NVML. */
static const char *reason(nvmlReturn_t result)
{
    if (result == NVML_ERROR_GPU_IS_LOST)
        return "GPU is lost.  Reboot the system to recover this GPU";
    return nvml.error(result);
}

int exit_code(nvmlReturn_t result)
{
    return result > 0 && result < 255 ? result : result ? EXIT_OTHER : 0;
}

/* "1234.56 W" in whole units, as the summary shows it. */
static const char *whole(const char *value, const char *unit, char *out)
{
    if (failed(value))
        snprintf(out, VALUE, "ERR!");
    else if (known(value))
        snprintf(out, VALUE, "%ld%s", (long)strtod(value, NULL), unit);
    else
        snprintf(out, VALUE, "N/A");
    return out;
}

/* -- reaching the library ----------------------------------------------------------------------------------------- */

static bool bind_calls(void *library)
{
    /* One name for each member of `nvml`, in their order; each is a pointer to a function. */
    static const char *const names[] = {
        "nvmlInit_v2",
        "nvmlShutdown",
        "nvmlErrorString",
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetMigDeviceHandleByIndex",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetSupportedClocksEventReasons",
        "nvmlDeviceGetTopologyCommonAncestor",
        "nvmlDeviceSetPersistenceMode",
        "nvmlDeviceSetMigMode",
        "nvmlDeviceGetGpuInstances",
        "nvmlGpuInstanceGetInfo",
        "nvmlDeviceGetGpuInstanceRemainingCapacity",
        "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
        "nvmlDeviceCreateGpuInstance",
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        "nvmlGpuInstanceDestroy",
        "nvmlGpuInstanceGetComputeInstances",
        "nvmlComputeInstanceGetInfo_v2",
        "nvmlGpuInstanceGetComputeInstanceProfileInfo",
        "nvmlGpuInstanceGetComputeInstanceRemainingCapacity",
        "nvmlGpuInstanceCreateComputeInstance",
        "nvmlComputeInstanceDestroy",
        "gpufarmSimReset",
        "gpufarmSimQuery",
    };

    _Static_assert(sizeof(names) / sizeof(*names) * sizeof(void *) == sizeof(nvml), "a name for each call");
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        void *call = dlsym(library, names[i]);

        if (!call)
            return false;
        memcpy((char *)&nvml + i * sizeof(call), &call, sizeof(call));
    }
    return true;
}

static void *open_library(void)
{
    static const char *const elsewhere[] = {"%s/libnvidia-ml.so.1", "%s/../lib/libnvidia-ml.so.1"};
    char self[PATH_MAX], path[PATH_MAX + 64], *slash;
    ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);

    self[length > 0 ? length : 0] = '\0';
    slash = strrchr(self, '/');
    if (slash)
        *slash = '\0';
    for (size_t i = 0; !library && slash && i < sizeof(elsewhere) / sizeof(*elsewhere); i++) {
        snprintf(path, sizeof(path), i ? elsewhere[1] : elsewhere[0], self);
        library = dlopen(path, RTLD_NOW);
    }
    return library ? library : dlopen("/usr/lib/wsl/lib/libnvidia-ml.so.1", RTLD_NOW);
}

static int fail_to_start(nvmlReturn_t result)
{
    char version[VALUE], platform[VALUE], *dot;
    bool wsl = !strcmp(ask(NULL, platform, "platform"), "wsl");

    if (result == NVML_ERROR_DRIVER_NOT_LOADED) {
        printf("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the "
               "latest NVIDIA driver is installed and running.\n\n");
    } else {
        printf("Failed to initialize NVML: %s\n", nvml.error(result));
        if (result == NVML_ERROR_LIB_RM_VERSION_MISMATCH) {
            ask(NULL, version, "driver.library_version");
            dot = strchr(version, '.');
            dot = dot ? strchr(dot + 1, '.') : NULL;
            if (dot)
                *dot = '\0';
            printf("NVML library version: %s\n", version);
        }
    }
    if (wsl)
        printf("Failed to properly shut down NVML: %s\n", nvml.error(result));
    return exit_code(result);
}

static int start(void)
{
    void *library = open_library();
    nvmlReturn_t result;

    if (!library) {
        printf("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA "
               "Display Driver is properly installed and present in your system.\n"
               "Please also try adding directory that contains libnvidia-ml.so to your system PATH.\n");
        return EXIT_NO_LIBRARY;
    }
    if (!bind_calls(library)) {
        fprintf(stderr, "nvidia-smi (simulated): libnvidia-ml.so.1 is not the double of the same build.\n");
        return 13;
    }
    result = nvml.init();
    if (result)
        return fail_to_start(result);
    result = nvml.count(&attached);
    return exit_code(result);
}

/* -- choosing GPUs ------------------------------------------------------------------------------------------------ */

static bool same_bus_id(const char *wanted, const char *have)
{
    unsigned int a[3], b[3];

    if (sscanf(have, "%x:%x:%x", &b[0], &b[1], &b[2]) != 3)
        return false;
    if (sscanf(wanted, "%x:%x:%x", &a[0], &a[1], &a[2]) != 3) {
        a[0] = 0;
        if (sscanf(wanted, "%x:%x", &a[1], &a[2]) != 2)
            return false;
    }
    return a[0] == b[0] && a[1] == b[1] && a[2] == b[2];
}

static bool wanted_by(const char *id, unsigned int index)
{
    static const char *const keys[] = {"uuid", "serial", "pci.pci_bus_id"};
    char value[VALUE], *end;
    unsigned long number = strtoul(id, &end, 10);

    if (!*end && number == index)
        return true;
    for (size_t i = 0; i < 3; i++) {
        ask(NULL, value, "visible.%u.%s", index, keys[i]);
        if (known(value) && (!strcmp(id, value) || (i == 2 && strchr(id, ':') && same_bus_id(id, value))))
            return true;
    }
    return false;
}

static bool wanted_by_any(const char *ids, unsigned int index)
{
    char list[1024], *rest = NULL;

    if (!ids)
        return true;
    snprintf(list, sizeof(list), "%s", ids);
    for (char *id = strtok_r(list, ",", &rest); id; id = strtok_r(NULL, ",", &rest))
        if (wanted_by(id, index))
            return true;
    return false;
}

/* Fills `gpus` in the order of their indices, whatever the order of the list; what is not there is passed over as long
 * as something is. */
int choose(const char *ids)
{
    gpu_count = 0;
    if (ids && !ids[strspn(ids, ",")]) {
        printf("Failed to parse device string on command line");
        return EXIT_OTHER;
    }
    for (unsigned int i = 0; i < attached && i < MAX_GPUS; i++)
        if (wanted_by_any(ids, i))
            gpus[gpu_count++] = (struct gpu){.index = i};
    if (gpu_count)
        return 0;
    printf("No devices were found\n");
    return EXIT_NOT_FOUND;
}

static int no_handle(const struct gpu *gpu, const char *word)
{
    char bus_id[VALUE];

    ask(NULL, bus_id, "visible.%u.pci.pci_bus_id", gpu->index);
    printf("Unable to determine the device handle for %s%s: %s\n", word,
           strlen(bus_id) > 12 ? bus_id + strlen(bus_id) - 12 : bus_id, reason(gpu->result));
    return exit_code(gpu->result);
}

/* All handles first, as the real one does: one lost GPU spoils a command that is about all of them. */
int open_gpus(void)
{
    for (unsigned int i = 0; i < gpu_count; i++) {
        gpus[i].result = nvml.by_index(gpus[i].index, &gpus[i].device);
        if (gpus[i].result)
            return no_handle(&gpus[i], "GPU");
    }
    return 0;
}

/* -- list --------------------------------------------------------------------------------------------------------- */

static int show_list(void)
{
    char name[VALUE], uuid[VALUE], profile[VALUE], label[VALUE + 8];
    int code = 0;

    for (unsigned int i = 0; i < gpu_count; i++) {
        nvmlDevice_t mig;

        gpus[i].result = nvml.by_index(gpus[i].index, &gpus[i].device);
        if (gpus[i].result) {
            code = no_handle(&gpus[i], "gpu ");
            continue;
        }
        printf("GPU %u: %s (UUID: %s)\n", gpus[i].index, ask(gpus[i].device, name, "product_name"),
               ask(gpus[i].device, uuid, "uuid"));
        for (unsigned int j = 0; nvml.mig_by_index(gpus[i].device, j, &mig) == NVML_SUCCESS; j++) {
            snprintf(label, sizeof(label), "MIG %s", ask(mig, profile, "profile"));
            printf("  %-16sDevice %2u: (UUID: %s)\n", label, j, ask(mig, uuid, "uuid"));
        }
    }
    return code;
}

/* -- full query --------------------------------------------------------------------------------------------------- */

static void xml_text(const char *text)
{
    for (; *text; text++) {
        switch (*text) {
        case '&':
            fputs("&amp;", stdout);
            break;
        case '<':
            fputs("&lt;", stdout);
            break;
        case '>':
            fputs("&gt;", stdout);
            break;
        default:
            putchar(*text);
        }
    }
}

static void tabs(int count)
{
    while (count-- > 0)
        putchar('\t');
}

static void xml_element(int depth, const char *name, const char *value)
{
    tabs(depth);
    printf("<%s>", name);
    xml_text(value);
    printf("</%s>\n", name);
}

static void aligned_line(int column, int depth, const char *label, const char *value)
{
    char line[128];

    snprintf(line, sizeof(line), "%*s%s", depth * 4, "", label);
    printf("%-*s: %s\n", column, line, value);
}

static void text_line(int depth, const char *label, const char *value)
{
    aligned_line(55, depth, label, value);
}

struct writer {
    bool xml;
    int base; /* depth of the rows' parent element */
    nvmlDevice_t device;
    const char *const *only; /* sections of -d, or NULL for all */
};

static void write_rows(const struct writer *writer, const struct row *rows);

static void write_mig_devices(const struct writer *writer)
{
    struct writer inner = *writer;
    unsigned int count = 0;

    if (writer->xml) {
        tabs(writer->base + 1);
        printf("<mig_devices>\n");
    }
    inner.base = writer->xml ? writer->base + 2 : writer->base + 1;
    while (nvml.mig_by_index(writer->device, count, &inner.device) == NVML_SUCCESS) {
        if (writer->xml) {
            tabs(writer->base + 2);
            printf("<mig_device>\n");
        } else {
            printf("%*sMIG Device\n", (writer->base + 1) * 4, "");
        }
        write_rows(&inner, smi_mig_rows);
        if (writer->xml) {
            tabs(writer->base + 2);
            printf("</mig_device>\n");
        }
        count++;
    }
    if (!writer->xml)
        return;
    if (!count) {
        tabs(writer->base + 2);
        printf("None\n");
    }
    tabs(writer->base + 1);
    printf("</mig_devices>\n");
}

static void write_supported_clocks(const struct writer *writer)
{
    char value[VALUE], clock[32];
    unsigned int count = list_length(writer->device, "supported_clocks");

    if (!count) {
        xml_element(writer->base + 1, "supported_clocks", "N/A");
        return;
    }
    tabs(writer->base + 1);
    printf("<supported_clocks>\n");
    for (unsigned int i = 0; i < count; i++) {
        long high = strtol(ask(writer->device, value, "supported_clocks.%u.graphics_max", i), NULL, 10);
        long low = strtol(ask(writer->device, value, "supported_clocks.%u.graphics_min", i), NULL, 10);
        long step = strtol(ask(writer->device, value, "supported_clocks.%u.step", i), NULL, 10);

        tabs(writer->base + 2);
        printf("<supported_mem_clock>\n");
        snprintf(clock, sizeof(clock), "%ld MHz",
                 strtol(ask(writer->device, value, "supported_clocks.%u.memory", i), NULL, 10));
        xml_element(writer->base + 3, "value", clock);
        for (long at = high; at >= low && step > 0; at -= step) {
            snprintf(clock, sizeof(clock), "%ld MHz", at);
            xml_element(writer->base + 3, "supported_graphics_clock", clock);
        }
        tabs(writer->base + 2);
        printf("</supported_mem_clock>\n");
    }
    tabs(writer->base + 1);
    printf("</supported_clocks>\n");
}

static void write_processes(const struct writer *writer)
{
    static const struct {
        const char *key, *xml, *label;
        int deeper;
    } parts[] = {
        {"gpu_instance_id", "gpu_instance_id", "GPU instance ID", 0},
        {"compute_instance_id", "compute_instance_id", "Compute instance ID", 0},
        {"pid", "pid", "Process ID", 0},
        {"type", "type", "Type", 1},
        {"process_name", "process_name", "Name", 1},
        {"used_memory", "used_memory", "Used GPU Memory", 1},
    };
    char value[VALUE];
    unsigned int count = list_length(writer->device, "processes");

    if (writer->xml) {
        tabs(writer->base + 1);
        printf("<processes>\n");
    } else if (count) {
        printf("%*sProcesses\n", (writer->base + 1) * 4, "");
    } else {
        text_line(writer->base + 1, "Processes", "None");
    }
    for (unsigned int i = 0; i < count; i++) {
        if (writer->xml) {
            tabs(writer->base + 2);
            printf("<process_info>\n");
        }
        for (size_t j = 0; j < sizeof(parts) / sizeof(*parts); j++) {
            ask(writer->device, value, "processes.%u.%s", i, parts[j].key);
            if (writer->xml)
                xml_element(writer->base + 3, parts[j].xml, value);
            else
                aligned_line(42, writer->base + 2 + parts[j].deeper, parts[j].label, value);
        }
        if (writer->xml) {
            tabs(writer->base + 2);
            printf("</process_info>\n");
        }
    }
    if (writer->xml) {
        tabs(writer->base + 1);
        printf("</processes>\n");
    }
}

static void write_special(const struct writer *writer, enum special special)
{
    switch (special) {
    case SPECIAL_MIG_DEVICES:
        write_mig_devices(writer);
        break;
    case SPECIAL_SUPPORTED_CLOCKS:
        write_supported_clocks(writer);
        break;
    case SPECIAL_PROCESSES:
        write_processes(writer);
        break;
    case SPECIAL_ACCOUNTED:
        tabs(writer->base + 1);
        printf("<accounted_processes>\n");
        tabs(writer->base + 1);
        printf("</accounted_processes>\n");
        break;
    case SPECIAL_NONE:
        break;
    }
}

static bool wanted_section(const struct writer *writer, const char *section)
{
    for (size_t i = 0; writer->only && writer->only[i]; i++)
        if (section && !strcmp(writer->only[i], section))
            return true;
    return !writer->only;
}

static void write_rows(const struct writer *writer, const struct row *rows)
{
    const char *path[8] = {0}, *open[8] = {0};
    const char *section = NULL;
    int opened = 0, skip_below = 0;
    char key[VALUE * 2], value[VALUE], threshold[VALUE];
    bool plain_limits;

    ask(writer->device, threshold, "temperature.gpu_temp_max_threshold");
    plain_limits = known(threshold);
    for (const struct row *row = rows;; row++) {
        while (opened && opened >= (row->depth ? row->depth : 1)) {
            opened--;
            if (open[opened]) {
                tabs(writer->base + opened + 1);
                printf("</%s>\n", open[opened]);
            }
        }
        if (!row->depth)
            return;
        if (row->depth == 1)
            section = row->xml;
        if (skip_below && row->depth > skip_below)
            continue;
        skip_below = 0;
        path[row->depth] = row->xml;
        open[opened] = NULL;
        if (row->flags & (writer->xml ? ROW_TEXT_ONLY : ROW_XML_ONLY) || !wanted_section(writer, section)) {
            if (row->key && !*row->key)
                skip_below = row->depth;
            continue;
        }
        if (row->special) {
            write_special(writer, row->special);
            continue;
        }
        key[0] = '\0';
        if (row->key && *row->key)
            snprintf(key, sizeof(key), "%s", row->key);
        else
            for (int i = 1; i <= row->depth; i++)
                snprintf(key + strlen(key), sizeof(key) - strlen(key), "%s%s", i > 1 ? "." : "", path[i]);
        if (row->flags & ROW_OPTIONAL && !known(ask(writer->device, value, "%s.%s", key, row[1].xml))) {
            skip_below = row->depth;
            continue;
        }
        if (row->key && !*row->key) {
            /* A section that the GPU does not have at all is one N/A. */
            if (nvml.query(writer->device, key, value, sizeof(value)) == NVML_SUCCESS) {
                skip_below = row->depth;
                if (writer->xml)
                    xml_element(writer->base + row->depth, row->xml, value);
                else
                    text_line(writer->base + row->depth, row->label, value);
                continue;
            }
            if (writer->xml) {
                tabs(writer->base + row->depth);
                printf("<%s>\n", row->xml);
                open[opened++] = row->xml;
            } else {
                printf("%*s%s\n", (writer->base + row->depth) * 4, "", row->label);
            }
            continue;
        }
        if (((row->flags & ROW_IF_KNOWN) && !plain_limits) || ((row->flags & ROW_TLIMIT) && plain_limits))
            continue;
        ask(writer->device, value, "%s", key);
        if (writer->xml) {
            xml_element(writer->base + row->depth, row->xml, value);
        } else {
            char hex[VALUE + 2];

            snprintf(hex, sizeof(hex), "%s%s", row->flags & ROW_HEX && known(value) ? "0x" : "", value);
            text_line(writer->base + row->depth + (row->flags & ROW_DEEPER ? 1 : 0), row->label, hex);
        }
    }
}

static const char *timestamp(char *out, size_t size, const char *format)
{
    time_t now = time(NULL);
    struct tm local;

    localtime_r(&now, &local);
    strftime(out, size, format, &local);
    return out;
}

#define CTIME "%a %b %e %H:%M:%S %Y"

static int show_full(bool xml, const char *const *only)
{
    char now[64], value[VALUE], bus_id[VALUE];
    int code = open_gpus();

    if (code)
        return code;
    if (xml) {
        printf("<?xml version=\"1.0\" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM \"nvsmi_device_v13.dtd\">\n"
               "<nvidia_smi_log>\n");
        xml_element(1, "timestamp", timestamp(now, sizeof(now), CTIME));
        xml_element(1, "driver_version", ask(NULL, value, "driver.version"));
        xml_element(1, "cuda_version", ask(NULL, value, "driver.cuda_version"));
        printf("\t<attached_gpus>%u</attached_gpus>\n", attached);
    } else {
        printf("\n==============NVSMI LOG==============\n\n");
        text_line(0, "Timestamp", timestamp(now, sizeof(now), CTIME));
        text_line(0, "Driver Version", ask(NULL, value, "driver.version"));
        text_line(0, "CUDA Version", ask(NULL, value, "driver.cuda_version"));
        printf("\n%-55s: %u\n", "Attached GPUs", attached);
    }
    for (unsigned int i = 0; i < gpu_count; i++) {
        struct writer writer = {.xml = xml, .base = xml ? 1 : 0, .device = gpus[i].device, .only = only};

        ask(gpus[i].device, bus_id, "pci.pci_bus_id");
        printf(xml ? "\t<gpu id=\"%s\">\n" : "GPU %s\n", bus_id);
        write_rows(&writer, smi_rows);
        printf(xml ? "\t</gpu>\n\n" : "\n");
    }
    if (xml)
        printf("</nvidia_smi_log>\n");
    return 0;
}

/* -- summary ------------------------------------------------------------------------------------------------------ */

#define RULE_GPU "+-----------------------------------------+------------------------+----------------------+\n"
#define RULE "+-----------------------------------------------------------------------------------------+\n"

/* A memory and how much there is of it, in a column of its own. */
static void mig_memory(const char *used, const char *total)
{
    char right[32];

    snprintf(right, sizeof(right), "%8.31s", total);
    printf("%19s / %-12s", used, right);
}

static void show_mig_summary(void)
{
    char mode[VALUE];
    unsigned int shown = 0;
    bool any = false;

    for (unsigned int i = 0; i < gpu_count; i++)
        any |= !strcmp(ask(gpus[i].device, mode, "mig_mode.current_mig"), "Enabled");
    if (!any)
        return;
    printf("\n" RULE
           "| MIG devices:                                                                            |\n"
           "+------------------+----------------------------------+-----------+-----------------------+\n"
           "| GPU  GI  CI  MIG |              Shared Memory-Usage |        Vol|        Shared         |\n"
           "|      ID  ID  Dev |                Shared BAR1-Usage | SM     Unc| CE ENC  DEC  OFA  JPG |\n"
           "|                  |                                  |        ECC|                       |\n"
           "|==================+==================================+===========+=======================|\n");
    for (unsigned int i = 0; i < gpu_count; i++) {
        nvmlDevice_t mig;

        for (unsigned int j = 0; nvml.mig_by_index(gpus[i].device, j, &mig) == NVML_SUCCESS; j++) {
            char gi[VALUE], ci[VALUE], used[VALUE], total[VALUE], bar_used[VALUE], bar_total[VALUE], sm[VALUE];
            char ce[VALUE], enc[VALUE], dec[VALUE], ofa[VALUE], jpg[VALUE], ecc[VALUE], raw[VALUE];

            shown++;
            whole(ask(mig, raw, "fb_memory_usage.used"), "MiB", used);
            whole(ask(mig, raw, "fb_memory_usage.total"), "MiB", total);
            whole(ask(mig, raw, "bar1_memory_usage.used"), "MiB", bar_used);
            whole(ask(mig, raw, "bar1_memory_usage.total"), "MiB", bar_total);
            printf("|%3u%5s%4s%4u  |", gpus[i].index, ask(mig, gi, "gpu_instance_id"),
                   ask(mig, ci, "compute_instance_id"), j);
            mig_memory(used, total);
            printf("|%3s%7s |%3s%4s%5s%5s%5s |\n",
                   ask(mig, sm, "device_attributes.shared.multiprocessor_count"),
                   ask(mig, ecc, "ecc_error_count.volatile_count.sram_uncorrectable"),
                   ask(mig, ce, "device_attributes.shared.copy_engine_count"),
                   ask(mig, enc, "device_attributes.shared.encoder_count"),
                   ask(mig, dec, "device_attributes.shared.decoder_count"),
                   ask(mig, ofa, "device_attributes.shared.ofa_count"),
                   ask(mig, jpg, "device_attributes.shared.jpg_count"));
            printf("|                  |");
            mig_memory(bar_used, bar_total);
            printf("|           |                       |\n"
                   "+------------------+----------------------------------+-----------+-----------------------+\n");
        }
    }
    if (!shown)
        printf("|  No MIG devices found                                                                   |\n" RULE);
}

static void show_processes(void)
{
    bool any = false;

    printf("\n" RULE
           "| Processes:                                                                              |\n"
           "|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |\n"
           "|        ID   ID                                                               Usage      |\n"
           "|=========================================================================================|\n");
    for (unsigned int i = 0; i < gpu_count; i++)
        for (unsigned int j = 0; j < list_length(gpus[i].device, "processes"); j++) {
            char gi[VALUE], ci[VALUE], pid[VALUE], type[VALUE], name[VALUE], raw[VALUE], used[VALUE];

            any = true;
            printf("|%5u%6s%5s%16s%7s   %-38.38s%8s |\n", gpus[i].index,
                   ask(gpus[i].device, gi, "processes.%u.gpu_instance_id", j),
                   ask(gpus[i].device, ci, "processes.%u.compute_instance_id", j),
                   ask(gpus[i].device, pid, "processes.%u.pid", j), ask(gpus[i].device, type, "processes.%u.type", j),
                   ask(gpus[i].device, name, "processes.%u.process_name", j),
                   whole(ask(gpus[i].device, raw, "processes.%u.used_memory", j), "MiB", used));
        }
    if (!any)
        printf("|  No running processes found                                                             |\n");
    printf(RULE);
}

static const char *shown_value(const char *value)
{
    return failed(value) ? "ERR!" : value;
}

static void show_gpu_summary(const struct gpu *gpu)
{
    char name[VALUE], shown[32], persistence[VALUE], bus_id[VALUE], display[VALUE], ecc[VALUE], fan[VALUE];
    char temperature[VALUE], state[VALUE], draw[VALUE], limit[VALUE], used[VALUE], total[VALUE], usage[VALUE];
    char mode[VALUE], mig[VALUE], raw[VALUE], raw_fan[VALUE], raw_use[VALUE];
    nvmlDevice_t device = gpu->device;

    bool mig_on = !strcmp(ask(device, mig, "mig_mode.current_mig"), "Enabled");

    ask(device, name, "product_name");
    if (strlen(name) > 27)
        snprintf(shown, sizeof(shown), "%.24s...", name);
    else
        snprintf(shown, sizeof(shown), "%.27s", name);
    printf("|%4u  %-27s  %4s  |%19s%4s |%21s |\n", gpu->index, shown,
           !strcmp(ask(device, persistence, "persistence_mode"), "Enabled") ? "On" : "Off",
           ask(device, bus_id, "pci.pci_bus_id"),
           !strcmp(ask(device, display, "display_active"), "Enabled") ? "On" : "Off",
           mig_on ? "On" : shown_value(ask(device, ecc, "ecc_errors.volatile.dram_uncorrectable")));
    whole(ask(device, raw_fan, "fan_speed"), "%", fan);
    whole(ask(device, raw, "temperature.gpu_temp"), "C", temperature);
    whole(ask(device, raw, "gpu_power_readings.average_power_draw"), "W", draw);
    whole(ask(device, raw, "gpu_power_readings.current_power_limit"), "W", limit);
    whole(ask(device, raw, "fb_memory_usage.used"), "MiB", used);
    whole(ask(device, raw, "fb_memory_usage.total"), "MiB", total);
    whole(ask(device, raw_use, "utilization.gpu_util"), "%", usage);
    printf("|%4s%6s%6s%16s / %5s |%11s / %9s |%8s%13s |\n", fan, temperature,
           shown_value(ask(device, state, "performance_state")), draw, limit, used, total, usage,
           !strcmp(ask(device, mode, "compute_mode"), "Exclusive_Process") ? "E. Process" : mode);
    ask(device, raw, "mig_mode.pending_mig");
    printf("|                                         |                        |%21s |\n" RULE_GPU,
           strcmp(mig, raw) ? !strcmp(mig, "Enabled") ? "Enabled*" : "Disabled*" : mig);
}

static int show_summary(void)
{
    char now[64], smi[VALUE], driver[VALUE], cuda[VALUE], smi_label[VALUE + 16], driver_label[VALUE + 24],
        cuda_label[VALUE + 24];
    int code = open_gpus();

    if (code)
        return code;
    snprintf(smi_label, sizeof(smi_label), "NVIDIA-SMI %s", ask(NULL, smi, "driver.library_version"));
    snprintf(driver_label, sizeof(driver_label), "Driver Version: %s", ask(NULL, driver, "driver.version"));
    snprintf(cuda_label, sizeof(cuda_label), "CUDA Version: %s", ask(NULL, cuda, "driver.cuda_version"));
    printf("%s       \n" RULE "| %-33s %-30s %-23s|\n" RULE_GPU, timestamp(now, sizeof(now), CTIME), smi_label,
           driver_label, cuda_label);
    printf("| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |\n"
           "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |\n"
           "|                                         |                        |               MIG M. |\n"
           "|=========================================+========================+======================|\n");
    for (unsigned int i = 0; i < gpu_count; i++)
        show_gpu_summary(&gpus[i]);
    show_mig_summary();
    show_processes();
    return 0;
}

/* -- selective queries -------------------------------------------------------------------------------------------- */

struct csv {
    const struct field *fields[128];
    size_t count;
    bool header, units;
};

static const struct field *find_field(const struct field *fields, const char *name)
{
    for (; fields->name; fields++)
        if (!strcmp(fields->name, name) || (fields->alias && !strcmp(fields->alias, name)))
            return fields;
    return NULL;
}

static int parse_csv(struct csv *csv, const struct field *fields, const char *names, const char *format)
{
    char list[4096], options[256], *rest = NULL;

    *csv = (struct csv){.header = true, .units = true};
    snprintf(list, sizeof(list), "%s", names);
    for (char *name = strtok_r(list, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
        const struct field *field = find_field(fields, name);

        if (!field)
            return EXIT_INVALID + 0 * printf("Field \"%s\" is not a valid field to query.\n\n", name);
        if (csv->count < sizeof(csv->fields) / sizeof(*csv->fields))
            csv->fields[csv->count++] = field;
    }
    rest = NULL;
    snprintf(options, sizeof(options), "%s", format ? format : "");
    for (char *option = strtok_r(options, ",", &rest); option; option = strtok_r(NULL, ",", &rest)) {
        if (!strcmp(option, "noheader"))
            csv->header = false;
        else if (!strcmp(option, "nounits"))
            csv->units = false;
        else if (strcmp(option, "csv"))
            return EXIT_INVALID + 0 * printf("Format modifier is not recognized.\n");
    }
    return 0;
}

/* Corrected or uncorrected errors of both memories, which the profile has in parts. */
static void ecc_sum(nvmlDevice_t device, const char *request, char *out)
{
    char what[16], scope[16], word[32], value[VALUE];
    unsigned long long sum = 0;
    bool any = false;

    snprintf(out, VALUE, "%s", ask(device, value, "ecc_errors.volatile.dram_correctable"));
    if (failed(out))
        return;
    if (sscanf(request, "%15s %15s %31s", what, scope, word) == 3) {
        const char *const split[] = {"_parity", "_secded", ""};

        for (size_t i = 0; i < 3; i++)
            if (known(ask(device, value, "ecc_errors.%s.sram_%s%s", scope, word, split[i]))) {
                sum += strtoull(value, NULL, 10);
                any = true;
            }
        if (!strcmp(what, "total") && known(ask(device, value, "ecc_errors.%s.dram_%s", scope, word))) {
            sum += strtoull(value, NULL, 10);
            any = true;
        }
    }
    if (any)
        snprintf(out, VALUE, "%llu", sum);
    else
        snprintf(out, VALUE, "N/A");
}

static void computed(const struct gpu *gpu, int process, const char *key, char *out)
{
    unsigned long long bits = 0;
    struct timespec now;
    char seconds[64];

    snprintf(out, VALUE, "N/A");
    if (!strcmp(key, "@timestamp")) {
        clock_gettime(CLOCK_REALTIME, &now);
        timestamp(seconds, sizeof(seconds), "%Y/%m/%d %H:%M:%S");
        snprintf(out, VALUE, "%s.%03ld", seconds, now.tv_nsec / 1000000);
    } else if (!strcmp(key, "@driver")) {
        ask(NULL, out, "driver.version");
    } else if (!strcmp(key, "@count")) {
        snprintf(out, VALUE, "%u", attached);
    } else if (!strncmp(key, "@ecc ", 5)) {
        ecc_sum(gpu->device, key + 5, out);
    } else if (!strncmp(key, "@reasons ", 9)) {
        nvmlReturn_t result =
            (strcmp(key + 9, "active") ? nvml.supported_reasons : nvml.reasons)(gpu->device, &bits);

        if (!result)
            snprintf(out, VALUE, "0x%016llX", bits);
        else if (result == NVML_ERROR_RESET_REQUIRED)
            snprintf(out, VALUE, "%s", nvml.error(result));
    } else if (!strcmp(key, "@power management")) {
        if (known(ask(gpu->device, out, "gpu_power_readings.requested_power_limit")))
            snprintf(out, VALUE, "Supported");
    } else if (!strncmp(key, "@process ", 9)) {
        ask(gpu->device, out, "processes.%d.%s", process, key + 9);
    }
}

static void csv_header(const struct csv *csv)
{
    for (size_t i = 0; csv->header && i < csv->count; i++) {
        printf("%s%s", i ? ", " : "", csv->fields[i]->name);
        if (csv->fields[i]->unit)
            printf(" [%s]", csv->fields[i]->unit);
    }
    if (csv->header)
        putchar('\n');
}

static void csv_line(const struct csv *csv, const struct gpu *gpu, int process)
{
    char value[VALUE];

    for (size_t i = 0; i < csv->count; i++) {
        const struct field *field = csv->fields[i];
        size_t length;

        if (*field->key == '@')
            computed(gpu, process, field->key, value);
        else if (*field->key)
            ask(gpu->device, value, "%s", field->key);
        else
            snprintf(value, sizeof(value), "N/A");
        if (!known(value) || failed(value)) {
            printf("%s[%s]", i ? ", " : "", value);
            continue;
        }
        length = strlen(value);
        if (!strncmp(field->name, "temperature.", 12) || (field->unit && !csv->units))
            value[strcspn(value, " ")] = '\0';
        else if (!strncmp(field->name, "pcie.link.width", 15) && length && value[length - 1] == 'x')
            value[length - 1] = '\0';
        printf("%s%s%s", i ? ", " : "", field->prefix ? field->prefix : "", value);
    }
    putchar('\n');
}

static int show_gpu_csv(const struct csv *csv)
{
    int code = open_gpus();

    if (code)
        return code;
    csv_header(csv);
    for (unsigned int i = 0; i < gpu_count; i++)
        csv_line(csv, &gpus[i], 0);
    return 0;
}

static int show_process_csv(const struct csv *csv)
{
    char type[VALUE];
    int code = open_gpus();

    if (code)
        return code;
    csv_header(csv);
    for (unsigned int i = 0; i < gpu_count; i++)
        for (unsigned int j = 0; j < list_length(gpus[i].device, "processes"); j++)
            if (strchr(ask(gpus[i].device, type, "processes.%u.type", j), 'C'))
                csv_line(csv, &gpus[i], (int)j);
    return 0;
}

static int show_field_help(const struct field *fields, const char *option)
{
    printf("List of valid properties to query for the switch \"%s\":\n\n", option);
    for (; fields->name; fields++) {
        printf("\"%s\"", fields->name);
        if (fields->alias)
            printf(" or \"%s\"", fields->alias);
        printf("\n\n");
    }
    return 0;
}

/* -- topology, NVLink --------------------------------------------------------------------------------------------- */

static int show_topology(void)
{
    char affinity[VALUE], node[VALUE], links[VALUE], other[VALUE], gpu_node[VALUE];
    int code = choose(NULL);

    if (!code)
        code = open_gpus();
    if (code)
        return code;
    printf("\t\033[4m");
    for (unsigned int i = 0; i < gpu_count; i++)
        printf("GPU%u\t", gpus[i].index);
    printf("CPU Affinity\tNUMA Affinity\tGPU NUMA ID\033[0m\n");
    for (unsigned int i = 0; i < gpu_count; i++) {
        printf("GPU%u\t", gpus[i].index);
        for (unsigned int j = 0; j < gpu_count; j++) {
            unsigned int level = 50;

            if (i == j) {
                printf(" X \t");
                continue;
            }
            if (known(ask(gpus[i].device, links, "nvlink.links")) &&
                known(ask(gpus[j].device, other, "nvlink.links"))) {
                printf("NV%s\t", links);
                continue;
            }
            (void)nvml.common_ancestor(gpus[i].device, gpus[j].device, &level);
            printf("%s\t", level <= 10 ? "PIX" : level <= 20 ? "PXB" : level <= 30 ? "PHB" : level <= 40 ? "NODE" : "SYS");
        }
        printf("%s\t%s\t\t%s\n", ask(gpus[i].device, affinity, "cpu_affinity"), ask(gpus[i].device, node, "numa_node"),
               ask(gpus[i].device, gpu_node, "gpu_numa_id"));
    }
    printf("\nLegend:\n\n"
           "  X    = Self\n"
           "  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)\n"
           "  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node\n"
           "  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)\n"
           "  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)\n"
           "  PIX  = Connection traversing at most a single PCIe bridge\n"
           "  NV#  = Connection traversing a bonded set of # NVLinks\n");
    return 0;
}

/* What each link has counted since the driver was loaded, as the profile says. */
static void show_link_errors(unsigned int gpu, unsigned long link)
{
    static const char *const counters[][2] = {{"Replay", "replay"}, {"Recovery", "recovery"}, {"CRC", "crc"}};
    char value[VALUE];

    for (size_t i = 0; i < sizeof(counters) / sizeof(*counters); i++) {
        const char *counted = ask(gpus[gpu].device, value, "nvlink.%s_errors.%lu", counters[i][1], link);

        printf("\t Link %lu: %s Errors: %s\n", link, counters[i][0], known(counted) ? counted : "0");
    }
    printf("\n");
}

static int show_nvlinks(bool status, bool errors)
{
    char name[VALUE], uuid[VALUE], value[VALUE], speed[VALUE];
    int code = open_gpus();

    for (unsigned int i = 0; !code && i < gpu_count; i++) {
        unsigned long links = strtoul(ask(gpus[i].device, value, "nvlink.links"), NULL, 10);

        if (!links)
            continue;
        printf("GPU %u: %s (UUID: %s)\n", gpus[i].index, ask(gpus[i].device, name, "product_name"),
               ask(gpus[i].device, uuid, "uuid"));
        for (unsigned long link = 0; status && link < links; link++)
            printf("\t Link %lu: %s\n", link,
                   known(ask(gpus[i].device, value, "nvlink.inactive.%lu", link))
                       ? "<inactive>"
                       : ask(gpus[i].device, speed, "nvlink.speed"));
        for (unsigned long link = 0; errors && link < links; link++)
            show_link_errors(i, link);
    }
    return code;
}

int not_simulated(const char *what)
{
    fprintf(stderr, "nvidia-smi (simulated): %s is not simulated.\n", what);
    return EXIT_NOT_SIMULATED;
}

/* topo and nvlink with what each can show here. */
static int show_subcommand(int argc, char **argv)
{
    static const struct {
        const char *word, *option, *long_option;
        bool ids;
    } known_options[] = {
        {"topo", "-m", "--matrix", false},
        {"nvlink", "-s", "--status", true},
        {"nvlink", "-e", "--errorcounters", true},
    };
    const char *ids = NULL;
    bool wanted[sizeof(known_options) / sizeof(*known_options)] = {false};
    char call[VALUE];
    int code;

    snprintf(call, sizeof(call), "\"%s\" without an option", argv[1]);
    for (int i = 2; i < argc; i++) {
        bool *found = NULL;
        bool takes_ids = false;

        for (size_t j = 0; j < sizeof(known_options) / sizeof(*known_options); j++)
            if (!strcmp(known_options[j].word, argv[1])) {
                takes_ids |= known_options[j].ids;
                if (!strcmp(known_options[j].option, argv[i]) || !strcmp(known_options[j].long_option, argv[i]))
                    found = &wanted[j];
            }
        snprintf(call, sizeof(call), "\"%s ... %s\"", argv[1], argv[i]);
        if (found && !*found)
            *found = true;
        else if (!found && !ids && takes_ids && i + 1 < argc && (!strcmp(argv[i], "-i") || !strcmp(argv[i], "--id")))
            ids = argv[++i];
        else
            return not_simulated(call);
    }
    if (wanted[0])
        return show_topology();
    if (!wanted[1] && !wanted[2])
        return not_simulated(call);
    code = choose(ids);
    return code ? code : show_nvlinks(wanted[1], wanted[2]);
}

/* -- changes ------------------------------------------------------------------------------------------------------ */

static int set_persistence(const char *argument)
{
    bool on = !strcmp(argument, "1") || !strcasecmp(argument, "ENABLED");
    char bus_id[VALUE], before[VALUE];
    int code;

    if (!on && strcmp(argument, "0") && strcasecmp(argument, "DISABLED")) {
        printf("Invalid persistence mode: %s\nTerminating early due to previous errors.\n", argument);
        return EXIT_INVALID;
    }
    code = open_gpus();
    for (unsigned int i = 0; !code && i < gpu_count; i++) {
        nvmlReturn_t result;
        bool is_on = !strcmp(ask(gpus[i].device, before, "persistence_mode"), "Enabled");

        ask(gpus[i].device, bus_id, "pci.pci_bus_id");
        result = nvml.set_persistence(gpus[i].device, on);
        if (result == NVML_ERROR_NOT_SUPPORTED) {
            printf("Setting persistence mode is not supported for GPU %s.\nTreating as warning and moving on.\n",
                   bus_id);
        } else if (result) {
            printf("Unable to set persistence mode for GPU %s: %s\nTerminating early due to previous errors.\n", bus_id,
                   nvml.error(result));
            return exit_code(result);
        } else if (is_on == on) {
            printf("Persistence mode is already %s for GPU %s.\n", before, bus_id);
        } else {
            printf("%s persistence mode for GPU %s.\n", on ? "Enabled" : "Disabled", bus_id);
        }
    }
    if (!code)
        printf("All done.\n");
    return code;
}

static int reset_gpus(void)
{
    char bus_id[VALUE], failures[MAX_GPUS * 96] = "";
    unsigned int failed = 0, busy = 0;
    int code = open_gpus();

    for (unsigned int i = 0; !code && i < gpu_count; i++) {
        nvmlReturn_t result = nvml.reset(gpus[i].device);

        ask(gpus[i].device, bus_id, "pci.pci_bus_id");
        if (!result) {
            printf("GPU %s was successfully reset.\n", bus_id);
            continue;
        }
        failed++;
        busy += result == NVML_ERROR_IN_USE;
        snprintf(failures + strlen(failures), sizeof(failures) - strlen(failures), "  GPU %.32s: %s\n", bus_id,
                 nvml.error(result));
    }
    if (code || !failed) {
        if (!code)
            printf("All done.\n");
        return code;
    }
    printf("The following GPUs could not be reset:\n%s", failures);
    if (busy)
        printf("\n%u device%s currently being used by one or more other processes (e.g., Fabric Manager, CUDA application, "
               "graphics application such as an X server, or a monitoring application such as another instance of "
               "nvidia-smi). Please first kill all processes using %s and all compute applications running in the "
               "system.\n",
               busy, busy == 1 ? " is" : "s are", busy == 1 ? "this device" : "these devices");
    return EXIT_OTHER;
}

/* -- command line ------------------------------------------------------------------------------------------------- */

static int show_version(void)
{
    char library[VALUE], driver[VALUE], cuda[VALUE], nvml_version[VALUE], *dot;

    ask(NULL, library, "driver.library_version");
    snprintf(nvml_version, sizeof(nvml_version), "%s", library);
    dot = strchr(nvml_version, '.');
    dot = dot ? strchr(dot + 1, '.') : NULL;
    if (dot)
        *dot = '\0';
    printf("NVIDIA-SMI version  : %s\nNVML version        : %s\nDRIVER version      : %s\nCUDA Version        : %s\n",
           library, nvml_version, ask(NULL, driver, "driver.version"), ask(NULL, cuda, "driver.cuda_version"));
    return 0;
}

/* Not the real one's text, so it is none of its answers either. */
static int show_help(void)
{
    fprintf(stderr, "nvidia-smi (simulated): the help of nvidia-smi is not simulated. This double answers:\n"
                    "  no arguments, -L, -q, -q -x, -q -d, --query-gpu, --query-compute-apps, --format, -i, -f, -l, -lms, -pm,\n"
                    "  -mig, -r, topo -m, nvlink -s -e, mig, --version, --help-query-gpu, --help-query-compute-apps\n"
                    "What else nvidia-smi knows is refused with exit code 3.\n");
    return EXIT_NOT_SIMULATED;
}

/* The names of -d, and the sections of the full query that they show. */
static const struct {
    const char *name, *sections[6];
} displays[] = {
    {"MEMORY", {"fb_memory_usage", "bar1_memory_usage", "cc_protected_memory_usage", NULL}},
    {"ECC", {"ecc_mode", "ecc_errors", NULL}},
    {"TEMPERATURE", {"temperature", NULL}},
    {"COMPUTE", {"compute_mode", NULL}},
    {"PIDS", {"processes", NULL}},
    {"PERFORMANCE", {"performance_state", "clocks_event_reasons", "clocks_event_reasons_counters", "sparse_operation_mode", NULL}},
    {"PAGE_RETIREMENT", {"retired_pages", NULL}},
    {"ENCODER_STATS", {"encoder_stats", NULL}},
    {"FBC_STATS", {"fbc_stats", NULL}},
    {"ROW_REMAPPER", {"remapped_rows", NULL}},
    {"GSP_FIRMWARE_VERSION", {"gsp_firmware_version", NULL}},
    /* The real one adds the samples of the last seconds to the first three. */
    {"UTILIZATION", {NULL}},
    {"POWER", {NULL}},
    {"CLOCK", {NULL}},
    {"SUPPORTED_CLOCKS", {NULL}},
    {"ACCOUNTING", {NULL}},
    {"SUPPORTED_GPU_TARGET_TEMP", {NULL}},
    {"VOLTAGE", {NULL}},
    {"POWER_SMOOTHING", {NULL}},
    {"POWER_PROFILES", {NULL}},
};

static int parse_display(const char *argument, const char **only, size_t room)
{
    char list[256], call[VALUE], *rest = NULL;
    size_t count = 0;
    bool simulated = true;

    snprintf(list, sizeof(list), "%s", argument);
    for (char *name = strtok_r(list, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
        bool found = false;

        for (size_t i = 0; i < sizeof(displays) / sizeof(*displays); i++) {
            if (strcasecmp(displays[i].name, name))
                continue;
            found = true;
            simulated = simulated && displays[i].sections[0];
            for (size_t j = 0; j < 6 && displays[i].sections[j] && count + 1 < room; j++)
                only[count++] = displays[i].sections[j];
        }
        if (!found)
            return EXIT_INVALID + 0 * printf("Failed to parse --display/-d flags\n");
    }
    only[count] = NULL;
    snprintf(call, sizeof(call), "\"-d %s\"", argument);
    return simulated && count ? 0 : not_simulated(call);
}

enum option {
    OPTION_UNKNOWN,
    OPTION_HELP,
    OPTION_VERSION,
    OPTION_LIST,
    OPTION_HELP_GPU,
    OPTION_HELP_PROCESSES,
    OPTION_QUERY,
    OPTION_XML,
    OPTION_DISPLAY,
    OPTION_IDS,
    OPTION_FILE,
    OPTION_LOOP,
    OPTION_LOOP_MS,
    OPTION_GPU_FIELDS,
    OPTION_PROCESS_FIELDS,
    OPTION_OTHER_FIELDS,
    OPTION_FORMAT,
    OPTION_PERSISTENCE,
    OPTION_MIG_MODE,
    OPTION_RESET,
    OPTION_NOT_SIMULATED,
    OPTION_COUNT,
};

/* All options that the real one's help names. */
static const struct {
    const char *letter, *name;
    enum option option;
    bool value;
} known_options[] = {
    {"-h", "--help", OPTION_HELP, false},
    {NULL, "--version", OPTION_VERSION, false},
    {"-L", "--list-gpus", OPTION_LIST, false},
    {NULL, "--help-query-gpu", OPTION_HELP_GPU, false},
    {NULL, "--help-query-compute-apps", OPTION_HELP_PROCESSES, false},
    {"-q", "--query", OPTION_QUERY, false},
    {"-a", NULL, OPTION_QUERY, false},
    {"-x", "--xml-format", OPTION_XML, false},
    {"-d", "--display", OPTION_DISPLAY, true},
    {"-i", "--id", OPTION_IDS, true},
    {"-f", "--filename", OPTION_FILE, true},
    {"-l", "--loop", OPTION_LOOP, true},
    {"-lms", "--loop-ms", OPTION_LOOP_MS, true},
    {NULL, "--query-gpu", OPTION_GPU_FIELDS, true},
    {NULL, "--query-compute-apps", OPTION_PROCESS_FIELDS, true},
    {NULL, "--query-supported-clocks", OPTION_OTHER_FIELDS, true},
    {NULL, "--query-accounted-apps", OPTION_OTHER_FIELDS, true},
    {NULL, "--query-retired-pages", OPTION_OTHER_FIELDS, true},
    {NULL, "--query-remapped-rows", OPTION_OTHER_FIELDS, true},
    {NULL, "--format", OPTION_FORMAT, true},
    {"-pm", "--persistence-mode", OPTION_PERSISTENCE, true},
    {NULL, "--help-query-supported-clocks", OPTION_NOT_SIMULATED, false},
    {NULL, "--help-query-accounted-apps", OPTION_NOT_SIMULATED, false},
    {NULL, "--help-query-retired-pages", OPTION_NOT_SIMULATED, false},
    {NULL, "--help-query-remapped-rows", OPTION_NOT_SIMULATED, false},
    {"-B", "--list-excluded-gpus", OPTION_NOT_SIMULATED, false},
    {"-col", "--columns", OPTION_NOT_SIMULATED, false},
    {"-u", "--unit", OPTION_NOT_SIMULATED, false},
    {NULL, "--dtd", OPTION_NOT_SIMULATED, false},
    {"-e", "--ecc-config", OPTION_NOT_SIMULATED, true},
    {"-p", "--reset-ecc-errors", OPTION_NOT_SIMULATED, true},
    {"-c", "--compute-mode", OPTION_NOT_SIMULATED, true},
    {NULL, "--gom", OPTION_NOT_SIMULATED, true},
    {"-r", "--gpu-reset", OPTION_RESET, false},
    {"-vm", "--virt-mode", OPTION_NOT_SIMULATED, true},
    {"-lgc", "--lock-gpu-clocks", OPTION_NOT_SIMULATED, true},
    {"-m", "--mode", OPTION_NOT_SIMULATED, true},
    {"-rgc", "--reset-gpu-clocks", OPTION_NOT_SIMULATED, false},
    {"-lmc", "--lock-memory-clocks", OPTION_NOT_SIMULATED, true},
    {"-rmc", "--reset-memory-clocks", OPTION_NOT_SIMULATED, false},
    {"-lmcd", "--lock-memory-clocks-deferred", OPTION_NOT_SIMULATED, true},
    {"-rmcd", "--reset-memory-clocks-deferred", OPTION_NOT_SIMULATED, false},
    {"-ac", "--applications-clocks", OPTION_NOT_SIMULATED, true},
    {"-rac", "--reset-applications-clocks", OPTION_NOT_SIMULATED, false},
    {"-pl", "--power-limit", OPTION_NOT_SIMULATED, true},
    {"-sc", "--scope", OPTION_NOT_SIMULATED, true},
    {"-cc", "--cuda-clocks", OPTION_NOT_SIMULATED, true},
    {"-am", "--accounting-mode", OPTION_NOT_SIMULATED, true},
    {"-caa", "--clear-accounted-apps", OPTION_NOT_SIMULATED, false},
    {NULL, "--auto-boost-default", OPTION_NOT_SIMULATED, true},
    {NULL, "--auto-boost-permission", OPTION_NOT_SIMULATED, true},
    {"-mig", "--multi-instance-gpu", OPTION_MIG_MODE, true},
    {"-gtt", "--gpu-target-temp", OPTION_NOT_SIMULATED, true},
    {"-den", "--dram-encryption", OPTION_NOT_SIMULATED, true},
    {NULL, "--set-hostname", OPTION_NOT_SIMULATED, true},
    {NULL, "--get-hostname", OPTION_NOT_SIMULATED, false},
    {"-eow", "--error-on-warning", OPTION_NOT_SIMULATED, false},
    {"-t", "--toggle-led", OPTION_NOT_SIMULATED, true},
    {NULL, "--debug", OPTION_NOT_SIMULATED, true},
};

static const char *const known_words[] = {
    "dmon",        "daemon",      "replay",       "pmon",           "topo",         "drain",       "nvlink",
    "c2c",         "clocks",      "encodersessions", "fbcsessions", "vgpu",         "mig",         "compute-policy",
    "boost-slider", "power-hint", "base-clocks",  "conf-compute",   "gpm",          "pci",         "power-smoothing",
    "power-profiles", "prm",      NULL,
};

struct argument {
    const char *text;
    enum option option;
    const char *value;
    bool lacks_value;
};

static struct argument arguments[64];
static unsigned int argument_count;
static unsigned int given[OPTION_COUNT];      /* how often */
static const char *values[OPTION_COUNT];

/* Whether the argument is this spelling of an option, alone or with "=value". */
static bool spelt(const char *argument, const char *spelling, const char **value)
{
    size_t length = spelling ? strlen(spelling) : 0;

    if (!spelling || strncmp(argument, spelling, length) || (argument[length] && argument[length] != '='))
        return false;
    *value = argument[length] ? argument + length + 1 : NULL;
    return true;
}

static void read_arguments(int argc, char **argv)
{
    for (int i = 1; i < argc && argument_count < sizeof(arguments) / sizeof(*arguments); i++) {
        struct argument *argument = &arguments[argument_count++];

        argument->text = argv[i];
        for (size_t j = 0; j < sizeof(known_options) / sizeof(*known_options) && !argument->option; j++) {
            if (!spelt(argv[i], known_options[j].letter, &argument->value) &&
                !spelt(argv[i], known_options[j].name, &argument->value))
                continue;
            if (argument->value && !known_options[j].value)
                break;
            argument->option = known_options[j].option;
            if (known_options[j].value && !argument->value) {
                argument->value = i + 1 < argc ? argv[++i] : NULL;
                argument->lacks_value = !argument->value && argument->option != OPTION_FORMAT;
            }
        }
        given[argument->option]++;
        values[argument->option] = argument->value;
    }
}

static const struct argument *first_besides(enum option option)
{
    for (unsigned int i = 0; i < argument_count; i++)
        if (arguments[i].option != option)
            return &arguments[i];
    return NULL;
}

/* Commands that stand alone: the first word beside them is blamed. */
static int refuse_company(enum option command)
{
    const struct argument *other = first_besides(command);

    if (other)
        printf("ERROR: Option %s is not valid for this command. " SEE_HELP "\n\n", other->text);
    else if (given[command] > 1)
        printf("ERROR: Only one command can be run at a time. " SEE_HELP "\n\n");
    else
        return 0;
    return EXIT_INVALID;
}

static bool is_query_switch(enum option option)
{
    return option == OPTION_GPU_FIELDS || option == OPTION_PROCESS_FIELDS || option == OPTION_OTHER_FIELDS;
}

static bool suits_query_switch(enum option option)
{
    return is_query_switch(option) || option == OPTION_FORMAT || option == OPTION_IDS || option == OPTION_FILE ||
           option == OPTION_LOOP || option == OPTION_LOOP_MS;
}

/* What the real one says of a line that it does not take, in the order in which it looks; or that the double does not. */
static int check_arguments(void)
{
    unsigned int switches = given[OPTION_GPU_FIELDS] + given[OPTION_PROCESS_FIELDS] + given[OPTION_OTHER_FIELDS];
    bool csv = switches > 0;

    for (enum option command = OPTION_HELP; command <= OPTION_LIST; command++)
        if (given[command])
            return refuse_company(command);
    for (unsigned int i = 0; i < argument_count; i++) {
        const struct argument *argument = &arguments[i];

        if (argument->lacks_value) {
            printf("ERROR: Option %s is missing its value. " SEE_HELP "\n\n", argument->text);
            return EXIT_OTHER;
        }
        if (csv && !suits_query_switch(argument->option)) {
            printf("ERROR: Option %s is not recognized. " SEE_HELP "\n\n", argument->text);
            return EXIT_INVALID;
        }
        if (!csv && (argument->option == OPTION_UNKNOWN || argument->option == OPTION_FORMAT)) {
            printf("ERROR: Option %s is not recognized. Please run 'nvidia-smi -h'.\n\n", argument->text);
            return EXIT_OTHER;
        }
        if (argument->option == OPTION_NOT_SIMULATED || argument->option == OPTION_OTHER_FIELDS)
            return not_simulated(argument->text);
        if (argument->value && given[argument->option] > 1 && !is_query_switch(argument->option))
            return not_simulated("an option that is given twice");
    }
    if (switches > 1) {
        printf("Only one --query-* switch can be used at a time.\n");
        return EXIT_INVALID;
    }
    if (given[OPTION_XML] && !given[OPTION_QUERY]) {
        printf("Invalid combination of input arguments. Specify -q/--query and -x/--xml-format to run an XML query.  "
               SEE_HELP "\n\n");
        return EXIT_INVALID;
    }
    if (given[OPTION_DISPLAY] && !given[OPTION_QUERY]) {
        printf("Invalid combination of input arguments. Specify -q/--query and -d/--display to run a filtered query.  "
               SEE_HELP "\n\n");
        return EXIT_INVALID;
    }
    if (given[OPTION_DISPLAY] && given[OPTION_XML]) {
        printf("Invalid combination of input arguments: --display/-d flags can not be combined with -x/--xml-format "
               "flags.\n");
        return EXIT_INVALID;
    }
    for (enum option change = OPTION_PERSISTENCE; change <= OPTION_RESET; change++)
        if (given[change] && argument_count > given[change] + given[OPTION_IDS])
            return not_simulated("a change with other options than -i");
    if ((given[OPTION_HELP_GPU] || given[OPTION_HELP_PROCESSES]) && argument_count > 1)
        return not_simulated("--help-query-* with other options");
    return 0;
}

static int perform(void)
{
    const char *only[64];
    struct csv csv;
    int code = 0;

    if (given[OPTION_GPU_FIELDS])
        code = parse_csv(&csv, smi_gpu_fields, values[OPTION_GPU_FIELDS], values[OPTION_FORMAT]);
    else if (given[OPTION_PROCESS_FIELDS])
        code = parse_csv(&csv, smi_process_fields, values[OPTION_PROCESS_FIELDS], values[OPTION_FORMAT]);
    else if (given[OPTION_DISPLAY])
        code = parse_display(values[OPTION_DISPLAY], only, sizeof(only) / sizeof(*only));
    if (!code)
        code = choose(values[OPTION_IDS]);
    if (code)
        return code;
    if (given[OPTION_LIST])
        return show_list();
    if (given[OPTION_PERSISTENCE])
        return set_persistence(values[OPTION_PERSISTENCE]);
    if (given[OPTION_MIG_MODE])
        return smi_set_mig_mode(values[OPTION_MIG_MODE]);
    if (given[OPTION_RESET])
        return reset_gpus();
    if (given[OPTION_GPU_FIELDS])
        return show_gpu_csv(&csv);
    if (given[OPTION_PROCESS_FIELDS])
        return show_process_csv(&csv);
    if (given[OPTION_QUERY])
        return show_full(given[OPTION_XML], given[OPTION_DISPLAY] ? only : NULL);
    return show_summary();
}

static int perform_again_and_again(void)
{
    double pause = given[OPTION_LOOP] ? strtod(values[OPTION_LOOP], NULL)
                   : given[OPTION_LOOP_MS] ? strtod(values[OPTION_LOOP_MS], NULL) / 1000.0 : 0.0;
    int code;

    if (given[OPTION_FILE]) {
        int log = open(values[OPTION_FILE], O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);

        if (log < 0 || dup2(log, STDOUT_FILENO) < 0) {
            printf("Failed to create %slog file %s\n\n",
                   given[OPTION_GPU_FIELDS] || given[OPTION_PROCESS_FIELDS] ? "" : "the ", values[OPTION_FILE]);
            return EXIT_OTHER;
        }
    }
    do {
        code = perform();
        fflush(stdout);
        if (code || pause <= 0)
            break;
        usleep((useconds_t)(pause * 1e6));
    } while (true);
    return code;
}

int main(int argc, char **argv)
{
    const char *word = argc > 1 ? argv[1] : "";
    bool subcommand = !strcmp(word, "topo") || !strcmp(word, "nvlink") || !strcmp(word, "mig");
    int code;

    if (!subcommand) {
        for (size_t i = 0; known_words[i]; i++)
            if (!strcmp(known_words[i], word))
                return not_simulated(word);
        read_arguments(argc, argv);
        code = check_arguments();
        if (code)
            return code;
        if (given[OPTION_HELP])
            return show_help();
        if (given[OPTION_HELP_GPU])
            return show_field_help(smi_gpu_fields, "--query-gpu");
        if (given[OPTION_HELP_PROCESSES])
            return show_field_help(smi_process_fields, "--query-compute-apps");
    }
    code = start();
    if (code)
        return code;
    code = !strcmp(word, "mig") ? smi_mig(argc, argv)
           : subcommand ? show_subcommand(argc, argv)
           : given[OPTION_VERSION] ? show_version() : perform_again_and_again();
    nvml.shutdown();
    return code;
}
