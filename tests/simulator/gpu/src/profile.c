#define _GNU_SOURCE 1
#include "profile.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <yaml.h>

#define PROFILE_PATH "/etc/gpufarm-simulator/gpu.yml"
#define STATE_DIR "/run/gpufarm-simulator"
#define STATE_PATH STATE_DIR "/state.yml"
#define MAX_PROFILE_SIZE (4u << 20)
#define MAX_KEY 512

/* Where the profile lies on a node, and where its copies lie in a container: nvidia-ctk mounts the GSP firmware of
 * the driver version (Linux) and the files of the driver store (WSL), and nothing else that could hold it. */
static const char *const profile_globs[] = {
    PROFILE_PATH,
    "/lib/firmware/nvidia/*/gsp*.bin",
    "/usr/lib/firmware/nvidia/*/gsp*.bin",
    "/usr/lib/wsl/drivers/*/nvcubins.bin",
    "/usr/lib/wsl/lib/nvcubins.bin",
};

struct signature {
    dev_t dev;
    ino_t ino;
    off_t size;
    struct timespec mtime;
};

static struct sim_profile current;
static struct signature profile_seen, profile_refused, state_seen;
static char *profile_text, *state_text;

void sim_path(char *out, size_t size, const char *path)
{
    const char *root = secure_getenv("GPUFARM_SIM_ROOT");

    snprintf(out, size, "%s%s", root ? root : "", path);
}

/* -- flat maps ---------------------------------------------------------------------------------------------------- */

static int compare_pairs(const void *a, const void *b)
{
    return strcmp(((const struct sim_pair *)a)->key, ((const struct sim_pair *)b)->key);
}

static void map_clear(struct sim_map *map)
{
    for (size_t i = 0; i < map->count; i++) {
        free(map->pairs[i].key);
        free(map->pairs[i].value);
    }
    free(map->pairs);
    memset(map, 0, sizeof(*map));
}

static struct sim_pair *map_find(const struct sim_map *map, const char *key)
{
    for (size_t i = 0; i < map->count; i++)
        if (!strcmp(map->pairs[i].key, key))
            return &map->pairs[i];
    return NULL;
}

static bool map_set(struct sim_map *map, const char *key, const char *value)
{
    struct sim_pair *pair = map_find(map, key);
    char *copy = strdup(value);

    if (!copy)
        return false;
    if (pair) {
        free(pair->value);
        pair->value = copy;
        return true;
    }
    if (map->count == map->room) {
        size_t room = map->room ? map->room * 2 : 128;
        struct sim_pair *pairs = realloc(map->pairs, room * sizeof(*pairs));

        if (!pairs) {
            free(copy);
            return false;
        }
        map->pairs = pairs;
        map->room = room;
    }
    map->pairs[map->count].key = strdup(key);
    map->pairs[map->count].value = copy;
    if (!map->pairs[map->count].key) {
        free(copy);
        return false;
    }
    map->count++;
    return true;
}

/* An override that is a scalar or a list replaces the whole section it names, also one that was a mapping. */
static void map_drop(struct sim_map *map, const char *key)
{
    size_t length = strlen(key), kept = 0;

    for (size_t i = 0; i < map->count; i++) {
        const char *have = map->pairs[i].key;

        if (!strncmp(have, key, length) && (have[length] == '.' || have[length] == '\0')) {
            free(map->pairs[i].key);
            free(map->pairs[i].value);
        } else {
            map->pairs[kept++] = map->pairs[i];
        }
    }
    map->count = kept;
}

static void map_sort(struct sim_map *map)
{
    if (map->count)
        qsort(map->pairs, map->count, sizeof(*map->pairs), compare_pairs);
}

const char *sim_map_get(const struct sim_map *map, const char *key)
{
    struct sim_pair wanted = {.key = (char *)key}, *found;

    if (!map->count)
        return NULL;
    found = bsearch(&wanted, map->pairs, map->count, sizeof(*map->pairs), compare_pairs);
    return found ? found->value : NULL;
}

static const char *map_value(const struct sim_map *map, const char *key)
{
    const char *value = sim_map_get(map, key);

    return value && strcmp(value, "N/A") ? value : NULL;
}

/* -- YAML to flat maps -------------------------------------------------------------------------------------------- */

static const char *scalar(const yaml_node_t *node)
{
    return node && node->type == YAML_SCALAR_NODE ? (const char *)node->data.scalar.value : NULL;
}

