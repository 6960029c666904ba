"""The conformance kit: optimizers of others, made by a function, are judged or compared."""

import itertools
import re
from collections.abc import Callable, Iterator

import pytest
from tests.support.examples import ROOT, examples
from tests.support.examples import run as run_example

from penstock.core.errors import InvalidArgumentError
from penstock.parity import Row, optax_transform, register, run, torch_optimizer, unregister
from penstock.parity.backends import PEERS, choose
from penstock.parity.cases import select as select_updates
from penstock.parity.compare import Refusal
from penstock.parity.sections import SECTIONS, select
from penstock.parity.settings import SETTINGS
from penstock.parity.suite import run_sections

torch = pytest.importorskip("torch")
optax = pytest.importorskip("optax")

GUIDE = examples("parity.md")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    from penstock.parity.backends import backend_names

    before = backend_names()
    yield
    for name in set(backend_names()) - set(before):
        unregister(name)


@pytest.mark.parametrize("heading", GUIDE)
def test_the_examples_of_the_guide_run(heading: str) -> None:
    rows = run_example(heading, GUIDE[heading])["rows"]
    assert rows
    assert {row.backend for row in rows} <= {"mine", "my-transform"}


def test_the_guide_has_each_setting_with_its_hyperparameters() -> None:
    listed = re.findall(r"^\| `(\w+)` \| ([\de.-]+), ([\de.-]+) \|", (ROOT / "docs" / "parity.md").read_text(), re.MULTILINE)
    assert [(name, float(lr), float(decay)) for name, lr, decay in listed] == [(s.name, s.lr, s.weight_decay) for s in SETTINGS]


