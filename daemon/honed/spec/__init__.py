"""Job files and honed.toml: parsing with line numbers, validation, and a suggested fix for each problem."""
