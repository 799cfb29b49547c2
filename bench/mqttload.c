/* mqttload: an MQTT 3.1.1 / 5 load generator made to be faster than any broker it measures.
 *
 * One thread, one epoll loop, raw non-blocking sockets. Packets are copied from a template and written in
 * large batches; what a read returns is parsed in one loop and acknowledged with one write.
 *
 * Payload of every message (little endian, at least 16 bytes):
 *
 *     0        8      12     16
 *     | sent_ns | seq  | run  | filler ...
 *
 *   sent_ns  CLOCK_MONOTONIC when the message was handed to the socket
 *   seq      0, 1, 2 ... per publisher: loss, duplication and order are read from it
 *   run      id of this run: what another run left behind is ignored ("foreign")
 *
 * Phases: SETUP (connect, subscribe) -> WARMUP -> MEASURE -> DRAIN. The events "measure-start" and
 * "measure-end" go to stderr as they happen, so that a harness can read the broker's CPU time there.
 *
 * Build: cc -O2 -o bench/mqttload bench/mqttload.c */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum {
    READ_BYTES = 256 * 1024,       /* one read: some thousands of small messages */
    WRITE_BYTES = 128 * 1024,      /* a publisher's batch: larger ones only lengthen the queue in the kernel */
    CONNECTING_MAX = 64,           /* below the listen backlog (100) of common brokers */
    SETUP_TIMEOUT_S = 60,
    DRAIN_TIMEOUT_S = 20,
    DRAIN_QUIET_MS = 2000,         /* nothing arrives for this long after the end: the rest is lost */
    STALL_FORGIVE_MS = 1000,       /* undelivered for this long: dropped by the broker, reopen the window */
    STALL_FATAL_MS = 15000,
    PING_EVERY_S = 20,
    TICK_MIN_NS = 100 * 1000,      /* pacing granularity of --rate */
};

typedef struct { uint8_t *bytes; size_t head, tail, cap; } Buffer;
typedef struct { uint32_t from, to; } Gap; /* sequence numbers [from, to) not seen yet */
typedef enum { IDLE, CONNECTING, WAIT_CONNACK, WAIT_SUBACK, READY } State;

typedef struct {
    int fd, index, is_sub, want_out, dirty;
    State state;
    Buffer in, out; /* in: the incomplete packet at the end of the last read */
    /* publisher */
    uint8_t *packet;   /* template of the PUBLISH */
    size_t packet_len, pid_at, payload_at;
    uint32_t sent, acked, forgiven; /* forgiven: seqs below are no longer waited for */
    uint32_t due;      /* --rate: messages whose time has come */
    uint32_t window;
    uint16_t next_pid;
    uint64_t *pid_used; /* bit per packet id */
    uint64_t progress, progress_ns; /* acknowledged + delivered, and when it last moved */
    /* subscriber */
    uint32_t next_seq;
    Gap *gaps;
    size_t gap_count, gap_cap;
} Conn;

static struct {
    const char *host;
    int port, pubs, subs, fanout, qos, payload, version;
    double seconds, warmup, rate;
    uint32_t window, backlog;
} opt = {.host = "127.0.0.1", .port = 1883, .pubs = 1, .subs = 1, .payload = 64, .version = 4,
         .seconds = 5, .warmup = 1};

static Conn *conns, **dirty;
static int conn_count, dirty_count, ready_count, connecting_count, next_to_connect, epoll_fd;
static uint32_t run_id, low_water;
static uint8_t *read_buf;
static size_t read_cap;
static int measuring, publishing;
static uint64_t now;
static uint64_t published, delivered, acked, duplicated, out_of_order, foreign;
static uint64_t last_delivery_ns;

/* Log-linear histogram: 32 buckets per power of two, i.e. 3 % resolution from 1 ns to hours. */
static uint64_t histogram[64 * 32], latency_max;

static uint64_t clock_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

__attribute__((noreturn, format(printf, 1, 2))) static void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("mqttload: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    exit(2);
}

static void on_alarm(int sig) {
    (void)sig;
    static const char text[] = "mqttload: total time exceeded\n";
    if (write(2, text, sizeof text - 1)) {}
    _exit(3);
}

