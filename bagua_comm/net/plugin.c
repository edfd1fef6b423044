/* A network plugin for NCCL: each connection is a set of TCP flows, and the next piece of a message goes to
 * whichever flow takes it.
 *
 * Flows. A connection begins with one flow. Its sender opens more, twice as many each time, as long as that makes
 * it faster by more than GAIN: in several windows of time together, and if not in these, then in the next ones. Where
 * one or two flows are no slower than twice as many, four times as many are tried before it stops. Now and then it
 * begins again with half of them, so that what looked faster by chance does not stay, and with new flows beside
 * them, which may take other paths. A flow that is slow is given less, since it asks for less.
 *
 * On the wire. The handle names an address and a nonce. Whoever connects says `struct hello`, with the nonce, or is
 * dropped; the receiver answers `struct welcome`, which names the port and the nonce for further flows of this
 * connection. After that data goes one way, in frames: `struct frame`, then its bytes. Messages are numbered in the
 * order of isend and of irecv, which NCCL keeps equal. Each flow carries its frames in the order of messages, so a
 * receiver that has not posted a message yet leaves its frame in the socket and forgets nothing behind it.
 *
 * Threads. isend, irecv and test move whatever of their connection can be moved, not their own request alone: NCCL's
 * thread is there and polls. Helper threads look after connections that it neglects, because it is busy with others.
 * One thread at a time moves a connection, the holder of its lock. No thread outlives the last connection.
 *
 * NCCL's interface is that of its net.h, version 10, which later versions of NCCL also take; offsets are asserted
 * below. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <limits.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/queue.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#ifndef TCP_NOTSENT_LOWAT
#define TCP_NOTSENT_LOWAT 25
#endif
#ifndef BAGUA_NET_MOVE_AT_MOST
#define BAGUA_NET_MOVE_AT_MOST SIZE_MAX /* tests make every read and write short */
#endif

#ifndef GAIN /* tests let flows always pay */
#define GAIN 1.15      /* twice the flows must be this much faster */
#define WINDOW_S 20e-3 /* what a rate is measured over */
#endif

#define CLEAR (GAIN * 1.3)        /* this much faster, and no more windows are needed */
#define KEEP (1 + (GAIN - 1) / 3) /* flows that are used already must be this much faster to stay */

#define WINDOWS 4 /* in a row decide: one alone may lie in a stall or between two */

#ifndef REST_S
#define REST_S 1 /* until the number of flows is tried again; twice as long each time */
#endif
#define LONGEST_REST_S (60 * REST_S)

#ifndef TRIAL_S
#define TRIAL_S 0.5 /* how long half of the flows are tried; light traffic may never show whether they do */
#endif

#ifndef CHUNK
#define CHUNK 65536 /* bytes of a frame at most, and of what waits in a flow */
#endif

#define EXPORT __attribute__((visibility("default")))
#define MAGIC 0x316e2d6175676162ull /* changes with what is on the wire */
#define FLOWS 64                    /* of a connection, at most */
#define REQUESTS 64                 /* of a connection at a time; NCCL has at most 32 */
#define DEVICES 16
#define GUESTS 16                   /* sockets that have not yet said who they are */
#define GUEST_S 10.0                /* how long they may take; with no room for one more, the oldest goes */
#define KNOCKS 1024                 /* sockets that one call looks at */
#define FEW 2                       /* flows of which so many may all have one slow path */
#define SMALL 16384                 /* bytes of a frame at least, where there are many flows */
#define STAGED 4096                 /* bytes read ahead: headers and small messages */
#define WHOLE (16u << 20)           /* of a message in a frame while there is one flow */
#define TURN (4u << 20)             /* bytes that a thread moves before it looks around */
#define LAST (1ull << 63)           /* in a frame's offset: the message ends here */
#define GAP_S 5e-3                  /* flows that wait for data for longer are not full */
#define NEGLECTED_S 50e-6           /* helpers take over then */
#define LARGEST (1ull << 40)

enum { OK = 0, SYSTEM = 2, INTERNAL = 3, ARGUMENT = 4, USAGE = 5, REMOTE = 6 };
enum { WARN = 2, INFO = 3 };

/* ---------------------------------------------------------------------------------------------------------------
 * NCCL's structures
 * ------------------------------------------------------------------------------------------------------------ */

typedef void (*log_function)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

struct properties {
  char *name, *pci_path;
  uint64_t guid;
  int pointers, global_registration, force_flush, speed, port;
  float latency;
  int most_comms, most_receives, device_type, device_version, devices, device[4];
  size_t largest_p2p, largest_collective;
};
_Static_assert(sizeof(struct properties) == 104 && offsetof(struct properties, largest_p2p) == 88, "properties");
_Static_assert(offsetof(struct properties, speed) == 36 && offsetof(struct properties, devices) == 64, "properties");

struct table {
  const char *name;
  int (*init)(log_function, void *);
  int (*devices)(int *);
  int (*getProperties)(int, struct properties *);
  int (*listen)(int, void *, void **);
  int (*connect)(int, void *, void *, void **, void **);
  int (*accept)(void *, void **, void **);
  int (*regMr)(void *, void *, size_t, int, void **);
  int (*regMrDmaBuf)(void *, void *, size_t, int, uint64_t, int, void **);
  int (*deregMr)(void *, void *);
  int (*isend)(void *, void *, size_t, int, void *, void *, void **);
  int (*irecv)(void *, int, void **, size_t *, int *, void **, void **, void **);
  int (*iflush)(void *, int, void **, int *, void **, void **);
  int (*test)(void *, int *, int *);
  int (*closeSend)(void *);
  int (*closeRecv)(void *);
  int (*closeListen)(void *);
  int (*getDeviceMr)(void *, void *, void **);
  int (*irecvConsumed)(void *, int, void *);
  int (*makeVDevice)(int *, void *);
};
_Static_assert(sizeof(struct table) == 160 && offsetof(struct table, isend) == 80, "table");

/* ---------------------------------------------------------------------------------------------------------------
 * On the wire
 * ------------------------------------------------------------------------------------------------------------ */

union address {
  struct sockaddr any;
  struct sockaddr_in in;
  struct sockaddr_in6 in6; /* with its port in the same place */
};
_Static_assert(offsetof(struct sockaddr_in, sin_port) == offsetof(struct sockaddr_in6, sin6_port), "port");

struct hello {
  uint64_t magic, nonce;
};

struct welcome {
  uint64_t nonce; /* for further flows */
  uint16_t port;  /* where to connect them; 0: none */
  uint16_t flows; /* at most */
  uint32_t magic;
};

struct frame {
  uint32_t message, length;
  uint64_t offset; /* in the message; with LAST */
};

