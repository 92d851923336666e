"""Base models, adapters, rows and media on disk, and the fetch of them from the hub."""