static yaml_node_t *child(yaml_document_t *document, yaml_node_t *mapping, const char *name)
{
    if (!mapping || mapping->type != YAML_MAPPING_NODE)
        return NULL;
    for (yaml_node_pair_t *pair = mapping->data.mapping.pairs.start; pair < mapping->data.mapping.pairs.top; pair++) {
        const char *key = scalar(yaml_document_get_node(document, pair->key));

        if (key && !strcmp(key, name))
            return yaml_document_get_node(document, pair->value);
    }
    return NULL;
}

static bool flatten(yaml_document_t *document, yaml_node_t *node, const char *prefix, struct sim_map *map, int depth)
{
    char key[MAX_KEY], number[16];
    int item = 0;

    if (!node || depth > 16)
        return false;
    if (node->type == YAML_SCALAR_NODE) {
        map_drop(map, prefix);
        return map_set(map, prefix, (const char *)node->data.scalar.value);
    }
    if (node->type == YAML_SEQUENCE_NODE) {
        map_drop(map, prefix);
        for (yaml_node_item_t *at = node->data.sequence.items.start; at < node->data.sequence.items.top; at++) {
            snprintf(key, sizeof(key), "%s.%d", prefix, item++);
            if (!flatten(document, yaml_document_get_node(document, *at), key, map, depth + 1))
                return false;
        }
        snprintf(key, sizeof(key), "%s.#", prefix);
        snprintf(number, sizeof(number), "%d", item);
        return map_set(map, key, number);
    }
    if (node->type != YAML_MAPPING_NODE)
        return true;
    if (map_find(map, prefix))
        map_drop(map, prefix);
    for (yaml_node_pair_t *pair = node->data.mapping.pairs.start; pair < node->data.mapping.pairs.top; pair++) {
        const char *name = scalar(yaml_document_get_node(document, pair->key));

        if (!name)
            return false;
        snprintf(key, sizeof(key), "%s%s%s", prefix, *prefix ? "." : "", name);
        if (!flatten(document, yaml_document_get_node(document, pair->value), key, map, depth + 1))
            return false;
    }
    return true;
}

/* A model may be made "like" another one, of which it takes everything that it does not say itself. */
static bool flatten_model(yaml_document_t *document, yaml_node_t *models, const char *name, struct sim_map *map, int depth)
{
    yaml_node_t *model = child(document, models, name);
    const char *like = scalar(child(document, model, "like"));

    if (!model || depth > 4 || (like && !flatten_model(document, models, like, map, depth + 1)))
        return false;
    return flatten(document, model, "", map, 0);
}

static bool read_gpus(yaml_document_t *document, yaml_node_t *root, struct sim_profile *profile)
{
    yaml_node_t *gpus = child(document, root, "gpus"), *models = child(document, root, "models");

    if (!gpus || gpus->type != YAML_SEQUENCE_NODE)
        return gpus == NULL;
    for (yaml_node_item_t *at = gpus->data.sequence.items.start; at < gpus->data.sequence.items.top; at++) {
        yaml_node_t *entry = yaml_document_get_node(document, *at);
        const char *model = scalar(child(document, entry, "model"));
        struct sim_map *values;
        char number[16];

        if (profile->gpu_count == SIM_MAX_GPUS || !entry || entry->type != YAML_MAPPING_NODE)
            return false;
        snprintf(number, sizeof(number), "%u", profile->gpu_count);
        values = &profile->gpus[profile->gpu_count++].values;
        if (!map_set(values, "minor_number", number))
            return false;
        if (model && !flatten_model(document, models, model, values, 0))
            return false;
        if (!flatten(document, entry, "", values, 0))
            return false;
        map_sort(values);
        if (!map_value(values, "uuid"))
            return false;
    }
    return true;
}

static void profile_clear(struct sim_profile *profile)
{
    map_clear(&profile->node);
    for (unsigned int i = 0; i < profile->gpu_count; i++)
        map_clear(&profile->gpus[i].values);
    memset(profile, 0, sizeof(*profile));
}

/* Whether the text ends with the document end marker, by which a profile that is only half written is told. */
static bool has_end_marker(const char *text)
{
    size_t length = strlen(text);

    while (length && strchr(" \t\r\n", text[length - 1]))
        length--;
    return length >= 4 && !strncmp(text + length - 4, "\n...", 4);
}

