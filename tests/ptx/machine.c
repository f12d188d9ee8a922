// Schedules warps and blocks, reconverges diverged lanes and looks for races. See `machine.h`.
#include "machine.h"

enum { READY, AT_BARRIER, FINISHED };       // a warp's state
enum { RAN_OUT, REACHED_BARRIER, ENDED, FAILED };  // why `run_warp` returned
enum { WORDS_PER_PAGE = 1024 };

void report(Warp *w, int kind, const Instruction *i, int other_line, int lane, int other_thread, uint64_t address) {
  Machine *c = w->machine;
  for (int k = 0; k < c->num_events; k++)
    if (c->events[k].kind == kind && c->events[k].line == i->line && c->events[k].other_line == other_line) return;
  if (c->num_events < c->max_events)
    c->events[c->num_events++] = (Event){kind, i->line, other_line, w->block->number, w->index * 32 + lane, other_thread, address};
}

static void clear(Shadow *words, int count) {
  for (int k = 0; k < count; k++) words[k].write.thread = words[k].read.thread = words[k].other_read.thread = -1, words[k].initialised = 0;
}

static ShadowPage *slot_of(Machine *c, uint64_t page) {
  uint64_t k = page * 0x9E3779B97F4A7C15ull >> 20 & (c->num_page_slots - 1);
  while (c->pages[k].words && c->pages[k].page != page) k = (k + 1) & (c->num_page_slots - 1);
  return c->pages + k;
}

static Shadow *global_shadow(Machine *c, uint64_t word) {
  uint64_t page = word / WORDS_PER_PAGE;
  if (!c->last_page || c->last_page->page != page) {
    if (c->num_pages * 2 >= c->num_page_slots) {
      ShadowPage *old = c->pages; uint64_t n = c->num_page_slots;
      c->num_page_slots = n ? 4 * n : 64, c->pages = calloc(c->num_page_slots, sizeof(ShadowPage));
      for (uint64_t k = 0; k < n; k++) if (old[k].words) *slot_of(c, old[k].page) = old[k];
      free(old);
    }
    c->last_page = slot_of(c, page);
    if (!c->last_page->words) {
      *c->last_page = (ShadowPage){page, malloc(WORDS_PER_PAGE * sizeof(Shadow))}, c->num_pages++;
      clear(c->last_page->words, WORDS_PER_PAGE);
    }
  }
  return c->last_page->words + word % WORDS_PER_PAGE;
}

// The kind of race of two accesses, at least one of which writes; -1: they are in order.
static int race_of(const Access *before, const Access *now) {
  if (before->thread < 0 || !(before->bytes & now->bytes) || (before->atomic && now->atomic)) return -1;
  if (before->block != now->block) return RACE_BETWEEN_BLOCKS;
  if (before->thread == now->thread || before->barriers != now->barriers) return -1;
  if (before->thread / 32 != now->thread / 32) return RACE_IN_BLOCK;
  return before->warp_barriers != now->warp_barriers ? -1 : RACE_IN_WARP;
}

// Happens-before along program order and barriers: what is found does not depend on the order in which warps ran. A
// store of the value that is already there is no race.
void check_access(Warp *w, const Instruction *i, int space, int lane, uint64_t address, int size, int access, const void *value) {
  Block *b = w->block;
  for (uint64_t word = address / 4; word <= (address + size - 1) / 4; word++) {
    Shadow *s = space == SHARED ? b->shadow + word : global_shadow(w->machine, word);
    uint64_t start = address > word * 4 ? address : word * 4, end = address + size < word * 4 + 4 ? address + size : word * 4 + 4;
    Access now = {b->number, i->line, b->barriers, w->barriers, w->index * 32 + lane, access == ATOMIC_UPDATE};
    now.bytes = ((1u << (end - start)) - 1) << (start - word * 4);
    const Access *before[3] = {&s->write, &s->read, &s->other_read};
    if (access == READ) {
      if (space == SHARED && now.bytes & ~s->initialised) report(w, UNINITIALISED_SHARED, i, -1, lane, -1, address);
      int kind = race_of(&s->write, &now);
      if (kind >= 0) report(w, kind, i, s->write.line, lane, s->write.thread, address);
      if (s->read.thread >= 0 && (s->read.block != now.block || s->read.thread != now.thread)) s->other_read = s->read;
      s->read = now;
      continue;
    }
    char *at = space == SHARED ? b->shared + start : (char *)start;
    int is_initialised = space == GLOBAL || !(now.bytes & ~s->initialised);
    if (access == WRITE && is_initialised && !memcmp(at, (const char *)value + (start - address), end - start)) continue;
    for (int k = 0; k < 3; k++) {
      int kind = race_of(before[k], &now);
      if (kind >= 0) report(w, kind, i, before[k]->line, lane, before[k]->thread, address);
    }
    s->write = now, s->initialised |= now.bytes;
  }
}

