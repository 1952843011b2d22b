"""Which node is cut off: what agents find of each other in a network drawn at random, and what is concluded of it."""

import random
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.engine.protocol.messages import MAX_PEERS_PROBED
from crosstrain.engine.protocol.node_messages import PeersProbed, ProbePort
from crosstrain.launch.node import links as probe
from crosstrain.launch.node.links import Found, LinkInquiry, PeerProbe, cut_off


def observed(nodes, dead, silent=()):
    """What the nodes find where packets of `dead`, pairs of sender and receiver, are lost: a connection needs both ways."""
    found = {}
    for node in set(range(nodes)) - set(silent):
        others = [each for each in range(nodes) if each != node]
        heard = [each for each in others if (each, node) not in dead]
        found[node] = Found(others, [each for each in heard if (node, each) not in dead], heard)
    return found


def name(node):
    return f"node {node}"


@given(st.integers(2, 6), st.integers(0, 2**32))
def test_dead_links_blame_the_node_they_share(nodes, seed):
    draw = random.Random(seed)
    assert cut_off(observed(nodes, set()), name) is None
    blamed = draw.randrange(nodes)
    others = draw.sample([each for each in range(nodes) if each != blamed], draw.randrange(1, nodes))
    dead = {draw.choice([(blamed, other), (other, blamed)]) for other in others}
    found = cut_off(observed(nodes, dead), name)
    assert found is not None
    if len(others) > 1:
        assert (found.node, found.described.split(" is cut off from ")[0]) == (blamed, f"node {blamed}")
    else:
        assert found.node in (blamed, others[0])
        assert f"node {min(blamed, others[0])} and node {max(blamed, others[0])} do not reach each other" in found.described
    assert all(f"node {other}" in found.described for other in others)
    assert cut_off(observed(nodes, dead, silent=[blamed]), name) is None  # whoever says nothing is none of this


@pytest.mark.parametrize(
    ("dead", "told"),
    [
        ({(0, 2), (1, 2)}, "node 2 is cut off from node 0 and node 1: nothing that they send arrives at node 2"),
        ({(2, 0), (2, 1)}, "node 2 is cut off from node 0 and node 1: nothing that node 2 sends arrives there"),
        ({(2, 0), (1, 2)}, "node 2 is cut off from node 0 and node 1"),
        ({(0, 1)}, "node 0 and node 1 do not reach each other: nothing that node 0 sends arrives at node 1"),
        ({(1, 0)}, "node 0 and node 1 do not reach each other: nothing that node 1 sends arrives at node 0"),
        ({(0, 1), (1, 0)}, "node 0 and node 1 do not reach each other"),
    ],
)
def test_cut_off_node_is_described(dead, told):
    assert cut_off(observed(3, dead), name).described == told


def test_one_way_connection_is_no_dead_link():
    """As where a filter of packets refuses new connections, and those that there are go on."""
    assert cut_off({0: Found([1], [1], []), 1: Found([0], [], [])}, name) is None


def test_filtered_datagrams_are_no_dead_link():
    assert cut_off({0: Found([1], [1], []), 1: Found([0], [0], [])}, name) is None


def test_dropped_datagrams_are_no_dead_link():
    assert cut_off({0: Found([1], [], [1]), 1: Found([0], [], [0])}, name) is None


def probing(addresses, tokens, ports=None):
    """Have nodes at these addresses probe each other at the same time; return what each has found."""
    probes, found = [], {}
    for node in range(len(addresses)):
        probes.append(PeerProbe(node))
        probes[-1].addresses = addresses
    listening = {node: each.listen(free_port) for node, each in enumerate(probes)}
    assert None not in listening.values()

    def work(node):
        found[node] = probes[node].run(ports or listening, tokens[node])

    threads = [threading.Thread(target=work, args=(node,)) for node in range(len(addresses))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def free_port(count):
    with socket.create_server(("127.0.0.1", 0)) as server:
        return [server.getsockname()[1]]


def test_connected_nodes_are_found_quickly(monkeypatch):
    monkeypatch.setattr(probe, "PROBE_SECONDS", 60.0)  # else a slow machine could not be told from a wait
    found = probing(["127.0.0.1", "127.0.0.2", "127.0.0.3"], [b"t" * 16] * 3)
    for node in range(3):
        assert set(found[node]["reached"]) == {0, 1, 2} - {node}


def test_foreign_datagram_is_ignored():
    """192.0.2.1 is nobody's (RFC 5737), so that the probes last for their time."""
    addresses = ["127.0.0.1", "127.0.0.2", "192.0.2.1"]
    probes = [PeerProbe(0), PeerProbe(1)]
    for each in probes:
        each.addresses = addresses
    ports = {node: each.listen(free_port) for node, each in enumerate(probes)} | {2: 9}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"x" * 16 + (1).to_bytes(4, "big"), (addresses[0], ports[0]))
        stranger.sendto(b"a" * 16 + (2).to_bytes(4, "big"), (addresses[0], ports[0]))  # it has the token, and is heard
        found = probes[0].run(ports, b"a" * 16)
    assert (set(found["reached"]) - {2}, found["heard"]) == ({1}, [2])
    probes[1].close()


def test_probes_are_limited_to_nodes_of_the_run():
    own = PeerProbe(0)
    own.addresses = ["127.0.0.1"] * 100
    own.listen(free_port)
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        found = own.run(dict.fromkeys(range(1000), port), b"t" * 16)
        assert len(found["reached"]) <= MAX_PEERS_PROBED
        connections = 0
        while True:
            try:
                server.accept()[0].close()
            except BlockingIOError:
                break
            connections += 1
        assert connections == MAX_PEERS_PROBED


@given(st.integers(2, 80), st.integers(0, 2**32))
def test_inquiry_covers_both_nodes_of_each_pair(nodes, seed):
    draw = random.Random(seed)
    asked = []
    inquiry = LinkInquiry(lambda node, message, kind: asked.append((node, message, kind)))
    inquiry.begin(range(nodes))
    opened, tried = list(asked), {}
    asked.clear()
    for node, message, kind in draw.sample(opened, nodes):
        assert kind == "probe_port"
        inquiry.hear(node, ProbePort(message.number, 21000 + node))
    assert len(asked) == nodes
    for node, message, _ in asked:
        tried[node] = set(message.ports)
        assert len(tried[node]) == min(nodes - 1, MAX_PEERS_PROBED)
        assert node not in tried[node]
    assert all(node in tried[other] for node in tried for other in tried[node])
    assert inquiry.fetch() is None
    for node, message, kind in draw.sample(list(asked), nodes):
        assert kind == "peers_probed"
        inquiry.hear(node, PeersProbed(message.number, sorted(tried[node]), []))
    found = inquiry.fetch()
    assert cut_off(found, name) is None
    assert not inquiry.under_way