static bool parse_profile(const char *text, struct sim_profile *profile)
{
    yaml_parser_t parser;
    yaml_document_t document;
    yaml_node_t *root;
    bool good = false;

    if (!yaml_parser_initialize(&parser))
        return false;
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, strlen(text));
    if (yaml_parser_load(&parser, &document)) {
        root = yaml_document_get_root_node(&document);
        good = root && root->type == YAML_MAPPING_NODE && read_gpus(&document, root, profile);
        for (yaml_node_pair_t *pair = good ? root->data.mapping.pairs.start : NULL;
             good && pair < root->data.mapping.pairs.top; pair++) {
            const char *name = scalar(yaml_document_get_node(&document, pair->key));

            if (name && strcmp(name, "gpus") && strcmp(name, "models"))
                good = flatten(&document, yaml_document_get_node(&document, pair->value), name, &profile->node, 0);
        }
        map_sort(&profile->node);
        yaml_document_delete(&document);
    }
    yaml_parser_delete(&parser);
    if (!good)
        profile_clear(profile);
    return good;
}

/* What was set at run time: a mapping of "<uuid>/<key>" to a value. */
static void apply_state(const char *text, struct sim_profile *profile)
{
    yaml_parser_t parser;
    yaml_document_t document;
    struct sim_map settings = {0};
    yaml_node_t *root;

    if (!text || !yaml_parser_initialize(&parser))
        return;
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, strlen(text));
    if (yaml_parser_load(&parser, &document)) {
        root = yaml_document_get_root_node(&document);
        if (root && root->type == YAML_MAPPING_NODE)
            flatten(&document, root, "", &settings, 0);
        yaml_document_delete(&document);
    }
    yaml_parser_delete(&parser);
    for (size_t i = 0; i < settings.count; i++) {
        const char *slash = strchr(settings.pairs[i].key, '/');

        for (unsigned int gpu = 0; slash && gpu < profile->gpu_count; gpu++) {
            struct sim_map *values = &profile->gpus[gpu].values;
            const char *uuid = sim_map_get(values, "uuid");
            size_t length = (size_t)(slash - settings.pairs[i].key);

            if (uuid && strlen(uuid) == length && !strncmp(uuid, settings.pairs[i].key, length)) {
                map_set(values, slash + 1, settings.pairs[i].value);
                map_sort(values);
            }
        }
    }
    map_clear(&settings);
}

/* -- files -------------------------------------------------------------------------------------------------------- */

static bool sign(const char *path, struct signature *signature)
{
    struct stat status;

    memset(signature, 0, sizeof(*signature));
    if (!*path || stat(path, &status) || !S_ISREG(status.st_mode))
        return false;
    signature->dev = status.st_dev;
    signature->ino = status.st_ino;
    signature->size = status.st_size;
    signature->mtime = status.st_mtim;
    return true;
}

static bool same(const struct signature *a, const struct signature *b)
{
    return !memcmp(a, b, sizeof(*a));
}

static double age(const struct signature *signature)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    return (double)(now.tv_sec - signature->mtime.tv_sec) + (double)(now.tv_nsec - signature->mtime.tv_nsec) / 1e9;
}

static char *read_text(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t length = 0, room = 65536;
    char *text = NULL, *more;
    ssize_t got = 0;

    if (fd < 0)
        return NULL;
    text = malloc(room + 1);
    while (text && (got = read(fd, text + length, room - length)) > 0) {
        length += (size_t)got;
        if (length < room)
            continue;
        room *= 2;
        more = room > MAX_PROFILE_SIZE ? NULL : realloc(text, room + 1);
        if (!more) {
            free(text);
            text = NULL;
        } else {
            text = more;
        }
    }
    close(fd);
    if (text && got < 0) {
        free(text);
        return NULL;
    }
    if (text)
        text[length] = '\0';
    return text;
}

static void find_profile(char *path, size_t size)
{
    char pattern[SIM_PATH_MAX];
    glob_t found;

    path[0] = '\0';
    for (size_t i = 0; i < sizeof(profile_globs) / sizeof(*profile_globs) && !*path; i++) {
        sim_path(pattern, sizeof(pattern), profile_globs[i]);
        if (!glob(pattern, 0, NULL, &found)) {
            if (found.gl_pathc)
                snprintf(path, size, "%s", found.gl_pathv[0]);
            globfree(&found);
        }
    }
}

