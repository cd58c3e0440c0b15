"""Conformance: does a trainer train on exactly what our own loop would have given it?

A trainer under test is a function `train(run)` in a module that every process can import. It builds what it needs from
the `Run`, trains, and knows nothing of the checks:

    # my_trainer.py
    def train(run):
        loader, model = run.loader(), run.model()
        run.tell(length=len(loader), total_steps=loader.steps_per_epoch)
        if run.resume:
            ...                                  # load the newest checkpoint from run.folder
        for number, batch in enumerate(loader, 1):
            ...                                  # forward, backward; a step after run.accumulation batches
            if number == run.save_after * run.accumulation:
                ...                              # save into run.folder
        for _ in range(run.evaluations):
            ...                                  # model.eval(), all of run.eval_loader(), model.train()

`check("my_trainer:train", folder)` runs it in real processes (some of which are killed with SIGKILL), compares what the
model was really given with what it should have been given, and returns a `Report` or raises `ConformanceError`, whose
text names rank, step and key of what differs.

Files: `run.py` (toy shards, what a trainer is given, hooks on model and optimizer, what they wrote), `launch.py` and
`__main__.py` (processes), `compare.py` (our own loop, what differs from it), `check.py` (all of it).
"""

from vlm_stream.testing.conformance.check import CHECKS, Report, check
from vlm_stream.testing.conformance.compare import ConformanceError
from vlm_stream.testing.conformance.launch import LaunchError, launch
from vlm_stream.testing.conformance.run import Records, Run, make_data
