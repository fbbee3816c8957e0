// HCCL between processes of one machine: a communicator is a segment of shared memory, whose name is
// the root info. Work is done when it is launched. Who waits too long for the others breaks its
// device, as HCCL does (EI0002): HCCL_CONNECT_TIMEOUT and HCCL_EXEC_TIMEOUT say how long.
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define OK 0
#define BAD_ARGUMENT 1
#define UNSUPPORTED 5
#define NO_SEGMENT 8
#define TIMEOUT 9
#define ROOT_INFO 4108
#define MOST_RANKS 64
#define SLOT (1u << 20)  // what a rank shows the others at a time
#define BOX (1u << 16)   // what is on its way from one rank to another

void cann_say(const char* text);  // runtime.c
void cann_break_device_with(int code, const char* text);
int cann_device_error(void);
// What machinery.cpp does to a result whose operator was planted wrong: name, memory, count, dtype.
int (*cann_spoil_result)(const char*, void*, uint64_t, int) = 0;

typedef struct {
  _Atomic uint64_t put, taken;  // bytes since the beginning
  char data[BOX];
} Box;
typedef struct {
  _Atomic uint32_t here;
  _Atomic uint64_t steps[MOST_RANKS];  // how many barriers each rank has come to
} Head;
typedef struct {
  Head* head;
  char* slots;  // one each
  Box* boxes;   // [from][to]
  size_t size;
  uint32_t rank, n;
  uint64_t step;
  char name[64];
} Comm;

// ---- waiting --------------------------------------------------------------------------------------

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}
static double limit(const char* name, double normally) {
  const char* text = getenv(name);
  return text && atof(text) > 0 ? atof(text) : normally;
}
static void rest(int* turns) {
  struct timespec t = {0, ++*turns < 200 ? 20000 : 500000};
  nanosleep(&t, 0);
}
static int give_up(const char* what, const char* operator, int peer) {
  char text[512];
  snprintf(text, sizeof text,
           "EI0002: The wait execution of the Notify register times out. Reason: The Notify register has not received the "
           "Notify record from remote rank [%d].\n        TraceBack (most recent call last):\n        %s: %s timed out, "
           "errorCode=507048.", peer, operator, what);
  cann_break_device_with(507048, text);
  return OK;  // the launch went well; the stream is what fails
}
// Whether all ranks have come to the same point.
static int meet(Comm* c, const char* operator) {
  double end = now() + limit("HCCL_EXEC_TIMEOUT", 1836);
  uint64_t step = ++c->step;
  int turns = 0;
  atomic_store(&c->head->steps[c->rank], step);
  for (uint32_t r = 0; r < c->n; r++)
    while (atomic_load(&c->head->steps[r]) < step) {
      if (now() > end) { give_up("a wait for all ranks", operator, r); return 0; }
      rest(&turns);
    }
  return 1;
}

// ---- communicators --------------------------------------------------------------------------------

