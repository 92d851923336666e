"""honed: a training daemon that fine-tunes what is dropped into its spool."""

__version__ = "0.1.0"
