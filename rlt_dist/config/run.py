"""What a run is: one YAML file, read whole before anything starts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from rlt_dist.config.data import DataConfig
from rlt_dist.config.load import Strict, write_yaml
from rlt_dist.config.model import GruConfig, ModelConfig, Probability, RltConfig, one_piece
from rlt_dist.util.errors import UserError


class StateConfig(Strict):
    """When a lane's carried state starts afresh."""

    reset: Literal["document", "never"] = "document"
    """`document`: at each document's start. `never`: the stream is one endless document."""


class OptimizerConfig(Strict):
    """AdamW. Norms, biases and the initial state do not decay."""

    learning_rate: PositiveFloat
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    clip: PositiveFloat = 1.0
    """Largest global gradient norm; a longer gradient is scaled down to it."""
    engine: Literal["torch", "deepspeed"] = "torch"
    """Who keeps the optimizer's state cut over data-parallel ranks. torch: this project;
    deepspeed: DeepSpeed's ZeRO, whose master weights are float32."""
    zero_stage: Literal[1, 2] = 1
    """deepspeed. 1: the optimizer's state is cut; 2: once they are summed, gradients too."""


class ScheduleConfig(Strict):
    """Linear warm-up, then a cosine to `minimum` at the last step."""

    warmup: NonNegativeInt = 0
    """Steps of the warm-up."""
    minimum: NonNegativeFloat = 0.0
    """Learning rate at the end."""


class TrainConfig(Strict):
    """How long, from what seed, in what numbers."""

    steps: PositiveInt
    seed: NonNegativeInt = 0
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    """bfloat16: products in bfloat16; weights, gradients and carried state in float32."""
    micro_batch: PositiveInt | None = None
    """Lanes per forward and backward on one rank. null: all of the rank's lanes at once; in a
    pipeline, as many micro-batches as it has stages, or the next larger number of equal ones."""
    log_every: PositiveInt = 10
    """Steps between lines on a screen that is not a terminal, and between measurements of what
    only all ranks together know: state norms, waiting, messages, memory."""
    cluster: Path | None = None
    """A file of hardware, as in configs/clusters, whose peak FLOP/s utilisation is measured by;
    null: what a large product reaches on all ranks at once, measured when training starts."""

    def resolved(self) -> "TrainConfig":
        """The same with absolute paths."""
        return self.model_copy(update={"cluster": self.cluster and self.cluster.absolute()})


class ValidationConfig(Strict):
    """Loss on held-out text during training, read with its own lanes and state."""

    every: PositiveInt | None = 100
    """Steps between validations; null: none."""
    segments: PositiveInt = 8
    """Segments of every lane read each time, from the start of the validation split."""


class CheckpointConfig(Strict):
    """When a checkpoint is written; the last step always is."""

    every: PositiveInt = 100
    asynchronous: bool = True
    """Training goes on while a copy in host memory is written; false: it waits, without a copy."""
    max_failures: PositiveInt = 3
    """Checkpoints in a row that cannot be written (disk full, read-only) at which the run stops."""
    keep: PositiveInt = 3
    """How many of the newest are kept."""
    keep_every: PositiveInt | None = None
    """Checkpoints of every so many steps are kept for ever; null: none."""


class SpikeConfig(Strict):
    """What counts as a spike of the loss; one of `factor` and `deviations` is given.

    A step is held to the losses of the steps before it that were not skipped, once there are as
    many as the window is long. The decision is taken before the optimizer moves.
    """

    factor: Annotated[float, Field(gt=1)] | None = None
    """A spike is above this many times the window's mean."""
    deviations: PositiveFloat | None = None
    """A spike is above the window's mean by this many of its standard deviations."""
    window: Annotated[int, Field(ge=2)] = 100
    """Steps."""
    action: Literal["skip", "stop"] = "skip"
    """skip: as a step whose loss is not finite; stop: the run ends with a report."""

    @model_validator(mode="after")
    def _check(self) -> "SpikeConfig":
        if (self.factor is None) == (self.deviations is None):
            raise ValueError("give either factor or deviations")
        return self


