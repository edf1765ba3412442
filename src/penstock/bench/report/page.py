"""A run as one HTML page that needs nothing else: no network, no files beside it.

The plots are drawn by uPlot (MIT), which lies in `assets` and is written into the page.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from html import escape
from importlib.resources import files
from typing import Any

from penstock.bench.load.workers import Measured
from penstock.bench.report.record import to_json
from penstock.bench.report.series import distributions, first_tokens, over_time
from penstock.bench.report.table import client, comparison, latencies, remarks, summary, title
from penstock.bench.run.figures import Figures
from penstock.bench.run.options import BenchOptions
from penstock.bench.run.session import Result


def to_html(result: Result) -> str:
    """The whole page."""
    record, loads = to_json(result), ""
    if len(result.figures) > 1:
        loads = f'{_table(comparison(result.figures))}<div class="plots" id="loads"></div>'
    parts = {
        "TITLE": escape(f"{record['model']}: penstock bench"),
        "MODEL": escape(record["model"]),
        "TARGET": escape(record["target"] + record["endpoint"]),
        "WHEN": escape(record["begun_at"]),
        "OPTIONS": escape(_options(record["options"])),
        "NOTES": "".join(f'<p class="note">{escape(note)}</p>' for note in record["notes"]),
        "COMPARISON": loads,
        "LEVELS": "".join(_level(i, figures, result) for i, figures in enumerate(result.figures)),
        "DATA": json.dumps([_data(*level) for level in result.levels]).replace("<", "\\u003c"),
        "STYLE": _asset("uplot.css") + _asset("page.css"),
        "UPLOT": _asset("uplot.js"),
        "SCRIPT": _asset("page.js"),
    }
    page = _asset("page.html").split("%%")  # text, name, text, name, ..., text
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(page))


def _asset(name: str) -> str:
    return files("penstock.bench").joinpath("assets", name).read_text()


def _data(figures: Figures, measured: Measured) -> dict[str, Any]:
    """What the plots of one level are drawn from."""
    return {
        "load": figures.load,
        "tokens_per_s": figures.output_tokens_per_s,
        "ttft_p50_ms": figures.ttft_ms and figures.ttft_ms.p50,
        "ttft_p99_ms": figures.ttft_ms and figures.ttft_ms.p99,
        "distributions": distributions(measured),
        "points": first_tokens(measured, figures),
        "series": over_time(measured, figures),
    }


def _options(options: dict[str, Any]) -> str:
    """The options that were given, as they would be written again."""
    defaults = {one.name: one.default for one in fields(BenchOptions)}
    given = {name: value for name, value in options.items() if value != defaults[name]}
    words = [f"--{name.replace('_', '-')} {value}" for name, value in given.items() if name != "url"]
    return " ".join([options["url"], *words])


def _level(number: int, figures: Figures, result: Result) -> str:
    lines = "\n".join(summary(figures, result))
    warnings = "".join(f'<p class="warning">{escape(line)}</p>' for line in remarks(figures))
    return (
        f"<h2>{escape(title(figures))}</h2><pre>{escape(lines)}</pre>{warnings}"
        f'{_table(latencies(figures))}<p class="client">Client: {escape(client(figures))}</p>'
        f'<div class="plots" id="level-{number}"></div>'
    )


def _table(lines: Sequence[Sequence[str]]) -> str:
    """With the names of its columns in the first line."""
    body = "".join(_row("td", line) for line in lines[1:])
    return f"<table><thead>{_row('th', lines[0])}</thead><tbody>{body}</tbody></table>"


def _row(tag: str, line: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in line) + "</tr>"
