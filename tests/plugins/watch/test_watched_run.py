"""The feed of a watched run notifies all current listeners once per batch of new entries."""

import asyncio

from pipelinerl.plugins.watch.watched_run import Feed
from tests.patience import PATIENCE_S


async def test_listeners_of_an_event_feed_are_notified_once_per_batch_of_new_entries():
    feed = Feed(0)
    with feed.listener() as first, feed.listener() as second:
        feed.ring()
        await asyncio.sleep(0)
        assert not first.is_set() and not second.is_set(), "no entry was added"
        place = feed.place
        feed.put("event", {"kind": "x"})
        feed.put("event", {"kind": "y"})
        assert not first.is_set(), "ring wakes listeners of new entries"
        await asyncio.to_thread(feed.ring)
        await asyncio.wait_for(asyncio.gather(first.wait(), second.wait()), PATIENCE_S)
        entries = feed.after(place)
        assert entries is not None and len(entries) == 2
        first.clear()
        feed.ring()
        await asyncio.sleep(0)
        assert not first.is_set(), "ring does not repeat a wake-up"
