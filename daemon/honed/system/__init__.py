"""The machine: durable files, permissions, clocks, systemd, the journal, the control socket, errors and GPUs.

Where does each file lie?                   system/layout.py
Where are the error codes?                  system/error.py
"""
