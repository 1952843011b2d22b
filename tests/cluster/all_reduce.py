"""One rank of a plain ring all-reduce; waits for a line before it exits.

Usage: ``all_reduce.py RANK WORLD HOST PORT INTERFACE MEGABYTES``
"""

import os
import sys
from datetime import timedelta

rank, world, host, port, interface, megabytes = sys.argv[1:]
os.environ["GLOO_SOCKET_IFNAME"] = interface

import torch  # noqa: E402 — gloo reads the variable when it is loaded
import torch.distributed as dist  # noqa: E402

store = dist.TCPStore(host, int(port), int(world), is_master=rank == "0", timeout=timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(world), timeout=timedelta(seconds=60))
dist.barrier()
print("ready", flush=True)
sys.stdin.readline()
dist.all_reduce(torch.ones(int(megabytes) * 2**18))
print("done", flush=True)
sys.stdin.readline()
