/* Causal attention of one head in three orders, with the same matmuls of tiles: only what is kept, and where, differs.
 * Compiled when `rush explain flash-attention` runs, called through ctypes.
 *
 * `plain`: all scores are written to memory, then every row's softmax, then the matmul with the values.
 * `first` (FlashAttention 1): the outer loop is over tiles of keys, the inner one over tiles of queries, whose outputs,
 * maxima and sums lie in memory and are read, rescaled, divided and written again for every tile of keys.
 * `second` (FlashAttention 2): the outer loop is over tiles of queries, whose outputs stay near until all keys have been
 * seen; they are divided once. Tiles of queries need nothing of each other: every `stride`-th from `from` on is computed.
 *
 * q, v and o are [length, 64], each tile of 64 keys comes transposed: [length / 64, 64, 64].
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float lane __attribute__((vector_size(4 * LANES)));
typedef int32_t whole __attribute__((vector_size(4 * LANES)));

enum { TILE = 64, DIM = 64, ROWS = 4 };
static const float NEVER = -1e30f;

static inline lane load(const float *from) { lane out; memcpy(&out, from, sizeof out); return out; }
static inline void store(float *to, lane value) { memcpy(to, &value, sizeof value); }
static inline lane all(float value) { return (lane){0} + value; }

/* C has no choice between the lanes of two vectors, but a comparison gives all bits or none. */
static inline lane chosen(whole where, lane value, lane other)
{
    whole a, b;
    memcpy(&a, &value, sizeof a);
    memcpy(&b, &other, sizeof b);
    a = (a & where) | (b & ~where);
    memcpy(&value, &a, sizeof value);
    return value;
}

/* e to the x for x <= 0, to a few units in the last place: 2 to a whole number by its exponent, the rest by a polynomial. */
static inline lane power(lane x)
{
    x = x * 1.44269504f;
    const lane shift = all(12582912.0f), shifted = x + shift, r = x - (shifted - shift);
    lane value = r * 0.00133989391f + 0.00961843798f;
    value = value * r + 0.0555033232f;
    value = value * r + 0.240226479f;
    value = value * r + 0.693147203f;
    value = value * r + 1.0f;
    whole bits, exponent;
    memcpy(&bits, &value, sizeof bits);
    memcpy(&exponent, &shifted, sizeof exponent);
    bits += exponent << 23;
    memcpy(&value, &bits, sizeof value);
    return chosen(x >= all(-126.0f), value, (lane){0});
}

/* Sums of so many vectors by so many rows stay in registers. */
#if defined(__AVX512F__)
#define VECTORS 4
#else
#define VECTORS 2
#endif

/* c = a · b, or c + a · b: [64, 64] each, with the distance from row to row. */
static void matmul(const float *a, long a_row, const float *b, long b_row, float *c, long c_row, int add)
{
    for (int m = 0; m < TILE; m += ROWS)
        for (int n = 0; n < TILE; n += VECTORS * LANES) {
            lane sums[ROWS][VECTORS];
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
                for (int w = 0; w < VECTORS; w++)
                    sums[r][w] = add ? load(c + (m + r) * c_row + n + w * LANES) : (lane){0};
            for (int k = 0; k < DIM; k++) {
                lane row[VECTORS];
#pragma GCC unroll 4
                for (int w = 0; w < VECTORS; w++)
                    row[w] = load(b + k * b_row + n + w * LANES);
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
                    for (int w = 0; w < VECTORS; w++)
                        sums[r][w] += row[w] * a[(m + r) * a_row + k];
            }
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
                for (int w = 0; w < VECTORS; w++)
                    store(c + (m + r) * c_row + n + w * LANES, sums[r][w]);
        }
}

static inline float largest(const float *row, long count)
{
    lane best = all(NEVER);
    for (long n = 0; n < count; n += LANES) {
        const lane value = load(row + n);
        best = chosen(value > best, value, best);
    }
    float top = best[0];
    for (int k = 1; k < LANES; k++)
        top = best[k] > top ? best[k] : top;
    return top;
}

/* The row becomes e to the (row − top); its sum. */
static inline float powers(float *row, long count, float top)
{
    lane total = {0};
    for (long n = 0; n < count; n += LANES) {
        const lane value = power(load(row + n) - top);
        store(row + n, value);
        total += value;
    }
    float sum = 0;
    for (int k = 0; k < LANES; k++)
        sum += total[k];
    return sum;
}

