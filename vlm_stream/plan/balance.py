"""What units cost, and the units of a few steps -> who gets which, and when.

Enters: lengths and patch counts with four coefficients; then costs of n units, the shape of a step, the barrier.
Leaves: [steps, micro, rank, row] of unit numbers, -1 for a filler. Costs are whole numbers, so that sums are the same
in any order on any machine: every rank computes the same without talking.

Equal parts are made by equal-size Karmarkar-Karp (differencing of tuples: each round joins the two most uneven, largest
with smallest) on the sum of the model's costs, then by swaps between the worst part and others for as long as the worst
of all shares, of either cost, goes down. What decoding videos costs comes after them, because it is paid by the
builders of a rank, ahead of its steps: swaps lower its worst shares as far as the model's costs stay as even as they
are. Where ranks wait at every micro-step, they exchange what they do at the same time until decoding is even.

The coefficients may be derived from a model's config (a dict or an object with attributes, the nested form of a
`config.json`), in units of one text token. Counted are the multiplications of matrices and of attention scores; a
backward pass costs two forward passes, one without weight gradients, none where nothing below needs a gradient.
"""

import heapq
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vlm_stream.errors import ConfigError
from vlm_stream.plan.queue import UnitTable
from vlm_stream.plan.values import BalanceConfig, CostConfig, Ints, RowPolicy, StepShape

_MEAN = 1 << 20  # the mean share of a part, in whole numbers
_CLOSE = _MEAN + _MEAN // 200  # 0.5 % above the mean: even enough to stop
_PARTNERS = 256  # items that are tried as partners in one round of swaps
_SWAPS_PER_PART = 2


def llm_cost(tokens: Ints, costs: CostConfig) -> Ints:
    """Return [n] the language model's cost of documents of that length."""
    length = tokens.astype(np.float64)
    return np.rint((length * costs.llm_linear + length * length * costs.llm_square) * costs.scale).astype(np.int64)


def vit_cost(patches: Ints, squares: npt.NDArray[np.float64], costs: CostConfig) -> Ints:
    """Return [n] the vision tower's cost of samples with that many patches."""
    linear = patches.astype(np.float64) * costs.vit_linear
    return np.rint((linear + squares * costs.vit_square) * costs.scale).astype(np.int64)


