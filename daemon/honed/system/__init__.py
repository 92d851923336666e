"""The machine: durable files, rights, clocks, systemd, the journal, the control socket, errors and GPUs."""
