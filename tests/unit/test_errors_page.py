"""docs/reference/errors.md lists every error that a request can meet, with what the code says of it."""

import re
from pathlib import Path

from penstock import errors

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
NOT_OF_REQUESTS = {errors.ConfigError, errors.EngineStartFailed}


def tree(root: type[errors.Error]) -> set[type[errors.Error]]:
    return {root}.union(*(tree(child) for child in root.__subclasses__()))


def test_the_page_lists_each_error_of_the_tree_and_no_other():
    listed = set(re.findall(r"^\| (\d+) \| `(\w+)` \| `(\w+)` \|", PAGE.read_text(), re.MULTILINE))
    raised = {e for e in tree(errors.Error) - NOT_OF_REQUESTS if e.__module__ == errors.__name__}
    assert listed == {(str(error.status), error.type, error.code) for error in raised}
