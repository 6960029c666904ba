"""Gradient release in Hugging Face Transformers' Trainer."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import tempfile
from collections.abc import Mapping, MutableMapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...core.atomic_write import replacing
from ...core.errors import InvalidArgumentError, RefusedError, not_installed
from ..compatibility import param_groups_weight_decay
from ..optimizers import AdamW
from ..portable import export_state, import_state
from ..releasable import ReleasableOptimizer
from ..release import Release
from .trainer_settings import release_for_trainer

try:
    from accelerate.state import AcceleratorState, GradientState
    from transformers import Trainer, TrainerCallback
    from transformers.trainer import OPTIMIZER_NAME

    from .accelerate import plain_optimizer
except ModuleNotFoundError as error:
    raise not_installed(
        "penstock.torch_frontend.integrations.transformers", "Transformers and Accelerate", "trainers"
    ) from error

NOT_IN_PENSTOCK = ("fused", "foreach")
"""Settings of torch's AdamW that select an implementation and do not change the result."""


class ReleaseTrainer(Trainer):
    """A `transformers.Trainer` that releases gradients while it trains.

    max_grad_norm, gradient_accumulation_steps, activation checkpointing, fp16 and bf16 mean the same as in `Trainer`, and the
    logged grad_norm is the norm before clipping. If `Trainer` would use torch's AdamW, this class uses penstock's with the
    same settings; pass another optimizer of penstock as `optimizer_cls_and_kwargs=(StableAdamW, {"lr": 1e-4})` or as
    `optimizers=(optimizer, None)`. Combine it with another subclass of `Trainer`, for instance one of TRL's, by inheritance:
    `class MyTrainer(ReleaseTrainer, SFTTrainer)`.

    Args:
        *args: as for `Trainer`.
        release_options: `accumulation` and `keep_bytes` of `release_gradients`; default: "hold" if there are several
            micro-batches, and 0.
        **kwargs: as for `Trainer`.

    Attributes:
        release: the release of the latest train(), set at its first step; None before.

    Raises:
        RefusedError: in train(), before the first step: the optimizer is of another package, or the combination is not
            possible.

    Example:
        >>> trainer = ReleaseTrainer(model, TrainingArguments("out"), train_dataset=dataset)
        >>> trainer.train()
    """

    def __init__(self, *args: Any, release_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self.release: Release | None = None
        self._release_options = dict(release_options or {})
        self._in_train = contextlib.ExitStack()
        super().__init__(*args, **kwargs)
        self.add_callback(_CloseStep())

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """Return penstock's AdamW where `Trainer` would return torch's, with the same settings."""
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)
        if kind is not torch.optim.AdamW:
            raise RefusedError(
                f"optim={str(getattr(args.optim, 'value', args.optim))!r} cannot release gradients; leave "
                "TrainingArguments.optim at its default for AdamW, or give optimizer_cls_and_kwargs=(StableAdamW, {...})."
            )
        return AdamW, {name: value for name, value in settings.items() if name not in NOT_IN_PENSTOCK}

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer` does; gradients are released from the first step until this returns."""
        self.release = None
        with contextlib.ExitStack() as self._in_train:  # the release's __exit__ sees exceptions too
            return super().train(*args, **kwargs)

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward of one micro-batch; the first one sets up the release."""
        if self.release is None:
            self.release = self._in_train.enter_context(self._set_up(model))
        return super().training_step(model, *args, **kwargs)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | int | None = None
    ) -> Any:
        """Return `Trainer`'s loss, guarded."""
        result: Any = super().compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        if self.release is None:
            return result
        if return_outputs:
            return self.release.guard(result[0]), result[1]
        return self.release.guard(result)

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Return the norm that `Trainer` logs; None with accumulation="state", where it is not known."""
        if self.release is not None and self._release_options.get("accumulation") == "state":
            return None
        return super()._get_grad_norm(*args, **kwargs)

    def _set_up(self, model: Any) -> Release:
        if self.args.auto_find_batch_size:
            raise RefusedError(
                "auto_find_batch_size=True starts over when memory runs out during backward, when some parameters are updated "
                "already; find the batch size first, and switch it off."
            )
        optimizer = plain_optimizer(self.optimizer)
        if not isinstance(optimizer, ReleasableOptimizer):
            raise RefusedError(
                f"the trainer's optimizer is a {type(optimizer).__name__}; give it one of penstock.torch_frontend's, or none: "
                "AdamW with the settings of the TrainingArguments."
            )
        return release_for_trainer(
            model,
            optimizer,
            micro_batches=self.args.gradient_accumulation_steps,
            sync=lambda: self.accelerator.sync_gradients,
            max_norm=self.args.max_grad_norm,
            max_norm_name="TrainingArguments.max_grad_norm",
            scaler=self.accelerator.scaler,
            **self._release_options,
        )


class ReleasedOptimizer:
    """Makes an optimizer and releases the model's gradients: for an unchanged `Trainer` of Transformers 5, in one argument.

    `Trainer` calls it with the model when it creates its optimizer, and the release lasts as long as that optimizer does. The
    loss in the model's output is guarded. Several processes and fp16 are refused, and with max_norm a loss that is computed
    outside of the model (label smoothing, compute_loss_func): `ReleaseTrainer` has all of them.

    Example:
        >>> made = (ReleasedOptimizer, {"optimizer_class": StableAdamW, "lr": 1e-4, "max_norm": 1.0})
        >>> Trainer(model, TrainingArguments("out"), train_dataset=dataset, optimizer_cls_and_kwargs=made).train()
    """

    def __call__(
        self,
        model: nn.Module,
        optimizer_class: type[ReleasableOptimizer] = AdamW,
        *,
        max_norm: float | None = None,
        accumulation: str | None = None,
        weight_decay: float = 0.0,
        **settings: Any,
    ) -> ReleasableOptimizer:
        """Return the optimizer.

        Args:
            model: as `Trainer` gives it.
            optimizer_class: of penstock.torch_frontend.
            max_norm: TrainingArguments.max_grad_norm; None if that is 0.
            accumulation: "hold" or "state" if gradient_accumulation_steps is above 1, as in `release_gradients`.
            weight_decay: of the matrices; biases and norms have none.
            **settings: of the optimizer: lr, betas, eps, ...

        Raises:
            RefusedError: there are several processes, fp16=True, or the combination is not possible.
        """
        trainer = AcceleratorState()
        if trainer.num_processes > 1 or trainer.mixed_precision == "fp16":
            raise RefusedError(
                f"ReleasedOptimizer sees neither the wrapped model nor a GradScaler, and there are {trainer.num_processes} "
                f"processes and mixed_precision={trainer.mixed_precision!r}; use ReleaseTrainer."
            )
        optimizer = optimizer_class(param_groups_weight_decay(model, weight_decay), **settings)
        state = GradientState()
        release = release_for_trainer(
            model,
            optimizer,
            micro_batches=1,
            sync=lambda: state.sync_gradients,
            max_norm=max_norm,
            accumulation=accumulation,
        )
        model.register_forward_hook(functools.partial(_guard_loss, release))
        return optimizer


def _guard_loss(release: Release, model: nn.Module, inputs: Any, output: Any) -> None:
    if isinstance(output, MutableMapping) and isinstance(output.get("loss"), Tensor):
        output["loss"] = release.guard(output["loss"])


def convert_checkpoint(checkpoint: str | os.PathLike[str], source: Trainer, target: Trainer) -> None:
    """Rewrite the optimizer's state in a checkpoint of one trainer as that of another, which can resume from it then.

    So a run of `Trainer` goes on in a `ReleaseTrainer`, or the other way round. The moments are converted by `export_state` and
    `import_state`, with two roundings; settings, schedule, weights and random numbers are in the checkpoint and stay.

    Args:
        checkpoint: directory that `source` has saved; its file optimizer.pt is replaced.
        source: constructed as the trainer that has saved it; its optimizer gets the state.
        target: constructed as the trainer that is to resume from it, with the same parameters in its groups; so does its own.

    Raises:
        RefusedError, InvalidArgumentError: the directory holds no optimizer.pt; or as `import_state`, for instance because
            bfloat16 parameters have a compensation, which torch.optim has no place for; the checkpoint was not changed.

    Example:
        >>> convert_checkpoint("out/checkpoint-500", Trainer(model, arguments), trainer)
        >>> trainer.train(resume_from_checkpoint="out/checkpoint-500")
    """
    path = pathlib.Path(checkpoint, OPTIMIZER_NAME)
    if not path.is_file():
        raise InvalidArgumentError(
            f"checkpoint={os.fspath(checkpoint)!r} holds no {OPTIMIZER_NAME}; give the directory that the source has saved, "
            "such as out/checkpoint-500."
        )
    before, after = (plain_optimizer(trainer.create_optimizer() or trainer.optimizer) for trainer in (source, target))
    before.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    with tempfile.TemporaryDirectory(dir=checkpoint) as directory:
        state = os.path.join(directory, "state.safetensors")
        export_state(state, before, cast(nn.Module, source.model))
        import_state(state, after, cast(nn.Module, target.model), hyperparameters=True)
    with replacing(path) as converted:
        torch.save(after.state_dict(), converted)


class _CloseStep(TrainerCallback):
    """Closes a step that GradScaler skipped: Trainer calls zero_grad() of the model, not of the optimizer."""

    def on_step_end(self, args: Any, state: Any, control: Any, *, optimizer: Any, **others: Any) -> None:
        """Call zero_grad() after Trainer's step, before it saves a checkpoint."""
        optimizer.zero_grad()
