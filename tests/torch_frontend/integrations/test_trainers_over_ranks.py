"""The trainers in two processes, with DistributedDataParallel as they wrap the model, and without."""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.support.ranks import Ranks
from tests.support.rows import rows
from tests.support.tiny_llama import assert_same_losses, assert_same_norms
from tests.torch_frontend.integrations import test_accelerate, test_lightning, test_transformers

from penstock.core.errors import RefusedError
from penstock.torch_frontend.integrations.lightning import GradientRelease
from penstock.torch_frontend.integrations.transformers import ReleaseTrainer

pytestmark = pytest.mark.xdist_group("trainers")
HOLD = {"accumulation": "hold"}


def launched() -> None:
    """What a launcher sets. The processes have met already, so nobody uses the address."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "NODE_RANK": "0"}
    os.environ.update(here, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="1", GROUP_RANK="0")
    gc.freeze()  # all that is imported here; as in tests/conftest.py
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)  # as in test_lightning
    warnings.filterwarnings("ignore", message="The 'train_dataloader' does not have many workers")


def with_transformers(directory: Path, options: dict[str, Any], settings: dict[str, Any]) -> None:
    launched()
    plain = test_transformers.make_trainer(directory, test_transformers.PlainTrainer, samples=40, **settings)
    released = test_transformers.make_trainer(
        directory, ReleaseTrainer, samples=40, options={"release_options": options}, **settings
    )
    for trainer in (plain, released):
        trainer.train()
    for name, same in (("loss", assert_same_losses), ("grad_norm", assert_same_norms)):
        same(test_transformers.logged(released, name), test_transformers.logged(plain, name))


def with_accelerate(clip: float | None, steps: int, wrapped: bool) -> None:
    launched()
    plain = test_accelerate.train(test_accelerate.prepared(released=False, samples=40, steps=steps), clip=clip)
    parts = test_accelerate.prepared(released=True, samples=40, steps=steps, wrapped=wrapped, max_norm=clip)
    with parts.release:
        released = test_accelerate.train(parts, clip=clip)
    assert_same_losses(released.losses, plain.losses)
    assert_same_norms(released.norms, plain.norms)


def with_lightning(options: dict[str, Any], settings: dict[str, Any]) -> None:
    launched()
    plain, released = test_lightning.Module(), test_lightning.Module()
    for module, callbacks in ((plain, []), (released, [GradientRelease(**options)])):
        test_lightning.trainer(*callbacks, devices=2, strategy="ddp", **settings).fit(module, test_lightning.loader(count=40))
    assert_same_losses(released.losses, plain.losses)
    assert_same_norms(released.norms, plain.norms)


def refused(train: Any, *arguments: Any) -> str:
    try:
        train(*arguments)
    except RefusedError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(
    ("options", "settings"),
    rows(
        [({}, {"max_grad_norm": 0.0}), ({}, {"gradient_accumulation_steps": 4}), (HOLD, {})],
        lambda row: row[1] != {"max_grad_norm": 0.0},
    ),
    ids=str,
)
def test_transformers_ddp(ranks: Ranks, tmp_path: Path, options: dict[str, Any], settings: dict[str, Any]) -> None:
    ranks.run(with_transformers, tmp_path, options, settings)


@pytest.mark.parametrize(
    ("clip", "steps", "wrapped"),
    rows([(None, 1, True), (1.0, 3, True), (1.0, 1, False), (1.0, 3, False)], lambda row: row[1:] in ((3, True), (1, False))),
)
def test_accelerate_with_and_without_ddp(ranks: Ranks, clip: float | None, steps: int, wrapped: bool) -> None:
    ranks.run(with_accelerate, clip, steps, wrapped)


@pytest.mark.parametrize(
    ("options", "settings"),
    rows(
        [({}, {}), ({}, {"accumulate_grad_batches": 4, "gradient_clip_val": 1.0}), (HOLD, {"gradient_clip_val": 1.0})],
        lambda row: row[1] != {},
    ),
    ids=str,
)
def test_lightning_ddp(ranks: Ranks, options: dict[str, Any], settings: dict[str, Any]) -> None:
    ranks.run(with_lightning, options, settings)


def test_two_passes_through_ddp_are_refused_with_the_remedy(ranks: Ranks, tmp_path: Path) -> None:
    for answer in ranks.run(refused, with_transformers, tmp_path, {}, {}):
        assert "accumulation='hold'" in answer
    for answer in ranks.run(refused, with_lightning, {}, {"gradient_clip_val": 1.0}):
        assert "accumulation='hold'" in answer
