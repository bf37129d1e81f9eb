/* Lets user-mode Linux 6.12 run on processors with AMX. It keeps a part of a process's floating-point state and gives that
 * part back, which the host's kernel refuses where the whole is larger: so the rest is put behind it. Preloaded. */
#include <elf.h>
#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

long ptrace(enum __ptrace_request request, ...) {
    static char whole[64 * 1024];
    va_list arguments;
    va_start(arguments, request);
    long process = va_arg(arguments, int);
    void *address = va_arg(arguments, void *), *data = va_arg(arguments, void *);
    va_end(arguments);
    if (request == PTRACE_SETREGSET && (long)address == NT_X86_XSTATE) {
        struct iovec *part = data, all = {whole, sizeof whole};
        if (!syscall(SYS_ptrace, PTRACE_GETREGSET, process, address, &all) && part->iov_len < all.iov_len) {
            memcpy(whole, part->iov_base, part->iov_len);
            return syscall(SYS_ptrace, request, process, address, &all);
        }
    }
    if (request != PTRACE_PEEKTEXT && request != PTRACE_PEEKDATA && request != PTRACE_PEEKUSER)
        return syscall(SYS_ptrace, request, process, address, data);
    /* The kernel has these write to an address, the C library makes them the answer. */
    long value;
    if (syscall(SYS_ptrace, request, process, address, &value) < 0)
        return -1;
    errno = 0;
    return value;
}
