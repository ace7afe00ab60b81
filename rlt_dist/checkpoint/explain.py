"""Whether a run can go on from a checkpoint, and what becomes of each part of it.

`decide` reads names, shapes and counters, no weights. `rlt-dist train` asks it before it loads
anything, and `rlt-dist checkpoint explain` shows what it said.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from torch import Tensor

from rlt_dist.checkpoint.exchange.names import other_model
from rlt_dist.checkpoint.load import Stored, load_whole, model_shapes, stored_tensors
from rlt_dist.checkpoint.manifest import Facts, read_manifest
from rlt_dist.config.run import LANES, RunConfig
from rlt_dist.data.stream.lanes import Cursor
from rlt_dist.data.stream.loader import cursors_at_start
from rlt_dist.mesh.axes import AXES, Axes, parse_axes
from rlt_dist.parallel.plan.layout import parameter_shapes, plan_for
from rlt_dist.util.errors import UserError

_EPOCH, _DOCUMENT, _OFFSET, _TOKENS = range(len(Cursor.FIELDS))


@dataclass(frozen=True)
class Wanted:
    """The run that is to go on.

    Attributes:
        axes: the mesh it is to go on with.
        tokenizer: the hash of its tokenizer.
        corpus: the fingerprint of its corpora.
        location: where these lie, for messages.
        reset_state: every lane is to start with empty state. A checkpoint of a run that was started
            so is gone on from as it is, so that the same command can be given again.
    """

    config: RunConfig
    axes: Axes
    vocabulary: int
    tokenizer: str
    corpus: str
    location: str
    reset_state: bool = False


@dataclass(frozen=True)
class Part:
    """What becomes of a part of a checkpoint.

    Attributes:
        tensors: how many there are.
        changes: by mesh axis, or `engine`: what wrote it and what is to go on with it.
    """

    name: str
    tensors: int
    fate: Literal["as it is", "cut differently", "made afresh"]
    changes: dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Decision:
    """Attributes:
    refusals: why it cannot be gone on from, a line each; empty: it can.
    cursors: int64 [G, corpora, 4], where all lanes start with empty state; None: where they were,
        with the state that they carried.
    reset: what later checkpoints are to say (`Facts.reset`).
    note: what a person should know of that.
    """

    folder: Path
    facts: Facts
    parts: tuple[Part, ...]
    refusals: tuple[str, ...]
    cursors: Tensor | None = None
    reset: int | None = None
    note: str | None = None

    def accepted(self) -> Self:
        """The same.

        Raises:
            UserError: the checkpoint is refused; all reasons in one line.
        """
        if self.refusals:
            raise UserError(f"{self.folder}: {'; '.join(self.refusals)}")
        return self


def decide(folder: Path, wanted: Wanted) -> Decision:
    """What would become of a checkpoint whose files are known to be whole."""
    facts, stored = read_manifest(folder).facts, stored_tensors(folder)
    refusals = [*_other_data(facts, wanted), *_other_run(facts, wanted), *_model(stored, wanted)]
    places, lanes = load_whole(folder, ("cursors", "state.tokens")), wanted.config.data.lanes
    reset = wanted.reset_state and (facts.reset is None or lanes != len(places["cursors"]))
    if not reset:
        refusals += _miscounted(places["state.tokens"], places["cursors"])
    parts = tuple(_parts(facts, stored, wanted, reset))
    if refusals or not wanted.reset_state:
        return Decision(folder, facts, parts, tuple(refusals))
    if not reset:
        note = f"--reset-state: the state was emptied at step {facts.reset}, and goes on"
        return Decision(folder, facts, parts, (), reset=facts.reset, note=note)
    cursors, note = after_reset(places["cursors"], lanes)
    return Decision(folder, facts, parts, (), cursors, facts.step, note)


def seen(cursors: Tensor) -> Tensor:
    """int64 [b]: the tokens that lanes have consumed, over all corpora, since they began."""
    return cursors[..., _TOKENS].sum(-1)


def _other_data(facts: Facts, wanted: Wanted) -> Iterator[str]:
    for name, saved, now in (
        ("corpus", facts.corpus, wanted.corpus),
        ("tokenizer", facts.tokenizer, wanted.tokenizer),
    ):
        if saved != now:
            yield (
                f"was trained on another {name} than {wanted.location}; "
                "point data at what it was started with"
            )


def _other_run(facts: Facts, wanted: Wanted) -> Iterator[str]:
    changed = facts.other_run(wanted.config)
    if changed:
        yield (
            f"belongs to another run ({'; '.join(changed)}); "
            "give another run_folder, or undo the change"
        )
    lanes, now = facts.identity[LANES], wanted.config.data.lanes
    if lanes != now and not wanted.reset_state:
        yield (
            f"belongs to another run ({LANES}: {lanes} -> {now}); undo the change, or let all "
            "lanes start with empty state by --reset-state"
        )


def _model(stored: Stored, wanted: Wanted) -> Iterator[str]:
    shapes = parameter_shapes(wanted.config.model, wanted.vocabulary)
    trouble = other_model(model_shapes(stored), shapes)
    if trouble is not None:
        yield trouble


def _miscounted(tokens: Tensor, cursors: Tensor) -> Iterator[str]:
    """Lanes whose state has not seen as many tokens as their place in the data says."""
    expected = seen(cursors)
    wrong = (tokens != expected).nonzero().flatten().tolist()
    if wrong:
        lane, *others = wrong
        more = f" ({len(others)} more lanes too)" if others else ""
        yield (
            f"state and data cursors do not agree: lane {lane} carries state of {tokens[lane]} "
            f"tokens and has read {expected[lane]}{more}; --reset-state leaves the state behind"
        )


def after_reset(stored: Tensor, lanes: int) -> tuple[Tensor, str]:
    """Where all lanes start with empty state, int64 [lanes, corpora, 4]; and that in words.

    Lanes of another number share the documents out anew, so that none may be left in the middle of
    an epoch: of each corpus, they begin the first epoch that no lane had begun.
    """
    if lanes == len(stored):
        return stored, "--reset-state: all lanes go on where they were, with empty state"
    begun = stored[..., _EPOCH] + (stored[..., [_DOCUMENT, _OFFSET]] > 0).any(-1)
    cursors = cursors_at_start(lanes, stored.shape[1])
    cursors[..., _EPOCH] = begun.amax(0)
    epochs = ", ".join(map(str, begun.amax(0).tolist()))
    return cursors, (
        f"--reset-state: {len(stored)} lanes became {lanes}; all start with empty state at the "
        f"beginning of epoch {epochs}, and what was left of the epochs before is not read"
    )


def _parts(facts: Facts, stored: Stored, wanted: Wanted, reset: bool) -> Iterator[Part]:
    """Every part, and the axes that it is cut over."""
    plan = plan_for(wanted.config.model, wanted.vocabulary)
    state = [name for name in stored if name.startswith("state.")]
    by_heads = any(plan.state_cut(name.removeprefix("state.")) for name in state)
    of_state = AXES if by_heads else ("data", "pipeline")
    before, after = (dict(vars(axes)) for axes in (parse_axes(facts.mesh), wanted.axes))
    for name, prefix, axes in (
        ("parameters", "model.", ("pipeline", "tensor")),
        ("optimizer", "optimizer.", AXES),
        ("state", "state.", of_state),
        ("cursors", "cursors", ("data",)),
    ):
        tensors = sum(stored_name.startswith(prefix) for stored_name in stored)
        changes = {
            axis: (str(before[axis]), str(after[axis]))
            for axis in axes
            if before[axis] != after[axis]
        }
        if name in ("state", "cursors") and reset:
            yield Part(name, tensors, "made afresh", {})
            continue
        fate: Literal["as it is", "cut differently"] = "cut differently" if changes else "as it is"
        engines = facts.engine, wanted.config.optimizer.engine
        if name == "optimizer" and engines[0] != engines[1]:
            changes["engine"] = engines
        yield Part(name, tensors, fate, changes)
    yield Part("step, tokens seen", 0, "as it is", {})
