"""Job files and honed.toml: read with their lines and checked, with a remedy for each fault."""
