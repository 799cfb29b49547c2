"""The way in: all packets of a buffer, in one loop over local variables, into the tick's columns.

Every PUBLISH takes the same way, whatever its QoS, flags, properties or length: a few slices, and its entries in the
columns. Packets that are alike but for content and packet id are recognised and taken as a block: the same columns,
filled more quickly. Acknowledgements that come in order are compared with the bytes expected (`acks`). Any other packet
is decoded in full and goes to its handler.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tidegate.broker import acks, tracing
from tidegate.delivery.encode import expiry_property, key_of
from tidegate.delivery.tick import CALL, PUBACK, PUBREC, Stretch
from tidegate.errors import MalformedPacket, PeerError, ProtocolViolation, Refused
from tidegate.limits import CONNECT_BYTES_MAX, PROPERTY_BLOCKS_MAX, SPENT_MAX, TICK_BYTES_MAX, TICK_CHANGES_MAX
from tidegate.log.run import NO_EXPIRY, NOT_KEPT, RETAIN
from tidegate.router import check_topic
from tidegate.session import changes
from tidegate.session.flights import PIDS
from tidegate.session.link import CLOSED, OPEN, Link
from tidegate.session.session import Session
from tidegate.wire import Properties, Puback, Publish, Pubrec, Reason, read_properties

if TYPE_CHECKING:
    from tidegate.broker.core import Broker
    from tidegate.delivery.routes import Route

NO_PID = b"\0\0"
UTF8_PAYLOAD = 1
CALL_BYTES = 256  # what an answer costs that is made when the log has stored; roughly
PUBLISH_PACKET = 3  # the carrier of properties, for the wire

# A tick of so few messages may be carried out at once, without waiting for what other connections have to say.
HURRY_MESSAGES_MAX = 4

# From how many packets of one length and topic on they are taken as a block.
BLOCK_MIN = 8

# Packet ids in their order, as columns.
_HIGH, _LOW = b"".join(PIDS)[::2], b"".join(PIDS)[1::2]

# The keys of encodings that a publisher's own bytes are, by v5 and QoS.
_KEYS = [[key_of(v5, qos, False, b"") for qos in range(3)] for v5 in (False, True)]


def ingest(broker: Broker, link: Link, data: bytes) -> None:
    """Take what a link received; raises PeerError for what the peer must not send."""
    link.seen_s = broker.now_s
    broker.counters.bytes_received += len(data)
    rest = link.rest
    if link.busy:
        rest += data
        link.more = 0  # to be looked at as soon as it has its turn
        return
    if rest:
        rest += data
        if len(rest) < link.more:
            return
        data = bytes(rest)
        rest.clear()
    pos, end = 0, len(data)
    packets = 0
    before = broker.post.tick.weight if broker.storing.behind else (None, 0)
    if link.trace:
        tracing.received(broker, link, data)
    while pos < end and not link.busy:
        first = data[pos]
        if link.phase is OPEN:
            began = pos
            kind = first >> 4
            if kind == PUBLISH_PACKET:
                pos = _publishes(broker, link, data, pos, end)
            elif 4 <= kind <= 7:
                pos = acks.in_bulk(broker, link, data, pos, end)
            if link.session is None:
                return  # closed on the way: the log refuses
            if pos != began:
                if broker.spent > SPENT_MAX and pos < end:
                    broker.park(link)
                continue
        # One packet, decoded in full.
        head = header(data, pos, end, broker.config.mqtt.packet_bytes_max if link.phase else CONNECT_BYTES_MAX)
        if head is None or head[1] > end:
            break
        at, after = head
        pos = after
        packets += 1
        broker.handle(link, first, data[at:after])
        if link.phase is CLOSED:
            broker.counters.messages_received += packets
            return
        if broker.spent > SPENT_MAX and pos < end and not link.busy:
            broker.park(link)
    if pos < end:
        rest += data[pos:]
        link.more = 0 if link.busy else _complete_at(rest)
    if packets:
        broker.counters.messages_received += packets
    tick = broker.post.tick
    if before[0] is not None and tick.weight != before:
        broker.storing.throttle(link)
    if broker.flushing:
        broker.request_tick()
    elif tick.bytes > TICK_BYTES_MAX or len(tick.changes) > TICK_CHANGES_MAX:
        broker.flush()  # one wake-up of the event loop may bring many megabytes
    elif not broker.ticking and (tick.rows.payloads or tick.promises):
        few = len(tick.rows.payloads) <= HURRY_MESSAGES_MAX
        if not (few and broker.hurry()):
            broker.request_tick()


def header(data: bytes, pos: int, end: int, limit: int) -> tuple[int, int] | None:
    """Where the body of the packet at `pos` begins and ends; None while that is not known."""
    size = shift = 0
    at = pos + 1
    while at < end:
        byte = data[at]
        at += 1
        size |= (byte & 0x7F) << shift
        if not byte & 0x80:
            if not byte and shift:
                raise MalformedPacket("remaining length in more bytes than needed")  # [MQTT-1.5.5-1]
            if at + size - pos > limit:
                raise Refused(f"packet of {at + size - pos} bytes, the limit is {limit}", reason=0x95)
            return at, at + size
        shift += 7
        if shift == 28:
            raise MalformedPacket("remaining length of more than four bytes")
    return None


class Meaning(NamedTuple):
    """What a PUBLISH's properties say."""

    passed_on: bytes
    expiry: int
    alias: int
    text: bool  # the payload claims to be UTF-8
    exact: bool  # subscribers get just these bytes, within a second