struct handle {
  uint64_t nonce;
  union address address;
  struct comm *comm; /* of whoever connects, until he has; kept in his copy of the handle */
};
_Static_assert(sizeof(struct handle) <= 128 && sizeof(struct frame) == 16 && sizeof(struct welcome) == 16, "wire");

/* ---------------------------------------------------------------------------------------------------------------
 * What there is
 * ------------------------------------------------------------------------------------------------------------ */

struct device {
  char name[IF_NAMESIZE], *pci_path;
  union address address;
  int speed, index;
};

/* A listening socket, and those who came and have not yet said the nonce. */
struct door {
  int fd;
  uint64_t nonce;
  union address address;
  struct guest {
    int fd;
    double since;
    size_t got;
    struct hello hello;
  } guests[GUESTS];
};

enum { FREE, ACTIVE, DONE };

struct request {
  struct comm *comm;
  char *data;
  size_t size;       /* of the message; of the buffer, until a receiver knows the message's end */
  size_t cut, moved; /* bytes of frames that were made, or have begun to come; that were written or read */
  uint64_t path;     /* of a receiver: the sum over its frames of mark(end) - mark(begin) */
  bool ended;        /* the receiver knows `size` */
  uint32_t message;
  atomic_int state;
};

enum { NONE, CONNECTING, GREETING, OPEN, CLOSED };

struct flow {
  int fd, state;
  bool ready;  /* can be written, or read */
  bool hung;   /* the peer has closed it, or it has failed */
  bool used;   /* a frame has come */
  union {
    struct frame frame;
    struct welcome welcome; /* until the flow is open */
  };
  size_t head; /* bytes of either that have been moved */
  struct request *request;
  char *data;
  size_t left; /* of the frame's data */
  uint64_t written;
  double rate; /* bytes a second when all flows were full; 0: not known */
  uint64_t before; /* of `written`, in former windows */
  char *staged;
  size_t from, to; /* what of `staged` has been read ahead */
};

enum { SETTLE_BASE, BASE, OPENING, SETTLE_MORE, MORE, REST };

/* How many flows pay: the rate is measured while there is more to send than flows take. */
struct growth {
  int phase, base, before; /* `base`: flows that are known to pay; `before` half of them are tried */
  int wanted;              /* flows that are tried */
  bool again;              /* they have been too slow once */
  double since, seconds, all_seconds, rate, rested_s, rest_s, trial_ends;
  uint64_t start, bytes, all_bytes; /* written until `since`; in this window's `seconds`; in `all_seconds` */
};

struct comm {
  bool sends;
  int epoll, most, opened, active, alive; /* flows: at most, that exist, in use, not closed */
  atomic_int error;                       /* set under the lock */
  pthread_mutex_t lock;
  atomic_uint posted, finished; /* messages */
  int turn;                     /* the flow that is asked first */
  uint32_t cut;                 /* the message of which the next frame is made */
  uint64_t written, read;
  _Atomic double visited;       /* or begun */
  bool waiting;                 /* guests have not yet said who they are */
  struct door door;             /* of a receiver; of a sender, the nonce and the address of the peer's */
  struct growth growth;
  struct request requests[REQUESTS];
  struct flow flows[FLOWS];
  LIST_ENTRY(comm) entry;       /* in `all.comms` */
};

static struct {
  pthread_mutex_t lifecycle; /* init, and the first and the last connection; taken before `lock` */
  pthread_mutex_t lock;      /* of `comms` and `stopping` */
  pthread_cond_t stop;
  bool started, stopping;
  int threads, wanted;
  pthread_t thread[8];
  LIST_HEAD(comms, comm) comms;
  struct device device[DEVICES];
  int devices;
  log_function log;
  atomic_int sockets, most_sockets;
  int flows, timeout_s;
  uint32_t chunk;
  uint64_t secret;
  _Atomic uint64_t sent[FLOWS];
} all = {.lifecycle = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER};

#define LOG(level, ...)                                                                                              \
  do {                                                                                                               \
    if (all.log) all.log(level, 16, __FILE__, __LINE__, "NET/bagua: " __VA_ARGS__);                                  \
  } while (0)

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static uint64_t random_number(void) {
  uint64_t number;
  return syscall(SYS_getrandom, &number, sizeof number, 0) == (long)sizeof number ? number : 0;
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

static bool again(void) { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

/* ---------------------------------------------------------------------------------------------------------------
 * Sockets
 * ------------------------------------------------------------------------------------------------------------ */

static void close_socket(int *fd) {
  if (*fd < 0) return;
  close(*fd);
  *fd = -1;
  atomic_fetch_sub(&all.sockets, 1);
}

/* A new socket counts before it has its settings; all of them do not block. */
static int counted(int fd) {
  if (fd >= 0) atomic_fetch_add(&all.sockets, 1);
  return fd;
}

static int make_socket(int family) {
  return counted(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

static void set(int fd, int level, int option, int value) {
  if (setsockopt(fd, level, option, &value, sizeof value)) LOG(INFO, "socket option %d: %s", option, strerror(errno));
}

/* Small messages leave at once, a dead host is noticed, and a slow flow hoards nothing. */
static void settle(int fd) {
  int probe_s = all.timeout_s / 6 > 1 ? all.timeout_s / 6 : 1;
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, probe_s < 30 ? probe_s : 30);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, probe_s < 30 ? probe_s : 30);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, 6);
  set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, all.timeout_s > INT_MAX / 1000 ? INT_MAX : all.timeout_s * 1000);
  set(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, (int)all.chunk);
}

static socklen_t length_of(const union address *address) {
  return address->any.sa_family == AF_INET6 ? sizeof address->in6 : sizeof address->in;
}

static int open_door(struct door *door, const union address *address) {
  *door = (struct door){.fd = make_socket(address->any.sa_family), .nonce = random_number(), .address = *address};
  for (int i = 0; i < GUESTS; i++) door->guests[i].fd = -1;
  socklen_t length = length_of(address);
  door->address.in.sin_port = 0;
  if (door->fd >= 0) set(door->fd, IPPROTO_TCP, TCP_DEFER_ACCEPT, 1); /* who says nothing is not even accepted */
  if (door->fd >= 0 && door->nonce && !bind(door->fd, &door->address.any, length) && !listen(door->fd, 1024) &&
      !getsockname(door->fd, &door->address.any, &length))
    return OK;
  close_socket(&door->fd);
  return SYSTEM;
}

static void close_door(struct door *door) {
  for (int i = 0; i < GUESTS; i++) close_socket(&door->guests[i].fd);
  close_socket(&door->fd);
}

