"""Advice against arithmetic done by hand; a step takes 10 ms unless noted."""

import json

import pytest
from click.testing import CliRunner
from explained_runs import explained_run, using

from crosstrain.cli.commands.run import run as run_command
from crosstrain.report.analysis.advice import advise
from crosstrain.report.analysis.diagnosis import diagnose
from crosstrain.report.analysis.diagnosis_text import headline, notes
from crosstrain.report.runs.run import Run

MS = 1e-3
FULL = {"network_sent_bytes": 12_500_000, "network_received_bytes": 0}
"""A hundred percent of 100 Mbit/s over a second of training."""


def steps(*, data=0.0, compute=0.0, network=0.0, count=2, **more):
    return [{"data": data * MS, "compute": compute * MS, "communicate": network * MS, **more} for _ in range(count)]


def advice(out, workers, **options):
    return {entry.option: entry for entry in advise(diagnose(Run(explained_run(out, workers, **options))))}


def test_doubled_batch_halves_the_exchange(tmp_path):
    """Computing takes 2 ms (1.2 ms for half), so 0.4 ms are fixed; twice the batch: 11.6 ms."""
    entry = advice(tmp_path, steps(compute=2, network=8), half_fraction=0.6)["--batch-size 64"]
    assert (entry.speedup, entry.bound) == (pytest.approx(2 * 10 / (10 + 1.6)), "about")
    assert "learning rate" in entry.caution


@pytest.mark.parametrize(("size", "advised"), [(127, False), (128, True)])
def test_batch_beyond_training_examples_is_not_advised(tmp_path, size, advised):
    """Two workers with a batch of 32: twice that is 128 examples."""
    path = explained_run(tmp_path, steps(compute=2, network=8))
    described = json.loads((path / "job.json").read_text())
    (path / "job.json").write_text(json.dumps({**described, "dataset": {"sizes": {"train": size, "test": 4}}}))
    assert ("--batch-size 64" in {entry.option for entry in advise(diagnose(Run(path)))}) is advised


def test_diverged_run_gets_no_advice(tmp_path):
    path = explained_run(tmp_path, steps(compute=2, network=8), figures={"non_finite_from_step": 3})
    explanation = diagnose(Run(path))
    assert advise(explanation) == []
    assert (
        notes(explanation)[0] == "The loss was not finite (NaN or infinite) from step 3 on: speed and resources are not those of training."
    )


def test_global_batch_is_doubled_globally(tmp_path):
    advised = advice(tmp_path, steps(compute=2, network=8), batch_size=None, global_batch_size=64)
    assert "--global-batch-size 128" in advised


def test_idle_time_of_async_workers_stays_fixed(tmp_path):
    """Each worker's 90 updates of 10 ms leave 10% of its second idle, which stays.

    Twice the examples take 11.6 ms instead of 20 ms.
    """
    options = {"mode": "async", "half_fraction": 0.6, "figures": {"updates_by_worker": [90, 90]}}
    advised = advice(tmp_path, steps(compute=2, network=8), **options)
    assert advised["--batch-size 64"].speedup == pytest.approx(1 / (0.1 + 0.9 * 11.6 / 20))


def test_single_node_may_be_faster_than_two(tmp_path):
    """2 ms for a batch without an exchange, against two batches in 10 ms."""
    entry = advice(tmp_path, steps(compute=2, network=8))["--nodes 1"]
    assert (entry.speedup, entry.bound) == (pytest.approx((1 / 2) / (2 / 10)), "about")
    assert "--nodes 1" not in advice(tmp_path, steps(compute=4.7, network=5.3), name="even")


def test_single_node_takes_whole_global_batch(tmp_path):
    """2 ms for half the batch, 0.4 ms of it fixed: 3.6 ms for all of it, against 10 ms on two."""
    options = {"half_fraction": 0.6, "batch_size": None, "global_batch_size": 64}
    entry = advice(tmp_path, steps(compute=2, network=8), **options)["--nodes 1"]
    assert (entry.speedup, entry.bound, entry.caution) == (pytest.approx(10 / 3.6), "about", None)


def test_single_node_is_faster_without_shared_cores(tmp_path):
    advised = advice(tmp_path, steps(compute=2, network=8), figures={"nodes_sharing_cores": 2})
    assert (advised["--nodes 1"].speedup, advised["--nodes 1"].bound) == (pytest.approx(2.5 / 1.02), "at least")
    assert "no sharing of cores" in advised["--nodes 1"].reason


