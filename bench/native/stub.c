/* A stub upstream that costs as little as possible, so that what stands before it is measured.
 *
 * One thread, epoll. POST /v1/chat/completions answers at once with an OpenAI-shaped completion, or,
 * when the body holds "stream":true, with server-sent events: the first chunk at once, the others
 * every INTERVAL ms. GET /health, /ready, /live, /routable, /v1/models answer 200; anything else 404.
 * usage: stub --chunks N --interval-ms MS [--unix PATH]
 * Listens on a free TCP port of the loopback address, whose number is the first line of its output,
 * and on the Unix socket. */
#define _GNU_SOURCE
#include "net.h"

enum { MAX_REQUEST_BYTES = 8 << 20, LISTEN_BACKLOG = 4096, READ_BYTES = 16384 };

struct conn {
    int fd, is_listener, closed;
    struct buffer in, out;
    int chunks_left; /* > 0 while an answer streams */
    int wants_usage;
    uint64_t due_ns;
    struct conn *next;
};

static int epoll_fd, chunks = 16;
static uint64_t interval_ns = 20000000u;
/* All streams share one interval, so the queue is in the order of what is due. */
static struct conn *queue_head, *queue_tail;
static struct conn *graveyard;

#define USAGE "\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":12,\"total_tokens\":21}"
static const char UNARY[] =
    "{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"bench\","
    "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":"
    "\"The quick brown fox jumps over the lazy dog, twice.\"},\"finish_reason\":\"stop\"}]," USAGE "}";
#define EVENT_START                                                             \
    "data: {\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":1700000000," \
    "\"model\":\"bench\",\"choices\":["
static const char EVENT[] =
    EVENT_START "{\"index\":0,\"delta\":{\"content\":\"token \"},\"finish_reason\":null}]}\n\n";
static const char LAST_EVENT[] =
    EVENT_START "{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
static const char USAGE_EVENT[] = EVENT_START "]," USAGE "}\n\n";
static const char DONE_EVENT[] = "data: [DONE]\n\n";
static const char STREAM_HEAD[] =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
    "transfer-encoding: chunked\r\n\r\n";

static void drop(struct conn *c) {
    if (c->closed) return;
    close(c->fd);
    c->closed = 1;
    c->chunks_left = 0;
    /* Freed later: this round's events and the queue may still point here. */
    if (!c->due_ns) {
        c->next = graveyard;
        graveyard = c;
    }
}

static void bury(void) {
    while (graveyard) {
        struct conn *c = graveyard;
        graveyard = c->next;
        free(c->in.data);
        free(c->out.data);
        free(c);
    }
}

static void put(struct conn *c, const char *data, size_t length) {
    memcpy(buffer_room(&c->out, length), data, length);
    c->out.length += length;
}

static void put_chunk(struct conn *c, const char *data, size_t length) {
    char size[16];
    put(c, size, (size_t)snprintf(size, sizeof size, "%zx\r\n", length));
    put(c, data, length);
    put(c, "\r\n", 2);
}

static void flush(struct conn *c) {
    if (c->closed || !c->out.length) return;
    ssize_t n = send(c->fd, c->out.data, c->out.length, MSG_NOSIGNAL);
    if (n < 0 && errno != EAGAIN) {
        drop(c);
        return;
    }
    if (n > 0) buffer_drop_front(&c->out, (size_t)n);
    if (c->out.length) watch(epoll_fd, EPOLL_CTL_MOD, c->fd, EPOLLIN | EPOLLOUT, c);
}

static void enqueue(struct conn *c, uint64_t now) {
    c->due_ns = now + interval_ns;
    c->next = NULL;
    if (queue_tail) queue_tail->next = c;
    else queue_head = c;
    queue_tail = c;
}

static void stream_step(struct conn *c, uint64_t now) {
    put_chunk(c, EVENT, sizeof EVENT - 1);
    if (--c->chunks_left > 0) {
        enqueue(c, now);
    } else {
        put_chunk(c, LAST_EVENT, sizeof LAST_EVENT - 1);
        if (c->wants_usage) put_chunk(c, USAGE_EVENT, sizeof USAGE_EVENT - 1);
        put_chunk(c, DONE_EVENT, sizeof DONE_EVENT - 1);
        put(c, "0\r\n\r\n", 5);
    }
    flush(c);
}

static void answer(struct conn *c, const char *status, const char *body) {
    char head[160];
    put(c, head,
        (size_t)snprintf(head, sizeof head,
                         "HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n",
                         status, strlen(body)));
    put(c, body, strlen(body));
    flush(c);
}

static int body_says(const char *body, size_t length, const char *tight, const char *spaced) {
    return memmem(body, length, tight, strlen(tight)) || memmem(body, length, spaced, strlen(spaced));
}

static int starts(const char *text, const char *prefix) {
    return strncmp(text, prefix, strlen(prefix)) == 0;
}

