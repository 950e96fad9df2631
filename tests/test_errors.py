"""Exit codes of the errors a user can cause."""

import pytest

from quantmla.errors import (
    QualityGateFailed,
    QuantMLAError,
    UnsupportedModel,
    UsageError,
    one_line,
    require,
)


def test_exit_codes_are_the_documented_ones():
    kinds = (QuantMLAError, UsageError, UnsupportedModel, QualityGateFailed)
    assert [kind.exit_code for kind in kinds] == [1, 2, 3, 4]
    assert all(issubclass(kind, QuantMLAError) for kind in kinds)


def test_require_raises_the_given_error_only_when_it_must():
    require(True, "never seen")
    with pytest.raises(UsageError, match=r"^seen$"):
        require(False, "seen", UsageError)


def test_errors_of_other_libraries_end_a_sentence_with_their_reason():
    assert (
        one_line(ValueError("field 'x':\n  must be\n a number ")) == "field 'x': must be a number"
    )
    assert one_line(KeyError("foo")) == "there is no 'foo'"
    assert one_line(ValueError()) == "ValueError"
