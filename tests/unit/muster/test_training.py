import pytest

from muster.training import last_word


@pytest.mark.parametrize(("leave", "code"), [((), 0), ((0,), 0), ((64,), 64), (("no",), 1)])
def test_who_leaves_has_the_exit_code_that_the_interpreter_gives(
    leave: tuple[object, ...], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert last_word(SystemExit(*leave)) == code
    assert capsys.readouterr().err == ("no\n" if code == 1 else "")


def test_any_other_error_is_told_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert last_word(ValueError("wrong")) == 1
    assert "ValueError: wrong" in capsys.readouterr().err
