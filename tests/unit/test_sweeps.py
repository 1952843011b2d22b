"""Sweeps before their start: grids, points, names, commands, and the estimated rest."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from crosstrain.cli.commands.run import run
from crosstrain.cli.main import main
from crosstrain.cli.options import given_options
from crosstrain.core.errors import UsageError
from crosstrain.core.job import Job, without_password
from crosstrain.core.settings.sources import resolve
from crosstrain.core.settings.sweeps import Grid, as_arguments, plan, read_axis, read_grid, settings_text
from crosstrain.launch.sweep_folder import Request, SweepFolder, read_request
from crosstrain.launch.sweep_runner import Finished, finished, seconds_left, updates

BASE = {"backend": "torch"}


def settings(points):
    return [dict(point.settings) for point in points]


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("batch_size=5,10", ("batch_size", ["5", "10"])),
        ("batch-size = 5 , 10", ("batch_size", ["5", "10"])),
        ("until=accuracy>=0.9,accuracy>=0.8", ("until", ["accuracy>=0.9", "accuracy>=0.8"])),
        ("cores_per_node=1,0.5;1,1", ("cores_per_node", ["1,0.5", "1,1"])),
        ("cores_per_node=1,0.5", ("cores_per_node", ["1,0.5"])),
        ("data=synthetic-images:size=64,classes=5;digits", ("data", ["synthetic-images:size=64,classes=5", "digits"])),
    ],
)
def test_axis_is_parsed(text, axis):
    assert read_axis(text) == axis


@pytest.mark.parametrize("text", ["batch_size", "batch_size=", "=5", "batch_size=5,,6", ""])
def test_invalid_axis_is_refused(text):
    with pytest.raises(UsageError, match=r"--grid: got .*batch_size=5,10,20"):
        read_axis(text)


@pytest.mark.parametrize(
    ("name", "message"), [("batchsize", "Did you mean 'batch_size'"), ("name", "cannot be swept"), ("out", "cannot be swept")]
)
def test_setting_that_cannot_vary_is_refused(name, message):
    with pytest.raises(UsageError, match=message):
        read_axis(f"{name}=1,2")


def test_combinations_are_in_order(tmp_path):
    points = plan(Grid({"batch_size": ["5", 10], "mode": ["sync", "async"]}), BASE, {}, None)
    assert [point.name for point in points] == [f"batch_size={size},mode={mode}" for size in (5, 10) for mode in ("sync", "async")]
    assert settings(points)[0] == {"batch_size": 5, "mode": "sync"}
    assert [(point.job.batch_size, point.job.mode, point.job.backend) for point in points][-1] == (10, "async", "torch")


def test_cases_are_combined_with_axes():
    cases = [{"nodes": 1}, {"nodes": 2, "cores_per_node": [1, 0.5]}]
    points = plan(Grid({"mode": ["sync", "async"]}, cases), BASE, {}, None)
    assert [point.name for point in points] == [
        "nodes=1,mode=sync",
        "nodes=1,mode=async",
        "nodes=2,cores_per_node=1+0.5,mode=sync",
        "nodes=2,cores_per_node=1+0.5,mode=async",
    ]
    assert points[2].job.cores_per_node == (1, 0.5)


def test_repeats_cover_all_points_before_the_next_seed():
    points = plan(Grid({"batch_size": [5, 10]}, (), 2), BASE, {"TRAINER_SEED": "7"}, None)
    assert [(point.job.batch_size, point.job.seed) for point in points] == [(5, 7), (10, 7), (5, 8), (10, 8)]
    assert points[0].name == "batch_size=5,seed=7"
    assert [point.job.seed for point in plan(Grid({}, (), 2), {**BASE, "seed": "3"}, {}, None)] == [3, 4]


def test_repeats_alone_are_a_sweep():
    assert [point.name for point in plan(Grid(repeats=2), BASE, {}, None)] == ["seed=0", "seed=1"]


def test_alternative_setting_replaces_that_of_the_file(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("backend = 'torch'\nbatch_size = 5\nepochs = 3\n[sweep]\ngrid = {global_batch_size = [64]}\ncases = [{steps = 9}]\n")
    (point,) = plan(read_grid(path), {}, {}, path)
    assert (point.job.batch_size, point.job.global_batch, point.job.epochs, point.job.steps) == (None, 64, None, 9)


@pytest.mark.parametrize(
    ("grid", "flags", "message"),
    [
        (Grid(), {}, "nothing to sweep"),
        (Grid({"batch_size": ["5", "0"]}), {}, r"point 2 of 2 \(batch_size=0\): .*at least 1"),
        (Grid({"batch_size": [5]}), {"batch_size": "7"}, r"--batch-size: batch_size is swept; --grid batch_size=7"),
        (Grid({"seed": [1, 2]}), {"seed": "7"}, r"--seed: seed is swept"),
        (Grid({"batch_size": [5, "5"]}), {}, "two points have the same settings: batch_size=5"),
        (Grid({"nodes": [2, 3]}), {"cores_per_node": "1,1"}, r"point 2 of 2 \(nodes=3\): .*3 nodes"),
        (Grid({"nesterov": [True]}), {}, r"point 1 of 1 \(nesterov=true\): .*momentum"),
        (Grid({"steps": [True]}), {}, r"point 1 of 1 .*got 'true'; allowed: a whole number"),
        (Grid({"model": ["logreg", "logrec"]}), {}, r"point 2 of 2 \(model=logrec\): .*Did you mean 'logreg'"),
    ],
)
def test_invalid_point_is_named_before_the_start(grid, flags, message):
    with pytest.raises(UsageError, match=message):
        plan(grid, {**BASE, **flags}, {}, None)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("sweep = 3", "grid = "),
        ("[sweep]\naxes = {}", "allowed: grid, cases, repeats"),
        ("[sweep]\ngrid = {batch_size = 5}", "grid: batch_size: got '5'; allowed: a list of values"),
        ("[sweep]\nbatch_size = 5", "write it above"),
        ("[sweep]\ngrid = {batch_size = []}", "grid"),
        ("[sweep]\ncases = {nodes = 2}", "cases"),
        ("[sweep]\ncases = [{}]", "cases"),
        ("[sweep]\nrepeats = true", "from 1 to 10000"),
        ("[sweep]\nrepeats = 0", "from 1 to 10000"),
        ("[sweep]\nrepeats = 99999999999", "from 1 to 10000"),
        ("[sweep]\ngrid = {bach_size = [5]}", "Did you mean 'batch_size'"),
        ("[sweep]\ncases = [{out = 'x'}]", "cannot be swept"),
        ("[sweep]\ngrid = {nodes = [1]}\ncases = [{nodes = 2}]", "decided by the cases"),
        ("[sweep]\ngrid = {seed = [1]}\nrepeats = 2", "goes through seeds"),
    ],
)
def test_invalid_table_is_refused(tmp_path, table, message):
    path = tmp_path / "job.toml"
    path.write_text(table)
    with pytest.raises(UsageError, match=message):
        read_grid(path)


MISPLACED = {
    "a list": ("{lines}", lambda lines: f"[sweep.grid]\n{lines}"),
    "a table": ("[grid]\n{lines}", lambda lines: f"[sweep.grid]\n{lines}"),
    "an inline table": ("grid = {{{inline}}}", lambda lines: f"[sweep.grid]\n{lines}"),
    "in the table": ("[sweep]\n{lines}", lambda lines: f"[sweep.grid]\n{lines}"),
    "cases": (
        "[[cases]]\nbatch_size = 5\n[[cases]]\nbatch_size = 10",
        lambda _: "[[sweep.cases]]\nbatch_size = 5\n[[sweep.cases]]\nbatch_size = 10",
    ),
    "repeats": ("repeats = 2", lambda _: "[sweep]\nrepeats = 2"),
}
"""Misplaced lines, and the same lines where the message places them."""


@pytest.mark.parametrize("command", ["run", "sweep"])
@pytest.mark.parametrize("name", MISPLACED)
def test_misplaced_grid_has_a_working_suggestion(tmp_path, capsys, name, command):
    lines = "batch_size = [5, 10]\nlr = [0.1]"
    wrong, mended = MISPLACED[name]
    path = tmp_path / "job.toml"
    path.write_text(f"backend = 'torch'\n{wrong.format(lines=lines, inline=lines.replace(chr(10), ', '))}\n")
    arguments = ["sweep", str(path), "--dry-run"] if command == "sweep" else ["run", "--config", str(path), "--print-config"]
    if (name, command) != ("in the table", "run"):
        assert main(arguments) == 2
        edited = mended(lines).splitlines()[0]
        assert edited in capsys.readouterr().err
    path.write_text(f"backend = 'torch'\n{mended(lines)}\n")
    assert main(arguments) == 0
    assert len(plan(read_grid(path), {}, {}, path)) == 2


def test_axis_of_the_command_line_replaces_the_file_s(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("[sweep]\ngrid = {batch_size = [5, 10], mode = ['sync', 'async']}\nrepeats = 3\n")
    grid = Grid({"mode": ["sync"], "lr": ["0.1"]}).merged_over(read_grid(path))
    assert grid == Grid({"batch_size": [5, 10], "mode": ["sync"], "lr": ["0.1"]}, (), 3)
    assert Grid(repeats=1).merged_over(read_grid(path)).repeats == 1


def test_run_of_a_file_with_a_sweep_is_its_base_job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("backend = 'torch'\nbatch_size = 7\n[sweep]\ngrid = {batch_size = [5, 10]}\n")
    assert resolve({}, {}, path).job.batch_size == 7


def test_point_names_are_folders(tmp_path):
    long = f"synthetic-images:size=64,classes=10,train={'0' * 300}512"
    grid = Grid({"data": [long, "synthetic-images:64"], "data_dir": [str(tmp_path / "a/b"), str(tmp_path / "a:b"), str(tmp_path / "a?b")]})
    names = [point.name for point in plan(grid, BASE, {}, None)]
    assert len(set(names)) == len(names) == 6
    assert all(len(name.encode()) < 255 and not set(name) & set("/:?") and not name.startswith(".") for name in names)


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 5, "mode": "async"},
        {"cores_per_node": [1.0, 0.25], "nodes": 2},
        {"nesterov": True, "momentum": 0.9, "save_final": False},
        {"lr": 3e-05, "until": "accuracy>=0.9", "eval_every": "500steps"},
    ],
)
def test_command_of_a_point_has_its_settings(settings):
    with run.make_context("run", as_arguments(settings)) as context:
        job = resolve(given_options(context), {}).job
    assert job.model_dump(mode="json") | settings == job.model_dump(mode="json")


def test_settings_are_described():
    assert (
        settings_text({"batch_size": 5, "cores_per_node": [1.0, 0.5], "nesterov": True})
        == "batch_size=5, cores_per_node=1+0.5, nesterov=true"
    )


def job(**fields):
    return Job.model_validate({"backend": "torch", **fields})


class TestTimeLeft:
    def test_updates_of_a_job_are_counted(self):
        assert updates(job(steps=7), None) == 7
        assert updates(job(epochs=2, batch_size=10, nodes=3), 60_000) == 4000
        assert updates(job(epochs=2, batch_size=10, nodes=3, mode="async"), 60_000) == 12_000
        assert updates(job(epochs=2), None) is None

    def test_rest_is_scaled_by_updates(self):
        done = [Finished(job(epochs=2, batch_size=10), 5.0, 10.0, 200, 1000.0)]
        assert seconds_left(done, [job(epochs=2, batch_size=20), job(epochs=2, batch_size=5)]) == pytest.approx(5 + 5 + 5 + 20)

    def test_most_similar_point_is_the_reference(self):
        slow = Finished(job(steps=100, mode="sync"), 1.0, 100.0, 100, None)
        quick = Finished(job(steps=100, mode="async"), 1.0, 1.0, 100, None)
        assert seconds_left([slow, quick], [job(steps=200, mode="async")]) == pytest.approx(3.0)
        assert seconds_left([slow, quick], [job(steps=200, mode="sync")]) == pytest.approx(201.0)

    def test_target_is_reached_as_early_as_before(self):
        done = [Finished(job(epochs=20, batch_size=10, until="accuracy>=0.9"), 5.0, 10.0, 200, 1000.0)]
        assert seconds_left(done, [job(epochs=20, batch_size=10, until="accuracy>=0.9", seed=2)]) == pytest.approx(15.0)
        assert seconds_left(done, [job(epochs=20, batch_size=20, until="accuracy>=0.9")]) == pytest.approx(10.0)
        assert seconds_left(done, [job(epochs=20, batch_size=10)]) == pytest.approx(5.0 + 100.0)

    def test_finished_run_is_read_from_a_summary(self):
        summary = {"examples": 500, "epochs": 0.5, "total_seconds": 12.0, "run_seconds": 10.0, "steps": 50}
        assert finished(job(steps=50), summary) == Finished(job(steps=50), 2.0, 10.0, 50, 1000.0)


@pytest.mark.parametrize(
    ("uri", "clean"),
    [
        ("http://alice:s3cret@host:5000/x?y=1", "http://host:5000/x?y=1"),
        ("http://host:5000", "http://host:5000"),
        ("sqlite:////tmp/x.db", "sqlite:////tmp/x.db"),
        ("sqlite:///x.db", "sqlite:///x.db"),
        ("postgresql+psycopg2://alice:s3@cret@host/runs", "postgresql+psycopg2://host/runs"),
        ("/tmp/a@b", "/tmp/a@b"),
    ],
)
def test_password_alone_is_removed(uri, clean):
    assert without_password(uri) == clean


def test_password_is_not_written(tmp_path):
    address = "http://alice:s3cret@host:5000"
    request = Request(None, {"backend": "torch", "mlflow": address}, Grid({"batch_size": ["5", "10"]}, (), None))
    points = request.plan({})
    with SweepFolder(tmp_path / "sweep", request, points, ["trainer", "sweep", "--mlflow", address]):
        assert points[0].job.mlflow == address
        text = (tmp_path / "sweep" / "sweep.json").read_text()
    assert "http://host:5000" in text
    assert "s3cret" not in text
    assert [point.name for point in read_request(tmp_path / "sweep").plan({})] == [point.name for point in points]


class TestCommand:
    def trainer(self, *arguments, cwd=None):
        command = [sys.executable, "-m", "crosstrain.cli.main", "sweep", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd, check=False)

    def test_dry_run_shows_commands_and_writes_nothing(self, tmp_path):
        shown = self.trainer("--backend", "torch", "--grid", "batch_size=5,10", "--dry-run", "--json", "--name", "s", cwd=tmp_path)
        assert shown.returncode == 0, shown.stderr
        commands = [point["command"] for point in json.loads(shown.stdout)["points"]]
        assert commands[1] == ["trainer", "run", "--backend", "torch", "--batch-size", "10", "--out", "runs/s", "--name", "batch_size=10"]
        assert list(tmp_path.iterdir()) == []

    def test_vocabularies_can_be_axes_and_settings(self, tmp_path):
        same = ["--backend", "torch", "--data", "numbers", "--model", "transformer:tiny", "--dry-run", "--name", "s"]
        swept = self.trainer(*same, "--grid", "vocabulary=300,400", cwd=tmp_path)
        assert ["--vocabulary 300 " in line and "--name vocabulary=300" in line for line in swept.stdout.splitlines()] == [True, False]
        planned = self.trainer(*same, "--vocabulary", "300", "--grid", "lr=0.1,0.2", cwd=tmp_path)
        assert ["--vocabulary 300 " in line for line in planned.stdout.splitlines()] == [True, True]

    @pytest.mark.thorough
    def test_sweep_is_resumed_by_name(self, tmp_path):
        request = Request(None, {"backend": "torch"}, Grid({"batch_size": ["5", "10"]}))
        SweepFolder(tmp_path / "runs/mine", request, request.plan({}), []).close()
        shown = self.trainer("--resume", "mine", "--dry-run", "--json", cwd=tmp_path)
        assert shown.returncode == 0, shown.stderr
        assert json.loads(shown.stdout)["path"] == "runs/mine"

    @pytest.mark.thorough
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--grid", "batch_size=5,0"], "point 2 of 2 (batch_size=0)"),
            (["--grid", "batch_size=5", "--grid", "batch_size=6"], "given twice"),
            (["--grid", "vocabulary=300,3"], "point 2 of 2 (vocabulary=3): vocabulary: got 3; allowed: "),
            (["--data", "digits", "--vocabulary", "300", "--grid", "lr=0.1,0.2"], "point 1 of 2 (lr=0.1): vocabulary: got 300"),
            (["--grid", "model=logreg,lograg"], "point 2 of 2 (model=lograg): --model: got 'lograg'"),
            (["--resume", "nowhere"], "not the folder of a sweep, nor the name of one in 'runs'"),
            (["--resume", ".", "--epochs", "3"], "give it alone"),
            (["no-such-config"], "cs744-alexnet"),
            (["--grid", "batch_size=5", "--name", "a/b"], "without slashes"),
            (["--grid", "batch_size=5", "--name", "full"], "is taken in 'runs' and no sweep"),
            (["--grid", "batch_size=5", "--name", "full", "--dry-run"], "is taken in 'runs' and no sweep"),
        ],
    )
    def test_invalid_request_exits_with_2(self, tmp_path, arguments, message):
        (tmp_path / "runs/full/something").mkdir(parents=True)
        text = ["--data", "numbers"] if "vocabulary=300,3" in arguments else []
        done = self.trainer(*([] if "--resume" in arguments else ["--backend", "torch", *text]), *arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
        assert done.stderr.startswith("error: ")
        assert [path.name for path in (tmp_path / "runs").iterdir()] == ["full"]


def test_too_many_points_are_refused_early():
    grid = Grid({"seed": range(10**6), "batch_size": range(1, 10**6)}, repeats=7)
    with pytest.raises(UsageError, match=r"the grid has 6,999,993,000,000 points; a sweep has at most 100,000\."):
        plan(grid, {"backend": "torch"}, {}, None)
