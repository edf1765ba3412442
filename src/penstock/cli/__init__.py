"""The `penstock` command."""

from __future__ import annotations


def main() -> None:
    from penstock.cli.app import app

    app(prog_name="penstock")
