"""The protocol of tickets as a machine of small steps: every run of a few programs over the real table of items.

A state is where each program is, what every location in memory holds, and what each program is sure to *see*: the set of
writes that happen before its next step. A release puts what the program sees into the location, together with the number;
an acquire takes what lies there. A plain read of something that the program does not see finds old bytes, and a write over
what it does not see read may come too early: faults. A program is two threads, one that counts, and one that stands for all
others and does the rest; a barrier gives each what the other sees. Steps that touch no counter depend on no other program, so
they follow at once on the one before. The steps, in the order of `kernels.update_group`:

    ticket  read  store  barrier  arrive  barrier  sum  reset_arrived  square  barrier  announce        (measure)
    ticket  wait  barrier  look  write  barrier                                                        (write)
    barrier  leave  barrier  reset                                                                     (no ticket is left)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

COUNTER, OTHERS = 0, 1
NOTHING: frozenset[Any] = frozenset()

MEASURE_STEPS = ("read", "store", "barrier", "arrive", "barrier", "sum", "reset_arrived", "square", "barrier", "announce")
WRITE_STEPS = ("wait", "barrier", "look", "write", "barrier")
LEAVE_STEPS = ("barrier", "leave", "barrier", "reset")
BY_ITSELF = {"read", "store", "barrier", "sum", "square", "look", "write"}
"""Steps on no counter."""


class Broken(AssertionError):  # noqa: N818
    """A run that does what no run may."""


class Machine:
    """The protocol over a table; `steps` and `orders` may be changed for the worse.

    Args:
        table: rows (phase, tensor, item) in ticket order, as `work.tickets` makes it.
        programs: of the launch; those that are `resident` may take steps, the others start when one has left.
        orders: "acquire", "release", both or none of the counters.

    `counted` is every counter with its order that any run touched; with one resident program there is one run.
    """

    def __init__(
        self,
        table: Sequence[Sequence[int]],
        programs: int,
        resident: int | None = None,
        *,
        measure: Sequence[str] = MEASURE_STEPS,
        write: Sequence[str] = WRITE_STEPS,
        leave: Sequence[str] = LEAVE_STEPS,
        orders: dict[str, str] | None = None,
    ) -> None:
        self.table = [tuple(int(x) for x in row) for row in table]
        self.programs, self.resident = programs, programs if resident is None else resident
        self.steps = {"measure": tuple(measure), "write": tuple(write), "leave": tuple(leave)}
        self.orders = {"arrive": "acquire release", "announce": "release", "wait": "acquire", "leave": "acquire release"}
        self.orders |= orders or {}
        self.counted: list[tuple[Any, str]] = []

    def check(self) -> int:
        """Every run of a launch; the number of states. It ends with the counters as it found them, so the next is like it.

        Raises:
            Broken: there is a run that does what no run may.
        """
        first = ((("start", 0, None, (NOTHING, NOTHING)),) * self.programs, NOTHING, NOTHING, NOTHING)
        seen, ahead = {first}, [first]
        while ahead:
            state = ahead.pop()
            following = list(self._successors(state))
            if not following:
                self._check_end(state)
            for other in following:
                if other not in seen:
                    seen.add(other)
                    ahead.append(other)
        return len(seen)

    def _check_end(self, state: Any) -> None:
        programs, counters, _, done = state
        if any(program[0] != "gone" for program in programs):
            raise Broken(f"deadlock: {[program[:3] for program in programs]}")
        left = {name for name, number in counters if number}
        if left:
            raise Broken(f"counters that are not zero at the end: {left}")
        if set(self.table) != done:
            raise Broken(f"items that were never done: {set(self.table) - done}")

    def _successors(self, state: Any) -> Any:
        programs = state[0]
        started = sum(program[0] not in ("start", "gone") for program in programs)
        fresh = False
        for index, program in enumerate(programs):
            if program[0] == "gone" or (program[0] == "start" and (fresh or started >= self.resident)):
                continue
            fresh |= program[0] == "start"  # programs that have not started are all alike
            moved = self._step(state, program)
            if moved is not None:
                mine, counters, views, done = moved
                rest = sorted([*programs[:index], mine, *programs[index + 1 :]], key=hash)  # and so are all others
                yield tuple(rest), counters, views, done

    def _step(self, state: Any, program: Any) -> Any:
        """The next step of one program: (program, counters, what lies released at them, writes so far); None: it waits."""
        _, counters, views, done = state
        numbers, released = dict(counters), dict(views)
        kind, at, item, (counting, others) = program

        def count(name: Any, order: str) -> int:
            """One more; the number before."""
            nonlocal counting
            self.counted.append((name, order))
            before = numbers.get(name, 0)
            numbers[name] = before + 1
            if "release" in order:
                released[name] = released.get(name, NOTHING) | counting
            if "acquire" in order:
                counting |= released.get(name, NOTHING)
            return before

        def go(kind: str, at: int, item: Any) -> Any:
            mine = (kind, at, item, (counting, others))
            return mine, frozenset(numbers.items()), frozenset(released.items()), done

        def finished(row: Any) -> None:
            nonlocal done
            if row in done:
                raise Broken(f"{row} is done twice")
            done |= {row}

        if kind == "start" or at == len(self.steps[kind]):  # the next ticket
            if kind == "leave":
                counting = others = NOTHING
                return go("gone", 0, None)
            ticket = count("ticket", "relaxed")
            if ticket >= len(self.table):
                return go("leave", 0, None)
            item = self.table[ticket]
            kind, at = "write" if item[0] else "measure", 0
            if self.steps[kind][0] not in BY_ITSELF:
                return go(kind, 0, item)
        while True:
            step, tensor = self.steps[kind][at], item and item[1]
            measured = [row for row in self.table if row[:2] == (0, tensor)]
            partials = {("partial", *row) for row in measured}
            at += 1
            if step == "barrier":
                counting = others = counting | others
            elif step == "read":
                others |= {("read", *item)}
            elif step == "store":
                others |= {("partial", *item)}
                finished(item)
            elif step == "arrive":
                if count(("arrived", tensor), self.orders["arrive"]) != len(measured) - 1:
                    at = len(self.steps[kind])  # not the last: nothing more to do
            elif step == "sum" and not partials <= others:
                raise Broken(f"the sum of tensor {tensor} is made without {sorted(partials - others)}")
            elif step == "reset_arrived":
                numbers["arrived", tensor] = 0
            elif step == "square":
                others |= {("square", tensor)}
            elif step == "announce":
                count(("ready", tensor), self.orders["announce"])
            elif step == "wait":
                self.counted.append((("ready", tensor), self.orders["wait"]))
                if not numbers.get(("ready", tensor), 0):
                    return None
                if "acquire" in self.orders["wait"]:
                    counting |= released.get(("ready", tensor), NOTHING)
            elif step == "look" and ("square", tensor) not in others:
                raise Broken(f"{item} is written without the mean square of its tensor")
            elif step == "write":
                if not {("read", *row) for row in measured} <= others:
                    raise Broken(f"{item} is written while its tensor may still be measured")
                finished(item)
            elif step == "leave":
                if count("left", self.orders["leave"]) != self.programs - 1:
                    at = len(self.steps[kind])
            elif step == "reset":
                if any(other[0] not in ("gone", "leave") for other in state[0]):
                    raise Broken("counters are reset while a program is at work")
                numbers = {name: number for name, number in numbers.items() if name[0] == "arrived"}
            if at == len(self.steps[kind]) or self.steps[kind][at] not in BY_ITSELF:
                return go(kind, at, item)
