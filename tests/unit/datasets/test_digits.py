import hashlib
import sys

import msgspec
import pytest

from muster.datasets.digits import digits
from muster.datasets.errors import DigitsUnavailable
from muster.datasets.samples import LabelledSample

pytestmark = pytest.mark.slow


def sha256(lines: list[bytes]) -> str:
    return hashlib.sha256(b"\n".join(lines)).hexdigest()


@pytest.mark.slow
def test_the_digits_of_a_seed_are_the_same_bytes_for_ever() -> None:
    facts, lines, held_out = digits(shards=8, seed=0)
    assert (facts.samples, facts.held_out, facts.shards) == (1438, 359, 8)
    assert sha256(list(lines)) == "40ddd5c470a1918bd32957ceac4f8eddb376c9239f52c18dcd631f07bdd99641"
    assert (
        sha256(list(held_out)) == "4308a8bdd48c65856771512cda86f7ef5523f35ef45b1fbd947fd5cd41964ce6"
    )


@pytest.mark.slow
def test_another_seed_holds_out_others_of_the_same_images() -> None:
    one, other = digits(shards=8, seed=1), digits(shards=8, seed=2)
    assert list(one.held_out) != list(other.held_out)
    assert sorted([*one.lines, *one.held_out]) == sorted([*other.lines, *other.held_out])


def test_a_line_holds_sixty_four_shades_between_zero_and_one() -> None:
    contents = digits(shards=8, seed=0)
    decoder = msgspec.json.Decoder(LabelledSample)
    samples = [decoder.decode(line) for line in contents.lines]
    assert {len(sample.x) for sample in samples} == {64}
    assert {sample.y for sample in samples} == set(range(10))
    assert (min(min(s.x) for s in samples), max(max(s.x) for s in samples)) == (0.0, 1.0)


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DigitsUnavailable, match=r"pip install 'muster-train\[digits\]'"):
        digits(shards=8, seed=0)
