/* A disk that fails, for tests: the Nth call of this process that writes to a file answers with an error.
 *
 * Loaded by LD_PRELOAD, so that libraries that write by themselves (polars, pyarrow) meet it too. A full disk (ENOSPC)
 * takes half of the Nth write and nothing after it, any other error comes once. Pipes, terminals and devices never
 * fail. disk_fails_at(0, 0) only counts.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int watching, calls, failed, fails_at, code;

void disk_fails_at(int call, int error)
{
    watching = 1, calls = 0, failed = 0, fails_at = call, code = error;
}

int disk_calls(void)
{
    watching = 0;
    return calls;
}

/* takes_space: a disk that is full goes on to rename and to shorten files */
static int fails(int takes_space)
{
    int now;
    if (!watching)
        return 0;
    pthread_mutex_lock(&lock);
    calls++;
    now = fails_at && (code == ENOSPC ? takes_space && calls >= fails_at : calls == fails_at);
    failed += now;
    pthread_mutex_unlock(&lock);
    if (now)
        errno = code;
    return now;
}

static int is_on_disk(int fd)
{
    struct stat found;
    return watching && !fstat(fd, &found) && (S_ISREG(found.st_mode) || S_ISDIR(found.st_mode));
}

static int is_written(const char *path, int flags)
{
    struct stat found;
    if (!watching || !(flags & (O_WRONLY | O_RDWR)) || !(flags & (O_CREAT | O_TRUNC)))
        return 0;
    return stat(path, &found) ? flags & O_CREAT : S_ISREG(found.st_mode);
}

#define REAL(kind, name, ...)                                  \
    static kind (*real)(__VA_ARGS__);                          \
    if (!real)                                                 \
        *(void **)&real = dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t size)
{
    REAL(ssize_t, write, int, const void *, size_t);
    if (!is_on_disk(fd) || !fails(1))
        return real(fd, data, size);
    return code == ENOSPC && failed == 1 && size > 1 ? real(fd, data, size / 2) : -1;
}

#define ON_FILE(kind, name, takes_space, parameters, arguments)              \
    kind name parameters                                                     \
    {                                                                        \
        static kind (*real) parameters;                                      \
        if (!real)                                                           \
            *(void **)&real = dlsym(RTLD_NEXT, #name);                       \
        return is_on_disk(fd) && fails(takes_space) ? -1 : real arguments;   \
    }

ON_FILE(ssize_t, pwrite, 1, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
ON_FILE(ssize_t, pwrite64, 1, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
ON_FILE(ssize_t, writev, 1, (int fd, const struct iovec *parts, int count), (fd, parts, count))
ON_FILE(int, fsync, 1, (int fd), (fd))
ON_FILE(int, fdatasync, 1, (int fd), (fd))
ON_FILE(int, ftruncate, 0, (int fd, off_t size), (fd, size))
ON_FILE(int, ftruncate64, 0, (int fd, off64_t size), (fd, size))

int rename(const char *from, const char *to)
{
    REAL(int, rename, const char *, const char *);
    return fails(0) ? -1 : real(from, to);
}

int mkdir(const char *path, mode_t mode)
{
    struct stat found;
    REAL(int, mkdir, const char *, mode_t);
    return stat(path, &found) && fails(1) ? -1 : real(path, mode);
}

#define OPENS(name, parameters, arguments)                                   \
    int name parameters                                                      \
    {                                                                        \
        static int (*real) parameters;                                       \
        mode_t mode = 0;                                                     \
        va_list more;                                                        \
        va_start(more, flags);                                               \
        if (flags & (O_CREAT | O_TMPFILE))                                   \
            mode = va_arg(more, mode_t);                                     \
        va_end(more);                                                        \
        if (!real)                                                           \
            *(void **)&real = dlsym(RTLD_NEXT, #name);                       \
        return is_written(path, flags) && fails(1) ? -1 : real arguments;    \
    }

OPENS(open, (const char *path, int flags, ...), (path, flags, mode))
OPENS(open64, (const char *path, int flags, ...), (path, flags, mode))
OPENS(openat, (int folder, const char *path, int flags, ...), (folder, path, flags, mode))
OPENS(openat64, (int folder, const char *path, int flags, ...), (folder, path, flags, mode))
