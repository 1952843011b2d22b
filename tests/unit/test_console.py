"""Terminal control characters in runs are shown by every command and sent by none."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from io import StringIO

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from model_checkpoints import save_model
from report_runs import make_run
from rich.panel import Panel
from rich.text import Text

from crosstrain.cli.group import invoke
from crosstrain.core.console import ShownStream, json_text, one_line, shown
from crosstrain.core.terminal_pictures import Drawing

EVIL = "\x1b]0;owned\x07\x1b[31mred\x1b[0m\x9b2J\x7f\u202egnp\u2066[red]</script><b>&\x00\r\u2028\u200f\u061c\nFORGED succeeded\tx"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def add_control_characters(value):
    """Append control characters to every string of a value, except keys and closed choices."""
    if isinstance(value, dict):
        return {key: item if key.endswith("_at") else add_control_characters(item) for key, item in value.items()}
    if isinstance(value, list):
        return [add_control_characters(item) for item in value]
    return value + EVIL if isinstance(value, str) else value


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Create two runs, one failed, with control characters in all strings and folder names."""
    out = tmp_path_factory.mktemp("evil")
    choices = {
        "mode",
        "distributed",
        "exchange",
        "compile",
        "optimizer",
        "schedule",
        "scale_lr",
        "augment",
        "precision",
        "device",
        "launcher",
        "network",
    } | {"on_nan"}
    for name, state in (("one", "succeeded"), ("two", "failed")):
        path = make_run(out, name, state=state, calibrated=True, steps=40)
        save_model(path, "logreg", (1, 8, 8))
        for document in ("job.json", "env.json", "status.json", "summary.json"):
            fields = json.loads((path / document).read_text())
            choices_kept = {
                key: fields[key] for key in (*choices, "until", "eval_every", "state") if key in fields and fields[key] is not None
            }
            (path / document).write_text(json.dumps({**add_control_characters(fields), **choices_kept}))
        for records in ("steps.jsonl", "evals.jsonl", "events.jsonl", "system.jsonl"):
            lines = [json.dumps(add_control_characters(json.loads(line))) for line in (path / records).read_text().splitlines()]
            (path / records).write_text("".join(f"{line}\n" for line in lines))
        path.rename(out / f"{name}\x1b[2J\u202e\udcff\nFORGED succeeded\tx")
    return out


def reading(out, where):
    """Yield every command that reads runs, some also for the failed one."""
    first, second = sorted(str(path) for path in out.iterdir() if path.name.startswith(("one", "two")))
    yield from (["runs", "--out", str(out)], ["runs", "--out", str(out), "--json"], ["runs", "--data", EVIL.strip("\0"), "--out", str(out)])
    yield from (["runs", "show", first], ["runs", "show", second], ["runs", "delete", first, "--dry-run"], ["runs", "show", f"{EVIL[:4]}"])
    yield from (["runs", "export", first, "--what", "summary"], ["runs", "export", first, "--what", "system", "-o", "-"])
    for extra in ([], ["--layout=rows"], ["--csv"], ["--markdown"], ["--latex"], ["--json"]):
        yield ["compare", first, second, *extra]
    yield from (
        ["watch", first],
        ["watch", second],
        ["watch", first, "--json"],
        ["explain", first],
        ["explain", second],
        ["predict", first],
    )
    yield from (
        ["report", first, second, "--output", str(where / "page.html")],
        ["plot", first, second, "--output", str(where), "--format", "svg"],
    )
    yield from (
        ["export", first, "--describe"],
        ["export", first, "--format", "safetensors", "-o", str(where / "weights")],
        ["export", second],
    )
    yield from (["evaluate", first, "--data", "digits"], ["run", "--resume", first], ["sweep", "--resume", first])
    for command in (["runs", "show", first], ["explain", first], ["explain", second], ["export", first, "--describe"]):
        yield [*command, "--json"]


