#define _GNU_SOURCE 1
#include "mig.h"

#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define CAPABILITY_MAJOR 511

/* -- what the profile says ---------------------------------------------------------------------------------------- */

static const char *text(const struct sim_gpu *gpu, const char *format, ...)
{
    char key[256];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(key, sizeof(key), format, arguments);
    va_end(arguments);
    return sim_gpu_value(gpu, key);
}

static unsigned int whole(const char *value, unsigned int otherwise)
{
    return value ? (unsigned int)strtoul(value, NULL, 10) : otherwise;
}

static bool is(const char *value, const char *wanted)
{
    return value && !strcmp(value, wanted);
}

unsigned int mig_profile_count(const struct sim_gpu *gpu)
{
    return whole(sim_gpu_value(gpu, "mig_profiles.#"), 0);
}

bool mig_profile_at(const struct sim_gpu *gpu, unsigned int number, struct mig_profile *profile)
{
    memset(profile, 0, sizeof(*profile));
    profile->name = text(gpu, "mig_profiles.%u.name", number);
    profile->kind = whole(text(gpu, "mig_profiles.%u.gi_profile", number), 0);
    profile->id = whole(text(gpu, "mig_profiles.%u.gi_profile_id", number), 0);
    profile->compute_id = whole(text(gpu, "mig_profiles.%u.ci_profile", number), 0);
    profile->slices = whole(text(gpu, "mig_profiles.%u.slices", number), 1);
    profile->size = whole(text(gpu, "mig_profiles.%u.placement_size", number), 1);
    profile->instances = whole(text(gpu, "mig_profiles.%u.instances", number), 1);
    profile->start_count = whole(text(gpu, "mig_profiles.%u.placements.#", number), 0);
    if (profile->start_count > MIG_MEMORY_SLICES)
        profile->start_count = MIG_MEMORY_SLICES;
    for (unsigned int i = 0; i < profile->start_count; i++)
        profile->starts[i] = whole(text(gpu, "mig_profiles.%u.placements.%u", number, i), 0);
    return profile->name != NULL;
}

static int find_profile(const struct sim_gpu *gpu, const char *name, unsigned int id, struct mig_profile *profile)
{
    for (unsigned int i = 0; i < mig_profile_count(gpu); i++)
        if (mig_profile_at(gpu, i, profile) && (name ? !strcmp(profile->name, name) : profile->id == id))
            return (int)i;
    return -1;
}

bool mig_is_enabled(const struct sim_gpu *gpu)
{
    return is(sim_gpu_value(gpu, "mig_mode.current_mig"), "Enabled");
}

const struct mig_gpu_instance *mig_find(const struct mig_layout *layout, unsigned int id)
{
    for (unsigned int i = 0; i < layout->gpu_count; i++)
        if (layout->gpu[i].id == id)
            return &layout->gpu[i];
    return NULL;
}

static void add_gpu_instance(const struct sim_gpu *gpu, struct mig_layout *layout, const char *list,
                             unsigned int number)
{
    const char *name = text(gpu, "%s.%u.profile", list, number);
    const char *id = text(gpu, "%s.%u.gpu_instance_id", list, number);
    struct mig_profile profile;
    int made_from = name ? find_profile(gpu, name, 0, &profile) : -1;

    if (!id || made_from < 0 || mig_find(layout, whole(id, 0)) || layout->gpu_count == MIG_MAX_INSTANCES)
        return;
    layout->gpu[layout->gpu_count++] = (struct mig_gpu_instance){
        .id = whole(id, 0),
        .start = whole(text(gpu, "%s.%u.placement", list, number), 0),
        .profile = (unsigned int)made_from,
    };
}

static int by_gpu_instance(const void *a, const void *b)
{
    const struct mig_gpu_instance *first = a, *second = b;

    return (int)first->id - (int)second->id;
}

static int by_compute_instance(const void *a, const void *b)
{
    const struct mig_compute_instance *first = a, *second = b;
    int parents = (int)first->gpu_instance - (int)second->gpu_instance;

    return parents ? parents : (int)first->id - (int)second->id;
}

