"""An explanation in plain words: the verdict and why, a line a node, and what would help."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from ...records.text.many_nodes import MOST_NODES_SHOWN, ends_of
from ...records.text.numbers import UNKNOWN, bytes_text, number_text
from ..catalog.divergence import diverged_text
from .batch_size_advice import Advice
from .exchange_costs import exchange_text
from .links import Link, busiest
from .padding import padding_text
from .time_shares import BESIDE_TRAINING
from .verdict import NEARLY_ALL, NOTABLE, Explanation, NodeView

__all__ = ["headline", "notes", "page"]

NAMES = {
    "compute": "computing",
    "network": "the exchange between tasks",
    "data": "data",
    "peers": "waiting for a slow node",
    "evaluating": "evaluating",
    "translating": "translating at the end",
    "saving": "saving checkpoints",
    "other": "between commands",
}

NOT_CALIBRATED = (
    "This run has no calibration (--no-calibrate, or it did not come to its end), so the parts of a step are not known. "
    "Only what was counted while it ran is told."
)


MIXED = (
    "An older release of this program added up its steps over all parts, so those of the part that was calibrated are not known. "
    "Only what was counted while it ran is told."
)


def _basis(explanation: Explanation) -> str:
    over = "the whole run" if explanation.evidence.part_began_seconds is None else "the run since it was resumed"
    return f"CPU cores, sent and received: means over {over}, evaluations and pauses included"


def page(explanation: Explanation, advice: Sequence[Advice]) -> RenderableType:
    """Return everything that `trainer explain` prints."""
    parts: list[RenderableType] = [headline(explanation), "", _run_line(explanation), "", _nodes(explanation), _basis(explanation)]
    for note in notes(explanation):
        parts += ["", note]
    if advice:
        parts += ["", "What would help, by this run's figures:", *(f"  {_advice_line(entry)}" for entry in advice)]
    return Group(*parts)


def percent(fraction: float | None) -> str:
    """Return a fraction as whole percent, or with a decimal where it is less than one."""
    if fraction is None:
        return UNKNOWN
    return f"{fraction:.1%}" if 0 < fraction < 0.0095 else f"{fraction:.0%}"


def bits_text(bytes_per_second: float) -> str:
    """Return a link's speed as links are called: ``100 Mbit/s``."""
    bits = bytes_per_second * 8
    for factor, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bits >= factor:
            return f"{bits / factor:g} {name}"
    return f"{bits:g} bit/s"


# The verdict ----------------------------------------------------------------------------------------------------------


def headline(explanation: Explanation) -> str:
    """Return the verdict in one sentence, with the figures that it rests on."""
    writer = {
        "starved": _starved,
        "network": _network,
        "compute": _compute,
        "data": _data,
        "peers": _peers,
        "evaluating": _evaluating,
        "translating": _translating,
        "saving": _saving,
        "other": _other,
        "mixed": _mixed,
        "unclear": _unclear,
        "unknown": _unknown,
    }[explanation.verdict]
    return writer(explanation)


def _starved(explanation: Explanation) -> str:
    found = explanation.starved
    if found is None:
        raise ValueError("nobody took this run's cores")
    cores = f"{number_text(found.foreign_cores, 2)} of the {number_text(found.cores_available, 2)} cores that node {found.node} may use"
    return (
        f"starved of CPU: other programs had {cores}, and so {percent(found.fraction)} of the processor time that its tasks asked for. "
        "The figures below are those of a busy machine: nothing is advised from them. Run it again on a quiet one."
    )


def _exchange(explanation: Explanation) -> str:
    return "all-reduce" if explanation.evidence.summary["mode"] == "sync" else "exchange with the parameter server"


def _network(explanation: Explanation) -> str:
    hidden = ", beyond what computing hides" if explanation.evidence.summary["mode"] == "sync" else ""
    share = f"network-bound: {percent(explanation.step_fractions['network'])} of each step is {_exchange(explanation)}{hidden}"
    link = busiest(explanation.evidence.links)
    full = f"node {link.node}'s link runs at {percent(link.fraction)} of {_speed(link)} while it trains" if link is not None else None
    if explanation.network_cause == "link":
        return f"{share}, and {full}."
    though = f" at a link that is not full ({full})" if full else ""
    if explanation.network_cause == "messages":
        few = percent(explanation.message_fraction)
        return f"{share}, and its cost is that of the messages, not of their size{though}: an exchange of a few bytes takes {few} as long."
    return f"{share}, and moving and adding up {_payload(explanation)} a step takes it{though}."


