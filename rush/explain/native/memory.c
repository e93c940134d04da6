/* Two walks through memory. Compiled when `rush explain memory` runs, called through ctypes.
 *
 * `chase`: each place holds the address of the next one, in random order, so that neither the processor nor the
 * prefetcher can begin a visit before the one before has ended. Time per hop is the latency.
 * `read_all`: all of a block in order, with sums kept in sixteen or so registers, so that additions never wait
 * for each other. Bytes over time is the bandwidth.
 */
#include <stdint.h>

typedef uint64_t lane __attribute__((vector_size(64)));

#define HOP p = (void **)*p;
#define HOPS4 HOP HOP HOP HOP

void **chase(void **p, long sixteens)
{
    for (long i = 0; i < sixteens; i++) { HOPS4 HOPS4 HOPS4 HOPS4 }
    return p;
}

uint64_t read_all(const void *start, long bytes, long repeats)
{
    const lane *a = start;
    long n = bytes / (long)sizeof(lane);
    lane s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
    for (long r = 0; r < repeats; r++) {
        for (long i = 0; i < n; i += 4) {
            s0 += a[i]; s1 += a[i + 1]; s2 += a[i + 2]; s3 += a[i + 3];
        }
        __asm__ volatile("" ::: "memory");
    }
    s0 += s1 + s2 + s3;
    return s0[0] + s0[1] + s0[2] + s0[3] + s0[4] + s0[5] + s0[6] + s0[7];
}