@pytest.mark.parametrize(
    ("mode", "compute", "seen", "exchange", "spread", "measured"),
    [
        ("sync", 0.25, 4.18, 2.97, 0.06, 51212 / 13547),
        ("sync", 0.29, 3.09, 2.2, 0.06, 51212 / 17577),
        ("async", 0.55, 1.43, 0.12, 0.1, 20979 / 31059),
        ("sync", 0.92, 3.8, 3.0, 0.1, 20979 / 12783),
    ],
    ids=["tf", "tf again", "torch async", "torch"],
)
def test_single_node_estimate_keeps_step_overhead(tmp_path, mode, compute, seen, exchange, spread, measured):
    """Measured runs of logistic regression on two nodes that share cores, and on one process.

    Times are milliseconds of a step.
    """
    path = explained_run(
        tmp_path, [{"compute": compute * MS, "communicate": seen * MS, "spread": spread}] * 2, mode=mode, figures={"nodes_sharing_cores": 2}
    )
    document = json.loads((path / "calibration.json").read_text())
    document["workers"] = [{**worker, "communicate_seconds": exchange * MS} for worker in document["workers"]]
    (path / "calibration.json").write_text(json.dumps(document))
    advised = {entry.option: entry for entry in advise(diagnose(Run(path)))}
    entry = advised.get("--nodes 1" if mode == "sync" else "--nodes 1 --mode sync")
    assert entry is None or (entry.bound == "at least" and entry.speedup <= measured)


def test_single_task_on_a_node_is_advised(tmp_path):
    tasks = [{**worker, "node": 0} for worker in steps(compute=2, network=8)]
    advised = advice(tmp_path, tasks, nodes=1, procs_per_node=2, figures={"nodes": 1, "workers": 2})
    assert (advised["--procs-per-node 1"].speedup, advised["--procs-per-node 1"].bound) == (pytest.approx(2.5 / 1.02), "at least")
    assert not any(option.startswith("--nodes") for option in advised)


def test_doubled_bandwidth_halves_transfer(tmp_path):
    advised = advice(tmp_path, steps(compute=2, network=8), node_figures=[FULL] * 2, bandwidth="100mbit")
    assert advised["--bandwidth 200mbit"].speedup == pytest.approx(1 / (1 - 0.8 / 2))
    assert advised["--bandwidth 200mbit"].bound == "at most"
    idle = advice(
        tmp_path, steps(compute=2, network=8), node_figures=[{**FULL, "network_sent_bytes": 1000}] * 2, bandwidth="100mbit", name="idle"
    )
    assert not any(option.startswith("--bandwidth") for option in idle)


def test_doubled_bandwidth_is_a_valid_option(tmp_path):
    full = {**FULL, "network_sent_bytes": 75_000_000}
    advised = advice(tmp_path, steps(compute=2, network=8), node_figures=[full] * 2, bandwidth="600000kbit")
    assert "--bandwidth 1200000kbit" in advised


def test_more_parameter_servers_relieve_one_link(tmp_path):
    """31.4 kB at 12.5 MB/s: 398 per second.

    Three updates are 1.5 of them for each of two servers, and 4/3 for a ring.
    """
    advised = advice(tmp_path, steps(compute=1, network=9, count=3), mode="async", node_figures=[FULL] * 3, bandwidth="100mbit")
    assert advised["--ps 2"].speedup == pytest.approx(12.5e6 / 31400 * 3 / 1.5 / 300)
    assert advised["--mode sync"].speedup == pytest.approx(12.5e6 / 31400 * 3 / (4 / 3) / 300)
    assert {advised[option].bound for option in ("--ps 2", "--mode sync")} == {"at most"}
    sync = advice(tmp_path, steps(compute=1, network=9, count=3), node_figures=[FULL] * 3, bandwidth="100mbit", name="sync")
    assert not any(option.startswith(("--ps", "--mode")) for option in sync)


def test_worker_on_server_node_stays_local(tmp_path):
    """It makes 1000 updates per second locally; over the links all three together could not."""
    workers = [{"compute": 0.5 * MS, "communicate": 0.5 * MS}, *steps(compute=0.5, network=9.5)]
    advised = advice(tmp_path, workers, mode="async", node_figures=[FULL] * 3, bandwidth="100mbit")
    assert "--batch-size 64" in advised
    assert not any(option.startswith(("--ps", "--mode")) for option in advised)


