"""A train state taken apart: its parameters by name, with the arrays that belong to each, and what its transform is."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import jax
import optax

from ...core.dtypes import StateDtypes
from ...core.errors import InvalidArgumentError, RefusedError
from ...core.portable.match import Expected
from ...core.portable.names import Line, Names, each, table_of
from ...core.portable.state import PortableGroup
from ...core.rules import Rule
from ..direct import as_transformation
from ..enquiry import Answer, Settings, enquire
from ..state import PyTree
from ..train_state import TrainState, check_made_by
from .arrays import check_readable, to_host
from .optax_adam import check_adam, rule_of
from .roles import Kind, Part, parts_of, roles_of, zipped


@dataclasses.dataclass(frozen=True)
class Slot:
    """One parameter and its arrays; with a layer axis where there is one.

    Args:
        parameter: the array.
        arrays: of the optimizer state.
        biased: whether the moments are as Optax keeps them.
        count: of its updates; of each layer.
        layered: whether there is a layer axis.
    """

    parameter: Any
    arrays: dict[Kind, Any]
    biased: bool
    count: Any
    layered: bool

    @property
    def step(self) -> int:
        """The number of its updates.

        Raises:
            RefusedError: the layers have had different ones.
        """
        steps = set(to_host(self.count).reshape(-1).tolist())
        if len(steps) > 1:
            raise RefusedError(
                f"the layers of a stack have had different numbers of updates, {min(steps)} to {max(steps)}: a wrapper such as "
                "optax.apply_if_finite has dropped those of some. A file has one number for all layers of a parameter."
            )
        return int(steps.pop())

    @property
    def dtypes(self) -> StateDtypes:
        """Those of the moments."""
        return StateDtypes(*(self.arrays[kind].dtype.name for kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ)))

    @property
    def expected(self) -> Expected:
        """What a file must have for it."""
        dtype, kept = self.parameter.dtype.name, self.arrays.get(Kind.COMPENSATION)
        compensated = "none" if kept is None else "split" if kept.dtype.name == "int16" else "kahan"
        return Expected(dtype, self.parameter.shape, compensated, *((None, None) if self.biased else self.dtypes))


@dataclasses.dataclass(frozen=True)
class Opened:
    """A train state taken apart, and what its transform is.

    Args:
        parts: with the roles of their arrays.
        slots: of the parameters that an Adam updates, by name.
        rule: of all of them.
        betas: of Optax's Adam; None where there is none.
        settings: hyperparameters by the parameter's name.
    """

    parts: list[tuple[Part, PyTree]]
    slots: dict[str, Slot]
    rule: Rule
    betas: tuple[float, float] | None
    settings: dict[str, Settings]

    @classmethod
    def of(cls, tx: optax.GradientTransformation, state: TrainState, betas: Any) -> Opened:
        """A train state of tx. Raises as `export_state` says."""
        as_transformation(tx)  # raises
        check_readable(state)
        parts = []
        for part in parts_of(state):
            check_made_by(tx, part.kinds, part.state)
            roles = roles_of(part, part.state)
            _check_arrays(tx, part, roles)
            parts.append((part, roles))
        slots = {name: slot for part, roles in parts for name, slot in _slots(part, roles).items()}
        if not slots:
            raise InvalidArgumentError(
                "the optimizer state holds no moments of Adam's; there is nothing of it that a file could hold."
            )
        _check_counts(parts, slots)
        answers = {part.name(path): answer for part, _ in parts for path, answer in enquire(tx, part.kinds).items()}
        biased = {name for name, slot in slots.items() if slot.biased}
        rules = {_answer(answers, name).rule for name in slots if name not in biased}
        settings = {name: _answer(answers, name).settings for name in slots if name not in biased}
        found = None
        if biased:
            own = [part for part, _ in parts if biased & part.parameters().keys()]
            found = check_adam(tx, own, betas)
            rules.add(rule_of(tx, own))
            settings |= {name: {"beta1": found[0], "beta2": found[1]} for name in biased}
        elif betas is not None:
            raise InvalidArgumentError("betas is for optax.adam and optax.adamw; this transform knows its own. Leave it out.")
        if len(rules) > 1:
            listed = " and ".join(sorted(rule.name for rule in rules))
            raise RefusedError(f"the transform updates some parameters by {listed}: a file has one rule for all of them.")
        return cls(parts, slots, rules.pop(), found, settings)

    def table(self, names: Names) -> list[Line]:
        """From the names here to those in the file. Layers are taken apart unless `names` says something else."""
        table = table_of(names, list(self.slots))
        said = {name for line in table for name in each(line.own)}
        said |= {name for name, target in names.items() if name == target} if isinstance(names, Mapping) else set()
        for part, _ in self.parts:
            for path, leaf in jax.tree_util.tree_leaves_with_path(part.params) if part.layered else ():
                name = part.name(path)
                if name in self.slots and name not in said:
                    table.append(Line(name, tuple(part.name(path, layer=number) for number in range(leaf.shape[0]))))
        return table

    def groups(self) -> tuple[PortableGroup, ...]:
        """The parameters by their hyperparameters."""
        members: dict[Any, list[str]] = defaultdict(list)
        for name in self.slots:
            members[tuple(sorted(self.settings[name].items()))].append(name)
        return tuple(PortableGroup(dict(settings), tuple(sorted(found))) for settings, found in members.items())


def _answer(answers: dict[str, Answer], name: str) -> Answer:
    if name not in answers:
        raise RefusedError(
            f"it cannot be seen which rule updates {name!r}: something around penstock's transform does not hand its extra "
            "arguments on. Make a wrapper of your own an optax.GradientTransformationExtraArgs; give optax.MultiSteps as it is."
        )
    return answers[name]


def _slots(part: Part, roles: PyTree) -> dict[str, Slot]:
    params = part.parameters()
    arrays: dict[str, dict[Kind, Any]] = defaultdict(dict)
    counts: dict[str, Any] = {}
    biased = set()
    for role, leaf in zipped(part, roles):
        if role.kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.COMPENSATION):
            (name,) = role.names
            if role.kind in arrays[name]:
                raise RefusedError(f"two transforms keep {role.kind.value} of {name!r}; a file has a place for one.")
            arrays[name][role.kind] = leaf
            biased |= {name} if role.biased else set()
        elif role.kind is Kind.ZERO and to_host(leaf).any():
            raise RefusedError(
                f"{role.where} of the optimizer state is {to_host(leaf)}: gradients are being accumulated, and no portable "
                "state holds those. Take the last of the micro-steps first, or start from a fresh state."
            )
        elif role.kind is Kind.COUNT:
            for name in role.names:
                counts.setdefault(name, leaf)
    for name, found in list(arrays.items()):
        if Kind.EXP_AVG not in found:  # compensated, and updated by something without moments
            if to_host(found[Kind.COMPENSATION]).any():
                raise RefusedError(f"{name!r} is compensated, but no Adam updates it; a file would lose its compensation.")
            del arrays[name]
    return {name: Slot(params[name], found, name in biased, counts[name], part.layered) for name, found in arrays.items()}


def _check_arrays(tx: optax.GradientTransformation, part: Part, roles: PyTree) -> None:
    """Raise `InvalidArgumentError` where the transform keeps an array of another shape, or penstock's of another dtype: the
    state is of other parameters, or another one's."""
    made = jax.tree.leaves(jax.eval_shape(as_transformation(tx).init, part.kinds))
    layers = jax.tree.leaves(part.params)[0].shape[:1] if part.layered else ()
    for (role, leaf), own in zip(zipped(part, roles), made, strict=True):
        if leaf.shape != (*layers, *own.shape):
            of = f" of {role.names[0]!r}" if role.names else ""
            raise InvalidArgumentError(
                f"{role.where}{of} has shape {leaf.shape} in the optimizer state, and these parameters need "
                f"{(*layers, *own.shape)}; give the state that belongs to them."
            )
        if role.kind in (Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.COMPENSATION) and not role.biased and leaf.dtype != own.dtype:
            raise InvalidArgumentError(
                f"{role.where} of {role.names[0]!r} is {leaf.dtype} in the optimizer state, and the transform keeps it in "
                f"{own.dtype}; give the transform that made the state (mu_dtype, nu_dtype, compensation)."
            )


def _check_counts(parts: list[tuple[Part, PyTree]], slots: dict[str, Slot]) -> None:
    """Raise `RefusedError` where a schedule has counted otherwise than the parameters' steps will say."""
    for part, roles in parts:
        for role, leaf in zipped(part, roles):
            if role.kind is not Kind.COUNT:
                continue
            counted = set(to_host(leaf).reshape(-1).tolist())
            for name in role.names:
                if counted != {slots[name].step}:
                    raise RefusedError(
                        f"{role.where} of the optimizer state is {sorted(counted)[0]}, but {name!r} has had {slots[name].step} "
                        "updates; a file has the second number only. Set them to one number, or keep a checkpoint of JAX."
                    )
