"""Forms of rows, one file a form: text (one answer, or a text alone). A kind of job names its form (spec/kind.py)."""