/* A profile is rewritten in place, so that the bind mounts in running containers follow it. Therefore a reader can
 * meet it empty, cut off, or half old and half new. The end marker tells a whole one; a profile without the marker
 * counts as whole when nobody has written to it for a second. */
static bool read_profile(const char *path, struct sim_profile *profile, char **text, struct signature *signature)
{
    for (int attempt = 0; attempt < 240; attempt++) {
        struct signature before, after;
        char *now = NULL;

        if (sign(path, &before) && (now = read_text(path)) && sign(path, &after) && same(&before, &after) &&
            (has_end_marker(now) || age(&after) > 1.0) && parse_profile(now, profile)) {
            *text = now;
            *signature = after;
            /* A second write within the clock's grain would leave the same signature behind. */
            if (age(&after) < 0.05)
                memset(signature, 0, sizeof(*signature));
            return true;
        }
        free(now);
        *signature = before;
        if (current.gpu_count && attempt >= 40)
            break;
        if (age(&before) > 1.5)
            break;
        usleep(5000);
    }
    return false;
}

const struct sim_profile *sim_load(void)
{
    char path[SIM_PATH_MAX], state_path[SIM_PATH_MAX];
    struct signature profile_now, state_now;
    struct sim_profile fresh = {0};
    char *text = NULL;
    bool state_changed;

    find_profile(path, sizeof(path));
    sim_path(state_path, sizeof(state_path), STATE_PATH);
    sign(state_path, &state_now);
    state_changed = !same(&state_now, &state_seen);
    if (state_changed) {
        free(state_text);
        state_text = read_text(state_path);
        state_seen = state_now;
    }
    if (!sign(path, &profile_now)) {
        /* The profile is gone, and with it the driver. */
        profile_clear(&current);
        memset(&profile_seen, 0, sizeof(profile_seen));
        return &current;
    }
    if (!same(&profile_now, &profile_seen) && !same(&profile_now, &profile_refused)) {
        if (read_profile(path, &fresh, &text, &profile_now)) {
            free(profile_text);
            profile_text = text;
            profile_seen = profile_now;
            apply_state(state_text, &fresh);
            profile_clear(&current);
            current = fresh;
            return &current;
        }
        if (age(&profile_now) > 1.5)
            profile_refused = profile_now;
    }
    if (state_changed && profile_text && parse_profile(profile_text, &fresh)) {
        apply_state(state_text, &fresh);
        profile_clear(&current);
        current = fresh;
    }
    return &current;
}

bool sim_read(const char *path, struct sim_profile *profile)
{
    char *text = read_text(path);
    bool good = text && has_end_marker(text) && parse_profile(text, profile);

    free(text);
    return good;
}

/* Whoever changes the state or the profile holds this; readers do without. Returns a descriptor, or -1. */
static int lock_changes(void)
{
    char directory[SIM_PATH_MAX];
    int lock;

    sim_path(directory, sizeof(directory), STATE_DIR);
    if (mkdir(directory, 0755) && errno != EEXIST)
        return -1;
    lock = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (lock >= 0 && flock(lock, LOCK_EX)) {
        close(lock);
        return -1;
    }
    return lock;
}

int sim_set_state(const char *uuid, const char *key, const char *value)
{
    char path[SIM_PATH_MAX], temporary[SIM_PATH_MAX + 16];
    struct signature signature;
    char *before;
    FILE *out;
    int lock, failed;

    sim_path(path, sizeof(path), STATE_PATH);
    snprintf(temporary, sizeof(temporary), "%s.%d", path, (int)getpid());
    lock = lock_changes();
    if (lock < 0)
        return errno;
    out = fopen(temporary, "we");
    if (!out) {
        failed = errno;
        close(lock);
        return failed;
    }
    before = sign(path, &signature) ? read_text(path) : NULL;
    for (char *line = before, *next; line && *line; line = next) {
        char name[MAX_KEY];
        size_t length = strcspn(line, "\n");

        next = line + length + (line[length] == '\n');
        snprintf(name, sizeof(name), "\"%s/%s\":", uuid, key);
        if (strncmp(line, name, strlen(name)))
            fprintf(out, "%.*s\n", (int)length, line);
    }
    fprintf(out, "\"%s/%s\": \"%s\"\n", uuid, key, value);
    failed = fclose(out) || rename(temporary, path) ? errno : 0;
    free(before);
    close(lock);
    return failed;
}