/* Read what is missing: 1 if it is whole now, 0 if the rest has not come yet, -1 if the peer has gone: see errno. */
static int hear(int fd, void *what, size_t size, size_t *got) {
  while (*got < size) {
    ssize_t more = recv(fd, (char *)what + *got, size - *got, 0);
    if (more < 0) return again() ? 0 : -1;
    if (more == 0) {
      errno = ECONNRESET;
      return -1;
    }
    *got += (size_t)more;
  }
  return 1;
}

static void send_away(struct guest *guest) {
  LOG(INFO, "dropped a connection that is none of ours");
  close_socket(&guest->fd);
}

/* The socket of a guest that has said the nonce, or -1. One that is none of ours, or is silent, is dropped. */
static int admit(struct door *door, struct guest *guest) {
  int fd = guest->fd;
  if (fd < 0) return -1;
  int heard = hear(fd, &guest->hello, sizeof guest->hello, &guest->got);
  if (heard > 0 && guest->hello.magic == MAGIC && guest->hello.nonce == door->nonce) {
    guest->fd = -1;
    return fd;
  }
  if (heard || now() - guest->since > GUEST_S) send_away(guest);
  return -1;
}

/* The next socket that has said the nonce, or -1. Others are dropped. `error` is set where no more can come.
 * However many silent ones come, none waits behind them: a free place is found for each. */
static int enter(struct door *door, int *error) {
  int fd;
  *error = OK;
  for (int i = 0; i < GUESTS; i++)
    if ((fd = admit(door, &door->guests[i])) >= 0) return fd;
  for (int i = 0; i < KNOCKS && door->fd >= 0; i++) {
    struct guest guest = {.fd = counted(accept4(door->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)), .since = now()};
    if (guest.fd < 0) {
      if (errno == ECONNABORTED || errno == EINTR) continue;
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        LOG(INFO, "cannot accept a connection: %s", strerror(errno));
        *error = SYSTEM;
      }
      break;
    }
    settle(guest.fd);
    if ((fd = admit(door, &guest)) >= 0) return fd;
    if (guest.fd < 0) continue;
    struct guest *place = &door->guests[0];
    for (struct guest *one = place + 1; place->fd >= 0 && one < door->guests + GUESTS; one++)
      if (one->fd < 0 || one->since < place->since) place = one;
    if (place->fd >= 0) send_away(place);
    *place = guest;
  }
  return -1;
}

/* ---------------------------------------------------------------------------------------------------------------
 * Moving the bytes of a connection; its lock is held
 * ------------------------------------------------------------------------------------------------------------ */

static bool outstanding(struct comm *comm) {
  return atomic_load(&comm->posted) != atomic_load(&comm->finished);
}

static void fail(struct comm *comm, int error, const char *why) {
  if (comm->error) return;
  comm->error = error;
  if (outstanding(comm)) LOG(WARN, "a connection for %s failed: %s", comm->sends ? "sending" : "receiving", why);
}

static void close_flow(struct comm *comm, struct flow *flow) {
  if (flow->state == NONE || flow->state == CLOSED) return;
  flow->state = CLOSED;
  flow->ready = false;
  close_socket(&flow->fd);
  comm->alive--;
}

static struct flow *add_flow(struct comm *comm, int fd, int state) {
  int number = comm->opened;
  for (int i = 0; i < comm->opened && !comm->sends; i++)
    if (comm->flows[i].state == CLOSED) number = i; /* the peer has others now */
  if (number == FLOWS) return NULL;
  struct flow *flow = &comm->flows[number];
  struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.u32 = (uint32_t)number};
  char *staged = comm->sends ? NULL : flow->staged ? flow->staged : malloc(STAGED);
  if ((!comm->sends && !staged) || epoll_ctl(comm->epoll, EPOLL_CTL_ADD, fd, &event)) {
    if (staged != flow->staged) free(staged);
    return NULL;
  }
  *flow = (struct flow){.fd = fd, .state = state, .staged = staged, .ready = state == OPEN};
  comm->opened += number == comm->opened;
  comm->alive++;
  return flow;
}

/* A number for an offset that no peer can guess. The sum of mark(end) - mark(begin) over the frames of a message is
 * mark(size) - mark(0) only if they follow one another: if they neither overlap nor leave a gap. */
