"""Jobs: entries, states, directories, events, honed.db, `--json` output and retention.

Who renames an entry into failed/?          job/spool.py; the allowed moves are in job/job.py
What does plan.json hold?                   job/plan_file.py
Who may read and change a job?              job/query.py, and verb by verb daemon/verbs.py
What does `--json` print?                   job/shape.py
"""
