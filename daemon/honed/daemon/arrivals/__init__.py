"""Arrivals: job files from the spool and the control socket, until they are jobs in the queue or rejected."""
