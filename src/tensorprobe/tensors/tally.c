/* Statistics and digests of contiguous memory, in one pass; tally.py calls it through ctypes.

   What is read is divided into chunks of 64 KiB, each of which gives one part; parts are joined in
   their order. So numbers depend neither on how many threads read nor, as every sum
   runs over LANES fixed lanes and no product is contracted, on the processor.

   build.py has the options of the compiler. They matter: see there. */

#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define VERSION 4 /* tally.py uses a library of its own version only */

enum { CHUNK_NBYTES = 65536, CHUNK_WORDS = CHUNK_NBYTES / 8 };
enum { BLOCK = 4096 }; /* elements that are summed before lanes are added up: 1e-13 holds */
enum { LANES = 16, BUCKETS = 16 };
enum { TILE = 256 };  /* numbers of a sketch that share a weight */
enum { STATS = 1, DIGEST = 2 };
enum { MOST_DIMS = 64 }; /* as torch has them */
enum { AHEAD = 4096 }; /* bytes: without a word about it, memory waits for arithmetic */
enum { F64, F32, F16, BF16, I64, I32, I16, I8, U32, U16, U8, U64, BOOL };

static const int ITEM_NBYTES[] = {8, 4, 2, 2, 8, 4, 2, 1, 4, 2, 1, 8, 1};

#define INLINE static inline __attribute__((always_inline))
#define INFINITE __builtin_inf()
#define IS_FINITE(x) ((x) - (x) == 0)
#define LOWER(x, low) ((x) < (low) ? (x) : (low)) /* a NaN is not lower, */
#define UPPER(x, high) ((x) > (high) ? (x) : (high)) /* and not higher */

typedef union {
    double real;
    int64_t whole;
    uint64_t natural;
} bound;

typedef struct {
    double value, rest; /* stand for their sum (A. Neumaier, 1974) */
} sum;

typedef struct {
    bound low, high;    /* over what is not NaN */
    sum total, square;  /* over what is finite */
    int64_t nan, inf, zero;
    uint64_t mixed; /* of the digest: fmix(p + (c + 1) * GOLD) */
    double sketch[BUCKETS];
} part;

typedef struct {
    bound low, high;
    double mean, norm;
    int64_t nan, inf, zero;
    uint64_t digest;
    int64_t state;
    double sketch[BUCKETS];
} row;

/* How the elements of a tensor lie: by steps in bytes, the last dimension innermost. */
typedef struct {
    int64_t dims;
    int64_t lengths[MOST_DIMS], steps[MOST_DIMS];
} layout;

typedef struct {
    int64_t wants, kind, nbytes, repeat, threads;
    const layout *layout; /* if they do not lie in one piece */
    row row;              /* the answer */
} request; /* arguments one by one would cost ctypes 0.2 us each */

enum { BOUNDED = 1, FINITE = 2, OUT_OF_RANGE = 4 }; /* states of a row */

static void add(sum *to, double x) {
    double value = to->value + x;
    if (__builtin_fabs(to->value) >= __builtin_fabs(x))
        to->rest += (to->value - value) + x;
    else
        to->rest += (x - value) + to->value;
    to->value = value;
}

static double whole(const sum *of) { /* what overflowed has no rest */
    return IS_FINITE(of->value) ? of->value + of->rest : of->value;
}

/* Memory as it may lie: at any address. */
typedef double __attribute__((aligned(1), may_alias)) f64_any;
typedef float __attribute__((aligned(1), may_alias)) f32_any;
typedef int64_t __attribute__((aligned(1), may_alias)) i64_any;
typedef int32_t __attribute__((aligned(1), may_alias)) i32_any;
typedef int16_t __attribute__((aligned(1), may_alias)) i16_any;
typedef int8_t __attribute__((may_alias)) i8_any;
typedef uint64_t __attribute__((aligned(1), may_alias)) u64_any;
typedef uint32_t __attribute__((aligned(1), may_alias)) u32_any;
typedef uint16_t __attribute__((aligned(1), may_alias)) u16_any;
typedef uint8_t __attribute__((may_alias)) u8_any;

/* Of the few numbers that fill no lanes, vectors would only take the compiler's time. */
#define ONE_BY_ONE(j) __asm__ volatile("" : "+r"(j));

