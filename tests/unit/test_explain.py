"""Verdicts on runs whose true bottleneck is written by hand."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from explained_runs import explained_run, time_shares, using
from hypothesis import given, settings
from hypothesis import strategies as st
from run_samples import a_job, open_run, summary_of

from crosstrain.cli.commands.explain import explain as command
from crosstrain.core.console import one_line
from crosstrain.core.errors import UsageError
from crosstrain.records.store.jsonl import DamagedRunError, write_document
from crosstrain.report.analysis.advice import advise
from crosstrain.report.analysis.diagnosis import diagnose, diagnose_evidence, read_evidence
from crosstrain.report.analysis.diagnosis_text import headline, notes, page
from crosstrain.report.analysis.evidence import read_shares, read_workers
from crosstrain.report.compare.run_tables import to_text
from crosstrain.report.runs.run import Run

MS = 1e-3
LINK = {"network_sent_bytes": 11_900_000, "network_received_bytes": 12_000_000}
"""In one second of training, at 100 Mbit/s: 95 and 96 percent of 12.5 MB/s."""
IDLE = {"network_sent_bytes": 100_000, "network_received_bytes": 100_000}


def steps(*, data=0.0, compute=0.0, network=0.0, count=2, **more):
    return [{"data": data * MS, "compute": compute * MS, "communicate": network * MS, **more} for _ in range(count)]


def judged(out, workers, **options):
    return diagnose(Run(explained_run(out, workers, **options)))


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    ("parts", "verdict", "limit"),
    [
        ({"compute": 8, "network": 1, "data": 1}, "compute", "CPU"),
        ({"compute": 1, "network": 8, "data": 1}, "network", "exchange"),
        ({"compute": 1, "network": 1, "data": 8}, "data", "data"),
    ],
)
def test_largest_part_of_step_is_the_verdict(tmp_path, mode, parts, verdict, limit):
    explanation = judged(tmp_path, steps(**parts), mode=mode)
    assert (explanation.verdict, explanation.candidates, explanation.slow_node) == (verdict, (verdict,), None)
    assert [node.limit for node in explanation.nodes] == [limit, limit]
    assert explanation.step_fractions[verdict] == pytest.approx(0.8)


@pytest.fixture(scope="module")
def four_nodes(tmp_path_factory):
    """Return the evidence of a run on four nodes, in both modes."""
    return {
        mode: read_evidence(Run(explained_run(tmp_path_factory.mktemp(mode), steps(compute=9, count=4), mode=mode)))
        for mode in ("sync", "async")
    }


@given(
    mode=st.sampled_from(["sync", "async"]),
    cause=st.sampled_from(["compute", "data", "communicate"]),
    share=st.floats(0.6, 0.99),
    rest=st.floats(0.0, 1.0),
    step_seconds=st.floats(1e-5, 10.0),
    unlike=st.lists(st.floats(0.9, 1.1), min_size=4, max_size=4),
    spread=st.floats(0.0, 0.05),
)
def test_majority_of_step_decides_at_any_scale(four_nodes, mode, cause, share, rest, step_seconds, unlike, spread):
    """One part has at least 60% of the step, two share the rest, and async workers vary by 10%."""
    first, second = (part for part in ("compute", "data", "communicate") if part != cause)
    parts = {cause: share, first: (1 - share) * rest, second: (1 - share) * (1 - rest)}
    workers = []
    for factor in unlike if mode == "async" else [1.0] * 4:
        workers.append({**{part: step_seconds * parts[part] * factor for part in parts}, "spread": spread})
    evidence = four_nodes[mode]
    updates = {"updates_by_worker": [1000] * 4, "train_seconds": 1000 * step_seconds, "run_seconds": 1000 * step_seconds}
    summary = {**evidence.summary, **updates, "time_shares": time_shares(workers)}
    known = read_workers(summary)
    explanation = diagnose_evidence(replace(evidence, summary=summary, workers=known, shares=read_shares(summary, known)))
    assert explanation.verdict == {"communicate": "network"}.get(cause, cause)
    assert sum(explanation.run_fractions.values()) == pytest.approx(1.0)
    assert sum(explanation.step_fractions.values()) == pytest.approx(1.0)


@given(
    mode=st.sampled_from(["sync", "async"]),
    times=st.floats(1.6, 100.0),
    slow=st.integers(0, 3),
    step_seconds=st.floats(1e-5, 10.0),
    network=st.floats(0.0, 0.3),
)
def test_straggler_of_four_is_named_at_any_scale(four_nodes, mode, times, slow, step_seconds, network):
    """Its work takes at least 1.6 times as long; the exchange up to 0.3 of an ordinary step."""
    workers = [{"compute": step_seconds * (times if node == slow else 1.0), "communicate": network * step_seconds} for node in range(4)]
    for worker in workers:
        worker["peers"] = step_seconds * times - worker["compute"] if mode == "sync" else 0.0
    evidence = four_nodes[mode]
    shares = time_shares(workers)
    rates = [1.0 / worker["step_seconds"] for worker in shares["workers"]]
    updates = {"updates_by_worker": [1000 * rate / max(rates) for rate in rates], "train_seconds": 1000 / max(rates)}
    summary = {**evidence.summary, **updates, "run_seconds": updates["train_seconds"], "time_shares": shares}
    known = read_workers(summary)
    explanation = diagnose_evidence(replace(evidence, summary=summary, workers=known, shares=read_shares(summary, known)))
    assert (explanation.verdict, explanation.slow_node, explanation.slowness) == ("peers", slow, pytest.approx(times))


SLOW_SYNC = [
    {"compute": 2 * MS, "peers": 8 * MS, "communicate": 1 * MS},
    {"compute": 10 * MS, "communicate": 1 * MS},
]
SLOW_ASYNC = [{"compute": 2 * MS, "communicate": 0.2 * MS}, {"compute": 10 * MS, "communicate": 0.2 * MS}]


def test_straggler_delays_others_in_sync_mode(tmp_path):
    explanation = judged(tmp_path, SLOW_SYNC)
    assert (explanation.verdict, explanation.slow_node, explanation.slowness) == ("peers", 1, pytest.approx(5.0))
    assert explanation.step_fractions["peers"] == pytest.approx(8 / 11)
    assert [node.limit for node in explanation.nodes] == ["peer", "CPU"]
    assert "workers wait for node 1 for 73% of a step; its own work takes 5.0 times as long" in headline(explanation)


def test_exchange_waiting_for_busy_node_is_attributed_to_it(tmp_path):
    """Two thirds are exchange; node 1 uses 90% of its 0.2 cores and the others little of theirs."""
    workers = [{"compute": 1 * MS, "peers": 3 * MS, "communicate": 8 * MS}, {"compute": 4 * MS, "communicate": 8 * MS}]
    explanation = judged(tmp_path, workers, node_figures=using((0.2, 0.8), (0.18, 0.2)))
    assert (explanation.verdict, explanation.slow_node, [node.limit for node in explanation.nodes]) == ("peers", 1, ["peer", "CPU"])
    assert "communication, 67% of the step, waits for it too, as it uses 90% of its cores" in headline(explanation)


@pytest.mark.parametrize(
    ("used", "more"),
    [
        (using((0.7, 0.8), (0.18, 0.2)), {}),  # the other node is as busy
        (using((0.2, 0.8), (0.1, 0.2)), {}),  # it has cores to spare
        (using((0.1, 0.2), (0.18, 0.2)), {}),  # no node may use more
        ([{**figures, **LINK} for figures in using((0.2, 0.8), (0.18, 0.2))], {"bandwidth": "100mbit"}),  # the link is full
        (using((0.2, 0.8), (0.18, 0.2)), {"mode": "async"}),
    ],
)
def test_exchange_with_other_cause_is_not_attributed_to_node(tmp_path, used, more):
    explanation = judged(tmp_path, steps(compute=2, network=8), node_figures=used, **more)
    assert (explanation.verdict, explanation.slow_node) == ("network", None)


def test_straggler_delays_none_in_async_mode(tmp_path):
    explanation = judged(tmp_path, SLOW_ASYNC, mode="async")
    assert (explanation.verdict, explanation.slow_node) == ("peers", 1)
    assert [node.limit for node in explanation.nodes] == ["CPU", "CPU"]
    assert explanation.nodes[1].updates_fraction == pytest.approx(98 / (455 + 98))
    assert "It makes 18% of the updates; no worker waits for it." in headline(explanation)


def test_one_fast_node_makes_no_straggler(tmp_path):
    workers = [{"compute": 2 * MS, "peers": 8 * MS}, {"compute": 10 * MS}, {"compute": 10 * MS}]
    explanation = judged(tmp_path, workers)
    assert (explanation.verdict, explanation.slow_node) == ("compute", None)
    assert [node.limit for node in explanation.nodes] == ["peer", "CPU", "CPU"]


def test_full_link_messages_and_transfer_are_distinguished(tmp_path):
    def cause(traffic, message_seconds, name):
        workers = steps(compute=2, network=8)
        options = {"node_figures": [traffic] * 2, "bandwidth": "100mbit", "name": name}
        return judged(tmp_path, workers, message_seconds=message_seconds, **options)

    full, messages, copies = cause(LINK, 7 * MS, "a"), cause(IDLE, 7 * MS, "b"), cause(IDLE, 0.1 * MS, "c")
    assert [explanation.network_cause for explanation in (full, messages, copies)] == ["link", "messages", "transfer"]
    assert {explanation.verdict for explanation in (full, messages, copies)} == {"network"}
    assert headline(full) == (
        "communication-bound: 80% of a worker's step is communication that computation does not hide, "
        "and node 0's link runs at 96% of 100 Mbit/s while it trains."
    )
    assert ": latency and overhead more than bandwidth" in headline(messages)
    assert "; an all-reduce of a few bytes takes 88% of the time of the full one" in headline(messages)
    assert "moving and summing 31.4 kB per step" in headline(copies)
    assert [node.limit for node in full.nodes] == ["link", "link"]


def test_interface_speed_is_a_limit(tmp_path):
    path = explained_run(tmp_path, steps(compute=2, network=8), node_figures=[LINK] * 2)
    interface = {"addresses": ["10.77.0.1"], "speed_bits_per_second": 100_000_000}
    without_speed = {"addresses": ["10.77.0.2"], "speed_bits_per_second": None}
    (path / "env.json").write_text(
        json.dumps({"schema": 1, "nodes": [{"interfaces": {"eth0": interface}}, {"interfaces": {"eth0": without_speed}}]})
    )
    explanation = diagnose(Run(path))
    assert explanation.network_cause == "link"
    assert (explanation.nodes[0].link.limit_source, explanation.nodes[0].link.fractions["sent_fraction"]) == ("eth0", pytest.approx(0.952))
    assert explanation.nodes[1].link.limit_bytes_per_second is None


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ({"train_seconds": 0.3, "eval_seconds": 0.6}, "evaluating"),
        ({"train_seconds": 0.3, "checkpoint_seconds": 0.6}, "saving"),
        ({"train_seconds": 0.2}, "other"),
    ],
)
@pytest.mark.parametrize("calibrated", [True, False])
def test_time_outside_training_is_the_verdict(tmp_path, figures, verdict, calibrated):
    explanation = judged(tmp_path, steps(compute=9, network=1), figures=figures, calibrated=calibrated)
    assert explanation.verdict == verdict
    assert sum(explanation.run_fractions.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_training_fraction_equals_summary(tmp_path, mode, calibrated):
    """Also if async workers are busy for only a fifth of it; idle time is part of training."""
    clock = {"train_seconds": 0.9, "eval_seconds": 0.05, "updates_by_worker": [18, 18] if mode == "async" else None}
    explanation = judged(tmp_path, steps(compute=10), mode=mode, figures=clock, calibrated=calibrated)
    assert explanation.training_fraction == pytest.approx(0.9)
    assert explanation.to_json()["training_fraction"] == pytest.approx(0.9)
    assert sum(explanation.run_fractions.values()) == pytest.approx(1.0)
    text = to_text(page(explanation, []))
    assert "of the run time: training 90%" in text
    assert ("training 90% (idle workers 72%: async, no updates to compute), evaluation 5%" in text) is (mode == "async" and calibrated)
    assert "idle and coordination 5%" in text


LOST = {"event": "attempt_failed", "time_seconds": 4.0, "detail": {"cause": "task worker-1 was killed\nby SIGKILL"}}
AWAY = {"event": "task_failed", "time_seconds": 6.0, "detail": {"task": "worker-1", "cause": "worker-1 stood still"}}


@pytest.mark.parametrize(
    ("figures", "events", "texts"),
    [
        (
            {"restarts": 2, "restart_seconds_lost": 0.75, "worker_restarts": 1, "worker_absent_seconds": 0.5},
            [LOST, {"event": "run_restarted", "time_seconds": 5.0, "detail": {"step": 1200, "nodes": [0, 2]}}, AWAY],
            [
                "The run was restarted (once, 0.75 s lost): updates since the checkpoint were repeated, and its tasks restarted.",
                "It resumed at 5.00 s after update 1,200 on 2 nodes.",
                "A worker was lost and replaced (once, 0.50 s in all): the others trained meanwhile, and no update was repeated.",
                f"Cause: {one_line(LOST['detail']['cause'])}; worker-1 stood still.",
            ],
        ),
        (
            {"restarts": 1},
            [{"event": "run_restarted", "time_seconds": 5.0, "detail": {"step": "NaN", "nodes": 3}}],
            ["(once)", "5.00 s after"],
        ),
        ({}, [LOST], []),
    ],
)
def test_restarts_are_noted_with_their_cost(tmp_path, figures, events, texts):
    none = dict.fromkeys(("restarts", "restart_seconds_lost", "worker_restarts", "worker_absent_seconds"))
    path = explained_run(tmp_path, steps(compute=9, network=1), figures={**none, "train_seconds": 0.2, **figures})
    (path / "events.jsonl").write_text("".join(json.dumps({"schema": 1, **event}) + "\n" for event in events))
    explanation = diagnose(Run(path))
    losses = [text for text in notes(explanation) if "restarted" in text or "replaced" in text or "Cause" in text]
    assert [text for text in texts if text not in " ".join(losses)] == []
    assert len(losses) == min(1, len(texts))
    assert {name: explanation.to_json()[name] for name in none} == {**none, **figures}
    assert ("restarts took 0.75 s of it" in headline(explanation)) is ("restart_seconds_lost" in figures)


def test_workers_without_tickets_are_idle(tmp_path):
    updates = {"updates_by_worker": [20, 20]}  # of 10 ms each, in one second
    explanation = judged(tmp_path, steps(compute=10), mode="async", figures=updates)
    assert (explanation.verdict, explanation.run_fractions["idle"]) == ("idle", pytest.approx(0.8))
    assert explanation.run_fractions["other"] == pytest.approx(0.0)
    assert headline(explanation).startswith(
        "idle workers: workers wait for their next steps, or for the run's end, for 80% of the run's 1.00 s; they get 4 steps at a time."
    )


def test_lead_within_spread_is_unclear(tmp_path):
    close = judged(tmp_path, steps(compute=5.5, network=4.5, spread=0.15), name="a")
    assert (close.verdict, set(close.candidates)) == ("unclear", {"compute", "network"})
    assert headline(close).startswith(
        "unclear: computation 55% ± 8% or communication 45% ± 8% of the run time (±: spread of the calibration)"
    )
    sure = judged(tmp_path, steps(compute=5.5, network=4.5, spread=0.01), name="b")
    assert sure.verdict == "compute"


def test_straggler_within_spread_is_unclear(tmp_path):
    workers = [{"compute": 6 * MS, "peers": 3.2 * MS, "spread": 0.1}, {"compute": 9.2 * MS, "spread": 0.1}]
    explanation = judged(tmp_path, workers)
    assert (explanation.verdict, set(explanation.candidates)) == ("unclear", {"compute", "peers"})
    assert headline(explanation).startswith(
        "unclear whether node 1 is a straggler: its own work takes 1.53 ± 0.31 times as long as the median worker's; the limit is 1.5."
    )


def test_exchange_quick_in_calibration_is_waiting(tmp_path):
    explanation = judged(tmp_path, steps(compute=2, network=8), message_seconds=1 * MS, mode="async")
    assert explanation.network_cause == "transfer"
    path = explanation.evidence
    calibration = {"workers": [{**entry, "communicate_seconds": 3.9 * MS} for entry in path.calibration["workers"]]}
    waits = diagnose_evidence(replace(path, calibration={**path.calibration, **calibration}))
    assert waits.network_cause == "waiting"
    assert "mostly overhead and waiting: a push and pull by itself takes 3.9 ms" in headline(waits)


def test_unclear_straggler_is_no_waiting_in_async_mode(tmp_path):
    explanation = judged(tmp_path, [{"compute": 6 * MS, "spread": 0.1}, {"compute": 9.2 * MS, "spread": 0.1}], mode="async")
    assert (explanation.verdict, set(explanation.candidates)) == ("unclear", {"compute", "peers"})
    assert "or the work of a slow node 100%" in headline(explanation)
    assert "waiting" not in headline(explanation)


def test_mixed_run_has_no_dominant_part(tmp_path):
    figures = {"run_seconds": 1.5, "train_seconds": 1.0, "eval_seconds": 0.35}
    explanation = judged(tmp_path, steps(compute=5, network=3, data=2), figures=figures)
    assert explanation.verdict == "mixed"
    assert headline(explanation).startswith("nothing dominates: computation 33%, ")


def test_without_calibration_there_is_no_verdict(tmp_path):
    path = explained_run(tmp_path, steps(compute=9), calibrated=False, figures={"data_wait_seconds": 0.25})
    explanation = diagnose(Run(path))
    assert (explanation.verdict, explanation.calibrated, [node.limit for node in explanation.nodes]) == ("unknown", False, [None, None])
    text = to_text(page(explanation, advise(explanation)))
    assert text.startswith("no verdict: the run was not calibrated.")
    assert "no calibration" in text
    assert "waiting for data 25%." in text
    assert "What would help" not in text


def test_summary_without_calibration_is_read(tmp_path):
    path = explained_run(tmp_path, steps(compute=9), calibrated=False)
    summary = json.loads((path / "summary.json").read_text())
    del summary["time_shares"]
    (path / "summary.json").write_text(json.dumps(summary))
    assert diagnose(Run(path)).verdict == "unknown"


def test_run_without_records_is_refused(tmp_path):
    writer = open_run(a_job(tmp_path, name="going"))
    with pytest.raises(
        UsageError, match=r"going' has no summary.json and no record of an update, for it is running; wait until it trains\."
    ):
        diagnose(Run(writer.path))
    writer.close()


def test_nodes_sharing_cores_are_noted(tmp_path):
    explanation = judged(tmp_path, steps(compute=9), figures={"nodes_sharing_cores": 2})
    assert "2 nodes share the same cores and compete for them" in to_text(page(explanation, []))


def test_node_short_of_cpu_is_named(tmp_path):
    """Computing for 90% of the time takes 0.9 of a core; the second node had 0.5."""
    used = [{"cpu_cores_used": {"mean": cores, "max": cores}, "cores_available": 2.0} for cores in (0.9, 0.5)]
    explanation = judged(tmp_path, steps(compute=9, network=1), node_figures=used, figures={"run_seconds": 2.0, "train_seconds": 2.0})
    assert [note for note in notes(explanation) if "short of CPU" in note] == [
        "Node 1 is short of CPU: it computes or loads data for 90% of its steps, which needs at least 0.90 cores, and got 0.50: "
        "other processes used the CPU."
    ]


# Other programs --------------------------------------------------------------------------------------------------------


def starving(*fractions):
    """Return figures of nodes that lost these fractions to other programs on 1.2 of 2 cores."""
    lost = [{"starved_fraction": fraction, "foreign_cpu_cores_used": 1.2} for fraction in fractions]
    return [{**figures, **taken} for figures, taken in zip(using(*[(0.5, 2.0)] * len(fractions)), lost, strict=True)]


@pytest.mark.parametrize(
    ("fractions", "more", "starved"),
    [
        ([0.4], {}, 0),
        ([0.2], {}, 0),
        ([0.1], {}, None),
        ([None], {}, None),
        ([0.1, 0.3], {}, 1),
        ([0.5, 0.5], {"nodes_sharing_cores": 2}, None),  # they also wait for each other
        ([0.7, 0.8], {"nodes_sharing_cores": 2}, 1),
        ([0.5], {"workers": 2}, None),
    ],
)
def test_starved_run_gets_no_advice(tmp_path, fractions, more, starved):
    explanation = judged(tmp_path, steps(compute=10, count=len(fractions)), node_figures=starving(*fractions), figures=more)
    if starved is None:
        assert (explanation.verdict, explanation.starved) == ("compute", None)
        return
    assert (explanation.verdict, explanation.candidates, explanation.starved.node) == ("starved", (), starved)
    assert advise(explanation) == []
    assert f"used 1.20 of the 2.00 cores that node {starved} may use, {fractions[starved]:.0%} of the CPU time" in headline(explanation)
    assert notes(explanation) == []
    assert explanation.to_json()["starved"]["fraction"] == fractions[starved]


def test_core_limit_below_foreign_use_is_named(tmp_path):
    taken = [{**node, "cores_available": 0.6} for node in starving(0.7)]
    explanation = judged(tmp_path, steps(compute=10, count=1), node_figures=taken)
    assert "other programs used 1.20 of the cores that node 0, limited to 0.60, runs on, 70% of the CPU time" in headline(explanation)


def test_unsampled_run_names_no_other_programs(tmp_path):
    used = [{"cpu_cores_used": {"mean": 0.1, "max": 0.1}, "cores_available": 2.0}] * 2
    explanation = judged(tmp_path, steps(compute=9, network=1), node_figures=used)
    assert [note for note in notes(explanation) if "processor" in note] == []


@pytest.mark.parametrize(
    ("lost", "available", "starved"),
    [(0.11, 0.67, True), (0.08, 0.67, False), (0.01, 2.0, False), (0.2, 2.0, True), (None, 2.0, True)],
)
def test_small_cpu_loss_of_idle_node_is_not_starvation(tmp_path, lost, available, starved):
    """A large fraction of little is little: the node computes for a small part of its time."""
    figures = [{**starving(0.27)[0], "cpu_cores_lost": lost, "cores_available": available}]
    assert (judged(tmp_path, steps(compute=10, count=1), node_figures=figures).verdict == "starved") == starved


def test_starved_run_needs_no_calibration(tmp_path):
    assert judged(tmp_path, steps(compute=10, count=1), node_figures=starving(0.4), calibrated=False).verdict == "starved"


# The command ----------------------------------------------------------------------------------------------------------


PAGE = """\
straggler: workers wait for node 1 for 73% of a step; its own work takes 5.0 times as long as the median worker's \
(it has 0.20 cores).

