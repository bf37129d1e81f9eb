/* nvidia-smi's MIG: the mode, and the subcommand that lists, makes and destroys instances. Texts and exit codes with MIG
 * off were recorded (driver 580); those with MIG on are what NVIDIA's guide and others have published of it. */
#define _GNU_SOURCE 1
#include "smi_gpus.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define MAX_INSTANCES 64
#define COMPUTE_PROFILES 16 /* NVML's IDs, with room */

static const char help[] =
    "\n"
    "    mig -- Multi Instance GPU management.\n"
    "\n"
    "    Usage: nvidia-smi mig [options]\n"
    "\n"
    "    Options include:\n"
    "    [-h | --help]: Display help information.\n"
    "    [-i | --id]: Enumeration index, PCI bus ID or UUID.\n"
    "                 Provide comma separated values for more than one device.\n"
    "    [-gi | --gpu-instance-id]: GPU instance ID.\n"
    "                               Provide comma separated values for more than one GPU instance.\n"
    "    [-ci | --compute-instance-id]: Compute instance ID.\n"
    "                                   Provide comma separated values for more than one compute \n"
    "                                   instance.\n"
    "    [-lgip | --list-gpu-instance-profiles]: List supported GPU instance profiles.\n"
    "                                            Option -i can be used to restrict the command to\n"
    "                                            run on a specific GPU.\n"
    "    [-lgipp | --list-gpu-instance-possible-placements]: List possible GPU instance placements\n"
    "                                                        in the following format, {Start}:Size.\n"
    "                                                        Option -i can be used to restrict the\n"
    "                                                        command to run on a specific GPU.\n"
    "    [-C | --default-compute-instance]: Create compute instance with the default profile when used\n"
    "                                       with the option to create a GPU instance (-cgi).\n"
    "    [-cgi | --create-gpu-instance]: Create GPU instances for the given profile tuples. A profile\n"
    "                                    tuple consists of a profile name or ID and an optional placement\n"
    "                                    specifier, which consists of a colon and a placement start index.\n"
    "                                    Provide comma separated values for more than one profile tuple.\n"
    "                                    Option -i can be used to restrict the command to run on\n"
    "                                    a specific GPU.\n"
    "    [-dgi | --destroy-gpu-instance]: Destroy GPU instances.\n"
    "                                     Options -i and -gi can be used individually or combined\n"
    "                                     to restrict the command to run on a specific GPU or GPU\n"
    "                                     instance.\n"
    "    [-lgi | --list-gpu-instances]: List GPU instances.\n"
    "                                   Option -i can be used to restrict the command to run on a\n"
    "                                   specific GPU.\n"
    "    [-lcip | --list-compute-instance-profiles]: List supported compute instance profiles.\n"
    "                                                Options -i and -gi can be used individually or\n"
    "                                                combined to restrict the command to run on a\n"
    "                                                specific GPU or GPU instance.\n"
    "    [-lcipp | --list-compute-instance-possible-placements]: List possible compute instance placements\n"
    "                                                            in the following format, {Start}:Size.\n"
    "                                                            Options -i and -gi can be used individually or\n"
    "                                                            combined to restrict the command to run on a\n"
    "                                                            specific GPU or GPU instance.\n"
    "    [-cci | --create-compute-instance]: Create compute instance for the given profile name or IDs.\n"
    "                                        Provide comma separated values for more than one profile.\n"
    "                                        If no profile name or ID is given, then the default*\n"
    "                                        compute instance profile ID will be used. Options -i and\n"
    "                                        -gi can be used individually or combined to restrict the\n"
    "                                        command to run on a specific GPU or GPU instance.\n"
    "    [-dci | --destroy-compute-instance]: Destroy compute instances.\n"
    "                                         Options -i, -gi and -ci can be used individually or\n"
    "                                         combined to restrict the command to run on a specific\n"
    "                                         GPU or GPU instance or compute instance.\n"
    "    [-lci | --list-compute-instances]: List compute instances.\n"
    "                                       Options -i and -gi can be used individually or combined\n"
    "                                       to restrict the command to run on a specific GPU or GPU\n"
    "                                       instance.\n"
    "\n"
    "\n";

