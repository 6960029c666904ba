"""ReleaseTrainer trains as transformers.Trainer does with the same optimizer, and its gradients are gone earlier."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.rows import covering, rows
from tests.support.tiny_llama import (
    assert_same_losses,
    assert_same_norms,
    fp16_on_cpu,
    gradient_bytes,
    largest_gradient,
    sequences,
    tiny_llama,
)
from tests.support.torch_models import gone
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.planner.live_gradients import LiveGradientMeter
from penstock.torch_frontend import StableAdamW
from penstock.torch_frontend.integrations.transformers import ReleaseTrainer, convert_checkpoint
from penstock.torch_frontend.microbatch import microbatch_blocks

NAMES = ("activation_checkpointing", "gradient_checkpointing")
CHECKPOINTING = next(name for name in NAMES if name in TrainingArguments.__dataclass_fields__)  # its name changed
LOW = {"learning_rate": 0.01}
"""At a higher one a last bit of a weight, which the norm's rounding changes, becomes one of bfloat16: 3e-4 in the loss."""


class PlainTrainer(Trainer):
    """Transformers' own, with the optimizer of ReleaseTrainer."""

    get_optimizer_cls_and_kwargs = staticmethod(ReleaseTrainer.get_optimizer_cls_and_kwargs)


def make_trainer(
    directory: Path, kind: type[Trainer], *, options: dict[str, Any] | None = None, samples: int = 18, **settings: Any
) -> Trainer:
    """A trainer of the class; a large eps makes AdamW follow the size of the gradient, so that clipping matters."""
    defaults = {
        "output_dir": str(directory / kind.__name__),
        "use_cpu": True,
        "max_steps": 5,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.3,
        "adam_epsilon": 0.1,
        "weight_decay": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(**(defaults | settings))
    return kind(model=tiny_llama(), args=arguments, train_dataset=sequences(samples), **(options or {}))


@pytest.fixture
def make(tmp_path: Path) -> Any:
    return functools.partial(make_trainer, tmp_path)


def logged(trainer: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def compare(make: Any, **settings: Any) -> tuple[Trainer, ReleaseTrainer]:
    plain, released = make(PlainTrainer, **settings), make(ReleaseTrainer, **settings)
    for trainer in (plain, released):
        trainer.train()
    assert_same_losses(logged(released, "loss"), logged(plain, "loss"))
    assert_same_norms(logged(released, "grad_norm"), logged(plain, "grad_norm"))
    assert logged(released, "learning_rate") == logged(plain, "learning_rate")
    return plain, released


SETTINGS = [
    {},  # max_grad_norm is 1.0
    {"max_grad_norm": 0.0},
    {"gradient_accumulation_steps": 4},  # 18 samples: the epoch's last group has one micro-batch, of two samples
    {"bf16": True, "gradient_accumulation_steps": 4} | LOW,
    {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}},
]
MORE_SETTINGS = [
    {"gradient_accumulation_steps": 4, "max_grad_norm": 0.0},
    {"bf16": True} | LOW,
    {CHECKPOINTING: True},
    {CHECKPOINTING: True, "max_grad_norm": 0.0, "gradient_accumulation_steps": 4},
    {"label_smoothing_factor": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2},
]


@pytest.mark.parametrize("settings", rows(SETTINGS + MORE_SETTINGS, SETTINGS.__contains__), ids=str)
def test_losses_and_norms_are_those_of_the_plain_optimizer(make: Any, settings: dict[str, Any]) -> None:
    _, released = compare(make, **settings)
    assert released.release is not None
    assert released.release.optimizer.release is None  # it is over


def test_clipping_acts_in_these_runs(make: Any) -> None:
    clipped, free = make(PlainTrainer), make(PlainTrainer, max_grad_norm=0.0)
    clipped.train()
    free.train()
    assert min(logged(clipped, "grad_norm")) > 1.0
    assert abs(logged(clipped, "loss")[-1] / logged(free, "loss")[-1] - 1) > 1e-2


@pytest.mark.parametrize(("accumulation", "scale"), covering([1, 4], [2.0**10, 2.0**24]))
def test_fp16_equals_the_plain_scaler_overflows_included(make: Any, accumulation: int, scale: float) -> None:
    """Trainer makes no GradScaler on a CPU; given one, its own code does the rest."""
    settings = {"fp16": True, "gradient_accumulation_steps": accumulation, "max_steps": 8} | LOW
    plain, released = make(PlainTrainer, **settings), make(ReleaseTrainer, **settings)
    for trainer in (plain, released):
        fp16_on_cpu(trainer.accelerator, scale)
        trainer.train()
    assert_same_losses(logged(released, "loss"), logged(plain, "loss"))
    assert_same_norms(logged(released, "grad_norm"), logged(plain, "grad_norm"))
    assert logged(released, "learning_rate") == logged(plain, "learning_rate")  # a skipped step does not count
    assert released.accelerator.scaler.state_dict() == plain.accelerator.scaler.state_dict()
    assert (released.accelerator.scaler.get_scale() < scale) == (scale > 2.0**20)


@pytest.mark.parametrize("accumulation", rows([1, 4], [1].__contains__))
def test_a_skipped_step_is_closed(make: Any, accumulation: int) -> None:
    """A checkpoint that is saved then resumes as it does without release."""
    settings = {
        "fp16": True,
        "gradient_accumulation_steps": accumulation,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 1,
    } | LOW
    whole, resumed = make(ReleaseTrainer, **settings), make(ReleaseTrainer, **settings)
    for trainer in (whole, resumed):
        fp16_on_cpu(trainer.accelerator, scale=2.0**24)
    whole.train()
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-1"))
    assert math.isnan(logged(whole, "grad_norm")[0]) or math.isinf(logged(whole, "grad_norm")[0])
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert resumed.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()


@pytest.mark.parametrize("settings", rows([{}, {"max_grad_norm": 0.0}, {CHECKPOINTING: True}], [{}].__contains__), ids=str)
def test_one_gradient_is_alive(make: Any, settings: dict[str, Any]) -> None:
    trainer = make(ReleaseTrainer, max_steps=2, **settings)
    with LiveGradientMeter(trainer.model.named_parameters()) as meter:
        trainer.train()
    assert meter.peak <= 2 * largest_gradient(trainer.model) < gradient_bytes(trainer.model) / 4


class CountsGradients(TrainerCallback):
    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any) -> None:
        self.counts.append(sum(not gone([parameter]) for parameter in model.parameters()))


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({}, 0),
        ({"gradient_accumulation_steps": 4, "max_grad_norm": 0.0}, 0),
        ({"gradient_accumulation_steps": 4}, 21),  # they wait for Trainer to clip them
    ],
    ids=str,
)
def test_the_last_backward_releases(make: Any, settings: dict[str, Any], left: int) -> None:
    counted = CountsGradients()
    make(ReleaseTrainer, options={"callbacks": [counted]}, **settings).train()
    assert counted.counts == [left] * 5


