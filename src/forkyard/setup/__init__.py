"""Set-up and doctor: from ``pip install`` to the first sandbox, and why it does not work.

settings = forkyard.config.load()
report = await run_setup(settings, newest=False, tune=None)   # forkyard setup
checks = await doctor.run(settings)                           # forkyard doctor
ready = await quick_setup(settings)                           # the daemon, before it opens a yard
"""

from forkyard.setup.borrow import quick_setup
from forkyard.setup.steps import Report, run_setup
from forkyard.setup.templates import build_template

__all__ = ["Report", "build_template", "quick_setup", "run_setup"]
