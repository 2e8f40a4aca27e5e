"""What a study concludes, and where that is written."""

import json
import math
import time
from dataclasses import asdict
from pathlib import Path

from labkit.lab._values import json_safe
from labkit.lab.large_batch._result import Result, Tuning
from labkit.lab.large_batch._study import Study
from labkit.lab.report import Verdict
from labkit.runfolder import runs_root, write_atomically


def verdict(result: Result) -> Verdict:
    """Whether LARS is ahead at the largest batch, by more than twice the standard error of the difference."""
    batch, base = result.batch_sizes[-1], result.batch_sizes[0]
    lead, error = _lead(result, "tuned")
    text = (
        f"At {batch} samples per update and equal epochs ({result.num_epochs}), each rate tuned there, "
        f"{_compared(result, 'tuned', batch)}: {_judged(lead, error)}. With the rate scaled linearly from "
        f"{base}, {_compared(result, 'scaled', batch)}: {_judged(*_lead(result, 'scaled'))}. "
        f"At {base} samples, {_compared(result, 'tuned', base)}."
    )
    return Verdict(text, lead > 2 * error, time.time())


def _lead(result: Result, rule: str) -> tuple[float, float]:
    """Mean accuracy of LARS minus SGD's at the largest batch, and the standard error of that."""
    scores = [result.row(method, rule, result.batch_sizes[-1]).score for method in ("lars", "sgd")]
    return scores[0].accuracy - scores[1].accuracy, math.hypot(*(score.standard_error for score in scores))


def _compared(result: Result, rule: str, batch: int) -> str:
    lars, sgd = (result.row(method, rule, batch).score.accuracy for method in ("lars", "sgd"))
    return f"LARS reaches {lars:.4f} and SGD {sgd:.4f}"


def _judged(lead: float, error: float) -> str:
    if math.isinf(error):
        return "one seed cannot tell"
    if abs(lead) <= 2 * error or lead == 0:
        return f"no difference that {2 * 100 * error:.1f} points of seed noise would not explain"
    return f"LARS {'leads' if lead > 0 else 'trails'} by {abs(100 * lead):.1f} points"


def record(study: Study, tuning: Tuning, result: Result) -> Verdict:
    """Write all numbers and the verdict to `large_batch.json` in the experiment's folder under `runs/`.

    Returns:
        The verdict, to show as the cell's value.
    """
    final = verdict(result)
    content = {
        "verdict": asdict(final),
        "study": str(study),
        "comparison": [asdict(row) for row in result.rows],
        "tuning": [
            {"method": method, "batch": batch, "rate": rate, "score": asdict(score)}
            for (method, batch, rate), score in tuning.scores.items()
        ],
    }
    text = json.dumps(json_safe(content), indent=1, allow_nan=False)
    write_atomically(record_file(study.base.name), text)
    return final


def record_file(name: str) -> Path:
    """Where `record` writes."""
    return runs_root() / name / "large_batch.json"