/* -- the mode ----------------------------------------------------------------------------------------------------- */

static void warn_of_persistence(nvmlDevice_t device, const char *bus_id)
{
    char mode[VALUE];

    if (!strcmp(ask(device, mode, "persistence_mode"), "Disabled"))
        printf("\nWarning: persistence mode is disabled on device %s. See the Known Issues section of the nvidia-smi(1) "
               "man page for more information. Run with [--help | -h] switch to get more information on how to enable "
               "persistence mode.\n",
               bus_id);
}

int smi_set_mig_mode(const char *argument)
{
    bool on = !strcmp(argument, "1") || !strcasecmp(argument, "ENABLED");
    const char *verb = on ? "enable" : "disable";
    char bus_id[VALUE];
    int code;

    if (!on && strcmp(argument, "0") && strcasecmp(argument, "DISABLED")) {
        printf("Invalid MIG Mode: %s\nTerminating early due to previous errors.\n", argument);
        return EXIT_INVALID;
    }
    code = open_gpus();
    for (unsigned int i = 0; !code && i < gpu_count; i++) {
        nvmlReturn_t activation = NVML_SUCCESS;
        nvmlReturn_t result = nvml.set_mig_mode(gpus[i].device, on, &activation);

        ask(gpus[i].device, bus_id, "pci.pci_bus_id");
        if (result) {
            printf("Unable to %s MIG Mode for GPU %s: %s\n", verb, bus_id, nvml.error(result));
            if (result != NVML_ERROR_NOT_SUPPORTED) {
                printf("Terminating early due to previous errors.\n");
                return exit_code(result);
            }
            printf("Treating as warning and moving on.\n");
        } else if (activation) {
            printf("Warning: MIG mode is in pending %s state for GPU %s:%s\n"
                   "%s is currently being used by one or more other processes (e.g. CUDA application or a monitoring "
                   "application such as another instance of nvidia-smi). Please first kill all processes using the "
                   "device and retry the command or reboot the system to make MIG mode effective.\n",
                   verb, bus_id, nvml.error(activation), bus_id);
        } else {
            printf("%s MIG Mode for GPU %s\n", on ? "Enabled" : "Disabled", bus_id);
            warn_of_persistence(gpus[i].device, bus_id);
        }
    }
    if (!code)
        printf("All done.\n");
    return code;
}

/* -- what there is ------------------------------------------------------------------------------------------------ */

/* A GPU instance or a compute instance in one, as a line or a message has it. */
struct instance {
    unsigned int gpu; /* index */
    nvmlDevice_t device;
    nvmlGpuInstance_t gpu_instance;
    nvmlGpuInstanceInfo_t info;
    nvmlComputeInstance_t compute;
    nvmlComputeInstanceInfo_t compute_info;
    char name[VALUE]; /* of the GPU instance's profile */
};

static const char *gpu_instance_ids, *compute_instance_ids; /* -gi and -ci */

static bool listed(const char *ids, unsigned int id)
{
    while (ids && *ids) {
        char *end;

        if (strtoul(ids, &end, 10) == id && end != ids)
            return true;
        ids = strchr(ids, ',');
        ids = ids ? ids + 1 : NULL;
    }
    return false;
}

/* Keeps the GPUs with MIG, or with MIG on, of those that the command is about. */
static void keep_gpus(bool enabled)
{
    char mode[VALUE];
    unsigned int kept = 0;

    for (unsigned int i = 0; i < gpu_count; i++)
        if (known(ask(gpus[i].device, mode, "mig_mode.current_mig")) && (!enabled || !strcmp(mode, "Enabled")))
            gpus[kept++] = gpus[i];
    gpu_count = kept;
}

static unsigned long profile_number(nvmlDevice_t device, unsigned int profile, const char *key)
{
    char value[VALUE];

    return strtoul(ask(device, value, "mig_profiles.%u.%s", profile, key), NULL, 10);
}