def _publishes(broker: Broker, link: Link, data: bytes, pos: int, end: int) -> int:
    """Take the PUBLISH packets that follow each other from `pos` on: where they end.

    Returns `pos` itself if the packet there is not complete, or so wrong that the decoder shall say how."""
    began = pos
    tick = broker.post.tick
    rows = tick.rows
    topics, payloads, cuts = rows.topics, rows.payloads, rows.cuts
    begun = stretch_row = len(payloads)
    stretch_pos = pos
    routes = link.routes
    v5 = link.v5
    session: Session = link.session  # type: ignore[assignment]
    config = broker.config.mqtt
    limit = config.packet_bytes_max
    inbound = session.inbound
    pids: list[bytes] = []
    parts: list[bytes] = []
    last: Any = None  # the route of the message before
    targets: Any = None
    first = qos = flags = again = 0
    reason = 0  # what PUBACK or PUBREC say of `pids`
    meaning: Meaning | None = None
    exact = True  # the bytes of this stretch are what subscribers get
    block_row = 0  # from which row on a block is looked for
    enough = False  # so much work has come of these packets that the rest waits for another tick

    def close_stretch() -> None:
        """What has been taken since the last one goes the same way, together."""
        nonlocal parts, stretch_row, stretch_pos
        row = len(payloads)
        if row > stretch_row:
            n = row - stretch_row
            if n == 1:  # as most are, where every device has its own topic
                rows.flags.append(flags)
                rows.publishers.append(link.client_id)
                rows.tenants.append(link.tenant)
            else:
                rows.flags += bytes((flags,)) * n
                rows.publishers += [link.client_id] * n
                rows.tenants += [link.tenant] * n
            variants: dict[Any, Any] = {}
            if exact and not flags & RETAIN and not first & 8 and targets.list:
                variants[_KEYS[v5][qos]] = parts if qos else data[stretch_pos:pos]
            tick.stretches.append(Stretch(stretch_row, row, targets, variants))
        parts = []
        stretch_row, stretch_pos = row, pos

    def promise() -> None:
        nonlocal pids
        if pids:
            tick.promise(PUBACK if qos == 1 else PUBREC, link, pids, reason)
            link.receiving += len(pids)
            if qos == 2:
                tick.changes.append(changes.inbounds(session.number, pids))
            pids = []

    try:
        while pos + 4 < end:
            head = data[pos]
            if head != first:
                if first:
                    close_stretch()
                    promise()
                if head >> 4 != PUBLISH_PACKET:
                    break
                first = head
                qos = head >> 1 & 3
                if qos == 3 or (head & 8 and not qos):
                    break
                flags = qos | (RETAIN if head & 1 else 0)
                last = None
                if qos == 2 and inbound is None:
                    inbound = session.inbound = set()
            length = data[pos + 1]
            if length < 0x80:
                body = pos + 2
                after = body + length
            else:
                byte = data[pos + 2]
                if 0 < byte < 0x80:
                    body = pos + 3
                    after = body + (length & 0x7F | byte << 7)
                else:
                    found = header(data, pos, end, limit)
                    if found is None:
                        break
                    body, after = found
            if after - pos > limit:
                header(data, pos, end, limit)  # says so
            if after > end:
                break
            topic_end = body + 2 + (data[body] << 8 | data[body + 1])
            content = topic_end + 2 if qos else topic_end
            if content + v5 > after:
                break
            topic = data[body + 2 : topic_end]
            if v5:
                if data[content]:
                    if topic and topic not in routes:
                        check_topic(topic)  # what comes first in the packet is judged first
                    meaning, content = _meaning(broker, link, data, content, after)
                    enough = broker.spent > SPENT_MAX
                    if meaning.exact is not exact:
                        close_stretch()
                        last = None
                        exact = meaning.exact
                    if meaning.alias:
                        topic = _alias(link, topic, meaning.alias)
                else:
                    content += 1
                    if meaning is not None:
                        meaning = None
                        if not exact:
                            close_stretch()
                            last = None
                            exact = True
            route: Any = routes.get(topic)
            row = len(payloads)
            if qos:
                pid = data[topic_end : topic_end + 2]
                if pid == NO_PID:
                    raise ProtocolViolation("PUBLISH with packet id 0")  # [MQTT-2.2.1-3]
                if qos == 2 and pid in inbound:  # type: ignore[operator]
                    # The message is stored already; only the PUBREC was lost [MQTT-4.3.3-10].
                    close_stretch()
                    promise()
                    tick.promise(CALL, link, partial(_received_before, broker, link, session, pid))
                    link.asked[pid] = link.asked.get(pid, 0) + 1
                    link.outbox.owe(CALL_BYTES)
                    again += 1
                    pos = stretch_pos = after
                    last = None
                    continue
                if v5 and link.receiving + len(pids) >= config.receive_maximum:
                    raise Refused("more unfinished messages than allowed", reason=Reason.RECEIVE_MAXIMUM_EXCEEDED)
                if qos == 2 and len(inbound) >= config.receive_maximum:  # type: ignore[arg-type]
                    # Of any version, and those of earlier connections too: coming back makes no room for more.
                    raise Refused("more unfinished messages than allowed", reason=Reason.RECEIVE_MAXIMUM_EXCEEDED)
            kept = flags & RETAIN
            if route is None or (meaning is not None and meaning.text) or kept:
                try:
                    if route is None:
                        route = _admit(broker, link, topic)
                        enough = broker.spent > SPENT_MAX
                    if meaning is not None and meaning.text:
                        _check_text(data[content:after])
                    if kept and not broker.retaining.admit(topic, after - content):
                        if v5 and qos:
                            raise Refused("no room for another retained message", reason=Reason.QUOTA_EXCEEDED)
                        # Others cannot be told. Subscribers get the message all the same, it is only not retained.
                        broker.counters.refused["retained"] += 1
                        kept = 0
                except Refused as error:
                    close_stretch()
                    promise()
                    pos = stretch_pos = after
                    again += 1
                    last = None
                    _refuse(broker, link, qos, error, pid if qos else NO_PID)
                    if broker.spent > SPENT_MAX:
                        break
                    continue
            if flags & RETAIN:
                broker.spent += 1  # it is put away, and has a record of its own
                enough = broker.spent > SPENT_MAX
                tick.retained = tick.retained or bool(kept)
                if bool(kept) is bool(flags & NOT_KEPT):
                    close_stretch()
                    flags ^= NOT_KEPT
                    last = None
            if route is not last:
                if route.targets is not targets:
                    if row > stretch_row:
                        close_stretch()
                    else:
                        stretch_pos = pos
                    targets = route.targets
                if qos and v5 and reason != (0 if route.matched else 0x10):
                    promise()
                    reason = 0 if route.matched else 0x10
                last = route
                cuts.append(row)
            elif row >= block_row and end - pos >= BLOCK_MIN * (after - pos) and not flags & RETAIN:
                stride = after - pos
                n = _alike(data, pos, stride, content - pos, topic_end - pos if qos else -1, end)
                ids: list[bytes] = []
                if n >= BLOCK_MIN and qos:
                    ids = _ids(data, topic_end, n, stride)
                    used = link.receiving + len(pids) if v5 else 0
                    wrong = not ids or (v5 and used + n > config.receive_maximum)
                    if qos == 2 and not wrong:
                        assert inbound is not None
                        wrong = len(set(ids)) < n or not inbound.isdisjoint(ids)
                        wrong = wrong or len(inbound) + n > config.receive_maximum
                    if wrong:
                        block_row, n = row + n, 0  # one by one, up to what is, and not looked at as a block again
                if n < BLOCK_MIN or (meaning is not None and meaning.text):
                    block_row = max(block_row, row + 8 * BLOCK_MIN)
                else:
                    size = after - content
                    taken = [data[i : i + size] for i in range(content, content + n * stride, stride)]
                    topics += [route.topic] * n
                    payloads += taken
                    if meaning is not None:
                        _describe(rows, row, n, meaning)
                    if qos:
                        if exact and targets.list:
                            if v5:
                                size, tail = after - topic_end - 2, topic_end + 2
                                taken = [data[i : i + size] for i in range(tail, tail + n * stride, stride)]
                            some = [data[pos:topic_end], NO_PID, NO_PID] * n
                            some[2::3] = taken
                            parts = parts + some if parts else some
                        pids = pids + ids if pids else ids
                        if qos == 2:
                            inbound.update(ids)  # type: ignore[union-attr]
                    pos += n * stride
                    continue
            if meaning is not None:
                _describe(rows, row, 1, meaning)
            payload = data[content:after]
            topics.append(route.topic)
            payloads.append(payload)
            if qos:
                if exact and targets.list and not flags & RETAIN:
                    parts += (data[pos:topic_end], pid, data[topic_end + 2 : after] if v5 else payload)
                pids.append(pid)
                if qos == 2:
                    inbound.add(pid)  # type: ignore[union-attr]
            pos = after
            if enough:
                break
    finally:
        if len(payloads) > stretch_row:
            close_stretch()
        if pids:
            promise()
        row = len(payloads)
        if rows.properties is not None or rows.expiries is not None:
            _pad(rows, row)
        tick.bytes += pos - began
        broker.counters.messages_received += row - begun + again
    return pos


