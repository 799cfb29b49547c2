"""Where messages go: topic filters, the subscription index, shared groups and retained messages.

Here belongs what decides, from a topic and what has been subscribed or retained, who or what fits.

    filters       what is well formed, what matches what, `$share` and `$replay`
    index         which subscriptions match this topic
    groups        which member of a shared group gets this message
    retained      the latest message of each topic, and which of them match a filter
    topic_order   topics sorted by levels
    topic_scan    which topics of such an order match a filter, in steps: for `retained` and `topic_set`
    topic_set     a set of topics that can be asked which of them match

Pure: no I/O, clock, asyncio or global random source; time and seeds come in as arguments. Topics, filters and
client ids are `bytes`. May import `tidegate.errors` and `tidegate.limits` only.
"""

from tidegate.router.filters import (
    LEVELS_MAX,
    ParsedFilter,
    Start,
    check_filter,
    check_form,
    check_topic,
    has_wildcard,
    literal_prefix,
    matches,
    parse,
    parse_start,
)
from tidegate.router.groups import STRATEGIES, Strategy, make_strategy
from tidegate.router.index import SubscriptionIndex
from tidegate.router.retained import PutOutcome, Retained, RetainedScan, RetainedStore
from tidegate.router.topic_set import TopicSet, TopicSetScan

__all__ = [
    "LEVELS_MAX",
    "STRATEGIES",
    "ParsedFilter",
    "PutOutcome",
    "Retained",
    "RetainedScan",
    "RetainedStore",
    "Start",
    "Strategy",
    "SubscriptionIndex",
    "TopicSet",
    "TopicSetScan",
    "check_filter",
    "check_form",
    "check_topic",
    "has_wildcard",
    "literal_prefix",
    "make_strategy",
    "matches",
    "parse",
    "parse_start",
]
