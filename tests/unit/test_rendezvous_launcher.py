"""Joining an externally launched run: each expected process once, and no other."""

from hypothesis import given
from hypothesis import strategies as st

from crosstrain.core.job import Job
from crosstrain.engine.protocol.join_messages import JoinRequest
from crosstrain.engine.protocol.messages import PROTOCOL
from crosstrain.launch.launchers.environments import Membership
from crosstrain.launch.launchers.joining import job_request
from crosstrain.launch.launchers.rendezvous import ExternalLauncher


@given(
    node=st.integers(-2, 4),
    local_rank=st.integers(-2, 3) | st.integers(),
    standbys=st.integers(0, 2),
    joined=st.sets(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=2),
)
def test_only_expected_processes_are_accepted(node, local_rank, standbys, joined):
    """Any number of processes with the secret cannot use up the driver's connections."""
    job = Job(backend="toy", nodes=3)
    place = Membership("a contract", 0, 0, ("127.0.0.1", (1,)), {"nodes": 3}, standbys)
    joins = JoinRequest(node, local_rank, job_request(job), PROTOCOL)
    problem = ExternalLauncher(job, place, b"", job_request(job))._problem(joins, {0: None}, joined)
    agent = node in (1, 2) and local_rank == 0
    standby = 0 <= node < 3 and local_rank > 0 and (node, local_rank) not in joined and len(joined) < standbys
    assert (problem is None) == (agent or standby)
