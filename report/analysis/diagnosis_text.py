"""Diagnoses as text and JSON: of one run with recommendations, or of several with changes."""

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
from .configurations import SPEED_FIGURE, Configuration, ConfigurationSet, bare_value_text, configuration_set, values_label
from .diagnosis import NEARLY_ALL, NOTABLE, SLOW, Diagnosis, NodeView, diagnose, exchange_text, hidden_exchange
from .duration import AS_PLANNED, Wanted, duration
from .evidence import NAMES, PAUSE_COMPONENTS, SELDOM, Answer, bits_text, padding_text, percent
from .learning import checkpoint_files, learning, learning_rate, training_set
from .utilisation import hardware_use, network_use, step_time_and_network

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


def headline(diagnosis: Diagnosis) -> str:
    """Return the verdict in a sentence with its figures."""
    if diagnosis.verdict in _HEADLINES:
        return _HEADLINES[diagnosis.verdict].format_map(_facts(diagnosis))
    writers = {"starved": _contended, "network": _network, "compute": _compute, "peers": _peers, "unclear": _unclear}
    return writers[diagnosis.verdict](diagnosis)


def _facts(diagnosis: Diagnosis) -> dict[str, str]:
    evidence, verdict = diagnosis.evidence, diagnosis.verdict
    summary = evidence.summary
    lost = summary.get("restart_seconds_lost") if evidence.part_began_seconds is None else None
    changed = "the run changed when it was resumed, and only its last part was calibrated"
    return {
        "share": percent((diagnosis.step_fractions if verdict == "data" else diagnosis.run_fractions).get(verdict)),
        "evaluations": f"{evidence.evaluations} evaluation{'s' if evidence.evaluations != 1 else ''}",
        "evaluation_seconds": number_text(summary["eval_seconds"] / max(1, evidence.evaluations), 3),
        "translate_seconds": number_text(summary["translate_seconds"], 1),
        "unfinished": "" if summary.get("translated") else ", and was not finished",
        "saved": str(evidence.saved),
        "profile_seconds": number_text(summary["profile_seconds"], 1),
        "run_seconds": number_text(summary["run_seconds"], 2),
        "group_size": number_text((summary.get("step_seconds") or {}).get("group_size"), 0),
        "lost": f"restarts took {number_text(lost, 2)} s of it" if lost else "measure a longer run",
        "candidates": _candidates_text(diagnosis, " and ") if diagnosis.candidates else "",
        "why_unknown": changed if evidence.steps_mixed else "the run was not calibrated",
    }


def _contended(diagnosis: Diagnosis) -> str:
    starvation = diagnosis.starved
    if starvation is None:
        raise ValueError("nobody took this run's cores")
    foreign, available = number_text(starvation.foreign_cores, 2), number_text(starvation.cores_available, 2)
    cores = f"{foreign} of the {available} cores that node {starvation.node} may use"
    if diagnosis.evidence.job.get("cores_per_node") or starvation.foreign_cores > starvation.cores_available:  # a quota on more cores
        cores = f"{foreign} of the cores that node {starvation.node}, limited to {available}, runs on"
    return (
        f"CPU contention: other programs used {cores}, {percent(starvation.fraction)} of the CPU time that its tasks needed. "
        "The figures below are of a busy machine, so there is no recommendation. Run it again on a quiet one."
    )


_NETWORK_HEADLINES = {
    "link": "{share}, and {link}.",
    "messages": "{share}: latency and overhead more than bandwidth{though}; {exchange} of a few bytes takes {few} of the time of the full "
    "one.",
    "waiting": "{share}, mostly overhead and waiting{though}: {exchange} by itself takes {by_itself}.",
    "transfer": "{share}, for moving and summing {payload} per step{though}.",
}


def _network(diagnosis: Diagnosis) -> str:
    evidence, busiest = diagnosis.evidence, diagnosis.evidence.busiest_link
    sync, link = evidence.summary["mode"] == "sync", ""
    if busiest is not None:
        speed = bits_text(busiest.limit_bytes_per_second or 0.0)
        link = f"node {busiest.node}'s link runs at {percent(busiest.fraction)} of {speed} while it trains"
    kind = "that computation does not hide" if sync else "with the parameter server"
    return _NETWORK_HEADLINES[diagnosis.network_cause or "transfer"].format(
        share=f"communication-bound: {percent(diagnosis.step_fractions['network'])} of a worker's step is communication {kind}",
        link=link,
        though=f"; no link is full ({link})" if link else "",
        exchange="an all-reduce" if sync else "a push and pull",
        few=percent(diagnosis.message_fraction),
        by_itself=seconds_text(evidence.exchange_seconds),
        payload=bytes_text(evidence.calibration["payload_bytes"]) if evidence.calibration else "the gradients",
    )