/* The GPU instances of a GPU that -gi leaves, in the order of -lgip. */
static unsigned int gpu_instances_of(const struct gpu *gpu, bool every, struct instance *out)
{
    unsigned int count = 0;

    for (unsigned int i = 0; i < list_length(gpu->device, "mig_profiles"); i++) {
        nvmlGpuInstance_t found[MAX_INSTANCES];
        unsigned int have = 0;

        if (nvml.gpu_instances(gpu->device, (unsigned int)profile_number(gpu->device, i, "gi_profile_id"), found, &have))
            continue;
        for (unsigned int j = 0; j < have && count < MAX_INSTANCES; j++) {
            struct instance *instance = &out[count];

            *instance = (struct instance){.gpu = gpu->index, .device = gpu->device, .gpu_instance = found[j]};
            if (nvml.gpu_instance_info(found[j], &instance->info) ||
                (!every && gpu_instance_ids && !listed(gpu_instance_ids, instance->info.id)))
                continue;
            ask(gpu->device, instance->name, "mig_profiles.%u.name", i);
            count++;
        }
    }
    return count;
}

static int by_compute_id(const void *a, const void *b)
{
    const struct instance *first = a, *second = b;

    return (int)first->compute_info.id - (int)second->compute_info.id;
}

static unsigned int compute_instances_of(const struct instance *parent, struct instance *out)
{
    unsigned int count = 0;

    for (unsigned int id = 0; id < COMPUTE_PROFILES; id++) {
        nvmlComputeInstance_t found[MAX_INSTANCES];
        unsigned int have = 0;

        if (nvml.compute_instances(parent->gpu_instance, id, found, &have))
            continue;
        for (unsigned int i = 0; i < have && count < MAX_INSTANCES; i++) {
            out[count] = *parent;
            out[count].compute = found[i];
            if (!nvml.compute_info(found[i], &out[count].compute_info) &&
                (!compute_instance_ids || listed(compute_instance_ids, out[count].compute_info.id)))
                count++;
        }
    }
    qsort(out, count, sizeof(*out), by_compute_id);
    return count;
}

/* "MIG 3g.40gb", or "MIG 1c.3g.40gb" where it is less than all; engines that the GPU instance has besides are not its. */
static const char *compute_name(const struct instance *instance, unsigned int slices, char *out)
{
    int length = (int)strcspn(instance->name, "+");

    if (slices < strtoul(instance->name, NULL, 10))
        snprintf(out, VALUE, "MIG %uc.%.*s", slices, length, instance->name);
    else
        snprintf(out, VALUE, "MIG %.*s", length, instance->name);
    return out;
}

static int none_found(const char *what)
{
    printf("No %s instances found: %s\n", what, nvml.error(NVML_ERROR_NOT_FOUND));
    return EXIT_NOT_FOUND;
}

/* -- listings ----------------------------------------------------------------------------------------------------- */

#define PROFILE_RULE "+-------------------------------------------------------------------------------+\n"

static int list_gpu_profiles(void)
{
    printf(PROFILE_RULE "| GPU instance profiles:                                                        |\n"
                        "| GPU   Name               ID    Instances   Memory     P2P    SM    DEC   ENC  |\n"
                        "|                                Free/Total   GiB              CE    JPEG  OFA  |\n"
                        "|===============================================================================|\n");
    for (unsigned int i = 0; i < gpu_count; i++) {
        nvmlDevice_t device = gpus[i].device;

        for (unsigned int j = 0; j < list_length(device, "mig_profiles"); j++) {
#define SHARED(key) profile_number(device, j, "device_attributes.shared." key)
            unsigned int id = (unsigned int)profile_number(device, j, "gi_profile_id"), room = 0;
            char name[VALUE], label[VALUE + 8], memory[VALUE];

            (void)nvml.gpu_instance_room(device, id, &room);
            snprintf(label, sizeof(label), "MIG %s", ask(device, name, "mig_profiles.%u.name", j));
            printf("|%4u  %-19s%3u%6u/%lu        %-11s%s     %-7lu%-6lu%lu   |\n", gpus[i].index, label, id, room,
                   profile_number(device, j, "instances"), ask(device, memory, "mig_profiles.%u.memory_gib", j), "No",
                   SHARED("multiprocessor_count"), SHARED("decoder_count"), SHARED("encoder_count"));
            printf("|%64lu%6lu%6lu   |\n" PROFILE_RULE, SHARED("copy_engine_count"), SHARED("jpg_count"),
                   SHARED("ofa_count"));
#undef SHARED
        }
    }
    return 0;
}

