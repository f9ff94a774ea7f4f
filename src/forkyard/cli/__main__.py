"""``python -m forkyard.cli``."""

from forkyard.cli.entry import main

main()