def _compute(diagnosis: Diagnosis) -> str:
    share, unknown = diagnosis.step_fractions["compute"], hidden_exchange(diagnosis.evidence)
    percentage = percent(share) if unknown is None else f"about {percent(share * (1 - unknown))} or more"
    text = f"compute-bound: {percentage} of a worker's step is forward, backward and update"
    busy = [view for view in diagnosis.nodes if view.gpu_utilization is not None and view.limit == "GPU"]
    if busy:
        return f"{text}; GPUs are busy for {percent(max(view.gpu_utilization or 0.0 for view in busy))} of the time."
    known = [view for view in diagnosis.nodes if view.cpu_cores_used is not None and view.cores_available is not None]
    if not known:
        return f"{text}."
    most = max(known, key=lambda view: view.cpu_fraction or 0.0)
    used, available = number_text(most.cpu_cores_used, 2), number_text(most.cores_available, 2)
    return f"{text}; node {most.node} uses {used} of the {available} cores it may use."


def _peers(diagnosis: Diagnosis) -> str:
    times = f"takes {number_text(diagnosis.slowness, 1)} times as long as the median worker's"
    view = next(view for view in diagnosis.nodes if view.node == diagnosis.slow_node)
    cores = "" if view.cores_available is None else f" (it has {number_text(view.cores_available, 2)} cores)"
    if diagnosis.evidence.summary["mode"] == "async":
        share = percent(view.updates_fraction)
        return f"straggler: the work of node {view.node} {times}{cores}. It makes {share} of the updates; no worker waits for it."
    waits, exchange = percent(diagnosis.step_fractions["peers"]), diagnosis.step_fractions["network"]
    text = f"straggler: workers wait for node {view.node} for {waits} of a step; its own work {times}{cores}"
    if exchange >= NOTABLE and diagnosis.network_cause != "link" and (view.cpu_fraction or 0.0) >= NEARLY_ALL:
        text += f"; communication, {percent(exchange)} of the step, waits for it too, as it uses {percent(view.cpu_fraction)} of its cores"
    return f"{text}."


def _unclear(diagnosis: Diagnosis) -> str:
    shares, slow = diagnosis.evidence.shares, diagnosis.slow_node
    doubtful = shares is not None and slow == shares.slowest.node and set(diagnosis.candidates) <= {"compute", "data", "peers"}
    if shares is not None and doubtful and abs(shares.slowness - SLOW) <= shares.slowness_uncertainty:
        times = f"{number_text(shares.slowness, 2)} ± {number_text(shares.slowness_uncertainty, 2)} times"
        return (
            f"unclear whether node {slow} is a straggler: its own work takes {times} as long as the median worker's; the limit is {SLOW}. "
            f"The bottleneck is {_candidates_text(diagnosis, ' or ')}."
        )
    return f"unclear: {_candidates_text(diagnosis, ' or ')}; the difference is too small to decide."


def _candidates_text(diagnosis: Diagnosis, joint: str) -> str:
    words, uncertain = [], False
    for component in diagnosis.candidates:
        name, fraction = NAMES[component], diagnosis.run_fractions[component]
        if component == "peers" and diagnosis.evidence.summary["mode"] == "async":  # in async mode own work shows a slow node
            name, fraction = "the work of a slow node", sum(diagnosis.run_fractions[part] for part in ("compute", "data"))
        spread = diagnosis.run_uncertainty.get(component, 0.0)
        uncertain |= spread >= 0.01
        more = f" ± {percent(spread)}" if spread >= 0.01 else ""
        words.append(f"{name} {percent(fraction)}{more}")
    listed = joint.join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    return f"{listed} of the run time{' (±: spread of the calibration)' if uncertain else ''}"


_UNCALIBRATED = "{} Only figures that were recorded during the run are shown."
NOT_CALIBRATED = "This run has no calibration (--no-calibrate, or it did not complete), so the components of its steps are unknown."
MIXED = "An older version of this program recorded step times over all parts of the run, so those of the calibrated part are unknown."


def _footnotes(diagnosis: Diagnosis) -> Iterator[str]:
    summary = diagnosis.evidence.summary
    over = "the whole run" if diagnosis.evidence.part_began_seconds is None else "the run since it was resumed"
    again = ", with what restarts had done again" if summary.get("restart_seconds_lost") else ""
    shares = "bottleneck and shares: of the node's steps; " if diagnosis.calibrated else ""
    yield f"{shares}CPU cores: means over {over}, evaluations and pauses included; sent and received: over its training time{again}"
    nodes = summary["per_node"]
    figures = [[(node.get(f"memory_{kind}_bytes") or {}).get("max") or 0 for node in nodes] for kind in ("rss", "pss")]
    rss, pss = (bytes_text(max(peaks, default=0) or None) for peaks in figures)
    sampled = "" if pss == UNKNOWN else f", sampled PSS {pss}"
    if rss != UNKNOWN:
        yield f"largest memory of a node: peak RSS {rss}{sampled}. {memory_basis(bool(sampled))}"


