"""Counts how many spans are open at each edge; time is taken while the count is not zero."""


def merge(spans):
    # At the same minute, what opens comes before what closes: touching spans stay one.
    edges = sorted([(start, -1) for start, _ in spans] + [(end, 1) for _, end in spans])
    merged, opened = [], 0
    for at, step in edges:
        if opened == 0:
            begin = at
        opened -= step
        if opened == 0:
            merged.append((begin, at))
    return merged


def taken(spans):
    return sum(end - start for start, end in merge(spans))
