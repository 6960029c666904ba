"""What the compiled kernels do in which order: the hand-off of partial sums and mean squares, on every path of the code.

The assembly is read into a graph of instructions. A law says that one instruction cannot be reached from another without
passing a third, as "from the store of a partial sum to the arrival, a barrier"; so it holds for every run of the code, not for
those that happen on some device. `broken_laws` names what does not hold.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

ENTRY = -1


@dataclasses.dataclass
class Code:
    """Instructions, and which may follow which."""

    instructions: list[str]
    following: list[list[int]]

    def reaches(self, starts: Iterable[int], goals: Iterable[int], without: Iterable[int] = ()) -> bool:
        """Whether any of the goals may be executed after any of the starts, and none of `without` between them."""
        wanted, closed = set(goals), set(without)
        seen: set[int] = set()
        ahead = [following for start in starts for following in self._after(start)]
        while ahead:
            at = ahead.pop()
            if at in wanted:
                return True
            if at not in seen and at not in closed:
                seen.add(at)
                ahead += self.following[at]
        return False

    def _after(self, at: int) -> list[int]:
        return [0] if at == ENTRY else self.following[at]

    def find(self, pattern: str) -> list[int]:
        """The instructions in which the pattern occurs."""
        return [at for at, text in enumerate(self.instructions) if re.search(pattern, text)]


@dataclasses.dataclass
class HandOff:
    """The instructions of which the protocol consists.

    tickets: counters that give out work; relaxed.
    contributions, arrivals: a partial sum (or "not finite") is left; the counter of those who did, with release and acquire.
    sums, results, announcements: the reads of the partial sums; the store of the mean square; its release.
    waits, looks, writes: the acquire that is repeated; the reads of what was announced; stores to m, v, p, k.
    leaves, resets: the counter of programs that are done; plain stores to the counters.
    """

    barriers: list[int]
    tickets: list[int]
    contributions: list[int]
    arrivals: list[int]
    sums: list[int]
    results: list[int]
    announcements: list[int]
    waits: list[int]
    looks: list[int]
    writes: list[int]
    leaves: list[int]
    resets: list[int]


def broken_laws(assembly: str, arguments: Sequence[str]) -> list[str]:
    """The laws that a kernel with tickets breaks. `arguments`: names of its parameters in PTX, in order."""
    nvidia = ".visible .entry" in assembly
    code = ptx(assembly) if nvidia else _gcn(assembly)
    one_warp = re.search(r"\.(?:req|max)ntid 32\b", assembly) is not None
    steps, found = _nvidia(code, arguments, one_warp=one_warp) if nvidia else _amd(code)
    return found + _order(code, steps)


def _order(code: Code, do: HandOff) -> list[str]:
    """The laws of the protocol, the same for all processors."""
    entry = [ENTRY]
    one_each = {"arrivals": do.arrivals, "announcements": do.announcements, "waits": do.waits, "leaves": do.leaves}
    one_each |= {"tickets": do.tickets, "contributions": do.contributions, "results": do.results, "sums": do.sums}
    laws = {f"there are no {name}": bool(there) for name, there in one_each.items()}
    again = code.reaches
    laws |= {
        "a partial sum is stored before each arrival": not again([*entry, *do.arrivals], do.arrivals, do.contributions),
        "a barrier lies between partial sum and arrival": not again(do.contributions, do.arrivals, do.barriers),
        "partial sums are read after an arrival": not again([*entry, *do.contributions], do.sums, do.arrivals),
        "a barrier lies between arrival and sum": not again(do.arrivals, do.sums, do.barriers),
        "a mean square is stored after an arrival": not again([*entry, *do.contributions], do.results, do.arrivals),
        "a mean square is stored before it is announced": not again(
            [*entry, *do.announcements, *do.arrivals], do.announcements, do.results
        ),
        "a barrier lies between mean square and announcement": not again(do.results, do.announcements, do.barriers),
        "the sum is done before the announcement": not again(do.announcements, do.sums, do.tickets),
        "waiting is repeated": all(again([at], [at], do.tickets) for at in do.waits),
        "nothing is read or written before waiting": not again([*entry, *do.tickets], [*do.looks, *do.writes], do.waits),
        "a barrier lies between waiting and what depends on it": not again(do.waits, [*do.looks, *do.writes], do.barriers),
        "a barrier lies between work and leaving": not again([*do.waits, *do.writes], do.leaves, do.barriers),
        "nothing is done after leaving": not again(do.leaves, [*do.tickets, *do.arrivals, *do.waits, *do.announcements]),
        "counters are reset after an arrival or leaving": not again(entry, do.resets, [*do.arrivals, *do.leaves]),
        "a barrier lies between leaving and resetting": not again(do.leaves, do.resets, do.barriers),
    }
    last = [at for at in do.resets if not again([at], do.arrivals)]
    laws["tickets are reset after leaving"] = bool(last) and not again(entry, last, do.leaves)
    return [name for name, holds in laws.items() if not holds]


# -- NVIDIA -------------------------------------------------------------------------------------------------------------


def ptx(assembly: str) -> Code:
    lines = re.sub(r"//.*", "", assembly[assembly.index(".entry") :]).splitlines()
    lines = [line.strip() for line in lines[next(i for i, line in enumerate(lines) if line.strip() == "{") + 1 :]]
    end = next(i for i, line in enumerate(lines) if re.match(r"\.section|\.file|\$L__func_end", line))
    return _code(
        lines[:end],
        label=r"[\w$]+:",
        instruction=r"(@?!?[%a-z].*);",
        jump=r"(?:.*\s)?bra(?:\.uni)?\s+([\w$]+)",
        end=r"(?:bra|ret)\b",
    )


def _code(lines: Sequence[str], *, label: str, instruction: str, jump: str, end: str) -> Code:
    """What follows what, by the patterns of a language; `jump` captures where to, and nothing falls through an `end`."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in lines:
        if re.fullmatch(label, line):
            labels[line[:-1]] = len(instructions)
        elif found := re.fullmatch(instruction, line):
            instructions.append(found.group(1))
    following = []
    for at, text in enumerate(instructions):
        target = re.fullmatch(jump, text)
        after = [labels[target.group(1)]] if target else []
        if not re.match(end, text) and at + 1 < len(instructions):
            after.append(at + 1)
        following.append(after)
    return Code(instructions, following)