def _describe(rows: Any, row: int, n: int, meaning: Meaning) -> None:
    """What properties say of rows row … row+n-1, in the columns that only some messages have."""
    if meaning.passed_on:
        column = rows.properties
        if column is None:
            column = rows.properties = []
        if len(column) < row:
            column += [b""] * (row - len(column))
        column += [meaning.passed_on] * n
    if meaning.expiry != NO_EXPIRY:
        column = rows.expiries
        if column is None:
            column = rows.expiries = []
        if len(column) < row:
            column += [NO_EXPIRY] * (row - len(column))
        column += [meaning.expiry] * n


def _pad(rows: Any, row: int) -> None:
    """All columns have the same length again."""
    if rows.properties is not None and len(rows.properties) < row:
        rows.properties += [b""] * (row - len(rows.properties))
    if rows.expiries is not None and len(rows.expiries) < row:
        rows.expiries += [NO_EXPIRY] * (row - len(rows.expiries))


def _alike(data: bytes, pos: int, stride: int, content: int, pid: int, end: int) -> int:
    """How many packets from `pos` on are `stride` bytes long and have the same first `content` bytes, their packet ids
    at `pid` aside.

    Devices often send readings of one size. Then whole columns of the buffer are compared instead of packets: byte j
    of every packet at once. Less than BLOCK_MIN is not worth it, and reported as 0."""
    if pid < 0:
        if not data.startswith(data[pos : pos + content], pos + stride):
            return 0
    elif not data.startswith(data[pos : pos + pid], pos + stride):
        return 0
    count = (end - pos) // stride
    stop = pos + count * stride
    for at in range(pos, pos + content):
        if 0 <= at - pos - pid < 2 and pid >= 0:
            continue
        column = data[at:stop:stride]
        same = data[at : at + 1]
        if column != same * count:
            count -= len(column.lstrip(same))
            if count < BLOCK_MIN:
                return 0
            stop = pos + count * stride
    return count


