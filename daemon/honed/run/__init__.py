"""Workers, fetches and checks as processes or systemd units: starting, stopping and adopting them."""
