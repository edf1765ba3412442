"""How a command fails."""

from __future__ import annotations

import errno
import sys
import tempfile
import traceback
from typing import NoReturn, TextIO

from penstock.errors import ConfigError, Error

INTERRUPTED = 130  # 128 + SIGINT, as shells count
_SHOWN_CHARS = 600


def fail(command: str, error: Error, *, as_json: bool = False) -> NoReturn:
    """Tells the user and exits: 2 for a mistake in what was written, 1 for anything else.

    as_json: as a line of a JSON log.
    """
    text = f"{f'penstock {command}'.strip()}: {error}"
    if as_json:
        from penstock.json_logs import error_line

        text = error_line(text)
    print(text, file=sys.stderr)
    sys.exit(2 if isinstance(error, ConfigError) else 1)


def is_interrupt(error: BaseException | None) -> bool:
    """Whether it came of Ctrl-C.

    Python 3.11 makes a RuntimeError of one within `__set_name__`, as in imports.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def crashed(error: BaseException, err: TextIO | None = None) -> int:
    """Tells the user of an error that no command expects: a fault of ours, or a full disk. Returns the exit
    code.

    err: where the user reads; by default stderr.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"'{error.filename}'" if error.filename else "The output"
        print(f"penstock: {what} cannot be written: {error.strerror}.", file=err or sys.stderr)
        return 1
    text = "".join(traceback.format_exception(error))
    try:
        with tempfile.NamedTemporaryFile("w", prefix="penstock-", suffix=".log", delete=False) as log:
            log.write(text)
        where = f"in {log.name}"
    except OSError:  # such as a full disk, perhaps the fault itself
        print(text, file=err or sys.stderr)
        where = "above"
    what = f"{type(error).__name__}: {error}".partition("\n")[0][:_SHOWN_CHARS]
    print(
        f"penstock: A fault of Penstock itself ({what}). The traceback is {where}; please report it.",
        file=err or sys.stderr,
    )
    return 1
