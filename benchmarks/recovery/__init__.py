"""Time until training resumes after a killed worker, compared with other trainers.

docs/reliability.md shows it.
"""
