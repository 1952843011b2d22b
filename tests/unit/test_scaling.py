"""Speed-up and efficiency on figures worked out by hand, and rows by the values of a setting."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from comparison_samples import made, written

from crosstrain.cli.compare_command import compare
from crosstrain.core.errors import UsageError
from crosstrain.report.blocks import standard
from crosstrain.report.comparison import compare_runs
from crosstrain.report.rules import SPEED


def on(nodes, speed, name="", **job):
    return made(name or f"n{nodes}", nodes=nodes, summary={"examples_per_second": speed}, **job)


STRONG = [on(1, 1000.0, global_batch_size=60), on(2, 1500.0, global_batch_size=60), on(4, 2400.0, global_batch_size=60)]
WEAK = [on(1, 1000.0, "w1", batch_size=60), on(2, 1900.0, "w2", batch_size=60), on(3, 2700.0, "w3", batch_size=60)]


def series(comparison):
    """Each series as its kind, its batch, and (nodes, speed-up, efficiency) of each point."""
    return [(one.kind, one.batch, [(point.nodes, point.speedup, point.efficiency) for point in one.points]) for one in comparison.scaling]


def test_a_fixed_global_batch_is_strong_scaling():
    found = compare_runs(list(reversed(STRONG)), by=["nodes"])
    assert series(found) == [("strong", 60, [(1, 1.0, 1.0), (2, 1.5, 0.75), (4, 2.4, 0.6)])]
    assert [entry.label for entry in found.entries] == ["nodes 1", "nodes 2", "nodes 4"]
    assert found.fits_neither == ()


def test_a_fixed_batch_per_worker_is_weak_scaling():
    found = compare_runs(WEAK, by=["nodes"])
    assert series(found) == [("weak", 60, [(1, 1.0, 1.0), (2, 1.9, 0.95), (3, 2.7, pytest.approx(0.9))])]


def test_the_smallest_run_is_the_base_of_both_and_what_fits_neither_is_named():
    stray = on(5, 100.0, "stray", batch_size=7)
    found = compare_runs([*STRONG, *WEAK[1:], stray], by=["nodes"])
    assert [(kind, batch, [nodes for nodes, *_ in points]) for kind, batch, points in series(found)] == [
        ("strong", 60, [1, 2, 4]),
        ("weak", 60, [1, 2, 3]),
    ]
    assert [found.entries[index].runs[0].name for index in found.fits_neither] == ["stray"]


def test_without_a_run_on_one_node_the_smallest_is_the_base():
    assert series(compare_runs(STRONG[1:], by=["nodes"])) == [("strong", 60, [(2, 1.0, 1.0), (4, 1.6, pytest.approx(0.8))])]


def test_modes_and_backends_are_series_of_their_own():
    other = [on(nodes, speed, f"a{nodes}", mode="async", global_batch_size=60) for nodes, speed in ((1, 500.0), (2, 1000.0))]
    found = compare_runs([*STRONG[:2], *other], by=["nodes"])
    assert series(found) == [("strong", 60, [(1, 1.0, 1.0), (2, 2.0, 1.0)]), ("strong", 60, [(1, 1.0, 1.0), (2, 1.5, 0.75)])]
    assert [entry.label for entry in found.entries] == ["nodes 1, async", "nodes 2, async", "nodes 1, sync", "nodes 2, sync"]


def test_a_speed_that_is_not_known_gives_no_speedup():
    found = compare_runs([STRONG[0], on(2, None, global_batch_size=60)], by=["nodes"])
    assert series(found) == [("strong", 60, [(1, 1.0, 1.0), (2, None, None)])]


def test_nodes_that_fight_for_cores_are_marked():
    sharing = made("n2", nodes=2, global_batch_size=60, summary={"examples_per_second": 1500.0, "nodes_sharing_cores": 2})
    found = compare_runs([STRONG[0], sharing], by=["nodes"])
    assert SPEED in found.marks[1]
    (block,) = (block for block in standard(found) if block.title == "Scaling")
    assert block.rows == (("strong, global batch 60", "1", "1.00x", "100%"), ("", "2", "1.50x†", "75%†"))
    assert found.verdicts == ("Fastest by examples/s: no verdict: no two of them can be compared.",)


def test_repeats_of_a_value_are_one_row():
    runs = [made(f"b{batch}s{seed}", batch_size=batch, seed=seed, summary={"examples_per_second": 100.0 * batch + seed})
            for batch in (64, 32) for seed in (0, 2)]  # fmt: skip
    found = compare_runs(runs, by=["batch-size"])
    assert [
        (dict(settings), entry.figures["examples_per_second"]) for settings, entry in zip(found.settings, found.entries, strict=True)
    ] == [
        ({"batch per worker": "32", "runs": "2"}, 3201.0),
        ({"batch per worker": "64", "runs": "2"}, 6401.0),
    ]
    assert found.entries[0].sigmas["examples_per_second"] == pytest.approx(2**0.5)


def test_runs_that_no_setting_tells_apart_keep_their_names():
    again = made("later", node={"kernel": "7"})
    assert [entry.label for entry in compare_runs([made(), again], by=["backend"]).entries] == ["torch, kernel 6.1.0", "torch, kernel 7"]
    faulty = made("cut", summary={"state": "failed"})
    found = compare_runs([made(), faulty], by=["backend"])
    assert [entry.label for entry in found.entries] == ["torch (one)", "torch (cut)"]
    assert [settings["run"] for settings in found.settings] == ["one", "cut"]


def test_a_setting_that_there_is_not_names_the_near_one():
    with pytest.raises(UsageError, match=r"--by: got 'bacth_size'; allowed: a setting, such as backend, .*Did you mean 'batch_size'\?"):
        compare_runs([made()], by=["bacth_size"])


def test_the_command_groups_by_nodes(tmp_path):
    paths = written(tmp_path, *STRONG)
    result = CliRunner().invoke(compare, [*paths, "--by", "nodes", "--json"], catch_exceptions=False)
    document = json.loads(result.output)
    assert [row["settings"] for row in document["rows"]] == [{"nodes": "1"}, {"nodes": "2"}, {"nodes": "4"}]
    assert document["scaling"] == [
        {
            "scaling": "strong",
            "global_batch_size": 60,
            "points": [
                {"row": 0, "nodes": 1, "speedup": 1.0, "parallel_efficiency": 1.0},
                {"row": 1, "nodes": 2, "speedup": 1.5, "parallel_efficiency": 0.75},
                {"row": 2, "nodes": 4, "speedup": 2.4, "parallel_efficiency": 0.6},
            ],
        }
    ]
    assert document["in_no_scaling_series"] == []
