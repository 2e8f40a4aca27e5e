"""Every section of an experiment. This module imports no torch, so notebooks and the CLI start at once."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    field_validator,
    model_validator,
)

from labkit.config._section import Section
from labkit.config._sizes import parse_bytes

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
Folder = Annotated[str, AfterValidator(lambda text: str(Path(text).expanduser().absolute()))]


def _tag_of(value: Any) -> str:
    name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
    return "<user>" if isinstance(name, str) and ":" in name else f"<{name}>"


def _entry_point(name: str) -> str:
    module, _, function = name.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), function]):
        raise ValueError(f"name must be module:function, got {name!r}. For example my_models:build.")
    return name


EntryPoint = Annotated[str, AfterValidator(_entry_point)]


# --- model -----------------------------------------------------------------------------------


class MlpConfig(Section):
    """Fully connected network with ReLU between its layers."""

    name: Literal["mlp"] = "mlp"
    hidden_sizes: Annotated[tuple[PositiveInt, ...], Field(strict=False)] = Field(
        (128,), description="width of each hidden layer"
    )


class ConvNetConfig(Section):
    """Small convolutional network: convolution, batch norm, ReLU, pooling; then one linear layer."""

    name: Literal["convnet"] = "convnet"
    channels: Annotated[tuple[PositiveInt, ...], Field(strict=False)] = Field(
        (16, 32), description="channels of each block; every block halves the image"
    )
    has_batch_norm: bool = Field(True, description="batch norm after each convolution")


class GptConfig(Section):
    """Decoder-only transformer over bytes."""

    name: Literal["gpt"] = "gpt"
    num_layers: PositiveInt = Field(2, description="transformer blocks")
    num_heads: PositiveInt = Field(4, description="attention heads per block")
    width: PositiveInt = Field(128, description="width of the residual stream")
    dropout: Fraction = Field(0.0, description="dropout probability")

    @model_validator(mode="after")
    def _heads_divide_width(self) -> "GptConfig":
        if self.width % self.num_heads:
            raise ValueError(
                f"model.width must be a multiple of model.num_heads ({self.num_heads}), "
                f"got {self.width}. Use {self.width // self.num_heads * self.num_heads or self.num_heads}."
            )
        return self


class UserModelConfig(Section):
    """A model of the user's own: a function `(data_info, **options) -> torch.nn.Module`."""

    name: EntryPoint
    options: dict[str, JsonValue] = Field({}, description="keyword arguments of the function")


ModelConfig = Annotated[
    Annotated[MlpConfig, Tag("<mlp>")]
    | Annotated[ConvNetConfig, Tag("<convnet>")]
    | Annotated[GptConfig, Tag("<gpt>")]
    | Annotated[UserModelConfig, Tag("<user>")],
    Discriminator(_tag_of),
]


# --- data ------------------------------------------------------------------------------------


class DigitsConfig(Section):
    """1,797 scanned 8x8 digits that ship with scikit-learn; the last `num_val` are held out."""

    name: Literal["digits"] = "digits"
    num_val: Annotated[int, Field(ge=1, le=1796)] = Field(297, description="samples held out")


class TextConfig(Section):
    """The Python standard library's own sources as bytes, cut into windows; the last ones are held out."""

    name: Literal["text"] = "text"
    context: Annotated[int, Field(ge=2)] = Field(128, description="bytes per sample")
    max_bytes: PositiveInt = Field(4_000_000, description="bytes read at the most")
    num_val: PositiveInt = Field(256, description="windows held out")


