"""The step after the last one of a dry run, from its log: a step whose storages follow those of the one before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kohya_ext.dry_run.events import Event


def repeated(events: Sequence[Event], start: int, storages: int) -> list[Event] | None:
    """Return the events from ``start`` to the end of a log once more, with new storages numbered from ``storages``.

    In the step that follows, the storages that the last one has left replace those that it has freed. None if these are not
    of the same sizes: the two steps differ then.
    """
    last = events[start:]
    allocated = {event.storage: event.bytes for event in last if event.bytes > 0}
    freed = {event.storage: -event.bytes for event in last if event.bytes < 0}
    left = [storage for storage in allocated if storage not in freed]
    replaced = [event.storage for event in events[:start] if event.bytes > 0 and event.storage in freed]
    if [allocated[storage] for storage in left] != [freed[storage] for storage in replaced]:
        return None
    numbers = dict(zip(replaced, left, strict=True)) | {storage: storages + place for place, storage in enumerate(allocated)}
    return [*_numbered(last, numbers)]


def _numbered(events: Sequence[Event], numbers: dict[int, int]) -> Iterator[Event]:
    return (event._replace(storage=numbers.get(event.storage, event.storage)) for event in events)