static int list_placements(void)
{
    for (unsigned int i = 0; i < gpu_count; i++)
        for (unsigned int j = 0; j < list_length(gpus[i].device, "mig_profiles"); j++) {
            unsigned int id = (unsigned int)profile_number(gpus[i].device, j, "gi_profile_id");
            nvmlInstancePlacement_t placements[MAX_INSTANCES];
            unsigned int count = MAX_INSTANCES;

            if (nvml.placements(gpus[i].device, id, placements, &count) || !count)
                continue;
            printf("GPU %2u Profile ID %2u %s: {", gpus[i].index, id, count == 1 ? "Placement " : "Placements");
            for (unsigned int k = 0; k < count; k++)
                printf("%s%u", k ? "," : "", placements[k].start);
            printf("}:%u\n", placements[0].size);
        }
    return 0;
}

static int list_gpu_instances(void)
{
    struct instance instances[MAX_INSTANCES];
    char label[VALUE + 8], placement[32];
    bool any = false;

    for (unsigned int i = 0; i < gpu_count; i++) {
        unsigned int count = gpu_instances_of(&gpus[i], true, instances);

        for (unsigned int j = 0; j < count; j++) {
            const nvmlGpuInstanceInfo_t *info = &instances[j].info;

            if (!any)
                printf("+---------------------------------------------------------+\n"
                       "| GPU instances:                                          |\n"
                       "| GPU   Name               Profile  Instance   Placement  |\n"
                       "|                            ID       ID       Start:Size |\n"
                       "|=========================================================|\n");
            any = true;
            snprintf(label, sizeof(label), "MIG %s", instances[j].name);
            snprintf(placement, sizeof(placement), "%u:%u", info->placement.start, info->placement.size);
            printf("|%4u  %-19s%5u%9u%13s     |\n"
                   "+---------------------------------------------------------+\n",
                   gpus[i].index, label, info->profileId, info->id, placement);
        }
    }
    return any ? 0 : none_found("GPU");
}

static int list_compute_instances(void)
{
    struct instance parents[MAX_INSTANCES], instances[MAX_INSTANCES];
    char label[VALUE], placement[32];
    bool any_parent = false, any = false;

    for (unsigned int i = 0; i < gpu_count; i++) {
        unsigned int parent_count = gpu_instances_of(&gpus[i], false, parents);

        for (unsigned int j = 0; j < parent_count; j++) {
            unsigned int count = compute_instances_of(&parents[j], instances);

            any_parent = true;
            for (unsigned int k = 0; k < count; k++) {
                const nvmlComputeInstanceInfo_t *info = &instances[k].compute_info;

                if (!any)
                    printf("+--------------------------------------------------------------------+\n"
                           "| Compute instances:                                                 |\n"
                           "| GPU     GPU       Name             Profile   Instance   Placement  |\n"
                           "|       Instance                       ID        ID       Start:Size |\n"
                           "|         ID                                                         |\n"
                           "|====================================================================|\n");
                any = true;
                compute_name(&instances[k], info->placement.size, label);
                snprintf(placement, sizeof(placement), "%u:%u", info->placement.start, info->placement.size);
                printf("|%4u%7u       %-16s%6u%10u%13s     |\n"
                       "+--------------------------------------------------------------------+\n",
                       gpus[i].index, instances[k].info.id, label, info->profileId, info->id, placement);
            }
        }
    }
    return any ? 0 : none_found(any_parent ? "compute" : "GPU");
}