static void handle(struct conn *c, const char *head, const char *body, size_t body_length) {
    if (starts(head, "POST /v1/chat/completions ")) {
        if (!body_says(body, body_length, "\"stream\":true", "\"stream\": true")) {
            answer(c, "200 OK", UNARY);
            return;
        }
        c->wants_usage =
            body_says(body, body_length, "\"include_usage\":true", "\"include_usage\": true");
        c->chunks_left = chunks;
        put(c, STREAM_HEAD, sizeof STREAM_HEAD - 1);
        stream_step(c, now_ns());
    } else if (starts(head, "GET /v1/models ")) {
        answer(c, "200 OK",
               "{\"object\":\"list\",\"data\":[{\"id\":\"bench\",\"object\":\"model\","
               "\"created\":1700000000,\"owned_by\":\"bench\"}]}");
    } else if (starts(head, "GET /health ") || starts(head, "GET /ready ") ||
               starts(head, "GET /live ") || starts(head, "GET /routable ")) {
        answer(c, "200 OK", "{\"status\":\"ok\"}");
    } else {
        answer(c, "404 Not Found", "{\"error\":{\"message\":\"no such path\",\"type\":\"not_found\"}}");
    }
}

/* Handles the requests that have arrived whole, one at a time. */
static void serve_input(struct conn *c) {
    while (!c->closed && !c->chunks_left && c->in.length) {
        char *end = memmem(c->in.data, c->in.length, "\r\n\r\n", 4);
        if (!end) return;
        size_t head_length = (size_t)(end - c->in.data) + 4;
        if (find_header(c->in.data, head_length, "transfer-encoding:")) {
            answer(c, "411 Length Required", "{\"error\":{\"message\":\"content-length wanted\"}}");
            drop(c);
            return;
        }
        const char *value = find_header(c->in.data, head_length, "content-length:");
        size_t body_length = value ? (size_t)strtoul(value, NULL, 10) : 0;
        if (c->in.length < head_length + body_length) return;
        handle(c, c->in.data, c->in.data + head_length, body_length);
        buffer_drop_front(&c->in, head_length + body_length);
    }
}

static void accept_all(struct conn *listener) {
    int one = 1, fd;
    while ((fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        struct conn *c = calloc(1, sizeof *c);
        if (!c) die("calloc");
        c->fd = fd;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one); /* fails on Unix sockets */
        watch(epoll_fd, EPOLL_CTL_ADD, fd, EPOLLIN, c);
    }
}

static void on_event(struct conn *c, uint32_t events) {
    if (c->closed) return;
    if (c->is_listener) {
        accept_all(c);
        return;
    }
    if (events & EPOLLOUT) {
        watch(epoll_fd, EPOLL_CTL_MOD, c->fd, EPOLLIN, c);
        flush(c);
    }
    if (c->closed || !(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
    ssize_t n = recv(c->fd, buffer_room(&c->in, READ_BYTES), READ_BYTES, 0);
    if (n == 0 || (n < 0 && errno != EAGAIN) || c->in.length > MAX_REQUEST_BYTES) {
        drop(c);
        return;
    }
    if (n > 0) c->in.length += (size_t)n;
    serve_input(c);
}

static void run_due(uint64_t now) {
    while (queue_head && queue_head->due_ns <= now) {
        struct conn *c = queue_head;
        queue_head = c->next;
        if (!queue_head) queue_tail = NULL;
        c->due_ns = 0;
        c->next = NULL;
        if (c->closed) {
            c->next = graveyard;
            graveyard = c;
            continue;
        }
        stream_step(c, now);
        if (!c->closed && !c->chunks_left) serve_input(c);
    }
}

static struct conn *listen_on(const char *where) {
    union address address;
    socklen_t length = parse_address(where, &address);
    struct conn *c = calloc(1, sizeof *c);
    if (!c) die("calloc");
    c->is_listener = 1;
    c->fd = open_socket(&address);
    if (bind(c->fd, &address.any, length) < 0) die(where);
    if (listen(c->fd, LISTEN_BACKLOG) < 0) die("listen");
    watch(epoll_fd, EPOLL_CTL_ADD, c->fd, EPOLLIN, c);
    return c;
}

static int wait_ms(uint64_t now) {
    if (!queue_head) return -1;
    if (queue_head->due_ns <= now) return 0;
    return (int)((queue_head->due_ns - now + 999999u) / 1000000u);
}

int main(int argc, char **argv) {
    const char *socket_path = NULL;
    char local[128];
    struct epoll_event events[512];
    union address bound;
    socklen_t length = sizeof bound;
    process_setup();
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--chunks") == 0) chunks = atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--interval-ms") == 0)
            interval_ns = (uint64_t)atoi(argv[i + 1]) * 1000000u;
        else if (strcmp(argv[i], "--unix") == 0) socket_path = argv[i + 1];
        else {
            fprintf(stderr, "unknown option %s\n", argv[i]);
            return 2;
        }
    }
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    struct conn *tcp = listen_on("0");
    if (socket_path) {
        snprintf(local, sizeof local, "unix:%s", socket_path);
        listen_on(local);
    }
    if (getsockname(tcp->fd, &bound.any, &length) < 0) die("getsockname");
    printf("%d\n", ntohs(bound.tcp.sin_port));
    fflush(stdout);
    for (;;) {
        int n = epoll_wait(epoll_fd, events, 512, wait_ms(now_ns()));
        for (int i = 0; i < n; i++) on_event(events[i].data.ptr, events[i].events);
        run_due(now_ns());
        bury();
    }
}
