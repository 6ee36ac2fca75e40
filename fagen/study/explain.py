"""A plan explained: what was derived, what was chosen among what, and the arithmetic behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from fagen.derive.equations import equations
from fagen.derive.intervals import RangePlan
from fagen.derive.walk import Note
from fagen.ir import graph as ir
from fagen.ir.graph import TRUE, Axis, Input
from fagen.ir.show import join_heads, length_name, show
from fagen.plan.arch import FAMILIES, Arch, arch_for
from fagen.plan.cost import Cost, cost_of, live_parts, peak_buffer_bytes, tiles_of
from fagen.plan.parts import shares_of, with_parts
from fagen.plan.plan import STORAGE_BYTES, KernelPlan, Plan
from fagen.plan.profile import stage_roots
from fagen.plan.tiling import representative_lengths
from fagen.run.build import Resources
from fagen.run.tuned import Tuned

_MOST_UNFIT = 3
_WIDTH = 108
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def explain(
    plan: Plan,
    lengths: Mapping[Axis, int] | None = None,
    measured: float | None = None,
    tuned: Iterable[Tuned] = (),
    notes: Sequence[Note] = (),
    built: Mapping[str, Resources] | None = None,
) -> str:
    """What ``plan`` does and why, as text.

    ``lengths`` are those of axes (others as they stand for the plan's class), ``measured`` seconds of a run,
    ``tuned`` what measurements on GPUs say of the plan's problem, ``notes`` how the program was
    differentiated, ``built`` what a compiler says that each kernel takes.
    """
    arch = arch_for(plan.problem.arch)
    sizes = plan_lengths(plan, lengths or {})
    costs = [cost_of(kernel, plan.problem, sizes, arch, live_parts(kernel, sizes)) for kernel in plan.kernels]
    lines = [_headline(plan, arch), _lengths_line(sizes), ""]
    if plan.problem.graph.direction == "backward":
        lines += [
            "Equations",
            *(part for line in equations(plan.problem.graph) for part in _wrapped(line, "  ")),
            "",
        ]
    lines += _derivation((*notes, *plan.notes))
    for kernel, cost in zip(plan.kernels, costs, strict=True):
        lines += ["", *_kernel(kernel, cost, sizes, arch, (built or {}).get(kernel.function))]
    if len(plan.kernels) > 1:
        lines += ["", *_together(plan, costs, sizes)]
    if measured is not None:
        predicted = sum(cost.seconds for cost in costs)
        lines.append(f"measured {seconds(measured)}, {measured / predicted:.2f} of what was predicted")
    lines += [line for each in tuned for line in _wrapped(_tuned(each), "")]
    lines += ["", *_others(plan)]
    return "\n".join(lines) + "\n"


def plan_lengths(plan: Plan, lengths: Mapping[Axis, int]) -> dict[Axis, int]:
    """A length for every axis of ``plan``: as given, or one that stands for the class it was planned for."""
    nodes = ir.walk(root for kernel in plan.kernels for root in stage_roots(kernel.stage))
    axes = ir.sort_axes(axis for node in nodes for axis in node.axes)
    known = representative_lengths(plan.problem, axes) | dict(lengths) | dict(plan.problem.sizes)
    return with_parts(known, shares_of(plan.kernels), arch_for(plan.problem.arch).multiprocessors)


def quantity(value: float, unit: str) -> str:
    """A number with a prefix: ``134.2 MB``."""
    for factor, prefix in _UNITS:
        if value >= factor:
            return f"{value / factor:,.1f} {prefix}{unit}"
    return f"{value:,.0f} {unit}"


def seconds(value: float) -> str:
    """A time in the unit that suits it."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= factor:
            return f"{value / factor:,.3g} {unit}"
    return f"{value * 1e6:,.3g} us"


# --------------------------------------------------------------------------------------------------- parts


def _headline(plan: Plan, arch: Arch) -> str:
    storage = next((s for s in plan.problem.inputs if s in ("fp32", "fp16", "bf16")), "fp32")
    count = len(plan.kernels)
    kernels = "one kernel" if count == 1 else f"{count} kernels"
    target = f" ({arch.target})" if arch.target != arch.name and not arch.emulated else ""
    graph, family = plan.problem.graph, plan.family
    return f"{graph.name}, {graph.direction}, {storage}: {kernels} of family {family} for {arch.name}{target}"


def _lengths_line(sizes: Mapping[Axis, int]) -> str:
    return "at " + ", ".join(f"{length_name(axis)} {size:,}" for axis, size in sizes.items())


def _derivation(notes: Sequence[Note]) -> list[str]:
    if not notes:
        return ["Derived: nothing to decide."]
    lines = ["Derived"]
    for note in notes:
        lines += _wrapped(f"{note.rule}: {note.text}", "  ")
    return lines


def _kernel(
    kernel: KernelPlan, cost: Cost, sizes: Mapping[Axis, int], arch: Arch, used: Resources | None
) -> list[str]:
    tiles = tiles_of(kernel)
    lines = [f"Kernel {kernel.function}: {kernel.schedule}, tiles {tiles}"]
    lines += _wrapped(_ownership(kernel), "  ")
    lines.append(
        f"  {cost.blocks:,} blocks, {cost.resident_blocks} on a multiprocessor at a time: "
        f"{cost.shared_bytes:,} of {arch.shared_block_bytes:,} bytes of shared memory, "
        f"about {cost.registers} registers a thread"
    )
    if used is not None:
        lines.append(f"  built, it takes {used.registers} registers a thread{_in_memory(used)}")
    for bounds, tile_count in zip(kernel.ranges, cost.walk_tiles, strict=False):
        if bounds is not None:
            parts = sizes[kernel.stage.parts] if kernel.stage.parts else 1
            walked = tile_count * kernel.block_walk * parts
            lines += _mask(bounds, min(walked / max(sizes[bounds.walk_axis], 1), 1.0))
    lines += ["", *_tile_table(cost), "", *_traffic_table(kernel, cost, arch)]
    rate = ""
    if cost.flops:
        intensity = f"{cost.flops / max(cost.memory_bytes, 1):,.1f} flops a byte of device memory"
        rate = f" ({quantity(cost.flops / cost.seconds, 'flop/s')}, {intensity})"
    lines.append(f"  predicted {seconds(cost.seconds)}{rate}, bound by {cost.bound}")
    return lines


def _in_memory(used: Resources) -> str:
    """What a thread keeps in memory, for want of registers or for a function that it calls."""
    if used.spilled_bytes:
        return f"; {used.spilled_bytes} bytes of them are spilled, few enough to be faster than smaller tiles"
    return f" and {used.stack_bytes} bytes of stack" if used.stack_bytes else ""


def _ownership(kernel: KernelPlan) -> str:
    stage = kernel.stage
    at = ", ".join(join_heads(kernel.grid_axes))
    owned = f"{kernel.positions} of {kernel.tile_axis}" if kernel.tile_axis else "one row"
    if kernel.group > 1:
        owned += f" of {kernel.group} heads"
    if kernel.feature_axis:
        owned += f" x {kernel.block_feature} of {kernel.feature_axis}"
    text = f"a block owns {owned}" + (f" at one {at}" if at else "")
    times = f", {len(stage.walks)} times" if len(stage.walks) > 1 else ""
    made = [symbol for walk in stage.walks for symbol in _made(walk.products, walk.states)]
    makes = f"; makes {', '.join(dict.fromkeys(made))}" if made else ""
    added = [partial.name for walk in stage.walks for partial in walk.partials]
    makes += f", adds to {', '.join(added)}" if added else ""
    turn = f" in turn with each other {stage.parts}" if stage.parts is not None else ""
    return f"{text} and walks {stage.walk}{times}, {kernel.block_walk} at a time{turn}{makes}"


def _made(products: Iterable[object], states: Iterable[object]) -> list[str]:
    return [part.symbol.name for part in (*products, *states) if hasattr(part, "symbol")]


def _mask(bounds: RangePlan, part: float) -> list[str]:
    lines = _wrapped(f"only where {show(bounds.guard)}:", "  ")
    for number, each in enumerate(bounds.ranges):
        when = f" if {show(each.when)}" if each.when is not TRUE else ""
        also = "and " if number else ""
        lines += _wrapped(
            f"{also}{bounds.walk_axis} from {show(each.begin)} to {show(each.end)}{when}", "    "
        )
    if not bounds.ranges:
        lines.append("    nowhere")
    tables = sorted({node.name for node in ir.walk([bounds.guard]) if isinstance(node, Input)})
    if tables:
        lines.append(f"    how many tiles that leaves depends on {', '.join(tables)}; all are counted here")
    else:
        lines.append(f"    {100 * part:.1f} % of the tiles are visited")
    return lines


def _tile_table(cost: Cost) -> list[str]:
    lines = ["  cycles for a tile   products   all instructions   exp unit   shared memory   with latency"]
    for number, tile in enumerate(cost.tiles):
        name = f"walk {number + 1}" if len(cost.tiles) > 1 else ""
        lines.append(
            f"  {name:<17}{tile.fma_cycles:>11,.0f}{tile.issue_cycles:>19,.0f}{tile.exp_cycles:>11,.0f}"
            f"{tile.shared_cycles:>16,.0f}{tile.cycles:>15,.0f}"
        )
    return lines


def _traffic_table(kernel: KernelPlan, cost: Cost, arch: Arch) -> list[str]:
    fma_per_cycle = {"fragments": arch.mma_fma_per_cycle, "warpgroups": arch.tensor16_fma_per_cycle}.get(
        kernel.tiling, arch.fp32_fma_per_cycle
    )
    rows = [
        ("multiply-adds", cost.flops, 2 * arch.multiprocessors * fma_per_cycle * arch.clock_hz, None),
        (
            "shared memory",
            cost.shared_traffic_bytes,
            arch.multiprocessors * arch.shared_bytes_per_cycle * arch.clock_hz,
            None,
        ),
        ("L2 (asked by blocks)", cost.asked_bytes, arch.l2_bytes_per_second, None),
        (
            "device memory",
            cost.memory_bytes,
            arch.memory_bytes_per_second,
            cost.least_read_bytes + cost.write_bytes,
        ),
    ]
    lines = ["  level                      work       at its rate   least"]
    for name, work, rate, least in rows:
        if not work:
            continue
        unit = "flop" if name == "multiply-adds" else "B"
        lines.append(
            f"  {name:<20}{quantity(work, unit):>15}{seconds(work / rate):>15}"
            + (f"   {quantity(least, 'B')}" if least is not None else "")
        )
    special = arch.multiprocessors * arch.exp_per_cycle * arch.clock_hz
    if cost.exp_ops:
        lines.append(
            f"  {'exp unit':<20}{quantity(cost.exp_ops, 'op'):>15}{seconds(cost.exp_ops / special):>15}"
        )
    return lines


def _together(plan: Plan, costs: list[Cost], sizes: Mapping[Axis, int]) -> list[str]:
    lines = [
        f"Together: predicted {seconds(sum(cost.seconds for cost in costs))}, "
        f"{quantity(sum(cost.memory_bytes for cost in costs), 'B')} of device memory moved"
    ]
    for buffer in plan.buffers:
        size = prod(buffer.shape(sizes)) * STORAGE_BYTES[buffer.storage]
        axes = ", ".join(join_heads(buffer.axes))
        lines.append(f"  {buffer.name}[{axes}] lies between kernels: {quantity(size, 'B')}")
    if plan.buffers:
        lines.append(f"  at most {quantity(peak_buffer_bytes(plan, sizes), 'B')} at a time")
    return lines


def _tuned(tuned: Tuned) -> str:
    told = f"Tuned on {tuned.gpu}: of {tuned.measured} plans measured there"
    if tuned.finalist is None:
        return f"{told} the model's best is the fastest, and is taken"
    return f"{told} {tuned.tiles} is taken, {tuned.gain:.2f} times as fast as the model's best"


def _others(plan: Plan) -> list[str]:
    built = [r for r in plan.rejected if r.built]
    slower = [r for r in plan.rejected if "predicted" in r.reason]
    unfit = [r for r in plan.rejected if not r.built and "predicted" not in r.reason]
    refused = {who: r for r in unfit[::-1] if (who := _of_a_family(r.candidate))}
    unfit = [r for r in unfit if not _of_a_family(r.candidate)]
    lines = ["Built before it, and rejected"] if built else []
    for r in built:
        lines += _wrapped(f"{r.candidate}: {r.reason}", "  ")
    lines += [""] if built and slower else []
    lines += ["Runners-up"] if slower else []
    lines += [f"  {r.candidate}: {r.reason}" for r in slower]
    lines += ["", "Families that come first, and why not"] if refused else []
    for r in [*refused.values()][::-1]:
        lines += _wrapped(f"{r.candidate}: {r.reason}", "  ")
    if unfit:
        lines += ["", f"{len(unfit)} candidates do not fit, such as"]
        lines += [f"  {r.candidate}: {r.reason}" for r in unfit[:_MOST_UNFIT]]
    return lines


def _of_a_family(candidate: str) -> str:
    """Up to the family's name, where a candidate is one, or tiles of one that was tried in vain."""
    for family in FAMILIES:
        before, name, _ = candidate.partition(family)
        if name:
            return before + name
    return ""


def _wrapped(text: str, indent: str) -> list[str]:
    """``text`` in lines of at most `_WIDTH` columns, broken at spaces, all but the first indented further."""
    lines, line = [], indent
    for word in text.split(" "):
        if len(line) + len(word) > _WIDTH and line.strip():
            lines.append(line.rstrip())
            line = indent + "    "
        line += word + " "
    return [*lines, line.rstrip()]
