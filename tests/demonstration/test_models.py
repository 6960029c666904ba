"""The two transformers are one function, and the runs differ in nothing but the life of a gradient."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax
import numpy as np
import pytest
import torch

from penstock.core.errors import InvalidArgumentError
from penstock.demonstration import jax_run, torch_runs
from penstock.demonstration.initialisation import initial_parameters, nbytes
from penstock.demonstration.jax_model import make_loss
from penstock.demonstration.results import Run, relative_difference
from penstock.demonstration.settings import AGREEMENT, ModelShape, Settings
from penstock.demonstration.text import Batches, read_text
from penstock.demonstration.torch_model import Transformer

SHAPE = ModelShape(width=32, layers=4, heads=4, context=16)
SETTINGS = Settings(steps=6, batch_size=3, shape=SHAPE)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small are slower on several
    yield
    torch.set_num_threads(threads)


@functools.cache
def text() -> np.ndarray:
    return read_text(None, at_least=SHAPE.context + 1, at_most=100_000)


def batches(settings: Settings) -> Batches:
    return Batches(text(), batch_size=settings.batch_size, context=settings.shape.context, seed=settings.seed)


def train(name: str, settings: Settings) -> Run:
    parameters = initial_parameters(settings.shape, seed=settings.seed, dtype=settings.dtype)
    reported: list[float] = []
    if name in jax_run.WAYS:
        run = jax_run.train(name, settings, parameters, batches(settings), reported.append)
    else:
        run = torch_runs.train(name, settings, parameters, batches(settings), reported.append)
    assert reported == list(run.losses)
    assert len(reported) == settings.steps
    return run


def test_loss_and_gradients_are_the_same_function_in_float64() -> None:
    settings = dataclasses.replace(SETTINGS, dtype="float64")
    parameters = initial_parameters(SHAPE, seed=0, dtype="float64")
    generator = np.random.default_rng(1)
    for value in parameters.values():  # away from the ones and zeros, so that no term hides
        value += generator.normal(0, 0.05, value.shape)
    batch = batches(settings).batch(0)

    model = Transformer(parameters, SHAPE)
    assert set(dict(model.named_parameters())) == set(parameters)
    loss = model.loss(torch.from_numpy(batch).long())
    loss.backward()

    with jax_run.configured(settings):
        arrays = {name: jax.numpy.asarray(value) for name, value in parameters.items()}
        other, gradients = jax.jit(jax.value_and_grad(make_loss(SHAPE)))(arrays, batch)
        assert other.dtype == np.float64
        assert abs(loss.item() - float(other)) <= 1e-12 * float(other)
        reference = {name: np.asarray(gradient) for name, gradient in gradients.items()}
    measured = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    assert relative_difference(measured, reference) <= 1e-12
    assert jax.numpy.zeros(()).dtype == np.float32  # float64 was for that run only


def test_no_token_sees_the_future() -> None:
    model = Transformer(initial_parameters(SHAPE, seed=0, dtype="float64"), SHAPE)
    tokens = torch.arange(SHAPE.context)[None]
    changed = tokens.clone()
    changed[0, 10] += 1
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_released_equals_plain_bitwise() -> None:
    plain, zeroed, released = (train(name, SETTINGS) for name in (torch_runs.DROPPED, torch_runs.ZEROED, torch_runs.RELEASED))
    for run in (zeroed, released):
        assert run.losses == plain.losses
        assert relative_difference(run.parameters, plain.parameters) == 0
    assert plain.losses[-1] < plain.losses[0]


def test_8_bit_moments_train_to_the_same_loss_with_less_state() -> None:
    settings = dataclasses.replace(SETTINGS, steps=20)
    plain, coded = (train(name, settings) for name in (torch_runs.DROPPED, torch_runs.CODED))
    assert coded.losses[0] == plain.losses[0]
    assert coded.losses[-1] == pytest.approx(plain.losses[-1], rel=2e-2)
    assert relative_difference(coded.parameters, plain.parameters) > 0
    assert plain.state_bytes is not None
    assert coded.state_bytes is not None
    assert coded.state_bytes < 0.75 * plain.state_bytes  # small tensors keep float32


def test_release_keeps_few_gradients_alive_and_plain_training_all() -> None:
    parameters = initial_parameters(SHAPE, seed=0, dtype="float32")
    everything, largest = nbytes(parameters), max(value.nbytes for value in parameters.values())
    plain, zeroed, released = (train(name, SETTINGS) for name in (torch_runs.DROPPED, torch_runs.ZEROED, torch_runs.RELEASED))
    assert plain.peak_gradient_bytes == everything
    assert plain.timeline[-1] == everything
    assert list(plain.timeline) == sorted(plain.timeline)
    assert zeroed.peak_gradient_bytes == everything + largest  # the old gradient and the one that is added to it
    assert min(zeroed.timeline) >= everything
    assert released.peak_gradient_bytes == largest
    assert released.timeline[-1] == 0
    assert len(plain.timeline) == len(zeroed.timeline) == len(released.timeline) == len(parameters) + 1


def test_all_runs_agree_in_float64() -> None:
    settings = dataclasses.replace(SETTINGS, steps=100, dtype="float64")
    runs = [train(name, settings) for name in (torch_runs.DROPPED, torch_runs.RELEASED, jax_run.SCAN, jax_run.WALK)]
    assert runs[0].losses[-1] < runs[0].losses[0] - 1
    for run in runs:
        assert all(value.dtype == np.float64 for value in run.parameters.values())
        assert relative_difference(run.parameters, runs[0].parameters) <= AGREEMENT
    scan, walk = (run.peak_step_bytes for run in runs[-2:])
    assert scan is not None
    assert walk is not None
    assert 3 * nbytes(initial_parameters(SHAPE, seed=0, dtype="float64")) < walk < scan
    assert jax.numpy.zeros(()).dtype == np.float32  # float64 was for that run only


def test_float32_runs_start_together_in_both_frameworks() -> None:
    settings = dataclasses.replace(SETTINGS, steps=1)
    ours, theirs = train(torch_runs.DROPPED, settings), train(jax_run.SCAN, settings)
    assert ours.losses[0] == pytest.approx(theirs.losses[0], rel=1e-6)
    assert theirs.parameters["head"].dtype == np.float32


@pytest.mark.parametrize("name", ["abacus", "cuda:99", "cpu:x", "cpu:-1", "", "meta"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"PyTorch .* device '{name}'"):
        torch_runs.find_device(name)
    with pytest.raises(InvalidArgumentError, match=f"JAX .* device '{name}'"):
        jax_run.find_device(name)


def test_relative_difference_is_relative_to_the_largest_element() -> None:
    reference = {"a": np.array([1.0, -4.0]), "b": np.array([10.0])}
    assert relative_difference({"a": np.array([2.0, -4.0]), "b": np.array([11.0])}, reference) == 0.25
    assert relative_difference(reference, reference) == 0
    assert relative_difference({"a": np.zeros(2)}, {"a": np.zeros(2)}) == 0
    assert np.isnan(relative_difference({"a": np.array([np.nan])}, {"a": np.ones(1)}))


def test_relative_difference_does_not_lose_a_nan() -> None:
    reference = {"a": np.array([1.0, -4.0]), "b": np.array([10.0])}
    assert np.isnan(relative_difference({**reference, "b": np.array([np.nan])}, reference))
    assert np.isnan(relative_difference({**reference, "a": np.array([1.0, np.nan])}, reference))
