"""One case of ``make faults``: a run killed twice at random steps equals an undisturbed one."""

import os
import random
from dataclasses import replace

import pytest
from fault_injection.plan import COMBINATIONS, KINDS, PER_RUN, Fault, planned
from fault_injection.trial import tried, undisturbed

pytestmark = [pytest.mark.faults, pytest.mark.cluster]

SEED = int(os.environ["CROSSTRAIN_TEST_SEED"])
STEPS = {"torch-sync": 800, "torch-async": 20_000, "tf-sync": 2_000, "tf-async": 4_000}


@pytest.mark.slow  # without the marker test_random_kills.py, test_restart.py and test_lost_worker.py kill
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", STEPS)
def test_two_injected_kills_do_not_change_result(tmp_path, name):
    combination = replace(next(candidate for candidate in COMBINATIONS if candidate.name == name), steps=STEPS[name])
    drawn = random.Random(f"{SEED} {name}")
    kinds = ["worker", "chief"] if combination.mode == "sync" else ["ps", "worker"]
    steps = [drawn.randrange(STEPS[name] // 10, STEPS[name] // 2), drawn.randrange(STEPS[name] // 2, STEPS[name] * 4 // 5)]
    faults = [
        Fault(name, kind, place, "run", step, drawn.randrange(1000)) for place, (kind, step) in enumerate(zip(kinds, steps, strict=True))
    ]
    print(f"--seed {SEED}: {faults}")
    for outcome in tried(combination, faults, undisturbed(combination, tmp_path), tmp_path):
        assert outcome["problem"] == "", outcome
        assert outcome["noticed_seconds"] <= 1


def test_fault_plan_has_requested_kinds_and_repeats_with_seed():
    plan = planned(SEED, 25, KINDS)
    assert plan == planned(SEED, 25, KINDS)
    assert plan != planned(SEED + 1, 25, KINDS)
    counts = {kind: sum(fault.kind == kind for fault in plan) for kind in KINDS}
    assert counts == {kind: 25 if kind in ("worker", "chief", "ps", "agent", "driver") else 5 for kind in KINDS}
    runs = {fault.run: [planned_fault for planned_fault in plan if planned_fault.run == fault.run] for fault in plan}
    steps = {combination.name: combination.steps for combination in COMBINATIONS}
    for faults in runs.values():
        fault_steps = [fault.step for fault in faults]
        assert fault_steps == sorted(set(fault_steps))
        assert fault_steps[0] > 0
        assert fault_steps[-1] < steps[faults[0].combination]
        assert len(faults) == 1 if faults[0].kind == "driver" else len(faults) <= PER_RUN