static uint64_t mark(uint64_t offset) {
  uint64_t x = offset * 0x9e3779b97f4a7c15ull + all.secret;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

static void finish_frame(struct comm *comm, struct flow *flow) {
  struct request *request = flow->request;
  request->moved += flow->frame.length;
  flow->head = 0;
  flow->request = NULL;
  if (request->ended && request->moved == request->size) {
    if (!comm->sends && request->path != mark(request->size) - mark(0)) {
      fail(comm, INTERNAL, "frames of a message overlap");
      return;
    }
    atomic_fetch_add(&comm->finished, 1);
    atomic_store(&request->state, DONE);
  }
}

static uint64_t uncut(struct comm *comm) {
  uint64_t rest = 0;
  for (uint32_t message = comm->cut; message != atomic_load(&comm->posted); message++)
    rest += comm->requests[message % REQUESTS].size - comm->requests[message % REQUESTS].cut;
  return rest;
}

/* How large the next frame of a flow is at most: little where it is slow, or may be, since messages wait for it. */
static size_t piece_for(struct flow *flow) { return least((size_t)(flow->rate * 8e-3) + SMALL, all.chunk); }

/* How large the next frame is at most: a share of what is to send, so that all flows have some. */
static size_t piece(struct comm *comm, struct flow *flow) {
  if (comm->active == 1) return WHOLE;
  size_t share = uncut(comm) / (size_t)comm->active;
  return least(share < SMALL ? SMALL : share, piece_for(flow));
}

/* Cut the next frame from the oldest message that has bytes left; whether there is one. */
static bool cut_frame(struct comm *comm, struct flow *flow) {
  if (comm->cut == atomic_load(&comm->posted)) return false;
  struct request *request = &comm->requests[comm->cut % REQUESTS];
  size_t length = least(request->size - request->cut, piece(comm, flow));
  bool last = request->cut + length == request->size;
  flow->frame = (struct frame){request->message, (uint32_t)length, request->cut | (last ? LAST : 0)};
  flow->head = 0;
  flow->request = request;
  flow->data = request->data + request->cut;
  flow->left = length;
  request->cut += length;
  comm->cut += last;
  return true;
}

/* Write what the flow takes of its frame; returns how many bytes. */
static size_t write_frame(struct comm *comm, struct flow *flow) {
  size_t moved = 0;
  while (flow->request && flow->ready) {
    size_t head = least(sizeof flow->frame - flow->head, BAGUA_NET_MOVE_AT_MOST);
    size_t body = least(flow->left, BAGUA_NET_MOVE_AT_MOST - head);
    struct iovec parts[2] = {{(char *)&flow->frame + flow->head, head}, {flow->data, body}};
    struct msghdr message = {.msg_iov = head ? parts : parts + 1, .msg_iovlen = (head > 0) + (body > 0)};
    ssize_t written = sendmsg(flow->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (written < 0) {
      if (errno == EINTR) continue;
      flow->ready = false;
      if (!again()) fail(comm, REMOTE, strerror(errno));
      break;
    }
    moved += (size_t)written;
    if ((size_t)written < head + body) flow->ready = false; /* full: epoll tells when it is not */
    size_t of_head = least((size_t)written, head), of_data = (size_t)written - of_head;
    flow->head += of_head;
    flow->data += of_data;
    flow->left -= of_data;
    if (flow->head == sizeof flow->frame && !flow->left) finish_frame(comm, flow);
  }
  flow->written += moved;
  comm->written += moved;
  atomic_fetch_add_explicit(&all.sent[flow - comm->flows], moved, memory_order_relaxed);
  return moved;
}

/* Whether a slow flow would still be busy with one more piece when the others have sent all that is posted. */
static bool too_slow(struct comm *comm, struct flow *flow) {
  double others = 0;
  if (comm->active == 1 || flow->rate <= 0) return false;
  for (int i = 0; i < comm->active; i++)
    if (&comm->flows[i] != flow) others += comm->flows[i].rate;
  if (flow->rate * (comm->active - 1) * 2 > others) return false; /* at least half of the mean of the others */
  int queued = 0;
  ioctl(flow->fd, SIOCOUTQ, &queued);
  return (double)uncut(comm) * flow->rate < 1.5 * (double)((size_t)queued + piece_for(flow)) * others;
}

static void push(struct comm *comm) {
  size_t moved = 0;
  for (bool any = true; any && moved < TURN && !comm->error;) {
    any = false;
    for (int i = 0, first = comm->turn; i < comm->opened && !comm->error; i++) {
      struct flow *flow = &comm->flows[(first + i) % comm->opened];
      if (flow->state != OPEN || !flow->ready) continue;
      if (!flow->request) {
        if (flow - comm->flows >= comm->active || too_slow(comm, flow) || !cut_frame(comm, flow)) continue;
        comm->turn = (first + i + 1) % comm->opened;
      }
      moved += write_frame(comm, flow);
      any = true;
    }
  }
}

/* ---------------------------------------------------------------------------------------------------------------
 * How many flows
 * ------------------------------------------------------------------------------------------------------------ */

/* Begin to connect one more flow of a sender; OK, or an error: see errno. */
static int open_flow(struct comm *comm) {
  const union address *to = &comm->door.address;
  int fd = make_socket(to->any.sa_family);
  if (fd < 0) return SYSTEM;
  settle(fd);
  bool refused = connect(fd, &to->any, length_of(to)) && errno != EINPROGRESS;
  if (!refused && add_flow(comm, fd, CONNECTING)) return OK;
  close_socket(&fd);
  return refused ? REMOTE : SYSTEM;
}

/* A new flow of a sender: say hello when it is connected, and use it when it is welcome. The first welcome says how
 * to open further flows. OK, or an error where the flow was closed: see errno. */
static int greet(struct comm *comm, struct flow *flow) {
  struct hello hello = {MAGIC, comm->door.nonce};
  struct welcome *welcome = &flow->welcome;
  if (flow->state == CONNECTING) {
    ssize_t written = send(flow->fd, &hello, sizeof hello, MSG_NOSIGNAL);
    if (written < 0 && (again() || errno == ENOTCONN)) return OK;
    if (written == (ssize_t)sizeof hello) flow->state = GREETING;
  }
  int heard = flow->state == GREETING ? hear(flow->fd, welcome, sizeof *welcome, &flow->head) : -1;
  if (!heard) return OK;
  if (heard < 0 || welcome->magic != (uint32_t)MAGIC) {
    close_flow(comm, flow);
    comm->most = comm->growth.base; /* the peer takes no more */
    return REMOTE;
  }
  if (flow == comm->flows && welcome->port) {
    comm->door.nonce = welcome->nonce;
    comm->door.address.in.sin_port = welcome->port;
    comm->most = (int)least(welcome->flows, (size_t)all.flows);
  }
  flow->head = 0;
  flow->state = OPEN;
  flow->ready = true;
  return OK;
}

/* Close flows behind the first `keep`, which did not pay: new ones in their place may take other paths. */
static void drop_flows(struct comm *comm, int keep) {
  while (comm->opened > keep && !comm->flows[comm->opened - 1].request) close_flow(comm, &comm->flows[--comm->opened]);
}

static void begin_window(struct comm *comm) {
  comm->growth.seconds = 0;
  comm->growth.bytes = 0;
  for (int i = 0; i < comm->opened; i++) comm->flows[i].before = comm->flows[i].written;
}

/* Measure a phase from now on, with so many flows. */
static void begin_phase(struct comm *comm, int phase, int flows) {
  comm->active = flows;
  comm->growth.phase = phase;
  comm->growth.all_bytes = 0;
  comm->growth.all_seconds = 0;
  begin_window(comm);
}

/* Begin to use so many flows, or rest if there are no more. */
static void try_more(struct comm *comm, int wanted) {
  wanted = (int)least((size_t)wanted, (size_t)comm->most);
  while (comm->opened < wanted && atomic_load(&all.sockets) < atomic_load(&all.most_sockets))
    if (open_flow(comm)) break;
  if (comm->opened < wanted) comm->most = wanted = comm->opened;
  comm->growth.wanted = wanted;
  if (wanted > comm->growth.base) begin_phase(comm, OPENING, comm->active);
  else begin_phase(comm, REST, comm->growth.base);
}

static void rate_flows(struct comm *comm, double rate) {
  uint64_t sum = 1;
  for (int i = 0; i < comm->active; i++) sum += comm->flows[i].written - comm->flows[i].before;
  for (int i = 0; i < comm->active; i++) {
    struct flow *flow = &comm->flows[i];
    double own = rate * (double)(flow->written - flow->before) / (double)sum;
    if (own > 0) flow->rate = flow->rate > 0 ? (flow->rate + own) / 2 : own;
    else if (flow->ready) flow->rate *= 1.02; /* it was passed over, and is tried again later */
    else flow->rate /= 2;
    /* What waits in a flow is 2 ms of its rate. */
    set(flow->fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, (int)least((size_t)(flow->rate * 2e-3) + SMALL, 4 * all.chunk));
  }
}

static void end_window(struct comm *comm) {
  struct growth *growth = &comm->growth;
  double rate = (double)growth->bytes / growth->seconds;
  rate_flows(comm, rate);
  growth->all_bytes += growth->bytes;
  growth->all_seconds += growth->seconds;
  rate = (double)growth->all_bytes / growth->all_seconds; /* of all windows of this phase */
  bool enough = growth->all_seconds >= WINDOWS * WINDOW_S;
  switch (growth->phase) {
  case SETTLE_BASE:
  case SETTLE_MORE:
    growth->again = false;
    begin_phase(comm, growth->phase + 1, comm->active);
    break;
  case BASE:
    if (!enough) break;
    growth->rate = rate;
    try_more(comm, growth->base * 2);
    break;
  case MORE:
    if (rate > (!enough ? CLEAR : growth->base < growth->before ? KEEP : GAIN) * growth->rate) {
      growth->base = comm->active;
      growth->rate = rate;
      try_more(comm, growth->base * 2);
    } else if (enough && !growth->again) {
      growth->again = true; /* what new flows hold of messages at first may have held up the others */
      begin_phase(comm, MORE, comm->active);
    } else if (enough && comm->active == growth->base * 2 && comm->active < comm->most && growth->base <= FEW &&
               growth->base >= growth->before) {
      try_more(comm, growth->base * 4);
    } else if (enough) {
      begin_phase(comm, REST, growth->base);
    }
    break;
  case REST:
    if ((growth->rested_s += growth->seconds) < growth->rest_s) break;
    growth->rested_s = 0;
    growth->rest_s = growth->rest_s < LONGEST_REST_S ? growth->rest_s * 2 : LONGEST_REST_S;
    growth->before = growth->base;
    growth->trial_ends = now() + TRIAL_S;
    drop_flows(comm, growth->base);
    if (growth->base > 1) growth->base /= 2; /* half of them may do */
    begin_phase(comm, SETTLE_BASE, growth->base);
  }
  begin_window(comm);
}

/* Use the further flows when all of them are open, or could not be. */
static void use_more(struct comm *comm) {
  struct growth *growth = &comm->growth;
  int wanted = growth->wanted < comm->most ? growth->wanted : comm->most, more = 0;
  for (int i = growth->base; i < wanted; i++) {
    if (comm->flows[i].state == CONNECTING || comm->flows[i].state == GREETING) return;
    more += comm->flows[i].state == OPEN;
  }
  if (more) begin_phase(comm, SETTLE_MORE, wanted);
  else begin_phase(comm, REST, growth->base);
}

/* After each push. Only what lies between two moments at which flows were full counts, if these are close. */
static void measure(struct comm *comm) {
  struct growth *growth = &comm->growth;
  if (growth->base < growth->before && growth->phase != REST && now() > growth->trial_ends) {
    growth->base = growth->before; /* all flows again of which half were tried */
    begin_phase(comm, REST, growth->base);
  }
  if (!outstanding(comm)) return;
  double time = now();
  if (growth->phase == OPENING) use_more(comm);
  if (time - growth->since < GAP_S) {
    growth->seconds += time - growth->since;
    growth->bytes += comm->written - growth->start;
  }
  growth->since = time;
  growth->start = comm->written;
  if (growth->seconds > WINDOW_S && growth->bytes > 2ull * all.chunk * (uint64_t)comm->active) end_window(comm);
}

/* ---------------------------------------------------------------------------------------------------------------
 * Receiving; the lock is held
 * ------------------------------------------------------------------------------------------------------------ */

/* Find the request of a frame whose head has come; false if it is not posted yet, or the frame is wrong. */
static bool match(struct comm *comm, struct flow *flow) {
  struct frame *frame = &flow->frame;
  if ((int32_t)(frame->message - atomic_load(&comm->posted)) >= 0) return false;
  struct request *request = &comm->requests[frame->message % REQUESTS];
  uint64_t offset = frame->offset & ~LAST, end = offset + frame->length;
  if (request->message != frame->message || atomic_load(&request->state) != ACTIVE || offset > LARGEST) {
    fail(comm, INTERNAL, "a frame came that belongs to no message");
    return false;
  }
  if (end > request->size) {
    fail(comm, USAGE, "a message is larger than its receiver expects: do the collectives' sizes match?");
    return false;
  }
  if (frame->offset & LAST) {
    request->size = end;
    request->ended = true;
  }
  request->cut += frame->length;
  request->path += mark(end) - mark(offset);
  if (request->cut > request->size) {
    fail(comm, INTERNAL, "frames of a message overlap");
    return false;
  }
  flow->request = request;
  flow->data = request->data + offset;
  flow->left = frame->length;
  flow->used = true;
  return true;
}

/* Use what has been read ahead, as far as messages are posted. */
static void unstage(struct comm *comm, struct flow *flow) {
  while (!comm->error) {
    if (!flow->request) {
      size_t head = least(sizeof flow->frame - flow->head, flow->to - flow->from);
      memcpy((char *)&flow->frame + flow->head, flow->staged + flow->from, head);
      flow->head += head;
      flow->from += head;
      if (flow->head < sizeof flow->frame || !match(comm, flow)) return;
    }
    size_t data = least(flow->left, flow->to - flow->from);
    if (data) memcpy(flow->data, flow->staged + flow->from, data);
    flow->data += data;
    flow->left -= data;
    flow->from += data;
    if (flow->left) return;
    finish_frame(comm, flow);
  }
}

/* The peer has closed a flow, or it has failed. */
static void lose_flow(struct comm *comm, struct flow *flow, const char *why) {
  bool amid = flow->head || (why && flow->used);
  close_flow(comm, flow);
  if (amid || !comm->alive) fail(comm, REMOTE, why ? why : "the peer has gone");
}

/* Read what is there; returns how many bytes. */
static size_t read_flow(struct comm *comm, struct flow *flow) {
  size_t moved = 0;
  for (;;) {
    unstage(comm, flow);
    bool parked = !flow->request && flow->head == sizeof flow->frame; /* its message is not posted yet */
    if (comm->error || parked || !flow->ready || moved >= all.chunk) return moved;
    size_t data = least(flow->left, BAGUA_NET_MOVE_AT_MOST);
    size_t ahead = least(flow->left > STAGED ? sizeof(struct frame) : STAGED, BAGUA_NET_MOVE_AT_MOST);
    if (data < flow->left) ahead = 0;
    struct iovec parts[2] = {{flow->data, data}, {flow->staged, ahead}};
    ssize_t got = readv(flow->fd, data ? parts : parts + 1, (data > 0) + (ahead > 0));
    if (got <= 0) {
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && again()) flow->ready = false;
      else lose_flow(comm, flow, got ? strerror(errno) : NULL);
      return moved;
    }
    if ((size_t)got < data + ahead && !flow->hung) flow->ready = false;
    moved += (size_t)got;
    data = least((size_t)got, data);
    flow->data += data;
    flow->left -= data;
    flow->from = 0;
    flow->to = (size_t)got - data;
  }
}

static void pull(struct comm *comm) {
  size_t moved = 0, round = 1;
  for (; round && moved < TURN && !comm->error; moved += round) {
    round = 0;
    for (int i = 0; i < comm->opened && !comm->error; i++)
      if (comm->flows[i].state != NONE) round += read_flow(comm, &comm->flows[i]);
    comm->read += round;
  }
}

/* A receiver's new flow, known by its nonce: tell it that it is welcome. */
static void let_in(struct comm *comm) {
  int error, fd;
  struct welcome welcome = {.magic = (uint32_t)MAGIC};
  while (comm->door.fd >= 0 && (fd = enter(&comm->door, &error)) >= 0) {
    struct flow *flow = add_flow(comm, fd, OPEN);
    if (!flow) close_socket(&fd);
    else if (send(fd, &welcome, sizeof welcome, MSG_NOSIGNAL) != (ssize_t)sizeof welcome) close_flow(comm, flow);
  }
  comm->waiting = false;
  for (int i = 0; i < GUESTS; i++) comm->waiting |= comm->door.guests[i].fd >= 0;
  if (comm->door.fd >= 0 && error) {
    close_door(&comm->door);
  }
}

/* ---------------------------------------------------------------------------------------------------------------
 * A connection's turn, and the threads that give it one where NCCL's does not
 * ------------------------------------------------------------------------------------------------------------ */

static void look(struct comm *comm) {
  struct epoll_event events[FLOWS];
  int count = epoll_wait(comm->epoll, events, FLOWS, 0);
  bool knocked = false;
  for (int i = 0; i < count; i++) {
    if (events[i].data.u32 == FLOWS) {
      knocked = true;
      continue;
    }
    struct flow *flow = &comm->flows[events[i].data.u32];
    uint32_t what = events[i].events;
    if (what & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) flow->hung = true;
    if (comm->sends && (flow->state == CONNECTING || flow->state == GREETING)) greet(comm, flow);
    else if (comm->sends && flow->state == OPEN && flow->hung) fail(comm, REMOTE, "the peer has gone");
    else if (flow->state == OPEN && (what & (comm->sends ? EPOLLOUT : EPOLLIN) || flow->hung)) flow->ready = true;
  }
  if (knocked || comm->waiting) let_in(comm);
}

/* Give a connection a turn, and its lock back; whether bytes moved. */
static bool serve(struct comm *comm, bool looks) {
  uint64_t before = comm->written + comm->read;
  if (looks && !comm->error) look(comm);
  if (!comm->error && comm->sends) {
    push(comm);
    measure(comm);
  } else if (!comm->error) {
    pull(comm);
  }
  bool moved = comm->written + comm->read != before;
  atomic_store_explicit(&comm->visited, now(), memory_order_relaxed);
  pthread_mutex_unlock(&comm->lock);
  return moved;
}

/* NCCL's thread is here, unless a helper has the connection. */
static void visit(struct comm *comm, bool looks) {
  if (!pthread_mutex_trylock(&comm->lock)) serve(comm, looks);
}

/* A connection that waits and that nobody has visited shortly before `time`, locked; `idle` if none waits at all. */
static struct comm *neglected(double time, bool *idle) {
  *idle = true;
  struct comm *comm;
  LIST_FOREACH(comm, &all.comms, entry) {
    if (comm->error || !outstanding(comm)) continue;
    *idle = false;
    if (time - atomic_load_explicit(&comm->visited, memory_order_relaxed) > NEGLECTED_S &&
        !pthread_mutex_trylock(&comm->lock))
      return comm;
  }
  return NULL;
}

static void *help(void *nothing) {
  double rest_s = 0, longest_s = 5e-3, since = now();
  bool idle, any = false;
  pthread_mutex_lock(&all.lock);
  while (!all.stopping) {
    /* Each of them gets its turn before the first one gets another, or this thread rests. */
    struct comm *comm = neglected(since, &idle);
    if (comm) {
      pthread_mutex_unlock(&all.lock);
      any |= serve(comm, true);
      pthread_mutex_lock(&all.lock);
      continue;
    }
    since = now();
    if (any) {
      any = false;
      rest_s = 0;
      continue;
    }
    rest_s = idle ? longest_s : rest_s < 50e-6 ? 50e-6 : rest_s < 1e-3 ? rest_s * 1.5 : 1e-3;
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until); /* that of `all.stop` */
    until.tv_nsec += (long)(rest_s * 1e9);
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_cond_timedwait(&all.stop, &all.lock, &until);
    since = now();
  }
  pthread_mutex_unlock(&all.lock);
  return nothing;
}