static inline void scale(float *row, float factor)
{
    for (int d = 0; d < DIM; d += LANES)
        store(row + d, load(row + d) * factor);
}

/* Scores of a tile, scaled, with what lies after a query masked on the diagonal. */
static void tile_scores(const float *q, const float *k_t, long i, long j, float *s, long s_row)
{
    matmul(q + i * TILE * DIM, DIM, k_t + j * TILE * DIM, TILE, s, s_row, 0);
    for (int m = 0; m < TILE; m++) {
        for (int n = 0; n < TILE; n += LANES)
            store(s + m * s_row + n, load(s + m * s_row + n) * 0.125f);
        for (int n = m + 1; i == j && n < TILE; n++)
            s[m * s_row + n] = NEVER;
    }
}

void plain(const float *q, const float *k_t, const float *v, float *o, float *scores, long length)
{
    const long tiles = length / TILE;
    for (long i = 0; i < tiles; i++)
        for (long j = 0; j <= i; j++)
            tile_scores(q, k_t, i, j, scores + i * TILE * length + j * TILE, length);
    for (long t = 0; t < length; t++) {
        float *row = scores + t * length;
        const long seen = (t / TILE + 1) * TILE;
        const float inverse = 1 / powers(row, seen, largest(row, seen));
        for (long n = 0; n < seen; n += LANES)
            store(row + n, load(row + n) * inverse);
    }
    for (long i = 0; i < tiles; i++)
        for (long j = 0; j <= i; j++)
            matmul(scores + i * TILE * length + j * TILE, length, v + j * TILE * DIM, DIM, o + i * TILE * DIM, DIM, j > 0);
}

void first(const float *q, const float *k_t, const float *v, float *o, float *top, float *sum, long length)
{
    const long tiles = length / TILE;
    float s[TILE * TILE], pv[TILE * DIM];
    for (long t = 0; t < length; t++) {
        top[t] = NEVER;
        sum[t] = 0;
    }
    memset(o, 0, sizeof(float) * length * DIM);
    for (long j = 0; j < tiles; j++)
        for (long i = j; i < tiles; i++) {
            tile_scores(q, k_t, i, j, s, TILE);
            float keep[TILE], take[TILE];
            for (int m = 0; m < TILE; m++) {
                const long t = i * TILE + m;
                const float here = largest(s + m * TILE, TILE), total = powers(s + m * TILE, TILE, here);
                const float now = here > top[t] ? here : top[t];
                const float old = expf(top[t] - now), new = expf(here - now), both = old * sum[t] + new * total;
                keep[m] = sum[t] * old / both;
                take[m] = new / both;
                top[t] = now;
                sum[t] = both;
            }
            matmul(s, TILE, v + j * TILE * DIM, DIM, pv, DIM, 0);
            for (int m = 0; m < TILE; m++) {
                float *out = o + (i * TILE + m) * DIM;
                for (int d = 0; d < DIM; d += LANES)
                    store(out + d, load(out + d) * keep[m] + load(pv + m * DIM + d) * take[m]);
            }
        }
}

void second(const float *q, const float *k_t, const float *v, float *o, long length, long from, long stride)
{
    float s[TILE * TILE], out[TILE * DIM], top[TILE], sum[TILE];
    for (long i = from; i < length / TILE; i += stride) {
        memset(out, 0, sizeof out);
        for (int m = 0; m < TILE; m++) {
            top[m] = NEVER;
            sum[m] = 0;
        }
        for (long j = 0; j <= i; j++) {
            tile_scores(q, k_t, i, j, s, TILE);
            for (int m = 0; m < TILE; m++) {
                const float here = largest(s + m * TILE, TILE), now = here > top[m] ? here : top[m];
                const float old = expf(top[m] - now);
                sum[m] = old * sum[m] + powers(s + m * TILE, TILE, now);
                top[m] = now;
                scale(out + m * DIM, old);
            }
            matmul(s, TILE, v + j * TILE * DIM, DIM, out, DIM, 1);
        }
        for (int m = 0; m < TILE; m++) {
            scale(out + m * DIM, 1 / sum[m]);
            memcpy(o + (i * TILE + m) * DIM, out + m * DIM, sizeof(float) * DIM);
        }
    }
}
