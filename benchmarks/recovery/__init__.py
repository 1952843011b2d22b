"""How long until training goes on after a worker has been killed, beside other trainers? docs/reliability.md."""
