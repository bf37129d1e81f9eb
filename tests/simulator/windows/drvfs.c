/* A drive of Windows as WSL2 mounts it without "metadata": a folder that is made has all permissions, whatever was asked
 * for, and chmod is refused (WSL#41519). Preloaded, with the drive in DRVFS. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int below(int folder, const char *path) {
    const char *drive = getenv("DRVFS");
    size_t length = drive ? strlen(drive) : 0;
    char link[64], place[PATH_MAX] = "";
    if (!length || !path)
        return 0;
    if (*path != '/') {
        if (folder == AT_FDCWD)
            strcpy(link, "/proc/self/cwd");
        else
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t read = readlink(link, place, sizeof place - 1);
        place[read < 0 ? 0 : read] = 0;
        path = place;
    }
    return !strncmp(path, drive, length) && (path[length] == '/' || !path[length]);
}

static int refused(void) {
    errno = EPERM;
    return -1;
}

static int (*real_chmod(void))(const char *, mode_t) {
    return (int (*)(const char *, mode_t))dlsym(RTLD_NEXT, "chmod");
}

int chmod(const char *path, mode_t mode) {
    return below(AT_FDCWD, path) ? refused() : real_chmod()(path, mode);
}

int fchmodat(int folder, const char *path, mode_t mode, int flags) {
    int (*real)(int, const char *, mode_t, int) = (int (*)(int, const char *, mode_t, int))dlsym(RTLD_NEXT, "fchmodat");
    return below(folder, path) ? refused() : real(folder, path, mode, flags);
}

int fchmod(int file, mode_t mode) {
    int (*real)(int, mode_t) = (int (*)(int, mode_t))dlsym(RTLD_NEXT, "fchmod");
    return below(file, "") ? refused() : real(file, mode);
}

int mkdir(const char *path, mode_t mode) {
    int (*real)(const char *, mode_t) = (int (*)(const char *, mode_t))dlsym(RTLD_NEXT, "mkdir");
    int result = real(path, mode);
    return result || !below(AT_FDCWD, path) ? result : real_chmod()(path, 0777);
}
