"""Host lists as written by people, Slurm and MPI, and invalid ones."""

import os
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.core.errors import UsageError
from crosstrain.core.job import MAX_NODES
from crosstrain.engine.protocol.transport import read_secret
from crosstrain.launch.launchers.host_list import Host, parse_hosts, read_hostfile


def names(text):
    return [host.name for host in parse_hosts(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node0,node1", ["node0", "node1"]),
        (" node0 , node1 ", ["node0", "node1"]),
        ("10.0.0.1,me@10.0.0.2", ["10.0.0.1", "me@10.0.0.2"]),
        ("node[01-03,7],login", ["node01", "node02", "node03", "node7", "login"]),
        ("node[098-101]", ["node098", "node099", "node100", "node101"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("r[1-2]n5x", ["r1n5x", "r2n5x"]),
        ("fe80::1,fe80::2", ["fe80::1", "fe80::2"]),
        ("::1,b,me@::ffff:10.0.0.1", ["::1", "b", "me@::ffff:10.0.0.1"]),
    ],
)
def test_list_is_expanded(text, expected):
    assert names(text) == expected


def test_processes_of_each_host():
    assert parse_hosts("a:1,b[1-2]:2,c") == [Host("a", 1), Host("b1", 2), Host("b2", 2), Host("c", None)]


def test_host_file_of_either_mpi_is_read(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# the cluster\nnode0 slots=1\r\n\nnode1 slots=2 max_slots=4  # two cards\nnode2:3\nnode[3-4]\n")
    assert read_hostfile(path) == [Host("node0", 1), Host("node1", 2), Host("node2", 3), Host("node3"), Host("node4")]


def test_repeated_slots_and_irregular_files_are_refused(tmp_path):
    (tmp_path / "twice").write_text("a slots=2 slots=3\n")
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("twice", "line 1: says slots= twice"), ("pipe", "is a pipe, not a file"), ("none", "No such file")):
        with pytest.raises(UsageError, match=message):
            read_hostfile(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no host"),
        (" , ", "names or addresses"),
        ("-oProxyCommand=x", "names or addresses"),
        ("a,-b", "names or addresses"),
        ("a b", "names or addresses"),
        (":1", "names or addresses"),
        ("a,,b", "an entry is empty"),
        (",a", "an entry is empty"),
        ("a,b,", "an entry is empty"),
        ("a[1-2],,b", "an entry is empty"),
        ("a;rm", "names or addresses"),
        ("$(x)", "names or addresses"),
        ("a,a", "names 'a' twice"),
        ("a[1-2],a2", "names 'a2' twice"),
        ("a[1", "a bracket has no other"),
        ("a]1", "a bracket has no other"),
        ("a[[1]]", "a bracket has no other"),
        ("a[]", "such as 01-03"),
        ("a[3-1]", "such as 01-03"),
        ("a[x]", "such as 01-03"),
        ("a[1-9999999]", "such as 01-03"),
        ("a[1-100]b[1-100]", "10,000 hosts"),
        ("a:0", "number of processes"),
        ("a:b", "number of processes"),
        ("me@-x", "names or addresses"),
        ("[::1]:2", "IPv6 addresses are written without brackets, such as fe80::1"),
        ("a,me@[fe80::1]", "IPv6 addresses are written without brackets"),
    ],
)
def test_invalid_list_is_refused(text, named):
    with pytest.raises(UsageError, match=r"^--hosts: ") as caught:
        parse_hosts(text)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"a slots=x\n", "line 1: got 'slots=x'"),
        (b"a\nb sockets=2\n", "line 2: got 'sockets=2'"),
        (b"# nobody\n", "names no host"),
        (b"\xff\xfe", "is no text"),
        (b"a" * (1 << 21), "larger than 1 MiB"),
    ],
)
def test_invalid_host_file_is_refused(tmp_path, text, named):
    path = tmp_path / "hosts"
    path.write_bytes(text)
    with pytest.raises(UsageError, match="--hostfile") as caught:
        read_hostfile(path)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node0\nnode0\nnode1\nnode1\n", [Host("node0", 2), Host("node1", 2)]),
        ("node1\nnode0\nnode1\n", [Host("node1", 2), Host("node0")]),
        ("node0 slots=2\nnode1\nnode0:3\nnode0\n", [Host("node0", 6), Host("node1")]),
    ],
    ids=["PBS", "any-order", "with-numbers"],
)
def test_repeated_host_has_as_many_processes(tmp_path, text, expected):
    path = tmp_path / "nodes"
    path.write_text(text)
    assert read_hostfile(path) == expected


def test_byte_order_mark_is_not_part_of_first_host(tmp_path):
    path = tmp_path / "nodes"
    path.write_text("node0 slots=2\nnode1\n", encoding="utf-8-sig")
    assert read_hostfile(path) == [Host("node0", 2), Host("node1")]


def test_byte_order_mark_is_not_part_of_secret(tmp_path):
    """Files from different editors hold the same secret."""
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / encoding).write_text("0123456789abcdef\n", encoding=encoding)
        assert read_secret(tmp_path / encoding) == b"0123456789abcdef"


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        read_hostfile(tmp_path / "nowhere")


NUMBERS = st.lists(st.integers(0, 2000), min_size=1, max_size=30, unique=True)


@given(numbers=NUMBERS, width=st.integers(1, 6))
def test_folded_ranges_equal_the_list(numbers, width):
    whole = [f"n{number:0{width}d}" for number in sorted(numbers)]
    ranges, previous = [], None
    for number in sorted(numbers):
        if previous is not None and number == previous + 1 and len(f"{number:0{width}d}") == len(f"{ranges[-1][0]:0{width}d}"):
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
        previous = number
    folded = ",".join(f"{first:0{width}d}-{last:0{width}d}" if last > first else f"{first:0{width}d}" for first, last in ranges)
    assert names(f"n[{folded}]") == whole


@given(st.text(alphabet="ab01[]-,:@. \t*é$", max_size=30))
def test_any_text_is_host_list_or_refused(text):
    try:
        hosts = parse_hosts(text)
    except UsageError:
        return
    assert 1 <= len(hosts) <= MAX_NODES
    assert len({host.name for host in hosts}) == len(hosts)
    assert not any(host.name.startswith("-") or " " in host.name for host in hosts)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("line", "named"),
    [
        (",".join(["n[0000-4095]"] * 80_000), "names hosts more than 131,072 times"),
        ("n[0000-4095],m[0000-4095]\n" * 40_000, "names more than 4,096 hosts"),
        (",".join(f"{place}n[0000-4095]" for place in range(50_000)), "names more than 4,096 hosts"),
        ("[0-4095]" * 130_000, "16,777,216 hosts or more"),
        ("n[0-4095]" + "x" * 1_000_000, "allowed: names"),
        ("\n".join(f"n{place}" for place in range(100_000)), "names more than 4,096 hosts"),
    ],
)
def test_huge_host_file_is_refused_before_expansion(tmp_path, line, named):
    path = tmp_path / "hosts"
    path.write_text(line)
    assert path.stat().st_size <= 1 << 20
    began = time.thread_time()
    with pytest.raises(UsageError, match=named):
        read_hostfile(path)
    assert time.thread_time() - began < 5.0  # minutes if they were created
    tracemalloc.start()  # takes ten times as long
    try:
        with pytest.raises(UsageError):
            read_hostfile(path)
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


def test_maximum_number_of_hosts_is_accepted(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("n[0-2047] slots=2\nm[0-2047]\n")
    hosts = read_hostfile(path)
    assert len(hosts) == MAX_NODES
    assert {host.processes for host in hosts[:2048]} == {2}
