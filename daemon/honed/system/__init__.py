"""The machine: durable files, permissions, clocks, systemd, the journal, the control socket, errors and GPUs."""
