/* Loaded into a process by LD_PRELOAD: its real-time clock is ahead by the number of seconds in CHAOS_CLOCK_FILE,
   8 bytes that are mapped and may change at any time. Monotonic clocks are left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *shift_s;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("CHAOS_CLOCK_FILE");
    int file = path ? open(path, O_RDONLY) : -1;
    real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    if (file >= 0) {
        void *map = mmap(NULL, sizeof *shift_s, PROT_READ, MAP_SHARED, file, 0);
        if (map != MAP_FAILED) shift_s = map;
        close(file);
    }
}

int clock_gettime(clockid_t id, struct timespec *now) {
    if (!real_clock_gettime) real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real_clock_gettime(id, now);
    if (!failed && shift_s && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *shift_s;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *seconds) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (seconds) *seconds = exact.tv_sec;
    return exact.tv_sec;
}