/* Let helpers look after a connection. Their threads start with the first one. */
static void enlist(struct comm *comm) {
  pthread_mutex_lock(&all.lifecycle);
  pthread_mutex_lock(&all.lock);
  bool first = LIST_EMPTY(&all.comms);
  LIST_INSERT_HEAD(&all.comms, comm, entry);
  all.stopping = false;
  pthread_mutex_unlock(&all.lock);
  while (first && all.threads < all.wanted && !pthread_create(&all.thread[all.threads], NULL, help, NULL)) all.threads++;
  pthread_mutex_unlock(&all.lifecycle);
}

/* The threads end with the last connection. */
static void delist(struct comm *comm) {
  pthread_mutex_lock(&all.lifecycle);
  pthread_mutex_lock(&all.lock);
  LIST_REMOVE(comm, entry);
  all.stopping = LIST_EMPTY(&all.comms);
  if (all.stopping) pthread_cond_broadcast(&all.stop);
  pthread_mutex_unlock(&all.lock);
  while (all.stopping && all.threads) pthread_join(all.thread[--all.threads], NULL);
  pthread_mutex_unlock(&all.lifecycle);
  pthread_mutex_lock(&comm->lock); /* a helper may have it still */
  pthread_mutex_unlock(&comm->lock);
}

static void free_comm(struct comm *comm) {
  for (int i = 0; i < comm->opened; i++) {
    close_flow(comm, &comm->flows[i]);
    free(comm->flows[i].staged);
  }
  close_door(&comm->door);
  close_socket(&comm->epoll);
  pthread_mutex_destroy(&comm->lock);
  free(comm);
}