void mig_layout_of(const struct sim_gpu *gpu, struct mig_layout *layout)
{
    unsigned int devices = whole(sim_gpu_value(gpu, "mig_devices.#"), 0);

    memset(layout, 0, sizeof(*layout));
    if (!mig_is_enabled(gpu))
        return;
    for (unsigned int i = 0; i < whole(sim_gpu_value(gpu, "gpu_instances.#"), 0); i++)
        add_gpu_instance(gpu, layout, "gpu_instances", i);
    for (unsigned int i = 0; i < devices && layout->compute_count < MIG_MAX_COMPUTE; i++) {
        struct mig_compute_instance *compute = &layout->compute[layout->compute_count];
        const struct mig_gpu_instance *instance;
        struct mig_profile profile;

        add_gpu_instance(gpu, layout, "mig_devices", i);
        instance = mig_find(layout, whole(text(gpu, "mig_devices.%u.gpu_instance_id", i), 0));
        if (!instance || !mig_profile_at(gpu, instance->profile, &profile))
            continue;
        compute->gpu_instance = instance->id;
        compute->id = whole(text(gpu, "mig_devices.%u.compute_instance_id", i), 0);
        compute->start = whole(text(gpu, "mig_devices.%u.compute_start", i), 0);
        compute->slices = whole(text(gpu, "mig_devices.%u.compute_slices", i), profile.slices);
        snprintf(compute->uuid, sizeof(compute->uuid), "%s", text(gpu, "mig_devices.%u.uuid", i));
        layout->compute_count++;
    }
    qsort(layout->gpu, layout->gpu_count, sizeof(*layout->gpu), by_gpu_instance);
    qsort(layout->compute, layout->compute_count, sizeof(*layout->compute), by_compute_instance);
}

/* -- room for GPU instances --------------------------------------------------------------------------------------- */

static unsigned int bits(unsigned int start, unsigned int size)
{
    return ((1u << size) - 1) << start;
}

/* As many as the whole GPU is: eight, and four of an A30. */
static unsigned int memory_slices(const struct sim_gpu *gpu)
{
    struct mig_profile profile;
    unsigned int most = 1;

    for (unsigned int i = 0; i < mig_profile_count(gpu); i++)
        if (mig_profile_at(gpu, i, &profile) && profile.size > most)
            most = profile.size;
    return most;
}

/* What a layout takes of the GPU: memory slices as bits, compute slices, the media engines, and how many are of one
 * profile. */
struct taken {
    unsigned int memory, slices;
    bool media;
    unsigned int of[MIG_MAX_INSTANCES];
};

static bool with_media(const struct mig_profile *profile)
{
    return strstr(profile->name, "+me") != NULL;
}

static void take(struct taken *taken, const struct mig_profile *profile, unsigned int number, unsigned int start)
{
    taken->memory |= bits(start, profile->size);
    taken->slices += profile->slices;
    taken->media |= with_media(profile);
    taken->of[number % MIG_MAX_INSTANCES]++;
}

static struct taken taken_by(const struct sim_gpu *gpu, const struct mig_layout *layout)
{
    struct taken taken = {0};
    struct mig_profile profile;

    for (unsigned int i = 0; i < layout->gpu_count; i++)
        if (mig_profile_at(gpu, layout->gpu[i].profile, &profile))
            take(&taken, &profile, layout->gpu[i].profile, layout->gpu[i].start);
    return taken;
}

static bool fits(const struct sim_gpu *gpu, const struct taken *taken, const struct mig_profile *profile,
                 unsigned int number, unsigned int start)
{
    return !(taken->memory & bits(start, profile->size)) && !(taken->media && with_media(profile)) &&
           taken->slices + profile->slices <= whole(sim_gpu_value(gpu, "max_mig_devices"), 7) &&
           taken->of[number % MIG_MAX_INSTANCES] < profile->instances;
}

