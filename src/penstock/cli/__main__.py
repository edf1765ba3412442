"""`python -m penstock.cli`: the command where no script is installed."""

from penstock.cli import main

main()
