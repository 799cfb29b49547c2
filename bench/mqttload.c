/* mqttload: an MQTT 3.1.1 / 5 load generator made to be faster than any broker it measures.
 *
 * One thread, one epoll loop, raw non-blocking sockets. Packets are copied from a template and written in
 * large batches; what a read returns is parsed in one loop and acknowledged with one write.
 *
 * Payload of every message (little endian, at least 24 bytes):
 *
 *     0         8      12     16     20          22      24
 *     | sent_ns | seq  | run  | size | publisher | topic | filler ...
 *
 *   sent_ns    CLOCK_MONOTONIC when the message was handed to the socket
 *   seq        0, 1, 2 ... per publisher: loss, duplication and order are read from it
 *   run        id of this run: what another run left behind is ignored ("foreign")
 *   size       of the payload
 *   publisher  its index; topic: which of its topics. A message that arrives under another topic, with another size or
 *              at the wrong subscriber, or without the properties it was sent with, ends the run with an error
 *
 * Topologies: "pairs", publisher i -> subscriber i; "fanout", one publisher -> every subscriber; "kinds", the same,
 * where subscribers are in turn 3.1.1 with QoS 0, 5 with QoS 1, and 5 with QoS 1 and a subscription identifier;
 * "shared", every publisher -> a group whose members are the subscribers.
 *
 * Phases: SETUP (connect, subscribe) -> WARMUP -> MEASURE -> DRAIN. The events "measure-start" and
 * "measure-end" go to stderr as they happen, so that a harness can read the broker's CPU time there.
 *
 * Build: cc -O2 -o bench/out/mqttload bench/mqttload.c */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <getopt.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "latency.h"
#include "mqtt.h"

PROGRAM("mqttload")

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
    PAYLOAD_MIN = 24,
    TOPIC_BYTES = 32,
    SEEN_BITS = 1 << 16,           /* remembered of a stream: far more than may be undelivered */
    EXPIRY_S = 3600,               /* --expiry: long enough that nothing expires */
    SUB_ID = 7,
};

typedef struct { uint8_t *bytes; size_t head, tail, cap; } Buffer;
/* What came of one publisher's messages at one subscriber, or at a whole group. */
typedef struct { uint32_t next_seq, distinct; uint64_t *seen; /* a bit per sequence number, a ring */ } Stream;
typedef struct { uint8_t bytes[TOPIC_BYTES]; /* with the length in front */ uint8_t len; } Topic;
typedef enum { PAIRS, FANOUT, KINDS, SHARED } Topology;
typedef enum { IDLE, CONNECTING, WAIT_CONNACK, WAIT_SUBACK, READY } State;

typedef struct {
    int fd, index, is_sub, want_out, dirty, version, qos, has_sub_id;
    State state;
    Buffer in, out; /* in: the incomplete packet at the end of the last read */
    /* publisher */
    uint8_t *alias_set; /* per topic: the broker knows its alias */
    uint64_t random;
    uint32_t sent, acked, forgiven; /* forgiven: seqs below are no longer waited for */
    uint32_t due;      /* --rate: messages whose time has come */
    uint32_t window;
    uint16_t next_pid;
    uint64_t *pid_used; /* bit per packet id */
    uint64_t progress, progress_ns; /* acknowledged + delivered, and when it last moved */
    /* subscriber */
    const Topic **aliases; /* what the broker's topic aliases stand for */
} Conn;

static struct {
    const char *host;
    int port, port5, pubs, subs, fanout, qos, payload, payload_max, topics, version;
    int user_property, expiry, aliases, retain;
    Topology topology;
    double seconds, warmup, rate;
    uint32_t window, backlog;
} opt = {.host = "127.0.0.1", .port = 1883, .pubs = 1, .subs = 1, .payload = 64, .topics = 1, .version = 4,
         .seconds = 5, .warmup = 1};

