"""Which node is cut off, concluded from probes between agents in random networks."""

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
    """Return the probe results of all nodes where packets of `dead` (sender, receiver) are lost."""
    observations = {}
    for node in set(range(nodes)) - set(silent):
        peers = [peer for peer in range(nodes) if peer != node]
        heard = [peer for peer in peers if (peer, node) not in dead]
        observations[node] = Found(peers, [peer for peer in heard if (node, peer) not in dead], heard)
    return observations


def name(node):
    return f"node {node}"


@given(st.integers(2, 6), st.integers(0, 2**32))
def test_dead_links_blame_the_node_they_share(nodes, seed):
    draw = random.Random(seed)
    assert cut_off(observed(nodes, set()), name) is None
    blamed = draw.randrange(nodes)
    peers = draw.sample([node for node in range(nodes) if node != blamed], draw.randrange(1, nodes))
    dead = {draw.choice([(blamed, peer), (peer, blamed)]) for peer in peers}
    verdict = cut_off(observed(nodes, dead), name)
    assert verdict is not None
    if len(peers) > 1:
        assert (verdict.node, verdict.described.split(" is cut off from ")[0]) == (blamed, f"node {blamed}")
    else:
        assert verdict.node in (blamed, peers[0])
        assert f"node {min(blamed, peers[0])} and node {max(blamed, peers[0])} do not reach each other" in verdict.described
    assert all(f"node {peer}" in verdict.described for peer in peers)
    assert cut_off(observed(nodes, dead, silent=[blamed]), name) is None  # a silent node is not considered


@pytest.mark.parametrize(
    ("dead", "description"),
    [
        ({(0, 2), (1, 2)}, "node 2 is cut off from node 0 and node 1: nothing that they send arrives at node 2"),
        ({(2, 0), (2, 1)}, "node 2 is cut off from node 0 and node 1: nothing that node 2 sends arrives there"),
        ({(2, 0), (1, 2)}, "node 2 is cut off from node 0 and node 1"),
        ({(0, 1)}, "node 0 and node 1 do not reach each other: nothing that node 0 sends arrives at node 1"),
        ({(1, 0)}, "node 0 and node 1 do not reach each other: nothing that node 1 sends arrives at node 0"),
        ({(0, 1), (1, 0)}, "node 0 and node 1 do not reach each other"),
    ],
)
def test_cut_off_node_is_described(dead, description):
    assert cut_off(observed(3, dead), name).described == description


def test_one_way_connection_is_no_dead_link():
    """As where a packet filter refuses new connections but keeps existing ones."""
    assert cut_off({0: Found([1], [1], []), 1: Found([0], [], [])}, name) is None


def test_filtered_datagrams_are_no_dead_link():
    assert cut_off({0: Found([1], [1], []), 1: Found([0], [0], [])}, name) is None


def test_dropped_datagrams_are_no_dead_link():
    assert cut_off({0: Found([1], [], [1]), 1: Found([0], [], [0])}, name) is None


def probing(addresses, tokens, ports=None):
    """Run probes of nodes at these addresses concurrently; return their results."""
    probes, results = [], {}
    for node in range(len(addresses)):
        probes.append(PeerProbe(node))
        probes[-1].addresses = addresses
    listening = {node: node_probe.listen(free_port) for node, node_probe in enumerate(probes)}
    assert None not in listening.values()

    def work(node):
        results[node] = probes[node].run(ports or listening, tokens[node])

    threads = [threading.Thread(target=work, args=(node,)) for node in range(len(addresses))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def free_port(count):
    with socket.create_server(("127.0.0.1", 0)) as server:
        return [server.getsockname()[1]]


def test_connected_nodes_are_found_quickly(monkeypatch):
    monkeypatch.setattr(probe, "PROBE_SECONDS", 60.0)  # so that a slow machine does not look like a wait
    results = probing(["127.0.0.1", "127.0.0.2", "127.0.0.3"], [b"t" * 16] * 3)
    for node in range(3):
        assert set(results[node]["reached"]) == {0, 1, 2} - {node}


def test_foreign_datagram_is_ignored():
    """192.0.2.1 is reserved (RFC 5737), so the probes last their full time."""
    addresses = ["127.0.0.1", "127.0.0.2", "192.0.2.1"]
    probes = [PeerProbe(0), PeerProbe(1)]
    for node_probe in probes:
        node_probe.addresses = addresses
    ports = {node: node_probe.listen(free_port) for node, node_probe in enumerate(probes)} | {2: 9}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outsider:
        outsider.sendto(b"x" * 16 + (1).to_bytes(4, "big"), (addresses[0], ports[0]))
        outsider.sendto(b"a" * 16 + (2).to_bytes(4, "big"), (addresses[0], ports[0]))  # it has the token and is accepted
        result = probes[0].run(ports, b"a" * 16)
    assert (set(result["reached"]) - {2}, result["heard"]) == ({1}, [2])
    probes[1].close()


def test_probes_are_limited_to_nodes_of_the_run():
    node_probe = PeerProbe(0)
    node_probe.addresses = ["127.0.0.1"] * 100
    node_probe.listen(free_port)
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        result = node_probe.run(dict.fromkeys(range(1000), port), b"t" * 16)
        assert len(result["reached"]) <= MAX_PEERS_PROBED
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
    requests = []
    inquiry = LinkInquiry(lambda node, message, kind: requests.append((node, message, kind)))
    inquiry.begin(range(nodes))
    opened, tried = list(requests), {}
    requests.clear()
    for node, message, kind in draw.sample(opened, nodes):
        assert kind == "probe_port"
        inquiry.add_answer(node, ProbePort(message.number, 21000 + node))
    assert len(requests) == nodes
    for node, message, _ in requests:
        tried[node] = set(message.ports)
        assert len(tried[node]) == min(nodes - 1, MAX_PEERS_PROBED)
        assert node not in tried[node]
    assert all(node in tried[peer] for node in tried for peer in tried[node])
    assert inquiry.fetch() is None
    for node, message, kind in draw.sample(list(requests), nodes):
        assert kind == "peers_probed"
        inquiry.add_answer(node, PeersProbed(message.number, sorted(tried[node]), []))
    answers = inquiry.fetch()
    assert cut_off(answers, name) is None
    assert not inquiry.under_way
