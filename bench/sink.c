/* sink: the least a broker can do, in C, to show how fast mqttload can go (bench/mqttload.c).
 *
 * Forwards the topics bench/N of mqttload, QoS 0 and 1, MQTT 3.1.1 and 5, and nothing else: no sessions, no
 * checks, no back-pressure, nothing stored. A measuring aid, not a broker.
 *
 * Build and use: cc -O2 -o bench/out/sink bench/sink.c
 *                python bench/run.py --only sink --broker sink='bench/out/sink {port}' */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { TOPICS = 20000, READ_BYTES = 256 * 1024, SUBS_PER_TOPIC = 64 };

typedef struct { uint8_t *bytes; size_t head, tail, cap; } Buffer;
typedef struct { int fd, v5, dirty, want_out; Buffer in, out; uint16_t next_pid; } Conn;

static Conn *subscribers[TOPICS][SUBS_PER_TOPIC];
static int subscriber_count[TOPICS];
static Conn *dirty[65536];
static int dirty_count, epoll_fd;
static uint8_t read_buf[2 * READ_BYTES + (1 << 20)];

static uint8_t *append(Conn *c, const void *bytes, size_t n) {
    Buffer *b = &c->out;
    if (b->head == b->tail) b->head = b->tail = 0;
    if (b->tail + n > b->cap) {
        while (b->tail + n > b->cap) b->cap = b->cap ? b->cap * 2 : 65536;
        b->bytes = realloc(b->bytes, b->cap);
    }
    uint8_t *at = memcpy(b->bytes + b->tail, bytes, n);
    b->tail += n;
    if (!c->dirty) c->dirty = 1, dirty[dirty_count++] = c;
    return at;
}

static int topic_number(const uint8_t *topic, size_t n) {
    int number = 0;
    for (size_t i = 6; i < n; i++) number = number * 10 + (topic[i] - '0');
    return n > 6 && number >= 0 && number < TOPICS ? number : 0;
}

static void drop(Conn *c) {
    for (int t = 0; t < TOPICS; t++)
        for (int i = 0; i < subscriber_count[t]; i++)
            if (subscribers[t][i] == c) subscribers[t][i--] = subscribers[t][--subscriber_count[t]];
    for (int i = 0; i < dirty_count; i++)
        if (dirty[i] == c) dirty[i--] = dirty[--dirty_count];
    close(c->fd);
    free(c->in.bytes);
    free(c->out.bytes);
    free(c);
}

static void on_packet(Conn *c, const uint8_t *packet, size_t head, size_t n) {
    const uint8_t *p = packet + head;
    switch (packet[0] >> 4) {
    case 1:
        c->v5 = p[6] == 5;
        append(c, c->v5 ? "\x20\x03\0\0\0" : "\x20\x02\0\0", c->v5 ? 5 : 4);
        break;
    case 3: {
        size_t topic = (size_t)p[0] << 8 | p[1];
        int number = topic_number(p + 2, topic), qos = packet[0] >> 1 & 3;
        if (qos) append(c, (uint8_t[]){0x40, 2, p[2 + topic], p[3 + topic]}, 4);
        for (int i = 0; i < subscriber_count[number]; i++) {
            Conn *s = subscribers[number][i];
            uint8_t *copy = append(s, packet, head + n);
            if (!qos) continue;
            if (!++s->next_pid) s->next_pid = 1;
            copy[head + 2 + topic] = (uint8_t)(s->next_pid >> 8);
            copy[head + 3 + topic] = (uint8_t)s->next_pid;
        }
        break;
    }
    case 8: {
        const uint8_t *filter = p + 2 + c->v5; /* mqttload sends no properties: their length is one zero byte */
        size_t length = (size_t)filter[0] << 8 | filter[1];
        int number = topic_number(filter + 2, length);
        if (subscriber_count[number] < SUBS_PER_TOPIC) subscribers[number][subscriber_count[number]++] = c;
        uint8_t reply[6] = {0x90, (uint8_t)(3 + c->v5), p[0], p[1], 0, 0};
        reply[4 + c->v5] = p[n - 1];
        append(c, reply, (size_t)(5 + c->v5));
        break;
    }
    case 12: append(c, "\xd0\0", 2); break;
    default: break;
    }
}

static int on_readable(Conn *c) {
    size_t left = c->in.tail;
    if (left) memcpy(read_buf, c->in.bytes, left);
    ssize_t got = recv(c->fd, read_buf + left, READ_BYTES, 0);
    if (got < 0 && errno == EAGAIN) return 1;
    if (got <= 0) return 0;
    uint8_t *p = read_buf, *end = read_buf + left + got;
    while (end - p >= 2) {
        size_t n = p[1] & 127, head = 2;
        for (int shift = 7; p[head - 1] & 128 && p + head < end && head < 5; shift += 7, head++)
            n |= (size_t)(p[head] & 127) << shift;
        if (p[head - 1] & 128 || head + n > (size_t)(end - p)) break;
        on_packet(c, p, head, n);
        p += head + n;
    }
    left = (size_t)(end - p);
    if (left > c->in.cap) c->in.bytes = realloc(c->in.bytes, c->in.cap = left + 4096);
    if (left) memcpy(c->in.bytes, p, left);
    c->in.tail = left;
    return 1;
}

static void flush_out(Conn *c) {
    while (c->out.head < c->out.tail) {
        ssize_t n = send(c->fd, c->out.bytes + c->out.head, c->out.tail - c->out.head, MSG_NOSIGNAL);
        if (n < 0) break; /* full, or closed: the read side notices */
        c->out.head += (size_t)n;
    }
    int want = c->out.head < c->out.tail;
    if (want == c->want_out) return;
    struct epoll_event ev = {.events = EPOLLIN | (want ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &ev);
    c->want_out = want;
}

int main(int argc, char **argv) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(argc > 1 ? argv[1] : "1883"))};
    inet_pton(AF_INET, "127.0.0.1", &at.sin_addr);
    int on = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 512)) return perror("sink"), 1;
    epoll_fd = epoll_create1(0);
    struct epoll_event ev = {.events = EPOLLIN}, events[256];
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &ev);
    for (;;) {
        int n = epoll_wait(epoll_fd, events, 256, -1);
        for (int i = 0; i < n; i++) {
            Conn *c = events[i].data.ptr;
            if (!c) {
                int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
                if (fd < 0) continue;
                setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
                c = calloc(1, sizeof *c);
                c->fd = fd;
                ev = (struct epoll_event){.events = EPOLLIN, .data.ptr = c};
                epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &ev);
                continue;
            }
            if (events[i].events & EPOLLOUT) flush_out(c);
            if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR) && !on_readable(c)) drop(c);
        }
        for (int i = 0; i < dirty_count; i++) {
            dirty[i]->dirty = 0;
            flush_out(dirty[i]);
        }
        dirty_count = 0;
    }
}