@pytest.mark.thorough
def test_no_command_sends_control_characters(runs, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answered = 0
    for arguments in reading(runs, tmp_path):
        code = invoke(arguments)
        out, err = capfd.readouterr()
        assert code in (0, 1, 2), (arguments, err)
        if "--json" in arguments and code == 0:
            for document in out.splitlines() if arguments[0] == "watch" else [out]:
                json.loads(document)
        match = OBEYED.search(out + err)
        assert match is None, f"{arguments} sent {match[0]!r} in {(out + err)[max(0, match.start() - 100) :][:200]!r}"
        if "--csv" not in arguments and arguments[:2] != ["runs", "export"]:  # CSV may have line ends within quotes
            assert re.search("^FORGED", out + err, re.MULTILINE) is None, arguments
        answered += code == 0
    assert answered >= 15  # not all of them end in an error
    page = (tmp_path / "page.html").read_text()
    plotly = max(re.findall(r"<script>.*?</script>", page, re.DOTALL), key=len)
    assert OBEYED.search(page.replace(plotly, "")) is None
    assert "[red]</script>" not in page
    written = [*tmp_path.glob("*.svg"), *tmp_path.glob("*.csv")]
    assert len(written) > 2
    for picture in written:
        assert OBEYED.search(picture.read_text()) is None


def test_control_characters_are_shown_escaped(runs, capfd):
    invoke(["runs", "--out", str(runs)])
    assert r"\x1b[2J\u202e\udcff\x0aFORGED" in capfd.readouterr().out


def test_drawing_sends_only_sequences_of_the_command(runs):
    """On a terminal the command sends its colours, but not those of a run's strings."""
    leader, follower = pty.openpty()
    path = next(path for path in runs.iterdir() if path.name.startswith("two"))
    process = subprocess.Popen(
        [sys.executable, "-m", "crosstrain.cli.main", "watch", path], stderr=follower, stdout=follower, stdin=follower
    )
    os.close(follower)
    sent = b""
    try:
        while piece := os.read(leader, 1 << 16):
            sent += piece
    except OSError:  # the other end was closed
        pass
    os.close(leader)
    process.wait()
    text = sent.decode(errors="replace")
    assert "\x1b[" in text
    without_ours = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")
    assert OBEYED.search(without_ours) is None
    assert "\x1b[31mred" not in text
    assert "owned" in text


@given(text=st.text())
def test_shown_escapes_only_control_characters(text):
    assert OBEYED.search(shown(text)) is None
    assert shown(shown(text)) == shown(text)
    if OBEYED.search(text) is None:
        assert shown(text) == text


@given(text=st.text())
def test_one_line_has_no_line_breaks(text):
    assert len(one_line(text).splitlines()) == (text != "")
    assert "\t" not in one_line(text)
    assert one_line(one_line(text)) == one_line(text)


@given(text=st.text())
def test_streams_and_consoles_send_no_control_characters(text):
    stream = StringIO()
    ShownStream(stream).write(text)
    console = Drawing(ShownStream(stream))
    console.print(Panel(Text(text)), text, width=60)
    assert OBEYED.search(stream.getvalue()) is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda of: st.lists(of) | st.dictionaries(st.text(), of), max_leaves=8
)


@given(value=VALUES, letters=st.booleans(), indent=st.sampled_from([None, 1]))
@example(value={EVIL: [EVIL, "\x85", "\udcff"]}, letters=True, indent=1)
@example(value={EVIL: [EVIL, "\x85", "\udcff"]}, letters=False, indent=None)
def test_printed_json_round_trips(value, letters, indent):
    stream = StringIO()
    ShownStream(stream).write(json_text(value, letters=letters, indent=indent))
    assert OBEYED.search(stream.getvalue()) is None
    assert json.loads(stream.getvalue()) == value


def test_commands_print_json_only_by_json_text(repository):
    sources = {path: path.read_text() for path in (repository / "cli").rglob("*.py")}
    assert [path for path, source in sources.items() if "json.dump" in source] == []
