"""How does the driver fare with many nodes? Agents that answer and sample as real ones, without tasks behind them, many in one process.

Run it from the repository: ``python -m benchmarks.simulated_agents --nodes 1000``; docs/scaling.md has what it measured. Node 0 is real,
agent and task, with the backend of `backend.py`, which waits where others compute. The others join by ``--rendezvous`` like any that a
person has started.
"""