static Conn *conns, **dirty;
static Stream *streams; /* fanout, kinds: one per subscriber; pairs, shared: one per publisher */
static int stream_count;
static Topic *topics;   /* opt.topics of each publisher */
static uint8_t *filler, props[64]; /* of every PUBLISH in MQTT 5, the topic alias at the end */
static size_t props_len, packet_bytes_max;
static const uint8_t user_property[] = {0x26, 0, 4, 'u', 'n', 'i', 't', 0, 7, 'c', 'e', 'l', 's', 'i', 'u', 's'};
static int conn_count, dirty_count, ready_count, connecting_count, next_to_connect, epoll_fd;
static uint32_t run_id, low_water;
static uint8_t *read_buf;
static size_t read_cap;
static int measuring, publishing;
static uint64_t now;
static uint64_t published, delivered, acked, duplicated, out_of_order, foreign, aliased;
static int64_t unfinished; /* QoS 2 deliveries whose PUBREL has not come */
static uint64_t last_delivery_ns;

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
    uint8_t b[64] = {0, 4, 'M', 'Q', 'T', 'T', (uint8_t)c->version, 2 /* clean */, 600 >> 8, 600 & 255 /* keep alive: rumqttd refuses 0 */};
    size_t n = 10;
    if (c->version == 5) {
        static const uint8_t connect_props[] = {6, 0x21, 0xff, 0xff /* Receive Maximum */, 0x22, 0, 10 /* Topic Alias Maximum */};
        size_t used = opt.aliases ? sizeof connect_props : sizeof connect_props - 3;
        memcpy(b + n, connect_props, used);
        b[n] = (uint8_t)(used - 1);
        n += used;
    }
    int id = snprintf((char *)b + n + 2, 24, "%c%x-%d", c->is_sub ? 's' : 'p', run_id, c->index);
    b[n] = 0;
    b[n + 1] = (uint8_t)id;
    send_packet(c, 0x10, b, n + 2 + (size_t)id);
}

static void send_subscribe(Conn *c) {
    uint8_t b[64] = {0, 1};
    size_t n = 2;
    if (c->version == 5) {
        b[n++] = c->has_sub_id ? 2 : 0;
        if (c->has_sub_id) b[n++] = 0x0b, b[n++] = SUB_ID;
    }
    int len;
    char *filter = (char *)b + n + 2;
    if (opt.topology == SHARED) len = snprintf(filter, 40, "$share/g/bench/+");
    else len = snprintf(filter, 40, opt.topics > 1 ? "bench/%d/+" : "bench/%d", opt.fanout ? 0 : c->index);
    b[n] = 0;
    b[n + 1] = (uint8_t)len;
    n += 2 + (size_t)len;
    b[n++] = (uint8_t)c->qos;
    send_packet(c, 0x82, b, n);
}

/* What does not change from message to message. */
static void prepare_messages(void) {
    topics = calloc((size_t)opt.pubs * (size_t)opt.topics, sizeof *topics);
    for (int i = 0; i < opt.pubs * opt.topics; i++) {
        char *text = (char *)topics[i].bytes + 2;
        int n = snprintf(text, TOPIC_BYTES - 2, opt.topics > 1 ? "bench/%d/%d" : "bench/%d", i / opt.topics, i % opt.topics);
        topics[i].bytes[1] = (uint8_t)n;
        topics[i].len = (uint8_t)(2 + n);
    }
    filler = malloc((size_t)opt.payload_max);
    memset(filler, 'x', (size_t)opt.payload_max);
    if (opt.version == 5) {
        size_t n = 1;
        if (opt.user_property) memcpy(props + n, user_property, sizeof user_property), n += sizeof user_property;
        if (opt.expiry) props[n++] = 2, props[n++] = 0, props[n++] = 0, props[n++] = EXPIRY_S >> 8, props[n++] = EXPIRY_S & 255;
        if (opt.aliases) props[n] = 0x23, n += 3;
        props[0] = (uint8_t)(n - 1);
        props_len = n;
    }
    packet_bytes_max = 5 + TOPIC_BYTES + 2 + props_len + (size_t)opt.payload_max;
}

