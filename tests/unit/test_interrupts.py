"""Ctrl-C that comes while Python discards what is raised."""

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from crosstrain.cli.interrupts import RememberedInterrupts

class Finalised:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
        for _ in range(1000):  # the handler is called within
            pass

with RememberedInterrupts() as interrupts:
    interrupts.check()
    Finalised()
    print("went on")
    try:
        interrupts.check()
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_in_a_finaliser_is_not_forgotten(number):
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(int(number))], capture_output=True, text=True)
    assert done.stdout == "went on\ninterrupted\n", done.stderr
    assert "Exception ignored in" in done.stderr
