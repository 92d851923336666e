"""Job files and honed.toml: parsing with line numbers, validation, and a suggested fix for every problem.

Where is a key of the job file declared?    spec/spec.py; those of `training`, spec/training.py
Which keys exclude each other?              spec/rule.py
Where is a setting of honed.toml declared?  spec/config.py
What is a kind of job?                      spec/kind.py
"""
