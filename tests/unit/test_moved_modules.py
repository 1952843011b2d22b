"""Former module paths can still be imported and give the same objects."""

import importlib.util
import subprocess
import sys

import pytest

from crosstrain.core.plugins import MOVED

DOCUMENTED = {
    "core.liveness.startup_watchdog": "startup_phase",
    "core.untrusted.listener": "AuthenticatingListener",
    "data.statistics": "channel_statistics",
    "launch.launchers.carrier": "start_elsewhere",
    "launch.launchers.remote": "RemoteLauncher",
    "launch.launchers.request": "LauncherPlugin",
    "launch.node.identity": "ADDRESS_TOWARDS_VARIABLE",
    "metrics.language": "SENTENCES",
    "models.alexnet.spec": "network",
    "models.cnn.spec": "network",
    "models.decoding.quality": "TranslationQuality",
    "models.layers.tf.sequence": "SequenceLayers",
    "models.layers.torch.sequence": "SequenceLayers",
    "models.resnet18.spec": "network",
    "models.transformer.spec": "network",
    "report.series.arrays": "read_steps",
}


def test_every_moved_module_is_tested():
    assert DOCUMENTED.keys() == MOVED.keys()


@pytest.mark.parametrize("names", [[name for name in DOCUMENTED if ".tf." not in name], ["models.layers.tf.sequence"]], ids=["torch", "tf"])
def test_moved_modules_have_what_their_successors_have(names):
    script = "import sys, importlib; from crosstrain.core.plugins import MOVED\n"
    script += "for name, attribute in map(lambda given: given.split('='), sys.argv[1:]):\n"
    script += "    old, new = (importlib.import_module(f'crosstrain.{module}') for module in (name, MOVED[name]))\n"
    script += "    assert getattr(old, attribute) is getattr(new, attribute), name\n"
    done = subprocess.run([sys.executable, "-P", "-c", script, *(f"{name}={DOCUMENTED[name]}" for name in names)], stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr


def test_reader_of_records_is_found_by_its_first_import():
    script = "from crosstrain.report.series.arrays import read_steps, read_system"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_other_modules_of_former_folders_are_not_found():
    assert importlib.util.find_spec("crosstrain.report.series.nothing") is None
    assert importlib.util.find_spec("crosstrain.data.statistic") is None
