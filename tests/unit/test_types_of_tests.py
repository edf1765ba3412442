"""What tests call and replace exists: a renamed method, or a patch of one, would otherwise test nothing."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.full


def test_every_attribute_that_tests_name_exists():
    told = Path(__file__).parent.parent / "pyrightconfig.json"
    command = [sys.executable, "-m", "pyright", "--project", str(told)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as checker:
        try:
            said, _ = checker.communicate(timeout=280)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(checker.pid, signal.SIGKILL)  # it is a child of this one that checks
    assert checker.returncode == 0, said
