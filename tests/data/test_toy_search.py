import random

import pytest

from graphpo_agent.data.toy_search import MOST_NAMES, draw_names


@pytest.mark.parametrize("count", [60, 1024, 1025, 5000, MOST_NAMES])
def test_names_are_different_and_held_out_ones_are_made_of_known_pieces(count):
    train, heldout = draw_names(random.Random(0), count)
    assert len({*train, *heldout}) == count and len(heldout) == count // 6
    known = {piece for name in train for piece in name.split()}
    assert all(len(name.split()) == 2 and known.issuperset(name.split()) for name in heldout)


def test_more_names_are_made_of_more_pieces_and_few_names_of_few():
    def pieces(count):
        return {
            piece
            for names in draw_names(random.Random(0), count)
            for name in names
            for piece in name.split()
        }

    few, some, most = pieces(1000), pieces(2000), pieces(MOST_NAMES)
    assert [len(few), len(some), len(most)] == [64, 100, 256]
    assert few < some < most
