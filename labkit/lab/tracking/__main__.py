"""`python -m labkit.lab.tracking RUN_DIR` tracks a run; its supervisor holds the other end of stdin.

The other forms are helper processes of this package: `--sync RUN_DIR`, `--notebook RUN_DIR`,
`--create-store FILE ARTIFACTS`.
"""

import logging
import os
import sys
from pathlib import Path

from labkit.errors import LabkitError
from labkit.lab.tracking import _store, _tracker
from labkit.lab.tracking._process import settings
from labkit.lab.tracking._run import first_line
from labkit.runfolder import RunFolder


def main(arguments: list[str]) -> int:
    """Do what the arguments say; one line on stderr if it fails."""
    os.environ.update(settings())
    for name in ("alembic", "mlflow"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        match arguments:
            case ["--create-store", path, artifacts]:
                _store.create_store(Path(path), Path(artifacts))
            case ["--sync", folder]:
                _tracker.sync_now(RunFolder(folder))
            case ["--notebook", folder]:
                _tracker.log_notebook_now(RunFolder(folder))
            case [folder] if not folder.startswith("-"):
                return 0 if _tracker.track(RunFolder(folder)) else 1
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except LabkitError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except Exception as fault:
        print(first_line(fault), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
