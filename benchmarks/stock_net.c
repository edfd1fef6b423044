/* The scheme of NCCL's own sockets, for comparison, after its published behaviour: a message is cut into equal parts
 * over N sockets (at least 64 KiB each), dealt out in turn, each socket served by one of T threads; all parts must
 * arrive. The size goes ahead on a control socket. Without threads all data takes the control socket, in NCCL's own
 * thread. NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD say how many; N = T times sockets of each.
 *
 * It has the functions of a plugin that the harness calls (version 10, symbol stockNet_v10), and no care for errors. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define SOCKETS 64
#define REQUESTS 64
#define SMALLEST 65536

struct task {
  int fd;
  char *data;
  size_t size, moved;
  atomic_int state; /* 0 free, 1 active, 2 done */
};

struct request {
  struct comm *comm;
  char *data;
  size_t size, announced, moved;
  uint64_t wire;
  int state, parts; /* 0 free, 1 size on its way, 2 data on its way */
  struct task *part[SOCKETS];
  uint32_t number;
};

struct worker {
  struct comm *comm;
  pthread_t thread;
  struct task task[REQUESTS * 8];
  atomic_uint posted;
  unsigned done;
  pthread_mutex_t lock;
  pthread_cond_t wake;
};

struct comm {
  int sends, threads, sockets, control, fd[SOCKETS], next_socket;
  uint32_t posted, current; /* messages; whose size or data is on the control socket */
  struct request request[REQUESTS];
  struct worker *worker;
  atomic_int stop;
};

struct handle {
  struct sockaddr_in address;
  struct comm *dialled;
  int count;
};

static int threads_wanted, sockets_wanted;
static char *device = "stock";