def test_even_cores_are_advised(tmp_path):
    """The slow node's 8.8 of 11 ms become 2.93 ms on thrice the cores; 2.2 ms of waiting stay."""
    workers = [{"compute": 2 * MS, "peers": 8 * MS, "communicate": MS}, {"compute": 10 * MS, "communicate": MS}]
    figures = using((0.2, 1), (0.16, 0.2))
    advised = advice(tmp_path, workers, cores_per_node="1,0.2", node_figures=figures)
    assert (advised["--cores-per-node 0.6"].speedup, advised["--cores-per-node 0.6"].bound) == (
        pytest.approx(11 / (8.8 / 3 + 2.2)),
        "about",
    )
    assert (advised["--mode async"].speedup, advised["--mode async"].bound) == (pytest.approx((11 / 2 + 11 / 10) / 2), "at most")
    single_node = advised["--nodes 1 --cores-per-node 1"]
    assert (single_node.speedup, single_node.bound) == (pytest.approx(1 / 2 / (3 / 11)), "at least")


def test_even_cores_may_slow_other_nodes(tmp_path):
    """8 ms on one core become 13.3 ms on 0.6, more than the slow node's 20 ms become."""
    workers = [{"compute": 8 * MS, "peers": 11 * MS, "communicate": MS}, {"compute": 19 * MS, "communicate": MS}]
    advised = advice(tmp_path, workers, cores_per_node="1,0.2", node_figures=using((0.5, 1), (0.2, 0.2)))
    assert advised["--cores-per-node 0.6"].speedup == pytest.approx(20 / (8 / 0.6))


def test_exchange_bound_by_node_with_few_cores(tmp_path):
    """Most of the step is the exchange, which is bound by the slow node's fully used 0.2 cores."""
    workers = [{"compute": 1 * MS, "peers": MS, "communicate": 8 * MS}, {"compute": 2 * MS, "communicate": 8 * MS}]
    advised = advice(tmp_path, workers, cores_per_node="1,0.2", node_figures=using((0.3, 1), (0.18, 0.2)))
    assert advised["--cores-per-node 0.6"].speedup == pytest.approx(3)
    assert (advised["--mode async"].speedup, advised["--mode async"].bound) == (None, None)
    assert "does not tell" in advised["--mode async"].reason
    assert "--mode async" not in advice(tmp_path, workers, name="alike")


def test_exchange_scales_with_server_cores(tmp_path):
    """Its 0.2 cores become 0.6, all in use.

    8 + 8 ms become 5.33 ms there, and 1 + 8 ms become 1.67 + 2.67 ms on the other node.
    """
    workers = [{"compute": 8 * MS, "communicate": 8 * MS}, {"compute": 1 * MS, "communicate": 8 * MS}]
    limits = {"cores_per_node": "0.2,1", "node_figures": using((0.2, 0.2), (1, 1))}
    gained = advice(tmp_path, workers, mode="async", **limits)["--cores-per-node 0.6"]
    before, after = 1 / 16 + 1 / 9, 1 / (16 / 3) + 1 / (1 / 0.6 + 8 / 3)
    assert (gained.speedup, gained.bound) == (pytest.approx(after / before), "about")
    limits = {"cores_per_node": "1,0.2", "node_figures": using((1, 1), (0.2, 0.2))}
    assert "--cores-per-node 0.6" not in advice(tmp_path, workers[::-1], mode="async", name="lost", **limits)


def test_augmentation_may_be_disabled(tmp_path):
    advised = advice(tmp_path, steps(compute=1, data=9), augment="crop")
    assert (advised["--augment none"].speedup, advised["--augment none"].bound) == (pytest.approx(10), "at most")
    assert advice(tmp_path, steps(compute=1, data=9), name="plain") == {}


def test_unused_cores_suggest_threads(tmp_path):
    node = {"cores_available": 4.0, "cpu_cores_used": {"mean": 1.0, "max": 1.0}, "cpu_fraction": {"mean": 0.25, "max": 0.25}}
    options = {"node_figures": [node] * 2, "figures": {"nodes_sharing_cores": 1}, "half_fraction": 0.5, "threads": 1}
    advised = advice(tmp_path, steps(compute=10), **options)
    assert advised["--threads 4"].speedup == pytest.approx(4)
    assert advised["--threads 4"].bound == "at most"
    assert advised["--precision bf16"].speedup is None
    assert "slower on CPUs without bf16 instructions" in advised["--precision bf16"].reason
    on_gpu = advice(tmp_path, steps(compute=10), figures={"device_used": "gpu"}, name="gpu")
    assert on_gpu["--precision bf16"].reason.endswith("; by how much depends on the GPU")
    assert "--batch-size 64" not in advised  # everything grows with the batch
    shared = advice(tmp_path, steps(compute=10), **{**options, "figures": {"nodes_sharing_cores": 2}}, name="shared")
    assert "--threads 4" not in shared
    assert "--threads 4" not in advice(tmp_path, steps(compute=10), **{**options, "threads": None}, name="chosen")