def _speed(link: Link) -> str:
    return bits_text(link.limit_bytes_per_second or 0.0)


def _payload(explanation: Explanation) -> str:
    calibration = explanation.evidence.calibration
    return bytes_text(calibration["payload_bytes"]) if calibration else "the gradients"


def _compute(explanation: Explanation) -> str:
    text = f"compute-bound: {percent(explanation.step_fractions['compute'])} of each step is forward, backward and update"
    busy = [view for view in explanation.nodes if view.gpu_utilization is not None and view.limit == "GPU"]
    if busy:
        return f"{text}; GPUs are busy for {percent(max(view.gpu_utilization or 0.0 for view in busy))} of the time."
    known = [view for view in explanation.nodes if view.cpu_cores_used is not None and view.cores_available is not None]
    if not known:
        return f"{text}."
    most = max(known, key=lambda view: view.cpu_fraction or 0.0)
    return f"{text}; node {most.node} uses {_cores(most)}."


def _cores(view: NodeView) -> str:
    return f"{number_text(view.cpu_cores_used, 2)} of the {number_text(view.cores_available, 2)} cores it may use"


def _data(explanation: Explanation) -> str:
    return f"data-bound: {percent(explanation.step_fractions['data'])} of each step is gathering, changing and normalising the batch."


def _peers(explanation: Explanation) -> str:
    times = f"{number_text(explanation.slowness, 1)} times as long as that of an ordinary one"
    slow = f"node {explanation.slow_node}"
    limit = next(view for view in explanation.nodes if view.node == explanation.slow_node).cores_available
    cores = "" if limit is None else f" (it may use {number_text(limit, 2)} cores)"
    if explanation.evidence.summary["mode"] == "sync":
        waits = percent(explanation.step_fractions["peers"])
        text = f"held back by a slow node: for {waits} of each step others wait for {slow}, whose own work takes {times}{cores}"
        return f"{text}{_exchange_of_the_slow(explanation)}."
    share = percent(next(view for view in explanation.nodes if view.node == explanation.slow_node).updates_fraction)
    return f"a slow node: the own work of {slow} takes {times}{cores}. It makes {share} of the updates; nobody waits for it."


def _exchange_of_the_slow(explanation: Explanation) -> str:
    """What is to be said of an exchange in which all wait for a node that has no core to spare."""
    view = next(view for view in explanation.nodes if view.node == explanation.slow_node)
    share = explanation.step_fractions["network"]
    if share < NOTABLE or explanation.network_cause == "link" or (view.cpu_fraction or 0.0) < NEARLY_ALL:
        return ""
    used = percent(view.cpu_fraction)
    return f"; the {_exchange(explanation)}, {percent(share)} of the step, waits for it too, as it uses {used} of what it may"


def _evaluating(explanation: Explanation) -> str:
    evidence = explanation.evidence
    each = evidence.summary["eval_seconds"] / max(1, evidence.evaluations)
    how = f"{evidence.evaluations} evaluation{'s' if evidence.evaluations != 1 else ''} of {number_text(each, 3)} s"
    return f"evaluating holds it back: it takes {percent(explanation.run_fractions['evaluating'])} of the run's time ({how})."


def _translating(explanation: Explanation) -> str:
    evidence = explanation.evidence
    share, seconds = percent(explanation.run_fractions["translating"]), number_text(evidence.summary["translate_seconds"], 1)
    finished = "" if evidence.summary["translated"] else ", and was not finished"
    return (
        f"translating all test sentences at the end holds it back: it takes {share} of the run's time ({seconds} s{finished}). "
        "It takes place once; a longer run has less of it."
    )


def _saving(explanation: Explanation) -> str:
    share = percent(explanation.run_fractions["saving"])
    saved = explanation.evidence.saved
    return f"saving holds it back: training stands still for checkpoints for {share} of the run's time ({saved} saved)."


