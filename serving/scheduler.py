"""Which sequences the next step computes. Plain Python; knows no device and no HTTP.

First come, first served. Decoding sequences always go on; beside them a step takes prompt tokens up
to a budget. When the KV pool runs out, the youngest running sequence gives up its blocks and waits
at the head of the queue; its tokens so far are computed again, none is lost or sent twice.
"""

from __future__ import annotations

from collections import deque

from serving.core import FinishReason
from serving.kv_cache import BlockPool
from serving.sequence import Batch, PrefillChunk, Sequence, Status


class Scheduler:
    """The queue, the running sequences, their lanes and KV blocks."""

    def __init__(self, pool: BlockPool, *, lanes: int, prefill_budget: int) -> None:
        self.pool = pool
        self.prefill_budget = prefill_budget  # prompt tokens a step
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.preemptions = 0
        self.blocked = False  # whether the last step left someone waiting
        self._free_lanes = list(range(lanes - 1, -1, -1))
        self._lanes = lanes

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def free_lanes(self) -> int:
        return len(self._free_lanes)

    @property
    def lanes(self) -> int:
        return self._lanes

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> Batch:
        """The next step's work. Marks it as dispatched: the caller must dispatch and collect it."""
        decodes = self._schedule_decodes()
        batch = Batch(prefills=tuple(self._schedule_prefills()), decodes=tuple(decodes))
        self.blocked = bool(self.waiting)
        for sequence in batch.sampling:
            sequence.sampled += 1
        for sequence in batch.sequences:
            sequence.in_flight += 1
        return batch

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence. It keeps its resources until no step in flight holds it (`settle`)."""
        assert sequence.finish_reason is None, "a sequence finishes once"
        sequence.finish_reason = reason
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
            self.running.append(sequence)  # so that settle finds it like any other
        sequence.status = Status.FINISHED

    def collected(self, batch: Batch) -> None:
        """The step's tokens have been read: it no longer holds its sequences."""
        for sequence in batch.sequences:
            sequence.in_flight -= 1

    def settle(self) -> list[Sequence]:
        """Free what finished and preempted sequences hold, where no step in flight uses it.

        Returns the finished ones that are now gone, each exactly once.
        """
        gone = []
        for sequence in [s for s in reversed(self.running) if not s.in_flight]:
            if sequence.status is Status.FINISHED:
                self._leave(sequence)
                gone.append(sequence)
            elif sequence.status is Status.PREEMPTING:
                self._leave(sequence)
                sequence.status = Status.WAITING
                sequence.computed = 0
                self.waiting.appendleft(sequence)
        return gone

    def check_integrity(self) -> None:
        """Blocks and lanes are free or held by one running sequence; the queue holds nothing."""
        self.pool.check_integrity([s.table for s in (*self.running, *self.waiting)])
        held = [s.lane for s in self.running if s.lane is not None]
        assert sorted([*self._free_lanes, *held]) == list(range(self._lanes)), "lanes lost"
        for sequence in self.waiting:
            assert sequence.lane is None and not sequence.table.blocks and not sequence.in_flight

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.table)
        if sequence.lane is not None:
            self._free_lanes.append(sequence.lane)
            sequence.lane = None

    def _schedule_decodes(self) -> list[Sequence]:
        chosen = []
        for sequence in list(self.running):
            if sequence.status is not Status.RUNNING or not sequence.decodes:
                continue
            if not sequence.wants_more:
                continue  # its last token is in flight
            if self._grow_or_preempt(sequence):
                chosen.append(sequence)
        # A later sequence's victim may have been chosen before it.
        chosen = [sequence for sequence in chosen if sequence.status is Status.RUNNING]
        for sequence in chosen:
            sequence.computed += 1
        return chosen

    def _grow_or_preempt(self, sequence: Sequence) -> bool:
        """Get the block for one more token; otherwise see to it that one becomes free."""
        if self.pool.can_grow(sequence.table, sequence.computed + 1):
            self.pool.grow(sequence.table, sequence.computed + 1)
            return True
        if not any(s.status in (Status.PREEMPTING, Status.FINISHED) for s in self.running):
            youngest = [s for s in self.running if s.status is Status.RUNNING][-1]
            youngest.status = Status.PREEMPTING
            self.preemptions += 1
        return False

    def _schedule_prefills(self) -> list[PrefillChunk]:
        budget, chunks = self.prefill_budget, []
        for sequence in self.running:
            if budget and sequence.status is Status.RUNNING and not sequence.decodes:
                chunks.append(self._next_chunk(sequence, budget))
                budget -= chunks[-1].length
        while budget and self.waiting and self._admit(self.waiting[0]):
            chunks.append(self._next_chunk(self.running[-1], budget))
            budget -= chunks[-1].length
        return chunks

    def _admit(self, sequence: Sequence) -> bool:
        """Move the head of the queue to running, where there is a lane and room for its tokens."""
        target = len(sequence.token_ids)
        # One more block for each running sequence, lest the newcomer be preempted at once.
        reserve = len(self.running) * self.pool.block_size
        if not self._free_lanes or not self.pool.can_grow(sequence.table, target + reserve):
            return False
        if any(s.status is Status.PREEMPTING for s in self.running):
            return False  # whoever needs those blocks comes first
        self.waiting.popleft()
        self.pool.grow(sequence.table, target)
        sequence.lane = self._free_lanes.pop()
        sequence.prefill_target = target
        sequence.sampled = sequence.output_length
        sequence.status = Status.RUNNING
        self.running.append(sequence)
        return True

    def _next_chunk(self, sequence: Sequence, budget: int) -> PrefillChunk:
        length = min(budget, sequence.prefill_target - sequence.computed)
        start = sequence.computed
        sequence.computed += length
        scored = _to_score(sequence, start, start + length)
        return PrefillChunk(sequence, start, length, last=sequence.decodes, scored=scored)


def _to_score(sequence: Sequence, start: int, end: int) -> range:
    """The positions of a chunk whose next prompt token is to be scored; each is, once.

    After a preemption the prompt is computed again, but no position is scored again.
    """
    if sequence.request.sampling.prompt_logprobs is None:
        return range(0)
    first = max(start, sequence.scored)
    last = max(first, min(end, sequence.prompt_length - 1))
    sequence.scored = last
    return range(first, last)
