/* mqttcount: an MQTT 3.1.1 subscriber that only counts, so that it is never what limits the rate.
 *
 * One blocking connection. Acknowledges QoS 1 with one write per read, and ends when --messages have arrived, when
 * none came for --quiet seconds after the first, or after --timeout seconds. The events "subscribed", "first" and
 * "last" go to stderr as they happen, so that a harness can read CPU times there. Prints one JSON object; exit 1:
 * fewer messages than asked for.
 *
 * Build: cc -O2 -o bench/out/mqttcount bench/mqttcount.c */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { READ_BYTES = 1 << 20, PACKET_BYTES_MAX = 1 << 20, LOOK_MS = 100, PING_EVERY_S = 20 };

static uint8_t in[READ_BYTES + PACKET_BYTES_MAX], out[sizeof in];
static int fd;

__attribute__((noreturn, format(printf, 1, 2))) static void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("mqttcount: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    exit(2);
}

static double clock_s(clockid_t which) {
    struct timespec t;
    clock_gettime(which, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void event(const char *name) {
    fprintf(stderr, "event %s\n", name);
    fflush(stderr);
}

static void send_all(const uint8_t *bytes, size_t n) {
    while (n) {
        ssize_t sent = send(fd, bytes, n, MSG_NOSIGNAL);
        if (sent < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (sent < 0) die("cannot send: %s", strerror(errno));
        bytes += sent;
        n -= (size_t)sent;
    }
}

/* Bytes read, 0 if none came in LOOK_MS. */
static size_t receive(uint8_t *at, size_t room) {
    ssize_t got = recv(fd, at, room, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (got <= 0) die("the broker closed the connection (%s)", got ? strerror(errno) : "end of stream");
    return (size_t)got;
}

static void open_connection(const char *host, int port) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    struct timeval look = {.tv_usec = LOOK_MS * 1000};
    int on = 1;
    if (inet_pton(AF_INET, host, &to.sin_addr) != 1) die("--host takes an IPv4 address");
    fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to)) die("cannot connect to %s:%d: %s", host, port, strerror(errno));
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &look, sizeof look);
}

static void say_hello(const char *filter, int qos) {
    uint8_t connect_packet[64] = {0x10, 0, 0, 4, 'M', 'Q', 'T', 'T', 4, 2 /* clean */, 0, 0};
    int id = snprintf((char *)connect_packet + 14, 40, "count-%d", (int)getpid());
    connect_packet[1] = (uint8_t)(12 + id);
    connect_packet[13] = (uint8_t)id;
    send_all(connect_packet, 14 + (size_t)id);
    size_t n = strlen(filter);
    if (n > 100) die("--filter is too long");
    uint8_t subscribe[128] = {0x82, (uint8_t)(5 + n), 0, 1, 0, (uint8_t)n};
    memcpy(subscribe + 6, filter, n);
    subscribe[6 + n] = (uint8_t)qos;
    send_all(subscribe, 7 + n);
    /* Both answers have a fixed size, and nothing but a retained message could come between or behind them. */
    size_t got = 0;
    double deadline = clock_s(CLOCK_MONOTONIC) + 10;
    while (got < 9) {
        got += receive(in + got, 9 - got);
        if (clock_s(CLOCK_MONOTONIC) > deadline) die("no SUBACK within 10 s");
    }
    if (in[0] != 0x20 || in[3]) die("the broker refused the connection: code 0x%02x", in[3]);
    if (in[4] != 0x90 || in[8] != qos) die("the broker granted 0x%02x instead of QoS %d", in[8], qos);
    event("subscribed");
}

static double number(const char *name, const char *text, double low, double high) {
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end || value < low || value > high) die("--%s takes a number from %g to %g, not '%s'", name, low, high, text);
    return value;
}

int main(int argc, char **argv) {
    const char *host = "127.0.0.1", *filter = "#";
    int port = 1883, qos = 1;
    double messages = 0, quiet_s = 10, timeout_s = 600;
    static const struct option longs[] = {
        {"host", required_argument, 0, 'h'}, {"port", required_argument, 0, 'p'}, {"filter", required_argument, 0, 'f'},
        {"qos", required_argument, 0, 'q'}, {"messages", required_argument, 0, 'm'}, {"quiet", required_argument, 0, 's'},
        {"timeout", required_argument, 0, 't'}, {0, 0, 0, 0}};
    for (int code; (code = getopt_long(argc, argv, "", longs, NULL)) != -1;) {
        if (code == 'h') host = optarg;
        else if (code == 'p') port = (int)number("port", optarg, 1, 65535);
        else if (code == 'f') filter = optarg;
        else if (code == 'q') qos = (int)number("qos", optarg, 0, 1);
        else if (code == 'm') messages = number("messages", optarg, 1, 1e12);
        else if (code == 's') quiet_s = number("quiet", optarg, 0.1, 3600);
        else if (code == 't') timeout_s = number("timeout", optarg, 0.1, 86400);
        else die("usage: mqttcount [--host IP] [--port N] [--filter F] [--qos 0|1] --messages N [--quiet S] [--timeout S]");
    }
    if (!messages) die("--messages is missing");
    open_connection(host, port);
    say_hello(filter, qos);

    double began = clock_s(CLOCK_MONOTONIC), first = 0, last = 0, pinged = began;
    uint64_t count = 0, bytes = 0;
    size_t held = 0; /* of the packet that is not complete */
    while ((double)count < messages) {
        size_t got = receive(in + held, sizeof in - held < READ_BYTES ? sizeof in - held : READ_BYTES);
        double now = clock_s(CLOCK_MONOTONIC);
        if (now - began > timeout_s || (count && now - last > quiet_s)) break;
        if (now - pinged > PING_EVERY_S) {
            static const uint8_t ping[2] = {0xc0, 0};
            send_all(ping, 2);
            pinged = now;
        }
        if (!got) continue;
        const uint8_t *p = in, *end = in + held + got;
        uint8_t *ack = out;
        while (end - p >= 2) {
            size_t n = p[1] & 127, head = 2;
            int whole = 1;
            for (unsigned shift = 7; p[head - 1] & 128; shift += 7, head++) {
                if (p + head >= end) { whole = 0; break; }
                if (head > 4) die("a malformed length");
                n |= (size_t)(p[head] & 127) << shift;
            }
            if (!whole || head + n > (size_t)(end - p)) {
                if (whole && head + n > PACKET_BYTES_MAX) die("a packet of %zu bytes", n);
                break;
            }
            if (p[0] >> 4 == 3) {
                if (!count++) first = now, event("first");
                last = now;
                bytes += head + n;
                if (p[0] & 6) {
                    const uint8_t *pid = p + head + 2 + ((size_t)p[head] << 8 | p[head + 1]);
                    *ack++ = 0x40, *ack++ = 2, *ack++ = pid[0], *ack++ = pid[1];
                }
            }
            p += head + n;
        }
        if (ack > out) send_all(out, (size_t)(ack - out));
        held = (size_t)(end - p);
        memmove(in, p, held);
    }
    event("last");
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    double cpu_s = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) + (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
    double seconds = last - first;
    printf("{\"messages\": %llu, \"bytes\": %llu, \"seconds\": %.4f, \"per_s\": %.1f, \"first_after_s\": %.3f, \"cpu_s\": %.3f}\n",
           (unsigned long long)count, (unsigned long long)bytes, seconds, seconds > 0 ? (double)count / seconds : 0,
           count ? first - began : 0, cpu_s);
    static const uint8_t disconnect[2] = {0xe0, 0};
    if (send(fd, disconnect, 2, MSG_NOSIGNAL) < 0) {}
    return (double)count < messages;
}