/* -- rewriting the profile ---------------------------------------------------------------------------------------- */

struct sim_edit {
    struct sim_profile before;
    yaml_document_t document;
    int lock, file;
};

static bool load_document(const char *text, yaml_document_t *document)
{
    yaml_parser_t parser;
    bool good;

    if (!yaml_parser_initialize(&parser))
        return false;
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, strlen(text));
    good = yaml_parser_load(&parser, document);
    yaml_parser_delete(&parser);
    return good;
}

struct sim_edit *sim_edit_begin(const char *path)
{
    struct sim_edit *edit = calloc(1, sizeof(*edit));
    char own[SIM_PATH_MAX];
    bool good = false;
    int failed;

    if (!edit)
        return NULL;
    sim_path(own, sizeof(own), PROFILE_PATH);
    edit->lock = lock_changes();
    edit->file = edit->lock < 0 ? -1 : open(path ? path : own, O_RDWR | O_CLOEXEC);
    failed = errno;
    /* The faults take no lock: the profile may be half written. */
    for (int attempt = 0; edit->file >= 0 && !good && attempt < 400; attempt++) {
        char *text = read_text(path ? path : own);

        good = text && has_end_marker(text) && parse_profile(text, &edit->before) &&
               load_document(text, &edit->document);
        free(text);
        failed = EBUSY;
        if (!good)
            usleep(5000);
    }
    if (good)
        return edit;
    if (edit->file >= 0)
        close(edit->file);
    if (edit->lock >= 0)
        close(edit->lock);
    profile_clear(&edit->before);
    free(edit);
    errno = failed;
    return NULL;
}

const struct sim_profile *sim_edit_profile(const struct sim_edit *edit)
{
    return &edit->before;
}

/* Nodes are named by number: an address holds only until a node is added. */
static yaml_node_pair_t *pair_of(yaml_document_t *document, int mapping, const char *name, size_t length)
{
    yaml_node_t *node = yaml_document_get_node(document, mapping);

    for (yaml_node_pair_t *pair = node->data.mapping.pairs.start; pair < node->data.mapping.pairs.top; pair++) {
        const char *key = scalar(yaml_document_get_node(document, pair->key));

        if (key && strlen(key) == length && !strncmp(key, name, length))
            return pair;
    }
    return NULL;
}

static bool put(yaml_document_t *document, int mapping, const char *name, size_t length, int value)
{
    yaml_node_pair_t *pair = pair_of(document, mapping, name, length);
    int key;

    if (pair) {
        pair->value = value;
        return true;
    }
    key = yaml_document_add_scalar(document, NULL, (const yaml_char_t *)name, (int)length, YAML_ANY_SCALAR_STYLE);
    return key && yaml_document_append_mapping_pair(document, mapping, key, value);
}

static int text_node(yaml_document_t *document, const char *text)
{
    return yaml_document_add_scalar(document, NULL, (const yaml_char_t *)text, -1, YAML_ANY_SCALAR_STYLE);
}

static int gpu_node(yaml_document_t *document, unsigned int gpu)
{
    yaml_node_t *gpus = child(document, yaml_document_get_root_node(document), "gpus");

    return gpus->data.sequence.items.start[gpu];
}

bool sim_edit_set(struct sim_edit *edit, unsigned int gpu, const char *key, const char *value)
{
    yaml_document_t *document = &edit->document;
    int mapping = gpu_node(document, gpu);
    const char *rest = key;

    for (const char *dot; (dot = strchr(rest, '.')); rest = dot + 1) {
        size_t length = (size_t)(dot - rest);
        yaml_node_pair_t *pair = pair_of(document, mapping, rest, length);
        int next = pair ? pair->value : 0;

        if (!next || yaml_document_get_node(document, next)->type != YAML_MAPPING_NODE) {
            if (!value)
                return true;
            next = yaml_document_add_mapping(document, NULL, YAML_FLOW_MAPPING_STYLE);
            if (!next || !put(document, mapping, rest, length, next))
                return false;
        }
        mapping = next;
    }
    if (!value) {
        yaml_node_t *node = yaml_document_get_node(document, mapping);
        yaml_node_pair_t *pair = pair_of(document, mapping, rest, strlen(rest));

        if (pair) {
            node->data.mapping.pairs.top--;
            memmove(pair, pair + 1, (size_t)((char *)node->data.mapping.pairs.top - (char *)pair));
        }
        return true;
    }
    return put(document, mapping, rest, strlen(rest), text_node(document, value));
}

