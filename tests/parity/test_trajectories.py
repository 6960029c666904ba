"""The trajectories: their truth is the plain training of the float64 model, and their bounds are of the size of rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.parity.backends import NumpyBackend
from penstock.parity.compare import Refusal, Row
from penstock.parity.progress import silent
from penstock.parity.rules import FAMILY
from penstock.parity.trajectories import Trajectories, Trajectory
from penstock.parity.trajectories.cases import MODES, PROGRAMS, QUICK, QUICK_PROGRAMS, SHAPE, batches, flatten, start

torch = pytest.importorskip("torch")

from penstock.demonstration.torch_model import Transformer  # noqa: E402
from penstock.parity.backends import JaxBackend, TorchBackend, WalkBackend  # noqa: E402
from penstock.parity.trajectories import disturbance, rounding, truth  # noqa: E402
from penstock.parity.trajectories.section import run_case  # noqa: E402

EAGER = TorchBackend("eager")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small are slower on several
    yield
    torch.set_num_threads(threads)


def quick(mode: str, rule: str, dtype: str) -> Trajectory:
    return Trajectory(mode, FAMILY[rule], dtype, quick=True)


def test_every_mode_rule_and_dtype_has_a_case_and_a_quick_run_every_rule_and_exact_mode() -> None:
    section = Trajectories()
    names = {case.name for case in section.cases(quick=False)}
    assert names == {f"trajectories/{m}/{r}/{d}" for m in MODES for r in FAMILY for d in ("float64", "float32")}
    chosen = section.cases(quick=True)
    assert {case.mode for case in chosen} == set(MODES) - {"state"}
    assert {case.rule.name for case in chosen} == set(FAMILY)
    assert {case.dtype for case in chosen} == {"float64", "float32"}
    assert {f"trajectories/{part}" for part in (*QUICK, *PROGRAMS, *QUICK_PROGRAMS)} <= names
    assert set(QUICK_PROGRAMS) <= set(QUICK) & set(PROGRAMS)


def test_the_compiled_programs_have_every_mode_and_rule_in_both_dtypes() -> None:
    for position, wanted in enumerate((set(MODES), set(FAMILY), {"float64", "float32"})):
        assert {part.split("/")[position] for part in PROGRAMS} == wanted


@pytest.mark.parametrize(("mode", "rule"), [("step", "adamw"), ("clip", "adam")])
def test_the_truth_is_stock_training_in_float64(mode: str, rule: str) -> None:
    case = quick(mode, rule, "float64")
    model = Transformer(start("float64"), SHAPE)
    given = case.hyperparameters
    optimizer = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[rule](
        model.parameters(),
        lr=given.learning_rate,
        betas=(given.beta1, given.beta2),
        eps=given.eps,
        weight_decay=given.weight_decay,
    )
    clipped = 0
    for step in range(1, 21):
        model.loss(torch.from_numpy(batches().batch(step)).long()).backward()
        if case.max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
            clipped += norm.item() > case.max_norm
        optimizer.step()
        optimizer.zero_grad()
    stock, true = flatten(model.to_numpy()), truth.truth(case, 1e-6)[20]["parameter"]
    assert np.linalg.norm(stock - true) <= 1e-12 * np.linalg.norm(true)
    assert case.max_norm is None or 0 < clipped < 20  # both sides of the coefficient


def test_a_disturbance_of_twice_the_size_moves_the_trajectory_twice_as_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first order is what decides, so that the amplification may be carried over from one unit roundoff to another."""
    case = quick("step", "adamw", "float64")
    true = truth.truth(case, 0.0)[20]["parameter"]
    (moved, *_) = truth.disturbed(case)
    monkeypatch.setattr(disturbance, "AMOUNT", 2 * disturbance.AMOUNT)
    truth._values_of.cache_clear()
    (further, *_) = truth.disturbed(case)
    truth._values_of.cache_clear()
    once, twice = (values[20]["parameter"] - true for values in (moved, further))
    assert np.linalg.norm(twice - 2 * once) <= 0.02 * np.linalg.norm(twice)


def test_two_disturbed_runs_are_equally_far_from_the_truth() -> None:
    """What is measured does not hang on the random numbers: errors have many directions, and a sample stands for all."""
    case = quick("step", "adamw", "float64")
    true = truth.truth(case, 0.0)
    for steps, values in true.items():
        for quantity, value in values.items():
            one, other = (float(np.linalg.norm(sample[steps][quantity] - value)) for sample in truth.disturbed(case))
            assert 0.5 < one / other < 2.0


@pytest.mark.parametrize("part", QUICK)
def test_the_torch_frontend_is_within_bounds_that_are_of_the_size_of_rounding(part: str) -> None:
    rows = run_case(EAGER, quick(*part.split("/")))
    assert [row.steps for row in rows] == [1] * 3 + [20] * 3
    assert all(row.within for row in rows)
    assert all(row.relative_error > row.relative_bound / 2000 for row in rows if row.steps == 20)


@pytest.mark.parametrize(
    ("backend", "part"), [(WalkBackend(), "release/stable_adamw/float32"), (JaxBackend(), "clip/stable_adamw/float32")]
)
def test_the_jax_frontend_is_within_its_bounds(backend: JaxBackend, part: str) -> None:
    pytest.importorskip("jax")
    case = quick(*part.split("/"))
    assert backend.refuses_trajectory(dataclasses.replace(case, quick=False)) is None
    rows = run_case(backend, case)
    assert len(rows) == 6
    assert all(row.within for row in rows)


@pytest.mark.parametrize(
    "change",
    [
        {"beta1": 0.899},
        {"beta2": 0.9985},
        {"weight_decay": 0.04},
        {"learning_rate": 1.002e-3},
        {"eps": 2e-8},
    ],
    ids=lambda change: next(iter(change)),
)
def test_hyperparameters_a_little_off_break_a_bound(change: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    correct = Trajectory.hyperparameters.fget
    assert correct is not None
    wrong = property(lambda case: dataclasses.replace(correct(case), **change))
    monkeypatch.setattr(Trajectory, "hyperparameters", wrong)
    rows = run_case(EAGER, quick("step", "adamw", "float32"))
    assert not all(row.within for row in rows if row.quantity != "exp_avg_sq")


def test_a_micro_batch_that_is_left_out_breaks_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    case = quick("hold", "adamw", "float32")
    correct = Trajectory.parts
    rounding.bounds(case)
    monkeypatch.setattr(Trajectory, "parts", lambda case, batch: correct(case, batch)[1:])
    assert not any(row.within for row in run_case(EAGER, case))


def test_an_error_is_a_broken_row_and_a_backend_without_models_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = quick("step", "adamw", "float64")
    found = list(Trajectories().run([NumpyBackend()], [case], (1,), silent))
    assert [(finding.case, finding.backend) for finding in found if isinstance(finding, Refusal)] == [(case.name, "numpy")]
    assert len(found) == 1

    def breaks(backend: TorchBackend, case: Trajectory) -> None:
        raise ArithmeticError("no numbers")

    monkeypatch.setattr(TorchBackend, "start_trajectory", breaks)
    rows = [finding for finding in Trajectories().run([EAGER], [case], (1,), silent) if isinstance(finding, Row)]
    assert [row.failure for row in rows] == ["step 0: ArithmeticError: no numbers"] * 2
