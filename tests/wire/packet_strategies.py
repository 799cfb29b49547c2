"""Hypothesis strategies for packets that are valid in a given version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tidegate.wire import (
    NO_PROPERTIES,
    Auth,
    Connack,
    Connect,
    Disconnect,
    FilterRequest,
    Packet,
    Pingreq,
    Pingresp,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    Will,
)

VERSIONS = (3, 4, 5)

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12).map(
    str.encode
)
topics = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0+#"), min_size=1, max_size=12
).map(str.encode)
filters = texts.filter(bool)
binaries = st.binary(max_size=12)
packet_ids = st.integers(1, 65_535)
u16 = st.integers(0, 65_535)
u32 = st.integers(0, 2**32 - 1)
bits = st.integers(0, 1)
flags = st.booleans()
users = st.lists(st.tuples(texts, texts), max_size=3).map(tuple)
subscription_ids = st.integers(1, 268_435_455)

# The value of each property, and, below, who carries which. Not derived from the codec's table, so that a
# slip there shows up here; test_wire_against_paho compares that table with paho's.
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "payload_format": bits,
    "message_expiry": u32,
    "content_type": texts,
    "response_topic": topics,
    "correlation_data": binaries,
    "session_expiry": u32,
    "assigned_client_id": texts,
    "server_keep_alive": u16,
    "auth_method": texts,
    "auth_data": binaries,
    "request_problem_info": flags,
    "will_delay": u32,
    "request_response_info": flags,
    "response_info": texts,
    "server_reference": texts,
    "reason_string": texts,
    "receive_maximum": st.integers(1, 65_535),
    "topic_alias_maximum": u16,
    "topic_alias": st.integers(1, 65_535),
    "maximum_qos": bits,
    "retain_available": flags,
    "maximum_packet_size": st.integers(1, 2**32 - 1),
    "wildcard_available": flags,
    "subscription_ids_available": flags,
    "shared_available": flags,
}
PASSED_ON = ("payload_format", "content_type", "response_topic", "correlation_data")
_MESSAGE = (*PASSED_ON, "message_expiry")


def _properties(
    *names: str, user: bool = True, **more: st.SearchStrategy[Any]
) -> st.SearchStrategy[Properties]:
    optional = {name: st.none() | _VALUES[name] for name in names}
    if user:
        optional["user"] = users
    return st.just(NO_PROPERTIES) | st.builds(Properties, **optional, **more)


_connect_properties = _properties(
    "session_expiry",
    "auth_method",
    "request_problem_info",
    "request_response_info",
    "receive_maximum",
    "topic_alias_maximum",
    "maximum_packet_size",
) | st.builds(Properties, auth_method=texts, auth_data=binaries)
_connack_properties = _properties(
    "session_expiry",
    "assigned_client_id",
    "server_keep_alive",
    "auth_method",
    "auth_data",
    "response_info",
    "server_reference",
    "reason_string",
    "receive_maximum",
    "topic_alias_maximum",
    "maximum_qos",
    "retain_available",
    "maximum_packet_size",
    "wildcard_available",
    "subscription_ids_available",
    "shared_available",
)
_publish_properties = _properties(
    *_MESSAGE, "topic_alias", subscription_ids=st.lists(subscription_ids, max_size=3).map(tuple)
)
_subscribe_properties = _properties(subscription_ids=st.lists(subscription_ids, max_size=1).map(tuple))
_ack_properties = _properties("reason_string")
_auth_properties = st.builds(
    Properties,
    auth_method=texts,
    auth_data=st.none() | binaries,
    reason_string=st.none() | texts,
    user=users,
)


@dataclass(frozen=True, slots=True)
class Spoken:
    """A packet and the version it is spoken in."""

    packet: Packet
    version: int


def _connects(version: int, props: Any) -> st.SearchStrategy[Connect]:
    wills = st.builds(
        Will,
        topics,
        binaries,
        st.integers(0, 2),
        flags,
        props(_properties(*_MESSAGE, "will_delay")),
    )

    def legal(c: Connect) -> bool:
        if version == 5:
            return True
        if c.password is not None and c.username is None:
            return False
        return bool(c.client_id) or (version == 4 and c.clean_start)

    return st.builds(
        Connect,
        st.just(version),
        texts,
        flags,
        u16,
        st.none() | wills,
        st.none() | texts,
        st.none() | binaries,
        props(_connect_properties),
    ).filter(legal)


def _publishes(version: int, props: Any) -> st.SearchStrategy[Publish]:
    def build(
        topic: bytes, payload: bytes, qos: int, retain: bool, dup: bool, pid: int, p: Properties
    ) -> Publish:
        return Publish(topic, payload, qos, retain, dup and qos > 0, pid if qos else 0, p)

    common = (binaries, st.integers(0, 2), flags, flags, packet_ids)
    plain = st.builds(build, topics, *common, props(_publish_properties))
    if version != 5:
        return plain
    aliased = _publish_properties.filter(lambda p: p.topic_alias is not None)
    return plain | st.builds(build, st.just(b""), *common, aliased)


def packets(version: int) -> st.SearchStrategy[Packet]:
    v5 = version == 5

    def props(strategy: st.SearchStrategy[Properties]) -> st.SearchStrategy[Properties]:
        return strategy if v5 else st.just(NO_PROPERTIES)

    def reasons(codes: bytes, codes_v3: bytes = b"\0") -> st.SearchStrategy[int]:
        return st.sampled_from(list(codes if v5 else codes_v3))

    ack = props(_ack_properties)
    published, released = reasons(b"\x00\x10\x80\x83\x87\x90\x91\x97\x99"), reasons(b"\x00\x92")
    sub = reasons(b"\x00\x01\x02\x80\x83\x87\x8f\x91\x97\x9e\xa1\xa2", b"\x00\x01\x02\x80")
    unsub = reasons(b"\x00\x11\x80\x83\x87\x8f\x91")
    refusals = reasons(b"\x80\x81\x84\x85\x86\x87\x88\x89\x8a\x8c\x95\x97\x9f", b"\x84\x85\x86\x87\x88")
    present = st.just(False) if version == 3 else flags
    filter_flags = flags if v5 else st.just(False)

    def legal_request(r: FilterRequest) -> bool:
        return not (r.no_local and r.filter.startswith(b"$share/"))

    requests = st.builds(
        FilterRequest,
        filters | st.just(b"$share/g/a/#"),
        st.integers(0, 2),
        filter_flags,
        filter_flags,
        st.integers(0, 2 if v5 else 0),
    ).filter(legal_request)
    some = [
        _connects(version, props),
        st.builds(Connack, present, st.just(0), props(_connack_properties)),
        st.builds(Connack, st.just(False), refusals, props(_connack_properties)),
        _publishes(version, props),
        st.builds(Puback, packet_ids, published, ack),
        st.builds(Pubrec, packet_ids, published, ack),
        st.builds(Pubrel, packet_ids, released, ack),
        st.builds(Pubcomp, packet_ids, released, ack),
        st.builds(
            Subscribe,
            packet_ids,
            st.lists(requests, min_size=1, max_size=4).map(tuple),
            props(_subscribe_properties),
        ),
        st.builds(Suback, packet_ids, st.lists(sub, min_size=1, max_size=4).map(tuple), ack),
        st.builds(
            Unsubscribe,
            packet_ids,
            st.lists(filters, min_size=1, max_size=4).map(tuple),
            props(_properties()),
        ),
        st.builds(
            Unsuback, packet_ids, st.lists(unsub, min_size=int(v5), max_size=4 if v5 else 0).map(tuple), ack
        ),
        st.just(Pingreq()),
        st.just(Pingresp()),
        st.builds(
            Disconnect,
            reasons(b"\x00\x04\x80\x81\x82\x8e\x93\x95\x98\xa0\xa2"),
            props(_properties("session_expiry", "server_reference", "reason_string")),
        ),
    ]
    if v5:
        some.append(st.just(Auth()))
        some.append(st.builds(Auth, reasons(b"\x00\x18\x19"), _auth_properties))
    return st.one_of(some)


spoken = st.sampled_from(VERSIONS).flatmap(lambda v: st.builds(Spoken, packets(v), st.just(v)))
messages_v5 = _publishes(5, lambda strategy: strategy)
