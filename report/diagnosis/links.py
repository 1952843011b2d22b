"""How busy was the link of each node while the run trained, and is the link why the exchange is slow?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...core.units import parse_bandwidth

__all__ = ["Link", "NetworkCause", "busiest", "exchange_seconds", "network_cause", "read_links"]

NetworkCause = Literal["link", "messages", "transfer", "waiting"]
"""What makes an exchange slow: a full link, the number of messages (their latency and overhead), the bytes for another reason, or none."""


@dataclass(frozen=True, slots=True)
class Link:
    """A node's connection while the run trained. Rates are bytes per second; fractions are of the limit, None where none is known.

    `limit_source` is ``bandwidth`` for a virtual node's limit, else the name of the interface whose speed the system states.
    """

    node: int
    sent_bytes_per_second: float | None
    received_bytes_per_second: float | None
    limit_bytes_per_second: float | None
    limit_source: str | None

    @property
    def sent_fraction(self) -> float | None:
        """Use of the sending direction."""
        return _fraction(self.sent_bytes_per_second, self.limit_bytes_per_second)

    @property
    def received_fraction(self) -> float | None:
        """Use of the receiving direction."""
        return _fraction(self.received_bytes_per_second, self.limit_bytes_per_second)

    @property
    def fraction(self) -> float | None:
        """Use of the busier direction."""
        known = [fraction for fraction in (self.sent_fraction, self.received_fraction) if fraction is not None]
        return max(known, default=None)


def _fraction(value: float | None, limit: float | None) -> float | None:
    return value / limit if value is not None and limit else None


def read_links(summary: Mapping[str, Any], job: Mapping[str, Any], env: Sequence[Mapping[str, Any]]) -> list[Link]:
    """Return each node's link, in node order, from ``summary.json``, ``job.json`` and ``env.json``.

    Bytes are those of the run over its training time, with what of it was profiled: what goes over the network is the exchange, and beside
    it next to nothing.
    """
    addresses = job.get("cluster", {}).get("addresses", ())
    found = []
    for figures in summary["per_node"]:
        node = figures["node"]
        address = addresses[node] if node < len(addresses) else None
        limit, source = _limit(job.get("bandwidth"), env[node] if node < len(env) else {}, address)
        seconds = summary["train_seconds"] + summary.get("profile_seconds", 0.0)
        sent, received = (_rate(figures[f"network_{way}_bytes"], seconds) for way in ("sent", "received"))
        found.append(Link(node, sent, received, limit, source))
    return found


def _rate(amount: float | None, seconds: float) -> float | None:
    return amount / seconds if amount is not None and seconds > 0 else None


def _limit(bandwidth: str | None, host: Mapping[str, Any], address: str | None) -> tuple[float | None, str | None]:
    """Return the limit of a node's link in bytes per second, and what says so."""
    if bandwidth is not None:
        return parse_bandwidth(bandwidth) / 8, "bandwidth"
    for name, interface in (host.get("interfaces") or {}).items():
        if address in interface["addresses"] and interface["speed_bits_per_second"]:
            return interface["speed_bits_per_second"] / 8, name
    return None, None


def busiest(links: Sequence[Link]) -> Link | None:
    """Return the link that is used most, as a fraction of its limit; None where no limit is known."""
    known = [link for link in links if link.fraction is not None]
    return max(known, key=lambda link: link.fraction or 0.0, default=None)


DOMINANT_FRACTION = 0.5
"""A cause is named where it accounts for at least this much of what it is to explain."""


def network_cause(network_fraction: float, links: Sequence[Link], calibration: Mapping[str, Any] | None, seconds: float) -> NetworkCause:
    """Return why the exchange takes `network_fraction` of a step, which is `seconds`.

    The link, where sending the bytes at its full rate takes at least half that time; the messages, where an exchange of a few bytes takes
    at least half as long as the whole one; else the bytes, on their way through memory and processor. Where the whole exchange was
    calibrated at less than half of `seconds`, it is neither of these two: each side waits for the other, or for a core.
    """
    link = busiest(links)
    if link is not None and (link.fraction or 0.0) >= DOMINANT_FRACTION * network_fraction:
        return "link"
    if (whole := exchange_seconds(calibration)) is not None and whole < DOMINANT_FRACTION * seconds:
        return "waiting"
    return "messages" if (message_fraction(calibration) or 0.0) >= DOMINANT_FRACTION else "transfer"


def exchange_seconds(calibration: Mapping[str, Any] | None) -> float | None:
    """Return how long an exchange by itself takes, for the worker where it is the longest; None if unknown."""
    workers = calibration["workers"] if calibration else ()
    return max((entry["communicate_seconds"] for entry in workers if entry["communicate_seconds"]), default=None)


def message_fraction(calibration: Mapping[str, Any] | None) -> float | None:
    """Return how long an exchange of a few bytes takes over the whole exchange, for the worker where it is the longest; None if unknown."""
    workers = calibration["workers"] if calibration else ()
    known = [entry for entry in workers if entry["communicate_seconds"] and entry["message_seconds"] is not None]
    if not known:
        return None
    longest = max(known, key=lambda entry: entry["communicate_seconds"])
    return float(min(1.0, longest["message_seconds"] / longest["communicate_seconds"]))
