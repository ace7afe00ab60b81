"""How far back models of one size, trained on the same text, make use of it."""

import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlt_dist.costs.flops import flops_per_token
from rlt_dist.data.corpus.index import INDEX_NAME, CorpusIndex, load_corpus
from rlt_dist.data.prepare.inputs import InputOptions
from rlt_dist.data.prepare.prepare import prepare_corpus
from rlt_dist.experiments.context.contenders import Contender, contenders
from rlt_dist.experiments.context.effective_length import RATIOS, EffectiveLength, effective_lengths
from rlt_dist.experiments.context.measure import SPLIT, Measured, measure, passages_of
from rlt_dist.experiments.context.passages import Scope
from rlt_dist.experiments.training import Watch, train_side_by_side
from rlt_dist.util.files import make_folder, write_atomic

Say = Callable[[str], None]

_RECIPE = "kind: bpe\nvocabulary: 4096\ntraining_bytes: 4194304\n"
_SHARES = {"train": 0.8, "validation": 0.1, SPLIT: 0.1}
_STDLIB = InputOptions(pattern="*.py", exclude=("site-packages", "test", "tests"))


@dataclass(frozen=True)
class Wanted:
    """What the experiment is to do.

    Attributes:
        output: its folder.
        source: a corpus, or text to make one of; None: the source of Python's standard library.
        models: by name.
        steps: of every model.
    """

    output: Path
    source: Path | None
    models: Sequence[str]
    steps: int
    scope: Scope


@dataclass(frozen=True, eq=False)
class Result:
    """What came of one model.

    Attributes:
        effective: its relative effective context length in the group of all, by r.
    """

    contender: Contender
    training_flops: float
    measured: Measured
    effective: dict[float, EffectiveLength]

    def record(self, scope: Scope) -> dict[str, Any]:
        """For results.json."""
        config, kind = self.contender.config, self.contender.kind
        by_context = dict(zip(scope.contexts, self.measured.by_context.tolist(), strict=True))
        by_memory = dict(zip(kind.memories, self.measured.by_memory.tolist(), strict=True))
        return {
            "model": self.contender.name,
            "parameters": self.contender.parameters,
            "steps": config.train.steps,
            "training_tokens": config.train.steps * config.data.tokens_per_step,
            "training_flops": self.training_flops,
            "effective_length": {r: found.length for r, found in self.effective.items()},
            "open_ended": {r: found.open_ended for r, found in self.effective.items()},
            "relative_gain": {r: found.gains.tolist() for r, found in self.effective.items()},
            "bits_per_byte_by_context": by_context,
            "bits_per_byte_by_memory": by_memory,
        }


def compare_contexts(wanted: Wanted, watch: Watch, say: Say) -> list[Result] | None:
    """Train, measure and compare; what is done is not done again.

    Only the main thread may call it.

    Returns:
        None where training was asked to stop; the same call goes on.

    Raises:
        UserError: the folder cannot be made, the corpus cannot be made or used or has too few
            tokens to score, a run has failed by a mistake, or what was measured is damaged.
        Trouble: another process makes, trains or measures one of these, or a run has failed
            otherwise.
    """
    make_folder(wanted.output)
    corpus = _corpus(wanted, say)
    passages = passages_of(corpus, wanted.scope)  # mistakes are found before hours of training
    field = contenders(wanted.models, corpus, wanted.output / "runs", wanted.steps)
    if not train_side_by_side([each.config for each in field], watch):
        return None
    measured = {}
    for each in field:
        say(f"{each.name}: measuring")
        measured[each.name] = measure(each, corpus, passages, wanted.scope)
    losses = {name: found.losses for name, found in measured.items()}
    lengths = {r: effective_lengths(losses, wanted.scope.contexts, r) for r in RATIOS}
    return [
        Result(
            contender=each,
            training_flops=_training_flops(each, corpus.tokenizer.vocabulary),
            measured=measured[each.name],
            effective={r: of_models[each.name] for r, of_models in lengths.items()},
        )
        for each in field
    ]


def _corpus(wanted: Wanted, say: Say) -> CorpusIndex:
    """The corpus that is given, or one that is made in the output folder."""
    source, options = wanted.source, InputOptions()
    if source is None:
        source, options = Path(sysconfig.get_path("stdlib")), _STDLIB
    elif (source / INDEX_NAME).is_file():
        return load_corpus(source.absolute())
    recipe = wanted.output / "tokenizer.yaml"
    write_atomic(recipe, _RECIPE)
    corpus = wanted.output / "corpus"
    if not (corpus / INDEX_NAME).is_file():
        say(f"{source}: preparing")
    return prepare_corpus([source], corpus, recipe, options=options, shares=_SHARES).corpus


def _training_flops(contender: Contender, vocabulary: int) -> float:
    """Model FLOPs of a run, forward and backward, the state full."""
    config = contender.config
    tokens = config.train.steps * config.data.tokens_per_step
    return flops_per_token(config, vocabulary) * tokens
