"""`honectl metrics`: the metrics of honed-web, for node_exporter's textfile collector."""

from __future__ import annotations

import argparse
import sys

from honed.cli.instance import Instance
from honed.job import query


def metrics(instance: Instance, _options: argparse.Namespace) -> int:
    """Print the metrics. Raises PermissionError for a user who may not read honed's files."""
    from honed.page.metrics import scrape  # loads prometheus_client, which no other verb needs
    from honed.page.source import Source

    sys.stdout.write(scrape(Source(instance.layout), query.ANYBODY, with_process=False).decode())
    return 0