def _other(explanation: Explanation) -> str:
    seconds = number_text(explanation.evidence.summary["run_seconds"], 2)
    share = percent(explanation.run_fractions["other"])
    if explanation.evidence.summary["mode"] == "async" and explanation.calibrated:
        size = number_text((explanation.evidence.summary["step_seconds"] or {}).get("group_size"), 0)
        waits = f"workers wait for their next steps, or for the run's end, for {share} of the run's {seconds} s"
        return f"nothing to do: {waits}; they get {size} at a time."
    return f"neither training nor evaluating: {share} of the run's {seconds} s pass between commands; a longer run would say more."


def _mixed(explanation: Explanation) -> str:
    return f"nothing dominates: {_list(explanation, ' and ')} of the run's time."


def _unclear(explanation: Explanation) -> str:
    return f"not clear: {_list(explanation, ' or ')} of the run's time; they differ by too little for what is known of them."


def _list(explanation: Explanation, joint: str) -> str:
    words = []
    for component in explanation.candidates:
        name, fraction = NAMES[component], explanation.run_fractions[component]
        if component == "peers" and explanation.evidence.summary["mode"] == "async":  # nobody waits: a slow node shows in its own work
            name, fraction = "the work of a slow node", sum(explanation.run_fractions[own] for own in ("compute", "data"))
        spread = explanation.run_uncertainty.get(component, 0.0)
        more = f" ± {percent(spread)}" if spread >= 0.01 else ""
        words.append(f"{name} {percent(fraction)}{more}")
    return joint.join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _unknown(explanation: Explanation) -> str:
    if explanation.evidence.steps_mixed:
        return "no verdict: the run changed when it was resumed, and only its last part was calibrated."
    return "no verdict: the run was not calibrated."


# The figures ----------------------------------------------------------------------------------------------------------


def _run_line(explanation: Explanation) -> str:
    run, began = explanation.run_fractions, explanation.evidence.part_began_seconds
    of = "of the run's time" if began is None else f"of the time since the run was resumed at {number_text(began, 2)} s"
    if not explanation.calibrated:
        return f"{of}: training {percent(run['training'])}, {_beside(explanation)}"
    training = sum(run[component] for component in explanation.step_fractions)
    steps = ", ".join(f"{NAMES[component]} {percent(fraction)}" for component, fraction in explanation.step_fractions.items())
    costs = "" if explanation.exchange_costs is None else f"\n{exchange_text(explanation.exchange_costs)}"
    return f"{of}: training {percent(training)}, {_beside(explanation)}\nof each step: {steps}{costs}"


def _beside(explanation: Explanation) -> str:
    fractions, translates = explanation.run_fractions, bool(explanation.evidence.job.get("translation_signatures"))
    shown = [component for component in (*BESIDE_TRAINING, "other") if component != "translating" or translates or fractions[component]]
    return ", ".join(f"{NAMES[component]} {percent(fractions[component])}" for component in shown)


def _nodes(explanation: Explanation) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("node", no_wrap=True)
    table.add_column("limit", no_wrap=True)
    for name in ("computing", "data", "peers", "exchange", "CPU cores", "sent", "received"):
        table.add_column(name, justify="right", no_wrap=True)
    shown, some = ends_of(explanation.nodes, _waiting)
    if some:
        table.caption = f"Of {len(explanation.nodes):,} nodes: those that wait least for others, and those that wait most."
    for view in shown:
        step = view.step_fractions or {}
        shares = (percent(step.get(component)) for component in ("compute", "data", "peers", "network"))
        cores = (
            UNKNOWN if view.cpu_cores_used is None else f"{number_text(view.cpu_cores_used, 2)} of {number_text(view.cores_available, 2)}"
        )
        table.add_row(str(view.node), view.limit or UNKNOWN, *shares, cores, *_traffic(view))
    return table


def _waiting(view: NodeView) -> float | None:
    """How much of a step a node waits for others; of one that was not calibrated, what it does not compute."""
    if view.step_fractions is not None:
        return view.step_fractions.get("peers")
    return None if view.cpu_fraction is None else -view.cpu_fraction


