"""The model: backends, adapters, the audit, merge and export."""