/* Lanes are arrays, and loops over them of a fixed length: the compiler makes vectors of them. */
#define ADD_UP(lanes)                           \
    for (int step = LANES / 2; step; step /= 2) \
        for (int j = 0; j < step; j++) (lanes)[j] += (lanes)[j + step];

/* The sketch: see sketch.py. Lanes of a tile are added up with the weights of cells, and the lanes
   of tiles with those of tiles. */

static double within[TILE]; /* weights of the numbers of a tile, without that of the tile */

INLINE double weight_of(uint32_t number) {
    uint32_t x = number * 0x9E3779B1u + 0x7F4A7C15u;
    uint64_t bits = (uint64_t)(((x ^ x >> 15) * 0x85EBCA77u & 0x800FFFFFu) | 0x3FF00000u) << 32;
    double weight;
    memcpy(&weight, &bits, 8);
    return weight;
}

INLINE void add_sketch(part *into, double sketch[4][LANES]) {
    for (int b = 0; b < BUCKETS; b++) {
        const double *of = sketch[b / 4] + b % 4;
        into->sketch[b] += (of[0] + of[4]) + (of[8] + of[12]);
    }
}

/* Both give the same where the product is exact: of numbers that have no more than 32 bits. */
#define PLUS(sum, x, weight) ((sum) + (x) * (weight))
#define PLUS_AT_ONCE(sum, x, weight) \
    (fused ? __builtin_fma(x, weight, sum) : PLUS(sum, x, weight))

#define END_TILE                                                                 \
    {                                                                            \
        double *to = sketch[tile % 4], by = weight_of((uint32_t)tile);           \
        for (int j = 0; j < LANES; j++) to[j] += by * weighed[j];                \
        tile++;                                                                  \
    }

/* A block of numbers, of which each goes through STEP(x, j, weights), in tiles and lanes. */
#define IN_TILES(NUMBER, STEP)                                                   \
    while (i + TILE <= n) {                                                      \
        double weighed[LANES] = {0};                                             \
        const double *by = within;                                               \
        for (int s = 0; s < TILE / LANES; s++, i += LANES, by += LANES) {        \
            __builtin_prefetch((const char *)(data + i) + AHEAD);                \
            for (int j = 0; j < LANES; j++) {                                    \
                NUMBER x = data[i + j];                                          \
                STEP(x, j, by)                                                   \
            }                                                                    \
        }                                                                        \
        END_TILE                                                                 \
    }                                                                            \
    if (i < n) {                                                                 \
        double weighed[LANES] = {0};                                             \
        const double *by = within;                                               \
        for (; i + LANES <= n; i += LANES, by += LANES)                          \
            for (int j = 0; j < LANES; j++) {                                    \
                NUMBER x = data[i + j];                                          \
                STEP(x, j, by)                                                   \
            }                                                                    \
        for (int j = 0; i < n; i++, j++) {                                       \
            ONE_BY_ONE(j)                                                        \
            NUMBER x = data[i];                                                  \
            STEP(x, j, by)                                                       \
        }                                                                        \
        END_TILE                                                                 \
    }

#define FLOAT_STEP(x, j, by)                                    \
    low[j] = LOWER(x, low[j]);                                  \
    high[j] = UPPER(x, high[j]);                                \
    zero[j] += (x) == 0;                                        \
    if (careful) {                                              \
        nan[j] += (x) != (x);                                   \
        finite[j] += IS_FINITE(x);                              \
        (x) = IS_FINITE(x) ? (x) : 0;                           \
    }                                                           \
    total[j] += (double)(x);                                    \
    square[j] = ADD_PRODUCT(square[j], (double)(x), (double)(x)); \
    weighed[j] = ADD_PRODUCT(weighed[j], (double)(x), by[j]);

/* A block of numbers. A sum that is not finite tells that something has to be left out of it: then
   once more, carefully. */