def assign(table: UnitTable, shape: StepShape, balance: BalanceConfig, policy: RowPolicy) -> Ints:
    """Assign n units to `ceil(n / units_per_step)` steps."""
    num_steps = -(-len(table) // shape.units_per_step)
    numbers = np.arange(num_steps * shape.units_per_step)
    numbers[len(table) :] = -1
    as_they_come = balance.barrier == "none" or (shape.world_size == 1 and policy == "stream")
    if as_they_come or len(numbers) == 1:
        return numbers.reshape(num_steps, shape.micro_batches, shape.world_size, shape.batch_size)
    if policy == "free" or shape.batch_size == 1:
        costs = np.stack([_padded(column, numbers) for column in (table.llm, table.vit, table.decode)])
        return numbers[_assign_items(costs, _padded(table.hashes, numbers), shape, balance)]
    if policy == "sorted":
        numbers[: len(table)] = np.argsort(-table.tokens, kind="stable")
    batches = numbers.reshape(-1, shape.batch_size)  # [c, row] micro-batches that stay together
    llm = _padded(table.llm, batches).max(axis=1) * shape.batch_size  # padding makes every row as long as the longest
    vit, decode = (_padded(column, batches).sum(axis=1) for column in (table.vit, table.decode))
    hashes = _padded(table.hashes, batches[:, 0])
    grid = _assign_items(np.stack([llm, vit, decode]), hashes, replace(shape, batch_size=1), balance)
    return batches[grid[..., 0]]


def _padded(values: npt.NDArray[np.generic], numbers: Ints) -> Ints:
    """Return the values of units, 0 for fillers."""
    out = np.zeros(numbers.shape, dtype=values.dtype)
    real = numbers >= 0
    out[real] = values[numbers[real]]
    return out


def _assign_items(costs: Ints, hashes: Ints, shape: StepShape, balance: BalanceConfig) -> Ints:
    """Assign items with costs [3, n] that fill the steps exactly; return [steps, micro, rank, row] of item numbers."""
    num_steps = len(hashes) // shape.units_per_step
    if balance.barrier == "step" and shape.micro_batches * shape.batch_size > 1:
        grid = _even_steps(costs, shape, num_steps)
    else:
        grid = _even_columns(costs[0] + costs[1], shape, num_steps)
        if costs[2].any():
            grid = _even_decoding(grid, costs)
    # In an order that has nothing to do with cost, so that no step and no run of steps is a curriculum.
    grid = grid[np.argsort(hashes[grid[:, 0, 0, 0]], kind="stable")]
    by = np.argsort(hashes[grid[:, :, 0, 0]], axis=1, kind="stable")  # [steps, micro]
    return np.take_along_axis(grid, by[:, :, None, None], axis=1)


def _even_steps(costs: Ints, shape: StepShape, num_steps: int) -> Ints:
    """For a barrier once a step: parts of equal cost, one for each rank and step; similar parts share a step."""
    num_parts = num_steps * shape.world_size
    relative = np.stack([relative_costs(each, num_parts) for each in costs])  # [3, n]
    parts = equal_parts(relative[:2].sum(axis=0), num_parts)
    parts = swap_until_even(parts, relative[:2], _SWAPS_PER_PART * num_parts)
    if costs[2].any():
        parts = swap_until_even(parts, relative, _SWAPS_PER_PART * num_parts, num_held=2)
    total = costs[0] + costs[1]
    parts = parts[np.argsort(-total[parts].sum(axis=1), kind="stable")]
    # Dearest first, given to micro-batches forth and back: the micro-batches of all ranks are similar too.
    order = np.argsort(-total[parts], axis=1, kind="stable")
    parts = np.take_along_axis(parts, order, axis=1).reshape(num_parts, shape.batch_size, shape.micro_batches)
    parts[:, 1::2] = parts[:, 1::2, ::-1]
    grid = parts.reshape(num_steps, shape.world_size, shape.batch_size, shape.micro_batches)
    return grid.transpose(0, 3, 1, 2).copy()


def _even_columns(total: Ints, shape: StepShape, num_steps: int) -> Ints:
    """For a barrier at every micro-step: what all ranks do at the same time is neighbouring in cost."""
    num_columns = num_steps * shape.micro_batches
    columns = np.argsort(-total, kind="stable").reshape(num_columns, shape.world_size * shape.batch_size)
    if shape.batch_size > 1:
        columns = np.stack([column[equal_parts(total[column], shape.world_size)] for column in columns])
    cells = columns.reshape(num_columns, shape.world_size, shape.batch_size)
    cells[1::2] = cells[1::2, ::-1]  # no rank gets the dearest of every column
    # Columns forth and back over the steps, so that steps are alike.
    spread = cells.reshape(shape.micro_batches, num_steps, shape.world_size, shape.batch_size)
    spread[1::2] = spread[1::2, ::-1]
    return spread.transpose(1, 0, 2, 3).copy()


def _even_decoding(grid: Ints, costs: Ints) -> Ints:
    """Exchange what ranks do at the same time: the dearest to decode goes to the rank that decodes least in its step.

    Where that is equal, least in all steps, and then the one with the least other work.
    """
    total, decode = ((each[grid]).sum(axis=3) for each in (costs[0] + costs[1], costs[2]))  # [steps, micro, rank]
    grid, num_ranks = grid.copy(), grid.shape[2]
    loads = np.zeros((3, num_ranks), dtype=np.int64)  # other work and decoding of all steps, decoding of this one
    peaks = decode.max(axis=2)  # [steps, micro] the dearest first: those that follow make up for it
    for step in np.argsort(-peaks.max(axis=1), kind="stable"):
        loads[2] = 0
        for micro in np.argsort(-peaks[step], kind="stable"):
            cells = np.lexsort((-total[step, micro], -decode[step, micro]))
            ranks = np.lexsort(loads)
            grid[step, micro, ranks] = grid[step, micro, cells]
            loads[0, ranks] += total[step, micro, cells]
            loads[1:, ranks] += decode[step, micro, cells]
    return grid


def relative_costs(costs: Ints, num_parts: int) -> Ints:
    """Scale costs so that the mean share of a part is `_MEAN`; all zero when there is no cost."""
    total = int(costs.sum())
    if not total:
        return np.zeros(len(costs), dtype=np.int64)
    return np.rint(costs.astype(np.float64) * (_MEAN * num_parts / total)).astype(np.int64)


def equal_parts(costs: Ints, num_parts: int) -> Ints:
    """Cut `num_parts * size` items into parts of equal size and similar cost.

    Returns:
        [num_parts, size] item numbers.

    >>> parts = equal_parts(np.array([8, 7, 6, 5, 4, 2]), 2)
    >>> sorted(np.array([8, 7, 6, 5, 4, 2])[parts].sum(axis=1).tolist())
    [16, 16]
    """
    size = len(costs) // num_parts
    tuples = np.argsort(-costs, kind="stable").reshape(size, num_parts)  # each gives one item to every part
    heap = []
    for number in range(size):
        sums = costs[tuples[number]]  # [num_parts] descending
        heap.append((int(sums[-1] - sums[0]), number, sums, tuples[number][:, None]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, sums, members = heapq.heappop(heap)
        _, _, other_sums, other_members = heapq.heappop(heap)
        sums = sums + other_sums[::-1]
        members = np.concatenate([members, other_members[::-1]], axis=1)
        order = np.argsort(-sums, kind="stable")
        sums, members = sums[order], members[order]
        heapq.heappush(heap, (int(sums[-1] - sums[0]), number, sums, members))
    return np.asarray(heap[0][3])


def swap_until_even(parts: Ints, costs: Ints, max_rounds: int, *, num_held: int = 0) -> Ints:
    """Swap items between parts to lower the largest share of any cost.

    Args:
        parts: [k, size] Item numbers.
        costs: [kinds, n] Relative costs.
        max_rounds: Most swaps.
        num_held: How many costs, the first, are not lowered and do not rise above their largest shares. Parts whose
            share of the others cannot be lowered so are passed over.
    """
    parts = parts.copy()
    num_parts, size = parts.shape
    if not num_held:
        costs = costs[costs.any(axis=1)] if costs.any() else costs[:1]
    loads = costs[:, parts].sum(axis=2)  # [kinds, k]
    lowered = loads[num_held:]
    most = np.maximum(loads[:num_held].max(axis=1, initial=0), _CLOSE)[:, None, None]
    is_stuck = np.zeros(num_parts, dtype=bool)
    num_partners = min(num_parts - 1, max(_PARTNERS // size, 16))
    for _ in range(max_rounds if num_parts > 1 else 0):
        kind, worst = divmod(int(np.argmax(np.where(is_stuck, 0, lowered))), num_parts)
        peak = int(lowered[kind, worst])
        if peak <= _CLOSE or is_stuck[worst]:
            break
        partners = np.argsort(lowered[kind], kind="stable")[:num_partners]
        partners = partners[partners != worst]
        mine = costs[:, parts[worst]]  # [kinds, size]
        theirs = costs[:, parts[partners]].reshape(len(costs), -1)  # [kinds, p * size]
        gain = mine[:, :, None] - theirs[:, None, :]  # [kinds, size, p * size] what the worst part gives away
        after_mine = loads[:, worst][:, None, None] - gain
        after_theirs = np.repeat(loads[:, partners], size, axis=1)[:, None, :] + gain
        after = np.maximum(after_mine, after_theirs)
        score = after[num_held:].max(axis=0)  # [size, p * size]
        score[(after[:num_held] > most).any(axis=0)] = peak
        best = int(np.argmin(score))
        if int(score.flat[best]) >= peak:
            if not num_held:
                break
            is_stuck[worst] = True
            continue
        slot, column = divmod(best, score.shape[1])
        partner, other_slot = int(partners[column // size]), column % size
        loads[:, worst] -= gain[:, slot, column]
        loads[:, partner] += gain[:, slot, column]
        parts[worst, slot], parts[partner, other_slot] = parts[partner, other_slot], parts[worst, slot]
    return parts


def costs_of_model(config: Any) -> CostConfig:
    """Derive the four coefficients from hidden sizes, layers and vocabulary; all of the model is trained."""
    text = _get(config, "text_config", "llm_config", "language_config", default=config)
    vision = _get(config, "vision_config", "vit_config", default=None)
    linear, square = _llm_flops(text)
    vit_linear, vit_square = _vit_flops(vision) if vision is not None else (0.0, 0.0)
    return CostConfig(
        llm_linear=1.0,
        llm_square=square / linear,
        vit_linear=vit_linear / linear,
        vit_square=vit_square / linear,
    )


def _llm_flops(text: Any) -> tuple[float, float]:
    """Return forward multiply-adds per token, and per squared token."""
    hidden = _need(text, "hidden_size", "n_embd", "d_model")
    layers = _need(text, "num_hidden_layers", "n_layer")
    heads = _need(text, "num_attention_heads", "n_head")
    head_dim = _get(text, "head_dim", default=None) or hidden // heads
    kv_heads = _get(text, "num_key_value_heads", default=None) or heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    experts = _get(text, "num_experts_per_tok", "num_experts_per_token", default=None)
    width = _get(text, "moe_intermediate_size", default=None) if experts else None
    if width:
        shared = _get(text, "shared_expert_intermediate_size", default=None)
        shared = shared or width * (_get(text, "n_shared_experts", default=None) or 0)
        mlp = 3 * hidden * (width * experts + shared)
    else:
        mlp = 3 * hidden * _need(text, "intermediate_size", "n_inner")
    head = hidden * _need(text, "vocab_size")
    # Scores and values, each heads * head_dim * length / 2 per token under a causal mask.
    return float(layers * (attention + mlp) + head), float(layers * heads * head_dim)


def _vit_flops(vision: Any) -> tuple[float, float]:
    """Return forward multiply-adds per patch, and per squared patch of an image."""
    # Where both are given, `hidden_size` is the width of the language model.
    hidden = _need(vision, "embed_dim", "hidden_size")
    layers = _need(vision, "depth", "num_hidden_layers")
    width = _get(vision, "intermediate_size", default=None) or hidden * _get(vision, "mlp_ratio", default=4)
    gated = str(_get(vision, "hidden_act", default="")) in ("silu", "swish")
    full = _get(vision, "fullatt_block_indexes", default=None)
    num_full = layers if full is None else len(full)
    linear = layers * (4 * hidden * hidden + (3 if gated else 2) * hidden * width)
    return float(linear), float(num_full * 2 * hidden)


def _get(config: Any, *names: str, default: Any) -> Any:
    for name in names:
        value = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
        if value is not None:
            return value
    return default


def _need(config: Any, *names: str) -> Any:
    value = _get(config, *names, default=None)
    if value is None:
        raise ConfigError(
            f"The model config has no '{names[0]}', so costs cannot be derived from it. Give the config of the "
            f"model (text_config and vision_config), or set the four coefficients of CostConfig by hand."
        )
    return value
