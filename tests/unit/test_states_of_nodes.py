"""Memory of checkpoints: nodes on other machines cannot name memory to read on this one."""

import sys

import numpy as np
import pytest
from run_samples import a_job
from test_floods import streams
from untyped import fields_of

from crosstrain.engine.epochs import START
from crosstrain.engine.loop_interfaces import PendingCheckpoint
from crosstrain.engine.progress import QuietProgress
from crosstrain.engine.protocol.state_transfer import PeerMemory, StateBegin
from crosstrain.launch.driver.attempt import Attempt
from crosstrain.launch.driver.nodes import Nodes, ReportHandlers
from crosstrain.launch.driver.position import Origin
from crosstrain.launch.driver.recorder import RunRecorder
from crosstrain.launch.driver.training_job import TrainingJob
from crosstrain.launch.launchers.base import NodeChannel


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process read another's memory")
@pytest.mark.parametrize(("on_this_machine", "answer"), [(True, "taken"), (False, "send")])
def test_memory_is_read_on_the_driver_s_machine_only(tmp_path, on_this_machine, answer):
    """The node names memory of this process with its mark; the launcher decides if it is read."""
    job = a_job(tmp_path, name="run")
    training, recording = TrainingJob.from_job(job), RunRecorder(job, QuietProgress())
    recording.start_clock()
    held = [np.full(parameter.shape, 7, np.float32) for parameter in training.model.parameters]
    entries = [(f"parameters/{parameter.name}", "<f4", list(parameter.shape)) for parameter in training.model.parameters]
    begin = StateBegin(1, entries, 0, {}, PeerMemory.of_this_process(), [array.ctypes.data for array in held])
    with streams() as (ours, theirs):
        channel = NodeChannel(0, ours, "127.0.0.1", None, None, on_this_machine)
        nodes = Nodes([channel], ReportHandlers(recording.sample, recording.log))
        attempt = Attempt(training, nodes, recording, Origin(), lambda attempt: {}, lambda *arguments: None, False)
        try:
            attempt.saver.begin(PendingCheckpoint(START, 0.0, 0.0, None), begin)
            arguments = theirs.receive()
            assert (arguments.kind, fields_of(arguments)["answer"], arguments.to) == ("state_answer", answer, "worker-0")
        finally:
            attempt.saver.abandon()
    recording.close()
