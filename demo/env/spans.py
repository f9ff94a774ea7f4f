"""When is the room taken? Spans of time are pairs ``(start, end)`` in minutes."""


def merge(spans):
    """The same time in as few spans as possible, in order; spans that touch become one."""
    merged = []
    for start, end in spans:
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def taken(spans):
    """How many minutes are taken in all."""
    return sum(end - start for start, end in merge(spans))
