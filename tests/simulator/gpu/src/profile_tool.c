/* Tells shell scripts what a profile says: `gpufarm-gpu-profile FILE` prints lines of words. It exits with 1 where the
 * file is no profile. `gpufarm-gpu-profile --boot FILE` changes it as a boot changes GPUs, `--fabric-ready FILE` and
 * `--fabric-waiting FILE` as Fabric Manager does when it has set the NVSwitches up and when it ends. */
#include "mig.h"
#include "profile.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *word(const char *value)
{
    return value ? value : "-";
}

/* A GPU whose NVSwitches are set up says what its model does. One that never joins a fabric says nothing, whatever runs. */
static int set_fabric(const char *path, bool ready)
{
    static const char *const waiting[][2] = {
        {"state", "In Progress"}, {"status", "N/A"}, {"cliqueId", "N/A"}, {"clusterUuid", "N/A"}};
    struct sim_edit *edit = sim_edit_begin(path);
    const struct sim_profile *profile;
    char key[32];

    if (!edit)
        return errno;
    profile = sim_edit_profile(edit);
    for (unsigned int i = 0; i < profile->gpu_count; i++) {
        if (!sim_gpu_value(&profile->gpus[i], "fabric.state"))
            continue;
        if (ready)
            sim_edit_set(edit, i, "fabric", NULL);
        for (size_t j = 0; !ready && j < sizeof(waiting) / sizeof(*waiting); j++) {
            snprintf(key, sizeof(key), "fabric.%s", waiting[j][0]);
            sim_edit_set(edit, i, key, waiting[j][1]);
        }
    }
    return sim_edit_end(edit, true);
}

static bool has_nvswitches(const char *path)
{
    struct sim_profile profile = {0};

    return sim_read(path, &profile) && sim_node_value(&profile, "nvswitches.#");
}

/* As /sys/bus/pci has it: 00000000:1B:00.0 and 233010DE become 0000:1b:00.0, 10de and 2330. */
static void print_pci(const char *bus, const char *id, const char *class)
{
    if (!bus || strlen(bus) < 4 || !id || strlen(id) != 8)
        return;
    printf("pci ");
    for (const char *at = bus + 4; *at; at++)
        putchar(tolower((unsigned char)*at));
    printf(" %c%c%c%c %c%c%c%c %s\n", tolower(id[4]), tolower(id[5]), tolower(id[6]), tolower(id[7]), tolower(id[0]),
           tolower(id[1]), tolower(id[2]), tolower(id[3]), class);
}

int main(int argc, char **argv)
{
    struct sim_profile profile = {0};
    const char *switches;

    if (argc == 3 && *argv[1] == '-') {
        bool boot = !strcmp(argv[1], "--boot"), ready = !strcmp(argv[1], "--fabric-ready");
        int failed = boot ? mig_boot(argv[2])
                          : ready || !strcmp(argv[1], "--fabric-waiting") ? set_fabric(argv[2], ready) : EINVAL;

        if (boot && !failed && has_nvswitches(argv[2]))
            failed = set_fabric(argv[2], false);
        if (failed)
            fprintf(stderr, "gpufarm-gpu-profile: %s was not changed: %s\n", argv[2], strerror(failed));
        return failed ? 1 : 0;
    }
    if (argc != 2) {
        fprintf(stderr, "usage: gpufarm-gpu-profile [--boot | --fabric-ready | --fabric-waiting] FILE\n");
        return 2;
    }
    if (!sim_read(argv[1], &profile)) {
        fprintf(stderr, "gpufarm-gpu-profile: %s is not a GPU profile: a YAML mapping that ends with \"...\", whose "
                        "GPUs each have a uuid and a model that exists.\n", argv[1]);
        return 1;
    }
    printf("platform %s\n", sim_is_wsl(&profile) ? "wsl" : "linux");
    printf("driver_version %s\n", word(sim_node_value(&profile, "driver.version")));
    printf("kernel_version %s\n", sim_node_value(&profile, "driver.kernel_version")
                                      ? sim_node_value(&profile, "driver.kernel_version")
                                      : sim_library_version(&profile));
    printf("library_version %s\n", sim_library_version(&profile));
    printf("store_path %s\n", word(sim_node_value(&profile, "driver.store_path")));
    for (unsigned int i = 0; i < profile.gpu_count; i++) {
        const struct sim_gpu *gpu = &profile.gpus[i];
        struct mig_layout layout;
        unsigned int minor = sim_gpu_minor(&profile, i);

        printf("gpu %u %s %s %s\n", minor, word(sim_gpu_value(gpu, "pci.pci_bus_id")), word(sim_gpu_value(gpu, "uuid")),
               word(sim_gpu_value(gpu, "product_name")));
        print_pci(sim_gpu_value(gpu, "pci.pci_bus_id"), sim_gpu_value(gpu, "pci.pci_device_id"), "030200");
        if (sim_gpu_value(gpu, "mig_mode.current_mig"))
            printf("mig_capable %u\n", minor);
        mig_layout_of(gpu, &layout);
        for (unsigned int j = 0; j < layout.gpu_count; j++)
            printf("gpu_instance %u %u\n", minor, layout.gpu[j].id);
        for (unsigned int j = 0; j < layout.compute_count; j++)
            printf("compute_instance %u %u %u\n", minor, layout.compute[j].gpu_instance, layout.compute[j].id);
    }
    switches = sim_node_value(&profile, "nvswitches.#");
    for (unsigned long i = 0; i < strtoul(word(switches), NULL, 10); i++) {
        char bus[64], id[64];

        snprintf(bus, sizeof(bus), "nvswitches.%lu.pci_bus_id", i);
        snprintf(id, sizeof(id), "nvswitches.%lu.pci_device_id", i);
        printf("nvswitch %lu %s\n", i, word(sim_node_value(&profile, bus)));
        print_pci(sim_node_value(&profile, bus), sim_node_value(&profile, id), "068000");
    }
    return 0;
}
