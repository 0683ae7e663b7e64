"""The state table of jobs, without any process."""

from __future__ import annotations

import pytest

from fuse_cache.server.jobs import FINAL, NEXT, REMEMBERED_S, Event, Failure, Jobs, Priority, Result, State

KEY = bytes(32)
PATH = (Event.UPLOADED, Event.ACCEPTED, Event.STARTED, Event.BUILT)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def new_jobs(max_queue: int = 10) -> tuple[Jobs, Clock]:
    clock = Clock()
    return Jobs(max_queue=max_queue, now_s=clock), clock


def queue(jobs: Jobs, key: bytes, priority: Priority = Priority.HOST) -> None:
    job = jobs.join(key, key.hex(), priority)
    jobs.apply(job, Event.UPLOADED)
    jobs.apply(job, Event.ACCEPTED)


def test_a_job_goes_through_its_states_and_is_then_forgotten() -> None:
    jobs, _ = new_jobs()
    job = jobs.join(KEY, "a", Priority.HOST)
    for event in PATH[:-1]:
        jobs.apply(job, event)
        assert jobs.find(KEY) is job
    jobs.apply(job, Event.BUILT, result=Result(b"m", b"d", b"c"))
    assert job.finished
    assert jobs.find(KEY) is None


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_an_event_that_the_table_does_not_have_raises_and_changes_nothing(state: State, event: Event) -> None:
    jobs, _ = new_jobs()
    job = jobs.join(KEY, "a", Priority.HOST)
    job.state = state
    if event in NEXT[state]:
        jobs.apply(job, event)
        assert job.state is NEXT[state][event]
    else:
        with pytest.raises(KeyError):
            jobs.apply(job, event)
        assert job.state is state


def test_every_state_but_the_final_ones_can_break() -> None:
    assert {State.DONE, State.FAILED, State.ABANDONED} == FINAL
    assert all(Event.BROKE in NEXT[state] for state in State if state not in FINAL)


def test_one_key_is_one_job_and_listeners_hear_of_every_change() -> None:
    jobs, _ = new_jobs()
    job = jobs.join(KEY, "a", Priority.HOST)
    assert jobs.join(KEY, "b", Priority.HOST) is job
    heard: list[State] = []
    job.listeners.add(lambda: heard.append(job.state))
    for event in PATH:
        jobs.apply(job, event)
    assert heard == [State.CHECKING, State.QUEUED, State.RUNNING, State.DONE]


def test_a_job_without_graph_is_dropped_with_its_last_sender_and_another_is_not() -> None:
    jobs, _ = new_jobs()
    for events, stays in (((), False), ((Event.UPLOADED,), True)):
        job = jobs.join(KEY, "a", Priority.HOST)
        first, second = (lambda: None), (lambda: None)
        for sender in (first, second):
            jobs.listen(job, sender, can_send=True)
        for event in events:
            jobs.apply(job, event)
        jobs.leave(job, first)
        assert jobs.find(KEY) is job
        jobs.leave(job, second)
        assert (jobs.find(KEY) is job) == stays


def test_who_cannot_send_keeps_no_job_alive_and_hears_that_it_is_abandoned() -> None:
    jobs, _ = new_jobs()
    job = jobs.join(KEY, "a", Priority.HOST)
    heard: list[State] = []
    sender = lambda: None  # noqa: E731
    jobs.listen(job, lambda: heard.append(job.state), can_send=False)
    jobs.listen(job, sender, can_send=True)
    jobs.leave(job, sender)
    assert heard == [State.ABANDONED]
    assert jobs.find(KEY) is None
    assert jobs.join(KEY, "b", Priority.HOST) is not job


def test_a_failure_is_remembered_for_its_namespace_only() -> None:
    jobs, _ = new_jobs()
    job = jobs.join(KEY, "a", Priority.HOST, "theirs")
    jobs.apply(job, Event.BROKE, failure=Failure(reason="OP_MISSING", message="m", deterministic=True))
    assert jobs.remembered(KEY, "ours") is None
    assert jobs.remembered(KEY, "theirs") is not None


def test_hosts_go_before_warm_and_within_that_the_first_come() -> None:
    jobs, _ = new_jobs()
    order = [(b"w1", Priority.WARM), (b"h1", Priority.HOST), (b"w2", Priority.WARM), (b"h2", Priority.HOST)]
    for key, priority in order:
        queue(jobs, key, priority)
    last = jobs.find(b"w2")
    assert last is not None
    assert jobs.position(last) == 3
    # A host that joins a warm job takes it along.
    jobs.join(b"w2", "x", Priority.HOST)
    assert jobs.position(last) == 1
    taken = []
    while (job := jobs.next_queued()) is not None:
        jobs.apply(job, Event.STARTED)
        taken.append(job.key)
    assert taken == [b"h1", b"w2", b"h2", b"w1"]


def test_only_deterministic_failures_are_remembered_and_for_a_minute() -> None:
    jobs, clock = new_jobs()
    job = jobs.join(KEY, "a", Priority.HOST)
    jobs.apply(job, Event.BROKE, failure=Failure(reason="WORKER_DIED", message="m"))
    assert jobs.remembered(KEY, "") is None
    job = jobs.join(KEY, "a", Priority.HOST)
    jobs.apply(job, Event.BROKE, failure=Failure(reason="OP_MISSING", message="m", deterministic=True))
    clock.now += 20
    failure = jobs.remembered(KEY, "")
    assert failure is not None
    assert failure.reason == "OP_MISSING"
    assert failure.retry_after_s == pytest.approx(REMEMBERED_S - 20)
    clock.now += 40
    assert jobs.remembered(KEY, "") is None


def test_the_queue_has_an_end_and_running_jobs_do_not_count() -> None:
    jobs, _ = new_jobs(max_queue=2)
    queue(jobs, b"a")
    assert jobs.has_room()
    queue(jobs, b"b")
    assert not jobs.has_room()
    job = jobs.next_queued()
    assert job is not None
    jobs.apply(job, Event.STARTED)
    assert jobs.has_room()
