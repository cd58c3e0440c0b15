"""View: a page to see data, plans and runs; the same as one file, in a terminal, in a notebook.

Enters: an opened plan, refs, a state or a running loader. Leaves: HTML, pictures, or coloured text. Text of datasets is
hostile: `html` escapes everything that is not markup of ours.

Files, in the order the data meets them: `facts`, `catalog` (samples by the index), `sample` (one of them), `pictures`
(their media), `rows`, `steps` (any step of any plan), `runs` (a state, a running loader), `viewer` (all of it, opened
once); `html`, `plots`, `frame` (what pages are made of), `page_*` (values -> HTML); `routes`, `server` (paths -> pages,
HTTP); `shown` (one file, notebooks), `terminal`.
"""

from __future__ import annotations

from vlm_stream.view.page_dataset import stats_page
from vlm_stream.view.runs import Watched, read_ledger
from vlm_stream.view.server import ViewServer
from vlm_stream.view.shown import Shown, show_batch, show_samples, show_step
from vlm_stream.view.terminal import Pictures, choose_pictures, print_sample, print_step
from vlm_stream.view.viewer import Viewer

__all__ = [
    "Pictures",
    "Shown",
    "ViewServer",
    "Viewer",
    "Watched",
    "choose_pictures",
    "print_sample",
    "print_step",
    "read_ledger",
    "show_batch",
    "show_samples",
    "show_step",
    "stats_page",
]
