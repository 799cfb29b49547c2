"""The way in: all packets of a buffer in one loop over local variables.

A plain PUBLISH with QoS 0 or 1, and a run of PUBACKs that come as expected, are handled here with a few slices each
and no object per message; consecutive publishes to one topic become one run. Every other packet is decoded in full
and goes to its handler. `tests/broker/test_fast_path.py` holds both ways to the same results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.delivery.encode import KEY_V4_QOS0, KEY_V4_QOS1, KEY_V5_QOS0, KEY_V5_QOS1
from tidegate.errors import MalformedPacket, ProtocolViolation, Refused
from tidegate.limits import CONNECT_BYTES_MAX, TICK_BYTES_MAX, TICK_CHANGES_MAX
from tidegate.log.run import Run
from tidegate.session.flights import PUBACKS, State
from tidegate.session.link import Link, Phase

if TYPE_CHECKING:
    from tidegate.broker.core import Broker

PUBLISH_QOS0, PUBLISH_QOS1, PUBACK = 0x30, 0x32, 0x40
NO_PID = b"\0\0"

# A tick of so few messages may be carried out at once, without waiting for what other connections have to say.
HURRY_MESSAGES_MAX = 4

# From how many packets of one length and topic on they are taken as a block.
EQUALS_MIN = 8


def ingest(broker: Broker, link: Link, data: bytes) -> None:
    """Take what a link received; raises PeerError for what the peer must not send."""
    link.seen_s = broker.now_s
    broker.counters.bytes_received += len(data)
    rest = link.rest
    if rest:
        rest += data
        if len(rest) < link.more:
            return
        data = bytes(rest)
        rest.clear()
    pos, end = 0, len(data)
    packets = 0
    fast = broker.fast and link.phase is Phase.OPEN
    while pos < end:
        first = data[pos]
        if fast:
            began = pos
            if first == PUBLISH_QOS1:
                pos = _lone_publishes_qos1(broker, link, data, pos, end)
                if pos == began:
                    pos = _publishes_qos1(broker, link, data, pos, end)
            elif first == PUBLISH_QOS0:
                pos = _publishes_qos0(broker, link, data, pos, end)
            elif first == PUBACK:
                pos = _pubacks(broker, link, data, pos, end)
            if pos != began:
                continue
        # The plain way: one packet, decoded in full.
        size = shift = 0
        at = pos + 1
        while at < end:
            byte = data[at]
            at += 1
            size |= (byte & 0x7F) << shift
            if not byte & 0x80:
                break
            shift += 7
            if shift == 28:
                raise MalformedPacket("remaining length of more than four bytes")
        else:
            break
        after = at + size
        limit = broker.packet_max if link.phase is Phase.OPEN else CONNECT_BYTES_MAX
        if after - pos > limit:
            raise Refused(f"packet of {after - pos} bytes, the limit is {limit}", reason=0x95)
        if after > end:
            break
        pos = after
        packets += 1
        broker.handle(link, first, data[at:after])
        if link.phase is Phase.CLOSED:
            return
        fast = broker.fast and link.phase is Phase.OPEN
    if pos < end:
        rest += data[pos:]
        link.more = _complete_at(rest)
    if packets:
        broker.counters.messages_received += packets
    if broker.pending_bytes > TICK_BYTES_MAX or len(broker.dispatcher.changes) > TICK_CHANGES_MAX:
        broker.flush()  # one wake-up of the event loop may bring many megabytes
    elif broker.runs and not broker.ticking and not (broker.pending <= HURRY_MESSAGES_MAX and broker.hurry()):
        broker.request_tick()


def _lone_publishes_qos1(broker: Broker, link: Link, data: bytes, pos: int, end: int) -> int:
    """Take plain QoS 1 publishes as long as none is followed by another for its topic: where they end.

    Many devices on one connection, a bridge, a replay: each message is a run of its own, and the loop has no call
    per message that it can do without. Returns `pos` itself if the first is not such a packet."""
    routes = broker.table.routes
    publisher, tenant, v5 = link.client_id, broker.tenant, link.v5
    skip = 3 if v5 else 2  # the packet id, and for MQTT 5 the length of no properties
    began = pos
    runs: list[Run] = []
    pids: list[bytes] = []
    matched = True
    while pos + 4 < end and data[pos] == PUBLISH_QOS1:
        length = data[pos + 1]
        if length < 0x80:
            body = pos + 2
        else:
            length = length & 0x7F | data[pos + 2] << 7
            if length >= 0x4000:
                break
            body = pos + 3
        after = body + length
        if after > end:
            break
        pid_at = body + 2 + (data[body] << 8 | data[body + 1])
        content = pid_at + skip
        if content > after or (v5 and data[content - 1]):
            break
        topic = data[body + 2 : pid_at]
        if after + 1 < end and data.startswith(topic, after + (4 if data[after + 1] < 0x80 else 5)):
            break
        pid = data[pid_at : pid_at + 2]
        route = routes.get(topic) or broker.table.admit(topic)
        if route is None or pid == NO_PID:
            break
        if route.matched is not matched:
            if pids:
                _acknowledge(broker, link, pids, matched)
                pids = []
            matched = route.matched
        pids.append(pid)
        run = Run(route.topic, publisher, tenant, 1, [data[content:after]])
        run.route = route
        runs.append(run)
        pos = after
    if runs:
        _acknowledge(broker, link, pids, matched)
        broker.runs += runs
        broker.pending += len(runs)
        broker.pending_bytes += pos - began
        broker.counters.messages_received += len(runs)
    return pos


def _publishes_qos1(broker: Broker, link: Link, data: bytes, pos: int, end: int) -> int:
    """Take the run of plain QoS 1 publishes to one topic that begins at `pos`: where it ends.

    Returns `pos` itself if the packet there is incomplete or not plain; the plain way decides then."""
    body = pos + 2
    if body >= end:
        return pos
    length = data[pos + 1]
    if length & 0x80:
        length = length & 0x7F | data[body] << 7
        body += 1
    after = body + length
    if after > end or length < 4 or length >= 0x4000:
        return pos
    v5 = link.v5
    pid_at = body + 2 + (data[body] << 8 | data[body + 1])
    if pid_at + 2 + v5 > after or (v5 and data[pid_at + 2]):
        return pos
    topic = data[body + 2 : pid_at]
    route = broker.table.routes.get(topic)
    if route is None:
        route = broker.table.admit(topic)
        if route is None:
            return pos
    prefix = data[body:pid_at]  # the topic with its length, as the packets of the run repeat it
    prefix_length = pid_at - body
    began = pos
    stride = after - pos
    equal = _equals(data, pos, stride, pid_at - pos, end) if end - pos >= EQUALS_MIN * stride else 0
    if equal > 1 and v5 and data[pid_at + 2 : pos + equal * stride : stride].strip(b"\0"):
        equal = 0  # some have properties: look at each
    if equal > 1:
        pos += equal * stride
        parts = [data[began:pid_at], b"", b""] * equal
        block = equal * stride
        parts[1::3] = [data[i : i + 2] for i in range(pid_at, pid_at + block, stride)]
        size, tail = after - pid_at - 2, pid_at + 2
        parts[2::3] = [data[i : i + size] for i in range(tail, tail + block, stride)]
    else:
        parts = []
    while equal < 2:
        parts += (data[pos:pid_at], data[pid_at : pid_at + 2], data[pid_at + 2 : after])
        pos = after
        body = pos + 2
        if body >= end or data[pos] != PUBLISH_QOS1:
            break
        length = data[pos + 1]
        if length & 0x80:
            length = length & 0x7F | data[body] << 7
            if length >= 0x4000:
                break
            body += 1
        after = body + length
        if after > end or not data.startswith(prefix, body):
            break
        pid_at = body + prefix_length
        if pid_at + 2 + v5 > after or (v5 and data[pid_at + 2]):
            break
    pids = parts[1::3]
    if NO_PID in pids:
        raise ProtocolViolation("PUBLISH with packet id 0")  # [MQTT-2.2.1-3]
    payloads = [tail[1:] for tail in parts[2::3]] if v5 else parts[2::3]
    run = Run(topic, link.client_id, broker.tenant, 1, payloads)
    run.variants = {KEY_V5_QOS1 if v5 else KEY_V4_QOS1: parts}
    run.route = route
    broker.runs.append(run)
    _acknowledge(broker, link, pids, route.matched)
    broker.pending += run.count
    broker.counters.messages_received += run.count
    broker.pending_bytes += pos - began
    return pos


def _acknowledge(broker: Broker, link: Link, pids: list[bytes], matched: bool) -> None:
    """With the tick's append; what follows each other is answered in one."""
    acks = broker.acks
    if acks and acks[-1][0] is link and acks[-1][2] is matched:
        acks[-1][1].extend(pids)
    else:
        acks.append((link, pids, matched))


