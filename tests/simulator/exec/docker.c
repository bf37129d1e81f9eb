/* docker: `docker exec` without the daemon, which takes 60 ms of a processor for what the kernel does in 2. A test run does
   it ten thousand times. The process gets what Docker gives it: the container's namespaces, control groups, capabilities,
   limits and environment (molecule/common/tests/test_exec.py compares the two). All else is handed to Docker's own
   client, DOCKER: other commands, options that are not known here, and containers that do not run here.

   One thing is other: who waits for the end of its output waits for what a command has left in the background, too.

   docker exec [-i] [-e NAME=VALUE] [-w FOLDER] [-u root] CONTAINER COMMAND... */
#define _GNU_SOURCE
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define SOCKET "/var/run/docker.sock"
enum { FAILED = 125, CANNOT = 126, MISSING = 127, BY_SIGNAL = 128, MOST = 64 };

static const char *const namespaces[] = {"cgroup", "ipc", "uts", "net", "pid", "mnt"};
static char answer[1 << 18], text[1 << 14];

/* What Docker says of a container, or an empty text. */
static const char *inspected(const char *container) {
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = SOCKET};
    int docker = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    size_t length = 0;
    ssize_t more;
    if (docker < 0 || connect(docker, (struct sockaddr *)&address, sizeof address) ||
        dprintf(docker, "GET /containers/%s/json HTTP/1.0\r\n\r\n", container) < 0)
        return "";
    while ((more = read(docker, answer + length, sizeof answer - 1 - length)) > 0)
        length += (size_t)more;
    close(docker);
    return more || strncmp(answer, "HTTP/1.0 200 ", 13) || length == sizeof answer - 1 ? "" : answer;
}

/* The process by which the container lives, or 0. */
static int first_process(const char *said) {
    const char *pid = strstr(said, "\"Running\":true,\"Paused\":false,\"Restarting\":false,") ? strstr(said, "\"Pid\":") : NULL;
    return pid ? atoi(pid + strlen("\"Pid\":")) : 0;
}

/* Put a variable in, in the place of one of its name. */
static void put(char **environment, int *count, char *variable) {
    size_t name = strcspn(variable, "=") + 1;
    int at = 0;
    while (at < *count && strncmp(environment[at], variable, name))
        at++;
    environment[at] = variable;
    *count += at == *count;
}

/* Add the container's own environment, of which an escaped character is not understood: then false. */
static int add_environment(char *said, char **environment, int *count) {
    static char hostname[128];
    char *next = strstr(said, "\"Env\":["), *end = next ? strstr(next, "],\"") : NULL, *name = strstr(said, "\"Hostname\":\"");
    if (!next || !end || !name || sscanf(name, "\"Hostname\":\"%100[^\"]", hostname + strlen("HOSTNAME=")) != 1)
        return 0;
    put(environment, count, memcpy(hostname, "HOSTNAME=", strlen("HOSTNAME=")));
    for (next += strlen("\"Env\":["); next < end && *next == '"' && *count < MOST; next++) {
        char *variable = ++next;
        next += strcspn(next, "\"\\");
        if (*next == '\\')
            return 0;
        *next++ = '\0';
        put(environment, count, variable);
    }
    return next >= end;
}

