"""Small models, batches and runs that the tests of models share."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rlt_dist.config.model import RltConfig
from rlt_dist.models.rlt.model import RecurrentLoopedTransformer
from rlt_dist.models.state import State, detach
from rlt_dist.ops.noise import Noise

VOCABULARY = 11

torch.set_num_threads(1)


class Lab:
    """What a test of the Recurrent Looped Transformer needs; a fixture, so that files share it."""

    def config(self, **options: object) -> RltConfig:
        """A configuration of two tiny layers each, with a strong feedback."""
        sizes = {"d_model": 8, "heads": 2, "ffn": 12, "encoder_layers": 2, "decoder_layers": 2}
        return RltConfig.model_validate({**sizes, "window": 3, "alpha": 0.7, **options})

    def model(
        self, dtype: torch.dtype = torch.float64, seed: int = 0, **options: object
    ) -> RecurrentLoopedTransformer:
        """A model none of whose parameters is at a special value such as 0 or 1."""
        model = RecurrentLoopedTransformer(self.config(**options), VOCABULARY)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            deviation = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            with torch.no_grad():
                parameter.copy_(values * deviation + (1.0 if "norm" in name else 0.0))
        return model.to(dtype)

    def tokens(self, rows: int, length: int, seed: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(VOCABULARY, (rows, length), generator=generator)

    def starts(self, rows: int, length: int, *where: tuple[int, int]) -> Tensor:
        """document_start [rows, length], True at the given (row, token) pairs."""
        starts = torch.zeros(rows, length, dtype=torch.bool)
        for row, token in where:
            starts[row, token] = True
        return starts

    def run(
        self,
        model: RecurrentLoopedTransformer,
        tokens: Tensor,
        starts: Tensor | None = None,
        cuts: Sequence[int] = (),
        state: State | None = None,
        truncate: bool = False,
        noise: Noise | None = None,
    ) -> tuple[Tensor, State]:
        """Outputs [b, T, d] and the last state of a sequence run in segments that end at `cuts`."""
        starts = self.starts(*tokens.shape) if starts is None else starts
        state = model.empty_state(len(tokens)) if state is None else state
        borders = [0, *sorted(set(cuts)), tokens.shape[1]]
        outputs = []
        for begin, end in pairwise(borders):
            part = slice(begin, end)
            output, state = model(tokens[:, part], starts[:, part], state, noise)
            state = detach(state) if truncate else state
            outputs.append(output)
        return torch.cat(outputs, dim=1), state

    def gradients(self, model: RecurrentLoopedTransformer, loss: Tensor) -> dict[str, Tensor]:
        """The gradient of every parameter, zeros where there is none."""
        names = [name for name, _ in model.named_parameters()]
        values = torch.autograd.grad(
            loss, list(model.parameters()), retain_graph=True, materialize_grads=True
        )
        return dict(zip(names, values, strict=True))

    def error(self, x: Tensor, y: Tensor) -> float:
        """max |x - y| / max(max |y|, 1e-6)."""
        if x.shape != y.shape:
            raise AssertionError(f"shapes differ: {tuple(x.shape)} and {tuple(y.shape)}")
        if not y.numel():
            return 0.0
        return ((x - y).abs().max() / y.abs().max().clamp(min=1e-6)).item()

    def worst(self, xs: dict[str, Tensor], ys: dict[str, Tensor]) -> float:
        """The largest error over tensors of the same name."""
        assert xs.keys() == ys.keys()
        return max(self.error(xs[name], ys[name]) for name in ys)

    def visible(self, config: RltConfig, state: State) -> dict[str, Tensor]:
        """What later tokens can see of a state: entries that no mask can show are left out."""
        position, seen = state["position"].tolist(), {}
        for name, tensor in state.items():
            kind = name.split(".")[0]
            if kind in ("encoder", "memory", "decoder"):
                limit = config.window - 1 if kind == "decoder" else config.memory_len
                for row, valid in enumerate(position):
                    count = valid if limit is None else min(valid, limit)
                    assert tensor.shape[1] >= count, f"{name} lost entries"
                    seen[f"{name}[{row}]"] = tensor[row, tensor.shape[1] - count :]
            elif name == "boundary":  # read only by a chunk that runs on
                seen[name] = tensor[state["position"] % config.feedback != 0]
            else:
                seen[name] = tensor
        return seen


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab()