/* A connection without flows. */
static struct comm *make_comm(bool sends, const union address *address) {
  struct comm *comm = calloc(1, sizeof *comm);
  if (!comm) return NULL;
  *comm = (struct comm){.sends = sends, .most = 1, .active = 1, .visited = now(), .door = {.fd = -1, .address = *address}};
  for (int i = 0; i < GUESTS; i++) comm->door.guests[i].fd = -1;
  comm->growth.base = 1;
  comm->growth.rest_s = REST_S;
  pthread_mutex_init(&comm->lock, NULL);
  comm->epoll = counted(epoll_create1(EPOLL_CLOEXEC));
  if (comm->epoll >= 0) return comm;
  free_comm(comm);
  return NULL;
}

/* ---------------------------------------------------------------------------------------------------------------
 * Devices: the interfaces that NCCL would choose
 * ------------------------------------------------------------------------------------------------------------ */

/* Whether a name is in a list such as "eth,ib0": "=eth0,ib0" wants whole names, "^docker" all others. */
static bool chosen(const char *name, const char *list) {
  bool inverted = *list == '^', whole, found = false;
  if (inverted) list++;
  if ((whole = *list == '=')) list++;
  while (*list) {
    const char *end = strchrnul(list, ',');
    size_t length = (size_t)(end - list);
    if (length && !strncmp(name, list, length) && (!whole || !name[length])) found = true;
    list = *end ? end + 1 : end;
  }
  return found != inverted;
}