def _ids(data: bytes, pos: int, n: int, stride: int) -> list[bytes]:
    """The packet ids of `n` alike packets, the first of which stands at `pos`; none if one of them is 0.

    Clients count: then they are a slice of what is there already, and none of them is made anew."""
    high, low = data[pos : pos + n * stride : stride], data[pos + 1 : pos + n * stride : stride]
    first = high[0] << 8 | low[0]
    if low == _LOW[first : first + n] and high == _HIGH[first : first + n]:
        return PIDS[first : first + n]
    ids = [data[i : i + 2] for i in range(pos, pos + n * stride, stride)]
    return [] if NO_PID in ids else ids


def _meaning(broker: Broker, link: Link, data: bytes, pos: int, after: int) -> tuple[Meaning, int]:
    """What the properties at `pos` say, and where they end. Devices repeat themselves: the latest are remembered."""
    check_text = broker.config.mqtt.check_payload_format
    size = data[pos]
    content = pos + 1 + size
    if size >= 0x80:
        properties, passed_on, size = read_properties(data[pos:after], 0, PUBLISH_PACKET)
        broker.spent += len(properties.user) // 4
        return _said(check_text, properties, passed_on, False), pos + size
    if content > after:
        raise MalformedPacket("properties are longer than their packet")
    block = data[pos:content]
    known: Meaning | None = link.blocks.get(block)
    if known is None:
        properties, passed_on, _ = read_properties(block, 0, PUBLISH_PACKET)
        expiry = properties.message_expiry
        told = passed_on if expiry is None else expiry_property(expiry) + passed_on
        known = _said(check_text, properties, passed_on, told == block[1:])
        if len(link.blocks) >= PROPERTY_BLOCKS_MAX:
            link.blocks.clear()
        link.blocks[block] = known
    return known, content


