"""Plays a script to the broker under test and to the reference, and holds the one against the other."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from agreement import Agreement, Client
from driver import Simulated
from forgiveness import TODAY
from packets import LEVELS_MAX, Acknowledge, Around, Break, Come, Cuts, Script, Send
from reference import Reference, Settings

from tidegate.wire import Packet, Puback, Pubrec


class Play:
    def __init__(self, script: Script, forgiven: frozenset[str] = TODAY) -> None:
        self.script = script
        settings = Settings(
            receive_maximum=script.receive_maximum,
            packet_bytes_max=script.packet_bytes_max,
            topic_levels_max=LEVELS_MAX,
        )
        sut = Simulated(
            late=script.late,
            hurry=script.hurry,
            tail_bytes=script.tail_bytes,
            receive_maximum=script.receive_maximum,
            packet_bytes_max=script.packet_bytes_max,
            topic_levels_max=LEVELS_MAX,
            partitions=script.partitions,
            prompt=script.prompt,
        )
        self.agreement = Agreement(sut, Reference(settings, forgiven, prompt=sut.prompt))
        self.clients: dict[int, Client] = {}
        self.kept: dict[int, bytes] = {}  # bytes that come with the client's next step
        self.all: list[Client] = []

    def run(self) -> list[Client]:
        """Every connection there was, with what its client got."""
        for step in self.script.steps:
            match step:
                case Come():
                    self._come(step)
                case Send() if step.actor in self.clients:
                    self._pour(step.actor, step.data, step.cuts)
                case Acknowledge() if step.actor in self.clients:
                    self._pour(step.actor, self._acknowledgements(step), step.cuts)
                case Break() if step.actor in self.clients:
                    self.kept.pop(step.actor, None)
                    self.agreement.lost(self.clients.pop(step.actor))
                case Around("advance"):
                    self.agreement.advance(step.seconds)
                case Around():
                    self._happen(step.what)
        self._finish()
        return self.all

    def _come(self, step: Come) -> None:
        self.kept.pop(step.actor, None)
        client = self.agreement.connect(self.script.actors[step.actor].name)
        self.clients[step.actor] = client
        self.all.append(client)
        self._pour(step.actor, step.connect, step.cuts)

    def _pour(self, actor: int, data: bytes, cuts: Cuts) -> None:
        """Feed what the client has to say in pieces."""
        client = self.clients[actor]
        data = self.kept.pop(actor, b"") + data
        places = [0, *sorted({at % (len(data) + 1) for at in cuts.at}), len(data)]
        for number, (start, end) in enumerate(pairwise(places)):
            if end == len(data) and cuts.keep_last and start:
                self.kept[actor] = data[start:]
                return
            self.agreement.feed(client, data[start:end])
            for what in cuts.between[number % len(cuts.between)].split():
                self._happen(what)

    def _happen(self, what: str) -> None:
        if what.startswith("announce"):
            self.agreement.announce(int(what.removeprefix("announce")))
        else:
            getattr(self.agreement, what)()

    def _acknowledgements(self, step: Acknowledge) -> bytes:
        owed = self.clients[step.actor].to_acknowledge
        picked: list[Packet] = [owed.pop(place % len(owed)) for place in step.places or (0,) * len(owed) if owed]
        if step.refuse:
            picked = [replace(p, reason=0x97) if isinstance(p, Puback | Pubrec) else p for p in picked]
        return self.script.actors[step.actor].say(*picked)

    def _finish(self) -> None:
        """Everyone says all they have to say, and acknowledges what they get, till nothing moves any more."""
        for actor in list(self.clients):
            self._pour(actor, b"", Cuts())
        self.agreement.settle()
        while any(client.to_acknowledge and not client.link.closed for client in self.clients.values()):
            for actor in list(self.clients):
                self._pour(actor, self._acknowledgements(Acknowledge(actor)), Cuts())
            self.agreement.settle()