bool sim_edit_list(struct sim_edit *edit, unsigned int gpu, const char *key)
{
    int list = yaml_document_add_sequence(&edit->document, NULL, YAML_ANY_SEQUENCE_STYLE);

    return list && put(&edit->document, gpu_node(&edit->document, gpu), key, strlen(key), list);
}

bool sim_edit_add(struct sim_edit *edit, unsigned int gpu, const char *key, const struct sim_pair *pairs, size_t count)
{
    yaml_document_t *document = &edit->document;
    int entry = yaml_document_add_mapping(document, NULL, YAML_FLOW_MAPPING_STYLE);

    for (size_t i = 0; entry && i < count; i++)
        if (!put(document, entry, pairs[i].key, strlen(pairs[i].key), text_node(document, pairs[i].value)))
            return false;
    return entry && yaml_document_append_sequence_item(
                        document, pair_of(document, gpu_node(document, gpu), key, strlen(key))->value, entry);
}

struct text {
    char *start;
    size_t length, room;
};

static int collect(void *data, unsigned char *buffer, size_t size)
{
    struct text *text = data;

    if (text->length + size > text->room) {
        size_t room = (text->length + size) * 2;
        char *more = realloc(text->start, room);

        if (!more)
            return 0;
        text->start = more;
        text->room = room;
    }
    memcpy(text->start + text->length, buffer, size);
    text->length += size;
    return 1;
}

static bool emit_document(yaml_document_t *document, struct text *text)
{
    yaml_emitter_t emitter;
    bool good;

    if (!yaml_emitter_initialize(&emitter))
        return false;
    yaml_emitter_set_output(&emitter, collect, text);
    yaml_emitter_set_width(&emitter, -1);
    yaml_emitter_set_unicode(&emitter, 1);
    document->start_implicit = 0;
    document->end_implicit = 0; /* the end marker */
    good = yaml_emitter_open(&emitter) && yaml_emitter_dump(&emitter, document) && yaml_emitter_close(&emitter);
    yaml_emitter_delete(&emitter);
    return good;
}

/* In place, so that links and mounts follow: first the text, whose end marker ends what is read, then the length. */
static int overwrite(int file, const struct text *text)
{
    ssize_t wrote = pwrite(file, text->start, text->length, 0);

    if (wrote < 0)
        return errno;
    if ((size_t)wrote != text->length)
        return ENOSPC;
    return ftruncate(file, (off_t)text->length) ? errno : 0;
}

/* The copies for containers that could not be hard links. */
static void overwrite_copies(int file, const struct text *text)
{
    struct stat own, copy;
    char pattern[SIM_PATH_MAX];
    glob_t found;

    for (size_t i = 1; i < sizeof(profile_globs) / sizeof(*profile_globs); i++) {
        sim_path(pattern, sizeof(pattern), profile_globs[i]);
        if (glob(pattern, 0, NULL, &found))
            continue;
        for (size_t j = 0; j < found.gl_pathc; j++) {
            int other = open(found.gl_pathv[j], O_RDWR | O_CLOEXEC);

            if (other >= 0 && !fstat(file, &own) && !fstat(other, &copy) &&
                (own.st_ino != copy.st_ino || own.st_dev != copy.st_dev))
                (void)overwrite(other, text);
            if (other >= 0)
                close(other);
        }
        globfree(&found);
    }
}

int sim_edit_end(struct sim_edit *edit, bool write)
{
    struct text text = {0};
    int failed = 0;

    if (!write) {
        yaml_document_delete(&edit->document);
    } else if (!emit_document(&edit->document, &text)) {
        failed = ENOMEM;
    } else {
        failed = overwrite(edit->file, &text);
        if (!failed)
            overwrite_copies(edit->file, &text);
    }
    free(text.start);
    close(edit->file);
    close(edit->lock);
    profile_clear(&edit->before);
    free(edit);
    return failed;
}

/* -- what the other doubles ask ----------------------------------------------------------------------------------- */

const char *sim_node_value(const struct sim_profile *profile, const char *key)
{
    return map_value(&profile->node, key);
}


