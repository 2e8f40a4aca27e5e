"""`tracking.json`: which MLflow run a run folder has, and how far each of its files was sent."""

from pydantic import BaseModel, ConfigDict, ValidationError

from labkit.runfolder import RunFolder, write_atomically


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Window(_Record):
    """Step times of one worker that wait to become one point.

    It is kept with the offset, so that lines that are sent again after a crash are cut into the same
    windows and give the same points.

    Attributes:
        attempt: Attempt of its steps.
        opened_at: Time of the first step, seconds since 1970.
        closed_at: Time of the last step so far.
        step: The last step so far.
        num_steps: Steps in it.
        sums_ms: Sum of each part over these steps.
    """

    attempt: int
    opened_at: float
    closed_at: float
    step: int
    num_steps: int = 0
    sums_ms: dict[str, float] = {}


class TrackingState(_Record):
    """The content of `tracking.json`. It moves on only after MLflow has taken a batch.

    Attributes:
        store: Tracking URI without its password; "" for the database beside the runs.
        token: Marks the MLflow run as this folder's, from before it exists.
        experiment_id: MLflow's number of the experiment.
        run_id: MLflow's id of the run, "" while there is none.
        attempt: Newest attempt that MLflow knows of.
        offsets: Bytes of each worker's events that are done with, by rank.
        windows: Step times read but not sent, by rank.
        latest: Last finite value of each metric of rank 0.
        num_nonfinite: Values so far that were not finite.
        diverged_at: First step with one.
        timings_sent_at: When rank 0's step was last sent with its timings, seconds since 1970.
        ended_attempt: Attempt whose end MLflow knows of, 0 for none.
        num_sent: Points sent.
    """

    store: str = ""
    token: str = ""
    experiment_id: str = ""
    run_id: str = ""
    attempt: int = 0
    offsets: dict[int, int] = {}
    windows: dict[int, Window] = {}
    latest: dict[str, float] = {}
    num_nonfinite: int = 0
    diverged_at: int | None = None
    timings_sent_at: float = 0.0
    ended_attempt: int = 0
    num_sent: int = 0

    def is_complete(self, folder: RunFolder) -> bool:
        """MLflow has the run's end and every byte of its events."""
        status = folder.read_status()
        return (
            status.state.is_final
            and self.ended_attempt == status.attempt
            and all(
                self.offsets.get(rank, 0) >= folder.events_file(rank).stat().st_size
                for rank in folder.ranks()
            )
        )


def read_state(folder: RunFolder) -> TrackingState:
    """Read `tracking.json`; a run without one (or with a broken one) starts from nothing."""
    try:
        return TrackingState.model_validate_json(folder.tracking_file.read_bytes())
    except (FileNotFoundError, ValidationError):
        return TrackingState()


def write_state(folder: RunFolder, state: TrackingState) -> None:
    """Replace `tracking.json`. Only the holder of the tracking lock calls this."""
    write_atomically(folder.tracking_file, state.model_dump_json(indent=1))