static const char *name_of(const Conn *c) {
    static char text[40];
    snprintf(text, sizeof text, "%s %d", c->is_sub ? "subscriber" : "publisher", c->index);
    return text;
}

/* ---- buffers and sockets ---- */

static uint8_t *reserve(Buffer *b, size_t n) {
    if (b->head == b->tail) b->head = b->tail = 0;
    if (b->tail + n > b->cap) {
        memmove(b->bytes, b->bytes + b->head, b->tail - b->head);
        b->tail -= b->head;
        b->head = 0;
        while (b->tail + n > b->cap) b->cap = b->cap ? b->cap * 2 : 4096;
        if (!(b->bytes = realloc(b->bytes, b->cap))) die("out of memory");
    }
    return b->bytes + b->tail;
}

static void append(Buffer *b, const void *bytes, size_t n) {
    if (!n) return;
    memcpy(reserve(b, n), bytes, n);
    b->tail += n;
}

static void watch(Conn *c, int want_out) {
    if (c->want_out == want_out) return;
    struct epoll_event ev = {.events = EPOLLIN | (want_out ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &ev);
    c->want_out = want_out;
}

static void flush_out(Conn *c) {
    while (c->out.head < c->out.tail) {
        ssize_t n = send(c->fd, c->out.bytes + c->out.head, c->out.tail - c->out.head, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno != EAGAIN)
            die("the broker closed the connection of %s (%s)", name_of(c), strerror(errno));
        if (n < 0) break;
        c->out.head += (size_t)n;
    }
    watch(c, c->out.head < c->out.tail);
}

static void mark_dirty(Conn *c) {
    if (!c->dirty) {
        c->dirty = 1;
        dirty[dirty_count++] = c;
    }
}

/* ---- packets out ---- */

static size_t put_length(uint8_t *p, size_t n) {
    size_t i = 0;
    do {
        p[i] = n & 127;
        n >>= 7;
        if (n) p[i] |= 128;
        i++;
    } while (n);
    return i;
}

static void send_packet(Conn *c, uint8_t first, const uint8_t *body, size_t n) {
    uint8_t head[5] = {first};
    append(&c->out, head, 1 + put_length(head + 1, n));
    append(&c->out, body, n);
}

static void send_ack(Conn *c, uint8_t first, const uint8_t *pid) {
    uint8_t packet[4] = {first, 2, pid[0], pid[1]};
    append(&c->out, packet, 4);
}

static void send_connect(Conn *c) {
    uint8_t b[64] = {0, 4, 'M', 'Q', 'T', 'T', (uint8_t)opt.version, 2 /* clean */, 0, 0 /* no keep alive */};
    size_t n = 10;
    if (opt.version == 5) {
        static const uint8_t props[] = {3, 0x21, 0xff, 0xff}; /* Receive Maximum 65535 */
        memcpy(b + n, props, sizeof props);
        n += sizeof props;
    }
    int id = snprintf((char *)b + n + 2, 24, "%c%x-%d", c->is_sub ? 's' : 'p', run_id, c->index);
    b[n] = 0;
    b[n + 1] = (uint8_t)id;
    send_packet(c, 0x10, b, n + 2 + (size_t)id);
}

static size_t put_topic(uint8_t *p, int index) {
    int n = snprintf((char *)p + 2, 30, "bench/%d", opt.fanout ? 0 : index);
    p[0] = 0;
    p[1] = (uint8_t)n;
    return 2 + (size_t)n;
}

static void send_subscribe(Conn *c) {
    uint8_t b[64] = {0, 1};
    size_t n = 2;
    if (opt.version == 5) b[n++] = 0;
    n += put_topic(b + n, c->index);
    b[n++] = (uint8_t)opt.qos;
    send_packet(c, 0x82, b, n);
}

static void make_template(Conn *c) {
    uint8_t body[64];
    size_t n = put_topic(body, c->index), pid_in_body = n;
    if (opt.qos) n += 2;
    if (opt.version == 5) body[n++] = 0;
    c->packet = calloc(1, n + (size_t)opt.payload + 8);
    c->packet[0] = (uint8_t)(0x30 | opt.qos << 1);
    size_t head = 1 + put_length(c->packet + 1, n + (size_t)opt.payload);
    memcpy(c->packet + head, body, n);
    c->pid_at = head + pid_in_body;
    c->payload_at = head + n;
    c->packet_len = head + n + (size_t)opt.payload;
    memset(c->packet + c->payload_at, 'x', (size_t)opt.payload);
    memcpy(c->packet + c->payload_at + 12, &run_id, 4);
    if (opt.qos) c->pid_used = calloc(65536 / 64, 8);
}

/* ---- publishing ---- */

static uint32_t delivered_up_to(const Conn *pub) {
    uint32_t low = pub->sent;
    for (int i = 0; i < opt.subs; i++) {
        const Conn *s = &conns[opt.fanout ? i : pub->index];
        if (s->next_seq < low) low = s->next_seq;
        if (!opt.fanout) break;
    }
    return low > pub->forgiven ? low : pub->forgiven;
}

static uint32_t room(const Conn *c) {
    uint32_t undelivered = c->sent - delivered_up_to(c), n;
    uint32_t limit = opt.qos ? opt.backlog : opt.window;
    n = limit > undelivered ? limit - undelivered : 0;
    if (opt.qos) {
        uint32_t unacked = c->sent - c->acked;
        uint32_t free_ids = c->window > unacked ? c->window - unacked : 0;
        if (free_ids < n) n = free_ids;
    }
    return n;
}

static void pump(Conn *c) {
    if (!publishing || c->out.head < c->out.tail) return;
    uint32_t n = room(c);
    /* Refill in bulk, for every broker alike: a window that is topped up message by message would measure
     * the system calls of this program. */
    if (n < low_water) return;
    if (opt.rate > 0 && n > c->due) n = c->due;
    if (n > WRITE_BYTES / c->packet_len + 1) n = (uint32_t)(WRITE_BYTES / c->packet_len + 1);
    if (!n) return;
    uint8_t *p = reserve(&c->out, n * c->packet_len);
    uint64_t stamp = clock_ns();
    uint32_t done = 0;
    for (; done < n; done++) {
        memcpy(p, c->packet, c->packet_len);
        if (opt.qos) {
            uint16_t pid = c->next_pid ? c->next_pid : 1;
            if (c->pid_used[pid >> 6] >> (pid & 63) & 1) break; /* acknowledged out of order: wait for it */
            c->pid_used[pid >> 6] |= 1ull << (pid & 63);
            p[c->pid_at] = (uint8_t)(pid >> 8);
            p[c->pid_at + 1] = (uint8_t)pid;
            c->next_pid = (uint16_t)(pid + 1);
        }
        memcpy(p + c->payload_at, &stamp, 8);
        memcpy(p + c->payload_at + 8, &c->sent, 4);
        c->sent++;
        p += c->packet_len;
    }
    c->out.tail += done * c->packet_len;
    published += done;
    if (opt.rate > 0) c->due -= done;
    flush_out(c);
    if (opt.rate == 0 && c->out.head == c->out.tail) mark_dirty(c); /* the window may allow another batch */
}

static void acknowledged(Conn *c, const uint8_t *pid_bytes) {
    unsigned pid = (unsigned)pid_bytes[0] << 8 | pid_bytes[1];
    uint64_t bit = 1ull << (pid & 63);
    if (!(c->pid_used[pid >> 6] & bit)) die("%s got an acknowledgement of packet id %u, not in flight", name_of(c), pid);
    c->pid_used[pid >> 6] &= ~bit;
    c->acked++;
    acked++;
}

/* ---- packets in ---- */

static void seen(Conn *c, uint32_t seq) {
    if (seq == c->next_seq) {
        c->next_seq++;
        return;
    }
    if (seq > c->next_seq) {
        if (c->gap_count == c->gap_cap) {
            c->gap_cap = c->gap_cap ? c->gap_cap * 2 : 64;
            c->gaps = realloc(c->gaps, c->gap_cap * sizeof *c->gaps);
        }
        c->gaps[c->gap_count++] = (Gap){c->next_seq, seq};
        c->next_seq = seq + 1;
        return;
    }
    size_t low = 0, high = c->gap_count; /* the first gap that ends after seq */
    while (low < high) {
        size_t mid = (low + high) / 2;
        if (c->gaps[mid].to <= seq) low = mid + 1;
        else high = mid;
    }
    if (low == c->gap_count || c->gaps[low].from > seq) {
        duplicated++;
        return;
    }
    out_of_order++;
    Gap *g = &c->gaps[low], right = {seq + 1, g->to};
    g->to = seq;
    if (right.from < right.to) {
        if (c->gap_count == c->gap_cap) c->gaps = realloc(c->gaps, (c->gap_cap *= 2) * sizeof *c->gaps);
        memmove(c->gaps + low + 2, c->gaps + low + 1, (c->gap_count - low - 1) * sizeof *c->gaps);
        c->gaps[low + 1] = right;
        c->gap_count++;
    }
    if (c->gaps[low].from == c->gaps[low].to) {
        memmove(c->gaps + low, c->gaps + low + 1, (c->gap_count - low - 1) * sizeof *c->gaps);
        c->gap_count--;
    }
}

static size_t property_size(const uint8_t *p) {
    switch (*p) {
    case 0x01: case 0x17: case 0x19: case 0x24: case 0x25: case 0x28: case 0x29: case 0x2a: return 2;
    case 0x13: case 0x21: case 0x22: case 0x23: return 3;
    case 0x02: case 0x11: case 0x18: case 0x27: return 5;
    case 0x26: { size_t key = 3 + ((size_t)p[1] << 8 | p[2]); return key + 2 + ((size_t)p[key] << 8 | p[key + 1]); }
    default: return 3 + ((size_t)p[1] << 8 | p[2]); /* strings and binary */
    }
}

static void on_connack(Conn *c, const uint8_t *p, size_t n) {
    if (n < 2 || p[1]) die("the broker refused %s: CONNACK code 0x%02x", name_of(c), n < 2 ? 0 : p[1]);
    c->window = opt.window < 65535 ? opt.window : 65535;
    if (opt.version == 5 && n > 2) { /* CONNACK properties are far below 128 bytes in practice */
        const uint8_t *q = p + 3, *end = p + 3 + p[2];
        for (; q < end && end <= p + n; q += property_size(q)) {
            uint32_t most = (uint32_t)q[1] << 8 | q[2];
            if (*q == 0x21 && most < c->window) c->window = most;
            if (*q == 0x24 && q[1] < opt.qos) die("the broker allows QoS %d at most", q[1]);
        }
    }
    if (c->is_sub) {
        c->state = WAIT_SUBACK;
        send_subscribe(c);
    } else {
        c->state = READY;
        ready_count++;
        connecting_count--;
    }
}

static void on_publish(Conn *c, uint8_t first, const uint8_t *p, size_t n) {
    unsigned qos = first >> 1 & 3;
    size_t at = 2 + ((size_t)p[0] << 8 | p[1]);
    const uint8_t *pid = p + at;
    if (qos) at += 2;
    if (opt.version == 5) {
        size_t props = p[at] & 127, shift = 7;
        while (p[at++] & 128) {
            props |= (size_t)(p[at] & 127) << shift;
            shift += 7;
        }
        at += props;
    }
    if (at + 16 > n) die("%s got a message too short to be ours", name_of(c));
    if (qos) send_ack(c, qos == 1 ? 0x40 : 0x50, pid);
    uint64_t stamp;
    uint32_t seq, run;
    memcpy(&stamp, p + at, 8);
    memcpy(&seq, p + at + 8, 4);
    memcpy(&run, p + at + 12, 4);
    if (run != run_id) {
        foreign++;
        return;
    }
    seen(c, seq);
    delivered++;
    if (measuring) {
        uint64_t ns = now > stamp ? now - stamp : 1;
        if (ns > latency_max) latency_max = ns;
        unsigned top = 63u - (unsigned)__builtin_clzll(ns | 32);
        histogram[(top << 5) + (ns >> (top - 5) & 31)]++;
    }
}

static void on_packet(Conn *c, uint8_t first, const uint8_t *p, size_t n) {
    switch (first >> 4) {
    case 2: if (c->state == WAIT_CONNACK) on_connack(c, p, n); break;
    case 3: on_publish(c, first, p, n); break;
    case 4: case 7: acknowledged(c, p); break;
    case 5: send_ack(c, 0x62, p); break;
    case 6: send_ack(c, 0x70, p); break;
    case 9:
        if (p[n - 1] != opt.qos) die("the broker granted %s 0x%02x instead of QoS %d", name_of(c), p[n - 1], opt.qos);
        c->state = READY;
        ready_count++;
        connecting_count--;
        break;
    case 13: break;
    case 14: die("the broker disconnected %s: reason 0x%02x", name_of(c), n ? p[0] : 0);
    default: die("%s got an unexpected packet 0x%02x", name_of(c), first);
    }
}

static void on_readable(Conn *c) {
    size_t left = c->in.tail - c->in.head;
    if (left) memcpy(read_buf, c->in.bytes + c->in.head, left);
    ssize_t got = recv(c->fd, read_buf + left, read_cap - left, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0)
        die("the broker closed the connection of %s (%s)", name_of(c), got ? strerror(errno) : "end of stream");
    now = clock_ns();
    uint64_t deliveries_before = delivered;
    const uint8_t *p = read_buf, *end = read_buf + left + (size_t)got;
    while (end - p >= 2) {
        size_t n = p[1] & 127, head = 2;
        for (unsigned shift = 7; p[head - 1] & 128; shift += 7, head++) {
            if (p + head >= end) goto incomplete;
            if (head > 4) die("%s got a malformed length", name_of(c));
            n |= (size_t)(p[head] & 127) << shift;
        }
        if (head + n > (size_t)(end - p)) break;
        on_packet(c, *p, p + head, n);
        p += head + n;
    }
incomplete:
    c->in.head = c->in.tail = 0;
    append(&c->in, p, (size_t)(end - p));
    if (delivered != deliveries_before) {
        last_delivery_ns = now;
        mark_dirty(&conns[opt.subs + (opt.fanout ? 0 : c->index)]);
    }
    if (!c->is_sub) mark_dirty(c);
    if (c->out.head < c->out.tail) flush_out(c); /* all acknowledgements of this read in one write */
}

/* ---- set-up, pacing, report ---- */

static void start_connection(Conn *c) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)opt.port)};
    if (inet_pton(AF_INET, opt.host, &to.sin_addr) != 1) die("--host takes an IPv4 address");
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (c->fd < 0) die("socket: %s (raise ulimit -n?)", strerror(errno));
    int on = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(c->fd, (struct sockaddr *)&to, sizeof to) && errno != EINPROGRESS)
        die("cannot connect to %s:%d: %s", opt.host, opt.port, strerror(errno));
    struct epoll_event ev = {.events = EPOLLIN | EPOLLOUT, .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &ev);
    c->want_out = 1;
    c->state = CONNECTING;
    connecting_count++;
}

