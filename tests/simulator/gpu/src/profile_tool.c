/* Tells shell scripts what a profile says: `gpufarm-gpu-profile FILE` prints lines of words. It exits with 1 where the
 * file is no profile. `gpufarm-gpu-profile --boot FILE` changes it as a boot changes GPUs. */
#include "mig.h"
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

    if (argc == 3 && !strcmp(argv[1], "--boot")) {
        int failed = mig_boot(argv[2]);

        if (failed)
            fprintf(stderr, "gpufarm-gpu-profile: %s was not changed: %s\n", argv[2], strerror(failed));
        return failed ? 1 : 0;
    }
    if (argc != 2) {
        fprintf(stderr, "usage: gpufarm-gpu-profile [--boot] FILE\n");
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
        if (sim_gpu_value(gpu, "mig_mode.current_mig"))
            printf("mig_capable %u\n", minor);
        mig_layout_of(gpu, &layout);
        for (unsigned int j = 0; j < layout.gpu_count; j++)
            printf("gpu_instance %u %u\n", minor, layout.gpu[j].id);
        for (unsigned int j = 0; j < layout.compute_count; j++)
            printf("compute_instance %u %u %u\n", minor, layout.compute[j].gpu_instance, layout.compute[j].id);
    }
    return 0;
}
