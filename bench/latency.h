/* How long messages took: counted as they come, read as percentiles at the end. */
#ifndef BENCH_LATENCY_H
#define BENCH_LATENCY_H
#include <stddef.h>
#include <stdint.h>

/* Log-linear histogram: 32 buckets per power of two, i.e. 3 % resolution from 1 ns to hours. */
static uint64_t histogram[64 * 32], latency_max;

static inline void count_latency(uint64_t ns) {
    if (ns > latency_max) latency_max = ns;
    unsigned top = 63u - (unsigned)__builtin_clzll(ns | 32);
    histogram[(top << 5) + (ns >> (top - 5) & 31)]++;
}

static double percentile_us(double share) {
    uint64_t total = 0, sum = 0;
    for (size_t i = 0; i < sizeof histogram / sizeof *histogram; i++) total += histogram[i];
    for (size_t i = 0; i < sizeof histogram / sizeof *histogram; i++) {
        sum += histogram[i];
        if (total && (double)sum >= share * (double)total) {
            unsigned top = (unsigned)(i >> 5);
            double low = (double)((32ull + (i & 31)) << (top - 5)), width = (double)(1ull << (top - 5));
            return (low + width / 2) / 1000;
        }
    }
    return 0;
}
#endif