def test_gradients_that_are_kept_shorten_the_second_pass(make: Any) -> None:
    plain, kept = make(PlainTrainer), make(ReleaseTrainer, options={"release_options": {"keep_bytes": 20_000}})
    plain.train()
    with LiveGradientMeter(kept.model.named_parameters()) as meter:
        kept.train()
    assert_same_losses(logged(kept, "loss"), logged(plain, "loss"))
    assert_same_norms(logged(kept, "grad_norm"), logged(plain, "grad_norm"))
    assert 2 * largest_gradient(kept.model) < meter.peak <= 20_000 + 2 * largest_gradient(kept.model)


def test_micro_batches_inside_the_model(make: Any) -> None:
    """Instead of gradient_accumulation_steps: the same gradient, and one block's of it alive."""
    plain = make(PlainTrainer, gradient_accumulation_steps=4, max_steps=3)
    released = make(ReleaseTrainer, per_device_train_batch_size=16, max_steps=3)
    plain.train()
    layers = released.model.model.layers
    with microbatch_blocks(layers, chunks=4), LiveGradientMeter(released.model.named_parameters()) as meter:
        released.train()
    assert_same_losses(logged(released, "loss"), logged(plain, "loss"))
    assert_same_norms(logged(released, "grad_norm"), logged(plain, "grad_norm"))
    assert meter.peak <= gradient_bytes(layers[0]) + largest_gradient(released.model) < gradient_bytes(released.model) / 2