// The lanes that run next: those furthest behind. Where all wait for each other, those that wait at one instruction for
// no others; if there are none, lanes synchronise at different instructions, which PTX leaves undefined.
static uint32_t pick_lanes(Warp *w, const Instruction *code, int *next) {
  uint32_t lanes = 0;
  *next = INT_MAX;
  for (uint32_t left = w->waiting == w->alive ? w->alive : 0; left;) {
    int pc = w->pcs[__builtin_ctz(left)];
    const Instruction *i = code + pc;
    uint32_t here = 0, wanted = 0;
    for (int l = 0; l < 32; l++) if (w->alive >> l & 1 && w->pcs[l] == pc)
      here |= 1u << l, wanted |= ((uint32_t *)(w->registers + i->lanes))[l];
    if (!(wanted & w->alive & ~here)) { w->waiting &= ~here; break; }
    left &= ~here;
  }
  if (w->waiting == w->alive) return 0;
  int pc = INT_MAX;
  for (int l = 0; l < 32; l++) if ((w->alive & ~w->waiting) >> l & 1 && w->pcs[l] < pc) pc = w->pcs[l];
  for (int l = 0; l < 32; l++) if ((w->alive & ~w->waiting) >> l & 1) {
    if (w->pcs[l] == pc) lanes |= 1u << l;
    else if (w->pcs[l] < *next) *next = w->pcs[l];
  }
  if (lanes == w->alive) w->is_diverged = 0;
  w->pc = pc;
  return lanes;
}

// Runs until the warp ends, reaches a barrier or has run `quantum` instructions.
static int run_warp(Machine *c, Warp *w, int quantum) {
  const Instruction *code = c->code;
  uint32_t lanes;
  int pc, next;
#define SAVE() if (w->is_diverged) { for (int l = 0; l < 32; l++) if (lanes >> l & 1) w->pcs[l] = pc; } else w->pc = pc;
repick:
  if (!w->alive) return ENDED;
  lanes = w->alive, next = INT_MAX;
  if (w->is_diverged && !(lanes = pick_lanes(w, code, &next))) {
    int first = w->pcs[__builtin_ctz(w->alive)], other = first;
    for (int l = 0; l < 32; l++) if (w->alive >> l & 1 && w->pcs[l] != first) other = w->pcs[l];
    report(w, DIVERGENT_COLLECTIVE, code + first, code[other].line, __builtin_ctz(w->alive), -1, 0);
    return FAILED;
  }
  pc = w->pc;
  for (;;) {
    if (pc >= next) { SAVE() goto repick; }
    if (quantum-- <= 0) { SAVE() return RAN_OUT; }
    const Instruction *i = code + pc;
    uint32_t m = lanes;
    if (i->guard >= 0) { uint32_t p = *(uint32_t *)(w->registers + i->guard); m &= i->negated ? ~p : p; }
    if (!c->limit--) { report(w, TOO_MANY_INSTRUCTIONS, i, -1, 0, -1, 0); return FAILED; }
    switch (i->control) {
    case BRANCH:
      if (m == lanes) { pc = i->target; continue; }
      if (m == 0) break;
      w->is_diverged = 1;
      for (int l = 0; l < 32; l++) if (lanes >> l & 1) w->pcs[l] = m >> l & 1 ? i->target : pc + 1;
      goto repick;
    case RETURN:
      w->alive &= ~m;
      if (m == lanes) { if (!w->alive) return ENDED; goto repick; }
      lanes &= ~m;
      break;
    case BARRIER:
      if (m == 0) break;
      if (m != w->alive) { report(w, DIVERGENT_BARRIER, i, -1, __builtin_ctz(m), -1, m); return FAILED; }
      pc++;
      SAVE()
      return REACHED_BARRIER;
    default:
      if (m == 0) break;
      if (i->lanes >= 0) {  // lanes of a diverged warp wait for those that the instruction names, as on a GPU
        uint32_t missing = ((uint32_t *)(w->registers + i->lanes))[__builtin_ctz(m)] & w->alive & ~m;
        if (missing && !(missing & ~lanes)) { report(w, DIVERGENT_COLLECTIVE, i, -1, __builtin_ctz(m), -1, m); return FAILED; }
        if (missing) { SAVE() w->waiting |= lanes; goto repick; }
      }
      if (i->control == WARP_BARRIER) w->barriers++;
      else if (i->run(w, i, m) == STOP) return FAILED;
    }
    pc++;
  }
#undef SAVE
}

