"""One word, one meaning: the terms of docs/glossary.md, and none of the words that they replaced."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import penstock
from penstock.engines.vllm.arguments.source import syntax_tree

ROOT = Path(penstock.__file__).parent
FILES = {path: path.read_text() for path in ROOT.rglob("*.py")}
# Words of earlier names, with what says it better.
NEVER_AGAIN = {
    "appetite": "queue depth",
    "bag": "indexed set",
    "bury": "recover from a crash",
    "crew": "worker pool",
    "hire": "make a worker pool",
    "ledger": "state store",
    "outlet": "direct writer",
    "parcel": "tensor serialization",
    "patience": "retry policy",
    "station": "stage spec",
    "steward": "reconciler",
    "thirst": "need rows",
    "trunk": "multiplexer",
    "whoever": "say who",
    "one's own": "say whose",
    "nobody's": "say whose",
}
# HTTP paths and names on disk that older versions know.
KEPT = {"_penstock/trunk"}
WORD_LISTS = {"bench/load/text.py"}


def test_no_two_public_classes_share_a_name():
    where = defaultdict[str, list[str]](list)
    for path, text in FILES.items():
        for node in ast.walk(syntax_tree(text)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in where.items() if len(files) > 1} == {}


def test_words_that_were_replaced_do_not_come_back():
    word = re.compile(rf"(?<![A-Za-z])({'|'.join(NEVER_AGAIN)})s?(?![A-Za-z])", re.IGNORECASE)
    found = {
        f"{path.relative_to(ROOT)}:{number}: {match[1]}: say {NEVER_AGAIN[match[1].lower()]!r}"
        for path, text in FILES.items()
        if path.relative_to(ROOT).as_posix() not in WORD_LISTS
        for number, line in enumerate(text.splitlines(), 1)
        for match in word.finditer(line)
        if not any(kept in line for kept in KEPT)
    }
    assert sorted(found) == []
