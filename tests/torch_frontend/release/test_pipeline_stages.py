"""Pipeline stages: a release for each stage trains as without release; what two stages share is summed first, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.torch_models import batches, layers, snapshot, unchanged
from torch import Tensor, nn

from penstock.core.errors import RefusedError
from penstock.torch_frontend import AdamW, StableAdamW, release_gradients


class Pipeline:
    """Stages with an optimizer each; every micro-batch goes forward and backward through all, with a cut between them."""

    def __init__(self, stages: list[nn.Module], kind: type = StableAdamW) -> None:
        self.stages = stages
        self.optimizers = [kind(stage.parameters(), lr=1e-2) for stage in stages]
        self.last = False

    def release(self, **arguments: Any) -> None:
        for stage, optimizer in zip(self.stages, self.optimizers, strict=True):
            release_gradients(stage, optimizer, **arguments)

    def backward(self, x: Tensor) -> None:
        sent: list[tuple[Tensor, Tensor]] = []
        for stage in self.stages:
            given = x.detach().requires_grad_()
            x = stage(given)
            sent.append((given, x))
        gradient = torch.ones(())
        for given, output in reversed(sent):
            (output.pow(2).mean() if output is x else output).backward(gradient)
            assert given.grad is not None
            gradient = given.grad

    def step(self, batch: Tensor, micro_batches: int) -> None:
        for number, chunk in enumerate(batch.chunk(micro_batches)):
            self.last = number == micro_batches - 1
            self.backward(chunk)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def two_stages() -> list[nn.Module]:
    model = layers()
    return [model[:2], model[2:]]


@pytest.mark.parametrize(("micro_batches", "syncs"), [(1, False), (3, False), (3, True)])
def test_a_release_for_each_stage_trains_the_same_model_bitwise(micro_batches: int, syncs: bool) -> None:
    found = []
    for released in (False, True):
        pipeline = Pipeline(two_stages())
        if released and micro_batches == 1:
            pipeline.release()
        elif released:
            pipeline.release(accumulation="hold", sync=(lambda pipeline=pipeline: pipeline.last) if syncs else None)
        for batch in batches(4):
            pipeline.step(batch, micro_batches)
        found.append([snapshot(*pair) for pair in zip(pipeline.stages, pipeline.optimizers, strict=True)])
    assert all(map(unchanged, *found))


def tied() -> list[nn.Module]:
    first, second = two_stages()
    second[1][0].weight = first[0][0].weight
    return [first, second]


def test_a_parameter_of_two_stages_is_refused_in_two_releases() -> None:
    with pytest.raises(RefusedError, match="another optimizer's release"):
        Pipeline(tied()).release()


def test_a_parameter_of_two_stages_in_one_optimizer_is_held_or_refused() -> None:
    found = []
    for arguments in (None, {"accumulation": "hold"}, {}):
        stages = tied()
        pipeline = Pipeline(stages, AdamW)
        weight = stages[0][0][0].weight
        later = [p for p in stages[1].parameters() if p is not weight]
        pipeline.optimizers[1] = AdamW(later, lr=1e-2)
        if arguments is not None:
            pipeline.release(**arguments)
        if arguments == {}:
            with pytest.raises(RefusedError, match=r"a second backward\(\).*accumulation='hold'"):
                pipeline.step(batches(1)[0], 1)
            continue
        for batch in batches(3):
            pipeline.step(batch, 1)
        found.append([snapshot(*pair) for pair in zip(stages, pipeline.optimizers, strict=True)])
    assert all(map(unchanged, *found))
