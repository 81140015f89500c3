/* What the stub upstream and the load generator share: clock, sockets, buffers, header lookup.
 * What does not belong here: what only one of them needs. */
#ifndef BENCH_NET_H
#define BENCH_NET_H

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

struct buffer {
    char *data;
    size_t length, capacity;
};

static inline void die(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static inline uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline char *buffer_room(struct buffer *b, size_t bytes) {
    if (b->length + bytes > b->capacity) {
        size_t capacity = b->capacity ? b->capacity : 4096;
        while (capacity < b->length + bytes) capacity *= 2;
        b->data = realloc(b->data, capacity);
        if (!b->data) die("realloc");
        b->capacity = capacity;
    }
    return b->data + b->length;
}

static inline void buffer_drop_front(struct buffer *b, size_t bytes) {
    memmove(b->data, b->data + bytes, b->length - bytes);
    b->length -= bytes;
}

/* Dies with the benchmark, ignores SIGPIPE, may open as many descriptors as the hard limit allows. */
static inline void process_setup(void) {
    struct rlimit files;
    pid_t parent = getppid();
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) exit(1);
    signal(SIGPIPE, SIG_IGN);
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
}

union address {
    struct sockaddr any;
    struct sockaddr_in tcp;
    struct sockaddr_un local;
};

/* "unix:PATH", or a TCP port on the loopback address. Returns the length of the address. */
static inline socklen_t parse_address(const char *text, union address *out) {
    memset(out, 0, sizeof *out);
    if (strncmp(text, "unix:", 5) == 0) {
        if (strlen(text + 5) >= sizeof out->local.sun_path) {
            fprintf(stderr, "socket path too long: %s\n", text + 5);
            exit(2);
        }
        out->local.sun_family = AF_UNIX;
        strcpy(out->local.sun_path, text + 5);
        return sizeof out->local;
    }
    out->tcp.sin_family = AF_INET;
    out->tcp.sin_port = htons((uint16_t)atoi(text));
    out->tcp.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return sizeof out->tcp;
}

static inline int open_socket(const union address *address) {
    int one = 1;
    int fd = socket(address->any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) die("socket");
    if (address->any.sa_family == AF_INET)
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

static inline void watch(int epoll, int operation, int fd, uint32_t events, void *owner) {
    struct epoll_event event = {.events = events, .data.ptr = owner};
    if (epoll_ctl(epoll, operation, fd, &event) < 0) die("epoll_ctl");
}

/* The value of header `name` (given with its colon) in the `length` bytes of a message's head, or
 * NULL. Compares names without regard to case. */
static inline const char *find_header(const char *head, size_t length, const char *name) {
    size_t name_length = strlen(name);
    const char *end = head + length;
    for (const char *line = head; line && line + name_length < end;
         line = memchr(line, '\n', (size_t)(end - line)), line = line ? line + 1 : NULL) {
        if (strncasecmp(line, name, name_length) == 0) {
            const char *value = line + name_length;
            while (value < end && *value == ' ') value++;
            return value;
        }
    }
    return NULL;
}

#endif
