"""The report of a job, and honed-web."""
