"""Base models, adapters, rows and media on disk, and the fetch of them from the hub.

Where does a line of a data set become an example?    inputs/row.py
"""
