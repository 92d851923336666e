"""The loop and its steps: arrivals, the queue, running jobs, housekeeping, the socket's verbs."""