static void on_writable(Conn *c) {
    if (c->state == CONNECTING) {
        int error = 0;
        socklen_t size = sizeof error;
        getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &size);
        if (error) die("cannot connect to %s:%d: %s", opt.host, opt.port, strerror(error));
        c->state = WAIT_CONNACK;
        send_connect(c);
    }
    flush_out(c);
    if (!c->is_sub) mark_dirty(c);
}

/* Waits for events up to timeout_ms, acts on them, then refills the publishers they made room for. */
static void turn(int timeout_ms) {
    struct epoll_event events[512];
    int n = epoll_wait(epoll_fd, events, 512, dirty_count ? 0 : timeout_ms);
    now = clock_ns();
    for (int i = 0; i < n; i++) {
        Conn *c = events[i].data.ptr;
        if (!c) continue; /* the pacing timer: only there to wake us */
        if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR) && c->state != CONNECTING) on_readable(c);
        if (events[i].events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) on_writable(c);
    }
    int count = dirty_count;
    for (int i = 0; i < count; i++) {
        dirty[i]->dirty = 0;
    }
    dirty_count = 0;
    /* pump() may mark again the one it is given; it is written behind the place being read. */
    for (int i = 0; i < count; i++) pump(dirty[i]);
    now = clock_ns();
}

/* A broker that drops messages would leave the window closed for ever: reopen it, the report counts the loss. */
static void check_stalls(void) {
    for (int i = 0; i < opt.pubs; i++) {
        Conn *c = &conns[opt.subs + i];
        uint64_t progress = (uint64_t)c->acked + delivered_up_to(c);
        if (progress != c->progress || c->sent == delivered_up_to(c)) {
            c->progress = progress;
            c->progress_ns = now;
        }
        uint64_t stalled_ms = (now - c->progress_ns) / 1000000;
        if (stalled_ms > STALL_FATAL_MS)
            die("%s: no acknowledgement for %d s (%u of %u acknowledged)", name_of(c), STALL_FATAL_MS / 1000, c->acked, c->sent);
        if (stalled_ms > STALL_FORGIVE_MS && room(c) < low_water && (!opt.qos || c->sent - c->acked < low_water)) {
            c->forgiven = c->sent;
            mark_dirty(c);
        }
    }
}

