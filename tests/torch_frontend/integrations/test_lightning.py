"""Lightning's Trainer with the callback trains as it does with the plain optimizer, and its gradients are gone earlier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import grad_norm
from tests.support.rows import covering, rows
from tests.support.tiny_llama import (
    assert_same_losses,
    assert_same_norms,
    gradient_bytes,
    largest_gradient,
    sequences,
    tiny_llama,
)
from tests.support.torch_models import gone

from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.planner.live_gradients import LiveGradientMeter
from penstock.torch_frontend import AdamW
from penstock.torch_frontend.integrations.lightning import GradientRelease

pytestmark = [
    pytest.mark.filterwarnings("ignore:The '(train|val)_dataloader' does not have many workers"),  # for twenty samples
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # Lightning's own use of torch's trees
]


class Module(lightning.LightningModule):
    """The tiny Llama; a large eps makes AdamW follow the size of the gradient, so that clipping matters."""

    def __init__(self, rate: float = 0.3, checkpointing: bool | None = None) -> None:
        super().__init__()
        self.llama, self.rate = tiny_llama(), rate
        if checkpointing is not None:
            enable = getattr(self.llama, "activation_checkpointing_enable", self.llama.gradient_checkpointing_enable)
            enable({"use_reentrant": checkpointing})
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rates: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.llama(**batch).loss
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms.append(float(grad_norm(self, norm_type=2).get("grad_2.0_norm_total", 0.0)))
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=self.rate, eps=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.rate, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Counted(Module):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms.append(sum(not gone([parameter]) for parameter in self.parameters()))


class Validated(Module):
    def validation_step(self, batch: Any, index: int) -> None:
        self.llama(**batch)


def loader(seed: int = 1, count: int = 20) -> Any:
    return torch.utils.data.DataLoader(sequences(count, seed), batch_size=4)


def trainer(*callbacks: Callback, **settings: Any) -> lightning.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return lightning.Trainer(callbacks=list(callbacks), **({"accelerator": "cpu", "max_epochs": 2} | quiet | settings))


def compare(module: dict[str, Any] | None = None, norms: float = 1e-4, **settings: Any) -> tuple[Module, Module]:
    plain, released = Module(**(module or {})), Module(**(module or {}))
    trainer(**settings).fit(plain, loader())
    trainer(GradientRelease(), **settings).fit(released, loader())
    assert_same_losses(released.losses, plain.losses)
    assert_same_norms(released.norms, plain.norms, norms)
    assert released.rates == plain.rates
    return plain, released


SETTINGS = [
    {},
    {"gradient_clip_val": 1.0, "accumulate_grad_batches": 4},  # of 5 batches an epoch: the last group has one
    {"gradient_clip_val": 1.0, "module": {"checkpointing": True}},
    {"gradient_clip_val": 1.0, "precision": "bf16-mixed", "module": {"rate": 0.01}},
    {"precision": "bf16-true", "module": {"rate": 0.01}, "norms": 2.0**-7},  # roundings of norms that are bfloat16
]
MORE_SETTINGS = [
    {"gradient_clip_val": 1.0},
    {"accumulate_grad_batches": 4},
    {"gradient_clip_val": 1.0, "module": {"checkpointing": False}},
    {"gradient_clip_val": 1.0, "precision": "bf16-mixed", "accumulate_grad_batches": 4, "module": {"rate": 0.01}},
]


@pytest.mark.parametrize("settings", rows(SETTINGS + MORE_SETTINGS, SETTINGS.__contains__), ids=str)
def test_losses_and_norms_are_those_of_the_plain_optimizer(settings: dict[str, Any]) -> None:
    compare(**settings)


@pytest.mark.parametrize(
    ("settings", "scale"), covering([{"gradient_clip_val": 1.0}, {}, {"accumulate_grad_batches": 4}], [2.0**24, 2.0**10])
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # when the first step is skipped, released or not
def test_fp16_equals_the_plain_scaler_overflows_included(settings: dict[str, Any], scale: float) -> None:
    """What precision="16-mixed" makes on a GPU."""
    plain, released = Module(rate=0.01), Module(rate=0.01)
    scales = []
    for module, callbacks in ((plain, []), (released, [GradientRelease()])):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        trainer(*callbacks, plugins=[MixedPrecision("16-mixed", "cpu", scaler)], **settings).fit(module, loader())
        scales.append(scaler.state_dict())
    assert_same_losses(released.losses, plain.losses)
    assert_same_norms(released.norms, plain.norms)
    assert scales[0] == scales[1]
    assert (scales[0]["scale"] < scale) == (scale > 2.0**20)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # when the first step is skipped, released or not
def test_a_skipped_step_is_closed(accumulation: int, tmp_path: Path) -> None:
    """A checkpoint can be saved then."""
    saves = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    settings = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "accumulate_grad_batches": accumulation}
    trainer(GradientRelease(), saves, enable_checkpointing=True, **settings).fit(Module(rate=0.01), loader())
    assert (tmp_path / "step=1.ckpt").exists()
    assert scaler.get_scale() < 2.0**24


def test_clipping_acts_in_these_runs() -> None:
    clipped, free = Module(), Module()
    trainer(gradient_clip_val=1.0).fit(clipped, loader())
    trainer().fit(free, loader())
    assert abs(clipped.losses[-1] / free.losses[-1] - 1) > 1e-2


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({}, 0),
        ({"accumulate_grad_batches": 4}, 0),
        ({"accumulate_grad_batches": 4, "gradient_clip_val": 1.0}, 21),  # they wait for Lightning to clip them
    ],
    ids=str,
)
def test_the_last_backward_releases(settings: dict[str, Any], left: int) -> None:
    module = Counted()
    trainer(GradientRelease(), **settings).fit(module, loader())
    assert set(module.norms) == {left}


@pytest.mark.parametrize("settings", [{"gradient_clip_val": 1.0}, {}], ids=str)
def test_one_gradient_is_alive(settings: dict[str, Any]) -> None:
    module = Module()
    with LiveGradientMeter(module.named_parameters()) as meter:
        trainer(GradientRelease(), max_steps=3, **settings).fit(module, loader())
    assert meter.peak <= 2 * largest_gradient(module) < gradient_bytes(module) / 4


def test_micro_batches_in_the_moments_keep_one_gradient_alive() -> None:
    module = Module()
    with LiveGradientMeter(module.named_parameters()) as meter:
        trainer(GradientRelease(accumulation="state"), accumulate_grad_batches=4).fit(module, loader())
    assert meter.peak <= 2 * largest_gradient(module)
    assert module.losses[5:] < module.losses[:5]


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")  # of the first run
def test_resuming_equals_going_on(accumulation: int, tmp_path: Path) -> None:
    """Saved between two epochs, after a validation."""
    settings = {"gradient_clip_val": 1.0, "accumulate_grad_batches": accumulation, "num_sanity_val_steps": 1}
    saves = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    whole, resumed = Validated(), Validated()
    trainer(GradientRelease(), saves, enable_checkpointing=True, **settings).fit(whole, loader(), loader(seed=2))
    path = tmp_path / "epoch=0.ckpt"
    trainer(GradientRelease(), saves, enable_checkpointing=True, **settings).fit(
        resumed, loader(), loader(seed=2), ckpt_path=path
    )
    assert resumed.losses == whole.losses[5:]
    assert resumed.norms == whole.norms[-len(resumed.norms) :]
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


class ClipsInSecret(Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(pl_module.parameters(), 0.1)


@pytest.mark.parametrize("settings", [{"gradient_clip_val": 1.0}, {}], ids=str)
def test_undeclared_clipping_raises(settings: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match="max_norm"):
        trainer(GradientRelease(), ClipsInSecret(), **settings).fit(Module(), loader())


class Other(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_settings_that_cannot_be_met_are_refused() -> None:
    cases = [
        (Other(), {}, {}, "SGD"),
        (Manual(), {}, {}, "automatic_optimization"),
        (Module(), {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, {}, "gradient_clip_algorithm"),
        (
            Module(),
            {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2},
            {"accumulation": "state"},
            "(?s)accumulation='state'.*gradient_clip_val",
        ),
    ]
    for module, settings, options, text in cases:
        with pytest.raises(RefusedError, match=text):
            trainer(GradientRelease(**options), **settings).fit(module, loader())
        assert all(not parameter._post_accumulate_grad_hooks for parameter in module.parameters())
    with pytest.raises(InvalidArgumentError, match="accumulation='sum'"):
        trainer(GradientRelease(accumulation="sum")).fit(Module(), loader())


class Breaks(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            raise ZeroDivisionError


def test_after_an_exception_the_module_is_free() -> None:
    module = Module()
    with pytest.raises(ZeroDivisionError):
        trainer(GradientRelease(accumulation="state"), Breaks(), accumulate_grad_batches=4).fit(module, loader())
    module.zero_grad()
    module.training_step(next(iter(loader())), 0).backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert "backward" not in vars(module)