static uint32_t random_below(Conn *c, uint32_t limit) { /* xorshift64* */
    c->random ^= c->random >> 12;
    c->random ^= c->random << 25;
    c->random ^= c->random >> 27;
    return (uint32_t)((c->random * 0x2545f4914f6cdd1dull >> 32) * limit >> 32);
}

static uint8_t *put_publish(Conn *c, uint8_t *p, uint16_t pid, uint64_t stamp) {
    uint16_t index = (uint16_t)c->index, number = opt.topics > 1 ? (uint16_t)random_below(c, (uint32_t)opt.topics) : 0;
    uint32_t size = (uint32_t)opt.payload;
    if (opt.payload_max > opt.payload) size += random_below(c, (uint32_t)(opt.payload_max - opt.payload + 1));
    static const Topic none = {.len = 2};
    const Topic *topic = &topics[index * opt.topics + number];
    if (opt.aliases) {
        props[props_len - 2] = (uint8_t)((number + 1) >> 8);
        props[props_len - 1] = (uint8_t)(number + 1);
        if (c->alias_set[number]) topic = &none;
        c->alias_set[number] = 1;
    }
    *p++ = (uint8_t)(0x30 | opt.qos << 1 | opt.retain);
    p += put_length(p, topic->len + (opt.qos ? 2 : 0) + props_len + size);
    memcpy(p, topic->bytes, topic->len);
    p += topic->len;
    if (opt.qos) *p++ = (uint8_t)(pid >> 8), *p++ = (uint8_t)pid;
    memcpy(p, props, props_len);
    p += props_len;
    memcpy(p, &stamp, 8);
    memcpy(p + 8, &c->sent, 4);
    memcpy(p + 12, &run_id, 4);
    memcpy(p + 16, &size, 4);
    memcpy(p + 20, &index, 2);
    memcpy(p + 22, &number, 2);
    memcpy(p + PAYLOAD_MIN, filler, size - PAYLOAD_MIN);
    return p + size;
}

/* ---- publishing ---- */

static uint32_t delivered_up_to(const Conn *pub) {
    uint32_t low = pub->sent;
    if (opt.topology == SHARED) low = streams[pub->index].distinct; /* members are not in step: count */
    else if (!opt.fanout) low = streams[pub->index].next_seq;
    else
        for (int i = 0; i < stream_count; i++)
            if (streams[i].next_seq < low) low = streams[i].next_seq;
    return low > pub->forgiven ? low : pub->forgiven;
}