def page(diagnosis: Diagnosis, advice: Sequence[Advice]) -> RenderableType:
    """Return the whole output of `trainer explain`."""
    lines = [line for note in notes(diagnosis) for line in ("", note)]
    if advice:
        lines += ["", "What would help, by this run's figures:", *(f"  {entry.sentence}" for entry in advice)]
    first = (headline(diagnosis), "", _run_line(diagnosis), "")
    return Group(*first, _nodes(diagnosis), *_footnotes(diagnosis), *lines)


def _run_line(diagnosis: Diagnosis) -> str:
    run, began = diagnosis.run_fractions, diagnosis.evidence.part_began_seconds
    of = "of the run time" if began is None else f"of the time since the run was resumed at {number_text(began, 2)} s"
    idle = f" ({NAMES['idle']} {percent(run['idle'])}: async, no updates to compute)" if run.get("idle") else ""
    training = f"{of}: training {percent(diagnosis.training_fraction)}{idle}, {_pauses_text(diagnosis)}"
    if not diagnosis.calibrated:
        return training
    unknown = hidden_exchange(diagnosis.evidence)
    shares = {component: percent(fraction) for component, fraction in diagnosis.step_fractions.items()}
    shares |= {} if unknown is None else {"network": f"unknown, at most about {percent(unknown)}"}
    steps = ", ".join(f"{NAMES[component]} {share}" for component, share in shares.items())
    costs = "" if diagnosis.exchange_costs is None else f"\n{exchange_text(diagnosis.exchange_costs)}"
    return f"{training}\nof a worker's step: {steps}{costs}"


def _pauses_text(diagnosis: Diagnosis) -> str:
    fractions, job = diagnosis.run_fractions, diagnosis.evidence.job
    expected = {"translating": job.get("translation_signatures"), "profiling": job.get("profile")}
    shown = [name for name in (*PAUSE_COMPONENTS, "other") if name not in SELDOM or expected[name] or fractions[name]]
    return ", ".join(f"{NAMES[component]} {percent(fractions[component])}" for component in shown)


def _nodes(diagnosis: Diagnosis) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("node", no_wrap=True, vertical="bottom")
    table.add_column("bottleneck", no_wrap=True, vertical="bottom")
    for name in ("computation", "data\nloading", "waiting for\nstragglers", "communication", "CPU cores", "sent", "received"):
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    shown, some = ends_of(diagnosis.nodes, _waiting)
    if some:
        table.caption = f"Of {len(diagnosis.nodes):,} nodes: those that wait least for stragglers, and those that wait most."
    unknown = hidden_exchange(diagnosis.evidence) is not None
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


def notes(diagnosis: Diagnosis) -> list[str]:
    """Return the notes to the figures."""
    evidence = diagnosis.evidence
    texts = [] if evidence.recorded_until is None else [_unfinished(evidence.state, evidence.recorded_until)]
    texts += [
        text for text in (evidence.restarted, evidence.changed, diverged_text(evidence.summary), padding_text(evidence.summary)) if text
    ]
    if not diagnosis.calibrated:
        texts.append(_UNCALIBRATED.format(MIXED if evidence.steps_mixed else NOT_CALIBRATED))
        texts += _framework_waits(diagnosis)
    if diagnosis.starved is not None:
        return texts
    sharing = evidence.summary["nodes_sharing_cores"] or 1
    if sharing > 1:
        parts = "--cores-per-node gives each virtual node its own share; --threads sets the threads of each task"
        texts.append(f"{sharing} nodes share the same cores and compete for them. {parts}.")
    shortages = [text for text in (_cpu_shortage(diagnosis, view) for view in diagnosis.nodes) if text]
    if len(shortages) > MAX_NODES_SHOWN:
        shortages = [*shortages[:MAX_SHORTAGES], f"So are {len(shortages) - MAX_SHORTAGES:,} more of {len(diagnosis.nodes):,} nodes."]
    texts += shortages
    if "network" in diagnosis.candidates and evidence.busiest_link is None:
        texts.append("The links' capacity is unknown, so their utilisation cannot be computed (--bandwidth sets one for virtual nodes).")
    return texts


MAX_SHORTAGES = 3  # nodes named, if there are very many
MIN_CPU_SHARE = 0.75  # a node with less of its needed cores is short of CPU


