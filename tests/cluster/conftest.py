"""The fixtures of these tests; their parts are in nodes.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from nodes import cluster, whole_cluster  # noqa: F401
