"""``python -m forkyard.cli``."""

from forkyard.cli.main import main

main()
