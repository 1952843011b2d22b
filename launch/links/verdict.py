"""Which node is cut off, by what all nodes have found of each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

__all__ = ["CutOff", "Found", "cut_off"]

MOST_PAIRS_NAMED = 4


@dataclass(frozen=True, slots=True)
class Found:
    """What a node has found: which others it `tried`, which of these it `reached` by a connection, and whose datagrams it has `heard`."""

    tried: Collection[int]
    reached: Collection[int]
    heard: Collection[int]


@dataclass(frozen=True, slots=True)
class CutOff:
    """The node to blame, and what is told of it."""

    node: int
    described: str


def cut_off(found: Mapping[int, Found], name: Callable[[int], str], *, joining: bool) -> CutOff | None:
    """Return which node does not reach others, or is not reached by them; None where all that have answered reach each other.

    Both nodes of a pair have to say it. While tasks are `joining` each other, a connection that only one side can make is none: later
    those that there are go on. It is the node that all failing pairs have in common; where several can be, the one of
    most pairs, and of equals the last, as the first ones have other work for the run; then the pairs are named.
    """
    lost: dict[tuple[int, int], set[tuple[int, int]]] = {}
    filtered: set[tuple[int, int]] = set()
    for pair in combinations(sorted(found), 2):
        ways = (pair, pair[::-1])
        if any(to not in found[sender].tried for sender, to in ways):
            continue
        refused = {(sender, to) for sender, to in ways if to not in found[sender].reached}
        dead = {(sender, to) for sender, to in ways if sender not in found[to].heard}
        if len(refused) == 2 and (dead or joining):
            lost[pair] = dead
        elif refused and joining:
            lost[pair] = refused
            filtered |= refused
    if not lost:
        return None
    pairs = Counter(node for pair in lost for node in pair)
    node = max(pairs, key=lambda node: (pairs[node], node))
    if [each for each in pairs if pairs[each] == len(lost)] == [node]:
        others = _listed(name(each) for each in sorted(pairs) if each != node)
        dead = set().union(*lost.values())
        return CutOff(node, f"{name(node)} is cut off from {others}{_direction(node, dead, len(lost)) if not filtered else ''}")
    told = [f"{name(one)} and {name(other)} do not reach each other{_way(ways, filtered)}" for (one, other), ways in lost.items()]
    more = f"; and {len(told) - MOST_PAIRS_NAMED} more pairs" if len(told) > MOST_PAIRS_NAMED else ""
    return CutOff(node, "; ".join(told[:MOST_PAIRS_NAMED]) + more)


def _direction(node: int, dead: Collection[tuple[int, int]], others: int) -> str:
    """Say which way is dead between a node and so many others, where it is the same with all."""
    if len(dead) == others and all(to == node for _, to in dead):
        return f": nothing that they send arrives at node {node}"
    if len(dead) == others and all(sender == node for sender, _ in dead):
        return f": nothing that node {node} sends arrives there"
    return ""


def _way(lost: Collection[tuple[int, int]], filtered: Collection[tuple[int, int]]) -> str:
    """Say which way is dead between two nodes, where one is."""
    if len(lost) != 1:
        return ""
    ((sender, to),) = lost
    if (sender, to) in filtered:
        return f": node {sender} cannot connect to node {to}"
    return f": nothing that node {sender} sends arrives at node {to}"


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
