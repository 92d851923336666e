"""honectl, one module per group of verbs; doctor and sandbox."""
