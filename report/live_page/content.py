"""A page taken apart: what changes with the runs, and the scripts, which are sent once."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Content", "content_of"]


@dataclass(frozen=True, slots=True)
class Content:
    """A page without the scripts that run, and these in their order. Data in script elements, such as JSON, stays in the document."""

    document: bytes
    scripts: tuple[bytes, ...]


def content_of(page: str) -> Content:
    """Take a rendered page apart.

    In such a page a script's tag is always one: wherever text of a run stands, its ``<`` is written as an entity, or as an escape of JSON.
    """
    kept: list[str] = []
    scripts: list[bytes] = []
    at = 0
    while (start := page.find("<script", at)) >= 0:
        begin = page.index(">", start) + 1
        end = page.index("</script>", begin)
        kept.append(page[at:start])
        at = end + len("</script>")
        if 'type="application/json"' in page[start:begin]:
            kept.append(page[start:at])
        else:
            scripts.append(page[begin:end].encode())
    return Content("".join([*kept, page[at:]]).encode(), tuple(scripts))
