"""Whom to blame where several tasks or nodes have ended: the first cause, and none of its victims.

A task that loses a peer dies of it, often before the driver hears of the peer. So whoever names the loss of a peer as its reason comes
last. The clocks of two machines are never compared: on one node its own count of deaths decides, between nodes the order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...engine.peer_loss import tells_of_a_lost_peer
from ...engine.protocol.messages import Message

__all__ = ["Fall", "first_cause", "is_victim"]


@dataclass(frozen=True, slots=True)
class Fall:
    """The end of a task, or of a whole node where `death` is None. `victim`: it ended because it had lost a peer."""

    node: int
    death: Message | None
    victim: bool = False

    @property
    def order(self) -> float:
        """Its place among the falls of its node; the node's own is the last."""
        return float("inf") if self.death is None else self.death["order"]


def is_victim(death: Message, error: Message | None) -> bool:
    """Return whether a task ended because it had lost a peer: `error`, its own report, says so, or else the end of its log.

    What a signal has ended is no victim, whatever it had logged before, save by SIGABRT: so frameworks end themselves.
    """
    if error is not None:
        return bool(error.get("peer_lost"))
    return death["signal"] in (None, "SIGABRT") and any(map(tells_of_a_lost_peer, death["tail"]))


def first_cause(falls: Sequence[Fall]) -> Fall:
    """Return the fall to blame of `falls`, which are in the order of their arrival; at least one.

    Victims are blamed only where there is nothing else; of equals the first that arrived, or one of its node that fell before it.
    """
    equals = [fall for fall in falls if not fall.victim] or list(falls)
    return min((fall for fall in equals if fall.node == equals[0].node), key=lambda fall: fall.order)
