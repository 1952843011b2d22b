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


def cut_off(found: Mapping[int, Found], name: Callable[[int], str]) -> CutOff | None:
    """Return which node does not reach others, or is not reached by them; None where all that have answered reach each other.

    A pair fails where neither node connects to the other, and datagrams do not arrive both ways: on a slow link that is full connections
    take too long, and a firewall may let through only one of the two. The node to blame is the one that all failing pairs have in common;
    where several can be, the one of most pairs, and of equals the last; then the pairs are named.
    """
    lost: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for pair in combinations(sorted(found), 2):
        ways = (pair, pair[::-1])
        if all(to in found[sender].tried and to not in found[sender].reached for sender, to in ways):
            dead = {(sender, to) for sender, to in ways if sender not in found[to].heard}
            if dead:
                lost[pair] = dead
    if not lost:
        return None
    pairs = Counter(node for pair in lost for node in pair)
    node = max(pairs, key=lambda node: (pairs[node], node))
    if [each for each in pairs if pairs[each] == len(lost)] == [node]:
        others = _listed(name(each) for each in sorted(pairs) if each != node)
        return CutOff(node, f"{name(node)} is cut off from {others}{_direction(node, set().union(*lost.values()), len(lost))}")
    told = [f"{name(one)} and {name(other)} do not reach each other{_way(dead)}" for (one, other), dead in lost.items()]
    more = f"; and {len(told) - MOST_PAIRS_NAMED} more pairs" if len(told) > MOST_PAIRS_NAMED else ""
    return CutOff(node, "; ".join(told[:MOST_PAIRS_NAMED]) + more)


def _direction(node: int, dead: Collection[tuple[int, int]], others: int) -> str:
    """Say which way is dead between a node and so many others, where it is the same with all."""
    if len(dead) == others and all(to == node for _, to in dead):
        return f": nothing that they send arrives at node {node}"
    if len(dead) == others and all(sender == node for sender, _ in dead):
        return f": nothing that node {node} sends arrives there"
    return ""


def _way(dead: Collection[tuple[int, int]]) -> str:
    """Say which way is dead between two nodes, where one is."""
    if len(dead) != 1:
        return ""
    ((sender, to),) = dead
    return f": nothing that node {sender} sends arrives at node {to}"


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