static int by_slices(const void *a, const void *b)
{
    const nvmlComputeInstanceProfileInfo_t *first = a, *second = b;

    return (int)first->sliceCount - (int)second->sliceCount;
}

/* What can be made in a GPU instance, smallest first: the last is the default. */
static unsigned int compute_profiles_of(const struct instance *parent, nvmlComputeInstanceProfileInfo_t *out)
{
    unsigned int count = 0;

    for (unsigned int id = 0; id < COMPUTE_PROFILES; id++)
        if (!nvml.compute_profile(parent->gpu_instance, id, 0, &out[count]))
            count++;
    qsort(out, count, sizeof(*out), by_slices);
    return count;
}

#define COMPUTE_RULE "+--------------------------------------------------------------------------------------+\n"

static int list_compute_profiles(void)
{
    struct instance parents[MAX_INSTANCES];
    nvmlComputeInstanceProfileInfo_t profiles[COMPUTE_PROFILES];
    char label[VALUE];
    bool any = false;

    for (unsigned int i = 0; i < gpu_count; i++) {
        unsigned int parent_count = gpu_instances_of(&gpus[i], false, parents);

        for (unsigned int j = 0; j < parent_count; j++) {
            unsigned int count = compute_profiles_of(&parents[j], profiles);

            if (!any)
                printf(COMPUTE_RULE
                       "| Compute instance profiles:                                                           |\n"
                       "| GPU     GPU       Name             Profile  Instances   Exclusive       Shared       |\n"
                       "|       Instance                       ID     Free/Total     SM       DEC   ENC   OFA  |\n"
                       "|         ID                                                          CE    JPEG       |\n"
                       "|======================================================================================|\n");
            any = true;
            for (unsigned int k = 0; k < count; k++) {
                const nvmlComputeInstanceProfileInfo_t *profile = &profiles[k];
                unsigned int room = 0;

                (void)nvml.compute_room(parents[j].gpu_instance, profile->id, &room);
                compute_name(&parents[j], profile->sliceCount, label);
                printf("|%4u%7u       %-21s%u%s     %u/%u%13u%9u%6u%6u   |\n", gpus[i].index, parents[j].info.id, label,
                       profile->id, k + 1 == count ? "*" : " ", room, profile->instanceCount,
                       profile->multiprocessorCount, profile->sharedDecoderCount, profile->sharedEncoderCount,
                       profile->sharedOfaCount);
                printf("|%71u%6u         |\n" COMPUTE_RULE, profile->sharedCopyEngineCount, profile->sharedJpegCount);
            }
        }
    }
    return any ? 0 : none_found("GPU");
}

/* -- changes ------------------------------------------------------------------------------------------------------ */

/* A name with or without "MIG ", or a number; the text stays as it was given for the messages. */
static bool is_name(const char *wanted, const char *name)
{
    return !strcmp(wanted, name) || (!strncmp(wanted, "MIG ", 4) && !strcmp(wanted + 4, name));
}

static bool is_number(const char *text, unsigned int *number)
{
    char *end;

    *number = (unsigned int)strtoul(text, &end, 10);
    return *text >= '0' && *text <= '9' && !*end;
}

static int create_compute(const struct instance *parent, const nvmlComputeInstanceProfileInfo_t *profile,
                          const char *wanted)
{
    nvmlComputeInstance_t made;
    nvmlComputeInstanceInfo_t info;
    char label[VALUE];
    nvmlReturn_t result = profile ? nvml.create_compute_instance(parent->gpu_instance, profile->id, &made)
                                  : NVML_ERROR_INVALID_ARGUMENT;

    if (!result)
        result = nvml.compute_info(made, &info);
    if (!result) {
        printf("Successfully created compute instance ID %2u on GPU %2u GPU instance ID %2u using profile %s (ID %2u)\n",
               info.id, parent->gpu, parent->info.id, compute_name(parent, profile->sliceCount, label), profile->id);
        return 0;
    }
    printf("Unable to create a compute instance on GPU %2u GPU instance ID %2u using profile %s: %s\n"
           "Failed to create compute instances: %s\n",
           parent->gpu, parent->info.id, wanted, nvml.error(result), nvml.error(result));
    return exit_code(result);
}

