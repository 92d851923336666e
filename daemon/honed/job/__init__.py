"""Jobs: entries, states, directories, events, honed.db, `--json` output and retention."""