#define FLOAT_BLOCK(NAME, MEMORY, NUMBER)                                              \
    INLINE int NAME##_pass(const MEMORY *data, int n, int64_t tile, part *into,        \
                           const int fused, const int careful) {                       \
        double total[LANES] = {0}, square[LANES] = {0}, sketch[4][LANES] = {0};        \
        int32_t zero[LANES] = {0}, nan[LANES] = {0}, finite[LANES] = {0};              \
        NUMBER low[LANES], high[LANES];                                                \
        int i = 0;                                                                     \
        for (int j = 0; j < LANES; j++) low[j] = INFINITE, high[j] = -INFINITE;        \
        IN_TILES(NUMBER, FLOAT_STEP)                                                   \
        ADD_UP(total)                                                                  \
        if (!careful && !IS_FINITE(total[0])) return 0;                                \
        ADD_UP(square)                                                                 \
        ADD_UP(zero)                                                                   \
        for (int j = 0; j < LANES; j++) {                                              \
            into->low.real = LOWER(low[j], into->low.real);                            \
            into->high.real = UPPER(high[j], into->high.real);                         \
        }                                                                              \
        if (careful) {                                                                 \
            ADD_UP(nan)                                                                \
            ADD_UP(finite)                                                             \
            into->nan += nan[0];                                                       \
            into->inf += n - finite[0] - nan[0];                                       \
        }                                                                              \
        into->zero += zero[0];                                                         \
        add(&into->total, total[0]);                                                   \
        add(&into->square, square[0]);                                                 \
        add_sketch(into, sketch);                                                      \
        return 1;                                                                      \
    }                                                                                  \
    INLINE void NAME##_block(const void *data, int n, int64_t tile, part *into,        \
                             const int fused) {                                        \
        if (!NAME##_pass(data, n, tile, into, fused, 0))                               \
            NAME##_pass(data, n, tile, into, fused, 1);                                \
    }

#define ADD_PRODUCT PLUS
FLOAT_BLOCK(f64, f64_any, double)
#undef ADD_PRODUCT
#define ADD_PRODUCT PLUS_AT_ONCE
FLOAT_BLOCK(f32, f32_any, float)

#define WHOLE_STEP(x, j, by)                 \
    low[j] = LOWER(x, low[j]);               \
    high[j] = UPPER(x, high[j]);             \
    zero[j] += (x) == 0;                     \
    total[j] += (x);                         \
    square[j] += (double)(x) * (double)(x);  \
    weighed[j] = PLUS(weighed[j], (double)(x), by[j]);

/* Integers, likewise. TOTAL holds the sum over a lane exactly, or is double. */
#define WHOLE_BLOCK(NAME, MEMORY, NUMBER, FIELD, TOTAL)                  \
    INLINE void NAME##_block(const void *memory, int n, int64_t tile,    \
                             part *into, const int fused) {              \
        (void)fused;                                                     \
        const MEMORY *data = memory;                                     \
        TOTAL total[LANES] = {0};                                        \
        double square[LANES] = {0}, sketch[4][LANES] = {0};              \
        int32_t zero[LANES] = {0};                                       \
        NUMBER low[LANES], high[LANES];                                  \
        int i = 0;                                                       \
        for (int j = 0; j < LANES; j++) low[j] = high[j] = data[0];      \
        IN_TILES(NUMBER, WHOLE_STEP)                                     \
        ADD_UP(total)                                                    \
        ADD_UP(square)                                                   \
        ADD_UP(zero)                                                     \
        for (int j = 0; j < LANES; j++) {                                \
            into->low.FIELD = LOWER(low[j], into->low.FIELD);            \
            into->high.FIELD = UPPER(high[j], into->high.FIELD);         \
        }                                                                \
        into->zero += zero[0];                                           \
        add(&into->total, (double)total[0]);                             \
        add(&into->square, square[0]);                                   \
        add_sketch(into, sketch);                                        \
    }

WHOLE_BLOCK(i64, i64_any, int64_t, whole, double)
WHOLE_BLOCK(u64, u64_any, uint64_t, natural, double)
WHOLE_BLOCK(i32, i32_any, int32_t, whole, int64_t)

#define BOOL_STEP(x, j, by) \
    total[j] += (x);        \
    weighed[j] = PLUS_AT_ONCE(weighed[j], (double)(x), by[j]);

INLINE void bool_block(const void *memory, int n, int64_t tile, part *into, const int fused) {
    const u8_any *bytes = memory;
    float data[BLOCK], total[LANES] = {0}; /* exact: a lane has no more than BLOCK / LANES */
    double sketch[4][LANES] = {0};
    int i = 0;
    for (; i < n; i++) data[i] = bytes[i] != 0;
    i = 0;
    IN_TILES(float, BOOL_STEP)
    ADD_UP(total)
    into->zero += n - (int)total[0];
    add_sketch(into, sketch);
}

/* The others are blocks of a wider kind, made in the cache. */