def _publishes_qos0(broker: Broker, link: Link, data: bytes, pos: int, end: int) -> int:
    """The same for QoS 0: the run's packets are handed on as the one piece they came in."""
    body = pos + 2
    if body >= end:
        return pos
    length = data[pos + 1]
    if length & 0x80:
        length = length & 0x7F | data[body] << 7
        body += 1
    after = body + length
    if after > end or length < 3 or length >= 0x4000:
        return pos
    v5 = link.v5
    topic_end = body + 2 + (data[body] << 8 | data[body + 1])
    if topic_end + v5 > after or (v5 and data[topic_end]):
        return pos
    topic = data[body + 2 : topic_end]
    route = broker.table.routes.get(topic)
    if route is None:
        route = broker.table.admit(topic)
        if route is None:
            return pos
    prefix = data[body:topic_end]
    prefix_length = topic_end - body
    began = pos
    stride = after - pos
    equal = _equals(data, pos, stride, topic_end + v5 - pos, end) if end - pos >= EQUALS_MIN * stride else 0
    if equal > 1:
        pos += equal * stride
        size, content = after - topic_end - v5, topic_end + v5
        payloads = [data[i : i + size] for i in range(content, content + equal * stride, stride)]
    else:
        payloads = []
    push = payloads.append
    while equal < 2:
        push(data[topic_end + v5 : after])
        pos = after
        body = pos + 2
        if body >= end or data[pos] != PUBLISH_QOS0:
            break
        length = data[pos + 1]
        if length & 0x80:
            length = length & 0x7F | data[body] << 7
            if length >= 0x4000:
                break
            body += 1
        after = body + length
        if after > end or not data.startswith(prefix, body):
            break
        topic_end = body + prefix_length
        if topic_end + v5 > after or (v5 and data[topic_end]):
            break
    run = Run(topic, link.client_id, broker.tenant, 0, payloads)
    run.variants = {KEY_V5_QOS0 if v5 else KEY_V4_QOS0: data[began:pos]}
    run.route = route
    broker.runs.append(run)
    broker.pending += run.count
    broker.counters.messages_received += run.count
    broker.pending_bytes += pos - began
    return pos


