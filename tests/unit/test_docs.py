"""What the documents name exists."""

from __future__ import annotations

import re

import pytest

DOCUMENTS = ["docs/architecture.md", "CONTRIBUTING.md", "CHANGELOG.md"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_paths_lead_somewhere(repository, document):
    path = repository / document
    text = path.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = [link for link in links if not (path.parent / link).exists()]
    named = re.findall(
        r"`((?:core|metrics|monitor|data|models|backends|engine|launch|report|conformance|cli|tests)/[\w/.]+\.(?:py|md))`", text
    )
    missing += [name for name in named if not (repository / name).exists()]
    assert missing == []


def test_every_command_of_the_documents_exists(repository):
    from crosstrain.cli.main import COMMANDS

    for document in DOCUMENTS:
        for command in re.findall(r"`trainer (\w+)", (repository / document).read_text(encoding="utf-8")):
            assert command in COMMANDS, f"{document}: trainer {command}"
