"""honed: a training daemon that fine-tunes what is dropped into its spool.

What may the daemon not import?      the contracts in pyproject.toml; tests/unit/test_borders.py
Which test holds a given promise?    tests/README.md
"""

__version__ = "0.2.0"
