"""Full collections wait for the end of a step, but not forever."""

import gc

from megatron_rl.rollout import garbage_collection


class Node:
    def __init__(self):
        self.itself = self


def test_a_full_collection_waits_but_a_step_without_end_does_not_fill_the_memory(monkeypatch):
    generations, before = [], gc.get_threshold()
    monkeypatch.setattr(garbage_collection, "MIDDLE_PER_FULL", 4)
    gc.callbacks.append(
        note := lambda phase, info: phase == "start" and generations.append(info["generation"])
    )
    try:
        restore = garbage_collection.postpone_full_collections()
        generations.clear()
        kept = [[] for _ in range(100 * garbage_collection.YOUNG * garbage_collection.MIDDLE)]
        for _ in range(10_000):
            Node()
    finally:
        gc.callbacks.remove(note)
        restore()
    assert gc.get_threshold() == before and not gc.get_freeze_count()
    assert generations.count(1) >= 4 * generations.count(2) > 0
    assert len(kept) == 100 * garbage_collection.YOUNG * garbage_collection.MIDDLE
    assert sum(type(each) is Node for each in gc.get_objects()) < 10_000
