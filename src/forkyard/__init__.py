"""forkyard: sandboxes that fork, checkpoint and rewind with their memory."""

__version__ = "0.1.0"
