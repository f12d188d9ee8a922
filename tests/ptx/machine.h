// A machine that runs PTX: warps of 32 lanes, one instruction at a time. Included by `machine.c`, which schedules, and
// by the generated files of opcodes.
#define _GNU_SOURCE
#include <fenv.h>
#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// What an instruction returns: the warp goes on, or the launch ends with an error.
enum { GO_ON, STOP };
// Control flow is `machine.c`'s.
enum { ORDINARY, BRANCH, RETURN, BARRIER, WARP_BARRIER };
// Errors and, from RACE_BETWEEN_BLOCKS on, what the check of races finds. `machine.py` has their words.
enum {
  OUT_OF_BOUNDS, MISALIGNED, SHARED_OUT_OF_BOUNDS, DIVERGENT_BARRIER, DIVERGENT_COLLECTIVE, INACTIVE_SOURCE,
  TOO_MANY_INSTRUCTIONS, UNORDERED, UNINITIALISED_SHARED, RACE_BETWEEN_BLOCKS, RACE_IN_BLOCK, RACE_IN_WARP
};
enum { GLOBAL, SHARED };
enum { READ, WRITE, ATOMIC_UPDATE };

struct Warp;
typedef struct Instruction {
  int (*run)(struct Warp *, const struct Instruction *, uint32_t lanes);
  int32_t control, guard, negated, target, line;           // guard: register, -1 if none
  int32_t lanes;                                          // register of the lanes that a collective names, -1: none
  int64_t offset;                                         // of an address, or a parameter's number
  int32_t destinations[4], sources[6];                    // registers: offsets in bytes, -1 if none
} Instruction;

typedef struct { int32_t kind, line, other_line, block, thread, other_thread; uint64_t address; } Event;

// Counted for each launch. A sector is 32 aligned bytes of global memory; a warp's access moves each once.
typedef struct { uint64_t sectors_read, sectors_written; } Counters;

// An access to 4 bytes. `barriers` and `warp_barriers` count those that the block and the warp have passed: accesses
// of a block are in order if a barrier lies between them, those of a warp also if a warp's barrier does.
typedef struct { int32_t block, line; uint32_t barriers, warp_barriers; int16_t thread; uint8_t atomic, bytes; } Access;
// The last write, the last read, and a read by another warp, or else another thread, than that one's.
typedef struct { Access write, read, other_read; uint8_t initialised; } Shadow;
typedef struct { uint64_t page; Shadow *words; } ShadowPage;

typedef struct { uint64_t start, end; } Span;
typedef struct { uint64_t start, end, is_written; } Claim;  // bytes that another stream reads or writes meanwhile
typedef struct Block {
  struct Warp *warps; char *shared; Shadow *shadow; int32_t number, x, y, z, unfinished, at_barrier; uint32_t barriers;
} Block;
typedef struct Machine {
  const Instruction *code; const char *initial_registers; int32_t num_register_bytes, grid[3], num_warps;
  int32_t num_shared_bytes; const uint64_t *parameters; const Span *spans; int32_t num_spans, last_span, check_races;
  const Claim *claims; uint64_t num_claims;
  Event *events; int32_t num_events, max_events; Counters *counters; uint64_t limit, random;
  ShadowPage *pages; uint64_t num_page_slots, num_pages; ShadowPage *last_page;
} Machine;
typedef struct Warp {
  char *registers; Machine *machine; Block *block; int32_t index, state, is_diverged, pc, pcs[32];
  uint32_t alive, waiting, barriers;
} Warp;

void report(Warp *w, int kind, const Instruction *i, int other_line, int lane, int other_thread, uint64_t address);
void check_access(Warp *w, const Instruction *i, int space, int lane, uint64_t address, int size, int access, const void *value);

#define D(T, k) ((T *)(w->registers + i->destinations[k]))
#define S(T, k) ((T *)(w->registers + i->sources[k]))
#define EACH(...) if (m == ~0u) { _Pragma("GCC ivdep") for (int l = 0; l < 32; l++) { __VA_ARGS__; } } \
  else { for (int l = 0; l < 32; l++) if (m >> l & 1) { __VA_ARGS__; } }