class ShardsConfig(Section):
    """Shards that `labkit shards write` wrote: read in contiguous extents, shuffled in a window of them."""

    name: Literal["shards"] = "shards"
    path: Folder = Field(
        description="folder with train/ and val/ (or of the training shards, with val_path); the same on all "
        "machines"
    )
    val_path: Folder | None = Field(None, description="folder of the shards held out; none: val/ in path")
    window: Bytes = Field(
        64 * 2**20,
        description="bytes of extents that rows are drawn from: more mixes better, and takes memory",
    )
    buffer: Bytes | None = Field(
        None, description="bytes of memory of each worker for what is read; none: two windows"
    )
    num_readers: Annotated[int, Field(ge=1, le=64)] = Field(2, description="requests under way at once")
    num_decoders: Annotated[int, Field(ge=0, le=256)] = Field(
        0, description="that decode and transform beside the computing; 0: the thread that gathers batches"
    )
    decoders: Literal["threads", "processes"] = Field(
        "threads", description="processes for transforms in Python, which threads can't run at once"
    )
    image_size: tuple[PositiveInt, PositiveInt] | None = Field(
        None, description="height and width that encoded images are brought to", strict=False
    )
    transform: EntryPoint | None = Field(
        None,
        description="function (input, target, generator) -> (input, target); generator is None in validation",
    )
    on_bad: Literal["fail", "skip"] = Field(
        "fail", description="what to do with rows that can't be read; skip: leave them out and count them"
    )

    @model_validator(mode="after")
    def _window_fits(self) -> "ShardsConfig":
        if self.buffer is not None and self.buffer < self.window:
            raise ValueError(
                f"data.buffer must hold data.window ({self.window} bytes), got {self.buffer}. Raise it, or "
                "lower data.window."
            )
        return self


class UserDataConfig(Section):
    """A data set of the user's own: a function `(**options) -> labkit.tasks.Data`."""

    name: EntryPoint
    options: dict[str, JsonValue] = Field({}, description="keyword arguments of the function")


DataConfig = Annotated[
    Annotated[DigitsConfig, Tag("<digits>")]
    | Annotated[TextConfig, Tag("<text>")]
    | Annotated[ShardsConfig, Tag("<shards>")]
    | Annotated[UserDataConfig, Tag("<user>")],
    Discriminator(_tag_of),
]


# --- cluster ---------------------------------------------------------------------------------


class ProfileConfig(Section):
    """What `labkit probe` measured of a device: alpha + beta * b seconds for a micro-step of b samples."""

    alpha_s: Annotated[float, Field(ge=0)] = Field(description="seconds of a micro-step whatever its size")
    beta_s: PositiveFloat = Field(description="seconds per sample")
    max_micro_batch_size: PositiveInt | None = Field(
        None, description="largest micro-step that fits in its memory; none: no limit was met"
    )
    smallest: PositiveInt = Field(1, description="smallest batch measured")
    largest: PositiveInt = Field(1, description="largest batch measured")
    residual: Annotated[float, Field(ge=0)] = Field(
        0.0, description="root mean square of the fit's relative errors"
    )
    uncertainty: Annotated[float, Field(ge=0)] = Field(
        0.0, description="spread of the prediction between repeats, relative"
    )


class MeasuredLinkConfig(Section):
    """What `labkit probe` measured between two nodes, or between two workers of one."""

    source: str = Field(description="a node's name")
    target: str = Field(description="a node's name; the same one: inside the node")
    mbit: PositiveFloat = Field(description="payload rate, Mbit/s")
    latency_s: Annotated[float, Field(ge=0)] = Field(description="half a round trip of a small message")


class ThrottleConfig(Section):
    """An emulated device that is slower for a while: another tenant, or heat."""

    factor: PositiveFloat = Field(description="how many times as long everything takes meanwhile")
    from_step: PositiveInt = Field(1, description="first slow step")
    to_step: PositiveInt | None = Field(None, description="last slow step; none: to the end")


class WorkerConfig(Section):
    """One rank."""

    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="auto | cpu | cuda | cuda:N",
    )
    local_batch_size: Annotated[int, Field(ge=0)] | None = Field(
        None, description="samples of each global batch; none: an even split"
    )
    speed: PositiveFloat = Field(
        1.0,
        description="emulated speed: engine.step_padding_s is for an even share at speed 1; without it, the "
        "fastest worker has all of its cores and the others a quota in proportion (needs root)",
    )
    throttle: ThrottleConfig | None = Field(None, description="emulated: slower for a while")
    max_batch_size: PositiveInt | None = Field(
        None, description="most samples of a global batch that it may get; none: any number"
    )
    profile: ProfileConfig | None = Field(None, description="as `labkit probe` measured it")


