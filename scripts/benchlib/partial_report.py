"""The JSON document of a program that is still running, so that what it measured outlives it."""

import json
import os
from pathlib import Path

from absl import flags

from jaxkv.measurement import Report


def save(report: Report) -> None:
    """Rewrite --json_out, if it was asked for, with what there is so far."""
    if not flags.FLAGS.json_out:
        return
    path = Path(flags.FLAGS.json_out)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(report.document()) + "\n", encoding="utf-8")
    os.replace(partial, path)  # whoever reads it, or is interrupted, finds a whole document
