"""Conversations with a trained model, in the template of `data.prepare.chat`.

    speaker = Speaker(load_trained(run))
    asked = speaker.tell(speaker.begin(), "user", b"What is carried?")
    answered, episode = speaker.reply(asked, Sampling(), limit=100, seed=0)
    speaker.save(answered, path)
    answered = speaker.restore(path)

A conversation is a value: from the same one, any number of others can go on.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlt_dist.data.prepare.chat import MARKS
from rlt_dist.inference.load import Trained
from rlt_dist.inference.sample import Episode, check_limit, read, walk
from rlt_dist.inference.sampling import Sampling
from rlt_dist.models.state import State
from rlt_dist.models.transformer_xl.frozen import Guard
from rlt_dist.ops.noise import seed_from
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import write_atomic

FORMAT = "rlt-dist conversation 2"
_HASH = "sha256"
"""Of all else in a file."""


@dataclass(frozen=True, eq=False)
class Conversation:
    """What was said, and the complete state of a model that has read it, up to some token.

    Attributes:
        tokens: int64 [n], all messages with their marks and ends.
        state: of one lane, after the first `state["tokens"]` of them; the others are read before
            anything is said. Nothing writes to its tensors.
    """

    tokens: Tensor
    state: State

    @property
    def unread(self) -> Tensor:
        """The tokens that the state has not read yet."""
        return self.tokens[int(self.state["tokens"]) :]


class Speaker:
    """A trained model that holds conversations, while its weights stand still."""

    def __init__(self, trained: Trained) -> None:
        self._trained, self._frozen = trained, trained.model.frozen()
        self._guard = Guard(trained.model.parameters())
        self._known_by = fingerprint(trained)

    def begin(self) -> Conversation:
        """Nothing has been said."""
        return Conversation(torch.zeros(0, dtype=torch.int64), self._frozen.empty_state(1))

    def tell(self, conversation: Conversation, role: str, content: bytes) -> Conversation:
        """Add a message.

        Raises:
            UserError: there is no such role.
        """
        if role not in MARKS:
            raise UserError(f"there is no role {role!r}; take {', '.join(MARKS)}")
        said = [self._encode(MARKS[role]), self._encode(content), torch.tensor([self._end])]
        return replace(conversation, tokens=torch.cat((conversation.tokens, *said)))

    def reply(
        self, conversation: Conversation, sampling: Sampling, limit: int, seed: int
    ) -> tuple[Conversation, Episode]:
        """Let the model speak, until it ends its message or is cut off after `limit` tokens.

        Args:
            seed: of the conversation: each turn draws other random numbers.

        Returns:
            the conversation with its message, and what was drawn, which `replay` can score.

        Raises:
            UserError: `limit` is less than 1, or the model's output is not finite.
            RuntimeError: a weight was seen to have moved.
        """
        check_limit(limit)
        self._guard.check()
        # Messages so far: what is written in one never encodes to their end.
        turn = int((conversation.tokens == self._end).sum())
        asked = torch.cat((conversation.tokens, self._encode(MARKS["assistant"])))
        unread = replace(conversation, tokens=asked).unread[None]
        config, actions, scores = self._trained.config, list[int](), list[float]()
        with torch.no_grad():
            logits, state = read(self._frozen, config, unread, None, conversation.state)
        steps = walk(self._frozen, config, logits, state, sampling, seed_from(seed, turn))
        for step in islice(steps, limit):
            actions.append(step.token)
            scores.append(step.log_probability)
            state = step.state
            if step.token == self._end:
                break
        drawn, found = torch.tensor(actions), torch.tensor(scores, dtype=torch.float64)
        episode = Episode(asked, drawn, found, sampling)
        cut_off = [] if actions[-1] == self._end else [torch.tensor([self._end])]
        return Conversation(torch.cat((episode.tokens, *cut_off)), state), episode

    def text(self, episode: Episode) -> bytes:
        """What a reply says."""
        actions = episode.actions.tolist()
        return self._trained.tokenizer.decode(actions[: len(actions) - (actions[-1] == self._end)])

    def save(self, conversation: Conversation, path: Path) -> None:
        """Write a conversation with its complete state, whole or not at all.

        Raises:
            RuntimeError: a weight was seen to have moved.
        """
        self._guard.check()
        tensors = {f"state.{name}": tensor for name, tensor in conversation.state.items()}
        tensors["tokens"] = conversation.tokens
        # Cloned: entries of a cache may be part of a larger tensor.
        own = {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}
        about = {"format": FORMAT, "model": self._known_by, "tokenizer": self._tokenizer}
        whole = {_HASH: _hash(own.items(), _line(about))}
        write_atomic(path, safetensors.torch.save(own, about | whole))

    def restore(self, path: Path, *, replay: bool = False) -> Conversation:
        """Read a conversation.

        Args:
            replay: leave the saved state behind, and have the whole history read under the current
                weights.

        Raises:
            UserError: it is none, or is damaged; was held by another model, or by one with other
                weights or choices and is not to be replayed; or its tokens are another tokenizer's.
        """
        tensors, about = _read_file(path)
        if about["tokenizer"] != self._tokenizer:
            raise UserError(f"{path}: is in the tokens of another tokenizer; begin anew")
        start = self.begin()
        if replay:
            return replace(start, tokens=tensors["tokens"])
        if about["model"] != self._known_by:
            raise UserError(
                f"{path}: its state was made by other weights, or under other choices, than "
                f"those of {self._trained.run_folder} at step {self._trained.step:,}; "
                "replay it (--replay)"
            )
        device = start.state["tokens"].device
        state = {name: tensors[f"state.{name}"].to(device) for name in start.state}
        return Conversation(tensors["tokens"], state)

    @property
    def _end(self) -> int:
        return self._trained.tokenizer.end_of_text

    @property
    def _tokenizer(self) -> str:
        return self._trained.tokenizer.hash

    def _encode(self, text: bytes) -> Tensor:
        return torch.from_numpy(self._trained.tokenizer.encode(text)).long()


def fingerprint(trained: Trained) -> str:
    """What a model's states depend on, as a hash: configuration, precision, every weight."""
    about = trained.model.config.model_dump_json() + trained.config.train.precision
    return _hash(trained.model.named_parameters(), about)


def _line(about: Mapping[str, str]) -> str:
    return " ".join(f"{name} {about[name]}" for name in sorted(about))


def _hash(tensors: Iterable[tuple[str, Tensor]], about: str) -> str:
    digest = hashlib.sha256(about.encode())
    for name, tensor in sorted(tensors, key=itemgetter(0)):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the path of a saved conversation")
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            names = file.keys()
            # Cloned: they lie in the file itself, which somebody may write to meanwhile.
            tensors = {name: file.get_tensor(name).clone() for name in names}
    except SafetensorError:
        about = {}
    if about.get("format") != FORMAT:
        raise UserError(f"{path}: is no conversation that this release can read; begin anew")
    if about.pop(_HASH, None) != _hash(tensors.items(), _line(about)):
        raise UserError(f"{path}: is damaged; take a copy of it, or begin anew")
    return tensors, about
