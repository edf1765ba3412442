"""The Ray versions that Penstock works with: a window of them, and newer ones with a warning.

Imports nothing of Ray: it reads what is installed, and what Ray says of a cluster that runs another version.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from penstock.config.messages.problems import warn_once
from penstock.errors import Unavailable

OLDEST, NEWEST = (2, 57), (2, 60)
"""2.57 is the first whose replicas can publish metadata, by which gateways find them; 2.60 the last tried."""
ASKS_FOR_TOKEN = (2, 59)
"""The first whose `ray.init` starts a cluster that refuses commands without a token."""

_SIDE = r"Ray: (\S+)\s+Python: (\S+)"
_MISMATCH = re.compile(rf"Version mismatch: .*?{_SIDE}.*?{_SIDE}", re.DOTALL)


def installed() -> str | None:
    """The installed version; None without one."""
    try:
        return version("ray")
    except PackageNotFoundError:
        return None


def minor_version() -> tuple[int, int] | None:
    """Major and minor number of the installed version; None without one, or for one of another form."""
    numbers = re.match(r"(\d+)\.(\d+)", installed() or "")
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def check() -> None:
    """Warns once of a version that is newer than the window.

    Raises: Unavailable without Ray, or for an older one.
    """
    found, minor = installed(), minor_version()
    if found is None or (minor is not None and minor < OLDEST):
        what = "Ray is not installed here" if found is None else f"Ray {found} is installed here"
        raise Unavailable(
            f"{what}; this Penstock works with Ray {_text(OLDEST)} and newer. Install that, for example with "
            f"`pip install 'ray[data,serve]=={_text(NEWEST)}.*'`, on every node of a cluster the same."
        )
    if minor is not None and minor > NEWEST:
        warn_once(f"Ray {found} is newer than {_text(NEWEST)}, the last that this Penstock was tried with.")


def explain_mismatch(message: str) -> str | None:
    """A sentence out of Ray's own about a cluster of another version; None for any other message."""
    found = _MISMATCH.search(message)
    if found is None:
        return None
    cluster_ray, cluster_python, ray, python = found.groups()
    return (
        f"The cluster runs Ray {cluster_ray} with Python {cluster_python}; this command has Ray {ray} with "
        f"Python {python}. Both must be the same: `pip install 'ray[data,serve]=={cluster_ray}'` here, or "
        "run the command on a node of the cluster."
    )


def _text(minor: tuple[int, int]) -> str:
    return ".".join(map(str, minor))