def _as_curve(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else (value,)


Rates = Annotated[tuple[Bytes, ...], BeforeValidator(_as_curve), Field(strict=False)]


class UplinkConfig(Section):
    """A link to the host that devices of a node share: what 1, 2, ... of them bring through it together.

    On CPUs it is emulated: copies of activations take as long as they would on it. On GPUs its rates are
    those to plan with. A single rate holds for any number of devices.
    """

    workers: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] | None = Field(
        None, description="behind it, by their numbers on the node from 0; none: all of the node"
    )
    out_rates: Rates = Field(
        min_length=1, description="bytes a second from the devices when 1, 2, ... copy at once, as 12GB"
    )
    in_rates: Rates = Field(min_length=1, description="to the devices, likewise")
    both_out_rates: Rates = Field(
        (), description="from the devices while as many copy to them; none: as out_rates"
    )
    both_in_rates: Rates = Field(
        (), description="to the devices while as many copy from them; none: as in_rates"
    )
    latency_s: Annotated[float, Field(ge=0)] = Field(0.0, description="of one copy")
    carries_gradients: bool = Field(
        False, description="gradients between the workers take the same way, during the backward pass"
    )

    def behind(self, num_workers: int) -> tuple[int, ...]:
        """The workers behind it, by their numbers on a node of so many."""
        return self.workers or tuple(range(num_workers))


class MeasuredUplinkConfig(UplinkConfig):
    """What `labkit probe --links` measured of a link between devices and their host."""

    node: str = Field(description="a node's name")


NODE_SHORTHANDS = ("device", "speed", "throttle", "max_batch_size", "profile")