#define PREDICATE(k, value) { uint32_t value_ = (value); D(uint32_t, k)[0] = (D(uint32_t, k)[0] & ~m) | (value_ & m); }
#define FAIL(kind, lane, address) { report(w, kind, i, -1, lane, -1, address); return STOP; }

static inline uint64_t address_of(Warp *w, const Instruction *i, int space, int l) {
  if (i->sources[0] < 0) return i->offset;
  if (space == GLOBAL) return ((uint64_t *)(w->registers + i->sources[0]))[l] + i->offset;
  return (uint32_t)(((uint32_t *)(w->registers + i->sources[0]))[l] + i->offset);
}

static inline int is_in_a_span(Machine *c, uint64_t address, int size) {
  const Span *s = c->spans + c->last_span;
  if (address >= s->start && address + size <= s->end) return 1;
  for (int k = 0; k < c->num_spans; k++)
    if (address >= c->spans[k].start && address + size <= c->spans[k].end) { c->last_span = k; return 1; }
  return c->num_spans == 0;  // not checked
}

#define CHECK_ADDRESS(space, size) \
  if (address & ((size) - 1)) FAIL(MISALIGNED, l, address) \
  if (space == SHARED && address + (size) > (uint64_t)w->machine->num_shared_bytes) FAIL(SHARED_OUT_OF_BOUNDS, l, address) \
  if (space == GLOBAL && !is_in_a_span(w->machine, address, size)) FAIL(OUT_OF_BOUNDS, l, address)
static inline int is_claimed(Machine *c, uint64_t address, int size, int access) {
  for (uint64_t k = 0; k < c->num_claims; k++)
    if (address < c->claims[k].end && address + size > c->claims[k].start && (access != READ || c->claims[k].is_written)) return 1;
  return 0;
}

#define CHECK_ORDER(space, size, access) \
  if (space == GLOBAL && is_claimed(w->machine, address, size, access)) FAIL(UNORDERED, l, address)
#define POINTER(space) (space == SHARED ? w->block->shared + address : (char *)address)

// The 32-byte sectors of a warp's access to global memory.
static inline void count_access(Warp *w, const Instruction *i, uint32_t m, int access) {
  uint64_t sectors[32]; int count = 0;
  for (int l = 0; l < 32; l++) if (m >> l & 1) {
    uint64_t sector = address_of(w, i, GLOBAL, l) >> 5; int k = count;
    while (k > 0 && sectors[k - 1] != sector) k--;
    if (k == 0) sectors[count++] = sector;
  }
  Counters *c = w->machine->counters;
  if (access != WRITE) c->sectors_read += count;
  if (access != READ) c->sectors_written += count;
}

#define LOAD(space, T, N) { \
  if (space == GLOBAL) count_access(w, i, m, READ); \
  for (int l = 0; l < 32; l++) if (m >> l & 1) { \
    uint64_t address = address_of(w, i, space, l); CHECK_ADDRESS(space, sizeof(T) * N) \
    CHECK_ORDER(space, sizeof(T) * N, READ) \
    if (w->machine->check_races) check_access(w, i, space, l, address, sizeof(T) * N, READ, 0); \
    for (int k = 0; k < N; k++) D(T, k)[l] = ((T *)POINTER(space))[k]; } }
#define STORE(space, T, N) { \
  if (space == GLOBAL) count_access(w, i, m, WRITE); \
  for (int l = 0; l < 32; l++) if (m >> l & 1) { \
    uint64_t address = address_of(w, i, space, l); CHECK_ADDRESS(space, sizeof(T) * N) \
    CHECK_ORDER(space, sizeof(T) * N, WRITE) \
    T values[N]; for (int k = 0; k < N; k++) values[k] = S(T, 1 + k)[l]; \
    if (w->machine->check_races) check_access(w, i, space, l, address, sizeof(values), WRITE, values); \
    memcpy(POINTER(space), values, sizeof(values)); } }