WRONG: dict[str, tuple[str, str, str]] = {
    "beta1 where beta2 should be": (
        "addcmul_(p.grad, p.grad, value=1 - beta2)",
        "addcmul_(p.grad, p.grad, value=1 - beta1)",
        "B",
    ),
    "eps inside the root": ('square.sqrt() + group["eps"]', '(square + group["eps"]).sqrt()', "B"),
    "not debiased": ('v / (1 - beta2 ** state["t"])', "v", "B"),
    "counted twice": ('state["t"] += 1', 'state["t"] += 2', "B"),
    "decay not multiplied by the learning rate": (
        ' + group["weight_decay"] * p))',
        ') + group["weight_decay"] * p)',
        "B",
    ),
    "the learning rate of the start for ever": (
        'group["lr"] * (mean',
        'state.setdefault("lr", group["lr"]) * (mean',
        "schedule",
    ),
    "one decay for all groups": (
        'group["weight_decay"] * p',
        'self.param_groups[0]["weight_decay"] * p',
        "groups",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_optimizer_is_caught(fault: str) -> None:
    right, wrong, setting = WRONG[fault]
    text = next(iter(GUIDE.values()))
    text = text[: text.index("rows = ")]
    for name, source in (("right", text), ("wrong", text.replace(right, wrong))):
        assert (name == "right") == (source == text)
        run_example(name, source.replace('"mine"', repr(name)))
        rows = run([name], f"{setting}/adamw/float32/*", steps=[1, 20])
        assert rows
        assert all(row.within for row in rows) == (name == "right")


def test_a_wrong_transform_is_caught() -> None:
    def make(h):  # decay after Adam, not before
        adam = optax.adam(h.learning_rate, b1=h.beta1, b2=h.beta2, eps=h.eps)
        return optax.chain(adam, optax.add_decayed_weights(h.weight_decay))

    register(optax_transform("wrong", {"adam": make}))
    assert not any(row.within for row in run(["wrong"], "B/adam/float32/*", steps=[1, 20]))


@pytest.mark.parametrize("setting", ["B", "schedules"])
def test_a_transform_follows_schedules_and_groups(setting: str) -> None:
    """In float64, where Optax's own arithmetic is good enough to tell."""
    register(optax_transform("theirs", {"adam": _optax_adam}, ["float64"]))
    rows = run(["theirs"], f"{setting}/adam/float64/*", steps=[1, 20])
    assert len(rows) == 2
    assert all(row.relative_error < 1e-13 for row in rows)


def _optax_adam(h):
    adam = optax.adam(h.learning_rate, b1=h.beta1, b2=h.beta2, eps=h.eps)
    return optax.chain(optax.add_decayed_weights(h.weight_decay), adam)


def test_cases_that_an_optimizer_is_not_registered_for_are_refused_with_the_reason() -> None:
    backend = torch_optimizer("mine", {"adamw": _torch_adamw}, {"bfloat16": "none"}, abilities=())
    found = list(SECTIONS[0].run([backend], select_updates(None), [1], lambda case, part: None))
    refused = {finding.reason for finding in found if isinstance(finding, Refusal)}
    assert {
        "it was registered for adamw only",
        "it was registered for bfloat16 only",
        "it updates bfloat16 parameters with compensation 'none' only",
        "the dtypes of its moments are its own choice",
        "it has no schedules (`Backend.abilities`)",
        "it has no groups (`Backend.abilities`)",
    } <= refused
    run_names = {finding.case for finding in found if isinstance(finding, Row)}
    assert all(name.split("/")[1:] == ["adamw", "bfloat16", "none", "state-default"] for name in run_names)


def _torch_adamw(params, h):
    betas = (h.beta1, h.beta2)
    return torch.optim.AdamW(params, lr=h.learning_rate, betas=betas, eps=h.eps, weight_decay=h.weight_decay)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: torch_optimizer("x", {"adagrad": _torch_adamw}),
            "make of 'x': 'adagrad' is not known; choose of stable_adamw, adamw, adam, lion, sgd",
        ),
        (lambda: torch_optimizer("x", {}), "make of 'x': nothing is named"),
        (lambda: torch_optimizer("x", {"adamw": _torch_adamw}, ["int8"]), "dtypes of 'x': 'int8' is not known"),
        (lambda: torch_optimizer("x", {"adamw": _torch_adamw}, {"bfloat16": "kahan"}), "kept=None, but 'x' compensates"),
        (
            lambda: optax_transform("x", {"adam": _optax_adam}, {"bfloat16": "kahan"}),
            "dtypes of 'x': a transform keeps no comp",
        ),
        (lambda: torch_optimizer("x", _torch_adamw), "make of 'x' must be a mapping of rules to functions"),
        (lambda: torch_optimizer("x", {"adamw": _torch_adamw}, "float32"), "dtypes of 'x' must be a list, such as ['float32']"),
        (
            lambda: torch_optimizer("x", {"adamw": _torch_adamw}, {"float16": "split"}),
            "dtypes of 'x': float16 has no compensation 'split'; choose of none, kahan",
        ),
        (
            lambda: register(torch_optimizer("x", {"adamw": _torch_adamw}, abilities="schedules")),
            "abilities='schedules' of backend 'x' must be some of ['schedules', 'groups', 'decoupled decay', 'changing betas']",
        ),
    ],
)
def test_a_registration_that_cannot_be_is_refused(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        make()
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("p.grad.zero_()", "the optimizer has changed the gradient of 'matrix'"),
        ("p.data = p.data.double()", "parameter of 'matrix' has become float64; it must stay float32"),
        ("p.data = p.data.t()", "parameter of 'matrix' has the shape [43, 17]; it must have [17, 43]"),
    ],
)
def test_an_optimizer_that_changes_gradients_or_shapes_is_a_failed_row(fault: str, sentence: str) -> None:
    class Careless(torch.optim.AdamW):
        def step(self):
            super().step()
            for p in self.param_groups[0]["params"]:
                exec(fault, {"p": p})

    def make(params, h):
        return Careless(params, lr=h.learning_rate)

    register(torch_optimizer("careless", {"adamw": make}))
    (row,) = run(["careless"], "B/adamw/float32/*", steps=[1])
    assert not row.within
    assert sentence in row.failure


def test_a_backend_without_its_methods_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="backend='mine' has no name and no unavailable"):
        register("mine")


def test_peers_are_compared_but_not_judged() -> None:
    names = [peer.name for peer in PEERS if peer.unavailable() is None]
    assert {"torch", "torch-foreach", "torch-fused", "optax"} <= set(names)
    result = run_sections(choose(["torch", "numpy", "optax"])[0], select("B/adamw/float32/*"), [1, 20])
    assert result.backends == ["numpy", "torch", "optax"]  # peers are last
    assert result.peers == {"torch", "optax"}
    assert {row.backend for row in result.rows if not row.within} == {"torch", "optax"}
    assert result.broken == []


@pytest.mark.parametrize("peer", [peer.name for peer in PEERS])
def test_a_peer_does_roughly_what_the_rules_say(peer: str) -> None:
    """A peer that is far beyond the bounds is registered with the wrong arguments."""
    (backend,) = [known for known in PEERS if known.name == peer]
    if (reason := backend.unavailable()) is not None:
        pytest.skip(reason)
    rows = list(itertools.chain(*(run([peer], f"B/*/{dtype}/*/state-default", steps=[5]) for dtype in ("float32", "float64"))))
    rows = [row for row in rows if row.quantity == "parameter"]
    rules = {row.case.split("/")[1] for row in rows}
    assert len(rules) == {"torch-fused": 5, "optimi": 5, "optax": 6}.get(peer, 7)
    assert len(rows) == 2 * len(rules)
    assert [row for row in rows if not row.ratio < 20.0] == []
