"""Explanations as text and JSON: of one run with its recommendations, and of several with the changes between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...records.node_usage import MIN_SECONDS
from ...records.store.jsonl import finite_json
from ...records.text import MAX_NODES_SHOWN, UNKNOWN, bytes_text, ends_of, memory_basis, number_text, rate_text, seconds_text
from ..compare.factors import Factor
from ..compare.ratios import geometric_mean
from ..runs.run import Run, as_recorded, diverged_text, labelled
from .advice import Advice
from .configurations import SPEED_FIGURE, Configuration, ConfigurationSet, called, configuration_set, shown
from .duration import AS_PLANNED, Wanted, duration
from .evidence import BESIDE_TRAINING, NAMES, SELDOM, Answer, bits_text, padding_text, percent
from .learning import checkpoint_files, learning, learning_rate, training_set
from .utilisation import hardware_use, network_use, step_time_and_network
from .verdict import NEARLY_ALL, NOTABLE, SLOW, Explanation, NodeView, exchange_text, explain, hidden_exchange

_HEADLINES = {
    "data": "data-bound: {share} of a worker's step is gathering, augmenting and normalising the batch.",
    "evaluating": "evaluation is the bottleneck: it takes {share} of the run time ({evaluations} of {evaluation_seconds} s).",
    "translating": "the final translation is the bottleneck: it takes {share} of the run time ({translate_seconds} s{unfinished}). "
    "It happens once, so its share falls in longer runs.",
    "saving": "checkpoints are the bottleneck: they pause training for {share} of the run time ({saved} saved), not counting background "
    "writing.",
    "profiling": "profiling is the bottleneck: it takes {share} of the run time ({profile_seconds} s). Run without --profile.",
    "idle": "idle workers: workers wait for their next steps, or for the run's end, for {share} of the run's {run_seconds} s; they get "
    "{group_size} steps at a time.",
    "other": "idle and coordination: {share} of the run's {run_seconds} s is neither training nor evaluation; {lost}.",
    "mixed": "nothing dominates: {candidates}.",
    "unknown": "no verdict: {why_unknown}.",
}


def headline(explanation: Explanation) -> str:
    """Return the verdict in a sentence with its figures."""
    if explanation.verdict in _HEADLINES:
        return _HEADLINES[explanation.verdict].format_map(_facts(explanation))
    writers = {"starved": _starved, "network": _network, "compute": _compute, "peers": _peers, "unclear": _unclear}
    return writers[explanation.verdict](explanation)


def _facts(explanation: Explanation) -> dict[str, str]:
    evidence, verdict = explanation.evidence, explanation.verdict
    summary = evidence.summary
    lost = summary.get("restart_seconds_lost") if evidence.part_began_seconds is None else None
    changed = "the run changed when it was resumed, and only its last part was calibrated"
    return {
        "share": percent((explanation.step_fractions if verdict == "data" else explanation.run_fractions).get(verdict)),
        "evaluations": f"{evidence.evaluations} evaluation{'s' if evidence.evaluations != 1 else ''}",
        "evaluation_seconds": number_text(summary["eval_seconds"] / max(1, evidence.evaluations), 3),
        "translate_seconds": number_text(summary["translate_seconds"], 1),
        "unfinished": "" if summary.get("translated") else ", and was not finished",
        "saved": str(evidence.saved),
        "profile_seconds": number_text(summary["profile_seconds"], 1),
        "run_seconds": number_text(summary["run_seconds"], 2),
        "group_size": number_text((summary.get("step_seconds") or {}).get("group_size"), 0),
        "lost": f"restarts took {number_text(lost, 2)} s of it" if lost else "measure a longer run",
        "candidates": _list(explanation, " and ") if explanation.candidates else "",
        "why_unknown": changed if evidence.steps_mixed else "the run was not calibrated",
    }


def _starved(explanation: Explanation) -> str:
    starvation = explanation.starved
    if starvation is None:
        raise ValueError("nobody took this run's cores")
    foreign, available = number_text(starvation.foreign_cores, 2), number_text(starvation.cores_available, 2)
    cores = f"{foreign} of the {available} cores that node {starvation.node} may use"
    if explanation.evidence.job.get("cores_per_node") or starvation.foreign_cores > starvation.cores_available:  # a quota on more cores
        cores = f"{foreign} of the cores that node {starvation.node}, limited to {available}, runs on"
    return (
        f"CPU contention: other programs used {cores}, {percent(starvation.fraction)} of the CPU time that its tasks needed. "
        "The figures below are of a busy machine, so there is no recommendation. Run it again on a quiet one."
    )


_NETWORK_HEADLINES = {
    "link": "{share}, and {link}.",
    "messages": "{share}: latency and overhead more than bandwidth{though}; {exchange} of a few bytes takes {few} of the time of the full "
    "one.",
    "waiting": "{share}, mostly overhead and waiting{though}: {exchange} by itself takes {alone}.",
    "transfer": "{share}, for moving and summing {payload} per step{though}.",
}


def _network(explanation: Explanation) -> str:
    evidence, busiest = explanation.evidence, explanation.evidence.busiest_link
    sync, link = evidence.summary["mode"] == "sync", ""
    if busiest is not None:
        speed = bits_text(busiest.limit_bytes_per_second or 0.0)
        link = f"node {busiest.node}'s link runs at {percent(busiest.fraction)} of {speed} while it trains"
    kind = "that computation does not hide" if sync else "with the parameter server"
    return _NETWORK_HEADLINES[explanation.network_cause or "transfer"].format(
        share=f"communication-bound: {percent(explanation.step_fractions['network'])} of a worker's step is communication {kind}",
        link=link,
        though=f"; no link is full ({link})" if link else "",
        exchange="an all-reduce" if sync else "a push and pull",
        few=percent(explanation.message_fraction),
        alone=seconds_text(evidence.exchange_seconds),
        payload=bytes_text(evidence.calibration["payload_bytes"]) if evidence.calibration else "the gradients",
    )


def _compute(explanation: Explanation) -> str:
    share, unknown = explanation.step_fractions["compute"], hidden_exchange(explanation.evidence)
    percentage = percent(share) if unknown is None else f"about {percent(share * (1 - unknown))} or more"
    text = f"compute-bound: {percentage} of a worker's step is forward, backward and update"
    busy = [view for view in explanation.nodes if view.gpu_utilization is not None and view.limit == "GPU"]
    if busy:
        return f"{text}; GPUs are busy for {percent(max(view.gpu_utilization or 0.0 for view in busy))} of the time."
    known = [view for view in explanation.nodes if view.cpu_cores_used is not None and view.cores_available is not None]
    if not known:
        return f"{text}."
    most = max(known, key=lambda view: view.cpu_fraction or 0.0)
    used, available = number_text(most.cpu_cores_used, 2), number_text(most.cores_available, 2)
    return f"{text}; node {most.node} uses {used} of the {available} cores it may use."


def _peers(explanation: Explanation) -> str:
    times = f"takes {number_text(explanation.slowness, 1)} times as long as the median worker's"
    view = next(view for view in explanation.nodes if view.node == explanation.slow_node)
    cores = "" if view.cores_available is None else f" (it has {number_text(view.cores_available, 2)} cores)"
    if explanation.evidence.summary["mode"] == "async":
        share = percent(view.updates_fraction)
        return f"straggler: the work of node {view.node} {times}{cores}. It makes {share} of the updates; no worker waits for it."
    waits, exchange = percent(explanation.step_fractions["peers"]), explanation.step_fractions["network"]
    text = f"straggler: workers wait for node {view.node} for {waits} of a step; its own work {times}{cores}"
    if exchange >= NOTABLE and explanation.network_cause != "link" and (view.cpu_fraction or 0.0) >= NEARLY_ALL:
        text += f"; communication, {percent(exchange)} of the step, waits for it too, as it uses {percent(view.cpu_fraction)} of its cores"
    return f"{text}."


def _unclear(explanation: Explanation) -> str:
    shares, slow = explanation.evidence.shares, explanation.slow_node
    doubtful = shares is not None and slow == shares.slowest.node and set(explanation.candidates) <= {"compute", "data", "peers"}
    if shares is not None and doubtful and abs(shares.slowness - SLOW) <= shares.slowness_uncertainty:
        times = f"{number_text(shares.slowness, 2)} ± {number_text(shares.slowness_uncertainty, 2)} times"
        return (
            f"unclear whether node {slow} is a straggler: its own work takes {times} as long as the median worker's; the limit is {SLOW}. "
            f"The bottleneck is {_list(explanation, ' or ')}."
        )
    return f"unclear: {_list(explanation, ' or ')}; the difference is too small to decide."


def _list(explanation: Explanation, joint: str) -> str:
    words, uncertain = [], False
    for component in explanation.candidates:
        name, fraction = NAMES[component], explanation.run_fractions[component]
        if component == "peers" and explanation.evidence.summary["mode"] == "async":  # in async mode own work shows a slow node
            name, fraction = "the work of a slow node", sum(explanation.run_fractions[part] for part in ("compute", "data"))
        spread = explanation.run_uncertainty.get(component, 0.0)
        uncertain |= spread >= 0.01
        more = f" ± {percent(spread)}" if spread >= 0.01 else ""
        words.append(f"{name} {percent(fraction)}{more}")
    listed = joint.join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    return f"{listed} of the run time{' (±: spread of the calibration)' if uncertain else ''}"


_UNCALIBRATED = "{} Only figures that were recorded during the run are shown."
NOT_CALIBRATED = "This run has no calibration (--no-calibrate, or it did not complete), so the components of its steps are unknown."
MIXED = "An older version of this program recorded step times over all parts of the run, so those of the calibrated part are unknown."


def _footnotes(explanation: Explanation) -> Iterator[str]:
    summary = explanation.evidence.summary
    over = "the whole run" if explanation.evidence.part_began_seconds is None else "the run since it was resumed"
    again = ", with what restarts had done again" if summary.get("restart_seconds_lost") else ""
    shares = "bottleneck and shares: of the node's steps; " if explanation.calibrated else ""
    yield f"{shares}CPU cores: means over {over}, evaluations and pauses included; sent and received: over its training time{again}"
    nodes = summary["per_node"]
    figures = [[(node.get(f"memory_{kind}_bytes") or {}).get("max") or 0 for node in nodes] for kind in ("rss", "pss")]
    rss, pss = (bytes_text(max(peaks, default=0) or None) for peaks in figures)
    sampled = "" if pss == UNKNOWN else f", sampled PSS {pss}"
    if rss != UNKNOWN:
        yield f"largest memory of a node: peak RSS {rss}{sampled}. {memory_basis(bool(sampled))}"


def page(explanation: Explanation, advice: Sequence[Advice]) -> RenderableType:
    """Return the whole output of `trainer explain`."""
    lines = [line for note in notes(explanation) for line in ("", note)]
    if advice:
        lines += ["", "What would help, by this run's figures:", *(f"  {entry.sentence}" for entry in advice)]
    first = (headline(explanation), "", _run_line(explanation), "")
    return Group(*first, _nodes(explanation), *_footnotes(explanation), *lines)


def _run_line(explanation: Explanation) -> str:
    run, began = explanation.run_fractions, explanation.evidence.part_began_seconds
    of = "of the run time" if began is None else f"of the time since the run was resumed at {number_text(began, 2)} s"
    idle = f" ({NAMES['idle']} {percent(run['idle'])}: async, no updates to compute)" if run.get("idle") else ""
    training = f"{of}: training {percent(explanation.training_fraction)}{idle}, {_beside(explanation)}"
    if not explanation.calibrated:
        return training
    unknown = hidden_exchange(explanation.evidence)
    shares = {component: percent(fraction) for component, fraction in explanation.step_fractions.items()}
    shares |= {} if unknown is None else {"network": f"unknown, at most about {percent(unknown)}"}
    steps = ", ".join(f"{NAMES[component]} {share}" for component, share in shares.items())
    costs = "" if explanation.exchange_costs is None else f"\n{exchange_text(explanation.exchange_costs)}"
    return f"{training}\nof a worker's step: {steps}{costs}"


def _beside(explanation: Explanation) -> str:
    fractions, job = explanation.run_fractions, explanation.evidence.job
    expected = {"translating": job.get("translation_signatures"), "profiling": job.get("profile")}
    shown = [name for name in (*BESIDE_TRAINING, "other") if name not in SELDOM or expected[name] or fractions[name]]
    return ", ".join(f"{NAMES[component]} {percent(fractions[component])}" for component in shown)


def _nodes(explanation: Explanation) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("node", no_wrap=True, vertical="bottom")
    table.add_column("bottleneck", no_wrap=True, vertical="bottom")
    for name in ("computation", "data\nloading", "waiting for\nstragglers", "communication", "CPU cores", "sent", "received"):
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    shown, some = ends_of(explanation.nodes, _waiting)
    if some:
        table.caption = f"Of {len(explanation.nodes):,} nodes: those that wait least for stragglers, and those that wait most."
    unknown = hidden_exchange(explanation.evidence) is not None
    for view in shown:
        step = {**(view.step_fractions or {}), **({"network": None} if unknown else {})}
        shares = (percent(step.get(component)) for component in ("compute", "data", "peers", "network"))
        cores = (
            UNKNOWN if view.cpu_cores_used is None else f"{number_text(view.cpu_cores_used, 2)} of {number_text(view.cores_available, 2)}"
        )
        table.add_row(str(view.node), _BOTTLENECKS.get(view.limit or UNKNOWN, view.limit), *shares, cores, *_traffic(view))
    return table


_BOTTLENECKS = {UNKNOWN: UNKNOWN, "data": "data loading", "exchange": "communication", "peer": "stragglers", "nothing": "none"}


def _waiting(view: NodeView) -> float | None:
    """Return how much of a step a node waits; without calibration, the negative CPU fraction."""
    if view.step_fractions is not None:
        return view.step_fractions.get("peers")
    return None if view.cpu_fraction is None else -view.cpu_fraction


def _traffic(view: NodeView) -> Iterator[str]:
    limit = view.link.limit_bytes_per_second
    for rate in (view.link.sent_bytes_per_second, view.link.received_bytes_per_second):
        yield bytes_text(rate, per_second=True) + (f" ({percent(rate / limit)})" if rate is not None and limit else "")


def _unfinished(state: str, recorded_until: float) -> str:
    at_work = state in ("starting", "running")
    ended = "was killed before it could write one" if state == "died" else f"ended without one (state: {state})"
    why = "is still running" if at_work else ended
    until, more = number_text(recorded_until, 1), "all later records" if at_work else "everything after its last record"
    return (
        f"The run has no summary.json, as it {why}: all figures are from its records up to {until} s on the run clock. "
        f"Missing: the calibration, a part of the start-up time, the shutdown time, and {more}."
    )


def notes(explanation: Explanation) -> list[str]:
    """Return the notes to the figures."""
    evidence = explanation.evidence
    texts = [] if evidence.recorded_until is None else [_unfinished(evidence.state, evidence.recorded_until)]
    texts += [
        text for text in (evidence.restarted, evidence.changed, diverged_text(evidence.summary), padding_text(evidence.summary)) if text
    ]
    if not explanation.calibrated:
        texts.append(_UNCALIBRATED.format(MIXED if evidence.steps_mixed else NOT_CALIBRATED))
        texts += _native(explanation)
    if explanation.starved is not None:
        return texts
    sharing = evidence.summary["nodes_sharing_cores"] or 1
    if sharing > 1:
        parts = "--cores-per-node gives each virtual node its own share; --threads sets the threads of each task"
        texts.append(f"{sharing} nodes share the same cores and compete for them. {parts}.")
    held_up = [text for text in (_held_up(explanation, view) for view in explanation.nodes) if text]
    if len(held_up) > MAX_NODES_SHOWN:
        held_up = [*held_up[:MAX_HELD_UP], f"So are {len(held_up) - MAX_HELD_UP:,} more of {len(explanation.nodes):,} nodes."]
    texts += held_up
    if "network" in explanation.candidates and evidence.busiest_link is None:
        texts.append("The links' capacity is unknown, so their utilisation cannot be computed (--bandwidth sets one for virtual nodes).")
    return texts


MAX_HELD_UP = 3  # nodes named, if there are very many
HELD_UP = 0.75  # a node with less of its needed cores is short of CPU


def _held_up(explanation: Explanation, view: NodeView) -> str | None:
    summary = explanation.evidence.summary
    if (
        summary["run_seconds"] < MIN_SECONDS
        or view.step_fractions is None
        or view.limit not in ("CPU", "data")
        or None in (view.cpu_cores_used, view.cores_available)
    ):
        return None
    working = sum(view.step_fractions[component] for component in ("compute", "data"))
    training = sum(explanation.run_fractions[component] for component in explanation.step_fractions)
    needed = working * training * min(summary["workers"] / summary["nodes"], view.cores_available or 0.0)
    if (view.cpu_cores_used or 0.0) >= HELD_UP * needed:
        return None
    return (
        f"Node {view.node} is short of CPU: it computes or loads data for {percent(working)} of its steps, which needs at least "
        f"{number_text(needed, 2)} cores, and got {number_text(view.cpu_cores_used, 2)}: other processes used the CPU."
    )


def _native(explanation: Explanation) -> list[str]:
    summary = explanation.evidence.summary
    workers = summary["workers"] if summary["mode"] == "async" else 1
    whole = workers * summary["train_seconds"]
    figures = (("data", summary["data_wait_seconds"]), ("other tasks", summary["network_wait_seconds"]))
    known = [f"for {what} {percent(seconds / whole)}" for what, seconds in figures if seconds is not None and whole]
    return [f"Recorded by the framework, as shares of the training time: waiting {', '.join(known)}."] if known else []


def held_back(diagnosis: Explanation) -> str:
    """Return the bottleneck of a run in a few words: ``communication, 68% of the step time``."""
    if diagnosis.verdict == "starved":
        return "CPU contention from other programs"
    if diagnosis.verdict == "unknown":
        return "unknown, as the run has no calibration"
    shares = (
        {**diagnosis.run_fractions, **diagnosis.step_fractions}
        if diagnosis.verdict in diagnosis.step_fractions
        else diagnosis.run_fractions
    )
    if diagnosis.verdict in shares:
        of = "step" if diagnosis.verdict in diagnosis.step_fractions else "run"
        return f"{NAMES[diagnosis.verdict]}, {percent(shares[diagnosis.verdict])} of the {of} time"
    largest = sorted(diagnosis.step_fractions.items(), key=lambda item: -item[1])[:2]
    parts = " and ".join(f"{NAMES[name]} {percent(share)}" for name, share in largest)
    return f"no single bottleneck{f', {parts} of the step time' if parts else ''}"


HEADER = ("run", "examples/s", "bottleneck")
MAX_COMPONENTS = 2  # parts of a step with the largest changes
MIN_CHANGE = 0.05  # usual difference of shares between runs of one job


@dataclass(frozen=True, slots=True)
class Change:
    """The changes between the ends of an axis, among otherwise equal configurations."""

    axis: str
    within: str  # common settings, empty without other axes
    first: str
    last: str
    step_fractions: Mapping[str, tuple[float, float]]  # of typical runs, by changed part of a step, at both ends
    examples_per_second: tuple[float, float] | None  # geometric means at both ends, None if one is unknown

    @property
    def sentence(self) -> str:
        """The changes as a sentence."""
        parts = [f"{NAMES[name]} {percent(before)} → {percent(after)} of a step" for name, (before, after) in self.step_fractions.items()]
        if self.examples_per_second is not None:
            parts.append(f"examples/s {' → '.join(rate_text(speed, '') for speed in self.examples_per_second)}")
        within = f" ({self.within})" if self.within else ""
        return f"{self.axis} {self.first} → {self.last}{within}: {', '.join(parts) or 'no part of a step changes'}."


@dataclass(frozen=True, slots=True)
class SeveralExplanations:
    """The runs with their bottlenecks, and the changes along the axes."""

    runs: tuple[tuple[Run, Explanation], ...]
    changes: tuple[Change, ...]

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """A row of `HEADER` texts per run."""
        return [
            (run.name, rate_text(explanation.evidence.summary.get("examples_per_second"), ""), held_back(explanation))
            for run, explanation in self.runs
        ]

    def page(self) -> RenderableType:
        """Return the whole output."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
        for name in HEADER:
            table.add_column(name, justify="right" if name == "examples/s" else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return Group(table, *(Text(change.sentence) for change in self.changes))

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        runs = [{**explanation.to_json(), "text": held_back(explanation)} for _, explanation in self.runs]
        plain: dict[str, Any] = finite_json({"runs": runs, "changes": [asdict(change) for change in self.changes]})
        return plain


def explain_several(runs: Sequence[Run]) -> SeveralExplanations:
    """Explain each run and the changes along the axes. Raises UsageError without updates."""
    every = labelled([as_recorded(run) for run in runs])
    explained = {id(run): explain(run) for run in every}
    configs = configuration_set(every)
    changes = [change for axis in configs.axes for group in configs.strata(axis) for change in _changes(configs, axis, group, explained)]
    return SeveralExplanations(tuple((run, explained[id(run)]) for config in configs.in_order for run in config.runs), tuple(changes))


def _changes(
    configs: ConfigurationSet, axis: Factor, group: Sequence[Configuration], explained: Mapping[int, Explanation]
) -> Iterable[Change]:
    known = [config for config in group if config.values[axis.key] is not None]
    ordered = sorted(known, key=lambda end: axis.order(end.values[axis.key]))
    if len({config.values[axis.key] for config in ordered}) < 2:
        return
    first, last = ordered[0], ordered[-1]
    ends = [explained[id(config.typical_run)] for config in (first, last)]
    steps = [end.step_fractions for end in ends]
    shares = {name: (steps[0][name], steps[1][name]) for name in steps[0] if name in steps[1]}
    largest = sorted(shares.items(), key=lambda item: -abs(item[1][1] - item[1][0]))[:MAX_COMPONENTS]
    changed = {name: pair for name, pair in largest if abs(pair[1] - pair[0]) >= MIN_CHANGE}
    speeds = [geometric_mean(figures) if (figures := config.figures(SPEED_FIGURE)) else None for config in (first, last)]
    yield Change(
        axis.label,
        called(configs.others(axis), first.values),
        shown(axis, first.values[axis.key]),
        shown(axis, last.values[axis.key]),
        changed,
        None if speeds[0] is None or speeds[1] is None else (speeds[0], speeds[1]),
    )


def answers(run: Run, explanation: Explanation, wanted: Wanted = AS_PLANNED) -> list[Answer]:
    """Return the answers about a run with a summary. Raises UsageError, DamagedRunError."""
    series, nodes = run.step_series(learning_rates=True), run.node_series()
    answered = [
        duration(run, series, wanted),
        learning(run, series),
        hardware_use(explanation),
        network_use(run, explanation, nodes),
        step_time_and_network(run, explanation, series, nodes),
        learning_rate(run, series),
        training_set(run),
        checkpoint_files(run),
    ]
    return [answer for answer in answered if answer is not None]


def answers_page(answered: Sequence[Answer]) -> RenderableType:
    """Return the answers as lines, each after its question."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for answer in answered:
        table.add_row(f"  {answer.question}", answer.text)
    return Group("", "Questions that people ask of a run (docs/explain.md):", table)


def answers_json(answered: Sequence[Answer]) -> dict[str, Any]:
    """Return the answers as JSON by their keys."""
    return {answer.key: {"text": answer.text, **answer.figures} for answer in answered}
