"""The report of a job, and honed-web.

Who may read a job's report?    page/guard.py over HTTP; as a file, who may read its directory (system/layout.py)
"""