static unsigned int room_beside(const struct sim_gpu *gpu, struct taken taken, unsigned int number)
{
    struct mig_profile profile;
    unsigned int count = 0;

    if (!mig_profile_at(gpu, number, &profile))
        return 0;
    for (unsigned int i = 0; i < profile.start_count; i++)
        if (fits(gpu, &taken, &profile, number, profile.starts[i])) {
            take(&taken, &profile, number, profile.starts[i]);
            count++;
        }
    return count;
}

unsigned int mig_room(const struct sim_gpu *gpu, const struct mig_layout *layout, unsigned int profile)
{
    return room_beside(gpu, taken_by(gpu, layout), profile);
}

/* Where the driver puts an instance: where it leaves most room for others. That is what the examples of NVIDIA's guide
 * come to, but for the one-slice profile with more memory, which takes the last memory slices last. Returns -1 where there
 * is no room. */
static int choose_start(const struct sim_gpu *gpu, const struct taken *taken, const struct mig_profile *profile,
                        unsigned int number)
{
    int best = -1, best_room = -1;

    for (unsigned int i = 0; i < profile->start_count; i++) {
        unsigned int start = profile->starts[i];
        struct taken after = *taken;
        int room = 0;

        if (!fits(gpu, taken, profile, number, start))
            continue;
        take(&after, profile, number, start);
        for (unsigned int other = 0; other < mig_profile_count(gpu); other++)
            room += (int)room_beside(gpu, after, other);
        if (profile->slices == 1 && profile->size == 2 && start + profile->size == memory_slices(gpu))
            room = 0;
        if (room > best_room) {
            best_room = room;
            best = (int)start;
        }
    }
    return best;
}

/* IDs number the whole, the halves, the quarters and the eighths of the GPU through. */
static unsigned int instance_id(const struct sim_gpu *gpu, const struct mig_profile *profile, unsigned int start)
{
    return memory_slices(gpu) / profile->size - 1 + start / profile->size;
}

/* -- room for compute instances ----------------------------------------------------------------------------------- */

bool mig_compute_size(const struct mig_profile *profile, unsigned int part)
{
    if (part == profile->slices)
        return true;
    return part >= 1 && part < profile->slices && part <= 4 && !(part == 3 && profile->slices == 4);
}

unsigned int mig_compute_id(const struct mig_profile *profile, unsigned int part)
{
    return part == profile->slices ? profile->compute_id : part - 1;
}

unsigned int mig_compute_total(const struct mig_profile *profile, unsigned int part)
{
    return profile->slices / part;
}

/* Counts the places that are free beside each other, and gives the first. */
static unsigned int compute_places(const struct mig_layout *layout, unsigned int gpu_instance,
                                   const struct mig_profile *profile, unsigned int part, unsigned int *first)
{
    unsigned int count = 0, taken = 0;

    for (unsigned int i = 0; i < layout->compute_count; i++)
        if (layout->compute[i].gpu_instance == gpu_instance)
            taken |= bits(layout->compute[i].start, layout->compute[i].slices);
    for (unsigned int start = 0; start + part <= profile->slices; start++)
        if (!(taken & bits(start, part))) {
            taken |= bits(start, part);
            if (!count++)
                *first = start;
        }
    return count;
}

unsigned int mig_compute_room(const struct mig_layout *layout, const struct mig_gpu_instance *instance,
                              const struct mig_profile *profile, unsigned int part)
{
    unsigned int first;

    return compute_places(layout, instance->id, profile, part, &first);
}

/* -- who uses it -------------------------------------------------------------------------------------------------- */

/* Whether a process of the profile is on the GPU as a whole. */
static bool gpu_in_use(const struct sim_gpu *gpu)
{
    for (unsigned int i = 0; i < whole(sim_gpu_value(gpu, "processes.#"), 0); i++)
        if (!text(gpu, "processes.%u.gpu_instance_id", i))
            return true;
    return false;
}

static bool anybody_on(const struct sim_gpu *gpu)
{
    return whole(sim_gpu_value(gpu, "processes.#"), 0) > 0;
}