static double percentile_us(double share) {
    uint64_t total = 0, sum = 0;
    for (size_t i = 0; i < sizeof histogram / sizeof *histogram; i++) total += histogram[i];
    for (size_t i = 0; i < sizeof histogram / sizeof *histogram; i++) {
        sum += histogram[i];
        if (total && (double)sum >= share * (double)total) {
            unsigned top = (unsigned)(i >> 5);
            double low = (double)((32ull + (i & 31)) << (top - 5)), width = (double)(1ull << (top - 5));
            return (low + width / 2) / 1000;
        }
    }
    return 0;
}

static double cpu_s(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

typedef struct { uint64_t published, delivered, acked, ns; double cpu; } Totals;

static Totals totals(void) { return (Totals){published, delivered, acked, now, cpu_s()}; }

static void event(const char *name) {
    fprintf(stderr, "event %s\n", name);
    fflush(stderr);
}

static void set_up(void) {
    conn_count = opt.subs + opt.pubs;
    conns = calloc((size_t)conn_count, sizeof *conns);
    dirty = calloc((size_t)conn_count, sizeof *dirty);
    for (int i = 0; i < conn_count; i++) {
        conns[i].is_sub = i < opt.subs;
        conns[i].index = i < opt.subs ? i : i - opt.subs;
        if (!conns[i].is_sub) make_template(&conns[i]);
    }
    uint64_t deadline = clock_ns() + SETUP_TIMEOUT_S * 1000000000ull;
    /* Subscribers come first in conns and the publishers wait for them: no message is sent unheard. */
    while (ready_count < conn_count) {
        while (next_to_connect < conn_count && connecting_count < CONNECTING_MAX) start_connection(&conns[next_to_connect++]);
        turn(100);
        if (now > deadline) die("only %d of %d connections were ready after %d s", ready_count, conn_count, SETUP_TIMEOUT_S);
    }
}

static int wholly_delivered(void) {
    for (int i = 0; i < opt.subs; i++) {
        const Conn *s = &conns[i];
        if (s->gap_count || s->next_seq != conns[opt.subs + (opt.fanout ? 0 : i)].sent) return 0;
    }
    for (int i = 0; opt.qos && i < opt.pubs; i++)
        if (conns[opt.subs + i].acked != conns[opt.subs + i].sent) return 0;
    return 1;
}

static uint64_t count_lost(void) {
    uint64_t lost = 0;
    for (int i = 0; i < opt.subs; i++) {
        const Conn *s = &conns[i];
        lost += conns[opt.subs + (opt.fanout ? 0 : i)].sent - s->next_seq;
        for (size_t g = 0; g < s->gap_count; g++) lost += s->gaps[g].to - s->gaps[g].from;
    }
    return lost;
}

/* --rate: message k of the whole run is due at start + k / rate, from publisher k mod P. */
static void pace(int timer_fd, uint64_t start, uint64_t *made_due) {
    uint64_t target = (uint64_t)((double)(now - start) * opt.rate / 1e9);
    /* After a pause of this program, catch up with one tenth of a second at most: more would be a burst. */
    uint64_t most = (uint64_t)(opt.rate / 10) + 1;
    if (target > *made_due + most) *made_due = target - most;
    for (; *made_due < target; ++*made_due) {
        Conn *c = &conns[opt.subs + (int)(*made_due % (uint64_t)opt.pubs)];
        c->due++;
        mark_dirty(c);
    }
    uint64_t next = start + (uint64_t)((double)(*made_due + 1) * 1e9 / opt.rate) + 1;
    if (next < now + TICK_MIN_NS) next = now + TICK_MIN_NS;
    struct itimerspec at = {.it_value = {(time_t)(next / 1000000000u), (long)(next % 1000000000u)}};
    timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &at, NULL);
}