def _nvidia(code: Code, arguments: Sequence[str], *, one_warp: bool) -> tuple[HandOff, list[str]]:
    origins = _origins(code, arguments)

    def accesses(kind: str, *names: str) -> list[int]:
        """Instructions of a kind whose address comes from one of these arguments."""
        return [at for at in code.find(rf"\b{kind}\b.*\[") if origins[at] & set(names)]

    counting = accesses(r"(?:atom|red)\.\S+", "counters") + accesses(r"ld\.\S*acquire\S*", "counters")
    by_order = {order: [at for at in counting if f".{order}." in code.instructions[at]] for order in _ORDERS}
    both = by_order["acq_rel"]
    arrivals = [at for at in both if code.reaches([at], [at])]
    handed = ("squares", "square_after", "norm_ptr", "norms")
    flags = [] if "applied_ptr" not in arguments else ["applied_ptr"]
    known = {"items", "tensors", "partials", "counters", *handed, "applied_ptr", "numbers"}
    sums, looks = accesses(r"ld\.global\S*", "partials"), accesses(r"ld\.global\S*", *handed, *flags)
    do = HandOff(
        barriers=code.find(r"\bbar\.sync\b"),
        tickets=by_order["relaxed"],
        contributions=accesses(r"st\.global\S*", "partials", *flags),
        arrivals=arrivals,
        sums=sums,
        results=accesses(r"st\.global\S*", *handed),
        announcements=by_order["release"],
        waits=by_order["acquire"],
        looks=looks,
        writes=[at for at in code.find(r"\bst\.global") if not origins[at] & known],
        leaves=[at for at in both if at not in arrivals],
        resets=accesses(r"st\.global\S*", "counters"),
    )
    laws = {
        "every atomic has a memory order": all(any(at in found for found in by_order.values()) for at in counting),
        "every atomic is on the counters": set(code.find(r"\b(?:atom|red)\.")) <= set(counting),
        "every atomic has the scope of the device": all(".gpu." in code.instructions[at] for at in counting),
        "what is handed over is read past the first-level cache": all(
            re.search(r"\bld\.global\.cg\.", code.instructions[at]) for at in [*sums, *looks]
        ),
        "nothing is read as constant": not code.find(r"\bld\.global\S*\.nc\b"),
        "what an atomic gives reaches all threads": reaches_all_threads(code, counting, do.barriers, one_warp=one_warp),
    }
    return do, [name for name, holds in laws.items() if not holds]


_ORDERS = ("relaxed", "acquire", "release", "acq_rel")


def _origins(code: Code, arguments: Sequence[str]) -> list[set[str]]:
    """Of each access, the arguments from which its address is computed. What was loaded from memory has none of them."""
    comes_from: dict[str, set[str]] = {}
    named = re.compile(r"\[\w+_param_(\d+)")
    changed = True
    while changed:
        changed = False
        for text in code.instructions:
            operation, _, operands = re.sub(r"^@!?%\w+\s+", "", text).partition(" ")
            registers = re.findall(r"%\w+", operands)
            if not registers or operation.startswith(("st.", "bar", "bra", "red.")):
                continue
            if operation.startswith("ld.param"):
                number = int(named.search(operands).group(1))  # type: ignore[union-attr]
                source = {arguments[number]} if number < len(arguments) else set()
            elif operation.startswith(("ld.", "atom.")):
                source = set()
            else:
                source = set().union(*(comes_from.get(register, set()) for register in registers[1:]))
            known = comes_from.setdefault(registers[0], set())
            if not source <= known:
                known |= source
                changed = True
    found = []
    for text in code.instructions:
        address = re.search(r"\[\s*(%\w+)", text)
        found.append(comes_from.get(address.group(1), set()) if address else set())
    return found