static bool compute_in_use(const struct sim_gpu *gpu, unsigned int gpu_instance, unsigned int id)
{
    for (unsigned int i = 0; i < whole(sim_gpu_value(gpu, "processes.#"), 0); i++) {
        const char *gi = text(gpu, "processes.%u.gpu_instance_id", i);
        const char *ci = text(gpu, "processes.%u.compute_instance_id", i);

        if (gi && whole(gi, 0) == gpu_instance && (!ci || whole(ci, 0) == id))
            return true;
    }
    return false;
}

/* -- capabilities ------------------------------------------------------------------------------------------------- */

/* Where the node's /proc/driver is; under GPUFARM_SIM_ROOT and without a mount it may be nowhere. */
static bool capabilities_folder(char *out, size_t size)
{
    static const char *const places[] = {"/proc/driver", "/run/gpufarm-simulator/proc"};
    char folder[SIM_PATH_MAX];
    struct stat status;

    for (size_t i = 0; i < sizeof(places) / sizeof(*places); i++) {
        sim_path(out, size, places[i]);
        snprintf(folder, sizeof(folder), "%.4000s/nvidia/capabilities", out);
        if (!stat(folder, &status) && S_ISDIR(status.st_mode))
            return true;
    }
    return false;
}

static unsigned int capability_minor(unsigned int gpu, const struct mig_compute_instance *at, bool compute)
{
    unsigned int first = 3 + gpu * 135 + at->gpu_instance * 9;

    return compute ? first + 1 + at->id : first;
}

static void capability_path(char *out, size_t size, unsigned int gpu, const struct mig_compute_instance *at,
                            bool compute)
{
    if (compute)
        snprintf(out, size, "gpu%u/mig/gi%u/ci%u", gpu, at->gpu_instance, at->id);
    else
        snprintf(out, size, "gpu%u/mig/gi%u", gpu, at->gpu_instance);
}

static void capability_file(unsigned int gpu, const struct mig_compute_instance *at, bool compute, bool present)
{
    char proc[SIM_PATH_MAX], folder[SIM_PATH_MAX + 128], file[SIM_PATH_MAX + 160], place[96];
    FILE *out;

    if (!capabilities_folder(proc, sizeof(proc)))
        return;
    capability_path(place, sizeof(place), gpu, at, compute);
    snprintf(folder, sizeof(folder), "%s/nvidia/capabilities/%s", proc, place);
    snprintf(file, sizeof(file), "%s/access", folder);
    if (!present) {
        unlink(file);
        rmdir(folder);
        return;
    }
    mkdir(folder, 0555);
    out = fopen(file, "we");
    if (!out)
        return;
    fprintf(out, "DeviceFileMinor: %u\nDeviceFileMode: 292\nDeviceFileModify: 1\n", capability_minor(gpu, at, compute));
    fclose(out);
}

/* The table of all minors is written anew, line by line. */
static void capability_line(unsigned int gpu, const struct mig_compute_instance *at, bool compute, bool present)
{
    char proc[SIM_PATH_MAX], path[SIM_PATH_MAX + 64], name[64], line[128], *kept = NULL;
    size_t length = 0;
    FILE *table, *out;

    if (!capabilities_folder(proc, sizeof(proc)))
        return;
    snprintf(path, sizeof(path), "%s/nvidia-caps/mig-minors", proc);
    if (compute)
        snprintf(name, sizeof(name), "gpu%u/gi%u/ci%u/access ", gpu, at->gpu_instance, at->id);
    else
        snprintf(name, sizeof(name), "gpu%u/gi%u/access ", gpu, at->gpu_instance);
    out = open_memstream(&kept, &length);
    table = fopen(path, "re");
    while (out && table && fgets(line, sizeof(line), table))
        if (strncmp(line, name, strlen(name)))
            fputs(line, out);
    if (table)
        fclose(table);
    if (out && present)
        fprintf(out, "%s%u\n", name, capability_minor(gpu, at, compute));
    if (out)
        fclose(out);
    table = kept ? fopen(path, "we") : NULL;
    if (table) {
        fwrite(kept, 1, length, table);
        fclose(table);
    }
    free(kept);
}