const char *sim_gpu_value(const struct sim_gpu *gpu, const char *key)
{
    return map_value(&gpu->values, key);
}

bool sim_is_wsl(const struct sim_profile *profile)
{
    const char *platform = sim_node_value(profile, "platform");

    return platform && !strcmp(platform, "wsl");
}

const char *sim_library_version(const struct sim_profile *profile)
{
    const char *version = sim_node_value(profile, "driver.library_version");

    if (!version)
        version = sim_node_value(profile, "driver.version");
    return version ? version : "0.0";
}

/* Why a device node cannot be used, as an errno; 0 where it can. Nothing is opened: a node of the simulator has no driver
 * behind it. */
static int device_error(const char *device)
{
    char path[SIM_PATH_MAX];
    struct stat status;

    sim_path(path, sizeof(path), device);
    return stat(path, &status) ? errno : 0;
}

static enum sim_driver control_state(bool wsl)
{
    switch (device_error(wsl ? "/dev/dxg" : "/dev/nvidiactl")) {
    case 0:
        return SIM_DRIVER_LOADED;
    case EPERM:
    case EACCES:
    case ENXIO:
    case ENODEV:
        return SIM_DRIVER_DENIED;
    default:
        return SIM_DRIVER_BLOCKED;
    }
}

enum sim_driver sim_driver_state(const struct sim_profile *profile)
{
    const char *state = sim_node_value(profile, "driver.state");
    const char *kernel = sim_node_value(profile, "driver.kernel_version");
    enum sim_driver control;

    if (!sim_node_value(profile, "driver.version") || (state && !strcmp(state, "unloaded")))
        return SIM_DRIVER_UNLOADED;
    if (state && !strcmp(state, "blocked"))
        return SIM_DRIVER_BLOCKED;
    if (state && !strcmp(state, "denied"))
        return SIM_DRIVER_DENIED;
    control = control_state(sim_is_wsl(profile));
    if (control != SIM_DRIVER_LOADED)
        return control;
    if (kernel && strcmp(kernel, sim_library_version(profile)))
        return SIM_DRIVER_MISMATCH;
    return SIM_DRIVER_LOADED;
}

unsigned int sim_gpu_minor(const struct sim_profile *profile, unsigned int gpu)
{
    const char *minor = sim_gpu_value(&profile->gpus[gpu], "minor_number");

    return minor ? (unsigned int)strtoul(minor, NULL, 10) : gpu;
}

int sim_gpu_error(const struct sim_profile *profile, unsigned int gpu)
{
    char device[64];

    if (sim_is_wsl(profile))
        return 0;
    snprintf(device, sizeof(device), "/dev/nvidia%u", sim_gpu_minor(profile, gpu));
    return device_error(device);
}

bool sim_gpu_visible(const struct sim_profile *profile, unsigned int gpu)
{
    return !sim_gpu_error(profile, gpu);
}

/* The kernel numbers the capabilities of all GPUs through: 15 GPU instances of 8 compute instances each. */
static bool capability_visible(const struct sim_gpu *gpu, unsigned int gpu_instance, unsigned int offset)
{
    const char *minor = sim_gpu_value(gpu, "minor_number");
    char device[64];

    if (!minor)
        return false;
    snprintf(device, sizeof(device), "/dev/nvidia-caps/nvidia-cap%lu",
             3 + strtoul(minor, NULL, 10) * 135 + gpu_instance * 9 + offset);
    return !device_error(device);
}

bool sim_gpu_instance_visible(const struct sim_gpu *gpu, unsigned int id)
{
    return capability_visible(gpu, id, 0);
}

bool sim_mig_visible(const struct sim_gpu *gpu, unsigned int mig)
{
    char key[64];
    const char *gi, *ci;
    unsigned int id;

    snprintf(key, sizeof(key), "mig_devices.%u.gpu_instance_id", mig);
    gi = sim_gpu_value(gpu, key);
    snprintf(key, sizeof(key), "mig_devices.%u.compute_instance_id", mig);
    ci = sim_gpu_value(gpu, key);
    if (!gi || !ci)
        return false;
    id = (unsigned int)strtoul(gi, NULL, 10);
    return capability_visible(gpu, id, 0) && capability_visible(gpu, id, 1 + (unsigned int)strtoul(ci, NULL, 10));
}