class GuardConfig(Strict):
    """When a step is not to be trusted, and when the run is not."""

    max_skips: PositiveInt = 10
    """Steps skipped in a row after which the run stops with a report in its folder; those that
    score no token are not counted."""
    spike: SpikeConfig | None = None
    """Steps whose loss is far above that of the steps before are skipped; null: none."""
    state_norm: PositiveFloat | None = None
    """A lane whose state exceeds this in any layer (root mean square) starts afresh, and is
    counted, as one whose state is not finite; null: no limit."""
    step_timeout: Annotated[float, Field(gt=0, le=3600)] = 600
    """Seconds after which a step is stuck: every rank writes its stacks to the run folder, and all
    end. Ten times as long may take the first step of a start, which compiles, each segment of a
    validation, and a save that training waits for. A rank that is stopped or gone is missed within
    half a minute, whatever this says."""


class MeshConfig(Strict):
    """How many processes share the work, and what each axis shares out; no result depends on it."""

    data: PositiveInt | None = None
    """Shares of the lanes; null: processes / (pipeline x tensor)."""
    pipeline: PositiveInt = 1
    """Stages: shares of the layers."""
    tensor: PositiveInt = 1
    """Shares of every weight matrix: heads, inner columns, vocabulary."""


class PipelineConfig(Strict):
    """In which order a stage takes its micro-batches; no result depends on it."""

    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Transformer-XL. 1f1b: forward and backward in turns; gpipe: all forward, then backward."""
    group: PositiveInt | None = None
    """RLT: micro-batches that go round the ring together; null: all."""
    in_flight: PositiveInt = 2
    """RLT: groups that a stage may hold; 1: one after the other, 2: the next fills idle time."""


class OpsConfig(Strict):
    """Which implementation computes; none of them changes a result."""

    recurrence: Literal["auto", "reference", "python", "native", "triton"] = "auto"
    """RLT's decoder. reference: plain autograd; python: one autograd function; native: its loop
    compiled for the CPU; triton: its loop in kernels for a GPU; auto: triton on a GPU in bfloat16,
    native on a CPU where it can be compiled, else python."""


class RecomputeConfig(Strict):
    """What backward computes again instead of keeping it; results stay the same up to rounding."""

    decoder_chunk: PositiveInt | Literal["auto", "none"] = "auto"
    """RLT's decoder in parts of so many tokens; none: everything is kept; auto: everything is
    kept unless it takes more than the budget, else the longest parts that fit."""
    budget_gib: PositiveFloat = 4.0
    """GiB that auto lets the decoder take for the backward of one micro-batch on one rank."""
    layers: bool = False
    """RLT's encoder layers and Transformer-XL's layers keep their inputs only."""


LANES = "data.lanes"
_IDENTITY = (
    "initial",
    "model.",
    LANES,
    "data.segment",
    "data.max_document",
    "state.",
    "train.seed",
    "train.precision",
)


class RunConfig(Strict):
    """A whole run."""

    run_folder: Path
    """Everything the run writes: configuration, metrics, checkpoints."""
    initial: Path | None = None
    """Another run's folder, or a checkpoint in it, whose parameters this run begins from; with
    optimizer and state of its own. null: they are drawn."""
    model: ModelConfig
    data: DataConfig
    state: StateConfig = StateConfig()
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig
    validation: ValidationConfig = ValidationConfig()
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    ops: OpsConfig = OpsConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig())
    guard: GuardConfig = GuardConfig()

    def ops_trouble(self, recurrence: str) -> str | None:
        """Why that recurrence cannot compute under the other choices; None where it can."""
        if recurrence == "reference" and isinstance(self.recompute.decoder_chunk, int):
            return (
                "reference keeps everything for backward; "
                "set recompute.decoder_chunk to auto or none, or take another recurrence"
            )
        if recurrence == "triton" and self.train.precision == "float64":
            return (
                "triton computes in bfloat16 and float32, and train.precision is float64; "
                "take another"
            )
        return None

    @property
    def bounded_model(self) -> ModelConfig:
        """The model with its memory_len no longer than any document can be.

        A token of a document of at most N tokens reaches back at most N - 1 positions, so this
        changes no result; it is what bounds the carried memory.
        """
        longest = self.data.max_document
        if not isinstance(self.model, RltConfig) or self.state.reset == "never" or longest is None:
            return self.model
        reach = longest - 1
        if self.model.memory_len is not None:
            reach = min(reach, self.model.memory_len)
        return self.model.model_copy(update={"memory_len": reach})

    @model_validator(mode="after")
    def _check(self) -> "RunConfig":
        if self.run_folder in (Path(), Path("/")):
            raise ValueError(f"run_folder {str(self.run_folder)!r} is no folder of its own")
        if self.initial and self.initial.absolute().is_relative_to(self.run_folder.absolute()):
            raise ValueError(
                f"initial {str(self.initial)!r} is this run itself; give another run_folder"
            )
        lanes, micro_batch = self.data.lanes, self.train.micro_batch
        if micro_batch is not None and lanes % micro_batch:
            raise ValueError(
                f"train.micro_batch {micro_batch} does not divide data.lanes {lanes}: "
                "micro-batches are groups of whole lanes"
            )
        if isinstance(self.bounded_model, RltConfig) and self.bounded_model.memory_len is None:
            raise ValueError(
                "carried state has no bound: set model.memory_len, or data.max_document "
                "together with state.reset: document"
            )
        trouble = self.ops_trouble(self.ops.recurrence)
        if trouble is not None:
            raise ValueError(f"ops.recurrence: {trouble}")
        if self.schedule.warmup > self.train.steps:
            raise ValueError(
                f"schedule.warmup {self.schedule.warmup} exceeds train.steps {self.train.steps}"
            )
        kept, every = self.checkpoint.keep_every, self.checkpoint.every
        if kept is not None and kept % every:
            raise ValueError(
                f"checkpoint.keep_every {kept} is no multiple of checkpoint.every {every}: "
                "there would be nothing to keep at most of these steps"
            )
        if self.schedule.minimum > self.optimizer.learning_rate:
            raise ValueError(
                f"schedule.minimum {self.schedule.minimum} exceeds "
                f"optimizer.learning_rate {self.optimizer.learning_rate}"
            )
        return self

    @model_validator(mode="after")
    def _check_mesh(self) -> "RunConfig":
        model, pipeline, tensor = self.model, self.mesh.pipeline, self.mesh.tensor
        piece = one_piece(model)
        if piece is not None and pipeline > 1:
            raise ValueError(f"{piece} has no pipeline stages, and mesh.pipeline is {pipeline}")
        if isinstance(model, GruConfig):
            if tensor > 1:
                raise ValueError(f"{piece} has no heads to cut, and mesh.tensor is {tensor}")
            return self
        if isinstance(model, RltConfig):
            stacks = {
                "encoder_layers": model.encoder_layers,
                "decoder_layers": model.decoder_layers,
            }
            kv_heads, inner = model.key_value_heads, ("model.ffn", model.ffn)
        else:
            stacks = {"layers": model.layers}
            kv_heads, inner = model.heads, ("model.d_inner", model.d_inner)
        for name, layers in stacks.items():
            if layers < pipeline > 1:
                raise ValueError(
                    f"mesh.pipeline {pipeline} exceeds model.{name} {layers}: "
                    "every stage needs a layer of it"
                )
        if model.heads % tensor:
            raise ValueError(f"mesh.tensor {tensor} does not divide model.heads {model.heads}")
        if kv_heads % tensor and tensor % kv_heads:
            raise ValueError(
                f"mesh.tensor {tensor} neither divides model.kv_heads {kv_heads} nor is a multiple "
                "of them"
            )
        trouble = cut_trouble(*inner, tensor)
        if trouble is not None:
            raise ValueError(trouble)
        if self.ops.recurrence == "native" and tensor > 1:
            raise ValueError(
                f"ops.recurrence: native computes whole layers, and mesh.tensor is {tensor}; "
                "take auto or python"
            )
        if self.ops.recurrence == "reference" and pipeline > 1:
            raise ValueError(
                f"ops.recurrence: reference is one autograd graph, and mesh.pipeline is {pipeline};"
                " take another"
            )
        return self

    @model_validator(mode="after")
    def _check_pipeline(self) -> "RunConfig":
        """A choice that the model does not have is a mistake, not one to pass over."""
        given, default = self.pipeline, PipelineConfig()
        if isinstance(self.model, RltConfig):
            if given.schedule != default.schedule:
                raise ValueError(
                    f"pipeline.schedule {given.schedule} is for Transformer-XL; "
                    "RLT's order follows from pipeline.group and pipeline.in_flight"
                )
        elif isinstance(self.model, GruConfig):
            if given != default:
                raise ValueError("pipeline is for models with stages, and model.kind gru has none")
        elif (given.group, given.in_flight) != (default.group, default.in_flight):
            raise ValueError(
                "pipeline.group and pipeline.in_flight are for RLT's ring; "
                "Transformer-XL's order is pipeline.schedule"
            )
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> "RunConfig":
        engine, stage, stages = (
            self.optimizer.engine,
            self.optimizer.zero_stage,
            self.mesh.pipeline,
        )
        if engine == "torch" and stage != 1:
            raise ValueError(f"optimizer.zero_stage {stage} is for optimizer.engine: deepspeed")
        if engine == "deepspeed" and self.train.precision != "float32":
            raise ValueError(
                "optimizer.engine: deepspeed computes in float32, and train.precision is "
                f"{self.train.precision}; take engine torch, or float32"
            )
        if stage == 2 and stages > 1:
            raise ValueError(
                f"optimizer.zero_stage 2 needs mesh.pipeline 1, which is {stages}; take stage 1"
            )
        return self

    def micro_batch_lanes(self, local: int) -> int:
        """Lanes of one micro-batch on a data-parallel rank that has `local` lanes.

        Raises:
            UserError: train.micro_batch does not divide them.
        """
        if self.train.micro_batch is not None:
            if local % self.train.micro_batch:
                raise UserError(
                    f"train.micro_batch {self.train.micro_batch} does not divide the {local} lanes "
                    "of a data-parallel rank: micro-batches are equal groups of whole lanes"
                )
            return self.train.micro_batch
        stages = self.mesh.pipeline
        return next((local // n for n in range(stages, local) if local % n == 0), 1)

    def resolved(self) -> "RunConfig":
        """The same with absolute paths, so that it means the same from everywhere."""
        update: dict[str, Any] = {
            "run_folder": self.run_folder.absolute(),
            "initial": self.initial and self.initial.absolute(),
            "data": self.data.resolved(),
            "train": self.train.resolved(),
        }
        return self.model_copy(update=update)

    def leaves(self) -> dict[str, Any]:
        """Every single value by its whole key, such as `data.lanes`."""
        return dict(_leaves(self.model_dump(mode="json")))

    def identity(self) -> dict[str, Any]:
        """What makes it this run: changing one of these is another data order, state or model."""
        return {key: value for key, value in self.leaves().items() if key.startswith(_IDENTITY)}

    def to_yaml(self) -> str:
        """The resolved configuration, every default written out."""
        return write_yaml(self.model_dump(mode="json"))


def cut_trouble(name: str, size: int, tensor: int) -> str | None:
    """One line if cutting `size` columns or rows into equal parts leaves a process without any."""
    each = -(-size // tensor)
    if each * (tensor - 1) < size:
        return None
    return (
        f"{name} {size} cannot be cut over mesh.tensor {tensor}: "
        f"in parts of {each} the last process gets none"
    )


def _leaves(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
