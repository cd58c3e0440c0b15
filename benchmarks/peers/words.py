"""What stands beside the numbers: one line for each result, and which rows the README shows."""

from __future__ import annotations

__all__ = ["EXPLANATIONS", "README_ROWS"]

EXPLANATIONS = [
    "- **1, bytes from disk.** LitData maps its files, copies samples out of the map and checks nothing. We read (a "
    "mapped file that is cut short while it is used kills the process, and shards are what people overwrite), compare "
    "every sample with its crc32c, and hand out views of what was read. A batch is read as a whole and let go of as a "
    "whole, so that two blocks take turns, which the processor's cache holds. The margin over LitData changes from run "
    "to run, with what the machine's other guests leave of that cache; the row in which everybody compares every byte "
    "is the wider one. Reading and summing take half of our time, the sum at the processor's limit. WebDataset and "
    "Energon parse tar headers for every member; HF decodes parquet pages.",
    "- **2, bytes from S3.** Neighbours are read by one request each way up to 16 MB, many at a time, and only what "
    "is wanted. WebDataset starts a command for each shard; MosaicML Streaming and LitData download whole shards "
    "first.",
    "- **3, end to end.** Decoding and the processor take most of the time and are the same for all. Ours differs by "
    "what is around them: pixels are joined in memory that the trainer maps and that is used again, and workers keep "
    "freed memory, so that neither pays for page faults. The peers' packs are joined in the trainer's process, which "
    "with one worker is a second core that ours leaves idle. Compact pixels send bytes and finish them in the "
    "trainer's process.",
    "- **4, fill.** Best fit over a window of 4,096 lengths with the rest carried over, before anything is fetched. "
    "Energon's hooks with first-fit decreasing over a buffer of 1,000 samples come close, and hold these samples in "
    "memory. Loaders without packing pad.",
    "- **5, balance.** Steps are dealt so that ranks get equal sums of language and vision work; other loaders give "
    "every rank what its shards hold.",
    "- **6, resume.** A position in a plan, so nothing is read twice and any number of ranks can go on. MosaicML "
    "Streaming and LitData (without packing) are exact too. Energon restores its buffers by reading them again and "
    "takes another world's state in silence; HF loses what its shuffle buffer held.",
    "- **7, state.** JSON of a position; MosaicML Streaming's is smaller still.",
    "- **8, start.** From 100 shards LitData and we are level, within less than the spread: it opens one file, and "
    "mixes what it finds in it; our shuffle mixes 256 shards from the first batch on, and opens the sixteen that the "
    "batch comes from. Manifest and indexes are two files, of which only the columns that are asked for are looked at, "
    "and what samples cost is in them; so a thousand shards take us less than LitData.",
    "- **9, memory.** Shuffling is arithmetic on positions here, and in MosaicML Streaming and LitData; the others "
    "hold the shuffled samples' bytes.",
    "- **10, damage.** Checksums of every sample in the index: one sample is left out and named. Without them a "
    "flipped byte is trained on, and a damaged header costs the rest of the shard or the run.",
]

README_ROWS = {
    "1 bytes only, local disk, samples/s": "bytes from disk, samples/s",
    "1 the same, every byte compared with a checksum": "the same, every byte compared with a checksum",
    "2 bytes only, S3 + 30 ms, samples/s": "bytes from S3 with 30 ms latency, samples/s",
    "2 requests a sample": "requests a sample",
    "3 decode, encode, pack, 2 workers, tokens/s": "decode, encode, pack, 2 workers, tokens/s",
    "3 with compact pixels, 2 workers, tokens/s": "the same with compact pixels",
    "4 fill of packs of 8,192": "fill of packs",
    "5 imbalance, 64 ranks, LLM / ViT": "load of the busiest of 64 ranks / mean, LLM / ViT",
    "6 first batch after a resume at 90%, s": "first batch after a resume at 90 % of an epoch, s",
    "6 samples re-read, lost, repeated at 90%": "samples re-read, lost, repeated by it",
    "6 lost, repeated with 2 ranks -> 1": "lost, repeated, going on with 1 rank instead of 2",
    "7 state, bytes": "state, bytes",
    "8 first batch, 1,000 shards, s": "first batch from 1,000 shards, s",
    "9 peak memory, shuffle over 10,000 samples, MB": "peak memory, shuffle over 10,000 samples, MB",
    "10 one damaged header": "one damaged header",
    "10 one flipped byte": "one flipped byte",
}