_FROM_FIRST_LANE = r"shfl\.sync\.idx\.b32\s+%r\d+, %r\d+, 0, 31, -1"


def reaches_all_threads(code: Code, counting: list[int], barriers: list[int], *, one_warp: bool) -> bool:
    """Whether the thread that counts gives what it got to all others by shared memory, and none reads it too early or late.

    In a program of one warp a shuffle of its first lane to all 32 does the same.
    """
    reads = code.find(r"\bld\.shared\b")
    for at in counting:
        got = re.search(r"(%r\w+),\s*\[", code.instructions[at])
        if got is None:
            continue
        uses = [use for use in code.find(rf"{got.group(1)}\b") if use != at and not code.instructions[use].startswith("mov")]
        if one_warp:
            uses = [use for use in uses if not re.fullmatch(_FROM_FIRST_LANE, code.instructions[use])]
        if any("st.shared" not in code.instructions[use] for use in uses):
            return False
        if code.reaches(uses, reads, barriers) or code.reaches(reads, uses, barriers):
            return False
    return True


# -- AMD ----------------------------------------------------------------------------------------------------------------


def _gcn(assembly: str) -> Code:
    lines = [re.sub(r";.*", "", line).strip() for line in assembly.splitlines()]
    return _code(
        lines,
        label=r"\.L\w+:",
        instruction=r"((?:s|v|ds|global|buffer|flat)_.*[^:])",
        jump=r"s_c?branch(?!_execz)\S*\s+(\.L\w+).*",
        end=r"s_(?:branch|endpgm|setpc)",
    )


def _amd(code: Code) -> tuple[HandOff, list[str]]:
    """There a release writes the second-level cache back and waits, and an acquire waits and invalidates the caches: sc1.

    The code is read as the wave of the thread that counts runs it: no jump over what no thread of a wave has to do is taken.
    """
    text = code.instructions
    counting = code.find(r"^(?:global|flat)_(?:atomic_|load_dword .*\bsc1)")
    released = [at for at in counting if text[at - 2] == "buffer_wbl2 sc1" and text[at - 1] == "s_waitcnt vmcnt(0)"]
    acquired = [at for at in counting if text[at + 1] == "s_waitcnt vmcnt(0)" and text[at + 2] == "buffer_inv sc1"]
    both = [at for at in released if at in acquired]
    stores = code.find(r"^global_store_")
    arrivals = [at for at in both if code.reaches([at], [at])]
    announcements = [at for at in released if at not in acquired]
    tickets = [at for at in counting if at not in released and at not in acquired]

    def last_before(goals: list[int]) -> list[int]:
        return [at for at in stores if code.reaches([at], goals, [*(other for other in stores if other != at), *tickets])]

    past = code.find(r"^(?:global|buffer)_load\S* .*\bnt\b")
    contributions, results = last_before(arrivals), last_before(announcements)
    flags = [at for at in stores if code.reaches([at], contributions, [*tickets, *arrivals])]  # "not finite"
    contributions += [at for at in flags if at not in contributions]
    waits = [at for at in acquired if at not in released]
    sums = [at for at in past if code.reaches(arrivals, [at], [*tickets, *waits])]
    do = HandOff(
        barriers=code.find(r"^s_barrier"),
        tickets=tickets,
        contributions=contributions,
        arrivals=arrivals,
        sums=sums,
        results=results,
        announcements=announcements,
        waits=waits,
        looks=[at for at in past if at not in sums],
        writes=code.find(r"^buffer_store_"),
        leaves=[at for at in both if at not in arrivals],
        resets=[at for at in stores if at not in contributions and at not in results],
    )
    laws = {
        "every atomic but the tickets has fences": len(tickets) == 2,
        "the threads of a wave part in no loop but those that choose a descriptor": not code.find(r"^s_andn2_b64 exec, exec"),
        "one thread stores and counts": len({_mask(text, at) for at in [*contributions, *results, *released]}) == 1,
    }
    return do, [name for name, holds in laws.items() if not holds]


def _mask(text: list[str], at: int) -> str:
    """The mask of threads under which an instruction is executed; within it one may be chosen once more, by vcc."""
    masks = (re.match(r"s_and_saveexec_b64 \S+, (s\[\S+\])", line) for line in reversed(text[:at]))
    return next(found.group(1) for found in masks if found)
