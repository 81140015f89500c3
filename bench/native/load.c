/* A load generator that costs as little as possible: closed loop, one thread, epoll.
 *
 * Keeps CONNECTIONS requests in flight, unary or streaming, checks each answer whole and prints one
 * JSON object: requests, errors by kind, quantiles of the time from the start of a request (or of
 * its connection, when it needs a new one) to the first byte of the body and to the end.
 * Ends after --duration-ms or when --requests were made; what is in flight is waited for.
 * usage: load --to PORT|unix:PATH [options below] */
#define _GNU_SOURCE
#include "net.h"

enum { READ_BYTES = 65536, HEAD_BYTES = 8192, TAIL_BYTES = 16, TICK_MS = 50 };
enum phase { WAITING, CONNECTING, HEAD, BODY };
enum error { CONNECT, CLOSED, STATUS_4XX, STATUS_5XX, TIMEOUT, MALFORMED, INCOMPLETE, ERRORS };
static const char *const ERROR_NAMES[ERRORS] = {"connect", "closed",    "status_4xx", "status_5xx",
                                                "timeout", "malformed", "incomplete"};

struct conn {
    int fd; /* -1: none */
    enum phase phase;
    uint64_t start_ns, first_byte_ns, due_ns;
    char head[HEAD_BYTES];
    size_t head_length;
    int status, chunked, keep_alive;
    uint64_t body_left;  /* of the body, or of the chunk */
    int chunk_state;     /* 0 size line, 1 data, 2 line end after data, 3 trailer */
    char line[32];       /* of a chunk's size */
    size_t line_length;
    char tail[TAIL_BYTES]; /* last bytes of the body */
    size_t events;         /* "\n\n" seen */
};

struct samples {
    uint32_t *us;
    size_t count, capacity;
};

static const char *to, *model = "bench", *key = "none";
static int streaming, connections = 1, expect_events;
static uint64_t duration_ns, requests_wanted, warmup_ns, stagger_ns, prompt_bytes = 200;
static uint64_t timeout_ns = 30000000000u;

static union address target;
static socklen_t target_length;
static int epoll_fd, in_flight;
static char *request;
static size_t request_length;
static uint64_t began_ns, issued, completed, measured, body_bytes, events_total, last_end_ns;
static uint64_t errors[ERRORS];
static struct samples first_byte, whole;

static void record(struct samples *s, uint64_t ns) {
    if (s->count == s->capacity) {
        s->capacity = s->capacity ? s->capacity * 2 : 65536;
        s->us = realloc(s->us, s->capacity * sizeof *s->us);
        if (!s->us) die("realloc");
    }
    s->us[s->count++] = (uint32_t)(ns / 1000u);
}

static void build_request(void) {
    char *prompt = malloc(prompt_bytes + 1), *body;
    if (!prompt) die("malloc");
    memset(prompt, 'x', prompt_bytes);
    prompt[prompt_bytes] = 0;
    int body_length = asprintf(
        &body, "{\"model\":\"%s\",\"messages\":[{\"role\":\"user\",\"content\":\"%s\"}]%s}", model,
        prompt, streaming ? ",\"stream\":true" : "");
    int length = asprintf(&request,
                          "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\n"
                          "content-type: application/json\r\naccept: */*\r\n"
                          "authorization: Bearer %s\r\ncontent-length: %d\r\n\r\n%s",
                          key, body_length, body);
    if (body_length < 0 || length < 0) die("asprintf");
    request_length = (size_t)length;
    free(body);
    free(prompt);
}

static int may_issue(uint64_t now) {
    if (requests_wanted && issued >= requests_wanted) return 0;
    return !duration_ns || now - began_ns < warmup_ns + duration_ns;
}

static void disconnect(struct conn *c) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
}

static void begin(struct conn *c, uint64_t now);

/* The request is over, well or not; starts the next. */
static void over(struct conn *c, uint64_t now) {
    in_flight--;
    last_end_ns = now;
    c->phase = WAITING;
    c->due_ns = 0;
    /* A server that fails at once must not turn the loop into a recursion. */
    if (may_issue(now)) c->due_ns = now;
}

