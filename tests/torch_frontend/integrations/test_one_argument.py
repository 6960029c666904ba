"""An unchanged Trainer with a `ReleasedOptimizer` trains as with the plain optimizer, and its gradients are gone earlier."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny_llama import (
    assert_same_losses,
    assert_same_norms,
    gradient_bytes,
    largest_gradient,
    sequences,
    tiny_llama,
)
from transformers import Trainer, TrainingArguments
from transformers import trainer as transformers_trainer

from penstock.core.errors import RefusedError
from penstock.planner.live_gradients import LiveGradientMeter
from penstock.torch_frontend import AdamW, param_groups_weight_decay
from penstock.torch_frontend.integrations.transformers import ReleasedOptimizer

pytestmark = pytest.mark.skipif(
    not hasattr(transformers_trainer, "is_optimizer_factory"), reason="this Transformers gives no optimizer the model"
)
SETTINGS = {"lr": 0.3, "eps": 0.1}  # so that clipping matters


@pytest.fixture
def make(tmp_path: Path) -> Any:
    return functools.partial(make_trainer, tmp_path)


def make_trainer(directory: Path, released: dict[str, Any] | None, **arguments: Any) -> Trainer:
    """A Trainer, released if there are settings for that."""
    defaults = {"use_cpu": True, "max_steps": 5, "per_device_train_batch_size": 4, "logging_steps": 1, "report_to": "none"}
    training = TrainingArguments(str(directory), **(defaults | {"save_strategy": "no", "disable_tqdm": True} | arguments))
    model = tiny_llama()
    if released is None:
        chosen: Any = {"optimizers": (AdamW(param_groups_weight_decay(model, 0.01), **SETTINGS), None)}
    else:
        chosen = {"optimizer_cls_and_kwargs": (ReleasedOptimizer, {"weight_decay": 0.01, **SETTINGS, **released})}
    return Trainer(model=model, args=training, train_dataset=sequences(18), **chosen)


def logged(trainer: Trainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize(
    ("released", "arguments"),
    [
        ({"max_norm": 1.0}, {}),
        ({}, {"max_grad_norm": 0.0}),
        ({"max_norm": 1.0, "accumulation": "hold"}, {"gradient_accumulation_steps": 4}),
        ({"accumulation": "hold"}, {"gradient_accumulation_steps": 4, "max_grad_norm": 0.0}),
    ],
    ids=str,
)
def test_losses_and_norms_are_those_of_the_plain_optimizer(make: Any, released: Any, arguments: dict[str, Any]) -> None:
    plain, one = make(None, **arguments), make(released, **arguments)
    plain.train()
    with LiveGradientMeter(one.model.named_parameters()) as meter:
        one.train()
    assert_same_losses(logged(one, "loss"), logged(plain, "loss"))
    assert_same_norms(logged(one, "grad_norm"), logged(plain, "grad_norm"))
    if "accumulation" not in released:
        assert meter.peak <= 2 * largest_gradient(one.model) < gradient_bytes(one.model) / 4


def test_resuming_equals_going_on(make: Any) -> None:
    whole = make({"max_norm": 1.0}, save_strategy="steps", save_steps=3)
    whole.train()
    resumed = make({"max_norm": 1.0})
    resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-3")
    assert logged(resumed, "loss") == logged(whole, "loss")


@pytest.mark.parametrize(
    ("arguments", "message"), [({}, "max_norm"), ({"gradient_accumulation_steps": 2, "max_grad_norm": 0.0}, "hold")]
)
def test_undeclared_arguments_are_refused(make: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        make({}, **arguments).train()


def test_a_loss_from_outside_the_model_is_refused_with_clipping(make: Any) -> None:
    trainer = make({"max_norm": 1.0}, label_smoothing_factor=0.1)
    before = [p.clone() for p in trainer.model.parameters()]
    with pytest.raises(RefusedError, match="guard"):
        trainer.train()
    assert all((p == q).all() for p, q in zip(before, trainer.model.parameters(), strict=True))


def test_fp16_is_refused(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make({"max_norm": 1.0})
    monkeypatch.setattr(trainer.accelerator.state, "_mixed_precision", "fp16")
    with pytest.raises(RefusedError, match="ReleaseTrainer"):
        trainer.create_optimizer()
