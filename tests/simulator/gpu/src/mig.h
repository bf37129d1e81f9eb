/* What may be cut out of a GPU: GPU instances by placement, compute instances in them, and how the profile keeps both. */
#ifndef GPUFARM_MIG_H
#define GPUFARM_MIG_H

#include "profile.h"

#include <stdbool.h>

#define MIG_MEMORY_SLICES 8
#define MIG_MAX_INSTANCES 16
#define MIG_MAX_COMPUTE 64

/* One entry of mig_profiles. */
struct mig_profile {
    const char *name;
    unsigned int kind; /* NVML's number of the kind, 0 for one slice */
    unsigned int id, compute_id;
    unsigned int slices, size, instances;
    unsigned int starts[MIG_MEMORY_SLICES], start_count;
};

struct mig_gpu_instance {
    unsigned int id, start;
    unsigned int profile; /* number of the entry in mig_profiles */
};

struct mig_compute_instance {
    unsigned int gpu_instance, id;
    unsigned int start, slices; /* within the GPU instance */
    char uuid[64];
};

struct mig_layout {
    struct mig_gpu_instance gpu[MIG_MAX_INSTANCES];
    struct mig_compute_instance compute[MIG_MAX_COMPUTE];
    unsigned int gpu_count, compute_count;
};

/* What a change ends with; the numbers are NVML's. */
enum mig_result {
    MIG_DONE = 0,
    MIG_INVALID = 2,
    MIG_NOT_SUPPORTED = 3,
    MIG_NO_PERMISSION = 4,
    MIG_NOT_FOUND = 6,
    MIG_IN_USE = 19,
    MIG_NO_ROOM = 23,
};

unsigned int mig_profile_count(const struct sim_gpu *gpu);
bool mig_profile_at(const struct sim_gpu *gpu, unsigned int number, struct mig_profile *profile);
bool mig_is_enabled(const struct sim_gpu *gpu);

/* Both lists in the order of their IDs; none where MIG is off. */
void mig_layout_of(const struct sim_gpu *gpu, struct mig_layout *layout);
const struct mig_gpu_instance *mig_find(const struct mig_layout *layout, unsigned int id);

/* How many more instances of a profile there is room for. */
unsigned int mig_room(const struct sim_gpu *gpu, const struct mig_layout *layout, unsigned int profile);

/* Compute instances in a GPU instance of so many slices: whether there are such of `part` slices, their profile's ID, how
 * many there can be, and how many more. */
bool mig_compute_size(const struct mig_profile *profile, unsigned int part);
unsigned int mig_compute_id(const struct mig_profile *profile, unsigned int part);
unsigned int mig_compute_total(const struct mig_profile *profile, unsigned int part);
unsigned int mig_compute_room(const struct mig_layout *layout, const struct mig_gpu_instance *instance,
                              const struct mig_profile *profile, unsigned int part);

/* Changes of the node's profile, by the UUID of the GPU. `start` MIG_ANYWHERE lets the driver choose; the new ID comes
 * back in `id`. */
#define MIG_ANYWHERE (-1)
/* MIG_DONE and `pending` set: the mode is that of the next reset. */
enum mig_result mig_set_mode(const char *uuid, bool enable, bool *pending);
enum mig_result mig_create_gpu_instance(const char *uuid, unsigned int profile_id, int start, unsigned int *id);
enum mig_result mig_destroy_gpu_instance(const char *uuid, unsigned int id);
enum mig_result mig_create_compute_instance(const char *uuid, unsigned int gpu_instance, unsigned int profile_id,
                                            unsigned int *id);
enum mig_result mig_destroy_compute_instance(const char *uuid, unsigned int gpu_instance, unsigned int id);
/* A reset makes a pending mode current, and leaves no instance and no volatile error. */
enum mig_result mig_reset(const char *uuid);

/* What a boot leaves of all that, in the profile at `path`: 0 or an errno. */
int mig_boot(const char *path);

#endif
