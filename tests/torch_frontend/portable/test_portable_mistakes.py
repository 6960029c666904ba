"""Mistakes at an import into PyTorch that would train on with wrong numbers, or whose error has to say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.torch_models import batches, layers, snapshot, train, unchanged
from torch import nn

from penstock.core.errors import InvalidArgumentError, RefusedError
from penstock.core.portable.names import Transposed
from penstock.torch_frontend import StableAdamW, export_state, import_state


def trained(dtype: torch.dtype, seed: int = 0, **arguments) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = layers(2, dtype=dtype, seed=seed)
    optimizer = StableAdamW(model.parameters(), lr=1e-2, **arguments)
    train(model, optimizer, batches(2, dtype=dtype))
    return model, optimizer


@pytest.mark.parametrize("compensation", ["split", "kahan"])
def test_a_compensation_is_refused_for_other_parameters(tmp_path: Path, compensation: str) -> None:
    path = tmp_path / "state"
    model, optimizer = trained(torch.bfloat16, compensation=compensation)
    export_state(path, optimizer, model, parameters=True)
    again, fresh = trained(torch.bfloat16, seed=1, compensation=compensation)
    before = snapshot(again, fresh)
    with pytest.raises(InvalidArgumentError, match=r"'0.0.weight' is not that of the state, .*parameters=True.*checkpoint"):
        import_state(path, fresh, again)
    assert unchanged(before, snapshot(again, fresh))
    again.load_state_dict(model.state_dict())
    import_state(path, fresh, again)
    assert unchanged(snapshot(model, optimizer), snapshot(again, fresh))


def test_uncompensated_parameters_keep_the_callers_values(tmp_path: Path) -> None:
    """Moments beside other values (an average of the parameters) are possible, and exact."""
    path = tmp_path / "state"
    model, optimizer = trained(torch.float32)
    export_state(path, optimizer, model, parameters=True)
    again, fresh = trained(torch.float32, seed=1)
    kept = again.state_dict()["0.0.weight"].clone()
    import_state(path, fresh, again)
    assert torch.equal(kept, again.state_dict()["0.0.weight"])
    moments = [x.state[m[0][0].weight]["debiased_exp_avg"] for x, m in ((fresh, again), (optimizer, model))]
    assert torch.equal(*moments)


def test_a_missing_name_is_reported_as_both_sides_call_it(tmp_path: Path) -> None:
    path = tmp_path / "state"
    model, optimizer = trained(torch.float32)
    export_state(path, optimizer, model)
    with pytest.raises(InvalidArgumentError, match=r"lacks 'h.0.weight' \(here '0.0.weight'\); it has '0.0.\w+', .*names="):
        import_state(path, optimizer, model, names={"0.0.weight": "h.0.weight"})
    with pytest.raises(InvalidArgumentError, match=r"lacks 'w' \(here '0.0.weight', '1.0.weight'\)"):
        import_state(path, optimizer, model, names={("0.0.weight", "1.0.weight"): "w"})


@pytest.mark.parametrize("parameters", [False, True])
def test_a_transposed_square_matrix_is_refused(tmp_path: Path, parameters: bool) -> None:
    """Neither the shapes nor the names tell; the parameters in the file do."""
    path = tmp_path / "state"
    model, optimizer = trained(torch.float32)
    export_state(path, optimizer, model, parameters=True)
    with torch.no_grad():
        model[0][0].weight.copy_(model[0][0].weight.T.clone())
    before = snapshot(model, optimizer)
    with pytest.raises(InvalidArgumentError, match=r"'0.0.weight' is transposed in the state: .*names=: Transposed"):
        import_state(path, optimizer, model, parameters=parameters)
    assert unchanged(before, snapshot(model, optimizer))
    names = {"0.0.weight": Transposed("0.0.weight"), "1.0.weight": Transposed("1.0.weight", ())}
    import_state(path, optimizer, model, parameters=parameters, names=names)


def test_an_inconsistent_torch_optim_state_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "state"
    model = nn.Linear(3, 2)
    zeros = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2, 3), "exp_avg_sq": torch.zeros(2, 3)}
    for kept, said in (
        ({"exp_avg": torch.zeros(2, 3)}, "state of 'weight' has no 'exp_avg_sq', 'step'"),
        ({**zeros, "step": torch.tensor(1.5)}, "step of 'weight' is 1.5 in the optimizer; it must be a whole number"),
        ({**zeros, "step": torch.tensor(float("nan"))}, "step of 'weight' is nan"),
        ({**zeros, "exp_avg": torch.zeros(3)}, r"exp_avg of 'weight' has shape \(3,\)"),
    ):
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.state[model.weight] = kept
        with pytest.raises(InvalidArgumentError, match=said):
            export_state(path, optimizer, model)
    for betas in (None, (0.9,), (2.0, 0.9)):
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.param_groups[0]["betas"] = betas
        with pytest.raises(InvalidArgumentError, match="betas"):
            export_state(path, optimizer, model)
    assert not path.exists()


def test_import_is_refused_where_no_step_could_follow(tmp_path: Path) -> None:
    path = tmp_path / "state"
    model, optimizer = trained(torch.float32)
    export_state(path, optimizer, model)
    with torch.inference_mode(), pytest.raises(RefusedError, match="inference_mode"):
        import_state(path, optimizer, model)
    train(model, optimizer, batches(1))
    empty = layers(2).to("meta")
    for function in (export_state, import_state):
        with pytest.raises(InvalidArgumentError, match=r"'0.0.weight' is on the meta device"):
            function(path, StableAdamW(empty.parameters()), empty)