INLINE float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE float wide_bf16(uint16_t x) { return from_bits((uint32_t)x << 16); }

INLINE float wide_f16(uint16_t x) {
    /* Exponent and mantissa in the place of float32's are the number times 2**-112, subnormals
       too; the exponent of infinities and NaN is made the one they have there. */
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = (uint32_t)(x & 0x7fff) << 13, bits;
    float value = from_bits(rest) * 0x1p112f;
    memcpy(&bits, &value, 4);
    return from_bits(sign | bits | (rest >= 0x7c00 << 13 ? 0x7f800000 : 0));
}

#define WIDE_BLOCK(NAME, MEMORY, WIDER, NUMBER, WIDEN)                                \
    INLINE void NAME##_block(const void *memory, int n, int64_t tile, part *into,     \
                             const int fused) {                                       \
        const MEMORY *data = memory;                                                  \
        NUMBER wide[BLOCK];                                                           \
        int i = 0;                                                                    \
        for (; i + 64 <= n; i += 64) {                                                \
            __builtin_prefetch((const char *)(data + i) + AHEAD);                     \
            __builtin_prefetch((const char *)(data + i) + AHEAD + 64);                \
            for (int j = 0; j < 64; j++) wide[i + j] = WIDEN(data[i + j]);            \
        }                                                                             \
        for (; i < n; i++) wide[i] = WIDEN(data[i]);                                  \
        WIDER##_block(wide, n, tile, into, fused);                                    \
    }

WIDE_BLOCK(f16, u16_any, f32, float, wide_f16)
WIDE_BLOCK(bf16, u16_any, f32, float, wide_bf16)
WIDE_BLOCK(i16, i16_any, i32, int32_t, )
WIDE_BLOCK(i8, i8_any, i32, int32_t, )
WIDE_BLOCK(u32, u32_any, i64, int64_t, )
WIDE_BLOCK(u16, u16_any, i32, int32_t, )
WIDE_BLOCK(u8, u8_any, i32, int32_t, )

/* The digest: see digest.py. */

#define GOLD 0x9E3779B97F4A7C15u

static uint64_t weights[CHUNK_WORDS];

static uint64_t fmix(uint64_t x) {
    x = (x ^ x >> 33) * 0xFF51AFD7ED558CCDu;
    x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53u;
    return x ^ x >> 33;
}

INLINE uint64_t digest_chunk(const unsigned char *memory, int nbytes, int64_t number) {
    const u64_any *words = (const void *)memory;
    uint64_t product = 0, last = 0;
    int n = nbytes / 8;
    for (int i = 0; i < n; i++) product += (words[i] ^ words[i] >> 29) * weights[i];
    if (nbytes % 8) {
        memcpy(&last, memory + n * 8, nbytes % 8);
        product += (last ^ last >> 29) * weights[n];
    }
    return fmix(product + (uint64_t)(number + 1) * GOLD);
}

typedef void block_tally(const void *data, int n, int64_t tile, part *into);

typedef struct {
    uint64_t (*digest)(const unsigned char *data, int nbytes, int64_t number);
    block_tally *tally[BOOL + 1];
} level;

/* Everything once for each kind of processor. */
#define FOR_EACH_KIND(DO, LEVEL, TARGET)                                                 \
    DO(f64, LEVEL, TARGET) DO(f32, LEVEL, TARGET) DO(f16, LEVEL, TARGET)                 \
    DO(bf16, LEVEL, TARGET) DO(i64, LEVEL, TARGET) DO(i32, LEVEL, TARGET)                \
    DO(i16, LEVEL, TARGET) DO(i8, LEVEL, TARGET) DO(u32, LEVEL, TARGET)                  \
    DO(u16, LEVEL, TARGET) DO(u8, LEVEL, TARGET) DO(u64, LEVEL, TARGET)                  \
    DO(bool, LEVEL, TARGET)
#define FUNCTION(KIND, LEVEL, TARGET)                                                    \
    TARGET static void KIND##_##LEVEL(const void *data, int n, int64_t tile, part *into) { \
        KIND##_block(data, n, tile, into, FUSED_##LEVEL);                                \
    }