static int number(const char *name, int usual) {
  const char *text = getenv(name);
  return text ? atoi(text) : usual;
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* Moves what the socket takes or has; -1 after an error. */
static ssize_t move(int sends, int fd, char *data, size_t size) {
  ssize_t n = sends ? send(fd, data, size, MSG_DONTWAIT | MSG_NOSIGNAL) : recv(fd, data, size, MSG_DONTWAIT);
  if (n == 0 && size) return -1;
  return n < 0 ? (errno == EAGAIN || errno == EINTR ? 0 : -1) : n;
}

static void *work(void *which) {
  struct worker *worker = which;
  struct comm *comm = worker->comm;
  while (!atomic_load(&comm->stop)) {
    unsigned posted = atomic_load(&worker->posted);
    int idle = 1;
    for (unsigned i = worker->done; i != posted; i++) {
      struct task *task = &worker->task[i % (REQUESTS * 8)];
      int first = 1; /* a socket's tasks in their order */
      if (atomic_load(&task->state) != 1) continue;
      for (unsigned j = worker->done; j != i; j++) {
        struct task *before = &worker->task[j % (REQUESTS * 8)];
        if (before->fd == task->fd && atomic_load(&before->state) == 1) first = 0;
      }
      if (!first) continue;
      idle = 0;
      for (ssize_t n; task->moved < task->size; task->moved += (size_t)n)
        if ((n = move(comm->sends, task->fd, task->data + task->moved, task->size - task->moved)) <= 0) {
          if (n < 0) abort();
          break;
        }
      if (task->moved == task->size) atomic_store(&task->state, 2);
    }
    while (worker->done != posted && atomic_load(&worker->task[worker->done % (REQUESTS * 8)].state) != 1) worker->done++;
    if (idle) {
      pthread_mutex_lock(&worker->lock);
      while (worker->done == atomic_load(&worker->posted) && !atomic_load(&comm->stop))
        pthread_cond_wait(&worker->wake, &worker->lock);
      pthread_mutex_unlock(&worker->lock);
    }
  }
  return NULL;
}

static struct comm *make(int sends, int *fds) {
  struct comm *comm = calloc(1, sizeof *comm);
  comm->sends = sends;
  comm->threads = threads_wanted;
  comm->sockets = sockets_wanted;
  comm->control = fds[0];
  memcpy(comm->fd, fds + 1, sizeof(int) * (size_t)comm->sockets);
  comm->worker = calloc((size_t)comm->threads + 1, sizeof *comm->worker);
  for (int i = 0; i < comm->threads; i++) {
    struct worker *worker = &comm->worker[i];
    worker->comm = comm;
    pthread_mutex_init(&worker->lock, NULL);
    pthread_cond_init(&worker->wake, NULL);
    pthread_create(&worker->thread, NULL, work, worker);
  }
  return comm;
}

static int init(void *log, void *profile) {
  (void)log, (void)profile;
  threads_wanted = number("NCCL_SOCKET_NTHREADS", 0);
  sockets_wanted = threads_wanted * number("NCCL_NSOCKS_PERTHREAD", 1);
  return 0;
}

static int devices(int *count) { return *count = 1, 0; }

static int properties(int which, void *to) {
  (void)which;
  memset(to, 0, 104);
  memcpy(to, &device, sizeof device);
  return 0;
}

static int listen_on(int which, void *to, void **result) {
  (void)which;
  struct handle handle = {.address = {.sin_family = AF_INET}};
  socklen_t length = sizeof handle.address;
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  handle.address.sin_addr.s_addr = inet_addr(getenv("STOCK_ADDRESS"));
  if (bind(fd, (void *)&handle.address, length) || listen(fd, 1024)) return 2;
  getsockname(fd, (void *)&handle.address, &length);
  memset(to, 0, 128);
  memcpy(to, &handle, sizeof handle);
  *result = (void *)(intptr_t)fd;
  return 0;
}

static int settle(int fd) {
  int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  return fd;
}

/* Both ends block here until all sockets are connected: this is no measure of connecting. */
static int connect_to(int which, void *config, void *to, void **result, void **none) {
  (void)which, (void)config, (void)none;
  struct handle *handle = to;
  int fds[SOCKETS + 1];
  for (int32_t i = 0; i <= sockets_wanted; i++) {
    fds[i] = settle(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (connect(fds[i], (void *)&handle->address, sizeof handle->address)) return 6;
    if (send(fds[i], &i, sizeof i, 0) != sizeof i) return 6;
  }
  *result = make(1, fds);
  return 0;
}

static int accept_from(void *listener, void **result, void **none) {
  (void)none;
  int fds[SOCKETS + 1];
  for (int i = 0; i <= sockets_wanted; i++) {
    int32_t which;
    int fd = settle(accept((int)(intptr_t)listener, NULL, NULL));
    if (recv(fd, &which, sizeof which, MSG_WAITALL) != sizeof which) return 6;
    fds[which] = fd;
  }
  *result = make(0, fds);
  return 0;
}

static int reg(void *a, void *b, size_t c, int d, void **e) { return (void)a, (void)b, (void)c, (void)d, *e = NULL, 0; }
static int reg_dma(void *a, void *b, size_t c, int d, uint64_t e, int f, void **g) {
  return (void)a, (void)b, (void)c, (void)d, (void)e, (void)f, *g = NULL, 3;
}
static int dereg(void *a, void *b) { return (void)a, (void)b, 0; }

static int post(struct comm *comm, void *data, size_t size, void **result) {
  struct request *request = &comm->request[comm->posted % REQUESTS];
  *result = NULL;
  if (request->state) return 0;
  *request = (struct request){.comm = comm, .data = data, .size = size, .wire = size, .state = 1, .number = comm->posted++};
  *result = request;
  return 0;
}

static int isend(void *c, void *data, size_t size, int t, void *m, void *p, void **r) {
  return (void)t, (void)m, (void)p, post(c, data, size, r);
}

static int irecv(void *c, int n, void **data, size_t *sizes, int *t, void **m, void **p, void **r) {
  return (void)n, (void)t, (void)m, (void)p, post(c, data[0], sizes[0], r);
}

static int iflush(void *a, int b, void **c, int *d, void **e, void **r) {
  return (void)a, (void)b, (void)c, (void)d, (void)e, *r = NULL, 0;
}

static void deal(struct comm *comm, struct request *request) {
  size_t piece = (request->size + (size_t)comm->sockets - 1) / (size_t)comm->sockets;
  piece = piece < SMALLEST ? SMALLEST : piece;
  for (size_t at = 0; at < request->size; at += piece) {
    struct worker *worker = &comm->worker[comm->next_socket % comm->threads];
    struct task *task = &worker->task[atomic_load(&worker->posted) % (REQUESTS * 8)];
    if (atomic_load(&task->state)) abort();
    *task = (struct task){.fd = comm->fd[comm->next_socket], .data = request->data + at,
                          .size = least(piece, request->size - at), .state = 1};
    comm->next_socket = (comm->next_socket + 1) % comm->sockets;
    request->part[request->parts++] = task;
    pthread_mutex_lock(&worker->lock);
    atomic_fetch_add(&worker->posted, 1);
    pthread_cond_signal(&worker->wake);
    pthread_mutex_unlock(&worker->lock);
  }
}

/* The control socket carries one message's size, and without threads its data, after the other's. */
static int control(struct comm *comm, struct request *request) {
  if (request->number != comm->current) return 0;
  if (request->state == 1) {
    ssize_t n = move(comm->sends, comm->control, (char *)&request->wire + request->announced,
                     sizeof request->wire - request->announced);
    if (n < 0) return 6;
    if ((request->announced += (size_t)n) < sizeof request->wire) return 0;
    if (request->wire > request->size) return 5;
    request->size = request->wire;
    request->state = 2;
    if (comm->threads) {
      comm->current++;
      deal(comm, request);
    }
  }
  while (!comm->threads && request->moved < request->size) {
    ssize_t n = move(comm->sends, comm->control, request->data + request->moved, request->size - request->moved);
    if (n < 0) return 6;
    if (n == 0) return 0;
    request->moved += (size_t)n;
  }
  if (!comm->threads) comm->current++;
  return 0;
}

static int test(void *which, int *done, int *size) {
  struct request *request = which;
  struct comm *comm = request->comm;
  *done = 0;
  int error = control(comm, request);
  if (error || request->state < 2) return error;
  if (!comm->threads && request->moved < request->size) return 0;
  for (int i = 0; i < request->parts; i++)
    if (atomic_load(&request->part[i]->state) != 2) return 0;
  for (int i = 0; i < request->parts; i++) atomic_store(&request->part[i]->state, 0);
  if (size) *size = (int)request->size;
  *done = 1;
  request->state = 0;
  return 0;
}

static int close_comm(void *which) {
  struct comm *comm = which;
  atomic_store(&comm->stop, 1);
  for (int i = 0; i < comm->threads; i++) {
    pthread_mutex_lock(&comm->worker[i].lock);
    pthread_cond_signal(&comm->worker[i].wake);
    pthread_mutex_unlock(&comm->worker[i].lock);
    pthread_join(comm->worker[i].thread, NULL);
  }
  close(comm->control);
  for (int i = 0; i < comm->sockets; i++) close(comm->fd[i]);
  free(comm->worker);
  free(comm);
  return 0;
}

static int close_listener(void *listener) { return close((int)(intptr_t)listener); }

__attribute__((visibility("default"))) const void *const stockNet_v10[20] = {
    "stock", init, devices, properties, listen_on, connect_to, accept_from, reg, reg_dma, dereg, isend, irecv, iflush,
    test, close_comm, close_comm, close_listener, NULL, NULL, NULL};
