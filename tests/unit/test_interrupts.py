"""Signals that end a command, at moments and places where they may be lost or ignored."""

import signal
import subprocess
import sys

import pytest

from crosstrain.launch.launchers.machine_checks import EndingSignals

SCRIPT = """
import os, sys
from crosstrain.cli.interrupts import RememberedInterrupts

class Finalised:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
        for _ in range(1000):  # the handler is called in this loop
            pass

with RememberedInterrupts() as interrupts:
    interrupts.check()
    Finalised()
    print("continued")
    try:
        interrupts.check()
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_in_finaliser_is_not_lost(number):
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(int(number))], capture_output=True, text=True)
    assert done.stdout == "continued\ninterrupted\n", done.stderr
    assert "Exception ignored in" in done.stderr


@pytest.mark.usefixtures("signals_as_before")
@pytest.mark.parametrize(("inherited", "expected"), [(signal.SIG_DFL, ["in good order"]), (signal.SIG_IGN, [])])
def test_closed_terminal_ends_run_unless_nohup(inherited, expected):
    """``nohup trainer run … &``: a signal ignored when a command starts stays ignored."""
    signal.signal(signal.SIGHUP, inherited)
    did = []
    with EndingSignals(lambda: did.append("in good order"), lambda: did.append("at once")) as signals:
        signal.raise_signal(signal.SIGHUP)
        assert (did, signals.interrupted) == (expected, bool(expected))
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # once interrupted, late signals are ignored
