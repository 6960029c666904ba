"""A plan agrees with arithmetic, and fake tensors with real ones."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch
from tests.support.rows import rows

from penstock import torch_frontend
from penstock.core.errors import InvalidArgumentError
from penstock.planner.llama import Llama
from penstock.planner.plan import Plan, plan
from penstock.planner.settings import DTYPES, MODES, OPTIMIZERS, LlamaShape, Training, modes
from penstock.torch_frontend.releasable import ReleasableOptimizer

SHAPE = LlamaShape(layers=3, width=64, heads=4, key_value_heads=2, hidden=96, vocabulary=32)
TRAINING = Training(batch=2, sequence=8, micro_batches=2, dtype="float32")
MODE = {mode.name: mode for mode in MODES}
LAYER, ALL = 4 * SHAPE.layer_parameters, 4 * SHAPE.parameters


@functools.cache
def planned(name: str) -> Plan:
    return plan(SHAPE, TRAINING, MODE[name])


def test_the_arithmetic_of_a_shape_is_the_models_and_llama_7b_s() -> None:
    assert sum(p.numel() for p in Llama(SHAPE, dtype=torch.float32, checkpointing=False).parameters()) == SHAPE.parameters
    assert LlamaShape().parameters == 6_738_415_616


def test_parameters_and_states_are_counted_exactly() -> None:
    found = planned("plain").by_kind
    tensors = len(list(Llama(SHAPE, dtype=torch.float32, checkpointing=False).parameters()))
    assert found["parameters"] == ALL
    assert found["optimizer state"] == 2 * ALL + 4 * tensors  # two moments, and a count each
    half = dataclasses.replace(TRAINING, dtype="bfloat16")
    assert plan(SHAPE, half, MODE["plain"]).by_kind["optimizer state"] == 3 * ALL // 2 + 4 * tensors


@pytest.mark.parametrize(
    ("dtype", "optimizer", "compensation"),
    rows(
        [*itertools.product(DTYPES, [*OPTIMIZERS, "Lion+SGD"], ["auto", "none", "kahan"]), ("bfloat16", "Lion", "stochastic")],
        lambda row: "StableAdamW" in row or "auto" in row or "stochastic" in row,
    ),
)
def test_planned_state_equals_the_optimizers(dtype: str, optimizer: str, compensation: str) -> None:
    training = dataclasses.replace(TRAINING, dtype=dtype, optimizer=optimizer, compensation=compensation)
    shape = dataclasses.replace(SHAPE, layers=1, vocabulary=48)  # the embedding has another shape than every hidden matrix
    found = plan(shape, training, MODE["plain"]).by_kind
    tensors = len(list(Llama(shape, dtype=torch.float32, checkpointing=False).parameters()))
    rest = shape.parameters - shape.hidden_matrices
    kept = training.kept_bytes * shape.hidden_matrices + training.kept_bytes_of_rest * rest
    assert found["parameters"] + found["optimizer state"] == kept + 4 * tensors


def test_every_optimizer_can_be_planned() -> None:
    public = (getattr(torch_frontend, name) for name in torch_frontend.__all__)
    own = [each for each in public if isinstance(each, type) and issubclass(each, ReleasableOptimizer)]
    assert {each.__name__: each.rule for each in own} == OPTIMIZERS


def test_the_row_of_torch_has_the_state_that_torch_makes() -> None:
    model = Llama(SHAPE, dtype=torch.float32, checkpointing=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros((1, 3), dtype=torch.int64)).backward()
    optimizer.step()
    made = sum(tensor.numel() * tensor.element_size() for state in optimizer.state.values() for tensor in state.values())
    assert planned("torch").by_kind["optimizer state"] == made


def test_settings_that_are_not_the_optimizers_own_are_named() -> None:
    same = Training(), Training(compensation="split"), Training(dtype="float32", compensation="kahan")
    assert [training.changed for training in same] == ["", "", ""]
    assert list(Training().kept.values()) == ["bfloat16", "int16", "bfloat16", "bfloat16"]
    changed = Training(compensation="none", state_dtype="float32")
    assert changed.changed == "compensation='none', state_dtype='float32'"
    assert (Training().kept_bytes, changed.kept_bytes) == (8, 10)


def test_release_saves_all_gradients_but_a_layers() -> None:
    training = dataclasses.replace(TRAINING, batch=1, micro_batches=1, sequence=1)  # next to no activations
    plain, release = plan(SHAPE, training, MODE["plain"]), plan(SHAPE, training, MODE["release"])
    assert ALL - LAYER <= plain.peak - release.peak <= ALL
    last = 4 * SHAPE.vocabulary * SHAPE.width  # the embedding's gradient; just before it other things are alive
    assert ALL - last <= plain.by_kind["gradients"] <= ALL
    assert plain.ledger is None
    assert release.ledger is not None
    assert release.ledger <= LAYER


def test_each_mode_keeps_the_gradients_that_its_ledger_says() -> None:
    found = {name: planned(name) for name in MODE}
    ledgers = {name: one.ledger for name, one in found.items()}
    assert ledgers["hold"] == ALL
    assert ledgers["blocks"] == LAYER
    assert all((ledgers[name] or 0) < LAYER for name in ("release", "guard", "state"))
    assert found["state"].peak < found["release"].peak < found["plain"].peak  # half of the activations; no gradients
    assert found["hold"].peak == found["plain"].peak


def test_the_temporaries_of_muon_are_those_of_its_operations() -> None:
    """Of the largest matrix: three of its size or more are alive in an iteration, and more while states are coded."""
    shape = dataclasses.replace(SHAPE, width=128, hidden=512)
    exact, compact = (
        plan(shape, Training(sequence=8, optimizer="Muon", precision=precision), MODE["release"])
        for precision in ("exact", "compact")
    )
    adamw = plan(shape, Training(sequence=8, optimizer="AdamW"), MODE["release"])
    temporaries = [one.by_kind["activations and temporaries"] for one in (adamw, exact, compact)]
    assert temporaries == sorted(temporaries)
    assert temporaries[1] - temporaries[0] > 3 * 2 * 128 * 512
    assert compact.by_kind["optimizer state"] < exact.by_kind["optimizer state"]


@pytest.mark.parametrize("name", list(MODE))
def test_fake_tensors_take_the_memory_that_real_ones_do(name: str) -> None:
    fake, real = planned(name), plan(SHAPE, TRAINING, MODE[name], fake=False)
    assert fake.ledger == real.ledger
    one = 4  # bytes: a count on a fake tensor grows by a tensor, one on a CPU through numpy
    for kind in fake.by_kind.keys() | real.by_kind.keys():
        assert 0 <= fake.by_kind.get(kind, 0) - real.by_kind.get(kind, 0) <= one
    assert 0 <= fake.peak - real.peak <= one


def test_checkpointing_is_planned() -> None:
    training = dataclasses.replace(TRAINING, batch=8, micro_batches=1, sequence=32)
    without = plan(SHAPE, dataclasses.replace(training, checkpointing=False), MODE["plain"])
    assert plan(SHAPE, training, MODE["plain"]).peak < without.peak


def test_modes_that_say_nothing_are_left_out() -> None:
    assert [mode.name for mode in modes(None, Training())] == ["torch", "plain", "release", "guard"]
    assert [mode.name for mode in modes(None, TRAINING)] == list(MODE)
    assert [mode.name for mode in modes(["state", "plain", "state"], Training())] == ["state", "plain"]
    of_lion = [mode.name for mode in modes(None, Training(optimizer="Lion", batch=2, micro_batches=2))]
    assert of_lion == [mode.name for mode in MODES if mode.name != "state"]  # which is refused for it


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LlamaShape(layers=0), "layers=0 must be at least 1"),
        (lambda: LlamaShape(heads=3), "heads=3 must divide width=4096"),
        (lambda: LlamaShape(key_value_heads=5), "key_value_heads=5 must divide heads=32"),
        (lambda: Training(batch=3, micro_batches=2), "micro_batches=2 must divide batch=3"),
        (lambda: Training(dtype="int8"), "dtype='int8' is not known"),
        (lambda: Training(optimizer="Adagrad"), "optimizer='Adagrad' is not known"),
        (lambda: Training(optimizer="AdamW+Muon"), r"optimizer='AdamW\+Muon' is not known.* B, .* is not Muon"),
        (lambda: Training(optimizer="SGD", state_dtype="8bit"), "state_dtype='8bit' is not possible for SGD"),
        (lambda: Training(state_dtype="int8"), "state_dtype='int8' is not known"),
        (lambda: modes(["all"], Training()), "mode 'all' is not known"),
    ],
)
def test_settings_that_cannot_be_planned_are_refused(make, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        make()