def test_micro_batches_in_the_moments_keep_one_gradient_alive(make: Any) -> None:
    options = {"release_options": {"accumulation": "state"}}
    trainer = make(ReleaseTrainer, options=options, gradient_accumulation_steps=4, max_grad_norm=0.0)
    with LiveGradientMeter(trainer.model.named_parameters()) as meter:
        trainer.train()
    assert logged(trainer, "loss")[-1] < logged(trainer, "loss")[0]
    assert meter.peak <= 2 * largest_gradient(trainer.model)


@pytest.mark.parametrize("accumulation", rows([1, 4], [4].__contains__))
def test_resuming_equals_going_on(make: Any, accumulation: int) -> None:
    """Saved in the middle, with evaluations in between."""
    settings = {
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "gradient_accumulation_steps": accumulation,
    }
    options = {"eval_dataset": sequences(4, seed=2)}
    whole = make(ReleaseTrainer, options=options, **settings)
    whole.train()
    resumed = make(ReleaseTrainer, options=options, **settings)
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-3"))
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert logged(resumed, "eval_loss") == logged(whole, "eval_loss")
    assert logged(resumed, "grad_norm") == logged(whole, "grad_norm")


WAYS = [(Trainer, ReleaseTrainer), (ReleaseTrainer, Trainer)]


@pytest.mark.parametrize(("first", "second"), WAYS, ids=["to release", "from release"])
def test_a_converted_checkpoint_goes_on_in_the_other_trainer(make: Any, first: type[Trainer], second: type[Trainer]) -> None:
    """The resumed run logs what the run that was not interrupted logs: schedule, weight decay and moments included."""
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "adam_beta2": 0.95, "adam_epsilon": 1e-6} | LOW
    whole, resumed = make(first, **settings), make(second, **settings)
    whole.train()
    checkpoint = Path(whole.args.output_dir) / "checkpoint-3"
    convert_checkpoint(checkpoint, make(first, **settings), make(second, **settings))
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_same_losses(logged(resumed, "loss"), logged(whole, "loss"))
    assert_same_norms(logged(resumed, "grad_norm"), logged(whole, "grad_norm"))
    assert logged(resumed, "learning_rate") == logged(whole, "learning_rate")
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("first", "second", "error", "said"),
    [(*WAYS[0], InvalidArgumentError, "convert_checkpoint"), (*WAYS[1], KeyError, "exp_avg")],
    ids=["to release", "from release"],
)
def test_a_checkpoint_of_the_other_trainer_is_refused_before_a_step(
    make: Any, first: type[Trainer], second: type[Trainer], error: type[Exception], said: str
) -> None:
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    whole, resumed = make(first, **settings), make(second, **settings)
    whole.train()
    checkpoint = Path(whole.args.output_dir) / "checkpoint-1"
    with pytest.raises(error, match=said):
        resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 1  # what the checkpoint says
    saved = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(parameter, saved[name]) for name, parameter in resumed.model.named_parameters() if name in saved)


def test_a_checkpoint_that_cannot_be_converted_is_not_changed(make: Any) -> None:
    """A compensation has no place in torch.optim; the file that holds it stays."""
    settings = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_grad_norm": 0.0}
    trainers = [make(kind, **settings) for kind in (ReleaseTrainer, ReleaseTrainer, Trainer)]
    for trainer in trainers:
        trainer.model.bfloat16()
    trainers[0].train()
    checkpoint = Path(trainers[0].args.output_dir) / "checkpoint-1"
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    with pytest.raises(InvalidArgumentError, match="compensation"):
        convert_checkpoint(checkpoint, *trainers[1:])
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before


