"""`honectl metrics`: the metrics of honed-web, for node_exporter's textfile collector."""

from __future__ import annotations

import argparse
import sys

from honed.cli.instance import Instance
from honed.job import query
from honed.page.metrics import scrape
from honed.page.source import Source


def metrics(instance: Instance, _options: argparse.Namespace) -> int:
    """Print the metrics. Those of honed's state that the user cannot read are left out."""
    sys.stdout.write(scrape(Source(instance.layout), query.ANYBODY, with_process=False).decode())
    return 0
