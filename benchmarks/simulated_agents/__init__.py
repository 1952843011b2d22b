"""Load test of the driver with many nodes, whose agents are simulated.

Simulated agents answer and sample like real ones, without tasks, many in one process. Run it from the repository:
``python -m benchmarks.simulated_agents --nodes 1000``; docs/scaling.md has its results. Node 0 is real, agent and task, with the
backend of `backend.py`, which sleeps instead of computing. The others join by ``--rendezvous`` like any that a person has started.
"""