def _said(check_text: bool, properties: Properties, passed_on: bytes, exact: bool) -> Meaning:
    if properties.subscription_ids:
        raise ProtocolViolation("subscription identifier in a client's PUBLISH")  # [MQTT-3.3.4-6]
    expiry = properties.message_expiry
    text = check_text and properties.payload_format == UTF8_PAYLOAD
    return Meaning(passed_on, NO_EXPIRY if expiry is None else expiry, properties.topic_alias or 0, text, exact)


def _alias(link: Link, topic: bytes, alias: int) -> bytes:
    if alias > link.aliases_in_max:
        raise Refused(f"topic alias {alias}, the maximum is {link.aliases_in_max}", reason=Reason.TOPIC_ALIAS_INVALID)
    if topic:
        check_topic(topic)
        link.aliases_in[alias] = topic
        return topic
    known = link.aliases_in.get(alias)
    if known is None:
        raise ProtocolViolation(f"topic alias {alias} has not been set")
    return known


def _admit(broker: Broker, link: Link, topic: bytes) -> Route:
    """The route of a topic that is not ready. A refusal is one message's; a violation ends the connection."""
    if not topic and link.v5:
        raise ProtocolViolation("neither topic nor topic alias")  # 3.3.2.1
    table = broker.table
    before = table.work
    route = table.admit(topic)
    broker.spent += table.work - before
    return route


def _check_text(payload: bytes) -> None:
    try:
        payload.decode()
    except UnicodeDecodeError as error:
        raise Refused("the payload is not the UTF-8 it claims", reason=Reason.PAYLOAD_FORMAT_INVALID) from error


def _refuse(broker: Broker, link: Link, qos: int, error: PeerError, pid: bytes) -> None:
    """A message that is not taken. MQTT 5 has words for it; an MQTT 3 client is acknowledged and must not retry."""
    broker.spent += 2  # an error, and an answer that says why
    broker.counters.refused[f"PUBLISH 0x{error.reason:02X}"] += 1
    broker.counters.dropped["refused"] += 1
    if not link.refused:
        # Once a connection: the counters have the rest, and nobody can fill the log with it.
        link.refused = True
        about = {"client": link.client_id, "reason": f"0x{error.reason:02X}", "why": str(error)}
        broker.report("publish.refused", about)
    reason = error.reason if link.v5 else 0
    if qos == 1:
        broker.hold(link, Puback(int.from_bytes(pid, "big"), reason, broker.why(link, error)))
    elif qos == 2:
        broker.hold(link, Pubrec(int.from_bytes(pid, "big"), reason, broker.why(link, error)))


def on_publish(broker: Broker, link: Link, packet: Publish) -> None:
    """Only what the loop could not read comes here, and the decoder has said why before."""
    raise MalformedPacket("a PUBLISH that cannot be read")


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


def _received_before(broker: Broker, link: Link, session: Session, pid: bytes) -> None:
    """The answer to a message that came again: stored, unless the log has refused it meanwhile."""
    link.asked[pid] -= 1
    if not link.asked[pid]:
        del link.asked[pid]
    link.outbox.given(CALL_BYTES)
    known = session.inbound is not None and pid in session.inbound
    if known or not broker.storing.took_back(session, pid):  # no longer known: its PUBREL came with it
        link.outbox.put(b"\x50\x02" + pid)
        broker.counters.messages_sent += 1
    elif link.v5:
        link.outbox.put(b"\x50\x03" + pid + b"\x97")
    else:
        broker.close(link, 0x97, "the log takes no more messages")