class NodeConfig(Section):
    """One machine. `workers: 4` is short for four equal workers, whose settings stand beside it."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="its name")
    workers: Annotated[tuple[WorkerConfig, ...], Field(strict=False)] = Field(min_length=1)
    up_mbit: PositiveFloat | None = Field(
        None, description="emulated rate of its link towards the others, Mbit/s; none: the cluster's"
    )
    down_mbit: PositiveFloat | None = Field(
        None, description="emulated rate of its link from the others, Mbit/s; none: the cluster's"
    )
    uplinks: Annotated[tuple[UplinkConfig, ...], Field(strict=False)] = Field(
        (), description="between its devices and their host; none: found (CUDA), or as fast as memory"
    )

    @model_validator(mode="after")
    def _uplinks_fit(self) -> "NodeConfig":
        behind = [rank for uplink in self.uplinks for rank in uplink.behind(len(self.workers))]
        if len(set(behind)) < len(behind) or any(rank >= len(self.workers) for rank in behind):
            raise ValueError(
                f"uplinks of node {self.name!r} must have each of its workers (0 to {len(self.workers) - 1}) "
                f"once at the most, got {behind}. Give each worker one uplink."
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _expand_count(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or not isinstance(value.get("workers"), int):
            return value
        short = dict(value)
        count = short["workers"]
        worker = {key: short.pop(key) for key in NODE_SHORTHANDS if key in short}
        if isinstance(count, bool) or count < 1:
            raise ValueError(
                f"workers of node {short.get('name')!r} must be at least 1, got {count}. "
                "Remove the node or give it a worker."
            )
        return {**short, "workers": [worker] * count}


class ClusterConfig(Section):
    """Nodes and their workers. Ranks are given out in this order."""

    nodes: Annotated[tuple[NodeConfig, ...], Field(strict=False)] = Field(min_length=1)
    link_mbit: PositiveFloat | None = Field(
        None, description="emulated rate of every node's link, Mbit/s; none: as fast as it goes"
    )
    rtt_ms: Annotated[float, Field(gt=0, le=10_000)] | None = Field(
        None,
        description="emulated round trip between any two nodes, ms (needs /dev/net/tun); none: not delayed",
    )
    profiled_model: str | None = Field(None, description="what the workers' profiles were measured with")
    gradient_bytes: PositiveInt | None = Field(None, description="of that model")
    measured_links: Annotated[tuple[MeasuredLinkConfig, ...], Field(strict=False)] = Field(
        (), description="as `labkit probe` measured them"
    )
    measured_uplinks: Annotated[tuple[MeasuredUplinkConfig, ...], Field(strict=False)] = Field(
        (), description="as `labkit probe --links` measured them"
    )

    @field_validator("nodes")
    @classmethod
    def _names_differ(cls, nodes: tuple[NodeConfig, ...]) -> tuple[NodeConfig, ...]:
        seen: set[str] = set()
        for node in nodes:
            if node.name in seen:
                raise ValueError(
                    f"cluster.nodes must have names that differ, got {node.name!r} twice. Rename one."
                )
            seen.add(node.name)
        return nodes

    @property
    def num_workers(self) -> int:
        """Workers of all nodes."""
        return sum(len(node.workers) for node in self.nodes)

    @property
    def speeds(self) -> tuple[float, ...]:
        """Speed of every worker, by rank; shape (W,)."""
        return tuple(worker.speed for node in self.nodes for worker in node.workers)


def cluster_of_shape(num_nodes: int, workers_per_node: int) -> ClusterConfig:
    """A cluster of like nodes named node0, node1, ..."""
    return ClusterConfig(
        nodes=tuple(
            NodeConfig(name=f"node{index}", workers=(WorkerConfig(),) * workers_per_node)
            for index in range(num_nodes)
        )
    )


# --- sync, optimizer, schedule -----------------------------------------------------------------


BatchNorm = Annotated[
    Literal["local", "synchronized"],
    Field(description="batch statistics of each worker, or of the global batch"),
]


class AllReduceConfig(Section):
    """Flat synchronous all-reduce over all workers."""

    name: Literal["allreduce"] = "allreduce"
    bucket_bytes: PositiveInt = Field(
        5_000_000, description="gradient bytes per collective; small ones overlap better"
    )
    batch_norm: BatchNorm = "local"


class HierarchicalConfig(Section):
    """Two levels: shared memory inside a node, sliced all-reduce between nodes."""

    name: Literal["hierarchical"] = "hierarchical"
    wire: Literal["float32", "bfloat16"] = Field(
        "float32", description="format between nodes; bfloat16 halves the bytes, with error feedback"
    )
    chunk_bytes: PositiveInt | None = Field(
        None,
        description="gradient bytes that go out together; none: measured at the start, on GPUs 8 MiB",
    )
    is_overlapped: bool = Field(True, description="chunks go out while back-propagation still runs")
    num_senders: PositiveInt | None = Field(
        None, description="workers per node that talk to other nodes; none: measured at the start"
    )
    batch_norm: BatchNorm = "local"


class ParameterServerConfig(Section):
    """Flat synchronous parameter server on worker 0, the native distributed strategy of 2016-2020."""

    name: Literal["parameter_server"] = "parameter_server"
    batch_norm: BatchNorm = "local"


class LocalSgdConfig(Section):
    """Workers step alone and average their parameters now and then, at each level with its own period."""

    name: Literal["local_sgd"] = "local_sgd"
    period_steps: PositiveInt = Field(8, description="steps between averages over all workers")
    node_period_steps: PositiveInt = Field(1, description="steps between averages inside a node")
    momentum: Literal["averaged", "kept"] = Field(
        "averaged", description="average the optimizer's state with the parameters, or keep each worker's"
    )
    switch_step: Annotated[int, Field(ge=0)] = Field(
        0, description="synchronous up to this step, local after it (post-local SGD)"
    )
    batch_norm: BatchNorm = "local"

    @model_validator(mode="after")
    def _periods_nest(self) -> "LocalSgdConfig":
        if self.period_steps % self.node_period_steps:
            raise ValueError(
                f"sync.period_steps must be a multiple of sync.node_period_steps ({self.node_period_steps}), "
                f"got {self.period_steps}. Use {self.node_period_steps * 2}."
            )
        return self


class AsyncConfig(Section):
    """Groups of workers that push to a sharded parameter server whenever they have something."""

    groups: (
        Annotated[tuple[Annotated[tuple[int, ...], Field(strict=False)], ...], Field(strict=False)] | None
    ) = Field(None, description="ranks of each group; none: chosen")
    staleness_bound: Annotated[int, Field(ge=0)] | None = Field(
        8, description="most updates between a pull and the push that rests on it; none: any number"
    )
    is_weighted: bool = Field(True, description="a push of staleness s weighs 1 / (1 + s)")
    is_overlapped: bool = Field(
        True, description="push and pull while the next samples are computed; not with bound 0"
    )
    heartbeat_timeout_s: PositiveFloat = Field(5.0, description="a group silent for so long is dropped")
    max_group_restarts: Annotated[int, Field(ge=0)] = Field(
        1, description="times that a lost group is started again, each"
    )
    max_server_restarts: Annotated[int, Field(ge=0)] = Field(
        1, description="times that all go back to the last checkpoint because a server was lost"
    )
    batch_norm: Literal["local"] = Field("local", description="batch statistics of each worker")

    @model_validator(mode="after")
    def _groups_are_disjoint(self) -> "AsyncConfig":
        ranks = [rank for group in self.groups or () for rank in group]
        for rank in ranks:
            if ranks.count(rank) > 1:
                raise ValueError(
                    f"sync.groups must have each worker once, got worker {rank} twice. Remove one."
                )
        if self.groups is not None and not all(self.groups):
            raise ValueError("sync.groups must have at least one worker each, got an empty one. Remove it.")
        return self


class HybridConfig(AsyncConfig):
    """Synchronous inside groups of like workers, asynchronous between them (after Kim et al., 2020)."""

    name: Literal["hybrid"] = "hybrid"


class AsyncParameterServerConfig(AsyncConfig):
    """Every worker pushes for itself, as stale as it comes (after Dean et al., DistBelief, 2012)."""

    name: Literal["async_parameter_server"] = "async_parameter_server"
    staleness_bound: Annotated[int, Field(ge=0)] | None = Field(
        None, description="most updates between a pull and the push that rests on it; none: any number"
    )
    is_weighted: bool = Field(False, description="a push of staleness s weighs 1 / (1 + s)")


class SspConfig(AsyncConfig):
    """Every worker pushes for itself, within a bound (after Ho et al., Stale Synchronous Parallel, 2013)."""

    name: Literal["ssp"] = "ssp"
    is_weighted: bool = Field(False, description="a push of staleness s weighs 1 / (1 + s)")


SyncConfig = Annotated[
    Annotated[AllReduceConfig, Tag("<allreduce>")]
    | Annotated[HierarchicalConfig, Tag("<hierarchical>")]
    | Annotated[ParameterServerConfig, Tag("<parameter_server>")]
    | Annotated[LocalSgdConfig, Tag("<local_sgd>")]
    | Annotated[HybridConfig, Tag("<hybrid>")]
    | Annotated[AsyncParameterServerConfig, Tag("<async_parameter_server>")]
    | Annotated[SspConfig, Tag("<ssp>")],
    Discriminator(_tag_of),
]


class SgdConfig(Section):
    """Stochastic gradient descent with momentum (torch.optim.SGD)."""

    name: Literal["sgd"] = "sgd"
    learning_rate: PositiveFloat = Field(0.1, description="peak learning rate")
    momentum: Fraction = Field(0.9, description="momentum")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="L2 penalty")
    is_nesterov: bool = Field(False, description="Nesterov momentum")

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> "SgdConfig":
        if self.is_nesterov and not self.momentum:
            raise ValueError(
                "optimizer.momentum must be greater than 0 with optimizer.is_nesterov, got 0. "
                "Use 0.9, or switch Nesterov off."
            )
        return self


class AdamWConfig(Section):
    """Adam with decoupled weight decay (torch.optim.AdamW; Loshchilov and Hutter, 2019)."""

    name: Literal["adamw"] = "adamw"
    learning_rate: PositiveFloat = Field(1e-3, description="peak learning rate")
    beta1: Fraction = Field(0.9, description="decay of the first moment")
    beta2: Fraction = Field(0.999, description="decay of the second moment")
    epsilon: PositiveFloat = Field(1e-8, description="added to the denominator")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.01, description="decoupled decay")


class LarsConfig(Section):
    """Layer-wise adaptive rate scaling (You et al., 2017), the rule of the paper and of MLPerf."""

    name: Literal["lars"] = "lars"
    learning_rate: PositiveFloat = Field(1.0, description="peak learning rate")
    momentum: Fraction = Field(0.9, description="momentum")
    weight_decay: Annotated[float, Field(ge=0)] = Field(1e-4, description="L2 penalty")
    trust_coefficient: PositiveFloat = Field(0.001, description="trust coefficient (eta)")
    is_small_decayed: bool = Field(False, description="weight decay on biases and normalisation too")
    is_small_adapted: bool = Field(False, description="trust ratio on biases and normalisation too")


OptimizerConfig = Annotated[
    Annotated[SgdConfig, Tag("<sgd>")]
    | Annotated[AdamWConfig, Tag("<adamw>")]
    | Annotated[LarsConfig, Tag("<lars>")],
    Discriminator(_tag_of),
]


class ScheduleConfig(Section):
    """Learning rate as a pure function of the step."""

    name: Literal["constant", "cosine", "polynomial", "step"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        0, description="linear warm-up; step K reaches the peak"
    )
    final_fraction: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="last learning rate over the peak (cosine, polynomial)"
    )
    power: PositiveFloat = Field(2.0, description="exponent (polynomial)")
    milestones: Annotated[tuple[PositiveInt, ...], Field(strict=False)] = Field(
        (), description="steps after which the rate is multiplied by `factor` (step)"
    )
    factor: PositiveFloat = Field(0.1, description="multiplier at each milestone (step)")


# --- engine, launch ------------------------------------------------------------------------------


class EngineConfig(Section):
    """The training loop."""

    global_batch_size: PositiveInt = Field(64, description="samples per update, whatever the cluster")
    micro_batch_size: PositiveInt | None = Field(
        None, description="largest number of samples per forward pass of a worker"
    )
    num_epochs: PositiveInt = Field(5, description="passes over the training data")
    max_steps: PositiveInt | None = Field(None, description="stop after this many steps")
    eval_every_steps: PositiveInt | None = Field(None, description="none: after each epoch")
    checkpoint_every_steps: PositiveInt | None = Field(None, description="none: after each epoch")
    keep_checkpoints: PositiveInt = Field(3, description="newest checkpoints kept")
    clip_norm: PositiveFloat | None = Field(
        None, description="largest norm of the globally averaged gradient"
    )
    dtype: Literal["float32", "float64"] = Field("float32", description="of parameters and inputs")
    num_threads: PositiveInt | None = Field(
        None, description="torch threads per worker; none: cores over the node's workers"
    )
    step_padding_s: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="emulated compute of a step on an even share of the batch at speed 1; 0: real time, "
        "unlike speeds then are processor quotas",
    )


class MemoryConfig(Section):
    """What becomes of activations that the device has no room for."""

    device_budget: Bytes | None = Field(
        None,
        description="bytes on the device, parameters and optimizer included; none: no limit, nothing moves",
    )
    host_budget: Bytes | None = Field(
        None, description="bytes of host memory of each worker; none: as many as the device budget"
    )
    tier: Annotated[str, Field(pattern=r"^(auto|pinned|ram|mmap:.+)$")] = Field(
        "auto", description="auto | pinned | ram | mmap:FOLDER; auto: pinned on CUDA, else ram"
    )
    policy: Literal["auto", "keep", "offload", "recompute"] = Field(
        "auto", description="auto: as the budget needs; offload, recompute: all that can be; keep: nothing"
    )
    window: Bytes | None = Field(
        None,
        description="bytes of copies under way in each direction; none: as the budget leaves room, and an "
        "eighth of what is saved where there is none",
    )
    link_out: Bytes | None = Field(
        None,
        description="bytes a second to plan with from the device, as 12GB; none: this worker's share of its "
        "uplink, or measured",
    )
    link_in: Bytes | None = Field(None, description="to the device, likewise")

    @model_validator(mode="after")
    def _has_a_budget(self) -> "MemoryConfig":
        if self.policy == "offload" and self.device_budget is None and self.host_budget is None:
            raise ValueError(
                "memory.host_budget must be given with policy 'offload' and no device budget, got nothing. "
                "For example memory.host_budget=4GiB."
            )
        return self


class SharesConfig(Section):
    """How a global batch is split over unlike workers. `local_batch_size`s in the cluster come first."""

    name: Literal["auto", "even", "planned"] = Field(
        "auto", description="planned: by the workers' profiles; auto: planned where all have one, else even"
    )
    is_rebalanced: bool = Field(
        False, description="adapt shares while training when a device slows down or recovers"
    )
    dead_band: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.05, description="smallest predicted gain in step time for which shares change"
    )


class LaunchConfig(Section):
    """How workers are started and watched. Of it `purpose` and `is_emulated` alone make another run."""

    purpose: Literal["train", "probe", "links", "max_batch"] = Field(
        "train",
        description="instead of training, probe: measure devices and links; links: those between devices and "
        "their host; max_batch: find the largest batch",
    )
    launcher: Literal["local", "elastic"] = Field(
        "local", description="local: forked here; elastic: torch.distributed.run on every node"
    )
    max_restarts: Annotated[int, Field(ge=0)] = Field(
        0, description="restarts of all workers from the last checkpoint after a failure"
    )
    timeout_s: PositiveFloat | None = Field(None, description="longest life of the run")
    worker_timeout_s: PositiveFloat = Field(
        30.0, description="a worker that shows no life for this long is named and ends the run"
    )
    comm_timeout_s: PositiveFloat = Field(300.0, description="longest wait in a collective")
    start_timeout_s: PositiveFloat = Field(120.0, description="until all workers have met")
    stop_grace_s: PositiveFloat = Field(5.0, description="from SIGTERM to SIGKILL")
    is_tracked: bool = Field(True, description="send the run to MLflow while it runs")
    is_emulated: bool = Field(
        False, description="nodes as network namespaces with links of the cluster file's rates (Linux)"
    )


class ExperimentConfig(Section):
    """One training experiment. Equal configurations give equal runs."""

    name: str = Field(
        "experiment",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="folder under runs/ and MLflow experiment",
    )
    model: ModelConfig = ConvNetConfig()
    data: DataConfig = DigitsConfig()
    cluster: ClusterConfig = cluster_of_shape(1, 1)
    sync: SyncConfig = AllReduceConfig()
    optimizer: OptimizerConfig = SgdConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    engine: EngineConfig = EngineConfig()
    shares: SharesConfig = SharesConfig()
    memory: MemoryConfig = MemoryConfig()
    launch: LaunchConfig = LaunchConfig()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="of every random stream")

    @field_validator("name")
    @classmethod
    def _name_is_free(cls, name: str) -> str:
        if name in ("artifacts", "clusters", "modules", "notebooks"):
            raise ValueError(
                f"name must not be a folder that labkit keeps under runs/, got {name!r}. Choose another."
            )
        return name

    @model_validator(mode="after")
    def _batches_fit(self) -> "ExperimentConfig":
        total = self.engine.global_batch_size
        given = [w.local_batch_size for node in self.cluster.nodes for w in node.workers]
        stated = [size for size in given if size is not None]
        if stated and len(stated) < len(given):
            raise ValueError(
                f"local_batch_size must be given for all {len(given)} workers or for none, got "
                f"{len(stated)}. Add the missing ones."
            )
        if stated and sum(stated) != total:
            raise ValueError(
                f"local batches must sum to engine.global_batch_size ({total}), got "
                f"{' + '.join(map(str, stated))} = {sum(stated)}. Change one of them, or set "
                f"engine.global_batch_size={sum(stated)}."
            )
        if not stated and total < len(given):
            raise ValueError(
                f"engine.global_batch_size must be at least the number of workers ({len(given)}), "
                f"got {total}. Use fewer workers, or give each its local_batch_size (0 is allowed)."
            )
        if isinstance(self.data, DigitsConfig) and total > 1797 - self.data.num_val:
            raise ValueError(
                "engine.global_batch_size must be at most the number of training samples "
                f"({1797 - self.data.num_val}), got {total}. Lower it."
            )
        return self

    @model_validator(mode="after")
    def _speeds_are_emulated(self) -> "ExperimentConfig":
        if self._is_slowed_unpadded and not self.launch.is_emulated:
            raise ValueError(
                "cluster speeds must be emulated by padded compute or by processor quotas, got speeds "
                f"{', '.join(f'{speed:g}' for speed in sorted(set(self.cluster.speeds)))} with neither. Set "
                "engine.step_padding_s, or launch.is_emulated=true (quotas; needs root)."
            )
        return self

    @property
    def _is_slowed_unpadded(self) -> bool:
        return len(set(self.cluster.speeds)) > 1 and not self.engine.step_padding_s

    @property
    def has_quotas(self) -> bool:
        """Workers are slowed by processor quotas."""
        return self._is_slowed_unpadded and self.launch.is_emulated

    @model_validator(mode="after")
    def _wire_fits_dtype(self) -> "ExperimentConfig":
        if isinstance(self.sync, HierarchicalConfig) and self.sync.wire == "bfloat16":
            if self.engine.dtype != "float32":
                raise ValueError(
                    f"sync.wire must be 'float32' with engine.dtype {self.engine.dtype!r}, got 'bfloat16'. "
                    "Change one of them."
                )
        return self

    @model_validator(mode="after")
    def _warmup_fits(self) -> "ExperimentConfig":
        steps = self.engine.max_steps
        if isinstance(self.data, DigitsConfig):
            steps = self.total_steps(1797 - self.data.num_val)
        if steps is not None:
            self.require_warmup_within(steps)
        return self

    def require_warmup_within(self, total_steps: int) -> None:
        """Refuse a schedule that would end before its warm-up does.

        Raises:
            ValueError: it would.
        """
        if self.schedule.warmup_steps > total_steps:
            raise ValueError(
                f"schedule.warmup_steps must be at most the {total_steps} steps of the run, got "
                f"{self.schedule.warmup_steps}. Shorten the warm-up, or train for more epochs."
            )

    def total_steps(self, num_samples: int) -> int:
        """Steps of the whole run.

        Args:
            num_samples: Training samples; the last batch of an epoch may be smaller.
        """
        steps = self.engine.num_epochs * -(-num_samples // self.engine.global_batch_size)
        return min(steps, self.engine.max_steps) if self.engine.max_steps else steps

    @model_validator(mode="after")
    def _rebalancing_fits_sync(self) -> "ExperimentConfig":
        if self.shares.is_rebalanced and isinstance(self.sync, (LocalSgdConfig, AsyncConfig)):
            raise ValueError(
                f"shares.is_rebalanced must be false with sync.name {self.sync.name!r}, whose workers do not "
                "know each other's times, got true. Use sync.name=allreduce or hierarchical."
            )
        return self

    @model_validator(mode="after")
    def _groups_fit_cluster(self) -> "ExperimentConfig":
        if not isinstance(self.sync, AsyncConfig) or self.sync.groups is None:
            return self
        found = sorted(rank for group in self.sync.groups for rank in group)
        if found != list(range(self.cluster.num_workers)):
            raise ValueError(
                f"sync.groups must have each of the {self.cluster.num_workers} workers once, got {found}. "
                "Count from 0."
            )
        return self

    @model_validator(mode="after")
    def _servers_run_here(self) -> "ExperimentConfig":
        if isinstance(self.sync, AsyncConfig) and self.launch.launcher != "local":
            raise ValueError(
                f"launch.launcher must be 'local' with sync.name {self.sync.name!r}, whose groups and "
                f"servers come and go one by one, got {self.launch.launcher!r}."
            )
        return self

    @model_validator(mode="after")
    def _model_fits_data(self) -> "ExperimentConfig":
        wants = {"gpt": "text", "mlp": "digits", "convnet": "digits"}.get(self.model.name)
        if wants and self.data.name in ("digits", "text") and self.data.name != wants:
            raise ValueError(
                f"data.name must be {wants!r} (or your own) with model {self.model.name!r}, got "
                f"{self.data.name!r}. Change data.name or model.name."
            )
        return self
