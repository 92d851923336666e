"""A job: its entry and its states, its directory, events, honed.db, `--json` and retention."""
