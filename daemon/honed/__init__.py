"""honed: a training daemon that fine-tunes what is dropped into its spool."""

import os

__version__ = "0.1.0"

# No Python that is started from here takes modules from the directory where it starts; see system/python.py.
os.environ["PYTHONSAFEPATH"] = "1"