static int read_speed(const char *name) {
  char path[PATH_MAX];
  int speed = 0;
  snprintf(path, sizeof path, "/sys/class/net/%s/speed", name);
  FILE *file = fopen(path, "re");
  if (file && fscanf(file, "%d", &speed) != 1) speed = 0;
  if (file) fclose(file);
  return speed > 0 ? speed : 10000;
}

static void add_devices(struct ifaddrs *found, const char *list, int family) {
  for (struct ifaddrs *one = found; one && all.devices < DEVICES; one = one->ifa_next) {
    if (!one->ifa_addr || !(one->ifa_flags & IFF_UP) || !(one->ifa_flags & IFF_RUNNING)) continue; /* no cable */
    if (!chosen(one->ifa_name, list)) continue;
    int its = one->ifa_addr->sa_family;
    if ((its != AF_INET && its != AF_INET6) || (family && its != family)) continue;
    if (its == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&((struct sockaddr_in6 *)one->ifa_addr)->sin6_addr) && !family) continue;
    bool known = false;
    for (int i = 0; i < all.devices; i++) known |= !strcmp(all.device[i].name, one->ifa_name);
    if (known) continue;
    struct device *device = &all.device[all.devices++];
    *device = (struct device){.speed = read_speed(one->ifa_name), .index = (int)if_nametoindex(one->ifa_name)};
    snprintf(device->name, sizeof device->name, "%s", one->ifa_name);
    memcpy(&device->address, one->ifa_addr, its == AF_INET ? sizeof device->address.in : sizeof device->address.in6);
    char path[PATH_MAX];
    snprintf(path, sizeof path, "/sys/class/net/%s/device", device->name);
    device->pci_path = realpath(path, NULL);
  }
}

static int find_devices(void) {
  const char *list = getenv("NCCL_SOCKET_IFNAME"), *wanted = getenv("NCCL_SOCKET_FAMILY");
  int family = !wanted ? 0 : !strcmp(wanted, "AF_INET6") ? AF_INET6 : !strcmp(wanted, "AF_INET") ? AF_INET : 0;
  struct ifaddrs *found;
  if (getifaddrs(&found)) return SYSTEM;
  const char *usual[] = {"ib", "^docker,lo,virbr", "docker", "lo", "virbr"};
  if (list && *list) add_devices(found, list, family);
  else
    for (size_t i = 0; i < sizeof usual / sizeof *usual && !all.devices; i++) add_devices(found, usual[i], family);
  freeifaddrs(found);
  if (!all.devices) LOG(WARN, "no interface with an address%s%s", list ? " fits NCCL_SOCKET_IFNAME=" : "", list ? list : "");
  return all.devices ? OK : SYSTEM;
}

/* A whole number of the environment; what is usual where it is not set, or out of its range. */
static int setting(const char *name, int usual, int smallest, int largest) {
  const char *text = getenv(name);
  if (!text || !*text) return usual;
  char *end;
  long value = strtol(text, &end, 10);
  if (*end || value < smallest || value > largest) {
    LOG(WARN, "%s=%s: expected a number from %d to %d; it is %d now", name, text, smallest, largest, usual);
    return usual;
  }
  return (int)value;
}

static int init(log_function log, void *profile) {
  (void)profile;
  pthread_mutex_lock(&all.lifecycle);
  all.log = log;
  int error = OK;
  if (!all.started && !(error = find_devices())) {
    struct rlimit files = {.rlim_cur = 1024};
    getrlimit(RLIMIT_NOFILE, &files);
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    atomic_store(&all.most_sockets, (int)(files.rlim_cur > 1u << 20 ? 1u << 18 : files.rlim_cur / 4));
    all.flows = setting("BAGUA_NET_FLOWS", FLOWS, 1, FLOWS);
    all.secret = random_number();
    all.chunk = (uint32_t)setting("BAGUA_NET_CHUNK", CHUNK, 4096, 1 << 24);
    all.timeout_s = setting("BAGUA_NET_TIMEOUT_S", 300, 1, 1000000);
    all.wanted = setting("BAGUA_NET_THREADS", cores >= 8 ? 4 : cores >= 4 ? 2 : 1, 0, 8);
    pthread_condattr_t monotonic; /* so that nobody sleeps for long when the time of day is set back */
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&all.stop, &monotonic);
    pthread_condattr_destroy(&monotonic);
    all.started = true;
    LOG(INFO, "up to %d flows, pieces of %u bytes, %d devices", all.flows, all.chunk, all.devices);
  }
  pthread_mutex_unlock(&all.lifecycle);
  return error;
}

/* ---------------------------------------------------------------------------------------------------------------
 * NCCL's functions
 * ------------------------------------------------------------------------------------------------------------ */

static int devices(int *count) {
  *count = all.devices;
  return all.devices ? OK : SYSTEM;
}

static int describe(int number, struct properties *properties) {
  if (number < 0 || number >= all.devices) return ARGUMENT;
  struct device *device = &all.device[number];
  *properties = (struct properties){
      .name = device->name,
      .pci_path = device->pci_path,
      .guid = (uint64_t)device->index,
      .pointers = 1,
      .speed = device->speed,
      .most_comms = 65536,
      .most_receives = 1,
      .devices = 1,
      .device = {number},
      .largest_p2p = LARGEST,
      .largest_collective = LARGEST,
  };
  return OK;
}

