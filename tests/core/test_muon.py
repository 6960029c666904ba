"""Muon's own laws; those that it shares with every rule are in `test_every_rule.py`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from penstock.core.array_ops import numpy_ops
from penstock.core.errors import InvalidArgumentError
from penstock.core.reference import Gradient, Reference, Settings
from penstock.core.rules import MUON
from penstock.core.rules.muon import MuonHyperparameters, orthogonalised
from penstock.jax_frontend.array_ops import jax_ops
from penstock.torch_frontend.array_ops import torch_ops

KINDS = ((numpy_ops, np.asarray), (torch_ops, torch.tensor), (jax_ops, jnp.asarray))
SHAPES = [(6, 4), (4, 6), (5, 5), (1, 7), (7, 1), (130, 70)]


def settings(**changed: Any) -> MuonHyperparameters:
    return MUON.hyperparameters(**{**MUON.defaults, **changed})


def matrix(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("shape", [*SHAPES, (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize(
    "changed",
    [{}, {"adjust_lr_fn": "match_rms_adamw"}, {"adjust_lr_fn": "spectral_unclamped"}, {"output_axis": 1}],
    ids=str,
)
def test_the_iteration_changes_singular_values_alone(shape: tuple[int, int], changed: dict[str, Any]) -> None:
    """Wide, tall, and of one row: the reference applies the polynomial to the singular values."""
    current, u = settings(ns_dtype="float32", nesterov=False, momentum=0.0, **changed), matrix(shape)
    own = {name: getattr(current, name) for name in ("ns_coefficients", "ns_steps", "adjust_lr_fn", "output_axis")}
    reference = Reference(Settings("muon", 1.0, (), 1e-7, 0.0, **own), {"p": np.zeros(shape)})
    reference.run(Gradient("p", u))
    np.testing.assert_allclose(-orthogonalised(numpy_ops, current, u), reference.tensors["p"].parameter, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_iteration_in_bfloat16_is_as_close_to_the_exact_one_as_that_of_torch(shape: tuple[int, int]) -> None:
    """An iteration rounds three matrices, each by 2^-9 of |a| + |b| + |c| where the result is a + b + c (at 1, the smallest).

    Those before the last add at most as much again: relative errors do not grow in the mean, singular values being about 1.
    """
    coefficients, u = settings().ns_coefficients, matrix(shape).astype(np.float32)
    exact, found = orthogonalised(numpy_ops, settings(ns_dtype="float32"), u.astype(np.float64)), []
    for ops, of in KINDS:
        found.append(np.asarray(orthogonalised(ops, settings(), of(u)), np.float64))
    if hasattr(torch.optim, "Muon"):
        parameter = torch.zeros(shape, requires_grad=True)
        parameter.grad = torch.tensor(u)
        torch.optim.Muon([parameter], lr=1.0, momentum=0.0).step()
        found.append(-parameter.detach().double().numpy())
    errors = [float(np.linalg.norm(each - exact) / np.linalg.norm(exact)) for each in found]
    assert max(errors) < 2 * 3 * 2.0**-9 * sum(map(abs, coefficients)) / sum(coefficients)
    fewer = orthogonalised(numpy_ops, settings(ns_steps=4), u)
    assert not float(np.linalg.norm(fewer - exact) / np.linalg.norm(exact)) < max(errors)


def test_its_matrices_are_of_any_size_that_a_float_holds() -> None:
    """A sum of squares would overflow: the step would be 0. Gradients of 0 give steps of 0, of infinities NaN."""
    u = matrix((6, 4)).astype(np.float32)
    expected = orthogonalised(numpy_ops, settings(ns_dtype="float32"), u)
    for ops, of in KINDS:
        for size in (2.0**-15, 2.0**120):
            found = np.asarray(orthogonalised(ops, settings(ns_dtype="float32"), of(u * np.float32(size))))
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        assert not np.asarray(orthogonalised(ops, settings(), of(u * 0))).any()
        infinite = of(np.where(u == u.max(), np.float32(np.inf), u))
        with np.errstate(invalid="ignore"):
            assert np.isnan(np.asarray(orthogonalised(ops, settings(), infinite))).all()


@pytest.mark.parametrize(
    ("changed", "described"),
    [
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients=.* three numbers"),
        ({"ns_coefficients": ("a", 1.0, 2.0)}, "ns_coefficients=.* three numbers"),
        ({"ns_coefficients": 3.0}, "ns_coefficients=3.0 must be three numbers"),
        ({"ns_steps": 0}, r"ns_steps=0 must be an int in \[1, 100\)"),
        ({"ns_steps": 100}, r"ns_steps=100 must be an int in \[1, 100\)"),
        ({"ns_steps": 5.0}, r"ns_steps=5.0 must be an int in \[1, 100\)"),
        ({"ns_steps": True}, r"ns_steps=True must be an int in \[1, 100\)"),
        ({"adjust_lr_fn": "adamw"}, "adjust_lr_fn='adamw' must be None, 'original', 'match_rms_adamw' or 'spectral_unclamped'"),
        ({"ns_dtype": "float16"}, "ns_dtype='float16' must be 'bfloat16' or 'float32'"),
        ({"output_axis": 2}, "output_axis=2 must be 0 or 1"),
        ({"nesterov": 1}, "nesterov=1 must be True or False"),
        ({"eps": 0.0}, "eps=0.0 is out of range"),
        ({"momentum": 1.0}, "momentum=1.0 is out of range"),
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_refused(changed: dict[str, Any], described: str) -> None:
    with pytest.raises(InvalidArgumentError, match=described):
        settings(**changed)