static void report(Totals a, Totals b) {
    double seconds = (double)(b.ns - a.ns) / 1e9;
    printf("{\"delivered\": %llu, \"published\": %llu, \"seconds\": %.4f, \"delivered_per_s\": %.1f, "
           "\"published_per_s\": %.1f, \"acked_per_s\": %.1f, "
           "\"latency_us\": {\"p50\": %.1f, \"p90\": %.1f, \"p99\": %.1f, \"max\": %.1f}, "
           "\"lost\": %llu, \"duplicated\": %llu, \"out_of_order\": %llu, \"foreign\": %llu, "
           "\"published_total\": %llu, \"delivered_total\": %llu, \"generator_cpu_share\": %.3f}\n",
           (unsigned long long)(b.delivered - a.delivered), (unsigned long long)(b.published - a.published), seconds,
           (double)(b.delivered - a.delivered) / seconds, (double)(b.published - a.published) / seconds,
           (double)(b.acked - a.acked) / seconds, percentile_us(0.5), percentile_us(0.9), percentile_us(0.99),
           (double)latency_max / 1000, (unsigned long long)count_lost(), (unsigned long long)duplicated,
           (unsigned long long)out_of_order, (unsigned long long)foreign, (unsigned long long)published,
           (unsigned long long)delivered, (b.cpu - a.cpu) / seconds);
}

