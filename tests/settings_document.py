"""Writes docs/settings.md from the job's declarations: `python tests/settings_document.py`."""

from __future__ import annotations

import sys
from pathlib import Path

from crosstrain.core.job import Job
from crosstrain.core.setting import ALL, GROUPS
from crosstrain.core.settings.job_fields import DECLARED, allowed, flag_name, is_boolean, requirement_flags
from crosstrain.core.settings.sweeps import value_text
from crosstrain.core.topics import Topic

DOCUMENT = Path(__file__).parents[1] / "docs" / "settings.md"

HEAD = """# Settings

Options override `TRAINER_*` variables, these a `--config` file. The page is generated from `core/job.py`.

| column | meaning |
|---|---|
| option | `--batch-size` is also the variable `TRAINER_BATCH_SIZE` and the TOML key `batch_size` |
| needs | the option without which the setting has no effect |
| compared | the figures that a difference confounds, and why; empty if its effects are compared instead ([comparing.md](comparing.md)) |
| logged | the key in MLPerf's log (weight decay and a clipping norm have one too), and exceptions from MLflow and HParams |
| risk | what an untrusted run directory could do through the setting without `--trust-run` |
"""

COLUMNS = """\
| option | default | values | meaning | needs | compared | logged | risk |
|---|---|---|---|---|---|---|---|"""


def shown_option(field: str) -> str:
    flag = flag_name(field)
    return f"`{flag}`, `--no-{flag[2:]}`" if is_boolean(field) else f"`{flag}`"


def compared(field: str) -> str:
    rule = DECLARED[field].compare
    if rule is None:
        return ""
    groups = [group for group in GROUPS if group in rule.confounds and not group.startswith("translations")]
    return f"{'all' if rule.confounds == ALL else ', '.join(groups) or 'nothing'}: {rule.why}"


def logged(field: str) -> str:
    declared = DECLARED[field]
    texts = {"training": [], "operation": ["not in HParams"], "destination": ["nowhere"]}[declared.role]
    return ", ".join([*texts, *([f"`{declared.mllog}`"] if declared.mllog else [])])


def row(field: str) -> str:
    declared, info = DECLARED[field], Job.model_fields[field]
    default = "" if info.default is None else f"`{value_text(info.default)}`"
    needs = f"`{requirement_flags(declared.requires)}`" if declared.requires else ""
    foreign = declared.foreign.format("VALUE") if declared.foreign else ""
    cells = [shown_option(field), default, allowed(field), info.description or "", needs, compared(field), logged(field), foreign]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def document() -> str:
    """The whole text of docs/settings.md."""
    parts = [HEAD]
    for topic in Topic:
        fields = [field for field in Job.model_fields if DECLARED[field].topic == topic]
        if fields:
            parts.append(f"## {topic.value}\n\n{COLUMNS}\n" + "\n".join(map(row, fields)) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
    sys.stderr.write(f"wrote {DOCUMENT}\n")
