"""`penstock usage`: what tenants of a running service have used."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import dataclass
from urllib.parse import urlencode

from penstock.cli.client.service import AdminTarget
from penstock.errors import ConfigError
from penstock.options import option

_RARE = ("refused", "audio_seconds", "images", "cost")  # columns that are shown if they say something


@dataclass(frozen=True, slots=True)
class UsageOptions(AdminTarget):
    """What to show."""

    by: str = option(
        "Sums for each `tenant`, `key`, `model`, `adapter`, `tier`, `day`, `hour`; commas.", "tenant"
    )
    since: str = option("`7d`, `12h` or a date, in UTC.", "30d")
    until: str = option("The same; without it, up to now.", "", show_default=False)
    as_json: bool = option("Print JSON.", False, "--json")
    as_csv: bool = option("Print CSV.", False, "--csv")


def usage(options: UsageOptions) -> None:
    """Show what tenants have used: requests, tokens, errors, cost.

    - `penstock usage --by tenant,model --since 7d`
    - `penstock usage --by day,tenant --since 2026-11-01 --csv > november.csv`
    """
    if options.as_json and options.as_csv:
        raise ConfigError("--json and --csv do not go together.")
    query = urlencode({"by": options.by, "since": options.since, "until": options.until})
    found = options.ask("GET", f"usage?{query}")["data"]
    if options.as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    elif options.as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerows([list(found[0]), *(one.values() for one in found)] if found else [])
    elif not found:
        print("Nothing was used.")
    else:
        names = [one for one in found[0] if one not in _RARE or any(row[one] for row in found)]
        rows = [
            [name.replace("_", " ") for name in names],
            *([_shown(row[name]) for name in names] for row in found),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = zip(row, widths, (found[0][name] for name in names), strict=True)
            line = (
                f"{text:>{width}}" if isinstance(kind, int | float) else f"{text:<{width}}"
                for text, width, kind in cells
            )
            print("  ".join(line).rstrip())


def _shown(value: str | float) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}"
    return f"{value:,}" if isinstance(value, int) else value or "-"
