"""All-reduce benchmarks: bounds, fits, traces, tables and small loopback measurements."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.exchange import anatomy, constants, group
from benchmarks.exchange.__main__ import network_of, parse
from benchmarks.exchange.anatomy_table import column
from benchmarks.exchange.bounds import Line, all_reduce_bound, fit, sizes
from benchmarks.exchange.table import Series, draw, markdown, size_text, time_text
from benchmarks.exchange.traces import RECEIVING, SENDING, cut, per_thread, read
from benchmarks.rows.exchange import ALEXNET_PARAMETERS, RING
from crosstrain.data.base import DataInfo, ImageFeatures
from crosstrain.models.build import build_model

LATENCIES = st.floats(1e-6, 1e-2)
RATES = st.floats(1e6, 1e11)


@given(ranks=st.integers(2, 64), size=st.floats(0, 1e9), latency=LATENCIES, rate=RATES)
def test_all_reduce_bound_is_latency_plus_bytes(ranks, size, latency, rate):
    bound = all_reduce_bound(ranks, size, Line(latency, rate))
    assert bound == pytest.approx(latency + 2 * (1 - 1 / ranks) * size / rate)
    assert bound <= all_reduce_bound(ranks + 1, size, Line(latency, rate))
    ring = 2 * (ranks - 1) * Line(latency, rate).seconds(size / ranks)
    assert bound <= ring * (1 + 1e-12)


def test_bound_of_one_rank_is_zero():
    assert all_reduce_bound(1, 1e9, Line(1.0, 1.0)) == 0.0
    with pytest.raises(ValueError, match="at least one rank"):
        all_reduce_bound(0, 1, Line(1.0, 1.0))


@given(latency=LATENCIES, rate=RATES)
def test_fit_recovers_exact_line(latency, rate):
    wanted = sizes(1 << 10, 256 << 20, 4)
    line = Line(latency, rate)
    fitted = fit(wanted, [line.seconds(size) for size in wanted])
    assert [fitted.seconds(size) for size in wanted] == pytest.approx([line.seconds(size) for size in wanted], rel=1e-6)


@given(latency=LATENCIES, rate=RATES, seed=st.integers(0, 2**32 - 1))
def test_fit_minimizes_relative_errors(latency, rate, seed):
    wanted = np.array(sizes(1 << 10, 256 << 20, 4))
    taken = Line(latency, rate).seconds(wanted) * np.random.default_rng(seed).uniform(0.5, 2.0, len(wanted))

    def error(line):
        return float((((line.latency_seconds + wanted / line.bytes_per_second) / taken - 1) ** 2).sum())

    fitted = fit(list(wanted), list(taken))
    for a, b in ((1.01, 1.0), (0.99, 1.0), (1.0, 1.01), (1.0, 0.99)):
        assert error(fitted) <= error(Line(fitted.latency_seconds * a, fitted.bytes_per_second * b)) + 1e-9


def test_falling_times_give_no_negative_slope():
    assert fit([1, 2, 4], [3.0, 2.0, 1.0]).bytes_per_second == math.inf
    with pytest.raises(ValueError, match="two sizes"):
        fit([5, 5], [1.0, 2.0])
    with pytest.raises(ValueError, match="positive"):
        fit([1, 2], [1.0, 0.0])


def test_default_sizes_are_1_kib_to_256_mib():
    defaults = sizes(1 << 10, parse([]).most, 4)
    assert (len(defaults), defaults[0], defaults[-1]) == (10, 1024, 256 << 20)


def test_rate_is_of_link_and_latency_of_sockets():
    runs = [{"latency_seconds": [1.0, 3.0], "bytes_per_second": [8.0]}, {"latency_seconds": [2.0], "bytes_per_second": [9.0, 10.0]}]
    assert network_of(runs, None) == Line(2.0, 9.0)
    assert network_of(runs, 1e9) == Line(2.0, 125e6)


def test_bound_of_alexnet_counts_its_gradients():
    spec = build_model(
        "alexnet", DataInfo.of_images("x", {"train": 1, "test": 1}, ImageFeatures((3, 224, 224), 1000, (0.0,) * 3, (1.0,) * 3))
    )
    elements = sum(values.size for values in spec.initial(0).values())
    assert elements == ALEXNET_PARAMETERS
    assert RING.value == pytest.approx(all_reduce_bound(3, 4 * elements, Line(0.0, 125e6)))


SERIES = Series(3, [1024, 4 << 20], Line(50e-6, 1e9), {"direct": [100e-6, 7e-3], "gloo": [2.5e-3, 1.5]})


def test_table_layout():
    assert markdown(SERIES).splitlines()[:4] == [
        "| vector | direct | gloo | bound |",
        "|---:|---:|---:|---:|",
        "| 1 KiB | 100 µs (1.9) | 2.50 ms (48.7) | 51.4 µs |",
        "| 4 MiB | 7.00 ms (1.2) | 1.50 s (265.8) | 5.64 ms |",
    ]
    assert [size_text(size) for size in (31_400, 512, 256 << 20)] == ["30.6641 KiB", "512 B", "256 MiB"]
    assert [time_text(seconds) for seconds in (3.14e-5, 0.0026, 150.0)] == ["31.4 µs", "2.60 ms", "150 s"]


def test_picture_is_deterministic(tmp_path):
    for name in ("a.svg", "b.svg"):
        draw({"three nodes": SERIES}, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert b"all-reduce" in (tmp_path / "a.svg").read_bytes()


TRACE = """\
71 1.000000 write(3, "something", 9) = 9 <0.000010>
71 1.100000 write(3, "all-reduce", 10) = 10 <0.000010>
71 1.100100 sendmsg(5, {msg_name=NULL, msg_iov=[{iov_base="a b = c", iov_len=24}]}, MSG_DONTWAIT) = 31424 <0.000025>
72 1.100200 epoll_wait(4,  <unfinished ...>
71 1.100300 recvmsg(5, 0x7f, MSG_DONTWAIT) = -1 EAGAIN (Resource temporarily unavailable) <0.000004>
72 1.100400 <... epoll_wait resumed>[{events=EPOLLIN}], 8, -1) = 1 <0.000200>
71 1.100500 --- SIGCHLD {si_signo=SIGCHLD} ---
71 1.200000 write(3, "all-reduce", 10) = 10 <0.000010>
71 1.200100 recvmsg(5, 0x7f, MSG_WAITALL) = 31424 <0.000050>
71 1.300000 write(3, "all-reduce", 10) = 10 <0.000010>
71 1.400000 exit_group(0) = ?
71 1.400001 +++ exited with 0 +++
"""


def test_trace_is_cut_at_the_marks():
    calls = read(TRACE.splitlines())
    assert [call.name for call in calls].count("write") == 4
    first, second = cut(calls)
    assert [(call.thread, call.name, call.result) for call in first.calls] == [
        (71, "sendmsg", 31424),
        (72, "epoll_wait", 1),
        (71, "recvmsg", -1),
    ]
    assert [call.seconds for call in first.calls] == [25e-6, 200e-6, 4e-6]
    assert (first.began, first.ended) == (1.1, 1.2)
    assert (first.bytes_of(SENDING), first.bytes_of(RECEIVING), second.bytes_of(RECEIVING)) == (31424, 0, 31424)
    assert per_thread([first, second]) == {71: {"sendmsg": 1, "recvmsg": 2}, 72: {"epoll_wait": 1}}
    assert calls[-1].result is None
    assert "| 0 | recvmsg 1.00, sendmsg 0.50 |" in anatomy.traced_text([first, second])
    counted = {
        "mean_seconds": 1e-3,
        "process": {"user_seconds": 1e-4, "system_seconds": 2e-4, "voluntary_switches": 3.0, "involuntary_switches": 0.5},
        "threads": {"a 1": {"core_seconds": 3e-4, "waiting_seconds": 1e-4}, "b 2": {"core_seconds": 0.0, "waiting_seconds": 1e-5}},
        "packets": {"OutSegs": 4.0, "InSegs": 2.0, "DelayedACKs": 0.0, "RetransSegs": 0.0},
    }
    cells = column(counted, [first, second], 31424)
    assert (cells["system calls"], cells["of these to send"], cells["to receive"], cells["threads that take part"]) == (
        "2.0",
        "0.5",
        "1.0",
        "1",
    )
    assert (cells["on a core, all threads"], cells["bytes copied to the system, of the vector"]) == ("300 µs", "0.50")
    assert anatomy.markdown({"direct": cells}).splitlines()[2] == "| time | 1.00 ms |"
    assert "thread 1  epoll_wait = 1  (200 µs)" in anatomy.timeline_text(first)


def test_trace_without_marks_is_refused():
    with pytest.raises(ValueError, match="1 marks"):
        cut(read(TRACE.splitlines()[:3]))


def test_fastest_value_of_line_is_bold():
    times = {"1048576": {"1024": [2e-3, 1e-3, 3e-3], "2048": [1e-3, 1e-3, 9.0]}, "alexnet": {"1024": [1.0], "2048": [2.0]}}
    assert constants.render("PIECE_BYTES", [1024, 2048], times).splitlines()[2:] == [
        "| 1 MiB | 2.00 ms | **1.00 ms** |",
        "| alexnet | **1.00 s** | 2.00 s |",
    ]


@pytest.mark.cluster
def test_ranks_measure_and_count_on_loopback():
    measured = group.run_ranks("mesh.py", ["--sizes", "1024,65536", "--tries", "2"], ranks=2, network="host")
    assert {size: len(times) for size, times in measured.items()} == {"1024": 2, "65536": 2}
    assert all(0 < seconds < 1 for times in measured.values() for seconds in times)
    counted = group.run_ranks("mesh.py", ["--sizes", "1024", "--count", "20", "--marks"], ranks=2, network="host")["1024"]
    assert len(counted["seconds"]) == 20
    assert counted["process"]["user_seconds"] + counted["process"]["system_seconds"] > 0
    assert counted["threads"]
    assert counted["packets"]["OutSegs"] >= 1
    swept = group.run_ranks(
        "constants.py",
        ["--sizes", "4096", "--tries", "1", "--constant", "MAX_FURTHER_BYTES", "--values", "0,1000000"],
        ranks=3,
        network="host",
    )
    assert swept["4096"].keys() == {"0", "1000000"}


@pytest.mark.cluster
def test_sockets_measure_latency_and_rate():
    measured = group.run_ranks("sockets.py", ["--sizes", "1024", "--tries", "1"], ranks=3, network="host")
    assert 1e-7 < measured["latency_seconds"][0] < 0.1
    assert measured["bytes_per_second"][0] > 1e6
