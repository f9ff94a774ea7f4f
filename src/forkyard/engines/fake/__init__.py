"""The fake engine: machines with a toy kernel, in this process, without root.

It is the second implementation of the engine protocol and of the guest's end of the wire, so
that what the yard relies on is what both engines do (``tests/conformance`` runs one suite
over them). Its guests run a small fixed set of programs, stop in time, are saved to real
files and come back from them. It isolates nothing: no setting selects it.
"""

from forkyard.engines.fake.engine import Fake

__all__ = ["Fake"]