@pytest.mark.parametrize(
    ("figures", "job", "option"),
    [
        ({"eval_seconds": 0.6}, {"eval_every": "2epochs"}, "--eval-every 4epochs"),
        ({"eval_seconds": 0.6}, {"eval_every": "50steps"}, "--eval-every 100steps"),
        ({"checkpoint_seconds": 0.6, "checkpoints": {"saved": 4, "failed": 0}}, {"checkpoint_every": "1.5s"}, "--checkpoint-every 3s"),
        ({"checkpoint_seconds": 0.6, "checkpoints": {"saved": 1, "failed": 0}}, {"checkpoint_every": "1.5s"}, None),
        ({"eval_seconds": 0.6}, {"eval_every": "end"}, None),
    ],
)
def test_rarer_evaluations_or_checkpoints_are_advised(tmp_path, figures, job, option):
    advised = advice(tmp_path, steps(compute=10), figures={"train_seconds": 0.4, **figures}, **job)
    assert list(advised) == ([option] if option else [])
    if option:
        assert advised[option].speedup == pytest.approx(1 / 0.7)


TRANSLATES = {"train_seconds": 0.3, "eval_seconds": 0.1, "translate_seconds": 0.6}


def test_final_translation_suggests_smaller_beam(tmp_path):
    path = explained_run(tmp_path, steps(compute=10), figures=TRANSLATES, eval_every="1epoch", beam=4)
    explanation = diagnose(Run(path))
    assert (explanation.verdict, explanation.run_fractions["translating"]) == ("translating", pytest.approx(0.6))
    assert [entry.option for entry in advise(explanation)] == ["--beam 1"]
    text = headline(explanation)
    assert text.startswith("the final translation is the bottleneck: it takes 60% of the run time (0.6 s, and was not ")
    greedy = explained_run(tmp_path, steps(compute=10), figures=TRANSLATES, eval_every="1epoch", beam=1, name="greedy")
    assert advise(diagnose(Run(greedy))) == []


def test_recommended_options_are_valid(tmp_path):
    """As shown, they make a valid job of the kind that they are recommended for."""
    runs = [
        explained_run(tmp_path, steps(compute=1, network=9, count=3), mode="async", node_figures=[FULL] * 3, bandwidth="100mbit", name="a"),
        explained_run(tmp_path, steps(compute=1, network=9), node_figures=[FULL] * 2, bandwidth="1.5gbit", name="b", batch_size=3),
        explained_run(tmp_path, steps(compute=1, data=9), augment="crop", name="c"),
        explained_run(tmp_path, steps(compute=9), name="d"),
        explained_run(tmp_path, steps(compute=9), figures={"train_seconds": 0.3, "eval_seconds": 0.6}, name="e"),
        explained_run(tmp_path, steps(compute=9), figures=TRANSLATES, beam=4, name="g"),
    ]
    options = [entry.option for run in runs for entry in advise(diagnose(Run(run)))]
    assert len(options) > 8
    usual = ["--nodes", "3", "--mode", "async"]
    typed = [[*([] if "--nodes" in text or "--mode sync" in text else usual), *text.split()] for text in options]
    limited = [{"compute": 2 * MS, "peers": 8 * MS, "communicate": MS}] * 2 + [{"compute": 10 * MS, "communicate": MS}]
    limits = ["--nodes", "3", "--cores-per-node", "1,0.5,0.2"]
    advised = advice(tmp_path, limited, cores_per_node="1,0.5,0.2", name="f")
    assert "--nodes 2 --cores-per-node 1,0.5" in advised
    typed += [[*limits, *option.split()] for option in advised]
    for arguments in typed:
        done = CliRunner().invoke(run_command, [*arguments, "--backend", "torch", "--print-config"], catch_exceptions=False)
        assert done.exit_code == 0, (arguments, done.output)
