"""honectl, a module for each group of verbs; doctor, sandbox, and the reference pages."""