/* By the default profile where none is named. */
static int create_compute_in(const struct instance *parent, const char *wanted)
{
    nvmlComputeInstanceProfileInfo_t profiles[COMPUTE_PROFILES];
    unsigned int count = compute_profiles_of(parent, profiles), id;
    char label[VALUE], fallback[16];

    if (!count)
        return create_compute(parent, NULL, wanted ? wanted : "0");
    if (!wanted) {
        snprintf(fallback, sizeof(fallback), "%u", profiles[count - 1].id);
        return create_compute(parent, &profiles[count - 1], fallback);
    }
    for (unsigned int i = 0; i < count; i++) {
        compute_name(parent, profiles[i].sliceCount, label);
        if (is_name(wanted, label + 4) || (i + 1 == count && is_name(wanted, parent->name)) ||
            (is_number(wanted, &id) && id == profiles[i].id))
            return create_compute(parent, &profiles[i], wanted);
    }
    return create_compute(parent, NULL, wanted);
}

/* One profile, with an optional ":start". */
static int create_gpu_instance(const struct gpu *gpu, const char *specification, bool with_compute)
{
    struct instance made = {.gpu = gpu->index, .device = gpu->device};
    nvmlInstancePlacement_t placement = {0};
    nvmlReturn_t result = NVML_ERROR_INVALID_ARGUMENT;
    char wanted[VALUE], *colon;
    unsigned int id = 0, number;
    bool placed, found = false;

    snprintf(wanted, sizeof(wanted), "%s", specification);
    colon = strchr(wanted, ':');
    placed = colon != NULL;
    if (placed)
        *colon = '\0';
    for (unsigned int i = 0; i < list_length(gpu->device, "mig_profiles") && !found; i++) {
        id = (unsigned int)profile_number(gpu->device, i, "gi_profile_id");
        ask(gpu->device, made.name, "mig_profiles.%u.name", i);
        found = is_name(wanted, made.name) || (is_number(wanted, &number) && number == id);
    }
    if (found && !placed)
        result = nvml.create_gpu_instance(gpu->device, id, &made.gpu_instance);
    else if (found && is_number(colon + 1, &placement.start))
        result = nvml.place_gpu_instance(gpu->device, id, &placement, &made.gpu_instance);
    if (!result)
        result = nvml.gpu_instance_info(made.gpu_instance, &made.info);
    if (result) {
        printf("Unable to create a GPU instance on GPU %2u using profile %s: %s\nFailed to create GPU instances: %s\n",
               gpu->index, wanted, nvml.error(result), nvml.error(result));
        return exit_code(result);
    }
    printf("Successfully created GPU instance ID %2u on GPU %2u using profile MIG %s (ID %2u)\n", made.info.id, gpu->index,
           made.name, id);
    return with_compute ? create_compute_in(&made, NULL) : 0;
}

static int create_gpu_instances(const char *specifications, bool with_compute)
{
    int code = 0;

    for (unsigned int i = 0; !code && i < gpu_count; i++) {
        char list[1024], *rest = NULL;

        snprintf(list, sizeof(list), "%s", specifications);
        for (char *one = strtok_r(list, ",", &rest); one && !code; one = strtok_r(NULL, ",", &rest))
            code = create_gpu_instance(&gpus[i], one, with_compute);
    }
    return code;
}

static int create_compute_instances(const char *profiles)
{
    struct instance parents[MAX_INSTANCES];
    bool any = false;
    int code = 0;

    for (unsigned int i = 0; !code && i < gpu_count; i++) {
        unsigned int count = gpu_instances_of(&gpus[i], false, parents);

        for (unsigned int j = 0; !code && j < count; j++) {
            char list[1024], *rest = NULL;

            any = true;
            if (!profiles)
                code = create_compute_in(&parents[j], NULL);
            snprintf(list, sizeof(list), "%s", profiles ? profiles : "");
            for (char *one = strtok_r(list, ",", &rest); one && !code; one = strtok_r(NULL, ",", &rest))
                code = create_compute_in(&parents[j], one);
        }
    }
    return any ? code : none_found("GPU");
}

