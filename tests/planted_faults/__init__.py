"""Faults planted into one of two trainings, and what a right diagnosis of each says.

They were listed before the tool that is measured with them. `site` goes before other folders of PYTHONPATH, and TRAINER_PLANTED_FAULT
names the fault that a process gets.
"""