/* What the kernel module and nvidia-modprobe do; the unit tests have plain files for device nodes. */
static void capability(unsigned int gpu, const struct mig_compute_instance *at, bool compute, bool present)
{
    unsigned int minor = capability_minor(gpu, at, compute);
    char device[64], path[SIM_PATH_MAX];

    snprintf(device, sizeof(device), "/dev/nvidia-caps/nvidia-cap%u", minor);
    sim_path(path, sizeof(path), device);
    unlink(path);
    if (present && mknod(path, (secure_getenv("GPUFARM_SIM_ROOT") ? S_IFREG : S_IFCHR) | 0444,
                         makedev(CAPABILITY_MAJOR, minor)) == 0)
        chmod(path, 0444);
    capability_file(gpu, at, compute, present);
    capability_line(gpu, at, compute, present);
}

/* From the capabilities of one layout to those of another. */
static void move_capabilities(unsigned int gpu, const struct mig_layout *before, const struct mig_layout *after)
{
    const struct mig_layout *const layouts[] = {before, after};

    /* Parents are made first and removed last. */
    for (int step = 0; step < 4; step++) {
        bool compute = step == 0 || step == 3, present = step > 1;
        const struct mig_layout *from = layouts[present], *other = layouts[!present];

        for (unsigned int i = 0; i < (compute ? from->compute_count : from->gpu_count); i++) {
            struct mig_compute_instance at = {.gpu_instance = compute ? 0 : from->gpu[i].id};
            bool in_both = false;

            if (compute)
                at = from->compute[i];
            else
                in_both = mig_find(other, at.gpu_instance) != NULL;
            for (unsigned int j = 0; compute && j < other->compute_count; j++)
                in_both |= other->compute[j].gpu_instance == at.gpu_instance && other->compute[j].id == at.id;
            if (!in_both)
                capability(gpu, &at, compute, present);
        }
    }
}

/* -- changes ------------------------------------------------------------------------------------------------------ */

/* Made from what the device is, so that a device that is made again has the UUID that it had. */
static void make_uuid(char *out, size_t size, const char *gpu, const struct mig_gpu_instance *instance,
                      const struct mig_compute_instance *compute)
{
    uint64_t half[2];
    char name[192];

    snprintf(name, sizeof(name), "%s/%u/%u/%u:%u/%u", gpu, instance->id, compute->id, instance->start, compute->start,
             compute->slices);
    for (int i = 0; i < 2; i++) {
        half[i] = 0xcbf29ce484222325u + (uint64_t)i;
        for (const char *at = name; *at; at++)
            half[i] = (half[i] ^ (unsigned char)*at) * 0x100000001b3u;
        half[i] = (half[i] ^ half[i] >> 31) * 0x9e3779b97f4a7c15u;
        half[i] ^= half[i] >> 29;
    }
    snprintf(out, size, "MIG-%08x-%04x-5%03x-%04x-%012llx", (unsigned int)(half[0] >> 32),
             (unsigned int)(half[0] >> 16) & 0xffff, (unsigned int)half[0] & 0xfff,
             ((unsigned int)(half[1] >> 48) & 0x3fff) | 0x8000, (unsigned long long)(half[1] & 0xffffffffffffu));
}