#define ADDRESS(KIND, LEVEL, TARGET) KIND##_##LEVEL,
#define LEVEL(LEVEL, TARGET)                                                             \
    FOR_EACH_KIND(FUNCTION, LEVEL, TARGET)                                               \
    TARGET static uint64_t digest_##LEVEL(const unsigned char *data, int nbytes, int64_t c) { \
        return digest_chunk(data, nbytes, c);                                            \
    }                                                                                    \
    static const level LEVEL = {digest_##LEVEL, {FOR_EACH_KIND(ADDRESS, LEVEL, TARGET)}};

enum { FUSED_plain = 0, FUSED_avx2 = 1, FUSED_avx512 = 1 };

LEVEL(plain, )
static const level *use = &plain;

#if defined(__x86_64__) && defined(__GNUC__)
#ifdef __clang__
#define WIDE "avx512f,avx512dq,avx512bw,avx512vl,fma"
#else
#define WIDE "avx512f,avx512dq,avx512bw,avx512vl,fma,prefer-vector-width=512"
#endif
LEVEL(avx2, __attribute__((target("avx2,fma"))))
LEVEL(avx512, __attribute__((target(WIDE))))

/* 0: what every processor has, 1: AVX2, 2: AVX-512. Gives back what is used. */
int tally_use(int most) {
    __builtin_cpu_init();
    int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    int some = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int best = wide && some ? 2 : some ? 1 : 0;
    best = most < best ? most : best;
    use = best == 2 ? &avx512 : best == 1 ? &avx2 : &plain;
    return best;
}
#else
int tally_use(int most) {
    (void)most;
    return 0;
}
#endif

static part nothing(int kind) {
    part part = {0};
    if (kind <= BF16)
        part.low.real = INFINITE, part.high.real = -INFINITE;
    else if (kind <= U8)
        part.low.whole = INT64_MAX, part.high.whole = INT64_MIN;
    else
        part.low.natural = UINT64_MAX, part.high.natural = 0;
    return part;
}

/* A program may have subnormals taken for zeros (torch.set_flush_denormal), and threads inherit
   that: here they count, whoever reads. */
#if defined(__x86_64__)
static unsigned own_mode(void) {
    unsigned mode = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(0x1f80);
    return mode;
}
static void back_to(unsigned mode) { __builtin_ia32_ldmxcsr(mode); }
#elif defined(__aarch64__)
static uint64_t own_mode(void) {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr\n\tmsr fpcr, xzr" : "=&r"(mode));
    return mode;
}
static void back_to(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
static int own_mode(void) { return 0; }
static void back_to(int mode) { (void)mode; }
#endif

static part read_chunk(int wants, int kind, const unsigned char *data, int nbytes,
                       int64_t number) {
    part part = nothing(kind);
    int item = ITEM_NBYTES[kind], step = BLOCK * item;
    if (wants & STATS) {
        __typeof__(own_mode()) mode = own_mode();
        int64_t tile = number * (CHUNK_NBYTES / item / TILE);
        for (int at = 0; at < nbytes; at += step, tile += BLOCK / TILE)
            use->tally[kind](data + at, (nbytes - at < step ? nbytes - at : step) / item, tile,
                             &part);
        back_to(mode);
    }
    if (wants & DIGEST) part.mixed = use->digest(data, nbytes, number);
    return part;
}

static void join(int kind, part *to, const part *from) {
    if (kind <= BF16) {
        to->low.real = LOWER(from->low.real, to->low.real);
        to->high.real = UPPER(from->high.real, to->high.real);
    } else if (kind <= U8) {
        to->low.whole = LOWER(from->low.whole, to->low.whole);
        to->high.whole = UPPER(from->high.whole, to->high.whole);
    } else {
        to->low.natural = LOWER(from->low.natural, to->low.natural);
        to->high.natural = UPPER(from->high.natural, to->high.natural);
    }
    add(&to->total, from->total.value);
    add(&to->square, from->square.value);
    to->total.rest += from->total.rest;
    to->square.rest += from->square.rest;
    to->nan += from->nan, to->inf += from->inf, to->zero += from->zero;
    to->mixed += from->mixed;
    for (int b = 0; b < BUCKETS; b++) to->sketch[b] += from->sketch[b];
}

/* One tensor, read by several threads. */
typedef struct {
    int wants, kind;
    const unsigned char *data;
    int64_t nbytes, n;
    part *parts;
    int64_t next; /* chunk that nobody has taken */
} job;

enum { SHARE = 4 }; /* chunks that are taken at a time */

static void take_shares(job *job) {
    int64_t first;
    while ((first = __atomic_fetch_add(&job->next, SHARE, __ATOMIC_RELAXED)) < job->n) {
        int64_t last = first + SHARE < job->n ? first + SHARE : job->n;
        for (int64_t c = first; c < last; c++) {
            int64_t at = c * CHUNK_NBYTES, left = job->nbytes - at;
            int size = left < CHUNK_NBYTES ? left : CHUNK_NBYTES;
            job->parts[c] = read_chunk(job->wants, job->kind, job->data + at, size, c);
        }
    }
}

/* Threads that wait for a job. Not Python's: those would need the interpreter before and after. */
static struct {
    pthread_mutex_t taken; /* by the thread whose job it is; others read alone meanwhile */
    pthread_mutex_t lock;  /* for all that follows */
    pthread_cond_t wake, idle;
    int threads; /* that were started */
    int wanted;  /* more for the job */
    int inside;  /* busy with the job */
    job *job;
} pool;

static void *help(void *unused) {
    (void)unused;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (!pool.job || !pool.wanted) pthread_cond_wait(&pool.wake, &pool.lock);
        job *job = pool.job;
        pool.wanted--, pool.inside++;
        pthread_mutex_unlock(&pool.lock);
        take_shares(job);
        pthread_mutex_lock(&pool.lock);
        if (!--pool.inside) pthread_cond_signal(&pool.idle);
    }
    return NULL;
}

static void start_threads(int wanted) {
    sigset_t all, before;
    pthread_attr_t attributes;
    pthread_t thread;
    sigfillset(&all); /* signals are the program's own, but for a thread's own faults */
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (pool.threads < wanted && !pthread_create(&thread, &attributes, help, NULL))
        pool.threads++;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void forget_threads(void) { /* in the child of a fork, which has none of them */
    memset(&pool, 0, sizeof(pool));
    pthread_mutex_init(&pool.taken, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.idle, NULL);
}

static void take_shares_together(job *job, int threads) {
    if (threads < 2 || pthread_mutex_trylock(&pool.taken)) {
        take_shares(job);
        return;
    }
    start_threads(threads - 1);
    pthread_mutex_lock(&pool.lock);
    pool.job = job;
    pool.wanted = threads - 1;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    take_shares(job);
    pthread_mutex_lock(&pool.lock);
    pool.job = NULL; /* who has not woken up yet need not */
    while (pool.inside) pthread_cond_wait(&pool.idle, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.taken);
}

/* What Python calls. */

__attribute__((constructor)) static void prepare(void) {
    for (uint64_t i = 0; i < CHUNK_WORDS; i++) {
        uint64_t z = (i + 1) * GOLD;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
        z = (z ^ z >> 27) * 0x94D049BB133111EBu;
        weights[i] = (z ^ z >> 31) | 1;
    }
    for (int i = 0; i < TILE; i++) {
        double weight = weight_of(0x7DB06470u + i / 8);
        within[i] = i % 8 < 4 ? weight : -weight;
    }
    tally_use(2);
    forget_threads();
    pthread_atfork(NULL, NULL, forget_threads);
}

int tally_version(void) { return VERSION; }

/* What is called in `own_mode` must not be moved out of it. */
#define IN_OWN_MODE(call)                        \
    do {                                         \
        __typeof__(own_mode()) mode = own_mode(); \
        call;                                    \
        back_to(mode);                           \
    } while (0)
#define APART static __attribute__((noinline))

/* The sum over chunks of which a digest is made; `number` is that of the first. */
uint64_t tally_mixed(const unsigned char *data, int64_t nbytes, int64_t number) {
    uint64_t mixed = 0;
    for (int64_t c = 0; c < nbytes; c += CHUNK_NBYTES, number++)
        mixed += use->digest(data + c, nbytes - c < CHUNK_NBYTES ? nbytes - c : CHUNK_NBYTES, number);
    return mixed;
}

APART void finish(int kind, int64_t nbytes, int64_t repeat, const part *all, row *row) {
    int64_t count = nbytes / ITEM_NBYTES[kind], finite = count - all->nan - all->inf;
    double total = whole(&all->total), square = whole(&all->square);
    row->state = (count > all->nan ? BOUNDED : 0) | (finite && kind != BOOL ? FINITE : 0);
    if (kind == F64 && (!IS_FINITE(total) || square > 0x1p1000 ||
                        (square < 0x1p-900 && finite > all->zero)))
        row->state |= OUT_OF_RANGE;
    row->low = all->low, row->high = all->high;
    if (kind <= BF16) { /* a zero without its sign, which would depend on the order */
        row->low.real += 0.0;
        row->high.real += 0.0;
    }
    if (kind == BOOL) row->low.whole = all->zero == 0, row->high.whole = all->zero < count;
    row->mean = total / (double)finite;
    row->norm = __builtin_sqrt(square) * __builtin_sqrt((double)repeat);
    row->nan = all->nan * repeat, row->inf = all->inf * repeat, row->zero = all->zero * repeat;
    row->digest = fmix(all->mixed + (uint64_t)nbytes * GOLD);
    memcpy(row->sketch, all->sketch, sizeof(row->sketch));
}

APART int answer(request *request, const unsigned char *data) {
    int wants = request->wants, kind = request->kind;
    int64_t nbytes = request->nbytes, n = (nbytes + CHUNK_NBYTES - 1) / CHUNK_NBYTES;
    if (n == 1) {
        part part = read_chunk(wants, kind, data, nbytes, 0);
        finish(kind, nbytes, request->repeat, &part, &request->row);
        return 1;
    }
    part all = nothing(kind), *parts = malloc(n * sizeof(part));
    if (!parts) return 0;
    job job = {wants, kind, data, nbytes, n, parts, 0};
    take_shares_together(&job, request->threads);
    for (int64_t c = 0; c < n; c++) join(kind, &all, parts + c);
    free(parts);
    finish(kind, nbytes, request->repeat, &all, &request->row);
    return 1;
}

/* A place among such elements. */
typedef struct {
    const layout *layout;
    const unsigned char *row; /* the first element of the row that is being read */
    int64_t done;             /* elements of it that were read */
    int64_t at[MOST_DIMS];    /* where the row is, but for the last dimension */
} cursor;

static void next_row(cursor *cursor) {
    const layout *layout = cursor->layout;
    cursor->done = 0;
    for (int64_t d = layout->dims - 2; d >= 0; d--) {
        cursor->row += layout->steps[d];
        if (++cursor->at[d] < layout->lengths[d]) return;
        cursor->row -= layout->steps[d] * layout->lengths[d];
        cursor->at[d] = 0;
    }
}

#define GATHER(TYPE) \
    for (int64_t i = 0; i < n; i++) ((TYPE *)to)[i] = *(const TYPE *)(from + i * step);

/* The next `count` elements, side by side. */
static void gather(cursor *cursor, unsigned char *to, int64_t count, int item) {
    const layout *layout = cursor->layout;
    int64_t length = layout->lengths[layout->dims - 1], step = layout->steps[layout->dims - 1];
    while (count) {
        int64_t n = length - cursor->done < count ? length - cursor->done : count;
        const unsigned char *from = cursor->row + cursor->done * step;
        if (step == item)
            memcpy(to, from, n * item);
        else if (item == 8)
            GATHER(u64_any)
        else if (item == 4)
            GATHER(u32_any)
        else if (item == 2)
            GATHER(u16_any)
        else
            GATHER(u8_any)
        to += n * item, count -= n, cursor->done += n;
        if (cursor->done == length) next_row(cursor);
    }
}

APART int answer_strided(request *request, const unsigned char *data) {
    _Alignas(64) unsigned char room[CHUNK_NBYTES]; /* stays in the cache */
    int kind = request->kind, item = ITEM_NBYTES[kind];
    cursor cursor = {request->layout, data, 0, {0}};
    part all = nothing(kind);
    for (int64_t c = 0; c * CHUNK_NBYTES < request->nbytes; c++) {
        int64_t left = request->nbytes - c * CHUNK_NBYTES;
        int size = left < CHUNK_NBYTES ? left : CHUNK_NBYTES;
        gather(&cursor, room, size / item, item);
        part part = read_chunk(request->wants, kind, room, size, c);
        join(kind, &all, &part);
    }
    finish(kind, request->nbytes, request->repeat, &all, &request->row);
    return 1;
}

/* Answer a request about memory; 0 where there is no room for the parts. */
int tally_memory(request *request, const unsigned char *data) {
    int done;
    IN_OWN_MODE(done = request->layout ? answer_strided(request, data) : answer(request, data));
    return done;
}