static double number(const char *name, const char *text, double low, double high) {
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end || value < low || value > high) die("--%s takes a number from %g to %g, not '%s'", name, low, high, text);
    return value;
}

static void parse_options(int argc, char **argv) {
    static const char *names[] = {"host", "port", "pubs", "subs", "topology", "qos", "payload", "seconds",
                                  "warmup", "rate", "window", "backlog", "version"};
    struct option longs[sizeof names / sizeof *names + 2] = {0};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) longs[i] = (struct option){names[i], required_argument, 0, 0};
    longs[sizeof names / sizeof *names] = (struct option){"help", no_argument, 0, 'h'};
    int at, code;
    while ((code = getopt_long(argc, argv, "", longs, &at)) != -1) {
        if (code == 'h') {
            puts("mqttload [--host IP] [--port N] [--version 4|5] [--topology pairs|fanout] [--pubs N] [--subs N] [--qos 0|1|2]\n"
                 "         [--payload BYTES] [--seconds S] [--warmup S] [--rate MSGS_PER_S, 0: as fast as possible]\n"
                 "         [--window N: un-acknowledged (QoS 0: undelivered) messages per publisher; 10000, QoS 1 and 2: 1000]\n"
                 "         [--backlog N: undelivered messages per publisher for QoS 1 and 2; 10000]\n"
                 "Prints one JSON object. Exit 1: messages lost at QoS 1 or 2; 2: failed; 3: took too long.");
            exit(0);
        }
        if (code) exit(2);
        const char *name = names[at];
        if (!strcmp(name, "host")) opt.host = optarg;
        else if (!strcmp(name, "port")) opt.port = (int)number(name, optarg, 1, 65535);
        else if (!strcmp(name, "pubs")) opt.pubs = (int)number(name, optarg, 1, 20000);
        else if (!strcmp(name, "subs")) opt.subs = (int)number(name, optarg, 1, 20000);
        else if (!strcmp(name, "topology")) {
            opt.fanout = !strcmp(optarg, "fanout");
            if (!opt.fanout && strcmp(optarg, "pairs")) die("--topology takes pairs or fanout");
        } else if (!strcmp(name, "qos")) opt.qos = (int)number(name, optarg, 0, 2);
        else if (!strcmp(name, "payload")) opt.payload = (int)number(name, optarg, 16, 1 << 20);
        else if (!strcmp(name, "seconds")) opt.seconds = number(name, optarg, 0.1, 86400);
        else if (!strcmp(name, "warmup")) opt.warmup = number(name, optarg, 0, 3600);
        else if (!strcmp(name, "rate")) opt.rate = number(name, optarg, 0, 1e8);
        else if (!strcmp(name, "window")) opt.window = (uint32_t)number(name, optarg, 1, 1e8);
        else if (!strcmp(name, "backlog")) opt.backlog = (uint32_t)number(name, optarg, 1, 1e8);
        else opt.version = (int)number(name, optarg, 4, 5);
    }
    if (opt.fanout && opt.pubs != 1) die("--topology fanout takes one publisher");
    if (!opt.fanout && opt.pubs != opt.subs) die("--topology pairs takes as many --pubs as --subs");
    if (!opt.window) opt.window = opt.qos ? 1000 : 10000;
    if (!opt.backlog) opt.backlog = 10000;
    if (opt.backlog < opt.window) opt.backlog = opt.window;
}