/* Sequence number `seq` begins a word of the rings: forget what it held before. */
static void forget(const Conn *pub, uint32_t seq) {
    size_t word = seq % SEEN_BITS >> 6;
    if (!opt.fanout) streams[pub->index].seen[word] = 0;
    else
        for (int i = 0; i < stream_count; i++) streams[i].seen[word] = 0;
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
    if (n > WRITE_BYTES / packet_bytes_max + 1) n = (uint32_t)(WRITE_BYTES / packet_bytes_max + 1);
    if (!n) return;
    uint8_t *p = reserve(&c->out, n * packet_bytes_max), *begin = p;
    uint64_t stamp = clock_ns();
    uint32_t done = 0;
    for (; done < n; done++) {
        uint16_t pid = 0;
        if (opt.qos) {
            pid = c->next_pid ? c->next_pid : 1;
            if (c->pid_used[pid >> 6] >> (pid & 63) & 1) break; /* acknowledged out of order: wait for it */
            c->pid_used[pid >> 6] |= 1ull << (pid & 63);
            c->next_pid = (uint16_t)(pid + 1);
        }
        if (c->sent % 64 == 0) forget(c, c->sent);
        p = put_publish(c, p, pid, stamp);
        c->sent++;
    }
    c->out.tail += (size_t)(p - begin);
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

static void seen(Stream *s, uint32_t sent, uint32_t seq) {
    uint64_t *word = &s->seen[seq % SEEN_BITS >> 6], bit = 1ull << (seq & 63);
    if (seq >= sent) die("message %u came, but only %u were sent", seq, sent);
    if (sent - seq > SEEN_BITS - 64 || *word & bit) { /* so old that it is forgotten: it was not waited for either */
        duplicated++;
        return;
    }
    *word |= bit;
    s->distinct++;
    if (seq >= s->next_seq) s->next_seq = seq + 1;
    else if (opt.topology != SHARED) out_of_order++; /* members of a group are not in step */
}

static void on_connack(Conn *c, const uint8_t *p, size_t n) {
    if (n < 2 || p[1]) die("the broker refused %s: CONNACK code 0x%02x", name_of(c), n < 2 ? 0 : p[1]);
    c->window = opt.window < 65535 ? opt.window : 65535;
    uint32_t aliases_max = 0;
    if (c->version == 5 && n > 2) { /* CONNACK properties are far below 128 bytes in practice */
        const uint8_t *q = p + 3, *end = p + 3 + p[2];
        for (; q < end && end <= p + n; q += property_size(q)) {
            uint32_t most = (uint32_t)q[1] << 8 | q[2];
            if (*q == 0x21 && most < c->window) c->window = most;
            if (*q == 0x22) aliases_max = most;
            if (*q == 0x24 && q[1] < opt.qos) die("the broker allows QoS %d at most", q[1]);
        }
    }
    if (opt.aliases && !c->is_sub && aliases_max < (uint32_t)opt.topics)
        die("the broker allows %u topic aliases, not %d", aliases_max, opt.topics);
    if (c->is_sub) {
        c->state = WAIT_SUBACK;
        send_subscribe(c);
    } else {
        c->state = READY;
        ready_count++;
        connecting_count--;
    }
}

/* Reads the properties [p, end): the topic, where an alias stands for it, and whether all that was sent is there. */
static const Topic *on_properties(Conn *c, const uint8_t *p, const uint8_t *end, const Topic *topic) {
    int user = 0, expiry = 0, sub_id = 0;
    for (; p < end; p += property_size(p)) {
        if (*p == 0x26) user += !memcmp(p, user_property, sizeof user_property);
        else if (*p == 0x02) expiry += p[1] == 0 && p[2] == 0 && (p[3] << 8 | p[4]) <= EXPIRY_S;
        else if (*p == 0x0b) sub_id += p[1] == SUB_ID;
        else if (*p == 0x23) {
            unsigned alias = (unsigned)p[1] << 8 | p[2];
            if (!opt.aliases || !alias || alias > 10) die("%s got topic alias %u, which it does not allow", name_of(c), alias);
            aliased++;
            if (topic->len > 2) {
                if (!c->aliases[alias]) c->aliases[alias] = calloc(1, sizeof *topic);
                *(Topic *)c->aliases[alias] = *topic;
            } else if (!(topic = c->aliases[alias])) die("%s got topic alias %u, never set", name_of(c), alias);
        }
    }
    if (user != opt.user_property || expiry != opt.expiry || sub_id != c->has_sub_id)
        die("%s got a message with %d user properties, %d expiry intervals and %d subscription identifiers instead of %d, %d and %d",
            name_of(c), user, expiry, sub_id, opt.user_property, opt.expiry, c->has_sub_id);
    return topic;
}

static void on_publish(Conn *c, uint8_t first, const uint8_t *p, size_t n) {
    unsigned qos = first >> 1 & 3;
    size_t topic_len = 2 + ((size_t)p[0] << 8 | p[1]), at = topic_len;
    const uint8_t *pid = p + at, *topic_bytes = p;
    Topic carried;
    if (qos) at += 2;
    if (c->version == 5) {
        size_t length = p[at] & 127, shift = 7;
        while (p[at++] & 128) {
            length |= (size_t)(p[at] & 127) << shift;
            shift += 7;
        }
        if (length || opt.user_property || opt.expiry || c->has_sub_id) {
            if (at + length > n || topic_len > TOPIC_BYTES) die("%s got a message that is not ours", name_of(c));
            memcpy(carried.bytes, p, topic_len);
            carried.len = (uint8_t)topic_len;
            const Topic *topic = on_properties(c, p + at, p + at + length, &carried);
            topic_bytes = topic->bytes;
            topic_len = topic->len;
        }
        at += length;
    }
    if (at + PAYLOAD_MIN > n) die("%s got a message too short to be ours", name_of(c));
    if (qos) send_ack(c, qos == 1 ? 0x40 : 0x50, pid);
    if (qos == 2) unfinished++;
    uint64_t stamp;
    uint32_t seq, run, size;
    uint16_t publisher, number;
    memcpy(&stamp, p + at, 8);
    memcpy(&seq, p + at + 8, 4);
    memcpy(&run, p + at + 12, 4);
    memcpy(&size, p + at + 16, 4);
    memcpy(&publisher, p + at + 20, 2);
    memcpy(&number, p + at + 22, 2);
    if (run != run_id) {
        foreign++;
        return;
    }
    if (publisher >= opt.pubs || number >= opt.topics || size != n - at || (int)qos != c->qos ||
        (opt.topology == PAIRS && publisher != c->index))
        die("%s got message %u of publisher %u with QoS %u and %zu bytes of %u", name_of(c), seq, publisher, qos, n - at, size);
    const Topic *meant = &topics[publisher * opt.topics + number];
    if (meant->len != topic_len || memcmp(meant->bytes, topic_bytes, topic_len))
        die("%s got message %u of publisher %u under another topic", name_of(c), seq, publisher);
    Conn *from = &conns[opt.subs + publisher];
    seen(&streams[opt.fanout ? c->index : publisher], from->sent, seq);
    mark_dirty(from);
    delivered++;
    if (measuring) count_latency(now > stamp ? now - stamp : 1);
}

static void on_packet(Conn *c, uint8_t first, const uint8_t *p, size_t n) {
    switch (first >> 4) {
    case 2: if (c->state == WAIT_CONNACK) on_connack(c, p, n); break;
    case 3: on_publish(c, first, p, n); break;
    case 4: case 5: case 7:
        if (n > 2 && p[2] >= 128) die("the broker refused a message of %s: reason 0x%02x", name_of(c), p[2]);
        if (first >> 4 == 5) send_ack(c, 0x62, p);
        else acknowledged(c, p);
        break;
    case 6:
        send_ack(c, 0x70, p);
        unfinished--;
        break;
    case 9:
        if (p[n - 1] != c->qos) die("the broker granted %s 0x%02x instead of QoS %d", name_of(c), p[n - 1], c->qos);
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
    if (delivered != deliveries_before) last_delivery_ns = now;
    if (!c->is_sub) mark_dirty(c);
    if (c->out.head < c->out.tail) flush_out(c); /* all acknowledgements of this read in one write */
}

/* ---- set-up, pacing, report ---- */

static void start_connection(Conn *c) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)(c->version == 5 && opt.port5 ? opt.port5 : opt.port))};
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

