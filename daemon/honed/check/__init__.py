"""The preflight: what is refused before anything is loaded, and what a user may read."""
