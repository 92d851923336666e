"""Workers, fetches and checks as processes or systemd units; deadlines and outcomes of attempts.

How did an attempt end?                     run/outcome.py; what follows from it is in run/ending.py
What does a runner have to do?              run/runner.py
"""
