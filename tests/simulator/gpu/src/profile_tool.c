/* Tells shell scripts what a profile says: `gpufarm-gpu-profile FILE` prints lines of words. It exits with 1 where the
 * file is no profile. */
#include "profile.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *word(const char *value)
{
    return value ? value : "-";
}

int main(int argc, char **argv)
{
    struct sim_profile profile = {0};

    if (argc != 2) {
        fprintf(stderr, "usage: gpufarm-gpu-profile FILE\n");
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
        const char *count = sim_gpu_value(gpu, "mig_devices.#"), *mode = sim_gpu_value(gpu, "mig_mode.current_mig");
        unsigned int minor = sim_gpu_minor(&profile, i);

        printf("gpu %u %s %s %s\n", minor, word(sim_gpu_value(gpu, "pci.pci_bus_id")), word(sim_gpu_value(gpu, "uuid")),
               word(sim_gpu_value(gpu, "product_name")));
        if (mode)
            printf("mig_capable %u\n", minor);
        for (unsigned long j = 0; mode && !strcmp(mode, "Enabled") && count && j < strtoul(count, NULL, 10); j++) {
            char key[64], ci_key[64];

            snprintf(key, sizeof(key), "mig_devices.%lu.gpu_instance_id", j);
            snprintf(ci_key, sizeof(ci_key), "mig_devices.%lu.compute_instance_id", j);
            printf("mig %u %s %s\n", minor, word(sim_gpu_value(gpu, key)), word(sim_gpu_value(gpu, ci_key)));
        }
    }
    return 0;
}
