/* Two walks through memory. Compiled when `rush explain memory` runs, called through ctypes.
 *
 * `chase`: each place holds the address of the next one, in random order, so that neither the processor nor the
 * prefetcher can begin a visit before the one before has ended. Time per hop is the latency.
 * `read_all`: all of a block in order, with sums kept in eight registers, so that additions do not wait for
 * each other. Bytes over time is the bandwidth.
 */
#include <stdint.h>

/* As wide as this processor's registers: compilers split wider vectors badly. */
#if defined(__AVX512F__)
#define WIDTH 64
#elif defined(__AVX2__)
#define WIDTH 32
#else
#define WIDTH 16
#endif
typedef uint64_t lane __attribute__((vector_size(WIDTH)));

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
    lane s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0}, s4 = {0}, s5 = {0}, s6 = {0}, s7 = {0};
    for (long r = 0; r < repeats; r++) {
        for (long i = 0; i < n; i += 8) {
            s0 += a[i]; s1 += a[i + 1]; s2 += a[i + 2]; s3 += a[i + 3];
            s4 += a[i + 4]; s5 += a[i + 5]; s6 += a[i + 6]; s7 += a[i + 7];
        }
        __asm__ volatile("" ::: "memory");
    }
    s0 += s1 + s2 + s3 + s4 + s5 + s6 + s7;
    uint64_t total = 0;
    for (unsigned k = 0; k < sizeof(lane) / 8; k++)
        total += s0[k];
    return total;
}
