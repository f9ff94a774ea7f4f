from spans import merge, taken


def test_nothing():
    assert merge([]) == []


def test_apart():
    assert merge([(0, 10), (20, 30)]) == [(0, 10), (20, 30)]


def test_overlap():
    assert merge([(0, 10), (5, 15)]) == [(0, 15)]


def test_touching():
    assert merge([(0, 10), (10, 20)]) == [(0, 20)]


def test_any_order():
    assert merge([(20, 30), (0, 10), (8, 12)]) == [(0, 12), (20, 30)]


def test_one_inside_another():
    assert taken([(0, 60), (10, 20)]) == 60
