"""`python -m recipes [--seed N] [NAME...]`: lists recipes, or makes models and prints where they lie."""

import argparse
import sys

from recipes import shelf


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m recipes")
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to make; `all` for every recipe")
    parser.add_argument("--seed", type=int, help="try this seed, and keep nothing of what it makes")
    options = parser.parse_args()
    wanted = shelf.names() if options.names == ["all"] else options.names
    for name in wanted:
        try:
            if options.seed is not None:
                print(f"{name}: {shelf.tried(name, options.seed)}", flush=True)
            else:
                folder = shelf.made(name)
                print(f"{name}: {shelf.exam(name)}\n    {folder}", flush=True)
        except shelf.RecipeFailed as failed:
            print(failed, file=sys.stderr)
            return 1
    if not wanted:
        for name in shelf.names():
            print(f"{name}: {shelf.about(name)}\n    {shelf.exam(name) or 'Not made yet.'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