static _Atomic int segments = 0;
int HcclGetRootInfo(char* info) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  memset(info, 0, ROOT_INFO);
  snprintf(info, 64, "/cann_hccl_%d_%d_%ld", getpid(), ++segments, t.tv_nsec);
  return OK;
}
int HcclCommInitRootInfo(uint32_t n, const char* info, uint32_t rank, void** comm) {
  if (n > MOST_RANKS || rank >= n || info[0] != '/') { cann_say("EI0001: HCCL has no such rank, or the root info is none"); return BAD_ARGUMENT; }
  Comm* c = calloc(1, sizeof *c);
  c->rank = rank;
  c->n = n;
  snprintf(c->name, sizeof c->name, "%s", info);
  c->size = sizeof(Head) + (size_t)n * SLOT + (size_t)n * n * sizeof(Box);
  int file = shm_open(c->name, O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, c->size)) { cann_say("EI0006: HCCL cannot make a segment of shared memory"); free(c); return NO_SEGMENT; }
  char* place = mmap(0, c->size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (place == MAP_FAILED) { cann_say("EI0006: HCCL cannot map its segment of shared memory"); free(c); return NO_SEGMENT; }
  c->head = (Head*)place;
  c->slots = place + sizeof(Head);
  c->boxes = (Box*)(c->slots + (size_t)n * SLOT);
  double end = now() + limit("HCCL_CONNECT_TIMEOUT", 120);
  int turns = 0;
  if (atomic_fetch_add(&c->head->here, 1) + 1 == n) shm_unlink(c->name);  // all have it: nothing is left behind
  while (atomic_load(&c->head->here) < n) {
    if (now() > end) {
      char text[160];
      snprintf(text, sizeof text, "EI0006: Getting socket times out. Reason: %u of %u ranks have come", atomic_load(&c->head->here), n);
      cann_say(text);
      shm_unlink(c->name);
      munmap(place, c->size);
      free(c);
      return TIMEOUT;
    }
    rest(&turns);
  }
  *comm = c;
  return OK;
}
int HcclCommInitRootInfoConfig(uint32_t n, const char* info, uint32_t rank, const void* config, void** comm) {
  return HcclCommInitRootInfo(n, info, rank, comm);
}
int HcclCommDestroy(void* comm) {
  Comm* c = comm;
  if (c) munmap(c->head, c->size);
  free(c);
  return OK;
}
int HcclGetCommName(void* comm, char* name) { strcpy(name, ((Comm*)comm)->name + 1); return OK; }
int HcclGetRankSize(void* comm, uint32_t* n) { *n = ((Comm*)comm)->n; return OK; }
int HcclGetRankId(void* comm, uint32_t* rank) { *rank = ((Comm*)comm)->rank; return OK; }
int HcclGetCommAsyncError(void* comm, int* error) { *error = OK; return OK; }
int HcclSetConfig(int what, int value) { return OK; }
uint32_t HcclGetCommConfigCapability(void) { return 0; }  // none: a communicator takes no settings
const char* HcclGetErrorString(int code) {
  return code == OK ? "no error" : code == BAD_ARGUMENT ? "parameter error" : code == UNSUPPORTED ? "not support feature"
       : code == TIMEOUT ? "timeout" : code == NO_SEGMENT ? "call system interface error" : "unknown error";
}

// ---- numbers --------------------------------------------------------------------------------------