static bool write_layout(struct sim_edit *edit, unsigned int number, const struct sim_gpu *gpu,
                         const struct mig_layout *layout)
{
    char texts[7][64];
    struct mig_profile profile;
    bool good = sim_edit_list(edit, number, "gpu_instances") && sim_edit_list(edit, number, "mig_devices");

    for (unsigned int i = 0; good && i < layout->gpu_count; i++) {
        const struct mig_gpu_instance *instance = &layout->gpu[i];

        mig_profile_at(gpu, instance->profile, &profile);
        snprintf(texts[0], sizeof(texts[0]), "%u", instance->id);
        snprintf(texts[1], sizeof(texts[1]), "%u", instance->start);
        good = sim_edit_add(edit, number, "gpu_instances",
                            (struct sim_pair[]){{"profile", (char *)profile.name},
                                                {"gpu_instance_id", texts[0]},
                                                {"placement", texts[1]}},
                            3);
    }
    for (unsigned int i = 0; good && i < layout->compute_count; i++) {
        const struct mig_compute_instance *compute = &layout->compute[i];
        const struct mig_gpu_instance *instance = mig_find(layout, compute->gpu_instance);

        mig_profile_at(gpu, instance->profile, &profile);
        snprintf(texts[0], sizeof(texts[0]), "%u", instance->id);
        snprintf(texts[1], sizeof(texts[1]), "%u", compute->id);
        snprintf(texts[2], sizeof(texts[2]), "%u", instance->start);
        snprintf(texts[3], sizeof(texts[3]), "%u", compute->start);
        snprintf(texts[4], sizeof(texts[4]), "%u", compute->slices);
        good = sim_edit_add(edit, number, "mig_devices",
                            (struct sim_pair[]){{"uuid", (char *)compute->uuid},
                                                {"profile", (char *)profile.name},
                                                {"gpu_instance_id", texts[0]},
                                                {"compute_instance_id", texts[1]},
                                                {"placement", texts[2]},
                                                {"compute_start", texts[3]},
                                                {"compute_slices", texts[4]}},
                            compute->slices == profile.slices ? 5 : 7);
    }
    return good;
}

/* One change of one GPU, from the first look at it to the last capability. */
struct change {
    struct sim_edit *edit;
    const struct sim_gpu *gpu;
    unsigned int number; /* in the profile */
    struct mig_layout before, after;
};

static enum mig_result begin(struct change *change, const char *uuid)
{
    const struct sim_profile *profile;

    memset(change, 0, sizeof(*change));
    if (geteuid() != 0)
        return MIG_NO_PERMISSION;
    change->edit = sim_edit_begin(NULL);
    if (!change->edit)
        return MIG_NO_PERMISSION;
    profile = sim_edit_profile(change->edit);
    for (; change->number < profile->gpu_count; change->number++)
        if (is(sim_gpu_value(&profile->gpus[change->number], "uuid"), uuid)) {
            change->gpu = &profile->gpus[change->number];
            mig_layout_of(change->gpu, &change->before);
            change->after = change->before;
            return MIG_DONE;
        }
    sim_edit_end(change->edit, false);
    return MIG_NOT_FOUND;
}

static enum mig_result end(struct change *change, enum mig_result result)
{
    unsigned int minor = whole(sim_gpu_value(change->gpu, "minor_number"), change->number);
    int failed;

    if (result == MIG_DONE && sim_gpu_value(change->gpu, "mig_mode.current_mig") &&
        !write_layout(change->edit, change->number, change->gpu, &change->after))
        result = MIG_NO_PERMISSION;
    failed = sim_edit_end(change->edit, result == MIG_DONE);
    if (result != MIG_DONE)
        return result;
    if (failed)
        return MIG_NO_PERMISSION;
    move_capabilities(minor, &change->before, &change->after);
    return MIG_DONE;
}

/* The mode of the A100 and its kind is kept in the GPU; later ones have it from the driver. */
static bool keeps_mode(const struct sim_gpu *gpu)
{
    return is(sim_gpu_value(gpu, "product_architecture"), "Ampere");
}

static void write_mode(struct sim_edit *edit, unsigned int number, const char *now, const char *pending)
{
    sim_edit_set(edit, number, "mig_mode.current_mig", now);
    sim_edit_set(edit, number, "mig_mode.pending_mig", strcmp(now, pending) ? pending : NULL);
}

enum mig_result mig_set_mode(const char *uuid, bool enable, bool *pending)
{
    const char *wanted = enable ? "Enabled" : "Disabled", *now;
    enum mig_result result;
    struct change change;
    bool busy;

    *pending = false;
    result = begin(&change, uuid);
    if (result)
        return result;
    now = sim_gpu_value(change.gpu, "mig_mode.current_mig");
    if (!now)
        return end(&change, MIG_NOT_SUPPORTED);
    busy = strcmp(now, wanted) && (anybody_on(change.gpu) || change.before.gpu_count);
    /* Hopper and later switch at once or not at all. */
    if (busy && !keeps_mode(change.gpu))
        return end(&change, MIG_IN_USE);
    *pending = busy;
    write_mode(change.edit, change.number, busy ? now : wanted, wanted);
    return end(&change, MIG_DONE);
}

