"""The live page of some runs, from the first request until an interrupt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from .followed_runs import FollowedRuns
from .refresher import Refresher
from .server import LocalServer
from .site import Site

__all__ = ["serve"]


def serve(places: Sequence[Path], announce: Callable[[str], None], report: Callable[[str], None], check: Callable[[], None]) -> NoReturn:
    """Serve the page of the runs at `places` (`catalog.locate.find_places`) until `check`, or a signal's handler, raises.

    `announce` is given the address before anything is answered there, `report` what is to be said meanwhile, in sentences. Nothing is
    written to a file, and nothing remains. The page is rendered in this thread, which a signal can interrupt at any time.
    """
    refresher = Refresher(FollowedRuns(places), report)
    site = Site(refresher)
    with LocalServer(lambda path: site.find(path, server.token), report) as server:
        announce(server.address)
        server.start()
        refresher.follow(check)
