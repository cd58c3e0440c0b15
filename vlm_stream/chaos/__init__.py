"""Chaos: does a run deliver its plan, each sample once, whatever happens to its processes, files and servers?

Enters: a recipe and a seed. Leaves: a table of faults: how often, survived, lost, repeated, silent, the longest wait.
The recipe runs in real trainer processes without a model; faults are drawn from the seed. Destructive ones happen to
copies of the user's files, or in a proxy before the user's server.

In the order in which things happen: `stage.py` (copies, the proxy, what trainers are told), `trainer.py` (one rank, in
a process of its own), `crew.py` (all ranks in lock step; kills and resumes), `checker.py` (what came against the plan),
`faults.py` (what can happen), `run.py` (draws them and counts), `proxy.py` (spoils what a server sends).
"""

from vlm_stream.chaos.proxy import Fault, FaultProxy
from vlm_stream.chaos.run import ChaosOptions, Report, Row, run_chaos
from vlm_stream.chaos.trainer import digest_of

__all__ = ["ChaosOptions", "Fault", "FaultProxy", "Report", "Row", "digest_of", "run_chaos"]
