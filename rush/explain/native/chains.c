/* Latency against throughput, and what a branch costs. Compiled when `rush explain cpu-gpu` runs, called through ctypes.
 *
 * `scalar_N`, `vector_N`: N chains of multiply-adds. A step of a chain needs the step before, the chains need nothing of
 * each other, so the processor may overlap them; a vector is as many chains as it has lanes. KEEP holds every chain in a
 * register of its own: the compiler may neither merge scalar chains into a vector nor leave steps out.
 * `by_branch`, `by_select`: one of two polynomials for every element, as a byte beside it says. The first jumps, the
 * second computes both and keeps one.
 */
#include <stdint.h>

/* As wide as this processor's registers. */
#if defined(__AVX512F__)
#define WIDTH 64
#elif defined(__AVX2__)
#define WIDTH 32
#else
#define WIDTH 16
#endif
typedef float lane __attribute__((vector_size(WIDTH)));

#if defined(__x86_64__)
#define KEEP(value) __asm__ volatile("" : "+x"(value));
#elif defined(__aarch64__)
#define KEEP(value) __asm__ volatile("" : "+w"(value));
#else
#error "the chains are written for x86-64 and ARM processors"
#endif

#define BEGIN(k) s##k = s##k + start + k;
#define STEP(k) s##k = s##k * factor + 0.5f; KEEP(s##k)
#define ADD(k) total += s##k;
#define EACH_1(F) F(0)
#define EACH_2(F) EACH_1(F) F(1)
#define EACH_4(F) EACH_2(F) F(2) F(3)
#define EACH_8(F) EACH_4(F) F(4) F(5) F(6) F(7)

#define SCALAR(count)                                              \
    float scalar_##count(float start, float factor, long rounds)   \
    {                                                              \
        float s0 = 0, s1 = 0, s2 = 0, s3 = 0, s4 = 0, s5 = 0, s6 = 0, s7 = 0, total = 0; \
        EACH_##count(BEGIN)                                        \
        for (long r = 0; r < rounds; r++) { EACH_##count(STEP) }   \
        EACH_8(ADD)                                                \
        return total;                                              \
    }
SCALAR(1) SCALAR(2) SCALAR(4) SCALAR(8)

#define VECTOR(count)                                              \
    float vector_##count(float start, float scale, long rounds)    \
    {                                                              \
        lane s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0}, s4 = {0}, s5 = {0}, s6 = {0}, s7 = {0}, total = {0}; \
        const lane factor = (lane){0} + scale;                     \
        EACH_##count(BEGIN)                                        \
        for (long r = 0; r < rounds; r++) { EACH_##count(STEP) }   \
        EACH_8(ADD)                                                \
        float sum = 0;                                             \
        for (unsigned k = 0; k < WIDTH / 4; k++)                   \
            sum += total[k];                                       \
        return sum;                                                \
    }
VECTOR(1) VECTOR(2) VECTOR(4) VECTOR(8)

long lanes(void) { return WIDTH / 4; }

static inline float one(float x) { return ((0.3f * x + 0.7f) * x + 0.2f) * x + 0.1f; }
static inline float other(float x) { return ((0.5f * x - 0.4f) * x + 0.6f) * x - 0.9f; }

void by_branch(const uint8_t *which, const float *x, float *out, long number)
{
    for (long i = 0; i < number; i++) {
        float y;
        /* An empty statement that may not be moved: without it the compiler would make a select of this. */
        if (which[i]) { __asm__ volatile("" ::: "memory"); y = one(x[i]); }
        else { __asm__ volatile("" ::: "memory"); y = other(x[i]); }
        out[i] = y;
    }
}

void by_select(const uint8_t *which, const float *x, float *out, long number)
{
    for (long i = 0; i < number; i++) {
        const float a = one(x[i]), b = other(x[i]);
        out[i] = which[i] ? a : b;
    }
}