typedef struct { uint64_t published, delivered, acked, ns; double cpu; } Totals;

static Totals totals(void) { return (Totals){published, delivered, acked, now, cpu_s()}; }

static void set_up(void) {
    conn_count = opt.subs + opt.pubs;
    conns = calloc((size_t)conn_count, sizeof *conns);
    dirty = calloc((size_t)conn_count, sizeof *dirty);
    stream_count = opt.fanout ? opt.subs : opt.pubs;
    streams = calloc((size_t)stream_count, sizeof *streams);
    for (int i = 0; i < stream_count; i++) streams[i].seen = calloc(SEEN_BITS / 64, 8);
    prepare_messages();
    for (int i = 0; i < conn_count; i++) {
        Conn *c = &conns[i];
        c->is_sub = i < opt.subs;
        c->index = c->is_sub ? i : i - opt.subs;
        c->version = opt.version;
        c->qos = opt.qos;
        c->random = 0x9e3779b97f4a7c15ull * (uint64_t)(c->index + 1);
        if (c->is_sub && opt.topology == KINDS) {
            c->version = i % 3 ? 5 : 4;
            c->qos = i % 3 ? 1 : 0;
            c->has_sub_id = i % 3 == 2;
        }
        if (c->is_sub && opt.aliases) c->aliases = calloc(11, sizeof *c->aliases);
        if (!c->is_sub && opt.aliases) c->alias_set = calloc((size_t)opt.topics, 1);
        if (!c->is_sub && opt.qos) c->pid_used = calloc(65536 / 64, 8);
    }
    uint64_t deadline = clock_ns() + SETUP_TIMEOUT_S * 1000000000ull;
    /* Subscribers come first in conns and the publishers wait for them: no message is sent unheard. */
    while (ready_count < conn_count) {
        while (next_to_connect < conn_count && connecting_count < CONNECTING_MAX) start_connection(&conns[next_to_connect++]);
        turn(100);
        if (now > deadline) die("only %d of %d connections were ready after %d s", ready_count, conn_count, SETUP_TIMEOUT_S);
    }
}

