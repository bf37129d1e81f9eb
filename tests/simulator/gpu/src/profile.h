/* The profile of one node: what every double in this folder answers from. */
#ifndef GPUFARM_PROFILE_H
#define GPUFARM_PROFILE_H

#include <stdbool.h>
#include <stddef.h>

#define SIM_MAX_GPUS 16
#define SIM_PATH_MAX 4096

/* The driver as a process meets it when it initialises NVML. */
enum sim_driver {
    SIM_DRIVER_LOADED,
    SIM_DRIVER_UNLOADED, /* no kernel module */
    SIM_DRIVER_MISMATCH, /* library and kernel module of different versions */
    SIM_DRIVER_BLOCKED,  /* no control node; under WSL the GPU is not offered to this machine */
    SIM_DRIVER_DENIED,   /* the control node is there but may not be opened */
};

/* One flat map: "fb_memory_usage.total" -> "81559 MiB". Lists become "key.0", "key.1", ... and "key.#". */
struct sim_pair {
    char *key;
    char *value;
};

struct sim_map {
    struct sim_pair *pairs;
    size_t count;
    size_t room;
};

struct sim_gpu {
    struct sim_map values; /* the model's data, overridden by the GPU's own and by what was set at run time */
};

struct sim_profile {
    struct sim_map node;
    struct sim_gpu gpus[SIM_MAX_GPUS];
    unsigned int gpu_count;
};

/* Reads the profile again if it changed. A file that is being rewritten never replaces the state that was read
 * before it. Returns the current state: empty (no GPU, no driver) where there never was a profile. */
const struct sim_profile *sim_load(void);

/* Reads one file, whatever GPUFARM_SIM_ROOT says; false where it is not a whole profile. */
bool sim_read(const char *path, struct sim_profile *profile);

/* The value of a key, or NULL where the profile has none or says "N/A". */
const char *sim_node_value(const struct sim_profile *profile, const char *key);
const char *sim_gpu_value(const struct sim_gpu *gpu, const char *key);
/* The same without the reading of "N/A": a section that is N/A as a whole has its value at the section's key. */
const char *sim_map_get(const struct sim_map *map, const char *key);

enum sim_driver sim_driver_state(const struct sim_profile *profile);
bool sim_is_wsl(const struct sim_profile *profile);
/* The version of the user-space libraries; under WSL it is not the version of the Windows driver. */
const char *sim_library_version(const struct sim_profile *profile);

/* Whether the GPU's device node exists here, and why it cannot be used, as an errno; nothing is opened. */
int sim_gpu_error(const struct sim_profile *profile, unsigned int gpu);
bool sim_gpu_visible(const struct sim_profile *profile, unsigned int gpu);
unsigned int sim_gpu_minor(const struct sim_profile *profile, unsigned int gpu);

/* Whether the capability node of a GPU instance exists. */
bool sim_gpu_instance_visible(const struct sim_gpu *gpu, unsigned int id);

/* Whether the capability nodes of one entry of mig_devices exist: by them a container gets one MIG device and not the
 * others of the GPU. */
bool sim_mig_visible(const struct sim_gpu *gpu, unsigned int mig);

/* Remembers a setting that a command made until the node restarts. Returns 0 or an errno. */
int sim_set_state(const char *uuid, const char *key, const char *value);

/* A profile that is being rewritten: nobody else rewrites it until sim_edit_end. NULL, and errno, where it cannot be.
 * `path` NULL is the node's own profile. */
struct sim_edit;
struct sim_edit *sim_edit_begin(const char *path);
/* As it was at the beginning. */
const struct sim_profile *sim_edit_profile(const struct sim_edit *edit);
/* Sets a GPU's own value at a dotted key; NULL removes what the GPU itself has there. */
bool sim_edit_set(struct sim_edit *edit, unsigned int gpu, const char *key, const char *value);
/* Makes a GPU's own list an empty one, and adds a mapping to it. */
bool sim_edit_list(struct sim_edit *edit, unsigned int gpu, const char *key);
bool sim_edit_add(struct sim_edit *edit, unsigned int gpu, const char *key, const struct sim_pair *pairs, size_t count);
/* Writes the profile, if wanted, and lets others at it. Returns 0 or an errno. */
int sim_edit_end(struct sim_edit *edit, bool write);

/* Joins GPUFARM_SIM_ROOT (tests) and an absolute path. */
void sim_path(char *out, size_t size, const char *path);

#endif
