"""The preflight: what is refused before anything is loaded, and what a user may read.

What is checked, in which order?            check/checklist.py
Where is the memory estimate compared?      check/checklist.py, with the device's memory, by plan/remedy.py
Which files may a job read?                 check/policy.py
"""
