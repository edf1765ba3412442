"""MkDocs hook: the manual's generated pages, and links that leave `docs/`.

Pages from the code are the command line (typer), the Python API (mkdocstrings) and the metrics. Pages of the
repository that lie elsewhere are taken in; links to other files outside `docs/` become plain text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from penstock.cli.app import app
from penstock.metrics import GatewayMetrics

ROOT = Path(__file__).parents[1]
# Files of the repository, and the pages that they become.
TAKEN_IN = {
    "benchmarks/log.md": "inside/measurements.md",
    "CHANGELOG.md": "inside/changes.md",
    "CODE_OF_CONDUCT.md": "inside/conduct.md",
    "CONTRIBUTING.md": "inside/contributing.md",
    "SECURITY.md": "reporting.md",
}
PUBLIC = ("penstock.serve", "penstock.serve.routing", "penstock.data")
LINK = re.compile(r"\[([^\[\]]*)\]\(([^()\s:#]+)(#[^()\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {
        "reference/command-line.md": "".join(command_line()),
        "reference/metrics.md": "".join(metrics()),
        "reference/python.md": "".join(python_api()),
    }
    pages |= {page: (ROOT / path).read_text() for path, page in TAKEN_IN.items()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    origin = {new: old for old, new in TAKEN_IN.items()}.get(here, f"docs/{here}")

    def link(found: re.Match[str]) -> str:
        text, path, anchor = found[1], found[2], found[3] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        target = TAKEN_IN.get(target, target.removeprefix("docs/") if target.startswith("docs/") else "")
        if not target:
            return text
        return f"[{text}]({posixpath.relpath(target, posixpath.dirname(here) or '.')}{anchor})"

    return LINK.sub(link, markdown)


def command_line() -> Iterator[str]:
    yield "# Command line\n\nWhat `--help` prints, of every command.\n"
    yield from _command(typer.main.get_command(app), "penstock")


def _command(command: Any, name: str) -> Iterator[str]:
    yield f"\n## {name}\n\n{(command.help or '').strip()}\n"
    options = [_option(parameter) for parameter in command.params if not getattr(parameter, "hidden", False)]
    if options:
        yield "\n| | |\n|---|---|\n" + "".join(options)
    for below, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            yield from _command(child, f"{name} {below}")


def _option(parameter: Any) -> str:
    names = ", ".join(parameter.opts + parameter.secondary_opts)
    if parameter.param_type_name == "argument":
        names = parameter.metavar or parameter.name.upper()
    words = [parameter.help or ""]
    shown = parameter.show_default if isinstance(getattr(parameter, "show_default", None), str) else None
    if shown or (isinstance(parameter.default, int | float | str) and parameter.default not in ("", False)):
        words.append(f"Default: `{shown or parameter.default}`.")
    if parameter.envvar:
        words.append(f"Environment: `{parameter.envvar}`.")
    text = " ".join(word for word in words if word).replace("|", "\\|").replace("\n", " ")
    return f"| `{names.replace('|', '/')}` | {text} |\n"


def metrics() -> Iterator[str]:
    yield "# Metrics\n\nThe gateway's own, in `/metrics`; the engines' stand beside them labelled `replica` "
    yield "([observability](../operate/observability.md)). Counters end in `_total`, times are in seconds.\n"
    yield "\n| metric | type | |\n|---|---|---|\n"
    text = GatewayMetrics().text().decode()
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    for name, help_text in re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE):
        yield f"| `{name}` | {types[name]} | {help_text} |\n"


def python_api() -> Iterator[str]:
    yield "# Python API\n\nFields of configs are in [configuration](configuration.md).\n"
    for module in PUBLIC:
        yield f"\n## {module}\n\n"
        yield from (f"::: {module}.{name}\n\n" for name in import_module(module).__all__)
