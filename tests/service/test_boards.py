"""Boards that fail cost no batch: each loader then builds its own."""

import threading

import pytest

from tests.dispatch.jobs import Numbers, plan
from tests.service.conftest import raw_loader
from vlm_stream.dispatch import Dispatcher, DispatchOptions, ProcessPool, SharedPool
from vlm_stream.errors import ConfigError


class FailingBoard:
    """Fails in one of its methods; the batches of even steps are claimed by another loader that never posts them."""

    def __init__(self, method):
        self.method, self.released = method, []

    def _fail(self, method):
        if method == self.method:
            raise OSError(24, "Too many open files at s3://me:hidden@host")

    def claim(self, key):
        self._fail("claim")
        return int(key.split("-")[1]) % 2 == 1

    def post(self, key, finished):
        self._fail("post")

    def release(self, key):
        self.released.append(key)
        self._fail("release")

    def look(self, key):
        self._fail("look")
        return "gone"

    def close(self):
        self._fail("close")


def fail():
    raise ValueError("a batch fails")


def run(board, acts):
    """Return the numbers of the batches up to the first error, with that; None in its place: the run hangs."""
    dispatcher = Dispatcher(
        plan(20),
        lambda listener: SharedPool(lambda own: ProcessPool(Numbers(acts), own, start_method="fork"), listener, board),
        DispatchOptions(num_workers=2),
    )
    found, ended = [], []

    def drive():
        try:
            found.extend(delivery.batch for _, delivery in dispatcher)
            ended.append("")
        except Exception as error:
            ended.append(str(error))

    thread = threading.Thread(target=drive, daemon=True)
    thread.start()
    thread.join(120)  # a run that hangs must fail, not the machine
    restarts = dispatcher.num_restarts
    dispatcher.close()
    assert not any("said" in batch for batch in found)
    return [batch["number"] for batch in found], ended[0] if ended else None, restarts


@pytest.mark.parametrize("method", ["claim", "post", "look", "close"])
def test_an_error_of_a_board_costs_no_batch_and_no_worker(method, caplog):
    board = FailingBoard(method)
    assert run(board, {}) == (list(range(20)), "", 0)
    assert caplog.text.count("the board on which batches are shared fails (OSError") == 1
    assert "hidden" not in caplog.text
    if method == "post":  # nobody waits for what does not come
        assert {key.split("-")[1] for key in board.released} == {str(number) for number in range(20)}


def test_a_batch_that_fails_is_told_whatever_its_board_does(caplog):
    found, error, restarts = run(FailingBoard("release"), {7: fail})
    assert (found, restarts) == (list(range(7)), 0)
    assert "a batch fails" in error
    assert "the board on which batches are shared fails" in caplog.text


def test_each_rank_has_a_board_on_ray_that_other_runs_of_its_plan_share(toy_shards, monkeypatch):
    """One for all ranks would keep too few batches, and answer too few that wait."""
    groups = []

    def no_pool(*_arguments, **_options):
        raise ConfigError("there is no cluster")

    monkeypatch.setattr("vlm_stream.iteration.RayBoard", lambda _builders, group, _peers: groups.append(group))
    monkeypatch.setattr("vlm_stream.iteration.RayPool", no_pool)
    for rank in (0, 1, 0):
        loader = raw_loader(toy_shards, builders={"pool": "any"}, rank=rank, world_size=2)
        with pytest.raises(ConfigError, match="there is no cluster"):
            next(iter(loader))
    assert groups[0] == groups[2] != groups[1]