static int destroy_compute_instances(void)
{
    struct instance parents[MAX_INSTANCES], instances[MAX_INSTANCES];
    bool any_parent = false, any = false;

    for (unsigned int i = 0; i < gpu_count; i++) {
        unsigned int parent_count = gpu_instances_of(&gpus[i], false, parents);

        for (unsigned int j = 0; j < parent_count; j++) {
            unsigned int count = compute_instances_of(&parents[j], instances);

            any_parent = true;
            for (unsigned int k = 0; k < count; k++) {
                nvmlReturn_t result = nvml.destroy_compute_instance(instances[k].compute);

                any = true;
                printf("%s compute instance ID %2u from GPU %2u GPU instance ID %2u",
                       result ? "Unable to destroy" : "Successfully destroyed", instances[k].compute_info.id,
                       gpus[i].index, parents[j].info.id);
                if (result) {
                    printf(": %s\nFailed to destroy compute instances: %s\n", nvml.error(result), nvml.error(result));
                    return exit_code(result);
                }
                printf("\n");
            }
        }
    }
    return any ? 0 : none_found(any_parent ? "compute" : "GPU");
}

static int destroy_gpu_instances(void)
{
    struct instance instances[MAX_INSTANCES];
    bool any = false;

    for (unsigned int i = 0; i < gpu_count; i++) {
        unsigned int count = gpu_instances_of(&gpus[i], false, instances);

        for (unsigned int j = 0; j < count; j++) {
            nvmlReturn_t result = nvml.destroy_gpu_instance(instances[j].gpu_instance);

            any = true;
            printf("%s GPU instance ID %2u from GPU %2u", result ? "Unable to destroy" : "Successfully destroyed",
                   instances[j].info.id, gpus[i].index);
            if (result) {
                printf(": %s\nFailed to destroy GPU instances: %s\n", nvml.error(result), nvml.error(result));
                return exit_code(result);
            }
            printf("\n");
        }
    }
    return any ? 0 : none_found("GPU");
}

/* -- command line ------------------------------------------------------------------------------------------------- */

enum option {
    OPTION_HELP,
    OPTION_IDS,
    OPTION_GPU_INSTANCES,
    OPTION_COMPUTE_INSTANCES,
    OPTION_DEFAULT_COMPUTE,
    /* Commands; the first that is given is run. */
    OPTION_LIST_PROFILES,
    OPTION_LIST_PLACEMENTS,
    OPTION_CREATE,
    OPTION_DESTROY,
    OPTION_LIST,
    OPTION_LIST_COMPUTE_PROFILES,
    OPTION_LIST_COMPUTE_PLACEMENTS,
    OPTION_CREATE_COMPUTE,
    OPTION_DESTROY_COMPUTE,
    OPTION_LIST_COMPUTE,
    OPTION_COUNT,
};