static const char *read_of(int pid, const char *name) {
    snprintf(text, sizeof text, "/proc/%d/%s", pid, name);
    int file = open(text, O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? -1 : read(file, text, sizeof text - 1);
    if (length < 0)
        err(FAILED, "/proc/%d/%s", pid, name);
    close(file);
    text[length] = '\0';
    return text;
}

static int joined(const char *controllers, const char *group) {
    char path[4096];
    const char *root = *controllers                             ? strncmp(controllers, "name=", 5) ? controllers : controllers + 5
                       : !access("/sys/fs/cgroup/unified", F_OK) ? "unified"
                                                                 : "";
    snprintf(path, sizeof path, "/sys/fs/cgroup/%s/%s/cgroup.procs", root, group);
    int file = open(path, O_WRONLY | O_CLOEXEC), done = file >= 0 && dprintf(file, "%d", getpid()) > 0;
    if (file >= 0)
        close(file);
    return done;
}

/* Enter the control groups of the container; where the kernel allows no process beside its groups, that of its init. */
static void join(int pid) {
    static char groups[sizeof text];
    char *line, *rest = strcpy(groups, read_of(pid, "cgroup"));
    while ((line = strsep(&rest, "\n")) && *line) {
        char *controllers = strchr(line, ':') + 1, *group = strchr(controllers, ':'), *scope;
        *group++ = '\0';
        if ((scope = strstr(group, "/init.scope")))
            *scope = '\0';
        if (!strcmp(group, "/") || joined(controllers, group)) /* the first where Docker uses no such controller */
            continue;
        if (scope)
            *scope = '/';
        if (!scope || !joined(controllers, group))
            err(FAILED, "cgroup %s:%s", controllers, group);
    }
}

/* Have the limits that Docker's processes have, and the container's capabilities, from the next exec on. */
static void restrict_to(int pid) {
    const char *status = read_of(pid, "status");
    unsigned long long bounding = strtoull(strstr(status, "\nCapBnd:") + strlen("\nCapBnd:"), NULL, 16);
    int parent = atoi(strstr(status, "\nPPid:") + strlen("\nPPid:"));
    for (int limit = 0; limit < RLIMIT_NLIMITS; limit++) {
        struct rlimit found;
        if (prlimit(parent, limit, NULL, &found) || prlimit(0, limit, &found, NULL))
            err(FAILED, "limit %d", limit);
    }
    for (int capability = 0; prctl(PR_CAPBSET_READ, capability) >= 0; capability++)
        if (!(bounding >> capability & 1) && prctl(PR_CAPBSET_DROP, capability))
            err(FAILED, "capability %d", capability);
}

static void enter(int pid) {
    char path[64];
    int files[sizeof namespaces / sizeof *namespaces];
    for (size_t each = 0; each < sizeof files / sizeof *files; each++) {
        snprintf(path, sizeof path, "/proc/%d/ns/%s", pid, namespaces[each]);
        if ((files[each] = open(path, O_RDONLY | O_CLOEXEC)) < 0)
            err(FAILED, "%s", path);
    }
    for (size_t each = 0; each < sizeof files / sizeof *files; each++)
        if (setns(files[each], 0))
            err(FAILED, "namespace %s", namespaces[each]);
}

int main(int count, char **words) {
    char *environment[2 * MOST + 1] = {"HOME=/root"}, *given[MOST], *folder = "/";
    int variables = 0, own = 1, input = 0, word = 2, status;
    int of_ours = count > 2 && !strcmp(words[1], "exec") && !geteuid() && !getenv("DOCKER_HOST");
    for (; of_ours && word < count && *words[word] == '-'; word++) {
        char *option = words[word], *value = word + 1 < count ? words[word + 1] : "";
        if (!strcmp(option, "-i") || !strcmp(option, "--interactive"))
            input = 1;
        else if ((!strcmp(option, "-e") || !strcmp(option, "--env")) && strchr(value, '=') && variables < MOST)
            given[variables++] = words[++word];
        else if ((!strcmp(option, "-w") || !strcmp(option, "--workdir")) && *value == '/')
            folder = words[++word];
        else if ((!strcmp(option, "-u") || !strcmp(option, "--user")) && !strcmp(value, "root"))
            word++;
        else
            of_ours = 0;
    }
    const char *said = of_ours && word + 1 < count ? inspected(words[word]) : "";
    /* A container's own user or folder is left to Docker. */
    int pid = strstr(said, "\"User\":\"\"") && strstr(said, "\"WorkingDir\":\"\"") ? first_process(said) : 0;
    if (!pid || !add_environment((char *)said, environment, &own)) {
        words[0] = DOCKER;
        execv(DOCKER, words);
        err(CANNOT, "%s", DOCKER);
    }
    for (int each = 0; each < variables; each++)
        put(environment, &own, given[each]);
    environment[own] = NULL;

    join(pid);
    restrict_to(pid);
    enter(pid);
    pid_t child = fork(); /* only a child is in the namespace of processes */
    if (child < 0)
        err(FAILED, "fork");
    if (!child) {
        for (int number = 1; number < NSIG; number++)
            signal(number, SIG_DFL);
        sigprocmask(SIG_SETMASK, &(sigset_t){0}, NULL);
        setpriority(PRIO_PROCESS, 0, 0);
        setsid();
        umask(022);
        if (setgroups(1, &(gid_t){0}) || chdir(folder))
            err(MISSING, "%s", folder);
        close_range(STDERR_FILENO + 1, ~0U, 0);
        if (!input && dup2(open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO))
            err(FAILED, "/dev/null");
        environ = environment;
        execvp(words[word + 1], words + word + 1);
        err(errno == ENOENT ? MISSING : CANNOT, "%s", words[word + 1]);
    }
    if (waitpid(child, &status, 0) < 0)
        err(FAILED, "wait");
    return WIFSIGNALED(status) ? BY_SIGNAL + WTERMSIG(status) : WEXITSTATUS(status);
}