static int listen_on(int number, void *to, void **result) {
  *result = NULL;
  if (number < 0 || number >= all.devices) return ARGUMENT;
  struct door *door = calloc(1, sizeof *door);
  if (!door || open_door(door, &all.device[number].address)) {
    LOG(WARN, "cannot listen on %s: %s", all.device[number].name, strerror(errno));
    free(door);
    return SYSTEM;
  }
  struct handle handle = {.nonce = door->nonce, .address = door->address};
  memset(to, 0, 128);
  memcpy(to, &handle, sizeof handle);
  *result = door;
  return OK;
}

/* One step of a connection: OK, or an error: see errno. */
static int dial(struct handle *handle, int device) {
  struct comm *comm = handle->comm;
  if (!comm) {
    union address address = handle->address;
    if (address.any.sa_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&address.in6.sin6_addr))
      address.in6.sin6_scope_id = (uint32_t)all.device[device].index;
    if (!(comm = handle->comm = make_comm(true, &address))) return SYSTEM;
    comm->door.nonce = handle->nonce;
    int error = open_flow(comm);
    if (error) return error;
  }
  if (now() - atomic_load(&comm->visited) > all.timeout_s) {
    errno = ETIMEDOUT;
    return REMOTE;
  }
  return greet(comm, comm->flows);
}

static int connect_to(int device, void *config, void *to, void **result, void **device_handle) {
  (void)config, (void)device_handle;
  struct handle *handle = to;
  *result = NULL;
  if (device < 0 || device >= all.devices) return ARGUMENT;
  int error = dial(handle, device);
  struct comm *comm = handle->comm;
  if (error) {
    char text[INET6_ADDRSTRLEN] = "";
    bool six = handle->address.any.sa_family == AF_INET6;
    const void *address = six ? (void *)&handle->address.in6.sin6_addr : (void *)&handle->address.in.sin_addr;
    LOG(WARN, "cannot connect to %s: %s", inet_ntop(six ? AF_INET6 : AF_INET, address, text, sizeof text), strerror(errno));
    if (comm) free_comm(comm);
  } else if (comm->flows->state == OPEN) {
    enlist(comm);
    *result = comm;
  } else {
    return OK; /* later */
  }
  handle->comm = NULL;
  return error;
}

static int accept_from(void *from, void **result, void **device_handle) {
  (void)device_handle;
  struct door *door = from;
  int error, fd = enter(door, &error);
  *result = NULL;
  if (fd < 0) return error;
  struct comm *comm = make_comm(false, &door->address);
  if (!comm || !add_flow(comm, fd, OPEN)) {
    LOG(WARN, "no connection: %s", strerror(errno));
    close_socket(&fd);
    if (comm) free_comm(comm);
    return SYSTEM;
  }
  struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u32 = FLOWS};
  bool more = all.flows > 1 && !open_door(&comm->door, &door->address) &&
              !epoll_ctl(comm->epoll, EPOLL_CTL_ADD, comm->door.fd, &event);
  if (!more) close_door(&comm->door);
  uint16_t port = more ? comm->door.address.in.sin_port : 0;
  struct welcome welcome = {comm->door.nonce, port, (uint16_t)all.flows, (uint32_t)MAGIC};
  if (send(fd, &welcome, sizeof welcome, MSG_NOSIGNAL) != (ssize_t)sizeof welcome) {
    free_comm(comm); /* whoever came has gone again; the next one may be the peer */
    return OK;
  }
  enlist(comm);
  *result = comm;
  return OK;
}

static int register_memory(void *comm, void *data, size_t size, int type, void **handle) {
  (void)comm, (void)data, (void)size;
  *handle = NULL;
  return type == 1 ? OK : INTERNAL;
}

static int forget_memory(void *comm, void *handle) {
  (void)comm, (void)handle;
  return OK;
}

static int post(struct comm *comm, void *data, size_t size, void **result) {
  uint32_t message = atomic_load(&comm->posted);
  struct request *request = &comm->requests[message % REQUESTS];
  *result = NULL;
  if (comm->error) return comm->error;
  if (size > LARGEST) return ARGUMENT;
  if (atomic_load(&request->state) != FREE) return OK; /* later */
  request->comm = comm;
  request->data = data;
  request->size = size;
  request->cut = request->moved = request->path = 0;
  request->ended = comm->sends;
  request->message = message;
  atomic_store(&request->state, ACTIVE);
  atomic_store(&comm->posted, message + 1);
  *result = request;
  visit(comm, false);
  return OK;
}

static int isend(void *comm, void *data, size_t size, int tag, void *memory, void *phandle, void **result) {
  (void)tag, (void)memory, (void)phandle;
  return post(comm, data, size, result);
}

static int irecv(void *comm, int count, void **data, size_t *sizes, int *tags, void **memory, void **phandles,
                 void **result) {
  (void)tags, (void)memory, (void)phandles;
  *result = NULL;
  return count == 1 ? post(comm, data[0], sizes[0], result) : ARGUMENT;
}

static int iflush(void *comm, int count, void **data, int *sizes, void **memory, void **result) {
  (void)comm, (void)count, (void)data, (void)sizes, (void)memory;
  *result = NULL; /* what has come is in host memory */
  return OK;
}

static int test(void *which, int *done, int *size) {
  struct request *request = which;
  struct comm *comm = request->comm;
  if (atomic_load(&request->state) == FREE) return USAGE; /* it was done before */
  if (atomic_load(&request->state) == ACTIVE) visit(comm, true);
  *done = atomic_load(&request->state) == DONE;
  if (!*done) return comm->error;
  if (size) *size = (int)least(request->size, INT_MAX);
  atomic_store(&request->state, FREE);
  return OK;
}

static int close_comm(void *comm) {
  if (!comm) return OK;
  delist(comm);
  free_comm(comm);
  return OK;
}

static int close_listener(void *door) {
  if (!door) return OK;
  close_door(door);
  free(door);
  return OK;
}

/* Not NCCL's: bytes that this process has sent on the first flow of all connections, on the second, and so on. */
EXPORT int bagua_net_counters(uint64_t *bytes, int room) {
  int used = 0;
  for (int i = 0; i < FLOWS; i++) {
    uint64_t sent = atomic_load(&all.sent[i]);
    if (i < room) bytes[i] = sent;
    if (sent && i < room) used = i + 1;
  }
  return used;
}

EXPORT const struct table ncclNetPlugin_v10 = {
    .name = "bagua",
    .init = init,
    .devices = devices,
    .getProperties = describe,
    .listen = listen_on,
    .connect = connect_to,
    .accept = accept_from,
    .regMr = register_memory,
    .deregMr = forget_memory,
    .isend = isend,
    .irecv = irecv,
    .iflush = iflush,
    .test = test,
    .closeSend = close_comm,
    .closeRecv = close_comm,
    .closeListen = close_listener,
};
