"""The settings that all processes of a run must share with the driver."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.core.settings.sources import given_settings
from crosstrain.launch.launchers.environments import detect
from crosstrain.launch.launchers.joining import NODE_SPECIFIC_FIELDS, difference, job_request, resume_request

PLACE = detect({}, "10.0.0.1:29400", 1, None)
assert PLACE is not None
FLAGS = {
    "lr": ["0.1", "0.10", "1e-1", "0.2"], "steps": ["+20", "+30", "20"], "nodes": ["2", "3"], "nesterov": [True, False], "ps": ["2", "3"],
    "mode": ["sync", "async"], "batch_size": ["8", "16"], "data_dir": ["a", "b"], "cores_per_node": ["1", "1,2"],
}  # fmt: skip
TYPED = st.fixed_dictionaries({}, optional={field: st.sampled_from(values) for field, values in FLAGS.items()})


def make_request(flags, environ=None, config=None, resume="runs/first"):
    return resume_request(Path(resume), given_settings(flags, environ or {}, config), PLACE)


def settled(flags):
    """Parse typed settings independently of the product."""
    return {field: float(value) if field == "lr" else value for field, value in flags.items() if field not in NODE_SPECIFIC_FIELDS}


@given(ours=TYPED, theirs=TYPED)
def test_process_with_other_settings_is_reported(ours, theirs):
    problem = difference(make_request(ours), make_request(theirs))
    assert (problem is None) == (settled(ours) == settled(theirs))
    for field in settled(ours).keys() ^ settled(theirs).keys():
        assert f"{field} " in problem
        assert "not given" in problem


def test_source_of_a_setting_makes_no_difference(tmp_path):
    config = tmp_path / "job.toml"
    config.write_text("lr = 0.5\ncores_per_node = 2\nbatch_size = 8\n")
    by_flag = {"lr": ".5", "cores_per_node": "2", "batch_size": "8"}
    assert difference(make_request({}, {}, config), make_request(by_flag)) is None
    assert difference(make_request({}, {"TRAINER_LR": "0.50"}, config), make_request(by_flag, {"TRAINER_LR": "7"})) is None


def test_another_resumed_run_is_a_difference():
    assert "'second' instead of 'first'" in difference(make_request({}), make_request({}, resume="/elsewhere/second"))
    assert difference(make_request({}), make_request({}, resume="/elsewhere/first")) is None
    assert "--resume" in difference(make_request({}), job_request(Job()))
    assert "--resume" in difference(job_request(Job()), make_request({}))


@pytest.mark.parametrize("flags", [{"lr": "fast"}, {"steps": "-1"}, {"steps": "+x"}, {"mode": "both"}, {"nodes": "0"}])
def test_invalid_setting_fails_on_its_node(flags):
    with pytest.raises(UsageError, match=f"--{next(iter(flags))}"):
        given_settings(flags, {})


def test_value_of_another_process_is_shown_in_bounded_length():
    nested = []
    for _ in range(900):
        nested = [nested]
    for value in (nested, "x" * 1_500_000, list(range(100_000))):
        assert len(difference({"lr": 0.1}, {"lr": value})) < 2_000
