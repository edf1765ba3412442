"""`python -m recipes [NAME...]`: lists recipes, or makes models and prints where they lie."""

import sys

from recipes import shelf


def main(wanted: list[str]) -> int:
    for name in wanted:
        try:
            folder = shelf.made(name)
        except shelf.RecipeFailed as failed:
            print(failed, file=sys.stderr)
            return 1
        print(f"{name}: {shelf.exam(name)}\n    {folder}", flush=True)
    if not wanted:
        for name in shelf.names():
            print(f"{name}: {shelf.about(name)}\n    {shelf.exam(name) or 'Not made yet.'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(shelf.names() if sys.argv[1:] == ["all"] else sys.argv[1:]))