static size_t width(int type) {
  static const char widths[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2, 16};
  return type >= 0 && type < (int)sizeof widths ? widths[type] : type >= 14 && type <= 17 ? 1 : 0;
}
static float of_bits(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
static uint32_t bits_of(float f) { uint32_t bits; memcpy(&bits, &f, 4); return bits; }
static float of_half(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, rest = h & 1023;
  if (exponent == 31) return of_bits(sign | 0x7f800000 | rest << 13);
  if (exponent) return of_bits(sign | (exponent + 112) << 23 | rest << 13);
  float small = rest * 0x1p-24f;
  return sign ? -small : small;
}
static uint16_t to_half(float f) {
  uint32_t bits = bits_of(f), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return sign | 0x7e00;
  if (size >= 0x477ff000) return sign | 0x7c00;             // rounds to more than 65504
  if (size < 0x38800000) {                                  // below the normal numbers
    float scaled = of_bits(size) + 0.5f;                    // adding 0.5 rounds to steps of 2**-24
    return sign | (uint16_t)(bits_of(scaled) - 0x3f000000);
  }
  return sign | (uint16_t)((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
}
static float of_bfloat(uint16_t b) { return of_bits((uint32_t)b << 16); }
static uint16_t to_bfloat(float f) {
  uint32_t bits = bits_of(f);
  return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#define JOINED(a, b) (op == 0 ? (a) + (b) : op == 1 ? (a) * (b) : op == 2 ? ((a) != (a) || (a) > (b) ? (a) : (b)) : ((a) != (a) || (a) < (b) ? (a) : (b)))
// All ranks' numbers at one place, in the order of the ranks: halves are added as floats, and rounded once.
#define REDUCE(T, WIDE, READ, WRITE)                                        \
  for (size_t i = 0; i < count; i++) {                                      \
    WIDE sum = READ(((const T*)(from))[i]);                                 \
    for (uint32_t r = 1; r < n; r++) {                                      \
      WIDE next = READ(((const T*)(from + r * stride))[i]);                 \
      sum = JOINED(sum, next);                                              \
    }                                                                       \
    ((T*)to)[i] = WRITE(sum);                                               \
  }                                                                         \
  return 1
static int reduce(char* to, const char* from, size_t stride, uint32_t n, size_t count, int type, int op) {
  switch (type) {
    case 0: REDUCE(int8_t, int8_t, , );
    case 1: REDUCE(int16_t, int16_t, , );
    case 2: REDUCE(int32_t, int32_t, , );
    case 3: REDUCE(uint16_t, float, of_half, to_half);
    case 4: REDUCE(float, float, , );
    case 5: REDUCE(int64_t, int64_t, , );
    case 6: REDUCE(uint64_t, uint64_t, , );
    case 7: REDUCE(uint8_t, uint8_t, , );
    case 8: REDUCE(uint16_t, uint16_t, , );
    case 9: REDUCE(uint32_t, uint32_t, , );
    case 10: REDUCE(double, double, , );
    case 11: REDUCE(uint16_t, float, of_bfloat, to_bfloat);
  }
  return 0;
}

// ---- collectives ----------------------------------------------------------------------------------

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }
static char* slot(Comm* c, uint32_t rank) { return c->slots + (size_t)rank * SLOT; }
static int begin(int type, int op) {
  if (!width(type) || op < 0 || op > 3) { cann_say("EI0003: HCCL has no such data type or reduction"); return UNSUPPORTED; }
  return cann_device_error();
}
static int end(const char* operator, void* to, uint64_t count, int type) {
  return cann_spoil_result && to ? cann_spoil_result(operator, to, count, type) : OK;
}
// A rank shows a piece, all meet, who wants a piece takes it, and all meet before it is overwritten.
#define EACH_PIECE(count, room)                                                       \
  for (uint64_t at = 0, piece, one = (room) / w; at < (count) || !at; at += piece) {  \
    piece = least((count) - at, one);                                                 \
    if (!(count)) break;
#define MEET(operator) if (!meet(c, operator)) return OK

static int reduced(const char* operator, char* send, char* receive, uint64_t count, int type, int op, int wants, Comm* c) {
  int wrong = begin(type, op);
  if (wrong) return wrong;
  size_t w = width(type);
  EACH_PIECE(count, SLOT)
    memcpy(slot(c, c->rank), send + at * w, piece * w);
    MEET(operator);
    if (wants) reduce(receive + at * w, c->slots, SLOT, c->n, piece, type, op);
    MEET(operator);
  }
  return end(operator, wants ? receive : 0, count, type);
}
int HcclAllReduce(void* send, void* receive, uint64_t count, int type, int op, void* comm, void* stream) {
  return reduced("HcclAllReduce", send, receive, count, type, op, 1, comm);
}
int HcclReduce(void* send, void* receive, uint64_t count, int type, int op, uint32_t root, void* comm, void* stream) {
  return reduced("HcclReduce", send, receive, count, type, op, ((Comm*)comm)->rank == root, comm);
}
int HcclBroadcast(void* buffer, uint64_t count, int type, uint32_t root, void* comm, void* stream) {
  Comm* c = comm;
  int wrong = begin(type, 0);
  if (wrong) return wrong;
  size_t w = width(type);
  EACH_PIECE(count, SLOT)
    if (c->rank == root) memcpy(slot(c, root), (char*)buffer + at * w, piece * w);
    MEET("HcclBroadcast");
    if (c->rank != root) memcpy((char*)buffer + at * w, slot(c, root), piece * w);
    MEET("HcclBroadcast");
  }
  return end("HcclBroadcast", c->rank == root ? 0 : buffer, count, type);
}
// What every rank receives of every other: counts and places in elements.
static int gathered(const char* operator, char* send, char* receive, const uint64_t* counts, const uint64_t* places, int type, Comm* c) {
  int wrong = begin(type, 0);
  if (wrong) return wrong;
  size_t w = width(type);
  uint64_t most = 0, all = 0;
  for (uint32_t r = 0; r < c->n; r++) { all += counts[r]; if (counts[r] > most) most = counts[r]; }
  EACH_PIECE(most, SLOT)
    if (at < counts[c->rank]) memcpy(slot(c, c->rank), send + at * w, least(piece, counts[c->rank] - at) * w);
    MEET(operator);
    for (uint32_t r = 0; r < c->n; r++)
      if (at < counts[r]) memcpy(receive + (places[r] + at) * w, slot(c, r), least(piece, counts[r] - at) * w);
    MEET(operator);
  }
  return end(operator, receive, all, type);
}
int HcclAllGather(void* send, void* receive, uint64_t count, int type, void* comm, void* stream) {
  uint64_t counts[MOST_RANKS], places[MOST_RANKS];
  for (uint32_t r = 0; r < MOST_RANKS; r++) { counts[r] = count; places[r] = r * count; }
  return gathered("HcclAllGather", send, receive, counts, places, type, comm);
}
int HcclAllGatherV(void* send, uint64_t count, void* receive, const void* counts, const void* places, int type, void* comm, void* stream) {
  return gathered("HcclAllGatherV", send, receive, counts, places, type, comm);
}
// Each rank shows a piece for each other, and takes the column that is its own.
static int scattered(const char* operator, char* send, char* receive, const uint64_t* counts, const uint64_t* places, int type, int op, int from, Comm* c) {
  int wrong = begin(type, op < 0 ? 0 : op);
  if (wrong) return wrong;
  size_t w = width(type), room = SLOT / c->n / 16 * 16;
  uint64_t most = 0, mine = counts[c->rank];
  for (uint32_t r = 0; r < c->n; r++) if (counts[r] > most) most = counts[r];
  EACH_PIECE(most, room)
    if (from < 0 || (int)c->rank == from)
      for (uint32_t r = 0; r < c->n; r++)
        if (at < counts[r]) memcpy(slot(c, c->rank) + r * room, send + (places[r] + at) * w, least(piece, counts[r] - at) * w);
    MEET(operator);
    if (at < mine) {
      uint64_t now_mine = least(piece, mine - at);
      if (from < 0) reduce(receive + at * w, c->slots + c->rank * room, SLOT, c->n, now_mine, type, op);
      else memcpy(receive + at * w, slot(c, from) + c->rank * room, now_mine * w);
    }
    MEET(operator);
  }
  return end(operator, receive, mine, type);
}
static int evenly(const char* operator, char* send, char* receive, uint64_t count, int type, int op, int from, Comm* c) {
  uint64_t counts[MOST_RANKS], places[MOST_RANKS];
  for (uint32_t r = 0; r < MOST_RANKS; r++) { counts[r] = count; places[r] = r * count; }
  return scattered(operator, send, receive, counts, places, type, op, from, c);
}
int HcclReduceScatter(void* send, void* receive, uint64_t count, int type, int op, void* comm, void* stream) {
  return evenly("HcclReduceScatter", send, receive, count, type, op, -1, comm);
}
int HcclReduceScatterV(void* send, const void* counts, const void* places, void* receive, uint64_t count, int type, int op, void* comm, void* stream) {
  return scattered("HcclReduceScatterV", send, receive, counts, places, type, op, -1, comm);
}
int HcclScatter(void* send, void* receive, uint64_t count, int type, uint32_t root, void* comm, void* stream) {
  return evenly("HcclScatter", send, receive, count, type, 0, root, comm);
}
int HcclBarrier(void* comm, void* stream) {
  int wrong = cann_device_error();
  if (!wrong) meet(comm, "HcclBarrier");
  return wrong;
}