enum mig_result mig_create_gpu_instance(const char *uuid, unsigned int profile_id, int start, unsigned int *id)
{
    struct mig_profile profile;
    struct change change;
    struct taken taken;
    int number;
    enum mig_result result = begin(&change, uuid);

    if (result)
        return result;
    if (!mig_is_enabled(change.gpu))
        return end(&change, MIG_NOT_SUPPORTED);
    number = find_profile(change.gpu, NULL, profile_id, &profile);
    if (number < 0)
        return end(&change, MIG_INVALID);
    if (gpu_in_use(change.gpu))
        return end(&change, MIG_IN_USE);
    taken = taken_by(change.gpu, &change.before);
    if (start == MIG_ANYWHERE) {
        start = choose_start(change.gpu, &taken, &profile, (unsigned int)number);
    } else {
        bool known = false;

        for (unsigned int i = 0; i < profile.start_count; i++)
            known |= profile.starts[i] == (unsigned int)start;
        if (!known)
            return end(&change, MIG_INVALID);
        if (!fits(change.gpu, &taken, &profile, (unsigned int)number, (unsigned int)start))
            start = -1;
    }
    if (start < 0 || change.after.gpu_count == MIG_MAX_INSTANCES)
        return end(&change, MIG_NO_ROOM);
    *id = instance_id(change.gpu, &profile, (unsigned int)start);
    change.after.gpu[change.after.gpu_count++] = (struct mig_gpu_instance){
        .id = *id, .start = (unsigned int)start, .profile = (unsigned int)number};
    qsort(change.after.gpu, change.after.gpu_count, sizeof(*change.after.gpu), by_gpu_instance);
    return end(&change, MIG_DONE);
}

enum mig_result mig_destroy_gpu_instance(const char *uuid, unsigned int id)
{
    const struct mig_gpu_instance *instance;
    struct change change;
    size_t at;
    enum mig_result result = begin(&change, uuid);

    if (result)
        return result;
    instance = mig_find(&change.after, id);
    if (!instance)
        return end(&change, MIG_NOT_FOUND);
    for (unsigned int i = 0; i < change.before.compute_count; i++)
        if (change.before.compute[i].gpu_instance == id)
            return end(&change, MIG_IN_USE);
    at = (size_t)(instance - change.after.gpu);
    change.after.gpu_count--;
    memmove(&change.after.gpu[at], &change.after.gpu[at + 1],
            (change.after.gpu_count - at) * sizeof(*change.after.gpu));
    return end(&change, MIG_DONE);
}

enum mig_result mig_create_compute_instance(const char *uuid, unsigned int gpu_instance, unsigned int profile_id,
                                            unsigned int *id)
{
    const struct mig_gpu_instance *instance;
    struct mig_compute_instance made = {.gpu_instance = gpu_instance};
    struct mig_profile profile;
    struct change change;
    unsigned int part = 1;
    enum mig_result result = begin(&change, uuid);

    if (result)
        return result;
    instance = mig_find(&change.before, gpu_instance);
    if (!instance || !mig_profile_at(change.gpu, instance->profile, &profile))
        return end(&change, MIG_NOT_FOUND);
    while (part <= profile.slices &&
           !(mig_compute_size(&profile, part) && mig_compute_id(&profile, part) == profile_id))
        part++;
    if (part > profile.slices)
        return end(&change, MIG_INVALID);
    made.slices = part;
    if (!compute_places(&change.before, gpu_instance, &profile, part, &made.start) ||
        change.after.compute_count == MIG_MAX_COMPUTE)
        return end(&change, MIG_NO_ROOM);
    for (unsigned int i = 0; i < change.before.compute_count; i++)
        if (change.before.compute[i].gpu_instance == gpu_instance && change.before.compute[i].id == made.id)
            made.id++;
    make_uuid(made.uuid, sizeof(made.uuid), uuid, instance, &made);
    *id = made.id;
    change.after.compute[change.after.compute_count++] = made;
    qsort(change.after.compute, change.after.compute_count, sizeof(*change.after.compute), by_compute_instance);
    return end(&change, MIG_DONE);
}

