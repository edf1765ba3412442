"""What tests call and replace exists: a renamed method, or a patch of one, would otherwise test nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full


def test_every_attribute_that_tests_name_exists():
    told = Path(__file__).parent.parent / "pyrightconfig.json"
    command = [sys.executable, "-m", "pyright", "--project", str(told)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout
