"""What is measured of one loader, inside a process of its own. Each figure takes a job and returns numbers.

A figure that a loader fails at returns `{"error": ...}`; one that it has no way to do, `{"cannot": ...}`.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.loaders.base import Opening
from benchmarks.peers.loaders.ours import OurLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.peers.loaders.base import Loader

__all__ = ["FIGURES"]

Job = dict[str, Any]
Numbers = dict[str, Any]


def write(loader: Loader, job: Job) -> Numbers:
    """Write the records of a raw file with the loader's own writer."""
    from benchmarks.peers.data import read_raw
    from benchmarks.peers.lengths import length_records

    out = Path(job["out"])
    if job.get("counted") and isinstance(loader, OurLoader):
        from benchmarks.peers.work import build_real_processor

        loader.processor = str(out.with_name("processor"))
        build_real_processor().save_pretrained(loader.processor)
    records = length_records() if job["raw"] == "lengths" else read_raw(Path(job["raw"]))
    begin = time.perf_counter()
    loader.write(records, out, job["samples_per_shard"])
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return {"seconds": time.perf_counter() - begin, "bytes": size}


def read_bytes(loader: Loader, job: Job) -> Numbers:
    """1, 2. Read every sample, as bytes; a byte of each page is looked at, so that it has really been read."""
    if job["where"].startswith("s3://") and "s3" in loader.cannot:
        return {"cannot": loader.cannot["s3"]}
    _import(loader, job)
    samples = num_bytes = 0

    def use(sample: dict[str, Any]) -> None:
        nonlocal samples, num_bytes
        samples += 1
        for name, content in sample.items():
            if name != "__key__":
                num_bytes += len(content)
                sum(bytes(content[::4096]))

    cpu = time.process_time()
    ends = _time_passes(loader, job, use)
    found = {
        "samples": samples,
        "bytes": num_bytes,
        "seconds": ends[-1],
        "first": samples / len(ends) / ends[0],
        "cpu": time.process_time() - cpu,
    }
    return found | (_read_checked(loader, job, use) if job.get("checked") else {})


def _time_passes(loader: Loader, job: Job, use: Callable[[dict[str, Any]], None]) -> list[float]:
    """Use every sample, pass by pass; return the seconds after each pass."""
    begin = time.perf_counter()
    ends = []
    for _ in range(job.get("passes", 1)):
        for batch in loader.open(_opening(job)):
            for sample in batch:
                use(sample)
        ends.append(time.perf_counter() - begin)
    return ends


def _read_checked(loader: Loader, job: Job, use: Callable[[dict[str, Any]], None]) -> Numbers:
    """1. The same work for all: no byte is used that was not compared with a checksum, by the loader or behind it."""
    import crc32c

    expected: dict[str, dict[str, int]] = {}

    def learn(sample: dict[str, Any]) -> None:
        sums = {name: crc32c.crc32c(content) for name, content in sample.items() if name != "__key__"}
        expected[sample["__key__"]] = sums

    def check_and_use(sample: dict[str, Any]) -> None:
        for name, checksum in expected[sample["__key__"]].items():
            if crc32c.crc32c(sample[name]) != checksum:
                raise ValueError(f"'{name}' of sample {sample['__key__']} is not what it was in the first pass")
        use(sample)

    _time_passes(loader, job | {"passes": 1}, learn)
    ends = _time_passes(loader, job, use if loader.checks_bytes else check_and_use)
    return {"checked": len(expected) * len(ends) / ends[-1]}


def end_to_end(loader: Loader, job: Job) -> Numbers:
    """3. Decode, encode and pack for Qwen2.5-VL."""
    import torch

    from benchmarks.peers.lengths import CAPACITY
    from benchmarks.peers.work import build_real_processor, encode_members, next_fit

    torch.set_num_threads(1)
    build_real_processor()
    packs: Iterator[dict[str, Any]]
    if loader.name == "vlm_stream":
        packs = _our_packs(job, CAPACITY)
    else:
        run = loader.open(_opening(job, transform=encode_members, batch_size=4))
        packs = next_fit((sample for batch in run for sample in batch), CAPACITY)
    return _count_packs(packs, CAPACITY)


def processor_loop(_loader: Loader, job: Job) -> Numbers:
    """3, what there is to reach: the processor called in a loop over samples in memory, in one process."""
    import torch

    from benchmarks.peers.data import read_raw
    from benchmarks.peers.lengths import CAPACITY
    from benchmarks.peers.work import build_real_processor, encode_members, next_fit

    torch.set_num_threads(1)
    build_real_processor()
    members = [record.members() for record in read_raw(Path(job["raw"]))]
    return _count_packs(next_fit(map(encode_members, members), CAPACITY), CAPACITY)


def _our_packs(job: Job, capacity: int) -> Iterator[dict[str, Any]]:
    """Open our loader, as the others are opened before the clock starts."""
    from benchmarks.peers.work import build_real_processor
    from vlm_stream import StreamLoader, finish_pixels

    loader = StreamLoader(
        job["where"],
        processor=build_real_processor(),
        pack_size=capacity,
        num_workers=job["workers"],
        pixels=job.get("pixels", "full"),
        fps=2.0,
    )
    return (finish_pixels(batch) if job.get("pixels") == "compact" else batch for batch in loader)


def _count_packs(packs: Iterator[dict[str, Any]], capacity: int) -> Numbers:
    begin = time.perf_counter()
    num_packs = num_tokens = num_samples = 0
    for pack in packs:
        num_packs += 1
        num_tokens += pack["input_ids"].numel()
        starts = pack["position_ids"].reshape(-1, pack["input_ids"].shape[-1])[0]
        num_samples += int((starts == 0).sum())
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "samples": num_samples,
        "tokens": num_tokens,
        "fill": num_tokens / (num_packs * capacity),
    }


def packing(loader: Loader, job: Job) -> Numbers:
    """4. How full packs get; without packing, how much of padded batches of 8 is padding."""
    from benchmarks.peers.lengths import CAPACITY, make_planner

    if loader.name == "vlm_stream":
        from vlm_stream.plan import StepShape, plan_report

        report = plan_report(make_planner(), StepShape(world_size=1))
        return {"fill": report.fill, "padding": report.padding}
    if "packing" in loader.cannot:
        lengths = [length for batch in loader.open(_opening(job, transform=_tokens_of)) for length in batch]
        rows = [lengths[begin : begin + 8] for begin in range(0, len(lengths) - 7, 8)]
        used = sum(map(sum, rows)) / sum(len(row) * max(row) for row in rows)
        return {"cannot": loader.cannot["packing"], "padding": 1 - used}
    lengths_of = _length_by_key()
    packs = loader.own_packing(_opening(job), CAPACITY, _tokens_of)  # type: ignore[attr-defined]
    fill = sum(lengths_of[key] for pack in packs for key in pack) / (len(packs) * CAPACITY)
    return {"fill": fill, "padding": 1 - fill}


def balance(loader: Loader, job: Job) -> Numbers:
    """5. Largest over mean load of the ranks, 8 micro-batches a step; without packing, of 8 samples each."""
    from benchmarks.peers.lengths import make_planner

    ranks, micro = job["ranks"], 8
    if loader.name == "vlm_stream":
        from vlm_stream.plan import StepShape, plan_report

        shape = StepShape(world_size=ranks, micro_batches=micro)
        # Without the last step, which is not full: it is left out for all loaders.
        num_steps = plan_report(make_planner(), shape).steps - 1
        report = plan_report(make_planner(), shape, max_steps=num_steps)
        return {"llm": report.llm_imbalance_step, "vit": report.vit_imbalance_step, "steps": num_steps}
    loads = []  # of each rank: (tokens, patches) of its steps
    for rank in range(ranks):
        opening = _opening(job, transform=_load_of, rank=rank, world_size=ranks, batch_size=8 * micro)
        steps = [(sum(tokens for tokens, _ in batch), sum(p for _, p in batch)) for batch in loader.open(opening)]
        loads.append(steps)
    num_steps = min(map(len, loads)) - 1 or 1
    ratios = []
    for step in range(num_steps):
        row = [rank[step] for rank in loads]
        ratios.append([max(kind) / (sum(kind) / len(kind)) for kind in zip(*row, strict=True)])
    llm, vit = (sum(kind) / len(kind) for kind in zip(*ratios, strict=True))
    return {"llm": llm, "vit": vit, "steps": num_steps}


def stop(loader: Loader, job: Job) -> Numbers:
    """6, 7. Read a share of an epoch and save the state."""
    if "state" in loader.cannot:
        return {"cannot": loader.cannot["state"]}
    run = loader.open(_opening(job, transform=_key_and_size))
    keys: list[str] = []
    for number, batch in enumerate(run, start=1):
        keys += [key for key, _ in batch]
        if number == job["batches"]:
            break
    state = run.state()
    Path(job["state"]).write_bytes(state)
    run.close()
    return {"keys": keys, "state_bytes": len(state)}


def resume(loader: Loader, job: Job) -> Numbers:
    """6. Go on from a state, in a new process: seconds to the first batch, what is read, what comes."""
    if "state" in loader.cannot:
        return {"cannot": loader.cannot["state"]}
    _import(loader, job)
    state = Path(job["state"]).read_bytes() if job.get("state") else None
    read_before = _bytes_read()
    begin = time.perf_counter()
    run = loader.open(_opening(job, transform=_key_and_size), state)
    keys: list[str] = []
    delivered, first = 0, 0.0
    for batch in run:
        first = first or time.perf_counter() - begin
        keys += [key for key, _ in batch]
        delivered += sum(size for _, size in batch)
        if len(keys) >= job.get("limit", len(keys) + 1):  # what comes behind is another epoch
            break
    return {"keys": keys, "first": first, "read": _bytes_read() - read_before, "delivered": delivered}


def start(loader: Loader, job: Job) -> Numbers:
    """8. Seconds from opening to the first batch, shuffled."""
    _import(loader, job)
    begin = time.perf_counter()
    next(iter(loader.open(_opening(job))))
    return {"seconds": time.perf_counter() - begin}


def memory(loader: Loader, job: Job) -> Numbers:
    """9. Peak resident memory of an epoch with a large shuffle, in one process."""
    for batch in loader.open(_opening(job)):
        del batch
    # Not from getrusage: there the peak of the process that started this one counts as well.
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return {"megabytes": int(peak.split()[1]) / 1024}


def damage(loader: Loader, job: Job) -> Numbers:
    """10. Read a dataset of which one place is damaged: what comes, what comes wrong, what is said."""
    from benchmarks.peers.data import read_raw

    if job["kind"] == "header" and "damage_header" in loader.cannot:
        return {"cannot": loader.cannot["damage_header"]}
    expected = {int(record.key): _checksum(record.members()) for record in read_raw(Path(job["raw"]))}
    run = loader.open(_opening(job, transform=_key_and_checksum))
    seen: dict[int, int] = {}
    error = None
    try:
        for batch in run:
            seen.update(batch)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"[:300].replace(job["where"], "data")
    return {
        "lost": len(expected.keys() - seen.keys()),
        "wrong": sum(checksum != expected.get(key) for key, checksum in seen.items()),
        "died": error,
        "said": [note.replace(job["where"], "data") for note in run.notes()],
    }


FIGURES: dict[str, Callable[[Loader, Job], Numbers]] = {
    figure.__name__: figure
    for figure in (
        write,
        read_bytes,
        end_to_end,
        processor_loop,
        packing,
        balance,
        stop,
        resume,
        start,
        memory,
        damage,
    )
}


def _opening(job: Job, **more: Any) -> Opening:
    names = ("where", "workers", "batch_size", "shuffle", "seed", "rank", "world_size", "scratch")
    return Opening(**({name: job[name] for name in names if name in job} | more))


def _import(loader: Loader, job: Job) -> None:
    """Load the loader's modules, so that they are not part of a time: read one batch of a small dataset."""
    if warm := job.get("warm"):
        next(iter(loader.open(_opening(job | {"where": warm, "shuffle": 0, "workers": 0}))))


def _bytes_read() -> int:
    """Return the bytes that this process has read, from whatever file."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def _checksum(members: dict[str, Any]) -> int:
    """Return a checksum of the media. Text may be written in another form, and a picture that comes twice only once."""
    media = [content for name, content in members.items() if not name.startswith("__") and name != "json"]
    return sum({zlib.crc32(content) for content in media})


def _key_and_checksum(members: dict[str, Any]) -> tuple[int, int]:
    return int(members["__key__"]), _checksum(members)


def _key_and_size(members: dict[str, Any]) -> tuple[str, int]:
    return members["__key__"], sum(len(content) for name, content in members.items() if name != "__key__")


def _tokens_of(members: dict[str, Any]) -> int:
    return json.loads(bytes(members["json"]))["tokens"]


def _load_of(members: dict[str, Any]) -> tuple[int, int]:
    record = json.loads(bytes(members["json"]))
    return record["tokens"], record["patches"]


def _length_by_key() -> dict[str, int]:
    from benchmarks.peers.lengths import length_records

    return {record.key: json.loads(record.text)["tokens"] for record in length_records()}


def main() -> None:
    """Run the job on standard input; its numbers are the last line of standard output."""
    import sys

    from benchmarks.peers.loaders import open_loader

    job = json.load(sys.stdin)
    try:
        numbers = FIGURES[job["figure"]](open_loader(job["loader"]), job)
    except Exception as error:
        import traceback

        traceback.print_exc()
        numbers = {"error": f"{type(error).__name__}: {error}"[:300]}
    print(json.dumps(numbers), flush=True)
    os._exit(0)  # some loaders leave threads behind


if __name__ == "__main__":
    main()
