"""plan.json for scripts that run honed's worker without its daemon."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from honed.plan.plan import Plan
    from honed.spec.spec import JobSpec


def write(job_dir: Path, spec: JobSpec, planned: Plan, **changes: Any) -> None:
    """Write the plan of an accepted job with the number 1; `changes` are other values of its keys."""
    identity = {"id": 1, "name": job_dir.name, "user_id": str(os.getuid()), "instance": str(job_dir.parent)}
    document = {
        **planned.as_dict(),
        "warnings": [],
        "job": identity,
        "spec": spec.model_dump(mode="json"),
        "output_dir": str(job_dir / "output"),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        **changes,
    }
    (job_dir / "plan.json").write_text(json.dumps(document))