static void fail(struct conn *c, enum error kind, uint64_t now) {
    errors[kind]++;
    disconnect(c);
    over(c, now);
}

static void succeed(struct conn *c, uint64_t now) {
    enum error kind = ERRORS;
    if (c->status >= 500) kind = STATUS_5XX;
    else if (c->status != 200) kind = STATUS_4XX;
    else if (streaming && (!memmem(c->tail, TAIL_BYTES, "[DONE]", 6) ||
                           c->events < (size_t)expect_events))
        kind = INCOMPLETE;
    if (!c->keep_alive) disconnect(c);
    if (kind != ERRORS) {
        errors[kind]++;
    } else {
        completed++;
        events_total += c->events;
        if (c->start_ns - began_ns >= warmup_ns) {
            measured++;
            record(&first_byte, c->first_byte_ns - c->start_ns);
            record(&whole, now - c->start_ns);
        }
    }
    over(c, now);
}

static void send_request(struct conn *c, uint64_t now) {
    /* A request is far smaller than a socket's buffer, which is empty: all or nothing. */
    ssize_t n = send(c->fd, request, request_length, MSG_NOSIGNAL);
    if (n != (ssize_t)request_length) fail(c, CLOSED, now);
    else c->phase = HEAD;
}

static void begin(struct conn *c, uint64_t now) {
    issued++;
    in_flight++;
    c->start_ns = now;
    c->first_byte_ns = 0;
    c->head_length = c->line_length = c->events = 0;
    c->chunk_state = 0;
    memset(c->tail, 0, sizeof c->tail);
    if (c->fd >= 0) {
        send_request(c, now);
        return;
    }
    c->fd = open_socket(&target);
    c->phase = CONNECTING;
    if (connect(c->fd, &target.any, target_length) < 0 && errno != EINPROGRESS) {
        fail(c, CONNECT, now);
        return;
    }
    watch(epoll_fd, EPOLL_CTL_ADD, c->fd, EPOLLOUT, c);
}

static void finish_connect(struct conn *c, uint64_t now) {
    int problem = 0;
    socklen_t length = sizeof problem;
    getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &problem, &length);
    if (problem) {
        fail(c, CONNECT, now);
        return;
    }
    watch(epoll_fd, EPOLL_CTL_MOD, c->fd, EPOLLIN, c);
    send_request(c, now);
}

/* Takes the body's payload: counts events, keeps the tail. */
static void take_payload(struct conn *c, const char *data, size_t length, uint64_t now) {
    if (!length) return;
    if (!c->first_byte_ns) c->first_byte_ns = now;
    body_bytes += length;
    if (!streaming) return;
    char before = c->tail[TAIL_BYTES - 1];
    for (size_t i = 0; i < length; i++) {
        if (data[i] == '\n' && before == '\n') c->events++;
        before = data[i];
    }
    size_t kept = length < TAIL_BYTES ? TAIL_BYTES - length : 0;
    memmove(c->tail, c->tail + TAIL_BYTES - kept, kept);
    memcpy(c->tail + kept, data + length - (TAIL_BYTES - kept), TAIL_BYTES - kept);
}

enum verdict { MORE, WHOLE, BROKEN };

/* One line of the chunked framing has been read. */
static enum verdict take_line(struct conn *c) {
    c->line[c->line_length] = 0;
    if (c->chunk_state == 2) {
        c->chunk_state = 0;
        if (c->line_length) return BROKEN;
    } else if (c->chunk_state == 3) {
        if (!c->line_length) return WHOLE;
    } else {
        char *end;
        c->body_left = strtoull(c->line, &end, 16);
        if (end == c->line) return BROKEN;
        c->chunk_state = c->body_left ? 1 : 3;
    }
    c->line_length = 0;
    return MORE;
}

