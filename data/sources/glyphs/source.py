"""glyphs and glyphs28: digits rendered from fonts in the shapes of SVHN and MNIST, so that such runs need no original files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....core.errors import UsageError
from ...base import PreparedArrays, Split
from ...statistics import channel_statistics
from .renderer import GlyphStyle, render_split
from .tiles import glyph_tiles

__all__ = ["GLYPHS", "GLYPHS28", "GlyphSource"]

_SEED = 28  # fixed, so that the examples belong to the dataset and not to a job


@dataclass(frozen=True)
class GlyphSource:
    """Rendered examples of one style. `sizes` has the number of examples a split."""

    name: str
    description: str
    version: int
    style: GlyphStyle
    sizes: Mapping[Split, int]

    def originals(self, data_dir: Path) -> Sequence[Path]:
        """Refuse: there are no original files."""
        raise UsageError(f"data_dir: got {str(data_dir)!r}, but {self.name!r} is rendered and reads no files. Leave --data-dir out.")

    def load(self, data_dir: Path | None) -> PreparedArrays:
        """Render both splits."""
        if data_dir is not None:
            self.originals(data_dir)
        tiles = glyph_tiles()
        train_images, train_labels = render_split(self.style, tiles, _SEED, "train", self.sizes["train"])
        test_images, test_labels = render_split(self.style, tiles, _SEED, "test", self.sizes["test"])
        mean, std = channel_statistics(train_images)
        return PreparedArrays(
            images={"train": train_images, "test": test_images},
            labels={"train": train_labels, "test": test_labels},
            classes=10,
            mean=mean,
            std=std,
            flippable=False,
        )


GLYPHS = GlyphSource(
    name="glyphs",
    description="digits rendered in 20 typefaces in colour with clutter and noise, 32×32×3, in the shape of SVHN",
    version=1,
    style=GlyphStyle(
        size=32,
        channels=3,
        height=18.0,
        scale=(0.7, 1.2),
        shift=3.0,
        half_turn=0.13,
        background=(0.0, 0.4),
        slope=0.15,
        ink=(0.5, 1.0),
        noise=0.25,
        clutter=3,
        clutter_distance=(13.0, 19.0),
        clutter_strength=0.9,
        inverted=True,
    ),
    sizes={"train": 60_000, "test": 10_000},
)

GLYPHS28 = GlyphSource(
    name="glyphs28",
    description="digits rendered in 20 typefaces with clutter and noise, 28×28, in the size of MNIST",
    version=2,
    style=GlyphStyle(
        size=28,
        channels=1,
        height=18.0,
        scale=(0.8, 1.15),
        shift=2.0,
        half_turn=0.11,
        background=(0.0, 0.3),
        slope=0.1,
        ink=(0.55, 1.0),
        noise=0.25,
        clutter=2,
        clutter_distance=(13.0, 18.0),
        clutter_strength=0.8,
    ),
    sizes={"train": 60_000, "test": 10_000},
)
