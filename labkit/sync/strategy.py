"""What every way of synchronising has in common: one update per global batch."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class StepTotals:
    """What one step was, over all workers.

    Attributes:
        num_samples: Samples that the sums below are over: the global batch, or under local SGD this
            worker's own between averages and everybody's since the last one at an average.
        loss_sum: Sum of the samples' losses.
        accuracy_sum: Sum of the samples' accuracies.
        busy_s: Seconds that each worker worked before it waited for others; shape (W,).
        exposed_s: Seconds that this worker spent synchronising after its own work was done.
        is_stop_wanted: A worker wants all of them to stop after this step.
        node_busy_s: Part of this worker's busy time that went into summing over its node's workers.
        node_exposed_s: The same part of `exposed_s`.
    """

    num_samples: int
    loss_sum: float
    accuracy_sum: float
    busy_s: tuple[float, ...]
    exposed_s: float
    is_stop_wanted: bool
    node_busy_s: float = 0.0
    node_exposed_s: float = 0.0


class Strategy(Protocol):
    """Synchronises gradients and updates the model. It owns the optimizer.

    A step is `begin_step`, then `backward` once per micro-step (never, for a worker without samples),
    then `end_step`. All workers call `end_step` equally often.
    """

    def begin_step(
        self,
        num_samples: int,
        num_micro_steps: int,
        *,
        expected_samples: int = 1,
        is_stop_wanted: bool = False,
    ) -> None:
        """Start a step in which this worker contributes `num_samples` samples.

        Args:
            num_samples: Of this worker.
            num_micro_steps: Calls of `backward` to come.
            expected_samples: Of the global batch, the same on all workers. It only saves work: gradients
                are divided by the number of samples that really came.
            is_stop_wanted: This worker wants all to stop after the step.
        """
        ...

    def count_data(self, waited_s: float, num_missing: int = 0) -> None:
        """This worker has waited for data, which does not make its device slow.

        Args:
            waited_s: Seconds.
            num_missing: Samples of `begin_step` that can't be read and are left out.
        """
        ...

    def backward(self, losses: Tensor, accuracies: Tensor) -> None:
        """Back-propagate the sum of one micro-step's losses; shapes (b,), (b,)."""
        ...

    def end_step(self, learning_rate: float) -> StepTotals:
        """Finish synchronising and update the model.

        Raises:
            PeerError: another worker is gone.
        """
        ...

    def merged_buffers(self) -> AbstractContextManager[None]:
        """Running statistics that agree on all workers, for evaluation and checkpoints."""
        ...

    def local_state(self) -> Tensor:
        """What only this worker knows and needs to go on exactly; shape (n,), float64, n the same on all."""
        ...

    def load_local_state(self, state: Tensor) -> None:
        """Go on exactly."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the model; whole on worker 0. All workers call it together.

        It is the state of an optimizer over whole parameters, whatever the strategy, so that a run can be
        resumed under another one.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        ...

    def close(self) -> None:
        """Let go of hooks and buffers."""
        ...