// ---- from one rank to another ---------------------------------------------------------------------

typedef struct { int is_receive; void* buffer; uint64_t count; int type; uint32_t peer; } Item;  // HcclSendRecvItem
// Moves all items on in turn, as far as the boxes let them, until none is left. Items between the
// same two ranks go in their order.
static int exchange(const char* operator, const Item* items, uint32_t n, Comm* c) {
  int wrong = cann_device_error();
  for (uint32_t i = 0; i < n && !wrong; i++)
    wrong = items[i].peer >= c->n ? BAD_ARGUMENT : begin(items[i].type, 0);
  if (wrong) return wrong;
  double end_at = now() + limit("HCCL_EXEC_TIMEOUT", 1836);
  uint64_t* done = calloc(n + 1, sizeof *done);
  int turns = 0;
  for (uint32_t left = n; left;) {
    int moved = 0;
    left = 0;
    for (uint32_t i = 0; i < n; i++) {
      const Item* item = &items[i];
      uint64_t all = item->count * width(item->type), more = all - done[i];
      if (!more) continue;
      left++;
      int waits = 0;
      for (uint32_t before = 0; before < i; before++)
        waits |= items[before].peer == item->peer && items[before].is_receive == item->is_receive &&
                 done[before] < items[before].count * width(items[before].type);
      if (waits) continue;
      Box* box = item->is_receive ? &c->boxes[item->peer * c->n + c->rank] : &c->boxes[c->rank * c->n + item->peer];
      uint64_t put = atomic_load(&box->put), taken = atomic_load(&box->taken);
      uint64_t at = (item->is_receive ? taken : put) % BOX;
      uint64_t some = least(least(more, item->is_receive ? put - taken : BOX - (put - taken)), BOX - at);
      if (!some) continue;
      char* place = (char*)item->buffer + done[i];
      if (item->is_receive) { memcpy(place, box->data + at, some); atomic_store(&box->taken, taken + some); }
      else { memcpy(box->data + at, place, some); atomic_store(&box->put, put + some); }
      done[i] += some;
      moved = 1;
    }
    if (moved) { end_at = now() + limit("HCCL_EXEC_TIMEOUT", 1836); turns = 0; }
    else if (left) {
      if (now() > end_at) {
        for (uint32_t i = 0; i < n; i++)
          if (done[i] < items[i].count * width(items[i].type)) { give_up("an exchange", operator, items[i].peer); break; }
        break;
      }
      rest(&turns);
    }
  }
  free(done);
  for (uint32_t i = 0; i < n && !wrong; i++)
    if (items[i].is_receive) wrong = end(operator, items[i].buffer, items[i].count, items[i].type);
  return wrong;
}
int HcclSend(void* buffer, uint64_t count, int type, uint32_t to, void* comm, void* stream) {
  Item item = {0, buffer, count, type, to};
  return exchange("HcclSend", &item, 1, comm);
}
int HcclRecv(void* buffer, uint64_t count, int type, uint32_t from, void* comm, void* stream) {
  Item item = {1, buffer, count, type, from};
  return exchange("HcclRecv", &item, 1, comm);
}
int HcclBatchSendRecv(const void* items, uint32_t n, void* comm, void* stream) {
  return exchange("HcclBatchSendRecv", items, n, comm);
}
int HcclAlltoAllV(const void* send, const void* send_counts, const void* send_places, int send_type, const void* receive,
                  const void* receive_counts, const void* receive_places, int receive_type, void* comm, void* stream) {
  Comm* c = comm;
  Item items[2 * MOST_RANKS];
  for (uint32_t r = 0; r < c->n; r++) {
    char* from = (char*)send + ((const uint64_t*)send_places)[r] * width(send_type);
    char* to = (char*)receive + ((const uint64_t*)receive_places)[r] * width(receive_type);
    items[2 * r] = (Item){0, from, ((const uint64_t*)send_counts)[r], send_type, r};
    items[2 * r + 1] = (Item){1, to, ((const uint64_t*)receive_counts)[r], receive_type, r};
  }
  return exchange("HcclAlltoAllV", items, 2 * c->n, comm);
}
int HcclAlltoAll(const void* send, uint64_t send_count, int send_type, const void* receive, uint64_t receive_count, int receive_type, void* comm, void* stream) {
  uint64_t counts[MOST_RANKS], places[MOST_RANKS];
  for (uint32_t r = 0; r < MOST_RANKS; r++) { counts[r] = send_count; places[r] = r * send_count; }
  return HcclAlltoAllV(send, counts, places, send_type, receive, counts, places, receive_type, comm, stream);
}
int HcclAlltoAllVC(const void* send, const void* matrix, int send_type, const void* receive, int receive_type, void* comm, void* stream) {
  Comm* c = comm;
  const uint64_t* all = matrix;  // [from][to]
  uint64_t out[MOST_RANKS], out_at[MOST_RANKS], in[MOST_RANKS], in_at[MOST_RANKS], sent = 0, received = 0;
  for (uint32_t r = 0; r < c->n; r++) {
    out[r] = all[c->rank * c->n + r];
    in[r] = all[r * c->n + c->rank];
    out_at[r] = sent;
    in_at[r] = received;
    sent += out[r];
    received += in[r];
  }
  return HcclAlltoAllV(send, out, out_at, send_type, receive, in, in_at, receive_type, comm, stream);
}