static enum verdict take_chunked(struct conn *c, const char *data, size_t length, uint64_t now) {
    while (length) {
        if (c->chunk_state == 1) {
            size_t n = length < c->body_left ? length : (size_t)c->body_left;
            take_payload(c, data, n, now);
            data += n;
            length -= n;
            c->body_left -= n;
            if (!c->body_left) c->chunk_state = 2;
            continue;
        }
        char byte = *data++;
        length--;
        if (byte == '\n') {
            enum verdict verdict = take_line(c);
            if (verdict != MORE) return length && verdict == WHOLE ? BROKEN : verdict;
        } else if (byte != '\r') {
            if (c->line_length + 1 >= sizeof c->line) return BROKEN;
            c->line[c->line_length++] = byte;
        }
    }
    return MORE;
}

static enum verdict take_body(struct conn *c, const char *data, size_t length, uint64_t now) {
    if (c->chunked) return take_chunked(c, data, length, now);
    if (length > c->body_left) return BROKEN;
    take_payload(c, data, length, now);
    c->body_left -= length;
    return c->body_left ? MORE : WHOLE;
}

static enum verdict parse_head(struct conn *c, size_t length) {
    const char *value;
    if (length < 12 || strncmp(c->head, "HTTP/1.", 7) != 0) return BROKEN;
    c->status = atoi(c->head + 9);
    value = find_header(c->head, length, "transfer-encoding:");
    c->chunked = value && strncasecmp(value, "chunked", 7) == 0;
    value = find_header(c->head, length, "content-length:");
    if (!c->chunked && !value) return BROKEN;
    c->body_left = c->chunked ? 0 : strtoull(value, NULL, 10);
    value = find_header(c->head, length, "connection:");
    c->keep_alive = !(value && strncasecmp(value, "close", 5) == 0);
    c->phase = BODY;
    return MORE;
}

static enum verdict take_head(struct conn *c, const char *data, size_t length, uint64_t now) {
    size_t room = sizeof c->head - 1 - c->head_length, n = length < room ? length : room;
    size_t had = c->head_length;
    memcpy(c->head + had, data, n);
    c->head_length += n;
    c->head[c->head_length] = 0;
    char *end = memmem(c->head, c->head_length, "\r\n\r\n", 4);
    if (!end) return n < length ? BROKEN : MORE;
    size_t head_length = (size_t)(end - c->head) + 4;
    if (parse_head(c, head_length) == BROKEN) return BROKEN;
    size_t used = head_length - had;
    if (used == length && (c->chunked || c->body_left)) return MORE;
    return take_body(c, data + used, length - used, now);
}

static void on_input(struct conn *c, uint64_t now) {
    static char data[READ_BYTES];
    ssize_t n = recv(c->fd, data, sizeof data, 0);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
        if (c->phase == WAITING) disconnect(c);
        else fail(c, CLOSED, now);
        return;
    }
    enum verdict verdict = BROKEN;
    if (c->phase == HEAD) verdict = take_head(c, data, (size_t)n, now);
    else if (c->phase == BODY) verdict = take_body(c, data, (size_t)n, now);
    if (verdict == WHOLE) succeed(c, now);
    else if (verdict == BROKEN && c->phase == WAITING) disconnect(c);
    else if (verdict == BROKEN) fail(c, MALFORMED, now);
}