def _traffic(view: NodeView) -> tuple[str, str]:
    limit = view.link.limit_bytes_per_second
    sent, received = (
        bytes_text(rate, per_second=True) + (f" ({percent(rate / limit)})" if rate is not None and limit else "")
        for rate in (view.sent_bytes_per_second, view.received_bytes_per_second)
    )
    return sent, received


def _unfinished(state: str, recorded_until: float) -> str:
    """Say what is missing of a run that has written no summary."""
    at_work = state in ("starting", "running")
    ended = "was killed before it could write one" if state == "died" else f"is {state}"
    why = "is still at work" if at_work else ended
    until, more = number_text(recorded_until, 1), "whatever comes yet" if at_work else "what it did after its last record"
    return (
        f"The run has no summary.json, for it {why}: all figures are from its records up to {until} s on the run clock. "
        f"Missing: its calibration, how long start-up took in full, how long its end takes, and {more}."
    )


def notes(explanation: Explanation) -> list[str]:
    """Return what a reader has to know beside the figures."""
    evidence = explanation.evidence
    found = [] if evidence.recorded_until is None else [_unfinished(evidence.state, evidence.recorded_until)]
    found += [text for text in (evidence.changed, diverged_text(evidence.summary), padding_text(evidence.summary)) if text]
    if not explanation.calibrated:
        found.append(MIXED if evidence.steps_mixed else NOT_CALIBRATED)
        found += _native(explanation)
    if explanation.starved is not None:
        return found
    sharing = evidence.summary["nodes_sharing_cores"] or 1
    if sharing > 1:
        parts = "--cores-per-node would give virtual nodes a part each, --threads says how many threads each task has"
        found.append(f"{sharing} nodes share the same cores and fight for them; {parts}.")
    held_up = [text for text in (_held_up(explanation, view) for view in explanation.nodes) if text]
    if len(held_up) > MOST_NODES_SHOWN:
        held_up = [*held_up[:MOST_HELD_UP], f"So did {len(held_up) - MOST_HELD_UP:,} more of the {len(explanation.nodes):,} nodes."]
    found += held_up
    if "network" in explanation.candidates and busiest(evidence.links) is None:
        found.append("No link has a known limit, so how full they are is not known (--bandwidth sets one for virtual nodes).")
    return found


MOST_HELD_UP = 3
"""Of very many nodes that were held up so many are named."""

HELD_UP = 0.75
"""A task that computes needs one core at least; a node that had less than this of that was held up by others."""


def _held_up(explanation: Explanation, view: NodeView) -> str | None:
    """What there is to say of a node that computes all the time and yet is seldom on a core."""
    summary = explanation.evidence.summary
    if view.step_fractions is None or view.limit not in ("CPU", "data") or None in (view.cpu_cores_used, view.cores_available):
        return None
    working = sum(view.step_fractions[component] for component in ("compute", "data"))
    training = sum(explanation.run_fractions[component] for component in explanation.step_fractions)
    needed = working * training * min(summary["workers"] / summary["nodes"], view.cores_available or 0.0)
    if (view.cpu_cores_used or 0.0) >= HELD_UP * needed:
        return None
    return (
        f"Node {view.node} works for {percent(working)} of its steps, which takes {number_text(needed, 2)} cores at least, and had "
        f"{number_text(view.cpu_cores_used, 2)}: something else used the processor."
    )


def _native(explanation: Explanation) -> list[str]:
    """What the framework itself said about waiting, for a run that was not calibrated."""
    summary = explanation.evidence.summary
    workers = summary["workers"] if summary["mode"] == "async" else 1
    whole = workers * summary["train_seconds"]
    figures = (("data", summary["data_wait_seconds"]), ("other tasks", summary["network_wait_seconds"]))
    known = [f"for {what} {percent(seconds / whole)}" for what, seconds in figures if seconds is not None and whole]
    return [f"Measured by the backend while it trained, of the training time: waiting {', '.join(known)}."] if known else []


FAR = 10.0
"""A speed-up from this on is an estimate without decimals."""


def _advice_line(entry: Advice) -> str:
    effect = "" if entry.speedup is None else f" ({entry.bound} {number_text(entry.speedup, 2 if entry.speedup < FAR else 0)}x)"
    caution = f"; {entry.caution}" if entry.caution else ""
    return f"{entry.option}: {entry.reason}{effect}{caution}"
