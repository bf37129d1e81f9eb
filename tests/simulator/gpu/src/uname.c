/* For /etc/ld.so.preload of a WSL-like node: uname() answers the release of a WSL2 kernel. A statically linked program
 * that asks the kernel itself, and /proc/version, still show the kernel that really runs. */
#define _GNU_SOURCE 1
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#define RELEASE "6.6.87.2-microsoft-standard-WSL2"
#define OVERRIDE "/etc/gpufarm-simulator/kernel-release"

__attribute__((visibility("default"))) int uname(struct utsname *name)
{
    int (*real)(struct utsname *) = (int (*)(struct utsname *))dlsym(RTLD_NEXT, "uname");
    int result = real ? real(name) : (int)syscall(SYS_uname, name);
    FILE *file;

    if (result)
        return result;
    snprintf(name->release, sizeof(name->release), "%s", RELEASE);
    file = fopen(OVERRIDE, "re");
    if (file) {
        char line[sizeof(name->release)];

        if (fgets(line, sizeof(line), file) && strcspn(line, "\n") > 0)
            snprintf(name->release, sizeof(name->release), "%.*s", (int)strcspn(line, "\n"), line);
        fclose(file);
    }
    return 0;
}