static int compare(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static void print_quantiles(const char *name, struct samples *s) {
    qsort(s->us, s->count, sizeof *s->us, compare);
    printf(",\"%s\":", name);
    if (!s->count) {
        printf("null");
        return;
    }
    printf("{\"p50\":%u,\"p90\":%u,\"p99\":%u,\"max\":%u}", s->us[(s->count - 1) * 50 / 100],
           s->us[(s->count - 1) * 90 / 100], s->us[(s->count - 1) * 99 / 100], s->us[s->count - 1]);
}

static void report(void) {
    uint64_t all = 0, span = last_end_ns > began_ns + warmup_ns ? last_end_ns - began_ns - warmup_ns : 0;
    for (int i = 0; i < ERRORS; i++) all += errors[i];
    printf("{\"issued\":%lu,\"completed\":%lu,\"measured\":%lu,\"events\":%lu,\"body_bytes\":%lu,"
           "\"duration_s\":%.6f,\"errors\":%lu,\"errors_by_kind\":{",
           issued, completed, measured, events_total, body_bytes, (double)span / 1e9, all);
    for (int i = 0, any = 0; i < ERRORS; i++)
        if (errors[i]) printf("%s\"%s\":%lu", any++ ? "," : "", ERROR_NAMES[i], errors[i]);
    printf("}");
    print_quantiles("ttfb_us", &first_byte);
    print_quantiles("total_us", &whole);
    printf("}\n");
}

static void parse_options(int argc, char **argv) {
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *option = argv[i], *value = argv[i + 1];
        uint64_t number = strtoull(value, NULL, 10);
        if (strcmp(option, "--to") == 0) to = value;
        else if (strcmp(option, "--model") == 0) model = value;
        else if (strcmp(option, "--key") == 0) key = value;
        else if (strcmp(option, "--stream") == 0) streaming = (int)number;
        else if (strcmp(option, "--connections") == 0) connections = (int)number;
        else if (strcmp(option, "--requests") == 0) requests_wanted = number;
        else if (strcmp(option, "--duration-ms") == 0) duration_ns = number * 1000000u;
        else if (strcmp(option, "--warmup-ms") == 0) warmup_ns = number * 1000000u;
        else if (strcmp(option, "--stagger-ms") == 0) stagger_ns = number * 1000000u;
        else if (strcmp(option, "--timeout-ms") == 0) timeout_ns = number * 1000000u;
        else if (strcmp(option, "--prompt-bytes") == 0) prompt_bytes = number;
        else if (strcmp(option, "--expect-events") == 0) expect_events = (int)number;
        else {
            fprintf(stderr, "unknown option %s\n", option);
            exit(2);
        }
    }
    if (!to || connections < 1 || !(duration_ns || requests_wanted)) {
        fprintf(stderr, "needs --to, --connections and --duration-ms or --requests\n");
        exit(2);
    }
}

/* Starts what is due and ends what takes too long. Returns when to look again. */
static uint64_t sweep(struct conn *all, uint64_t now) {
    uint64_t next = now + TICK_MS * 1000000u;
    for (int i = 0; i < connections; i++) {
        struct conn *c = &all[i];
        if (c->phase != WAITING && now - c->start_ns > timeout_ns) fail(c, TIMEOUT, now);
        if (c->phase != WAITING || !c->due_ns) continue;
        if (c->due_ns > now) {
            if (c->due_ns < next) next = c->due_ns;
        } else if (may_issue(now)) {
            begin(c, now);
            if (c->phase == WAITING && c->due_ns) next = now;
        } else {
            c->due_ns = 0;
        }
    }
    return next;
}

static int anything_due(const struct conn *all) {
    for (int i = 0; i < connections; i++)
        if (all[i].due_ns && all[i].phase == WAITING) return 1;
    return 0;
}

int main(int argc, char **argv) {
    struct epoll_event ready[512];
    uint64_t random_state = 88172645463325252u;
    process_setup();
    parse_options(argc, argv);
    build_request();
    target_length = parse_address(to, &target);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    struct conn *all = calloc((size_t)connections, sizeof *all);
    if (!all) die("calloc");
    began_ns = now_ns();
    for (int i = 0; i < connections; i++) {
        random_state ^= random_state << 13, random_state ^= random_state >> 7;
        random_state ^= random_state << 17;
        all[i].fd = -1;
        all[i].due_ns = began_ns + (stagger_ns ? random_state % stagger_ns : 0);
    }
    uint64_t look_ns = sweep(all, began_ns);
    while (in_flight || anything_due(all)) {
        uint64_t now = now_ns();
        int wait = look_ns > now ? (int)((look_ns - now + 999999u) / 1000000u) : 0;
        int n = epoll_wait(epoll_fd, ready, 512, wait);
        for (int i = 0; i < n; i++) {
            struct conn *c = ready[i].data.ptr;
            now = now_ns();
            if (c->phase == CONNECTING) finish_connect(c, now);
            else if (c->fd >= 0) on_input(c, now);
            if (c->phase == WAITING && c->due_ns && c->due_ns <= now) begin(c, now);
        }
        now = now_ns();
        if (now >= look_ns) look_ns = sweep(all, now);
    }
    report();
}