of the run time: training 100%, evaluation 0%, checkpoint pauses 0%, idle and coordination 0%
of a worker's step: computation 18%, data loading 0%, waiting for stragglers 73%, communication 9%
communication in a step of 11 ms (mean without the first updates): latency 100 µs (0.9%), transfer of the bytes 900 µs (8%); \
the gain of --exchange direct is unknown: the version that made this run did not measure it

                                 data  waiting for
node  bottleneck  computation  loading   stragglers  communication     CPU cores            sent        received
----------------------------------------------------------------------------------------------------------------
0     stragglers          18%       0%          73%             9%  0.30 of 1.00  100 kB/s (0.8%)  100 kB/s (0.8%)
1     CPU                 91%       0%           0%             9%  0.20 of 0.20  100 kB/s (0.8%)  100 kB/s (0.8%)
bottleneck and shares: of the node's steps; CPU cores: means over the whole run, evaluations and pauses included; \
sent and received: over its training time
largest memory of a node: peak RSS 300 MB, sampled PSS 180 MB. \
RSS counts shared memory in every process; PSS divides it among them, and is sampled rarely, so it is no peak.
"""


def slow_run(out):
    rates = {f"{name}_per_second": value for name, value in IDLE.items()}
    memory = [{"memory_rss_bytes": {"mean": 2e8, "max": rss}, "memory_pss_bytes": pss} for rss, pss in ((2e8, {"max": 1.8e8}), (3e8, None))]
    node_figures = [
        {**IDLE, **rates, **figures, **node_memory} for figures, node_memory in zip(using((0.3, 1.0), (0.2, 0.2)), memory, strict=True)
    ]
    return explained_run(out, SLOW_SYNC, node_figures=node_figures, bandwidth="100mbit", cores_per_node="1,0.2", half_fraction=0.55)


def test_page_equals_expected_text(tmp_path):
    result = CliRunner().invoke(command, ["explained", "--out", str(slow_run(tmp_path).parent)], catch_exceptions=False)
    shown = [" ".join(line.split()) for line in result.output.splitlines() if set(line) - set("─ ")]
    expected = [" ".join(line.split()) for line in PAGE.splitlines() if set(line) - set("-")]
    assert shown[: len(expected)] == expected


def test_command_prints_one_json_document(tmp_path):
    result = CliRunner().invoke(command, [str(slow_run(tmp_path)), "--json"], catch_exceptions=False)
    document = json.loads(result.output)
    assert (document["run"], document["verdict"], document["slow_node"], document["calibrated"]) == ("explained", "peers", 1, True)
    assert document["nodes"][1]["limit"] == "CPU"
    assert document["nodes"][1]["link"]["sent_fraction"] == pytest.approx(0.008)
    assert sum(document["run_fractions"].values()) == pytest.approx(1.0)
    assert {entry["option"] for entry in document["advice"]} >= {"--cores-per-node 0.6"}


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(0, 3))
def test_summary_without_figures_of_worker_node_is_damaged(workers, num_figures):
    with tempfile.TemporaryDirectory() as folder:
        path = explained_run(Path(folder), steps(compute=9, count=workers))
        summary = summary_of(path)
        write_document(path / "summary.json", {**summary, "per_node": summary["per_node"][:num_figures]})
        if num_figures >= workers:
            assert len(diagnose(Run(path)).nodes) == workers
        else:
            with pytest.raises(
                DamagedRunError, match=f"figures of {num_figures} nodes, but time_shares has workers on node {num_figures};"
            ):
                diagnose(Run(path))
