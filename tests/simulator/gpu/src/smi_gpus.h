/* What all commands of nvidia-smi share: the library, the GPUs that a command is about, and what they say. */
#ifndef GPUFARM_SMI_GPUS_H
#define GPUFARM_SMI_GPUS_H

#include "nvml.h"

#include <stdbool.h>

#define VALUE 256
#define MAX_GPUS 64
#define EXIT_INVALID 2
#define EXIT_NOT_FOUND 6
#define EXIT_OTHER 255

struct calls {
    nvmlReturn_t (*init)(void);
    nvmlReturn_t (*shutdown)(void);
    const char *(*error)(nvmlReturn_t);
    nvmlReturn_t (*count)(unsigned int *);
    nvmlReturn_t (*by_index)(unsigned int, nvmlDevice_t *);
    nvmlReturn_t (*mig_by_index)(nvmlDevice_t, unsigned int, nvmlDevice_t *);
    nvmlReturn_t (*reasons)(nvmlDevice_t, unsigned long long *);
    nvmlReturn_t (*supported_reasons)(nvmlDevice_t, unsigned long long *);
    nvmlReturn_t (*common_ancestor)(nvmlDevice_t, nvmlDevice_t, unsigned int *);
    nvmlReturn_t (*set_persistence)(nvmlDevice_t, unsigned int);
    nvmlReturn_t (*set_mig_mode)(nvmlDevice_t, unsigned int, nvmlReturn_t *);
    nvmlReturn_t (*gpu_instances)(nvmlDevice_t, unsigned int, nvmlGpuInstance_t *, unsigned int *);
    nvmlReturn_t (*gpu_instance_info)(nvmlGpuInstance_t, nvmlGpuInstanceInfo_t *);
    nvmlReturn_t (*gpu_instance_room)(nvmlDevice_t, unsigned int, unsigned int *);
    nvmlReturn_t (*placements)(nvmlDevice_t, unsigned int, nvmlInstancePlacement_t *, unsigned int *);
    nvmlReturn_t (*create_gpu_instance)(nvmlDevice_t, unsigned int, nvmlGpuInstance_t *);
    nvmlReturn_t (*place_gpu_instance)(nvmlDevice_t, unsigned int, const nvmlInstancePlacement_t *, nvmlGpuInstance_t *);
    nvmlReturn_t (*destroy_gpu_instance)(nvmlGpuInstance_t);
    nvmlReturn_t (*compute_instances)(nvmlGpuInstance_t, unsigned int, nvmlComputeInstance_t *, unsigned int *);
    nvmlReturn_t (*compute_info)(nvmlComputeInstance_t, nvmlComputeInstanceInfo_t *);
    nvmlReturn_t (*compute_profile)(nvmlGpuInstance_t, unsigned int, unsigned int, nvmlComputeInstanceProfileInfo_t *);
    nvmlReturn_t (*compute_room)(nvmlGpuInstance_t, unsigned int, unsigned int *);
    nvmlReturn_t (*create_compute_instance)(nvmlGpuInstance_t, unsigned int, nvmlComputeInstance_t *);
    nvmlReturn_t (*destroy_compute_instance)(nvmlComputeInstance_t);
    nvmlReturn_t (*reset)(nvmlDevice_t);
    nvmlReturn_t (*query)(nvmlDevice_t, const char *, char *, unsigned int);
};

struct gpu {
    unsigned int index;
    nvmlDevice_t device;
    nvmlReturn_t result; /* why there is no device */
};

extern struct calls nvml;
extern struct gpu gpus[MAX_GPUS]; /* those that the command is about */
extern unsigned int gpu_count;

/* What the library has at a key, written with a format, or N/A. */
const char *ask(nvmlDevice_t device, char *buffer, const char *format, ...) __attribute__((format(printf, 3, 4)));
bool known(const char *value);
unsigned int list_length(nvmlDevice_t device, const char *key);
int exit_code(nvmlReturn_t result);
/* Fill `gpus` by a list of -i, and open them; what they return, if not 0, is the exit code. */
int choose(const char *ids);
int open_gpus(void);
int not_simulated(const char *what);

/* `nvidia-smi mig ...`, and -mig. */
int smi_mig(int argc, char **argv);
int smi_set_mig_mode(const char *argument);

#endif