def _equals(data: bytes, pos: int, stride: int, head: int, end: int) -> int:
    """How many packets from `pos` on are `stride` bytes long and begin with the same `head` bytes.

    Devices often send readings of one size. Then whole columns of the buffer are compared instead of packets:
    byte j of every packet at once. Less than EQUALS_MIN is not worth it, and reported as 0."""
    count = (end - pos) // stride
    if not data.startswith(data[pos : pos + head], pos + stride):
        return 0
    stop = pos + count * stride
    for at in range(pos, pos + head):
        column = data[at:stop:stride]
        same = data[at : at + 1]
        if column != same * count:
            count -= len(column.lstrip(same))
            if count < EQUALS_MIN:
                return 0
            stop = pos + count * stride
    return count


def _pubacks(broker: Broker, link: Link, data: bytes, pos: int, end: int) -> int:
    """Take the PUBACKs of the oldest flights as long as they come in order: where they end, else `pos`."""
    session = link.session
    flights = session.flights if session is not None else None
    if flights is None or session.reader.resend:  # type: ignore[union-attr]
        return pos
    queue = flights.queue
    while queue:
        flight = queue[0]
        count = (end - pos) >> 2
        if count > flight.count:
            count = flight.count
        pid = flight.pid
        if not count or flight.qos != 1 or flight.state is not State.SENT:
            break
        if not data.startswith(PUBACKS[4 * pid : 4 * (pid + count)], pos):
            break
        broker.acknowledged(link, flights, flight, count)
        pos += 4 * count
    return pos


def _complete_at(rest: bytearray) -> int:
    """How many bytes the packet at the start of `rest` has in all, or one more than there are if not yet known."""
    size = shift = 0
    for at in range(1, min(len(rest), 5)):
        byte = rest[at]
        size |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return at + 1 + size
        shift += 7
    return len(rest) + 1