static uint64_t count_lost(int qos_min) {
    uint64_t lost = 0;
    for (int i = 0; i < stream_count; i++)
        if (conns[opt.topology == SHARED ? 0 : i].qos >= qos_min)
            lost += conns[opt.subs + (opt.fanout ? 0 : i)].sent - streams[i].distinct;
    return lost;
}

static int wholly_delivered(void) {
    for (int i = 0; opt.qos && i < opt.pubs; i++)
        if (conns[opt.subs + i].acked != conns[opt.subs + i].sent) return 0;
    return !count_lost(0) && !unfinished;
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
           "\"lost\": %llu, \"duplicated\": %llu, \"out_of_order\": %llu, \"foreign\": %llu, \"aliased\": %llu, \"unfinished\": %lld, "
           "\"published_total\": %llu, \"delivered_total\": %llu, \"generator_cpu_share\": %.3f}\n",
           (unsigned long long)(b.delivered - a.delivered), (unsigned long long)(b.published - a.published), seconds,
           (double)(b.delivered - a.delivered) / seconds, (double)(b.published - a.published) / seconds,
           (double)(b.acked - a.acked) / seconds, percentile_us(0.5), percentile_us(0.9), percentile_us(0.99),
           (double)latency_max / 1000, (unsigned long long)count_lost(opt.qos ? 1 : 0), (unsigned long long)duplicated,
           (unsigned long long)out_of_order, (unsigned long long)foreign, (unsigned long long)aliased, (long long)unfinished, (unsigned long long)published,
           (unsigned long long)delivered, (b.cpu - a.cpu) / seconds);
}

