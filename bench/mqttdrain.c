/* mqttdrain: what a session missed, and how quickly it gets it: MQTT 3.1.1 or 5, QoS 1 and 2 in turn.
 *
 * 1. A persistent session subscribes with QoS 2 and goes away.
 * 2. --messages are published to its topic, every second one with QoS 1, the others with QoS 2, and acknowledged.
 * 3. The session comes back and takes all of them, with the largest window the protocol has; every read is
 *    acknowledged with one write. The time runs from CONNECT to the last message's last packet (PUBREL, for QoS 2).
 *
 * Payload (little endian): seq, run, filler. Loss, order, the QoS of each message and messages that come twice are
 * checked; a QoS 2 message that comes twice is an error even with DUP, since the connection never broke.
 * Blocking sockets, one at a time; every wait is bounded. The events "measure-start" and "measure-end" go to stderr.
 * Prints one JSON object of mqttload's shape. Exit 1: messages lost, or doubled at QoS 2; 2: failed; 3: took too long.
 *
 * Build: cc -O2 -o bench/out/mqttdrain bench/mqttdrain.c */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <getopt.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "mqtt.h"

PROGRAM("mqttdrain")

enum {
    READ_BYTES = 1 << 20,
    PACKET_BYTES_MAX = 1 << 16,
    PAYLOAD_MIN = 8,
    BATCH = 500,       /* messages published at once: below every broker's window */
    QUIET_S = 15,      /* nothing comes for so long: what is missing is lost */
    LOOK_MS = 100,
    LINGER_S = 1,      /* doubles would come behind the last message */
};

static struct { const char *host; int port, port5, version, payload; uint32_t messages; double timeout_s; } opt = {
    .host = "127.0.0.1", .port = 1883, .version = 5, .payload = 64, .messages = 100000, .timeout_s = 120};

static uint8_t in[READ_BYTES + PACKET_BYTES_MAX], out[4 * READ_BYTES];
static size_t held, out_len;
static int fd;
static uint32_t run_id;
static const char topic[] = "drain/mixed";

/* ---- the connection ---- */

static void open_connection(void) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)(opt.version == 5 && opt.port5 ? opt.port5 : opt.port))};
    struct timeval look = {.tv_usec = LOOK_MS * 1000};
    int on = 1;
    if (inet_pton(AF_INET, opt.host, &to.sin_addr) != 1) die("--host takes an IPv4 address");
    fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to)) die("cannot connect to %s:%d: %s", opt.host, opt.port, strerror(errno));
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &look, sizeof look);
    held = out_len = 0;
}

