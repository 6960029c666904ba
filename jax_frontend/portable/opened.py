"""The parameters of a train state by name, with the arrays that belong to each, and the rules and settings of its transform."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np
import optax

from ...core.codings import EIGHT_BIT
from ...core.compensation import resolve
from ...core.errors import InvalidArgumentError, RefusedError
from ...core.portable.bias import Decays, decays_of
from ...core.portable.match import Expected
from ...core.portable.names import Line, Names, each, table_of
from ...core.portable.state import PortableGroup, scale_name
from ...core.rules import Rule
from ..arguments import Settings, settings_of
from ..direct import as_transformation, sources_of
from ..records import Source
from ..state import PyTree
from ..train_state import TrainState, check_made_by
from .arrays import check_readable, to_host
from .optax_adam import Declared, check_decays, declared
from .roles import Kind, Part, parts_of, roles_of, zipped


@dataclasses.dataclass(frozen=True)
class Slot:
    """One parameter and the arrays of the optimizer state that belong to it; all with a layer axis where `layered`."""

    parameter: Any
    fields: dict[str, Any]  # of its rule, by name; codes, and their scales by `scale_name`
    compensation: Any  # or None
    random_key: Any  # or None
    betas_kept: dict[str, Any]  # in the state, by core's names: what the fields are debiased by
    biased: bool  # the fields are those of Optax's Adam
    count: Any  # number of updates; of each layer
    layered: bool
    stochastic: bool = False  # the parameter is rounded stochastically

    @property
    def step(self) -> int:
        """Number of updates of the parameter.

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
    def betas(self) -> dict[str, float]:
        """The betas that its fields are debiased by, by the names of a portable state; empty where they are constant.

        Raises:
            RefusedError: the layers have different ones.
        """
        found = {}
        for name, array in self.betas_kept.items():
            values = set(to_host(array).reshape(-1).tolist())
            if len(values) > 1:
                raise RefusedError(
                    f"the moments of the layers of a stack are debiased under different {name}, {min(values)} to "
                    f"{max(values)}: a wrapper such as optax.apply_if_finite has dropped updates of some. A file has one "
                    "number for all layers of a parameter."
                )
            found[name] = float(values.pop())
        return found

    @property
    def random_keys(self) -> tuple[int, ...]:
        """The keys of its random bits: one, or one for each layer; none without stochastic rounding."""
        return () if self.random_key is None else tuple(to_host(self.random_key).reshape(-1).tolist())

    def dtypes(self, rule: Rule) -> dict[str, str]:
        """Dtypes of the fields of its rule, by name, as `core.codings.state_dtypes` has them."""
        names = (field.name for field in rule.fields)
        return {name: EIGHT_BIT if scale_name(name) in self.fields else self.fields[name].dtype.name for name in names}

    def expected(self, rule: Rule) -> Expected:
        """The rule, shape, dtypes and compensation that a file must have for the parameter."""
        dtype, kept = self.parameter.dtype.name, self.compensation
        uncompensated = "stochastic" if self.stochastic else "none"
        kinds = {"int16": "split", "int8": "split8"}
        compensated = uncompensated if kept is None else kinds.get(kept.dtype.name, "kahan")
        dtypes = self.dtypes(rule)
        kept_fields = dict.fromkeys(dtypes) if self.biased else dtypes
        return Expected(rule, dtype, self.parameter.shape, compensated, kept_fields, layered=self.layered)


@dataclasses.dataclass(frozen=True)
class Opened:
    """A train state by parameter, and the rules and settings of its transform."""

    parts: list[tuple[Part, PyTree]]  # with the roles of their arrays
    slots: dict[str, Slot]  # of the parameters that rules update, by name
    rules: dict[str, Rule]  # by name of the parameter
    betas: Decays | None  # of Optax's Adam; None where there is none
    settings: dict[str, Settings]  # hyperparameters by name of the parameter

    @classmethod
    def of(cls, tx: optax.GradientTransformation, state: TrainState, rule: Any, betas: Any) -> Opened:
        """Open a train state of tx. Raises as `export_state` says."""
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
            raise InvalidArgumentError("the optimizer state has no fields of a rule; a file can hold nothing of it.")
        _check_counts(parts, slots)
        biased = {name for name, slot in slots.items() if slot.biased}
        sources = _sources(tx, [part for part, _ in parts], [name for name in slots if name not in biased])
        rules = {name: source.arguments.rule for name, source in sources.items()}
        settings: dict[str, Settings] = {
            n: {**settings_of(source.arguments, source.decays), **slots[n].betas} for n, source in sources.items()
        }
        given: Declared | None = None
        if biased:
            given = declared(rule, betas)
            check_decays(tx, [part for part, _ in parts if biased & part.parameters().keys()], given.betas)
            rules |= dict.fromkeys(biased, given.rule)
            settings |= {name: {"beta1": given.betas[0], "beta2": given.betas[1]} for name in biased}
        elif rule is not None or betas is not None:
            raise InvalidArgumentError(
                "rule and betas are for optax.adam and optax.adamw; this transform tells its own. Leave them out."
            )
        for name, source in sources.items():
            rounding = resolve(source.arguments.compensation, slots[name].parameter.dtype.name)
            slots[name] = dataclasses.replace(slots[name], stochastic=rounding == "stochastic")
        return cls(parts, slots, rules, None if given is None else given.betas, settings)

    def table(self, names: Names) -> list[Line]:
        """Return the table from names here to names in the file. Layers are split unless `names` says something else."""
        table = table_of(names, list(self.slots))
        named = {name for line in table for name in each(line.own)}
        named |= {name for name, target in names.items() if name == target} if isinstance(names, Mapping) else set()
        for part, _ in self.parts:
            for path, leaf in jax.tree_util.tree_leaves_with_path(part.params) if part.layered else ():
                name = part.name(path)
                if name in self.slots and name not in named:
                    table.append(Line(name, tuple(part.name(path, layer=number) for number in range(leaf.shape[0]))))
        return table

    def decays_after_import(self, in_file: Mapping[str, Decays | None]) -> dict[str, Decays | None]:
        """Return the betas that the fields are debiased by after an import, by name; None where they are not known.

        Constant betas stay. Those that the state keeps become the file's, in their dtype: of the first parameter that has them.
        """
        own = {name: dict(self.settings[name]) for name in self.slots}
        for part, roles in self.parts:
            for role, leaf in zipped(part, roles):
                if role.kind is Kind.BETA and (given := in_file[role.names[0]]) is not None:
                    beta = float(np.asarray(beta_in(self.rules[role.names[0]], given, role.field), leaf.dtype))
                    for name in role.names:
                        own[name][role.field] = beta
        return {name: decays_of(self.rules[name], settings) for name, settings in own.items()}

    def groups(self) -> tuple[PortableGroup, ...]:
        """Return the parameters grouped by their rules and hyperparameters."""
        members: dict[Any, list[str]] = defaultdict(list)
        for name in self.slots:
            members[self.rules[name].name, tuple(sorted(self.settings[name].items()))].append(name)
        return tuple(PortableGroup(rule, dict(settings), tuple(sorted(found))) for (rule, settings), found in members.items())


