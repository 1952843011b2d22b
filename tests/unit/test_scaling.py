"""Speed-up and efficiency on figures worked out by hand, and rows by values of a setting."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from comparison_samples import made, written

from crosstrain.cli.commands.compare import compare
from crosstrain.core.errors import UsageError
from crosstrain.core.setting import SPEED
from crosstrain.report.compare.comparison import compare_runs
from crosstrain.report.compare.comparison_tables import default_tables, table_notes


def run_on(nodes, speed, name="", **job):
    return made(name or f"n{nodes}", nodes=nodes, summary={"examples_per_second": speed}, **job)


STRONG = [run_on(1, 1000.0, global_batch_size=60), run_on(2, 1500.0, global_batch_size=60), run_on(4, 2400.0, global_batch_size=60)]
WEAK = [run_on(1, 1000.0, "w1", batch_size=60), run_on(2, 1900.0, "w2", batch_size=60), run_on(3, 2700.0, "w3", batch_size=60)]


def series(comparison):
    """Return each series as kind, batch, and (nodes, speed-up, efficiency) of each point."""
    return [
        (scaling_series.kind, scaling_series.batch, [(point.nodes, point.speedup, point.efficiency) for point in scaling_series.points])
        for scaling_series in comparison.scaling
    ]


def test_fixed_global_batch_is_strong_scaling():
    comparison = compare_runs(list(reversed(STRONG)), by=["nodes"])
    assert series(comparison) == [("strong", 60, [(1, 1.0, 1.0), (2, 1.5, 0.75), (4, 2.4, 0.6)])]
    assert [entry.label for entry in comparison.entries] == ["1 node", "2 nodes", "4 nodes"]
    assert comparison.fits_neither == ()


def test_resized_run_has_no_efficiency():
    parts = [{"run_seconds": 0.0}, {"run_seconds": 2.0, "changed": {"nodes": [2, 1]}}]
    resized = run_on(2, 1500.0, global_batch_size=60, described={"segments": parts})
    comparison = compare_runs([STRONG[0], resized, STRONG[2]], by=["nodes"])
    assert series(comparison) == [("strong", 60, [(1, 1.0, 1.0), (2, 1.5, None), (4, 2.4, 0.6)])]


def test_superlinear_scaling_is_marked():
    """By more than the usual noise of single runs, or beyond the interval of repeats."""
    comparison = compare_runs([run_on(1, 1000.0, global_batch_size=60), run_on(2, 2300.0, global_batch_size=60)], by=["nodes"])
    assert [point.too_fast for point in comparison.scaling[0].points] == [False, True]
    assert default_tables(comparison)[-1].rows[-1][-1] == "115%‡"
    assert any(line.startswith("‡ significantly above 100 %") for line in table_notes(comparison))
    comparison = compare_runs([run_on(1, 1000.0, global_batch_size=60), run_on(2, 2050.0, global_batch_size=60)], by=["nodes"])
    assert not any(point.too_fast for point in comparison.scaling[0].points)
    repeats = [
        run_on(nodes, nodes * speed, f"n{nodes}-{seed}", global_batch_size=60, seed=seed)
        for nodes, speeds in ((1, (900.0, 1000.0, 1100.0)), (2, (1000.0, 1150.0, 1200.0)))
        for seed, speed in enumerate(speeds)
    ]
    comparison = compare_runs(repeats, by=["nodes"])
    assert comparison.scaling[0].points[1].efficiency > 1.1
    assert not comparison.scaling[0].points[1].too_fast  # within the noise of the repeats


def test_fixed_batch_per_worker_is_weak_scaling():
    comparison = compare_runs(WEAK, by=["nodes"])
    assert series(comparison) == [("weak", 60, [(1, 1.0, 1.0), (2, 1.9, 0.95), (3, 2.7, pytest.approx(0.9))])]


def test_smallest_run_is_the_base_and_misfits_are_named():
    stray = run_on(5, 100.0, "stray", batch_size=7)
    comparison = compare_runs([*STRONG, *WEAK[1:], stray], by=["nodes"])
    assert [(kind, batch, [nodes for nodes, *_ in points]) for kind, batch, points in series(comparison)] == [
        ("strong", 60, [1, 2, 4]),
        ("weak", 60, [1, 2, 3]),
    ]
    assert [comparison.entries[index].runs[0].name for index in comparison.fits_neither] == ["stray"]


def test_missing_single_node_run_uses_the_smallest():
    assert series(compare_runs(STRONG[1:], by=["nodes"])) == [("strong", 60, [(2, 1.0, 1.0), (4, 1.6, pytest.approx(0.8))])]


def test_modes_and_backends_are_separate_series():
    async_runs = [run_on(nodes, speed, f"a{nodes}", mode="async", global_batch_size=60) for nodes, speed in ((1, 500.0), (2, 1000.0))]
    comparison = compare_runs([*STRONG[:2], *async_runs], by=["nodes"])
    assert series(comparison) == [("strong", 60, [(1, 1.0, 1.0), (2, 2.0, 1.0)]), ("strong", 60, [(1, 1.0, 1.0), (2, 1.5, 0.75)])]
    assert [entry.label for entry in comparison.entries] == ["async, 1 node", "async, 2 nodes", "sync, 1 node", "sync, 2 nodes"]


def test_unknown_speed_has_no_speedup():
    comparison = compare_runs([STRONG[0], run_on(2, None, global_batch_size=60)], by=["nodes"])
    assert series(comparison) == [("strong", 60, [(1, 1.0, 1.0), (2, None, None)])]


def test_nodes_that_share_cores_are_marked():
    sharing = made("n2", nodes=2, global_batch_size=60, summary={"examples_per_second": 1500.0, "nodes_sharing_cores": 2})
    comparison = compare_runs([STRONG[0], sharing], by=["nodes"])
    assert SPEED in comparison.marks[1]
    (block,) = (block for block in default_tables(comparison) if block.title == "Scaling")
    assert block.rows == (("strong, global batch 60", "1", "1.00x", "100%"), ("", "2", "1.50x†", "75%†"))


def test_repeats_of_a_value_are_one_row():
    runs = [made(f"b{batch}s{seed}", batch_size=batch, seed=seed, summary={"examples_per_second": 100.0 * batch + seed})
            for batch in (64, 32) for seed in (0, 2)]  # fmt: skip
    comparison = compare_runs(runs, by=["batch-size"])
    assert [
        (dict(settings), entry.figures["examples_per_second"])
        for settings, entry in zip(comparison.settings, comparison.entries, strict=True)
    ] == [
        ({"batch per worker": "32", "runs": "2"}, 3201.0),
        ({"batch per worker": "64", "runs": "2"}, 6401.0),
    ]
    assert comparison.entries[0].sigmas["examples_per_second"] == pytest.approx(2**0.5)


IN_ORDER = [
    ("bandwidth", {"nodes": 2}, ["0.5mbit", "100mbit", "300mbit", "1gbit", None]),
    ("epochs", {}, [1, 2, 10]),
    ("steps", {"batch_size": 100}, [5, 20, 100]),
    ("eval_every", {}, ["2steps", "100steps", "0.25s", "0.5s", "30s", "2epochs", "10epochs", "end"]),
    ("checkpoint_every", {}, ["20steps", "100steps", "5s", "30s", "1epoch", None]),
    ("until", {}, [None, "accuracy>=0.85", "accuracy>=0.9", "loss<=0.3", "loss<=10"]),
    ("cores_per_node", {"nodes": 2}, ["0.5,1", "2", "2,1", "10,1", None]),
    ("batch_size", {}, [8, 16, 128]),
    ("data", {}, ["digits", "synthetic-images:8", "synthetic-images:64"]),
    ("seed", {}, [2, 10]),
]


@pytest.mark.parametrize(("key", "constant", "values"), IN_ORDER, ids=[case[0] for case in IN_ORDER])
def test_setting_values_are_in_numeric_order(key, constant, values):
    runs = [made(f"run{number}", **{key: value}, **constant) for number, value in enumerate(values)]
    for ordering in (runs, runs[::-1], sorted(runs, key=lambda run: str(run.job[key]))):
        assert [entry.runs[0].name for entry in compare_runs(ordering, by=[key]).entries] == [run.name for run in runs]


def test_releases_are_in_numeric_order():
    runs = [made(name, node={"kernel": name}) for name in ("6.10.0", "6.9.2", "6.9.11")]
    assert [entry.runs[0].name for entry in compare_runs(runs, by=["kernel"]).entries] == ["6.9.2", "6.9.11", "6.10.0"]


def test_seeds_are_rows_if_requested():
    runs = [made(f"m{mode}{seed}", mode=mode, seed=seed) for seed in (10, 9) for mode in ("sync", "async")]
    for fold in (True, False):
        comparison = compare_runs(runs[::2], by=["seed"], fold=fold)
        assert [(dict(settings), entry.seeds) for settings, entry in zip(comparison.settings, comparison.entries, strict=True)] == [
            ({"seed": "9"}, (9,)),
            ({"seed": "10"}, (10,)),
        ]
        assert comparison.comparability.faults == []
    assert [entry.label for entry in compare_runs(runs, by=["mode", "seed"]).entries] == [
        "async, seed 9",
        "async, seed 10",
        "sync, seed 9",
        "sync, seed 10",
    ]


def test_setting_without_effect_has_rows_too():
    runs = [made(f"t{tensorboard}s{seed}", tensorboard=tensorboard, seed=seed) for tensorboard in (True, False) for seed in (0, 1)]
    comparison = compare_runs(runs, by=["tensorboard"])
    assert [dict(settings) for settings in comparison.settings] == [
        {"TensorBoard's files": "off", "runs": "2"},
        {"TensorBoard's files": "on", "runs": "2"},
    ]
    assert [entry.label for entry in comparison.entries] == ["TensorBoard's files off", "TensorBoard's files on"]


SERIES = [
    (  # two weak series that share a global batch
        [("2x24", 2, 24), ("4x24", 4, 24), ("2x48", 2, 48), ("4x48", 4, 48)],
        ["2x24", "4x24", "2x48", "4x48"],
    ),
    (  # a weak series and another run
        [("2x48", 2, 48), ("3x48", 3, 48), ("4x24", 4, 24), ("4x48", 4, 48)],
        ["2x48", "3x48", "4x48", "4x24"],
    ),
    (  # a strong series and a weak one, which begin with the same run
        [("1x60", 1, 60), ("2x30", 2, 30), ("2x60", 2, 60), ("3x60", 3, 60), ("4x15", 4, 15)],
        ["1x60", "2x30", "4x15", "2x60", "3x60"],
    ),
    (  # two strong series
        [("1x120", 1, 120), ("1x60", 1, 60), ("2x60", 2, 60), ("2x30", 2, 30), ("3x40", 3, 40), ("3x20", 3, 20)],
        ["1x60", "2x30", "3x20", "1x120", "2x60", "3x40"],
    ),
]


@pytest.mark.parametrize(("points", "expected"), SERIES)
def test_rows_of_a_series_are_grouped_by_nodes(points, expected):
    runs = [made(name, nodes=nodes, batch_size=batch) for name, nodes, batch in points]
    for ordering in (runs, runs[::-1]):
        assert [entry.runs[0].name for entry in compare_runs(ordering, by=["nodes"]).entries] == expected


def test_series_of_two_modes_follow_each_other():
    runs = [made(f"{mode}{nodes}x{batch}", mode=mode, nodes=nodes, batch_size=batch)
            for nodes in (3, 2) for batch in (48, 24) for mode in ("sync", "async")]  # fmt: skip
    assert [entry.runs[0].name for entry in compare_runs(runs, by=["nodes"]).entries] == [
        f"{mode}{nodes}x{batch}" for mode in ("async", "sync") for batch in (24, 48) for nodes in (2, 3)
    ]


def test_runs_without_a_distinct_setting_keep_names():
    again = made("later", node={"kernel": "7"})
    assert [entry.label for entry in compare_runs([made(), again], by=["backend"]).entries] == ["torch, kernel 6.1.0", "torch, kernel 7"]
    faulty = made("cut", summary={"state": "failed"})
    comparison = compare_runs([made(), faulty], by=["backend"])
    assert [entry.label for entry in comparison.entries] == ["torch (one)", "torch (cut)"]
    assert [settings["run"] for settings in comparison.settings] == ["one", "cut"]


def test_unknown_setting_suggests_the_nearest():
    with pytest.raises(UsageError, match=r"--by: got 'bacth_size'; allowed: a setting, such as backend, .*Did you mean 'batch_size'\?"):
        compare_runs([made()], by=["bacth_size"])


def test_command_groups_by_nodes(tmp_path):
    paths = written(tmp_path, *STRONG)
    result = CliRunner().invoke(compare, [*paths, "--by", "nodes", "--json"], catch_exceptions=False)
    document = json.loads(result.output)
    assert [row["settings"] for row in document["rows"]] == [{"nodes": "1"}, {"nodes": "2"}, {"nodes": "4"}]
    assert document["scaling"] == [
        {
            "scaling": "strong",
            "global_batch_size": 60,
            "points": [
                {"row": 0, "nodes": 1, "speedup": 1.0, "parallel_efficiency": 1.0, "beyond_ideal": False},
                {"row": 1, "nodes": 2, "speedup": 1.5, "parallel_efficiency": 0.75, "beyond_ideal": False},
                {"row": 2, "nodes": 4, "speedup": 2.4, "parallel_efficiency": 0.6, "beyond_ideal": False},
            ],
        }
    ]
    assert document["in_no_scaling_series"] == []
