"""Every fixed bound in one place, with its reason. What users may tune is in `config`."""

from __future__ import annotations

# One tick's messages are encoded, written and delivered in one go: this keeps a tick to a few milliseconds.
TICK_BYTES_MAX = 4 << 20

# The same for its state changes: a client that subscribes without end makes some hundred bytes of each.
TICK_CHANGES_MAX = 10_000

# Bytes queued for one connection before it counts as slow and reads from the log instead.
SEND_BYTES_MAX = 1 << 20

# The same for all connections together; above it, those that have less than their share queued go on.
SENDING_BYTES_MAX = 256 << 20
SENDING_SHARE_BYTES = 64 << 10

# Answers of one connection that wait for the log; above it, the broker does not listen to it.
ANSWERS_BYTES_MAX = 4 << 20

# Answers queued behind a socket that is full, while others may come; above it, the broker does not listen to the client
# either. And how long one without a keep-alive may take nothing of them at all.
ANSWERS_UNREAD_BYTES_MAX = 256 << 10
ANSWERS_UNREAD_S = 60

# How long a connection that is being closed may take to accept its last bytes.
LINGER_S = 5.0

# Messages written but not yet on disk; publishers are paused above it until the disk has caught up.
UNSTORED_BYTES_MAX = 64 << 20

# Ready-made routes kept. Past it the cache starts anew: a flood of topic names costs matching, not memory.
ROUTES_MAX = 100_000
ROUTES_BYTES_MAX = 32 << 20

# A changed filter that matches more of them than this makes the cache start anew as well: quicker than one by one.
ROUTES_STEP = 2_000

# The work of a tick beyond the packets that came: some milliseconds. See `delivery/gate`.
GATE_UNITS = 1_000

# What packets other than messages and plain acknowledgements may cost in a tick, in units of about 10 µs, before those
# who send them wait for the next; and the bytes that a connection is read from before others get their turn.
SPENT_MAX = 400
READ_TURN_BYTES = 512 << 10

# What a reader that is behind takes from the log in one step, so that all get their turn.
CATCH_UP_BYTES = 256 << 10
CATCH_UP_ROWS = 256

# What a read may spend on finding out which topics are wanted before other reads get their turn, and on the topics of
# the frames that it has read; in units of some microseconds.
SEARCH_WORK_MAX = 2_000
WANTED_WORK_MAX = 20_000

# Filters of one SUBSCRIBE or UNSUBSCRIBE, or of a session that ends, that are worked on in one step.
FILTERS_STEP = 32

# Readers that an announcement is handed to in one go, beyond the first of each stretch; the others read it in turns.
FANOUT_FREE, FANOUT_MAX = 16, 500

# Filters that match the topics of a step: a topic that thousands of them match costs milliseconds.
MATCHES_STEP = 2_000

# How often a client's packet may repeat a property: each is an object to make. Above it the packet is refused.
REPEATED_PROPERTIES_MAX = 1_000

# Decoded messages kept for all readers that are behind together; above it they are read again from disk.
CATCH_UP_HELD_BYTES_MAX = 64 << 20

# Files of the lake kept decoded, for all who read there: two or three of the usual size.
LAKE_CACHE_BYTES_MAX = 256 << 20

# What the pipeline tells the broker at once, how many of its verdicts are shown, and how many losses are known.
ARCHIVE_NOTE_BYTES_MAX = 1 << 20
VERDICTS_MAX = 100
LOST_MAX = 1000

# Topics whose match a reader that is behind remembers.
READER_TARGETS_MAX = 4096

# Retained messages looked at for one connection in a step, so that `#` over a million cannot hold the loop.
RETAINED_STEP = 64

# Retained matches waiting for one connection: one iterator a SUBSCRIBE filter.
RETAINED_STREAMS_MAX = 10_000

# Topics of the broker's own ($SYS), which take no room from the users' retained messages.
OWN_TOPICS_MAX = 10_000

# State changes written since the last snapshot before the next one is due.
SNAPSHOT_CHANGES_BYTES = 64 << 20

# Sessions, groups or retained messages that a running snapshot copies per tick, and from how many records on a session
# or group is the last of them.
SNAPSHOT_STEP = 200
SNAPSHOT_RECORDS_STEP = 2_000

# Connections that are waiting for their CONNECT may hold no more than this of it.
CONNECT_BYTES_MAX = 256 << 10

# A position is `partition << PARTITION_SHIFT | offset`: one integer, ordered within its partition.
PARTITION_SHIFT = 52

# Packet identifiers are 1 … 65535.
PACKET_IDS = 65535

# Property blocks of PUBLISH packets whose meaning a connection remembers.
PROPERTY_BLOCKS_MAX = 64
