"""Mean value analysis against Markov chains and a simulation with constant times."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from crosstrain.report.analysis.cost_model import rounds


def states(count, places):
    return [state for state in itertools.product(range(count + 1), repeat=places) if sum(state) == count]


def solved_rates(customers, thinks, demands):
    """Return rounds per second of both classes from the balance equations.

    Times are exponential, each station is shared by all present. Place 0 is thinking, the others
    are the stations, visited in turn.
    """
    places = len(demands) + 1
    space = [(first, second) for first in states(customers[0], places) for second in states(customers[1], places)]
    number = {state: index for index, state in enumerate(space)}
    generator = np.zeros((len(space), len(space)))
    for state in space:
        for kind, place in itertools.product((0, 1), range(places)):
            here = state[kind][place]
            if not here:
                continue
            present = sum(visits[place] for visits in state)
            rate = here / thinks[kind] if place == 0 else here / present / demands[place - 1][kind]
            moved = list(state[kind])
            moved[place] -= 1
            moved[(place + 1) % places] += 1
            after = (tuple(moved), state[1]) if kind == 0 else (state[0], tuple(moved))
            generator[number[state], number[after]] += rate
            generator[number[state], number[state]] -= rate
    equations = np.vstack([generator.T, np.ones(len(space))])
    shares = np.linalg.lstsq(equations, np.r_[np.zeros(len(space)), 1.0], rcond=None)[0]
    return [sum(share * state[kind][0] / thinks[kind] for share, state in zip(shares, space, strict=True)) for kind in (0, 1)]


@pytest.mark.parametrize("customers", [(1, 1), (1, 3), (2, 2), (0, 3), (2, 0)])
def test_rates_equal_the_balance_equations(customers):
    thinks, demands = (0.7, 1.3), [(0.4, 0.9), (0.5, 0.2)]
    expected = solved_rates(customers, thinks, demands)
    seconds = rounds(customers, thinks, demands).seconds
    for kind in (0, 1):
        if customers[kind]:
            assert customers[kind] / seconds[kind] == pytest.approx(expected[kind], rel=1e-9)


def simulated_rate(customers, think, demand, rounds_wanted):
    """Simulate one class with constant times on a shared station; return its rounds per second."""
    random = np.random.default_rng(7)
    thinking, served, clock, done = list(random.uniform(0, think, customers)), [], 0.0, 0
    while done < rounds_wanted:
        to_arrival = min(thinking, default=np.inf)
        to_end = min(served) * len(served) if served else np.inf
        passed = min(to_arrival, to_end)
        clock += passed
        thinking, served = [left - passed for left in thinking], [left - passed / len(served) for left in served]
        served += [demand for left in thinking if left <= 1e-12]
        thinking = [left for left in thinking if left > 1e-12]
        done += sum(left <= 1e-12 for left in served)
        thinking += [think for left in served if left <= 1e-12]
        served = [left for left in served if left > 1e-12]
    return done / clock


@pytest.mark.parametrize(("customers", "think"), [(2, 3.0), (4, 3.0), (8, 3.0)])
def test_rates_are_near_a_simulation_with_constant_times(customers, think):
    """Processor sharing is insensitive to distributions, but constant times can synchronise."""
    rate = customers / rounds((0, customers), (1.0, think), [(0.0, 1.0)]).seconds[1]
    simulated = simulated_rate(customers, think, 1.0, 4000)
    assert rate == pytest.approx(simulated, rel=0.08)


def test_single_customer_does_not_wait():
    solution = rounds((1, 0), (0.25, 9.0), [(0.5, 1.0), (0.125, 1.0)])
    assert solution.seconds[0] == 0.875
    assert solution.residence_seconds[:, 0].tolist() == [0.5, 0.125]


def test_full_station_sets_the_rate():
    solution = rounds((0, 200), (0.0, 1.0), [(1.0, 0.05)])
    assert 200 / solution.seconds[1] == pytest.approx(1 / 0.05, rel=1e-6)


def test_rounds_without_time_are_refused():
    with pytest.raises(ValueError, match="some time"):
        rounds((1, 1), (0.0, 1.0), [(0.0, 1.0)])