static const struct {
    const char *letter, *name;
    enum { NO_VALUE, MAYBE, VALUE_NEEDED } value;
} options[OPTION_COUNT] = {
    [OPTION_HELP] = {"-h", "--help", NO_VALUE},
    [OPTION_IDS] = {"-i", "--id", VALUE_NEEDED},
    [OPTION_GPU_INSTANCES] = {"-gi", "--gpu-instance-id", VALUE_NEEDED},
    [OPTION_COMPUTE_INSTANCES] = {"-ci", "--compute-instance-id", VALUE_NEEDED},
    [OPTION_DEFAULT_COMPUTE] = {"-C", "--default-compute-instance", NO_VALUE},
    [OPTION_LIST_PROFILES] = {"-lgip", "--list-gpu-instance-profiles", NO_VALUE},
    [OPTION_LIST_PLACEMENTS] = {"-lgipp", "--list-gpu-instance-possible-placements", NO_VALUE},
    [OPTION_CREATE] = {"-cgi", "--create-gpu-instance", VALUE_NEEDED},
    [OPTION_DESTROY] = {"-dgi", "--destroy-gpu-instance", NO_VALUE},
    [OPTION_LIST] = {"-lgi", "--list-gpu-instances", NO_VALUE},
    [OPTION_LIST_COMPUTE_PROFILES] = {"-lcip", "--list-compute-instance-profiles", NO_VALUE},
    [OPTION_LIST_COMPUTE_PLACEMENTS] = {"-lcipp", "--list-compute-instance-possible-placements", NO_VALUE},
    [OPTION_CREATE_COMPUTE] = {"-cci", "--create-compute-instance", MAYBE},
    [OPTION_DESTROY_COMPUTE] = {"-dci", "--destroy-compute-instance", NO_VALUE},
    [OPTION_LIST_COMPUTE] = {"-lci", "--list-compute-instances", NO_VALUE},
};

static int run(enum option command, const char *const *values, bool with_compute)
{
    switch (command) {
    case OPTION_LIST_PROFILES:
        return list_gpu_profiles();
    case OPTION_LIST_PLACEMENTS:
        return list_placements();
    case OPTION_CREATE:
        return create_gpu_instances(values[OPTION_CREATE], with_compute);
    case OPTION_DESTROY:
        return destroy_gpu_instances();
    case OPTION_LIST:
        return list_gpu_instances();
    case OPTION_LIST_COMPUTE_PROFILES:
        return list_compute_profiles();
    case OPTION_CREATE_COMPUTE:
        return create_compute_instances(values[OPTION_CREATE_COMPUTE]);
    case OPTION_DESTROY_COMPUTE:
        return destroy_compute_instances();
    case OPTION_LIST_COMPUTE:
        return list_compute_instances();
    default:
        return not_simulated("\"mig -lcipp\" with MIG on");
    }
}

int smi_mig(int argc, char **argv)
{
    const char *values[OPTION_COUNT] = {NULL};
    bool given[OPTION_COUNT] = {false};
    enum option command = OPTION_COUNT;
    int code;

    for (int i = 2; i < argc; i++) {
        enum option option = OPTION_HELP;

        while (option < OPTION_COUNT && strcmp(options[option].letter, argv[i]) && strcmp(options[option].name, argv[i]))
            option++;
        if (option == OPTION_COUNT) {
            printf("Option \"%s\" is not recognized.\n", argv[i]);
            return EXIT_INVALID;
        }
        if (options[option].value != NO_VALUE && i + 1 < argc && argv[i + 1][0] != '-') {
            values[option] = argv[++i];
        } else if (options[option].value == VALUE_NEEDED) {
            printf("Option \"%s\" is missing its value.\n", argv[i]);
            return EXIT_INVALID;
        }
        given[option] = true;
        if (option >= OPTION_LIST_PROFILES && command == OPTION_COUNT)
            command = option;
    }
    if (argc == 2 || given[OPTION_HELP]) {
        fputs(help, stdout);
        return 0;
    }
    if (command == OPTION_COUNT)
        return not_simulated("\"mig\" without a command");
    gpu_instance_ids = values[OPTION_GPU_INSTANCES];
    compute_instance_ids = values[OPTION_COMPUTE_INSTANCES];
    code = choose(values[OPTION_IDS]);
    if (!code)
        code = open_gpus();
    if (code)
        return code;
    keep_gpus(false);
    if (!gpu_count) {
        printf("No MIG-supported devices found.\n");
        return EXIT_NOT_FOUND;
    }
    if (command > OPTION_LIST_PLACEMENTS)
        keep_gpus(true);
    if (!gpu_count) {
        printf("No MIG-enabled devices found.\n");
        return 0;
    }
    return run(command, values, given[OPTION_DEFAULT_COMPUTE]);
}
