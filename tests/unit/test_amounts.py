"""Bounds of numbers from every source, and notation of link speeds."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstrain.cli.group import invoke
from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job
from crosstrain.core.settings.job_fields import environment_name, flag_name, schema
from crosstrain.core.settings.sources import resolve
from crosstrain.core.units import Cadence, Target, bandwidth_text, decimal_number, parse_bandwidth
from crosstrain.monitor.host import cores_available


def numbers() -> dict[str, dict[str, Any]]:
    """Return the schema of every setting that is a number, or a list of numbers."""
    schemas = {field: schema(field) for field in Job.model_fields}
    inner = {field: described.get("items", described) for field, described in schemas.items()}
    return {field: described for field, described in inner.items() if described.get("type") in ("integer", "number")}


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(10**20), 10**20))
def test_decimal_number_reads_repr(number):
    assert decimal_number(f" {number!r} ") == float(number)


@given(st.text(st.sampled_from("0123456789.eE+-_ ٣１infat"), max_size=8))
def test_decimal_number_accepts_ascii_floats_only(text):
    try:
        expected = float(text)
    except ValueError:
        expected = math.nan
    if math.isfinite(expected) and text.isascii() and "_" not in text:
        assert decimal_number(text) == expected
    else:
        with pytest.raises(ValueError, match="no decimal number"):
            decimal_number(text)


@pytest.mark.parametrize("text", ["1_0", "١", "１", "0_1.0", "inf", "nan"])
def test_settings_refuse_numbers_in_other_digits(text):
    for field in numbers():
        with pytest.raises(UsageError, match=f"{flag_name(field)}: got '{text}'; allowed: "):
            resolve({"backend": "torch", field: text}, {})


NUMBERS = numbers()
HUGE = ["9" * 36, "9" * 400, "9" * 5000]


def refusal(*layers: Any) -> str:
    with pytest.raises(UsageError) as caught:
        resolve(*layers)
    return str(caught.value)


def test_every_number_has_a_lower_and_an_upper_bound():
    assert {"batch_size", "lr", "seed", "threads", "cores_per_node", "stall_timeout"} <= set(NUMBERS)
    for field, described in NUMBERS.items():
        assert {"minimum", "exclusiveMinimum"} & set(described), field
        assert {"maximum", "exclusiveMaximum"} & set(described), field


@pytest.mark.parametrize("huge", HUGE, ids=len)
@pytest.mark.parametrize("field", NUMBERS)
def test_huge_number_is_refused_from_every_source(field, huge, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(f"{field} = {huge}\n")
    assert refusal({field: huge}, {}).startswith(f"{flag_name(field)}: got '{huge}'; allowed: ")
    assert refusal({}, {environment_name(field): huge}).startswith(f"{environment_name(field)}: got '{huge}'; allowed: ")
    assert str(path) in refusal({}, {}, path)


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e400"])
def test_invalid_amount_is_refused(field, value):
    assert "; allowed: " in refusal({field: value}, {})


MAX_SIZE = {field: described["maximum"] for field, described in NUMBERS.items() if "maximum" in described}


@pytest.mark.parametrize("field", MAX_SIZE)
def test_named_maximum_is_accepted(field):
    together = {"ps": {"mode": "async"}, "min_nodes": {"nodes": MAX_SIZE[field]}}.get(field, {})
    assert Job.model_validate({**together, field: MAX_SIZE[field]})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("eval_every", f"{'9' * 24}steps"),
        ("checkpoint_every", f"{'9' * 400}epochs"),
        ("checkpoint_every", f"{'9' * 400}s"),
        ("bandwidth", f"{'9' * 24}mbit"),
        ("bandwidth", f"{'9' * 400}bit"),
        ("until", "loss<=1e999"),
    ],
)
def test_amounts_with_units_are_bounded_too(field, value):
    assert refusal({field: value}, {}).startswith(f"{flag_name(field)}: got {value!r}; allowed: ")


@pytest.mark.parametrize("parse", [Cadence.parse, Target.parse, parse_bandwidth])
@given(st.integers(1, 400), st.sampled_from(["", "steps", "epochs", "s", "kbit", "gbit", "e9", "e308"]), st.booleans())
def test_amounts_are_never_infinite(parse, digits, unit, of_loss):
    text = f"{'loss<=' if of_loss else ''}{'9' * digits}{unit}"
    try:
        parsed = parse(text)
    except ValueError:
        return
    assert getattr(parsed, "amount", getattr(parsed, "value", parsed)) < math.inf


def test_command_refuses_with_exit_2(capsys):
    assert invoke(["run", "--backend", "torch", "--batch-size", "9" * 24]) == 2
    expected = f"error: --batch-size: got '{'9' * 24}'; allowed: a whole number of at least 1 and at most 1000000000.\n"
    assert capsys.readouterr() == ("", expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1kbit", "1kbit"),
        ("1000bit", "1kbit"),
        ("100mbit", "100mbit"),
        ("2500mbit", "2.5gbit"),
        ("1234567bit", "1.234567mbit"),
        ("999bit", "999bit"),
        ("0.5bit", "0.5bit"),
        ("1000000gbit", "1000000gbit"),
    ],
)
def test_bandwidth_text_uses_largest_unit(text, expected):
    assert bandwidth_text(parse_bandwidth(text)) == expected


@given(st.decimals("0.001", "999999", places=3), st.sampled_from(["bit", "kbit", "mbit", "gbit"]))
def test_bandwidth_text_round_trips(amount, unit):
    speed = parse_bandwidth(f"{amount}{unit}")
    assert parse_bandwidth(bandwidth_text(speed)) == speed


def test_slow_link_refusal_quotes_user(capsys):
    assert invoke(["run", "--backend", "torch", "--nodes", "2", "--bandwidth", "1kbit"]) == 2
    assert "error: --bandwidth: got '1kbit'; allowed: 12kbit to 34gbit for virtual nodes." in capsys.readouterr().err


@pytest.mark.parametrize("cores", ["{more:g}", "0.5,{more:g}"])
def test_too_many_cores_per_node_are_refused_before_start(capsys, tmp_path, cores):
    available = cores_available()
    cores_per_node = cores.format(more=available + 6)
    nodes = ["--nodes", str(cores_per_node.count(",") + 1)]
    assert invoke(["run", "--backend", "torch", *nodes, "--cores-per-node", cores_per_node, "--out", str(tmp_path / "runs")]) == 2
    allowed = f"at most {available:g} cores for a node, which is what this machine has for this command"
    assert capsys.readouterr() == ("", f"error: --cores-per-node: got '{available + 6:g}'; allowed: {allowed}.\n")
    assert not (tmp_path / "runs").exists()


def test_cores_outside_affinity_are_refused(tmp_path):
    command = [sys.executable, "-m", "crosstrain.cli.main", "run", "--backend", "torch", "--cores-per-node", "1.5", "--out", str(tmp_path)]
    single_core = {min(os.sched_getaffinity(0))}
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, single_core))
    assert done.returncode == 2
    assert done.stderr.startswith("error: --cores-per-node: got '1.5'; allowed: at most 1 cores for a node")
