"""Fetches on every node on which one engine has workers: each worker reads the files of its own node.

Knows neither which nodes these are nor how they are reached: `use` says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from penstock.errors import DownloadFailed

P = ParamSpec("P")
Found = TypeVar("Found")

Begin = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Callable[[], list[Any]]]
"""Starts a call on other nodes. Returns a function that waits for the results."""

_others: list[Begin] = []


def use(begin: Begin) -> None:
    """From now on this process's fetches run on those nodes, too."""
    _others.append(begin)


def leave(begin: Begin) -> None:
    """Ends what `use` began."""
    _others.remove(begin)


def on_every_node(fetch: Callable[P, Found]) -> Callable[P, Found]:
    """`fetch`, here and on the nodes in use at once. Only here it gets `watch`, which must be named.

    Raises: DownloadFailed when the nodes have found different versions.
    """

    @functools.wraps(fetch)
    def everywhere(*args: P.args, **kwargs: P.kwargs) -> Found:
        sent = {name: value for name, value in kwargs.items() if name != "watch"}
        waits = [begin(everywhere, args, sent) for begin in _others]
        here = fetch(*args, **kwargs)
        if any(there != here for wait in waits for there in wait()):
            raise DownloadFailed(
                "The source changed while several nodes downloaded it; try again.", retryable=True
            )
        return here

    return everywhere
