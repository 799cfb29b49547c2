/* What the load generators share: complaints, clocks, numbers of the command line, a few bytes of MQTT. */
#ifndef BENCH_MQTT_H
#define BENCH_MQTT_H
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

extern const char program_name[];
#define PROGRAM(name) const char program_name[] = name;

__attribute__((noreturn, format(printf, 1, 2))) static void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "%s: ", program_name);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    exit(2);
}

static void on_alarm(int sig) {
    (void)sig;
    static const char text[] = "total time exceeded\n";
    if (write(2, text, sizeof text - 1)) {}
    _exit(3);
}

static inline uint64_t clock_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline double now_s(void) { return (double)clock_ns() / 1e9; }

static double cpu_s(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

/* For a harness, which reads the broker's CPU time there. */
static void event(const char *name) {
    fprintf(stderr, "event %s\n", name);
    fflush(stderr);
}

static double number(const char *name, const char *text, double low, double high) {
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end || value < low || value > high) die("--%s takes a number from %g to %g, not '%s'", name, low, high, text);
    return value;
}

static inline size_t put_length(uint8_t *p, size_t n) {
    size_t i = 0;
    do {
        p[i] = n & 127;
        n >>= 7;
        if (n) p[i] |= 128;
        i++;
    } while (n);
    return i;
}

static inline size_t property_size(const uint8_t *p) {
    switch (*p) {
    case 0x01: case 0x17: case 0x19: case 0x24: case 0x25: case 0x28: case 0x29: case 0x2a: return 2;
    case 0x13: case 0x21: case 0x22: case 0x23: return 3;
    case 0x02: case 0x11: case 0x18: case 0x27: return 5;
    case 0x0b: { size_t n = 2; while (p[n - 1] & 128) n++; return n; }
    case 0x26: { size_t key = 3 + ((size_t)p[1] << 8 | p[2]); return key + 2 + ((size_t)p[key] << 8 | p[key + 1]); }
    default: return 3 + ((size_t)p[1] << 8 | p[2]); /* strings and binary */
    }
}
#endif
