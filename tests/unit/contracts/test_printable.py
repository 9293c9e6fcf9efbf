from muster.contracts.printable import spelt_out


def test_what_can_be_printed_stays_as_it_is() -> None:
    assert spelt_out("größe 🎉\nof two lines") == "größe 🎉\nof two lines"


def test_what_a_terminal_would_obey_is_spelt_out() -> None:
    assert spelt_out("\x1b[2J\x9b1m\r\u202e\udcff") == r"\x1b[2J\x9b1m\r\u202e\udcff"