int main(int argc, char **argv) {
    parse_options(argc, argv);
    signal(SIGALRM, on_alarm);
    alarm((unsigned)(SETUP_TIMEOUT_S + opt.warmup + opt.seconds + DRAIN_TIMEOUT_S + 10));
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    run_id = (uint32_t)(clock_ns() >> 10) ^ (uint32_t)getpid() << 16;
    read_cap = READ_BYTES + 2 * (size_t)opt.payload;
    read_buf = malloc(read_cap);
    epoll_fd = epoll_create1(0);
    set_up();

    low_water = opt.rate > 0 ? 1 : opt.window / 8;
    for (int i = opt.subs; i < conn_count; i++) /* the server's Receive Maximum may be the smaller window */
        if (opt.qos && opt.rate == 0 && conns[i].window / 8 < low_water) low_water = conns[i].window / 8;
    if (!low_water) low_water = 1;
    int timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    struct epoll_event ev = {.events = EPOLLIN | EPOLLET, .data.ptr = NULL};
    if (opt.rate > 0) epoll_ctl(epoll_fd, EPOLL_CTL_ADD, timer_fd, &ev);

    uint64_t start = now = clock_ns(), made_due = 0, stalls_ns = now, ping_ns = now;
    uint64_t measure_ns = start + (uint64_t)(opt.warmup * 1e9), end_ns = measure_ns + (uint64_t)(opt.seconds * 1e9);
    Totals a = {0}, b;
    publishing = 1;
    for (int i = opt.subs; i < conn_count; i++) {
        conns[i].progress_ns = now;
        if (opt.rate == 0) mark_dirty(&conns[i]);
    }
    while (now < end_ns) {
        if (!measuring && now >= measure_ns) {
            measuring = 1;
            a = totals();
            event("measure-start");
        }
        if (opt.rate > 0) pace(timer_fd, start, &made_due);
        turn(20);
        if (now - stalls_ns > 100000000u) {
            stalls_ns = now;
            check_stalls();
        }
        if (now - ping_ns > PING_EVERY_S * 1000000000ull) {
            ping_ns = now;
            for (int i = 0; i < conn_count; i++) {
                send_packet(&conns[i], 0xc0, NULL, 0);
                flush_out(&conns[i]);
            }
        }
    }
    b = totals();
    measuring = publishing = 0;
    event("measure-end");

    last_delivery_ns = now;
    uint64_t drain_end_ns = now + DRAIN_TIMEOUT_S * 1000000000ull;
    while (!wholly_delivered() && now < drain_end_ns && now - last_delivery_ns < DRAIN_QUIET_MS * 1000000ull) turn(50);
    /* Duplicates would come behind the last message: give them a moment. */
    for (uint64_t until = now + 50000000u; now < until;) turn(10);
    report(a, b);
    for (int i = 0; i < conn_count; i++) {
        static const uint8_t disconnect[2] = {0xe0, 0};
        if (send(conns[i].fd, disconnect, 2, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) continue;
    }
    return opt.qos && count_lost() ? 1 : 0;
}
