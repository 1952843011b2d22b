"""CPU, memory and disk of process trees against the kernel and the processes."""

from __future__ import annotations

import time

import pytest
from monitor_tools import charged_seconds, program

from crosstrain.monitor.processes import Forest

MEGABYTE = 1 << 20


def look(forest: Forest) -> None:
    forest.discover()
    for tree in forest.trees.values():
        tree.update()


def test_cpu_seconds_of_a_tree_equal_wait4():
    code = """
    import subprocess
    lasting_code = "import os, sys; [sum(range(1000)) for _ in range(20000)]; sys.stdin.read(); os._exit(0)"
    lasting = subprocess.Popen([sys.executable, "-S", "-c", lasting_code], stdin=subprocess.PIPE)
    for _ in range(4):
        if (child := os.fork()) == 0:
            if os.fork() == 0:
                burn(0.15)
                os._exit(0)
            os.wait()
            burn(0.1)
            os._exit(0)
        os.waitpid(child, 0)
    burn(0.3)
    say()
    lasting.stdin.close()
    lasting.wait()
    os._exit(0)  # as everything here: what an interpreter does at its end would come after the last look
    """
    with program(code) as parent:
        forest = Forest()
        tree = forest.plant("worker-0", parent.pid)
        largest_tree = 0
        while not parent.has_output():
            look(forest)
            largest_tree = max(largest_tree, len(tree.members))
            time.sleep(0.02)
        assert parent.line() == "ready"
        look(forest)
        sampled = tree.cpu_seconds
        parent.go()
        truth = charged_seconds(parent.reap())
    assert largest_tree >= 3
    assert truth > 1.3
    assert sampled == pytest.approx(truth, rel=0.02)


def test_ended_child_is_exact_after_wait4():
    with program("say(); burn(0.5)\nif (c := os.fork()) == 0:\n    burn(0.5); os._exit(0)\nos.waitpid(c, 0)") as task:
        task.line()
        forest = Forest()
        tree = forest.plant("worker-0", task.pid)
        look(forest)
        task.go()
        usage = task.reap()
        before = tree.cpu_seconds
        tree.end(usage)
        look(forest)
    assert before < 0.3
    assert tree.cpu_seconds == pytest.approx(charged_seconds(usage), rel=0.02)
    assert not tree.lost


def test_unreaped_child_is_not_lost():
    """With SIGCHLD ignored a parent never gets its children's time, nor anybody an orphan's."""
    code = """
    import signal
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    done, child_may_end, orphan_may_end = os.pipe(), os.pipe(), os.pipe()

    def work_until(release):
        burn(0.4)
        os.write(done[1], b"x")
        os.read(release[0], 1)
        os._exit(0)

    if (child := os.fork()) == 0:
        if os.fork() == 0:
            work_until(orphan_may_end)
        work_until(child_may_end)
    for _ in range(2):
        os.read(done[0], 1)
    for release in (child_may_end, orphan_may_end):
        say()
        os.write(release[1], b"x")
    say()
    """
    with program(code) as task:
        forest = Forest()
        tree = forest.plant("worker-0", task.pid)
        seen = []
        for members in (3, 2, 1):
            task.line()
            deadline = time.monotonic() + 5
            while len(tree.members) != members:
                assert time.monotonic() < deadline
                look(forest)
            look(forest)
            seen.append(tree.cpu_seconds)
            task.go()
        task.reap()
    assert 0.8 <= seen[0] <= seen[1] <= seen[2] < seen[0] + 0.05


def test_memory_of_200_megabytes_is_exact():
    code = """
    say()
    block = bytearray(200 << 20)
    block[::4096] = b"x" * len(block[::4096])
    say()
    """
    with program(code) as task:
        task.line()
        forest = Forest()
        tree = forest.plant("worker-0", task.pid)
        look(forest)
        before, before_shared = tree.rss_bytes, tree.pss_bytes()
        task.go()
        task.line()
        look(forest)
        grown, grown_shared = tree.rss_bytes - before, tree.pss_bytes() - before_shared
        task.go()
        task.reap()
    assert grown == pytest.approx(200 * MEGABYTE, rel=0.02)
    assert grown_shared == pytest.approx(200 * MEGABYTE, rel=0.02)


def test_memory_shared_by_forks_counts_once_in_pss():
    code = """
    block = bytearray(50 << 20)
    block[::4096] = b"x" * len(block[::4096])
    go = os.pipe()
    children = []
    for _ in range(3):
        if (child := os.fork()) == 0:
            os.close(go[1])
            os.read(go[0], 1)
            os._exit(0)
        children.append(child)
    say()
    os.close(go[1])
    for child in children:
        os.waitpid(child, 0)
    """
    with program(code) as task:
        task.line()
        forest = Forest()
        tree = forest.plant("worker-0", task.pid)
        look(forest)
        members, resident, proportional = len(tree.members), tree.rss_bytes, tree.pss_bytes()
        task.go()
        task.reap()
    assert members == 4
    assert resident > 200 * MEGABYTE
    assert 50 * MEGABYTE < proportional < 100 * MEGABYTE


def test_disk_bytes_include_children(tmp_path):
    code = """
    def store(name):
        with open(name, "wb") as file:
            file.write(os.urandom(6 << 20))
            file.flush()
            os.fsync(file.fileno())
    say()
    store(sys.argv[1] + "/mine")
    if (child := os.fork()) == 0:
        store(sys.argv[1] + "/theirs")
        os._exit(0)
    os.waitpid(child, 0)
    say()
    """
    with program(code, str(tmp_path)) as task:
        task.line()
        forest = Forest()
        tree = forest.plant("worker-0", task.pid)
        tree.read_disk()
        before = tree.disk_seen
        task.go()
        task.line()
        look(forest)
        tree.read_disk()
        written = tree.disk_seen[1] - before[1]
        task.go()
        usage = task.reap()
    if usage.ru_oublock == 0:
        pytest.skip("the temporary folder is in memory")
    assert written == pytest.approx(12 * MEGABYTE, rel=0.02)


def test_reused_process_id_is_not_the_task():
    with program("say()") as task:
        task.line()
        forest = Forest()
        tree = forest.plant("worker-0", task.pid)
        task.go()
        task.reap()
        look(forest)
    assert tree.lost
    assert tree.rss_bytes is None
    assert tree.cpu_seconds is not None