#define ATOMIC(space, T, value) { \
  if (space == GLOBAL) count_access(w, i, m, ATOMIC_UPDATE); \
  for (int l = 0; l < 32; l++) if (m >> l & 1) { \
    uint64_t address = address_of(w, i, space, l); CHECK_ADDRESS(space, sizeof(T)) \
    CHECK_ORDER(space, sizeof(T), ATOMIC_UPDATE) \
    if (w->machine->check_races) check_access(w, i, space, l, address, sizeof(T), ATOMIC_UPDATE, 0); \
    T *at = (T *)POINTER(space), a = *at, b = S(T, 1)[l]; *at = (value); \
    if (i->destinations[0] >= 0) D(T, 0)[l] = a; } }
#define MATRIX_ROWS(N, access) \
  if (m != ~0u) FAIL(DIVERGENT_COLLECTIVE, 0, m) \
  uint64_t rows[32]; for (int l = 0; l < 32; l++) rows[l] = address_of(w, i, SHARED, l); \
  for (int k = 0; k < N; k++) for (int l = 0; l < 32; l++) { \
    uint64_t row = rows[8 * k + l / 4], address = row + l % 4 * 4; if (row & 15) FAIL(MISALIGNED, l, row) \
    CHECK_ADDRESS(SHARED, 4) uint32_t *at = (uint32_t *)(w->block->shared + address); \
    if (w->machine->check_races) check_access(w, i, SHARED, l, address, 4, access, access == WRITE ? S(uint32_t, 1 + k) + l : 0);
#define MATRIX_LOAD(N) uint32_t got[N][32]; MATRIX_ROWS(N, READ) got[k][l] = *at; } \
  for (int k = 0; k < N; k++) memcpy(D(uint32_t, k), got[k], 128);
#define MATRIX_STORE(N) MATRIX_ROWS(N, WRITE) *at = S(uint32_t, 1 + k)[l]; }

typedef union { float f; uint32_t u; } Bits;
static inline float flush(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }
// NVIDIA's arithmetic has one NaN.
static inline float canonical(float x) { Bits nan = {.u = 0x7fffffff}; return x == x ? x : nan.f; }
// A NaN loses, and +0 is larger than -0, so that the order of the operands does not matter.
static inline float max_number(float a, float b) {
  Bits x = {a}, y = {b}, zero = {.u = x.u & y.u};
  return a > b ? a : b > a ? b : a == b ? zero.f : a == a ? a : canonical(b);
}
static inline float min_number(float a, float b) { return -max_number(-a, -b); }
static inline float from_bfloat(uint16_t h) { Bits x = {.u = (uint32_t)h << 16}; return x.f; }
static inline float from_half(uint16_t h) { _Float16 x; memcpy(&x, &h, 2); return x; }
// Floats beyond an integer's range become its end; NaN becomes 0, or the least number of 64 bits.
// `x` is integral.
#define TO_INTEGER(name, source, T, low, high, nan) \
  static inline T name(source x) { return x != x ? (T)(nan) : x >= (source)(high) ? (T)(high) : x <= (source)(low) ? (T)(low) : (T)x; }
TO_INTEGER(narrow_to_s32, float, int32_t, INT32_MIN, INT32_MAX, 0)
TO_INTEGER(narrow_to_u32, float, uint32_t, 0, UINT32_MAX, 0)
TO_INTEGER(wide_to_s64, double, int64_t, INT64_MIN, INT64_MAX, INT64_MIN)

static inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t bytes = (uint64_t)b << 32 | a; uint32_t result = 0;
  for (int k = 0; k < 4; k++) {
    uint32_t choice = selector >> 4 * k & 15, byte = bytes >> 8 * (choice & 7) & 255;
    if (choice & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * k;
  }
  return result;
}
static inline uint64_t extract_bits(uint64_t a, uint32_t start, uint32_t length, int bits, int is_signed) {
  start &= 255, length &= 255;
  if (length == 0) return 0;
  uint32_t last = start + length - 1 < (uint32_t)bits ? start + length - 1 : bits - 1;
  uint64_t sign = is_signed && a >> last & 1 ? ~0ull : 0;
  if (start >= (uint32_t)bits) return sign;
  uint32_t kept = last - start + 1;
  uint64_t mask = kept == 64 ? ~0ull : (1ull << kept) - 1;
  return (a >> start & mask) | (sign & ~mask);
}
