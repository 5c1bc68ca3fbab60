"""`python -m tonle` is `tonle`."""

from tonle.cli import main

main()
