"""Workers, fetches and checks as processes or systemd units; deadlines and outcomes of attempts."""