static void parse_options(int argc, char **argv) {
    static const char *names[] = {"host", "port", "pubs", "subs", "topology", "qos", "payload", "seconds",
                                  "warmup", "rate", "window", "backlog", "version", "payload-max", "topics", "port5"};
    struct option longs[sizeof names / sizeof *names + 6] = {0};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) longs[i] = (struct option){names[i], required_argument, 0, 0};
    static const struct option plain[] = {{"help", no_argument, 0, 'h'}, {"user-property", no_argument, &opt.user_property, 1},
                                          {"expiry", no_argument, &opt.expiry, 1}, {"aliases", no_argument, &opt.aliases, 1},
                                          {"retain", no_argument, &opt.retain, 1}};
    memcpy(longs + sizeof names / sizeof *names, plain, sizeof plain);
    int at, code;
    while ((code = getopt_long(argc, argv, "", longs, &at)) != -1) {
        if (code == 'h') {
            puts("mqttload [--host IP] [--port N] [--port5 N: for MQTT 5, where it is another] [--version 4|5]\n"
                 "         [--topology pairs|fanout|kinds|shared] [--pubs N] [--subs N] [--qos 0|1|2]\n"
                 "         [--topics N: of each publisher, at random] [--payload BYTES] [--payload-max BYTES: sizes at random]\n"
                 "         [--retain] [--user-property] [--expiry] [--aliases] (the last three: MQTT 5)\n"
                 "         [--seconds S] [--warmup S] [--rate MSGS_PER_S, 0: as fast as possible]\n"
                 "         [--window N: un-acknowledged (QoS 0: undelivered) messages per publisher; 10000, QoS 1 and 2: 1000]\n"
                 "         [--backlog N: undelivered messages per publisher for QoS 1 and 2; 10000]\n"
                 "Prints one JSON object. Exit 1: messages lost at QoS 1 or 2, or doubled or not finished at QoS 2; 2: failed; 3: took too long.");
            exit(0);
        }
        if (code) exit(2);
        if (longs[at].flag) continue;
        const char *name = names[at];
        if (!strcmp(name, "host")) opt.host = optarg;
        else if (!strcmp(name, "port")) opt.port = (int)number(name, optarg, 1, 65535);
        else if (!strcmp(name, "pubs")) opt.pubs = (int)number(name, optarg, 1, 20000);
        else if (!strcmp(name, "subs")) opt.subs = (int)number(name, optarg, 1, 20000);
        else if (!strcmp(name, "topology")) {
            static const char *const known[] = {"pairs", "fanout", "kinds", "shared"};
            for (opt.topology = PAIRS; strcmp(optarg, known[opt.topology]);)
                if (++opt.topology > SHARED) die("--topology takes pairs, fanout, kinds or shared");
            opt.fanout = opt.topology == FANOUT || opt.topology == KINDS;
        } else if (!strcmp(name, "qos")) opt.qos = (int)number(name, optarg, 0, 2);
        else if (!strcmp(name, "payload")) opt.payload = (int)number(name, optarg, PAYLOAD_MIN, 1 << 20);
        else if (!strcmp(name, "payload-max")) opt.payload_max = (int)number(name, optarg, PAYLOAD_MIN, 1 << 20);
        else if (!strcmp(name, "topics")) opt.topics = (int)number(name, optarg, 1, 10000);
        else if (!strcmp(name, "port5")) opt.port5 = (int)number(name, optarg, 1, 65535);
        else if (!strcmp(name, "seconds")) opt.seconds = number(name, optarg, 0.1, 86400);
        else if (!strcmp(name, "warmup")) opt.warmup = number(name, optarg, 0, 3600);
        else if (!strcmp(name, "rate")) opt.rate = number(name, optarg, 0, 1e8);
        else if (!strcmp(name, "window")) opt.window = (uint32_t)number(name, optarg, 1, 1e8);
        else if (!strcmp(name, "backlog")) opt.backlog = (uint32_t)number(name, optarg, 1, 1e8);
        else opt.version = (int)number(name, optarg, 4, 5);
    }
    if (opt.fanout && opt.pubs != 1) die("--topology fanout and kinds take one publisher");
    if (opt.topology == KINDS && opt.qos != 1) die("--topology kinds takes --qos 1");
    if (opt.version != 5 && (opt.user_property || opt.expiry || opt.aliases))
        die("--user-property, --expiry and --aliases take --version 5");
    if (opt.aliases && (opt.topics > 10 || opt.topology == KINDS)) die("--aliases takes 10 --topics at most, and not --topology kinds");
    if (opt.payload_max < opt.payload) opt.payload_max = opt.payload;
    if (opt.topology == PAIRS && opt.pubs != opt.subs) die("--topology pairs takes as many --pubs as --subs");
    if (!opt.window) opt.window = opt.qos ? 1000 : 10000;
    if (!opt.backlog) opt.backlog = 10000;
    if (opt.backlog < opt.window) opt.backlog = opt.window;
    if (opt.backlog > SEEN_BITS / 2) die("--window and --backlog take %d at most", SEEN_BITS / 2);
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
    read_cap = READ_BYTES + 2 * (size_t)opt.payload_max;
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
    return count_lost(1) || (opt.qos == 2 && (duplicated || unfinished)) ? 1 : 0;
}