static uint64_t draw(Machine *c) {
  c->random ^= c->random << 13, c->random ^= c->random >> 7, c->random ^= c->random << 17;
  return c->random;
}

static void start(Machine *c, Block *b, int number) {
  b->number = number, b->x = number % c->grid[0], b->y = number / c->grid[0] % c->grid[1];
  b->z = number / c->grid[0] / c->grid[1], b->unfinished = c->num_warps, b->at_barrier = 0, b->barriers = 0;
  for (int k = 0; k < c->num_shared_bytes; k++) b->shared[k] = 0xC1 + 37 * k;  // no value that a kernel could rely on
  if (b->shadow) clear(b->shadow, c->num_shared_bytes / 4 + 1);
  for (int k = 0; k < c->num_warps; k++) {
    Warp *w = b->warps + k;
    char *registers = w->registers;
    memcpy(registers, c->initial_registers, c->num_register_bytes);
    *w = (Warp){.registers = registers, .machine = c, .block = b, .index = k, .alive = ~0u};
  }
}

// Runs a launch; `c` comes with everything up to `random`, a seed: 0 runs blocks and warps in order, each warp up to its
// next barrier; others run `num_resident` blocks at once, in random order and with random interruptions. Returns
// whether it ran to its end. Kernels whose addresses are not checked, vLLM's, run in order with their warps in step, one
// instruction each: one of them (_insert_resampled_kernel) adds 1 in a warp to what its other warps load unordered.
int launch(Machine *c, int num_resident) {
  int num_blocks = c->grid[0] * c->grid[1] * c->grid[2], next = 0, unfinished = 0, failed = 0, turn = 0;
  uint64_t seed = c->random;
  c->random = seed * 0x9E3779B97F4A7C15ull | 1;
  if (!seed) num_resident = 1;
  if (num_resident > num_blocks) num_resident = num_blocks;
  int *order = malloc(sizeof(int) * (num_blocks + 1));
  for (int k = 0; k < num_blocks; k++) order[k] = k;
  for (int k = seed ? num_blocks - 1 : 0; k > 0; k--) { int j = draw(c) % (k + 1), x = order[k]; order[k] = order[j], order[j] = x; }
  Block *blocks = calloc(num_resident, sizeof(Block));
  for (int k = 0; k < num_resident; k++) {
    blocks[k].warps = calloc(c->num_warps, sizeof(Warp));
    blocks[k].shared = aligned_alloc(64, c->num_shared_bytes / 64 * 64 + 64);
    if (c->check_races) blocks[k].shadow = malloc(sizeof(Shadow) * (c->num_shared_bytes / 4 + 1));
    for (int j = 0; j < c->num_warps; j++) blocks[k].warps[j].registers = aligned_alloc(64, c->num_register_bytes / 64 * 64 + 64);
    start(c, blocks + k, order[next++]), unfinished++;
  }
  while (unfinished && !failed) {
    Block *b = blocks + (seed ? draw(c) % num_resident : 0);
    if (!b->unfinished) continue;
    if (seed) turn = draw(c) % c->num_warps;
    else while (b->warps[turn].state != READY) turn = (turn + 1) % c->num_warps;
    Warp *w = b->warps + turn;
    if (w->state != READY) continue;
    int quantum = seed && draw(c) & 1 ? 1 + draw(c) % (draw(c) & 1 ? 16 : 256) : INT_MAX;
    if (!seed && !c->num_spans && c->num_warps > 1) quantum = 1;
    int reason = run_warp(c, w, quantum);
    if (!seed && reason == RAN_OUT) turn = (turn + 1) % c->num_warps;
    if (reason == FAILED) failed = 1;
    if (reason == REACHED_BARRIER) w->state = AT_BARRIER, b->at_barrier++;
    if (reason == ENDED) w->state = FINISHED, b->unfinished--;
    if (b->unfinished && b->at_barrier == b->unfinished) {
      b->at_barrier = 0, b->barriers++, turn = 0;
      for (int k = 0; k < c->num_warps; k++) if (b->warps[k].state == AT_BARRIER) b->warps[k].state = READY;
    }
    if (!b->unfinished) {
      turn = 0;
      if (next < num_blocks) start(c, b, order[next++]);
      else unfinished--;
    }
  }
  for (int k = 0; k < num_resident; k++) {
    for (int j = 0; j < c->num_warps; j++) free(blocks[k].warps[j].registers);
    free(blocks[k].warps), free(blocks[k].shared), free(blocks[k].shadow);
  }
  for (uint64_t k = 0; k < c->num_page_slots; k++) free(c->pages[k].words);
  free(blocks), free(order), free(c->pages);
  return !failed;
}
