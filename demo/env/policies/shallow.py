"""Sees that touching spans are kept apart, and stops looking."""


def merge(spans):
    merged = []
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def taken(spans):
    return sum(end - start for start, end in merge(spans))
