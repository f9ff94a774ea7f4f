"""Sorts first and never lets a span shrink."""


def merge(spans):
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def taken(spans):
    return sum(end - start for start, end in merge(spans))