def _cpu_shortage(diagnosis: Diagnosis, view: NodeView) -> str | None:
    summary = diagnosis.evidence.summary
    if (
        summary["run_seconds"] < MIN_SECONDS
        or view.step_fractions is None
        or view.limit not in ("CPU", "data")
        or None in (view.cpu_cores_used, view.cores_available)
    ):
        return None
    working = sum(view.step_fractions[component] for component in ("compute", "data"))
    training = sum(diagnosis.run_fractions[component] for component in diagnosis.step_fractions)
    needed = working * training * min(summary["workers"] / summary["nodes"], view.cores_available or 0.0)
    if (view.cpu_cores_used or 0.0) >= MIN_CPU_SHARE * needed:
        return None
    return (
        f"Node {view.node} is short of CPU: it computes or loads data for {percent(working)} of its steps, which needs at least "
        f"{number_text(needed, 2)} cores, and got {number_text(view.cpu_cores_used, 2)}: other processes used the CPU."
    )


def _framework_waits(diagnosis: Diagnosis) -> list[str]:
    summary = diagnosis.evidence.summary
    workers = summary["workers"] if summary["mode"] == "async" else 1
    whole = workers * summary["train_seconds"]
    figures = (("data", summary["data_wait_seconds"]), ("other tasks", summary["network_wait_seconds"]))
    known = [f"for {what} {percent(seconds / whole)}" for what, seconds in figures if seconds is not None and whole]
    return [f"Recorded by the framework, as shares of the training time: waiting {', '.join(known)}."] if known else []


def bottleneck_text(diagnosis: Diagnosis) -> str:
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
class SeveralDiagnoses:
    """The runs with their bottlenecks, and the changes along the axes."""

    runs: tuple[tuple[Run, Diagnosis], ...]
    changes: tuple[Change, ...]

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """A row of `HEADER` texts per run."""
        return [
            (run.name, rate_text(diagnosis.evidence.summary.get("examples_per_second"), ""), bottleneck_text(diagnosis))
            for run, diagnosis in self.runs
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
        runs = [{**diagnosis.to_json(), "text": bottleneck_text(diagnosis)} for _, diagnosis in self.runs]
        plain: dict[str, Any] = finite_json({"runs": runs, "changes": [asdict(change) for change in self.changes]})
        return plain


def diagnose_several(runs: Sequence[Run]) -> SeveralDiagnoses:
    """Explain each run and the changes along the axes. Raises UsageError without updates."""
    every = labelled([as_recorded(run) for run in runs])
    diagnosed = {id(run): diagnose(run) for run in every}
    configs = configuration_set(every)
    changes = [change for axis in configs.axes for group in configs.strata(axis) for change in _changes(configs, axis, group, diagnosed)]
    return SeveralDiagnoses(tuple((run, diagnosed[id(run)]) for config in configs.in_order for run in config.runs), tuple(changes))


def _changes(
    configs: ConfigurationSet, axis: Factor, group: Sequence[Configuration], diagnosed: Mapping[int, Diagnosis]
) -> Iterable[Change]:
    known = [config for config in group if config.values[axis.key] is not None]
    ordered = sorted(known, key=lambda end: axis.order(end.values[axis.key]))
    if len({config.values[axis.key] for config in ordered}) < 2:
        return
    first, last = ordered[0], ordered[-1]
    ends = [diagnosed[id(config.median_run)] for config in (first, last)]
    steps = [end.step_fractions for end in ends]
    shares = {name: (steps[0][name], steps[1][name]) for name in steps[0] if name in steps[1]}
    largest = sorted(shares.items(), key=lambda item: -abs(item[1][1] - item[1][0]))[:MAX_COMPONENTS]
    changed = {name: pair for name, pair in largest if abs(pair[1] - pair[0]) >= MIN_CHANGE}
    speeds = [geometric_mean(figures) if (figures := config.figures(SPEED_FIGURE)) else None for config in (first, last)]
    yield Change(
        axis.label,
        values_label(configs.other_axes(axis), first.values),
        bare_value_text(axis, first.values[axis.key]),
        bare_value_text(axis, last.values[axis.key]),
        changed,
        None if speeds[0] is None or speeds[1] is None else (speeds[0], speeds[1]),
    )


def answers(run: Run, diagnosis: Diagnosis, wanted: Wanted = AS_PLANNED) -> list[Answer]:
    """Return the answers about a run with a summary. Raises UsageError, DamagedRunError."""
    series, nodes = run.step_series(learning_rates=True), run.node_series()
    answered = [
        duration(run, series, wanted),
        learning(run, series),
        hardware_use(diagnosis),
        network_use(run, diagnosis, nodes),
        step_time_and_network(run, diagnosis, series, nodes),
        learning_rate(run, series),
        training_set(run),
        checkpoint_files(run),
    ]
    return [answer for answer in answered if answer is not None]


def render_answers(answered: Sequence[Answer]) -> RenderableType:
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
