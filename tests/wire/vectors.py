"""Raw packets: valid ones with the packet they mean, invalid ones with the reason code they deserve.

For codec and server tests alike; nothing in here imports the codec's functions, only its dataclasses.
`raw` is always one whole packet with a right remaining length, so that a server test can write it to a
socket as it is. Bytes under "recorded" were sent by mosquitto_pub / mosquitto_sub 2.0.11 to a recording
socket.
"""

from __future__ import annotations

from dataclasses import dataclass

from packet_bytes import framed
from tidegate.wire.packets import (
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

ALL = (3, 4, 5)
V3 = (3, 4)
V311_AND_5 = (4, 5)
V5 = (5,)


@dataclass(frozen=True, slots=True)
class Valid:
    name: str
    raw: bytes
    packet: Packet
    versions: tuple[int, ...] = V5
    canonical: bool = True  # encoding the packet gives these very bytes
    from_server: bool = False


@dataclass(frozen=True, slots=True)
class Invalid:
    name: str
    raw: bytes
    reason: int
    versions: tuple[int, ...] = V5
    attacks: tuple[str, ...] = ()


def _h(text: str) -> bytes:
    return bytes.fromhex(text)


_PASSED_ON = (
    b"\x03\x00\x0atext/plain\x26\x00\x01a\x00\x011\x26\x00\x01a\x00\x012\x08\x00\x03r/1\x09\x00\x02c0\x01\x01"
)

RECORDED = (
    Valid(
        "recorded: 3.1 CONNECT with everything",
        _h(
            "103100064d514973647003ee001e00056465762d31000a676f6e652f6465762d31000362796500"
            "03616e6e0006733363726574"
        ),
        Connect(3, b"dev-1", True, 30, Will(b"gone/dev-1", b"bye", 1, True), b"ann", b"s3cret"),
        (3,),
    ),
    Valid(
        "recorded: 3.1.1 CONNECT with everything",
        _h(
            "102f00044d51545404ee001e00056465762d31000a676f6e652f6465762d3100036279650003616e6e"
            "0006733363726574"
        ),
        Connect(4, b"dev-1", True, 30, Will(b"gone/dev-1", b"bye", 1, True), b"ann", b"s3cret"),
        (4,),
    ),
    Valid(
        "recorded: 5.0 CONNECT with everything",
        _h(
            "103400044d51545405ee001e0321001400056465762d3100000a676f6e652f6465762d310003627965"
            "0003616e6e0006733363726574"
        ),
        Connect(
            5,
            b"dev-1",
            True,
            30,
            Will(b"gone/dev-1", b"bye", 1, True),
            b"ann",
            b"s3cret",
            Properties(receive_maximum=20),
        ),
    ),
    Valid(
        "recorded: 5.0 CONNECT with will properties",
        _h(
            "103900044d5154540506003c0f1100000e102100142600016b00017600056465762d310c1800000005"
            "260001770001310004676f6e650003627965"
        ),
        Connect(
            5,
            b"dev-1",
            True,
            60,
            Will(
                b"gone",
                b"bye",
                properties=Properties(will_delay=5, user=((b"w", b"1"),)),
                passed_on=b"\x26\x00\x01w\x00\x011",
            ),
            properties=Properties(session_expiry=3600, receive_maximum=20, user=((b"k", b"v"),)),
        ),
        canonical=False,  # the order of properties is the sender's
    ),
    Valid(
        "recorded: 3.x PUBLISH",
        _h("340b0003612f62000132312e35"),
        Publish(b"a/b", b"21.5", 2, packet_id=1),
        V3,
    ),
    Valid(
        "recorded: 5.0 PUBLISH", _h("340c0003612f6200010032312e35"), Publish(b"a/b", b"21.5", 2, packet_id=1)
    ),
    Valid(
        "recorded: 5.0 PUBLISH with properties",
        _h(
            "33390003612f6200012d03000a746578742f706c61696e020000003c26000161000131260001610001"
            "32080003722f310900026330010132312e35"
        ),
        Publish(
            b"a/b",
            b"21.5",
            1,
            True,
            False,
            1,
            Properties(
                payload_format=1,
                message_expiry=60,
                content_type=b"text/plain",
                response_topic=b"r/1",
                correlation_data=b"c0",
                user=((b"a", b"1"), (b"a", b"2")),
            ),
            _PASSED_ON,
        ),
        canonical=False,
    ),
    Valid(
        "recorded: 3.x SUBSCRIBE",
        _h("821700010005612f2b2f2301000a2473686172652f672f7801"),
        Subscribe(1, (FilterRequest(b"a/+/#", 1), FilterRequest(b"$share/g/x", 1))),
        V3,
    ),
    Valid(
        "recorded: 5.0 SUBSCRIBE",
        _h("82180001000005612f2b2f2301000a2473686172652f672f7801"),
        Subscribe(1, (FilterRequest(b"a/+/#", 1), FilterRequest(b"$share/g/x", 1))),
    ),
    Valid("recorded: 3.x UNSUBSCRIBE", _h("a209000200056f6c642f23"), Unsubscribe(2, (b"old/#",)), V3),
    Valid("recorded: 5.0 UNSUBSCRIBE", _h("a20a00020000056f6c642f23"), Unsubscribe(2, (b"old/#",))),
    Valid("recorded: PUBACK", _h("40020007"), Puback(7), ALL),
    Valid("recorded: PUBREC", _h("50020008"), Pubrec(8), ALL),
    Valid("recorded: PUBREL", _h("62020001"), Pubrel(1), ALL),
    Valid("recorded: PUBCOMP", _h("70020008"), Pubcomp(8), ALL),
    Valid("recorded: DISCONNECT", _h("e000"), Disconnect(), ALL),
)

VALID = (
    *RECORDED,
    Valid("PINGREQ", _h("c000"), Pingreq(), ALL),
    Valid("PINGRESP", _h("d000"), Pingresp(), ALL),
    Valid("CONNACK, session present", _h("20020100"), Connack(True), (4,)),
    Valid("CONNACK, not authorised", _h("20020005"), Connack(False, 0x87), V3),
    Valid(
        "5.0 CONNACK with properties",
        _h("200a000007220010 2401 2500"),
        Connack(properties=Properties(topic_alias_maximum=16, maximum_qos=1, retain_available=False)),
    ),
    Valid(
        "5.0 CONNECT, empty client id, not clean",
        _h("100d00044d51545405000000000000"),
        Connect(5, b"", False),
    ),
    Valid(
        "3.1.1 CONNECT, empty client id, clean", _h("100c00044d51545404020000 0000"), Connect(4, b""), (4,)
    ),
    Valid(
        "5.0 CONNECT, password without user name",
        _h("101000044d51545405420000000000000178"),
        Connect(5, b"", password=b"x"),
    ),
    Valid(
        "3.1 CONNECT whose user name is missing though its flag is set",
        _h("100f00064d514973647003c20000000178"),
        Connect(3, b"x"),
        (3,),
        canonical=False,
    ),
    Valid("PUBLISH QoS 0, empty payload", _h("3003000161"), Publish(b"a"), V3),
    Valid("PUBLISH, DUP", _h("3a05000161000a"), Publish(b"a", b"", 1, dup=True, packet_id=10), V3),
    Valid(
        "5.0 PUBLISH by alias", _h("30060000032300 07"), Publish(b"", properties=Properties(topic_alias=7))
    ),
    Valid(
        "5.0 PUBLISH to a subscriber, two subscription identifiers",
        _h("300900016105 0b010bac02"),
        Publish(b"a", properties=Properties(subscription_ids=(1, 300))),
        from_server=True,
    ),
    Valid(
        "PUBLISH, non-ASCII topic with byte order mark",
        framed(0x30, b"\x00\x05\xef\xbb\xbf\xc3\xa4"),
        Publish("\ufeffä".encode()),
        V3,
    ),
    Valid("5.0 PUBACK with reason", _h("4003000710"), Puback(7, 0x10)),
    Valid("5.0 PUBACK with reason and no properties", _h("400400071000"), Puback(7, 0x10), canonical=False),
    Valid(
        "5.0 PUBREC with reason string",
        _h("50090008 97051f00026e6f"),
        Pubrec(8, 0x97, Properties(reason_string=b"no")),
    ),
    Valid(
        "3.1 CONNECT with unused header flags",
        _h("141500064d51497364700304003c000178000177000179"),
        Connect(3, b"x", False, 60, Will(b"w", b"y")),
        (3,),
        canonical=False,
    ),
    Valid(
        "3.1 CONNECT with a will of QoS 2, not clean",
        _h("101500064d51497364700314003c000178000177000179"),
        Connect(3, b"x", False, 60, Will(b"w", b"y", 2)),
        (3,),
    ),
    Valid(
        "3.1 CONNECT with will QoS and will retain but no will",
        _h("100f00064d5149736470033a003c000178"),
        Connect(3, b"x", True, 60),
        (3,),
        canonical=False,
    ),
    Valid("3.1 PUBACK with unused flags", _h("4f020001"), Puback(1), (3,), canonical=False),
    Valid("3.1 PINGREQ with unused flags", _h("c200"), Pingreq(), (3,), canonical=False),
    Valid("3.1 DISCONNECT with unused flags", _h("e200"), Disconnect(), (3,), canonical=False),
    Valid("3.1 PUBREL with DUP", _h("6a020001"), Pubrel(1), (3,), canonical=False),
    Valid(
        "3.1 SUBSCRIBE with DUP",
        _h("8a06000100016101"),
        Subscribe(1, (FilterRequest(b"a", 1),)),
        (3,),
        canonical=False,
    ),
    Valid(
        "5.0 SUBSCRIBE with every option",
        _h("820a0001030bac020001612e"),
        Subscribe(1, (FilterRequest(b"a", 2, True, True, 2),), Properties(subscription_ids=(300,))),
    ),
    Valid("3.1.1 SUBACK", _h("9005000100 0280"), Suback(1, (0, 2, 0x80)), V3),
    Valid("5.0 SUBACK", _h("900600010000 018f"), Suback(1, (0, 1, 0x8F))),
    Valid("3.x UNSUBACK", _h("b0020001"), Unsuback(1), V3),
    Valid("5.0 UNSUBACK", _h("b0050001000011"), Unsuback(1, (0, 0x11))),
    Valid("5.0 DISCONNECT with will", _h("e00104"), Disconnect(4)),
    Valid(
        "5.0 DISCONNECT with session expiry",
        _h("e007000511 0000000a"),
        Disconnect(0, Properties(session_expiry=10)),
    ),
    Valid("5.0 AUTH, nothing", _h("f000"), Auth()),
    Valid("5.0 AUTH, continue", _h("f00618041500016d"), Auth(0x18, Properties(auth_method=b"m"))),
)


def connect(
    flags: int = 0x02, rest: bytes = b"", properties: bytes = b"", client_id: bytes = b"x", version: int = 5
) -> bytes:
    """A CONNECT with the given flags, property block and what follows the client id."""
    head = b"\x00\x06MQIsdp\x03" if version == 3 else b"\x00\x04MQTT" + bytes((version,))
    block = bytes((len(properties),)) + properties if version == 5 else b""
    identifier = len(client_id).to_bytes(2, "big") + client_id
    return framed(0x10, head + bytes((flags,)) + b"\x00\x3c" + block + identifier + rest)


def will(properties: bytes, topic: bytes = b"w", version: int = 5) -> bytes:
    """A CONNECT whose will has the given property block and topic, and the payload "bye"."""
    block = bytes((len(properties),)) + properties if version == 5 else b""
    return connect(0x06, block + len(topic).to_bytes(2, "big") + topic + b"\x00\x03bye", version=version)


def publish(
    topic: bytes = b"a",
    properties: bytes = b"",
    first_byte: int = 0x30,
    packet_id: bytes = b"",
    version: int = 5,
) -> bytes:
    """A PUBLISH with the given property block and the payload "p"."""
    block = bytes((len(properties),)) + properties if version == 5 else b""
    return framed(first_byte, len(topic).to_bytes(2, "big") + topic + packet_id + block + b"p")


INVALID_CONNECTS = (
    Invalid("CONNECT with reserved header flags", b"\x11" + connect()[1:], 0x81, V5),
    Invalid("3.1.1 CONNECT with reserved header flags", b"\x14" + connect(version=4)[1:], 0x81, (4,)),
    Invalid("3.1.1 will QoS without a will", connect(0x12, version=4), 0x81, (4,)),
    Invalid("3.1 will QoS 3", connect(0x1E, b"\x00\x01w\x00\x00", version=3), 0x81, (3,)),
    Invalid("unknown protocol name", framed(0x10, b"\x00\x04MQTX\x04\x02\x00\x3c\x00\x01x"), 0x84, ALL),
    Invalid("protocol level 6", framed(0x10, b"\x00\x04MQTT\x06\x02\x00\x3c\x00\x00\x01x"), 0x84, ALL),
    Invalid(
        "protocol level 3 with the new name",
        framed(0x10, b"\x00\x04MQTT\x03\x02\x00\x3c\x00\x01x"),
        0x84,
        ALL,
    ),
    Invalid(
        "bridge bit in the protocol level", framed(0x10, b"\x00\x04MQTT\x84\x02\x00\x3c\x00\x01x"), 0x84, ALL
    ),
    Invalid("CONNECT that ends in the protocol name", framed(0x10, b"\x00\x04MQ"), 0x81, ALL),
    Invalid("CONNECT without a body", framed(0x10, b""), 0x81, ALL),
    Invalid("reserved CONNECT flag", connect(0x03), 0x81),
    Invalid("3.1.1 reserved CONNECT flag", connect(0x03, version=4), 0x81, (4,)),
    Invalid("will QoS without a will", connect(0x0A), 0x81, V5, ("A10",)),
    Invalid("will retain without a will", connect(0x22), 0x81, V5, ("A10",)),
    Invalid("will QoS 3", connect(0x1E, b"\x00\x00\x01w\x00\x00"), 0x81, V5, ("A10",)),
    Invalid("will flag but no will", connect(0x06), 0x81, V5, ("A10",)),
    Invalid("password without user name before 5.0", connect(0x42, b"\x00\x01p", version=4), 0x81, (4,)),
    Invalid("user name flag but no user name", connect(0x82, version=4), 0x81, (4,)),
    Invalid("password flag but no password", connect(0xC2, b"\x00\x01u", version=4), 0x81, (4,)),
    Invalid("CONNECT with bytes left over", connect(rest=b"z"), 0x81),
    Invalid("3.1.1 empty client id, not clean", connect(0x00, client_id=b"", version=4), 0x85, (4,)),
    Invalid("3.1 empty client id", connect(0x02, client_id=b"", version=3), 0x85, (3,)),
    Invalid("client id with NUL", connect(client_id=b"a\x00b"), 0x81),
    Invalid("client id with a surrogate", connect(client_id=b"\xed\xa0\x80"), 0x81),
    Invalid("user name that is not UTF-8", connect(0x82, b"\x00\x01\xff"), 0x81),
    Invalid("receive maximum 0", connect(properties=b"\x21\x00\x00"), 0x82),
    Invalid("maximum packet size 0", connect(properties=b"\x27\x00\x00\x00\x00"), 0x82),
    Invalid("request problem info 2", connect(properties=b"\x17\x02"), 0x82),
    Invalid("request response info 2", connect(properties=b"\x19\x02"), 0x82),
    Invalid("session expiry twice", connect(properties=b"\x11\x00\x00\x00\x01" * 2), 0x82),
    Invalid("authentication data without a method", connect(properties=b"\x16\x00\x01x"), 0x82),
    Invalid("unknown property", connect(properties=b"\x7f\x00"), 0x81),
    Invalid("property identifier of two bytes", connect(properties=b"\x91\x00\x00\x00\x00\x01"), 0x81),
    Invalid("PUBLISH property in CONNECT", connect(properties=b"\x01\x01"), 0x81),
    Invalid("property cut off", connect(properties=b"\x11\x00\x00"), 0x81),
    Invalid("will topic with a wildcard", will(b"", b"a/#"), 0x90, V5, ("A8", "A10")),
    Invalid("will topic empty", will(b"", b""), 0x82, V5, ("A8", "A10")),
    Invalid("will topic with NUL", will(b"", b"a\x00b"), 0x81, V5, ("A8", "A10")),
    Invalid("will topic that is not UTF-8", will(b"", b"a\xff"), 0x81, V5, ("A8", "A10")),
    Invalid("3.1 will topic with a wildcard", will(b"", b"a/#", 3), 0x82, (3,), ("A8",)),
    Invalid("3.1.1 will topic with a wildcard", will(b"", b"a/+", 4), 0x82, (4,), ("A8",)),
    Invalid("3.1.1 will topic empty", will(b"", b"", 4), 0x82, (4,), ("A8",)),
    Invalid("3.1.1 will topic with NUL", will(b"", b"a\x00b", 4), 0x81, (4,), ("A8",)),
    Invalid("3.1.1 will topic that is not UTF-8", will(b"", b"a\xff", 4), 0x81, (4,), ("A8",)),
    Invalid("3.1.1 client id with NUL", connect(client_id=b"a\x00b", version=4), 0x81, (4,)),
    Invalid("will delay twice", will(b"\x18\x00\x00\x00\x01" * 2), 0x82, V5, ("A10",)),
    Invalid("will with a topic alias", will(b"\x23\x00\x01"), 0x81, V5, ("A10",)),
    Invalid("will with a subscription identifier", will(b"\x0b\x01"), 0x81, V5, ("A10",)),
    Invalid("will with session expiry", will(b"\x11\x00\x00\x00\x01"), 0x81, V5, ("A10",)),
    Invalid("will payload format 2", will(b"\x01\x02"), 0x82, V5, ("A10",)),
    Invalid("will content type not UTF-8", will(b"\x03\x00\x01\xff"), 0x81, V5, ("A10",)),
    Invalid("will response topic with a wildcard", will(b"\x08\x00\x01#"), 0x90, V5, ("A10",)),
    Invalid("will response topic with NUL", will(b"\x08\x00\x01\x00"), 0x81, V5, ("A10",)),
    Invalid("will user property cut off", will(b"\x26\x00\x01k"), 0x81, V5, ("A10",)),
    Invalid(
        "will properties longer than the packet", connect(0x06, b"\x7f\x00\x01w\x00\x00"), 0x81, V5, ("A10",)
    ),
)

INVALID_PUBLISHES = (
    Invalid("PUBLISH QoS 3", publish(first_byte=0x36, packet_id=b"\x00\x01"), 0x81),
    Invalid("PUBLISH QoS 0 with DUP", publish(first_byte=0x38), 0x81),
    Invalid("PUBLISH packet id 0", publish(first_byte=0x32, packet_id=b"\x00\x00"), 0x82),
    Invalid("3.x PUBLISH packet id 0", publish(first_byte=0x32, packet_id=b"\x00\x00", version=4), 0x82, V3),
    Invalid("PUBLISH that ends in the topic", framed(0x30, b"\x00\x05abc"), 0x81, ALL, ("A8",)),
    Invalid("PUBLISH without packet id", framed(0x32, b"\x00\x01a"), 0x81, ALL),
    Invalid("PUBLISH without a body", framed(0x30, b""), 0x81, ALL, ("A8",)),
    Invalid("empty topic", publish(b""), 0x82, V5, ("A8",)),
    Invalid("3.x empty topic", publish(b"", version=4), 0x90, V3, ("A8",)),
    Invalid("topic with NUL", publish(b"a\x00b"), 0x81, V5, ("A8",)),
    Invalid("3.x topic with NUL", publish(b"a\x00b", version=4), 0x81, V3, ("A8",)),
    Invalid("topic with NUL and a wildcard", publish(b"a\x00/#"), 0x81, V5, ("A8",)),
    Invalid("topic with #", publish(b"a/#"), 0x90, V5, ("A8",)),
    Invalid("topic with +", publish(b"a/+/b"), 0x90, V5, ("A8",)),
    Invalid("3.x topic with +", publish(b"+", version=4), 0x90, V3, ("A8",)),
    Invalid("topic that is not UTF-8", publish(b"a/\xff"), 0x81, V5, ("A8",)),
    Invalid("3.x topic that is not UTF-8", publish(b"a/\xc3", version=4), 0x81, V3, ("A8",)),
    Invalid("topic with an overlong form", publish(b"\xc0\xaf"), 0x81, V5, ("A8",)),
    Invalid("topic with a surrogate", publish(b"\xed\xa0\x80"), 0x81, V5, ("A8",)),
    Invalid("topic above U+10FFFF", publish(b"\xf4\x90\x80\x80"), 0x81, V5, ("A8",)),
    Invalid("topic alias 0", publish(b"a", b"\x23\x00\x00"), 0x94),
    Invalid("topic alias twice", publish(b"a", b"\x23\x00\x01" * 2), 0x82),
    Invalid("payload format 2", publish(b"a", b"\x01\x02"), 0x82),
    Invalid("payload format twice", publish(b"a", b"\x01\x01" * 2), 0x82),
    Invalid("subscription identifier from a client", publish(b"a", b"\x0b\x01"), 0x82),
    Invalid("subscription identifier 0", publish(b"a", b"\x0b\x00"), 0x82),
    Invalid("will delay in PUBLISH", publish(b"a", b"\x18\x00\x00\x00\x01"), 0x81),
    Invalid("response topic with a wildcard", publish(b"a", b"\x08\x00\x03r/#"), 0x90),
    Invalid("response topic with NUL", publish(b"a", b"\x08\x00\x01\x00"), 0x81),
    Invalid("response topic empty", publish(b"a", b"\x08\x00\x00"), 0x90),
    Invalid("user property not UTF-8", publish(b"a", b"\x26\x00\x01k\x00\x01\xff"), 0x81),
    Invalid("user property with NUL", publish(b"a", b"\x26\x00\x01\x00\x00\x01v"), 0x81),
    Invalid("property length longer than the packet", framed(0x30, b"\x00\x01a\x7f"), 0x81),
    Invalid("property length of five bytes", framed(0x30, b"\x00\x01a\x80\x80\x80\x80\x01p"), 0x81),
    Invalid("property length longer than it needs", framed(0x30, b"\x00\x01a\x80\x00p"), 0x81),
    Invalid("property length missing", framed(0x30, b"\x00\x01a"), 0x81),
)

INVALID_OTHERS = (
    Invalid("packet type 0", _h("0000"), 0x81, ALL),
    Invalid("AUTH before 5.0", _h("f000"), 0x81, V3),
    Invalid("PUBACK with reserved flags", _h("41020001"), 0x81, V311_AND_5),
    Invalid("PUBREC with reserved flags", _h("52020001"), 0x81, V311_AND_5),
    Invalid("PUBREL without its flag", _h("60020001"), 0x81, ALL),
    Invalid("PUBREL with DUP", _h("6a020001"), 0x81, V311_AND_5),
    Invalid("PUBCOMP with reserved flags", _h("71020001"), 0x81, V311_AND_5),
    Invalid("PINGREQ with reserved flags", _h("c100"), 0x81, V311_AND_5),
    Invalid("PINGREQ with a body", _h("c00100"), 0x81, ALL),
    Invalid("PINGRESP with a body", _h("d00100"), 0x81, ALL),
    Invalid("DISCONNECT with reserved flags", _h("e100"), 0x81, V311_AND_5),
    Invalid("3.x DISCONNECT with a body", _h("e00100"), 0x81, V3),
    Invalid("PUBACK packet id 0", _h("40020000"), 0x82, ALL),
    Invalid("PUBREC packet id 0", _h("50020000"), 0x82, ALL),
    Invalid("PUBREL packet id 0", _h("62020000"), 0x82, ALL),
    Invalid("PUBCOMP packet id 0", _h("70020000"), 0x82, ALL),
    Invalid("PUBACK of one byte", _h("400100"), 0x81, ALL),
    Invalid("3.x PUBACK with a reason", _h("4003000100"), 0x81, V3),
    Invalid("PUBACK with an unknown reason", _h("40030001 55"), 0x82),
    Invalid("PUBREL with a PUBACK's reason", _h("6203000110"), 0x82),
    Invalid("PUBACK with bytes left over", _h("4005000100 0000"), 0x81),
    Invalid("PUBACK with session expiry", framed(0x40, b"\x00\x01\x00\x05\x11\x00\x00\x00\x01"), 0x81),
    Invalid("PUBACK with two reason strings", framed(0x40, b"\x00\x01\x00\x08" + b"\x1f\x00\x01x" * 2), 0x82),
    Invalid("SUBSCRIBE without its flag", framed(0x80, b"\x00\x01\x00\x00\x01a\x00"), 0x81),
    Invalid("SUBSCRIBE packet id 0", framed(0x82, b"\x00\x00\x00\x00\x01a\x00"), 0x82),
    Invalid("SUBSCRIBE without a filter", framed(0x82, b"\x00\x01\x00"), 0x82, V5, ("A12",)),
    Invalid("3.x SUBSCRIBE without a filter", framed(0x82, b"\x00\x01"), 0x82, V3, ("A12",)),
    Invalid("SUBSCRIBE with an empty filter", framed(0x82, b"\x00\x01\x00\x00\x00\x00"), 0x81, V5, ("A12",)),
    Invalid("SUBSCRIBE without options", framed(0x82, b"\x00\x01\x00\x00\x01a"), 0x81),
    Invalid("SUBSCRIBE with NUL", framed(0x82, b"\x00\x01\x00\x00\x01\x00\x00"), 0x81),
    Invalid("SUBSCRIBE not UTF-8", framed(0x82, b"\x00\x01\x00\x00\x01\xff\x00"), 0x81),
    Invalid("SUBSCRIBE with reserved options", framed(0x82, b"\x00\x01\x00\x00\x01a\x40"), 0x81),
    Invalid("3.x SUBSCRIBE with 5.0 options", framed(0x82, b"\x00\x01\x00\x01a\x04"), 0x81, V3),
    Invalid("SUBSCRIBE QoS 3", framed(0x82, b"\x00\x01\x00\x00\x01a\x03"), 0x82),
    Invalid("SUBSCRIBE retain handling 3", framed(0x82, b"\x00\x01\x00\x00\x01a\x30"), 0x82),
    Invalid("no local on a shared filter", framed(0x82, b"\x00\x01\x00\x00\x0a$share/g/a\x04"), 0x82),
    Invalid(
        "SUBSCRIBE with subscription identifier 0", framed(0x82, b"\x00\x01\x02\x0b\x00\x00\x01a\x00"), 0x82
    ),
    Invalid(
        "SUBSCRIBE with two subscription identifiers",
        framed(0x82, b"\x00\x01\x04\x0b\x01\x0b\x02\x00\x01a\x00"),
        0x82,
    ),
    Invalid("UNSUBSCRIBE without its flag", framed(0xA0, b"\x00\x01\x00\x00\x01a"), 0x81),
    Invalid("UNSUBSCRIBE packet id 0", framed(0xA2, b"\x00\x00\x00\x00\x01a"), 0x82),
    Invalid("UNSUBSCRIBE without a filter", framed(0xA2, b"\x00\x01\x00"), 0x82),
    Invalid("3.x UNSUBSCRIBE without a filter", framed(0xA2, b"\x00\x01"), 0x82, V3),
    Invalid("UNSUBSCRIBE with an empty filter", framed(0xA2, b"\x00\x01\x00\x00\x00"), 0x81),
    Invalid("UNSUBSCRIBE with NUL", framed(0xA2, b"\x00\x01\x00\x00\x01\x00"), 0x81),
    Invalid("UNSUBSCRIBE not UTF-8", framed(0xA2, b"\x00\x01\x00\x00\x01\xff"), 0x81),
    Invalid("3.x SUBSCRIBE with NUL", framed(0x82, b"\x00\x01\x00\x01\x00\x00"), 0x81, V3),
    Invalid("3.x SUBSCRIBE not UTF-8", framed(0x82, b"\x00\x01\x00\x01\xff\x00"), 0x81, V3),
    Invalid(
        "subscription identifier longer than it needs", framed(0x82, b"\x00\x01\x03\x0b\x81\x00\x00\x01a\x00"), 0x81
    ),
    Invalid(
        "UNSUBSCRIBE with a subscription identifier", framed(0xA2, b"\x00\x01\x02\x0b\x01\x00\x01a"), 0x81
    ),
    Invalid("CONNACK with reserved flags", _h("20020200"), 0x81, (4,)),
    Invalid("CONNACK with a reserved return code", _h("20020006"), 0x81, V3),
    Invalid("CONNACK that refuses with session present", _h("20020105"), 0x82, (4,)),
    Invalid("5.0 CONNACK with an unknown reason", _h("2003000100"), 0x82),
    Invalid("5.0 CONNACK maximum QoS 2", _h("20050000022402"), 0x82),
    Invalid("SUBACK without a reason", _h("9003000100"), 0x82),
    Invalid("3.x SUBACK with a 5.0 reason", _h("90030001 8f"), 0x82, V3),
    Invalid("UNSUBACK without a reason", _h("b003000100"), 0x82),
    Invalid("3.x UNSUBACK with a reason", _h("b003000100"), 0x81, V3),
    Invalid("DISCONNECT with an unknown reason", _h("e00155"), 0x82),
    Invalid("DISCONNECT with a topic alias", _h("e00500 03230001"), 0x81),
    Invalid("AUTH with reserved flags", _h("f100"), 0x81),
    Invalid("AUTH without a method", _h("f0021800"), 0x82),
    Invalid("AUTH with an unknown reason", _h("f00601041500016d"), 0x82),
)

INVALID = (*INVALID_CONNECTS, *INVALID_PUBLISHES, *INVALID_OTHERS)