def beta_in(rule: Rule, decays: Decays, name: str) -> float | None:
    """Return the beta of this name among the decays of a rule's fields."""
    return next(decay for field, decay in zip(rule.fields, decays, strict=True) if field.beta == name)


def _sources(tx: Any, parts: list[Part], names: Collection[str]) -> dict[str, Source]:
    """Return the penstock transforms that update these parameters, by name; nothing is computed.

    Raises:
        RefusedError: one of these parameters has none.
    """
    found = {part.name(path): source for part in parts for path, source in sources_of(tx, part.kinds).items()}
    for name in names:
        if name not in found:
            raise RefusedError(
                f"the rule that updates {name!r} is unknown: a wrapper around penstock's transform does not pass extra "
                "arguments on. Make it an optax.GradientTransformationExtraArgs; give optax.MultiSteps as it is."
            )
    return {name: found[name] for name in names}


def _slots(part: Part, roles: PyTree) -> dict[str, Slot]:
    params = part.parameters()
    arrays: dict[tuple[Kind, str], dict[str, Any]] = defaultdict(dict)  # by kind and parameter
    counts: dict[str, Any] = {}
    biased = set()
    for role, leaf in zipped(part, roles):
        if role.kind in (Kind.FIELD, Kind.COMPENSATION, Kind.KEY):
            (name,) = role.names
            if role.field in arrays[role.kind, name]:
                raise RefusedError(f"two transforms keep {role.field} of {name!r}; a file has a place for one.")
            arrays[role.kind, name][role.field] = leaf
            biased |= {name} if role.biased else set()
        elif role.kind is Kind.ZERO and to_host(leaf).any():
            raise RefusedError(
                f"{role.where} of the optimizer state is {to_host(leaf)}: gradients are being accumulated, which a "
                "portable state cannot hold. Take the last of the micro-steps first, or start from a fresh state."
            )
        elif role.kind is Kind.BETA:
            for name in role.names:
                arrays[Kind.BETA, name][role.field] = leaf
        elif role.kind is Kind.COUNT:
            for name in role.names:
                counts.setdefault(name, leaf)
    slots = {}
    for name, parameter in params.items():
        fields, kept = arrays[Kind.FIELD, name], arrays[Kind.COMPENSATION, name].get("compensation")
        if name in counts:  # a rule updates it
            betas = arrays[Kind.BETA, name]
            key = arrays[Kind.KEY, name].get("random_keys")
            slots[name] = Slot(parameter, fields, kept, key, betas, name in biased, counts[name], part.layered)
        elif kept is not None and to_host(kept).any():  # compensated, and updated by something else
            raise RefusedError(f"{name!r} is compensated, but no rule updates it; a file would lose its compensation.")
    return slots


def _check_arrays(tx: optax.GradientTransformation, part: Part, roles: PyTree) -> None:
    """Raise `InvalidArgumentError` for an array of another shape, or of penstock's of another dtype, than tx.init makes."""
    made = jax.tree.leaves(jax.eval_shape(as_transformation(tx).init, part.kinds))
    layers = jax.tree.leaves(part.params)[0].shape[:1] if part.layered else ()
    for (role, leaf), own in zip(zipped(part, roles), made, strict=True):
        if leaf.shape != (*layers, *own.shape):
            of = f" of {role.names[0]!r}" if role.names else ""
            raise InvalidArgumentError(
                f"{role.where}{of} has shape {leaf.shape} in the optimizer state, and these parameters need "
                f"{(*layers, *own.shape)}; give the state that belongs to them."
            )
        if role.kind in (Kind.FIELD, Kind.COMPENSATION) and not role.biased and leaf.dtype != own.dtype:
            raise InvalidArgumentError(
                f"{role.where} of {role.names[0]!r} is {leaf.dtype} in the optimizer state, and the transform keeps it in "
                f"{own.dtype}; give the transform that made the state (mu_dtype, nu_dtype, compensation)."
            )


def _check_counts(parts: list[tuple[Part, PyTree]], slots: dict[str, Slot]) -> None:
    """Raise `RefusedError` where the count of a schedule differs from the numbers of updates of its parameters."""
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