static void flush_out(void) {
    for (size_t at = 0; at < out_len;) {
        ssize_t sent = send(fd, out + at, out_len - at, MSG_NOSIGNAL);
        if (sent < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (sent < 0) die("the broker closed the connection (%s)", strerror(errno));
        at += (size_t)sent;
    }
    out_len = 0;
}

static void put(const void *bytes, size_t n) {
    if (out_len + n > sizeof out) flush_out();
    memcpy(out + out_len, bytes, n);
    out_len += n;
}

static void put_ack(uint8_t first, const uint8_t *pid) { put((uint8_t[]){first, 2, pid[0], pid[1]}, 4); }

static void put_packet(uint8_t first, const uint8_t *body, size_t n) {
    uint8_t head[5] = {first};
    put(head, 1 + put_length(head + 1, n));
    put(body, n);
}

/* One read, and each whole packet of it given to `take`. Returns the bytes that came. */
static size_t receive(void (*take)(uint8_t first, const uint8_t *p, size_t n)) {
    ssize_t got = recv(fd, in + held, sizeof in - held, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (got <= 0) die("the broker closed the connection (%s)", got ? strerror(errno) : "end of stream");
    const uint8_t *p = in, *end = in + held + got;
    while (end - p >= 2) {
        size_t n = p[1] & 127, head = 2;
        int whole = 1;
        for (unsigned shift = 7; p[head - 1] & 128; shift += 7, head++) {
            if (p + head >= end) { whole = 0; break; }
            if (head > 4) die("a malformed length");
            n |= (size_t)(p[head] & 127) << shift;
        }
        if (whole && head + n > PACKET_BYTES_MAX) die("a packet of %zu bytes", n);
        if (!whole || head + n > (size_t)(end - p)) break;
        take(*p, p + head, n);
        p += head + n;
    }
    held = (size_t)(end - p);
    memmove(in, p, held);
    return (size_t)got;
}

static int connected, session_present, granted;

static void refuse_bad(uint8_t first, const uint8_t *p, size_t n) {
    if (first >> 4 == 14) die("the broker disconnected us: reason 0x%02x", n ? p[0] : 0);
    if (n > 2 && p[2] >= 128) die("the broker refused packet 0x%02x: reason 0x%02x", first, p[2]);
}

static void put_connect(const char *name, int clean) {
    uint8_t b[64] = {0, 4, 'M', 'Q', 'T', 'T', (uint8_t)opt.version, clean ? 2 : 0, 600 >> 8, 600 & 255 /* keep alive: rumqttd refuses 0 */};
    size_t n = 10;
    if (opt.version == 5) {
        /* Receive Maximum 65535, Session Expiry Interval an hour */
        static const uint8_t props[] = {8, 0x21, 0xff, 0xff, 0x11, 0, 0, 0x0e, 0x10};
        memcpy(b + n, props, sizeof props);
        if (clean) b[n + 7] = b[n + 8] = 0;
        n += sizeof props;
    }
    int id = snprintf((char *)b + n + 2, 30, "%s-%x", name, run_id);
    b[n + 1] = (uint8_t)id;
    put_packet(0x10, b, n + 2 + (size_t)id);
    connected = 0;
}

static void take_greeting(uint8_t first, const uint8_t *p, size_t n) {
    if (first >> 4 == 2) {
        if (n < 2 || p[1]) die("the broker refused the connection: code 0x%02x", n < 2 ? 0 : p[1]);
        session_present = p[0] & 1;
        connected = 1;
    } else if (first >> 4 == 9) {
        if (p[n - 1] != 2) die("the broker granted 0x%02x instead of QoS 2", p[n - 1]);
        granted = 1;
    } else die("an unexpected packet 0x%02x", first);
}

static void wait_for(const int *flag, const char *what, void (*take)(uint8_t first, const uint8_t *p, size_t n)) {
    flush_out();
    for (double until = now_s() + QUIET_S; !*flag;) {
        receive(take);
        if (now_s() > until) die("no %s within %d s", what, QUIET_S);
    }
}

static void hang_up(void) {
    put((uint8_t[]){0xe0, 0}, 2);
    flush_out();
    shutdown(fd, SHUT_WR);
    for (double until = now_s() + 2; now_s() < until;) { /* until the broker has seen it */
        ssize_t got = recv(fd, in, sizeof in, 0);
        if (!got || (got < 0 && errno != EAGAIN && errno != EINTR)) break;
    }
    close(fd);
}

/* ---- the three steps ---- */

static void subscribe_and_leave(void) {
    open_connection();
    put_connect("reader", 0);
    wait_for(&connected, "CONNACK", take_greeting);
    uint8_t b[64] = {0, 1};
    size_t n = 2;
    if (opt.version == 5) b[n++] = 0;
    b[n + 1] = sizeof topic - 1;
    memcpy(b + n + 2, topic, sizeof topic - 1);
    n += 2 + sizeof topic - 1;
    b[n++] = 2;
    put_packet(0x82, b, n);
    wait_for(&granted, "SUBACK", take_greeting);
    hang_up();
}

static uint32_t settled;

static void take_settled(uint8_t first, const uint8_t *p, size_t n) {
    refuse_bad(first, p, n);
    if (first >> 4 == 5) put_ack(0x62, p);
    else if (first >> 4 == 4 || first >> 4 == 7) settled++;
    else die("the publisher got packet 0x%02x", first);
}

static int qos_of(uint32_t seq) { return seq & 1 ? 2 : 1; }

static double publish(void) {
    open_connection();
    put_connect("writer", 1);
    wait_for(&connected, "CONNACK", take_greeting);
    uint8_t b[PACKET_BYTES_MAX];
    double began = now_s(), heard = began;
    for (uint32_t sent = 0; sent < opt.messages;) {
        for (uint32_t end = sent + BATCH < opt.messages ? sent + BATCH : opt.messages; sent < end; sent++) {
            uint32_t pid = 1 + sent % BATCH;
            size_t n = 2 + sizeof topic - 1;
            b[0] = 0;
            b[1] = sizeof topic - 1;
            memcpy(b + 2, topic, sizeof topic - 1);
            b[n++] = (uint8_t)(pid >> 8);
            b[n++] = (uint8_t)pid;
            if (opt.version == 5) b[n++] = 0;
            memset(b + n, 'x', (size_t)opt.payload);
            memcpy(b + n, &sent, 4);
            memcpy(b + n + 4, &run_id, 4);
            put_packet((uint8_t)(0x30 | qos_of(sent) << 1), b, n + (size_t)opt.payload);
        }
        for (flush_out(); settled < sent; flush_out()) {
            if (receive(take_settled)) heard = now_s();
            else if (now_s() - heard > QUIET_S) die("%u of %u messages were acknowledged, then no more for %d s", settled, sent, QUIET_S);
        }
    }
    double seconds = now_s() - began;
    hang_up();
    return seconds;
}

static uint64_t *seen;
static uint32_t distinct, next_seq, duplicated, out_of_order, released;

static void take_missed(uint8_t first, const uint8_t *p, size_t n) {
    int qos = first >> 1 & 3;
    uint32_t seq, run;
    switch (first >> 4) {
    case 2: take_greeting(first, p, n); return;
    case 6:
        refuse_bad(first, p, n);
        put_ack(0x70, p);
        released++;
        return;
    case 3: break;
    default: refuse_bad(first, p, n); die("the reader got packet 0x%02x", first);
    }
    size_t at = 2 + ((size_t)p[0] << 8 | p[1]);
    const uint8_t *pid = p + at;
    if (qos) at += 2;
    if (opt.version == 5) at += 1 + p[at]; /* none was sent; the broker adds less than 128 bytes */
    if (at + PAYLOAD_MIN > n) die("a message too short to be ours");
    memcpy(&seq, p + at, 4);
    memcpy(&run, p + at + 4, 4);
    if (run != run_id || seq >= opt.messages || n - at != (size_t)opt.payload) die("a message that is not ours");
    if (qos != qos_of(seq)) die("message %u came with QoS %d instead of %d", seq, qos, qos_of(seq));
    put_ack(qos == 1 ? 0x40 : 0x50, pid);
    if (seen[seq >> 6] >> (seq & 63) & 1) {
        duplicated++;
        return;
    }
    seen[seq >> 6] |= 1ull << (seq & 63);
    distinct++;
    if (seq < next_seq) out_of_order++;
    else next_seq = seq + 1;
}

int main(int argc, char **argv) {
    static const struct option longs[] = {
        {"host", required_argument, 0, 'h'}, {"port", required_argument, 0, 'p'}, {"port5", required_argument, 0, '5'},
        {"version", required_argument, 0, 'v'},
        {"messages", required_argument, 0, 'm'}, {"payload", required_argument, 0, 'b'}, {"timeout", required_argument, 0, 't'}, {0, 0, 0, 0}};
    for (int code; (code = getopt_long(argc, argv, "", longs, NULL)) != -1;) {
        if (code == 'h') opt.host = optarg;
        else if (code == 'p') opt.port = (int)number("port", optarg, 1, 65535);
        else if (code == '5') opt.port5 = (int)number("port5", optarg, 1, 65535);
        else if (code == 'v') opt.version = (int)number("version", optarg, 4, 5);
        else if (code == 'm') opt.messages = (uint32_t)number("messages", optarg, 2, 1e8);
        else if (code == 'b') opt.payload = (int)number("payload", optarg, PAYLOAD_MIN, 60000);
        else if (code == 't') opt.timeout_s = number("timeout", optarg, 1, 3600);
        else die("usage: mqttdrain [--host IP] [--port N] [--port5 N] [--version 4|5] [--messages N] [--payload BYTES] [--timeout S]");
    }
    signal(SIGALRM, on_alarm);
    alarm((unsigned)opt.timeout_s);
    run_id = (uint32_t)((uint64_t)(now_s() * 1e6)) ^ (uint32_t)getpid() << 16;
    seen = calloc(opt.messages / 64 + 1, 8);

    subscribe_and_leave();
    double publish_s = publish();
    uint32_t exact = opt.messages / 2; /* of QoS 2 */

    open_connection();
    event("measure-start");
    double began = now_s(), heard = began, cpu = cpu_s(), first_s = 0;
    put_connect("reader", 0);
    wait_for(&connected, "CONNACK", take_missed);
    if (!session_present) die("the broker kept no session");
    for (flush_out(); distinct < opt.messages || released < exact;) {
        if (receive(take_missed)) {
            heard = now_s();
            if (distinct && !first_s) first_s = heard - began;
        } else if (now_s() - heard > QUIET_S) break;
        flush_out(); /* all acknowledgements of this read in one write */
    }
    double seconds = heard - began;
    cpu = cpu_s() - cpu;
    event("measure-end");
    for (double until = now_s() + LINGER_S; now_s() < until; flush_out()) receive(take_missed);
    uint32_t lost = opt.messages - distinct;
    if (released < exact) lost = lost > exact - released ? lost : exact - released; /* not finished is not delivered */
    printf("{\"delivered\": %u, \"published\": %u, \"seconds\": %.4f, \"delivered_per_s\": %.1f, \"published_per_s\": %.1f, "
           "\"latency_us\": null, \"first_ms\": %.1f, \"lost\": %u, \"duplicated\": %u, \"out_of_order\": %u, \"released\": %u, "
           "\"generator_cpu_share\": %.3f}\n",
           distinct, opt.messages, seconds, distinct / seconds, opt.messages / publish_s, first_s * 1000, lost, duplicated,
           out_of_order, released, cpu / seconds);
    hang_up();
    return lost || duplicated ? 1 : 0;
}