def test_a_folder_that_is_not_a_checkpoint_is_refused(make: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"checkpoint=.*nowhere.* holds no optimizer\.pt; give the directory"):
        convert_checkpoint(tmp_path / "nowhere", make(Trainer), make(ReleaseTrainer))


class OwnLoss(Trainer):
    """A trainer of somebody's, as TRL's are."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **others: Any) -> Any:
        loss = model(**inputs).loss.square()
        return (loss, {}) if return_outputs else loss


class PlainOwnLoss(OwnLoss, PlainTrainer):
    pass


class ReleaseOwnLoss(ReleaseTrainer, OwnLoss):
    pass


class Unguarded(OwnLoss, ReleaseTrainer):
    """The wrong order: its loss is not the one that ReleaseTrainer guards."""


def test_trainers_are_combined_by_inheritance(make: Any) -> None:
    plain, released = make(PlainOwnLoss), make(ReleaseOwnLoss)
    for trainer in (plain, released):
        trainer.train()
    assert_same_losses(logged(released, "loss"), logged(plain, "loss"))
    with pytest.raises(RefusedError, match="guard"):
        make(Unguarded).train()


def test_another_optimizer_of_the_family(make: Any) -> None:
    options = {"optimizer_cls_and_kwargs": (StableAdamW, {"lr": 0.01})}
    plain, released = make(PlainTrainer, options=options), make(ReleaseTrainer, options=options)
    for trainer in (plain, released):
        trainer.train()
    assert_same_losses(logged(released, "loss"), logged(plain, "loss"))
    assert isinstance(released.release.optimizer, StableAdamW)
    assert [group["weight_decay"] for group in released.release.optimizer.param_groups] == [0.01, 0.0]


class ClipsInSecret(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: nn.Module, **others: Any) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 0.0}], ids=str)
def test_undeclared_clipping_raises(make: Any, settings: dict[str, Any]) -> None:
    trainer = make(ReleaseTrainer, options={"callbacks": [ClipsInSecret()]}, **settings)
    with pytest.raises(RefusedError, match="max_norm"):
        trainer.train()


def test_clipping_of_held_gradients_is_what_it_always_was(make: Any) -> None:
    settings = {"gradient_accumulation_steps": 4, "options": {"callbacks": [ClipsInSecret()]}}
    compare(make, **settings)


def test_settings_that_cannot_be_met_are_refused(make: Any) -> None:
    cases = [
        ({"optim": "sgd"}, {}, "optim='sgd'"),
        ({}, {"optimizers": (torch.optim.SGD(tiny_llama().parameters(), lr=0.1), None)}, "SGD"),
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size"),
        (
            {"gradient_accumulation_steps": 2},
            {"release_options": {"accumulation": "state"}},
            r"(?s)accumulation='state'.*TrainingArguments\.max_grad_norm",
        ),
    ]
    for settings, options, text in cases:
        with pytest.raises(RefusedError, match=text):
            make(ReleaseTrainer, options=options, **settings).train()
    with pytest.raises(InvalidArgumentError, match="accumulation='sum'"):
        make(ReleaseTrainer, options={"release_options": {"accumulation": "sum"}}).train()
    with pytest.raises(InvalidArgumentError, match="keep_bytes"):  # there is no second pass
        make(ReleaseTrainer, options={"release_options": {"keep_bytes": 1}}, gradient_accumulation_steps=2).train()


def test_after_an_exception_the_model_is_free(make: Any) -> None:
    class Breaks(TrainerCallback):
        def on_substep_end(self, *args: Any, **others: Any) -> None:
            raise KeyboardInterrupt

    settings = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0}
    options = {"callbacks": [Breaks()], "release_options": {"accumulation": "state"}}
    trainer = make(ReleaseTrainer, options=options, **settings)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.model.zero_grad()
    trainer.model(**{name: value[None] for name, value in sequences(1)[0].items()}).loss.backward()
    assert all(parameter.grad is not None for parameter in trainer.model.parameters())
    trainer.remove_callback(Breaks)
    trainer.train()  # and it can be released again