enum mig_result mig_destroy_compute_instance(const char *uuid, unsigned int gpu_instance, unsigned int id)
{
    struct change change;
    enum mig_result result = begin(&change, uuid);

    if (result)
        return result;
    for (unsigned int i = 0; i < change.after.compute_count; i++) {
        if (change.after.compute[i].gpu_instance != gpu_instance || change.after.compute[i].id != id)
            continue;
        if (compute_in_use(change.gpu, gpu_instance, id))
            return end(&change, MIG_IN_USE);
        change.after.compute_count--;
        memmove(&change.after.compute[i], &change.after.compute[i + 1],
                (change.after.compute_count - i) * sizeof(*change.after.compute));
        return end(&change, MIG_DONE);
    }
    return end(&change, MIG_NOT_FOUND);
}

enum mig_result mig_reset(const char *uuid)
{
    static const char *const gone[] = {"ecc_errors.volatile", "remapped_rows.remapped_row_pending",
                                       "gpu_recovery_action"};
    const char *now, *pending;
    struct change change;
    enum mig_result result = begin(&change, uuid);

    if (result)
        return result;
    if (anybody_on(change.gpu))
        return end(&change, MIG_IN_USE);
    now = sim_gpu_value(change.gpu, "mig_mode.current_mig");
    pending = sim_gpu_value(change.gpu, "mig_mode.pending_mig");
    if (now && pending)
        write_mode(change.edit, change.number, pending, pending);
    if (is(sim_gpu_value(change.gpu, "state"), "reset"))
        sim_edit_set(change.edit, change.number, "state", NULL);
    for (size_t i = 0; i < sizeof(gone) / sizeof(*gone); i++)
        sim_edit_set(change.edit, change.number, gone[i], NULL);
    change.after = (struct mig_layout){0};
    return end(&change, MIG_DONE);
}

/* -- boot --------------------------------------------------------------------------------------------------------- */

/* A service of the node's own may make instances at each boot: those of mig_at_boot. */
static bool made_at_boot(struct sim_edit *edit, unsigned int number, const struct sim_gpu *gpu)
{
    static const char *const keys[] = {"uuid", "profile", "gpu_instance_id", "compute_instance_id", "placement"};
    unsigned int count = whole(sim_gpu_value(gpu, "mig_at_boot.#"), 0);
    struct sim_pair pairs[5];

    for (unsigned int i = 0; i < count; i++) {
        for (size_t j = 0; j < 5; j++) {
            pairs[j].key = (char *)keys[j];
            pairs[j].value = (char *)text(gpu, "mig_at_boot.%u.%s", i, keys[j]);
        }
        if (!sim_edit_add(edit, number, "mig_devices", pairs, 5))
            return false;
    }
    return count > 0;
}

int mig_boot(const char *path)
{
    struct sim_edit *edit = sim_edit_begin(path);
    const struct sim_profile *profile;
    bool changed = false;

    if (!edit)
        return errno;
    profile = sim_edit_profile(edit);
    for (unsigned int i = 0; i < profile->gpu_count; i++) {
        const struct sim_gpu *gpu = &profile->gpus[i];
        const char *now = sim_gpu_value(gpu, "mig_mode.current_mig");
        const char *pending = sim_gpu_value(gpu, "mig_mode.pending_mig");

        if (!now || (!pending && !mig_is_enabled(gpu) && !whole(sim_gpu_value(gpu, "mig_at_boot.#"), 0)))
            continue;
        changed = true;
        now = keeps_mode(gpu) ? pending ? pending : now : "Disabled";
        sim_edit_list(edit, i, "gpu_instances");
        sim_edit_list(edit, i, "mig_devices");
        if (made_at_boot(edit, i, gpu))
            now = "Enabled";
        write_mode(edit, i, now, now);
    }
    return sim_edit_end(edit, changed);
}
